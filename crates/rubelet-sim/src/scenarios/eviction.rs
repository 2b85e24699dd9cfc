//! A node that runs low on memory.

use std::sync::Arc;

use crate::{
    play::{
        Play, minutes,
        predicates::{running, stored, stored_phase},
        seconds,
    },
    script::PodScript,
    simulation::SimState,
};

/// The running containers of the pod use this much more.
fn hog(sim: &mut SimState, pod: &str, bytes: u64) {
    let ids = sim.runtime.running().filter(|container| container.pod.name == pod).map(|container| container.id.clone());
    for id in ids.collect::<Vec<_>>() {
        sim.memory.hogs.insert(id, bytes);
    }
}

fn message_of(play: &Play, pod: &str) -> String {
    play.look(|sim| {
        let stored = stored(sim, pod).map(Arc::as_ref).cloned().unwrap_or_default();
        let status = &stored["status"];
        format!("{} {}", status["reason"].as_str().unwrap_or_default(), status["message"].as_str().unwrap_or_default())
    })
}

fn pods(play: &mut Play) {
    for name in ["web", "hog", "db"] {
        play.create(PodScript::pod(name).container("app", "run")).until(&running(name));
    }
}

#[test]
fn pod_that_uses_most_memory_is_evicted_and_others_stay() {
    for seed in 700..704 {
        let mut play = Play::clustered(seed);
        pods(&mut play);
        play.change(|sim| hog(sim, "web", 100 << 20)).change(|sim| hog(sim, "hog", (6 << 30) + (900 << 20)));
        play.until(&stored_phase("hog", "Failed"));
        let message = message_of(&play, "hog");
        assert!(
            message.starts_with("Evicted The node was low on resource: memory. Threshold quantity: 512Mi"),
            "{message}"
        );
        play.forget("hog").wait(minutes(2)).expect_running("web").expect_running("db");
    }
}

#[test]
fn agent_killed_during_an_eviction_evicts_no_second_pod() {
    for seed in 704..712 {
        let mut play = Play::clustered(seed);
        pods(&mut play);
        play.change(|sim| hog(sim, "hog", (6 << 30) + (900 << 20)));
        play.wait(seconds(seed - 700)).crash_agent().wait(seconds(2)).start_agent();
        play.until(&stored_phase("hog", "Failed")).forget("hog").wait(minutes(2));
        play.expect_running("web").expect_running("db").expect_starts("web", 1).expect_starts("db", 1);
    }
}
