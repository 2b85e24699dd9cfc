//! `kill -9` of the agent at every critical point.

use serde_json::json;

use crate::{
    play::{
        Play, minutes,
        predicates::{self, Predicate, calling, gone, running, sandboxed, started, stopping},
        seconds,
    },
    runtime::store::Pull,
    script::{EmptyDir, PodScript, Policy},
};

/// The agent dies when `predicate` holds, restarts, and the pod was started exactly once.
#[track_caller]
fn dies_on_the_way_up(seeds: std::ops::Range<u64>, predicate: fn() -> Predicate) {
    for seed in seeds {
        let mut play = Play::seeded(seed);
        play.publish("reg.test/web:v1", Pull::After(seconds(5)));
        play.apply(PodScript::from("web").image("reg.test/web:v1")).until(&predicate()).crash_agent().wait(seconds(3));
        play.start_agent().settle(minutes(3));
        play.expect_running("web").expect_starts("web", 1).expect_restart_count("web", 0);
    }
}

#[test]
fn agent_killed_during_pull_starts_container_once() {
    dies_on_the_way_up(40..44, || calling("PullImage", "web"));
}

#[test]
fn agent_killed_during_sandbox_start_starts_container_once() {
    dies_on_the_way_up(44..48, || calling("RunPodSandbox", "web"));
}

#[test]
fn agent_killed_after_sandbox_creation_starts_container_once() {
    dies_on_the_way_up(48..52, || sandboxed("web"));
}

#[test]
fn agent_killed_during_creation_starts_container_once() {
    dies_on_the_way_up(52..56, || calling("CreateContainer", "web"));
}

#[test]
fn a_start_that_is_cut_off_is_made_again_as_the_same_attempt() {
    let mut cut_off = 0;
    for seed in 56..72 {
        let mut play = Play::seeded(seed);
        play.apply("web").until(&calling("StartContainer", "web")).crash_agent().wait(seconds(3)).start_agent();
        play.settle(minutes(3)).expect_running("web").expect_restart_count("web", 0);
        let starts = starts_expected(&play, 1);
        cut_off += starts - 1;
        play.expect_starts("web", starts);
    }
    assert!(cut_off >= 3, "in {cut_off} of 16 the agent dies before the program has begun");
}

/// A start interrupted by the agent's death is repeated once.
fn starts_expected(play: &Play, otherwise: u32) -> u32 {
    let was_cut_off = play.trace().iter().any(|line| line.ends_with("its start was cut off"));
    otherwise + u32::from(was_cut_off)
}

#[test]
fn agent_killed_during_stop_finishes_it_after_restart() {
    for seed in 60..64 {
        let mut play = Play::seeded(seed);
        play.apply(PodScript::pod("web").grace_secs(20).container("app", "stubborn")).until(&running("web"));
        play.remove("web").until(&stopping("web")).wait(seconds(5)).crash_agent().wait(seconds(5)).start_agent();
        play.settle(minutes(3)).expect_gone("web").expect_starts("web", 1);
    }
}

#[test]
fn agent_killed_during_sandbox_removal_leaves_nothing() {
    for (seed, method) in [(64, "StopPodSandbox"), (65, "RemovePodSandbox"), (66, "RemoveContainer")] {
        let mut play = Play::seeded(seed);
        play.apply("web").until(&running("web")).remove("web").until(&calling(method, "web")).crash_agent();
        play.start_agent().settle(minutes(3)).expect_gone("web");
    }
}

#[test]
fn a_restart_touches_no_running_pod() {
    let mut play = Play::seeded(67);
    play.apply("a").apply("b").settle(minutes(2));
    for _ in 0..5 {
        play.crash_agent().wait(seconds(7)).start_agent().wait(seconds(31));
    }
    play.settle(minutes(2)).expect_starts("a", 1).expect_starts("b", 1).expect_restart_count("a", 0);
}

#[test]
fn manifest_removed_while_agent_is_down_removes_its_pod() {
    let mut play = Play::seeded(68);
    play.apply("web").until(&running("web")).crash_agent().remove("web").wait(minutes(1)).expect(&running("web"));
    play.start_agent().until(&gone("web")).settle(minutes(2)).expect_starts("web", 1);
}

#[test]
fn manifest_edited_while_agent_is_down_replaces_its_pod() {
    let mut play = Play::seeded(69);
    play.apply(PodScript::pod("web").grace_secs(30).container("app", "slow 20s")).until(&running("web")).crash_agent();
    play.apply(PodScript::from("web").version(2)).wait(minutes(1)).start_agent().settle(minutes(3));
    play.expect_running("web").expect_starts("web", 2);
}

#[test]
fn mounts_of_previous_process_are_unmounted() {
    let mut play = Play::seeded(72);
    play.apply(PodScript::from("web").empty_dir(EmptyDir::Memory)).until(&running("web")).crash_agent().runtime_down();
    play.start_agent().wait(seconds(5)).remove("web").wait(seconds(5)).runtime_up().settle(minutes(2));
}

#[test]
fn sub_path_is_unmounted_with_its_pod_despite_agent_crashes() {
    let part = json!([{ "name": "scratch", "mountPath": "/scratch", "subPath": "a/b" }]);
    let pod = PodScript::from("web").empty_dir(EmptyDir::Disk).field("volumeMounts", part);
    for nth in 0..40 {
        let mut play = Play::seeded(7_300 + nth);
        play.supervised().change(|sim| sim.agent_dies_after = Some(nth));
        play.apply(pod.clone()).until(&running("web")).wait(seconds(2)).remove("web").settle(minutes(3));
        let bound =
            play.trace().iter().any(|line| line.contains("bind ") && line.ends_with("/volume-subpaths/scratch/app/0"));
        assert!(bound, "the container saw the whole volume");
        play.expect_gone("web").expect_starts("web", 1);
    }
}

#[test]
fn restart_counts_outlive_the_agent() {
    let mut play = Play::seeded(70);
    play.apply(PodScript::pod("web").container("app", "flaky 4")).until(&started("web", 3)).crash_agent();
    play.start_agent().settle(minutes(5)).expect_running("web").expect_starts("web", 5).expect_restart_count("web", 4);
}

#[test]
fn job_that_ended_while_agent_was_down_is_not_rerun() {
    let mut play = Play::seeded(71);
    play.apply(PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 20s")).until(&running("job"));
    play.crash_agent().wait(minutes(1)).start_agent().settle(minutes(2)).expect_starts("job", 1);
}

#[test]
fn agent_killed_at_any_call_starts_pod_once() {
    for nth in 0..70 {
        let mut play = Play::seeded(7_000 + nth);
        play.supervised().publish("reg.test/web:v1", Pull::After(seconds(2)));
        play.change(|sim| sim.agent_dies_after = Some(nth));
        let pod =
            PodScript::pod("web").init("setup", "exit 0 after 1s").container("app", "run").image("reg.test/web:v1");
        play.apply(pod).until(&started("web", 2)).wait(seconds(2)).remove("web").settle(minutes(3));
        // An interrupted one may or may not have started.
        let (starts, most) = (play.look(|sim| predicates::starts(sim, "web")), starts_expected(&play, 2));
        assert!(
            (2..=most).contains(&starts),
            "{}",
            play.failure("expect", &format!("{starts} starts, not 2 to {most}"))
        );
        play.expect_gone("web");
    }
}
