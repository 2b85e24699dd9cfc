//! The cost of one event in the core, by the number of pods.
//!
//! `cargo xtask cost` runs this under callgrind, which counts instructions: the same number on a busy machine. Each round, one
//! running pod gets a hint, a look and a plan, and a new snapshot is published. Only `rounds` is counted.

#![expect(clippy::expect_used, reason = "it ends where it cannot go on")]

#[path = "support/node.rs"]
mod node;

use node::{TestNode, uid};
use rubelet_core::event::Event;

const ROUNDS: usize = 20;

fn main() {
    let pods = std::env::args().nth(1).and_then(|text| text.parse().ok()).expect("the number of pods");
    let mut node = TestNode::new(pods);
    node.lists(pods);
    node.happens(Event::Due);
    node.settle();
    rounds(&mut node, pods);
    println!("{ROUNDS} rounds");
}

#[inline(never)]
fn rounds(node: &mut TestNode, pods: usize) {
    for round in 0..ROUNDS {
        node.happens(Event::Hint { pod: uid(round * pods / ROUNDS) });
        node.settle();
    }
}
