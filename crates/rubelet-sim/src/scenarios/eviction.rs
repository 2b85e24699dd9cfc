//! A node that runs low on memory or on space for images, and pods that exceed a limit on local storage.

use std::sync::Arc;

use serde_json::json;

use crate::{
    agent::PRESSURE_TRANSITION,
    faults::FaultRates,
    play::{
        Play, Within, minutes,
        predicates::{Predicate, calling, is_called, running, stored, stored_phase},
        seconds,
    },
    runtime::store::{IMAGE_BYTES, Pull},
    script::{EmptyDir, PodScript},
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

#[test]
fn pod_that_uses_most_memory_is_evicted_in_time_while_the_runtime_hangs() {
    for seed in 726..730 {
        let mut play = Play::clustered(seed);
        pods(&mut play);
        // Longer than anything that the runtime has said is taken for true.
        play.storm(FaultRates { hang: 1.0, ..FaultRates::default() }).wait(minutes(6));
        play.change(|sim| hog(sim, "hog", MUCH)).wait(seconds(15)).expect(&calling("StopContainer", "hog"));
        // Others follow it after half a minute, as upstream's: a stop that hangs frees no memory.
        play.calm().until(&stored_phase("hog", "Failed")).wait(minutes(2));
    }
}

/// Over the threshold of the node, however many other pods run.
const MUCH: u64 = (6 << 30) + (900 << 20);

#[test]
fn pod_of_low_priority_is_evicted_for_one_of_high_priority() {
    let mut play = Play::clustered(712);
    let pod = |name: &str| PodScript::pod(name).container("app", "run");
    play.create(pod("high").priority(100))
        .create(pod("low").priority(-1))
        .create(pod("critical").priority(2_000_000_000));
    play.until(&running("high")).until(&running("low")).until(&running("critical"));
    play.change(|sim| hog(sim, "high", MUCH)).until(&stored_phase("low", "Failed"));
    play.expect_running("critical").until(&stored_phase("high", "Failed")).wait(minutes(2)).expect_running("critical");
}

#[test]
fn volume_over_its_limit_ends_its_pod_though_the_agent_is_killed() {
    let limited =
        |name: &str| PodScript::pod(name).container("app", "run").empty_dir(EmptyDir::Disk).size_limit("64Ki");
    for seed in 713..723 {
        let mut play = Play::clustered(seed);
        play.create(limited("small")).create(limited("big")).until(&running("small")).until(&running("big"));
        play.apply(limited("static")).until(&running("static"));
        for (pod, bytes) in [("small", 64 << 10), ("big", (64 << 10) + 1), ("static", 80 << 10)] {
            play.change(|sim| fill(sim, pod, bytes));
        }
        play.wait(seconds(seed - 713)).crash_agent().wait(seconds(1)).start_agent();
        play.until(&stored_phase("big", "Failed"));
        let message = "Evicted Usage of EmptyDir volume \"scratch\" exceeds the limit \"64Ki\". ";
        assert_eq!(message_of(&play, "big"), message);
        // Static pods are critical.
        play.settle(minutes(2)).expect_running("small").expect_running("static");
    }
}

fn fill(sim: &mut SimState, pod: &str, bytes: usize) {
    let uid = sim.runtime.running().find(|found| is_called(&found.pod.name, pod)).map(|found| found.pod.uid.clone());
    sim.fill_volume(&uid.expect("it runs"), bytes);
}

#[test]
fn best_effort_pod_is_rejected_under_memory_pressure_and_accepted_after_it() {
    let mut play = Play::clustered(723);
    pods(&mut play);
    play.change(|sim| hog(sim, "hog", MUCH)).until(&stored_phase("hog", "Failed"));
    let requests = json!({ "requests": { "memory": "32Mi" } });
    play.create(PodScript::from("burstable").field("resources", requests)).until(&running("burstable"));
    play.create("late").until(&stored_phase("late", "Failed")).expect_starts("late", 0);
    assert_eq!(message_of(&play, "late"), "Evicted Pod was rejected: The node had condition: [MemoryPressure]. ");
    play.wait(PRESSURE_TRANSITION + seconds(15)).expect_starts("late", 0);
    play.recreate(PodScript::from("late").version(2)).until(&running("late")).settle(minutes(2));
}

#[test]
fn unused_image_is_deleted_before_a_pod_is_evicted() {
    let mut play = Play::clustered(724);
    play.publish("reg.test/old:v1", Pull::After(seconds(1)));
    play.create(PodScript::from("old").image("reg.test/old:v1")).create("web");
    play.until(&running("old")).until(&running("web")).delete("old", Within::ItsOwnTime).wait(minutes(8));
    // Room for five, two of them images.
    play.change(|sim| sim.runtime.image_fs_others = 3 * IMAGE_BYTES);
    play.until(&Predicate::new("the image is deleted", |sim| sim.runtime.images.len() == 1));
    play.wait(minutes(1)).expect_running("web").expect_starts("web", 1);
    // No image is left to delete.
    play.change(|sim| sim.runtime.image_fs_others = 4 * IMAGE_BYTES).until(&stored_phase("web", "Failed"));
    let message = message_of(&play, "web");
    assert!(message.starts_with("Evicted The node was low on resource: ephemeral-storage. "), "{message}");
    play.settle(minutes(2));
}
