//! The memory of a running pod.
//!
//! `cargo run --release -p rubelet-core --example pods_at_rest`: an agent that finds API pods running, sends their status and
//! receives it from the watch. The result is the growth of its resident memory, divided by the pods. It includes the decoded
//! pods that the API source keeps.

#![expect(clippy::expect_used, reason = "it ends where it cannot go on")]

#[path = "support/node.rs"]
mod node;

use std::fs;

use node::TestNode;
use rubelet_core::event::Event;

const PODS: usize = 500;

fn main() {
    let mut node = TestNode::new(PODS);
    let empty = resident_kib();
    node.lists(PODS);
    let heard = resident_kib();
    node.happens(Event::Due);
    node.settle();
    let rest = resident_kib();
    let per_pod = |kib: u64| format!("{:.1} KiB", (kib - empty) as f64 / PODS as f64);
    println!("per pod: heard of {}, running and told {}", per_pod(heard), per_pod(rest));
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
