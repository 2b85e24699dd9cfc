//! Container restarts and back-off.

use jiff::SignedDuration;

use crate::{
    play::{
        Play, minutes,
        predicates::{running, started, waiting},
        seconds,
    },
    script::PodScript,
};

fn crashing() -> PodScript {
    PodScript::pod("web").container("app", "exit 1 after 1s")
}

#[test]
fn a_crashing_container_waits_longer_each_time() {
    let mut play = Play::seeded(20);
    play.apply(crashing()).until(&started("web", 3)).until(&waiting("web", "CrashLoopBackOff"));
    // 0 s, 10 s, 20 s, 40 s, 80 s: five minutes have room for a sixth start, not for a seventh.
    play.wait(seconds(200)).expect_starts("web", 6).settle(minutes(1));
}

#[test]
fn a_jump_of_the_wall_clock_ends_no_back_off() {
    for (seed, hours) in [(21, 5), (22, -5)] {
        let mut play = Play::seeded(seed);
        play.apply(crashing()).until(&started("web", 5));
        play.jump_wall_clock(SignedDuration::from_hours(hours)).wait(seconds(60)).expect_starts("web", 5);
        play.wait(seconds(40)).expect_starts("web", 6).settle(minutes(1));
    }
}

#[test]
fn a_flaky_container_runs_in_the_end_and_its_count_is_right() {
    let mut play = Play::seeded(23);
    play.apply(PodScript::pod("web").container("app", "flaky 3")).settle(minutes(5));
    play.expect_running("web").expect_starts("web", 4).expect_restart_count("web", 3);
}

#[test]
fn a_container_killed_for_memory_is_started_again() {
    let mut play = Play::seeded(24);
    play.apply("web").until(&running("web"));
    play.change(|sim| {
        let id = sim.runtime.running().next().map(|found| found.id.clone()).expect("the pod runs");
        sim.exit_container(&id, 137, "OOMKilled");
    });
    play.settle(minutes(2)).expect_running("web").expect_starts("web", 2).expect_restart_count("web", 1);
}

#[test]
fn missing_executable_keeps_only_its_own_pod_waiting() {
    let mut play = Play::seeded(25);
    play.apply(PodScript::pod("broken").container("app", "missing")).apply("web");
    play.until(&waiting("broken", "CrashLoopBackOff")).settle(minutes(2)).expect_running("web");
}

#[test]
fn crashing_container_restarts_no_neighbour() {
    let mut play = Play::seeded(26);
    play.apply(PodScript::pod("web").container("good", "run").container("bad", "exit 1 after 1s"));
    play.until(&started("web", 5)).settle(minutes(2));
    let (_, history) =
        play.look(|sim| sim.rules.history("web").next().map(|(uid, pod)| (uid.clone(), pod.clone()))).unwrap();
    assert_eq!(history.containers["good"].starts, 1);
}
