//! Pods are added, run, change and are removed.

use crate::{
    play::{
        Play, minutes,
        predicates::{gone, phase, running, stopping},
        seconds,
    },
    script::{EmptyDir, PodScript, Policy},
};

#[test]
fn a_pod_with_two_init_containers_and_two_containers_runs() {
    let pod = PodScript::pod("web")
        .init("first", "exit 0 after 2s")
        .init("second", "exit 0 after 1s")
        .container("app", "run")
        .container("side", "run");
    let mut play = Play::seeded(1);
    play.apply(pod).settle(minutes(2)).expect_running("web").expect_starts("web", 4).expect_restart_count("web", 0);
}

#[test]
fn failed_init_container_fails_pod_with_restart_policy_never() {
    let pod = PodScript::pod("job").policy(Policy::Never).init("setup", "exit 3 after 1s").container("app", "run");
    let mut play = Play::seeded(2);
    play.apply(pod).until(&phase("job", "Failed")).settle(minutes(2)).expect_starts("job", 1);
}

#[test]
fn a_pod_that_never_restarts_runs_once_and_stays_completed() {
    let pod = PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 5s");
    let mut play = Play::seeded(3);
    play.apply(pod).until(&phase("job", "Succeeded")).wait(minutes(10)).settle(minutes(2));
    play.expect(&phase("job", "Succeeded")).expect_starts("job", 1);
}

#[test]
fn on_failure_restarts_only_failed_containers() {
    let pod = PodScript::pod("job")
        .policy(Policy::OnFailure)
        .container("good", "exit 0 after 1s")
        .container("flaky", "flaky 2");
    let mut play = Play::seeded(4);
    play.apply(pod).settle(minutes(5)).expect_starts("job", 1 + 3);
}

#[test]
fn a_completed_pod_goes_with_its_manifest() {
    let pod = PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 1s");
    let mut play = Play::seeded(5);
    play.apply(pod).until(&phase("job", "Succeeded")).remove("job").settle(minutes(2)).expect_gone("job");
}

#[test]
fn editing_a_manifest_replaces_the_pod() {
    let mut play = Play::seeded(6);
    play.apply("web").until(&running("web"));
    play.apply(PodScript::from("web").version(2)).settle(minutes(2)).expect_running("web").expect_starts("web", 2);
}

#[test]
fn the_replacement_waits_for_an_old_pod_that_ends_slowly() {
    let old = PodScript::pod("web").grace_secs(60).container("app", "slow 45s");
    let mut play = Play::seeded(7);
    play.apply(old).until(&running("web")).apply(PodScript::from("web").version(2)).until(&stopping("web"));
    play.wait(seconds(30)).expect_starts("web", 1);
    play.settle(minutes(3)).expect_running("web").expect_starts("web", 2);
}

#[test]
fn only_the_last_of_many_quick_edits_runs_in_the_end() {
    let mut play = Play::seeded(8);
    play.apply(PodScript::pod("web").grace_secs(20).container("app", "slow 10s")).until(&running("web"));
    for version in 2..8 {
        play.apply(PodScript::from("web").version(version)).wait(seconds(2));
    }
    play.settle(minutes(5)).expect_running("web");
}

#[test]
fn removing_a_manifest_stops_the_pod_and_leaves_nothing() {
    let mut play = Play::seeded(9);
    play.apply(PodScript::from("web").empty_dir(EmptyDir::Memory)).until(&running("web"));
    play.remove("web").until(&gone("web")).settle(minutes(1)).expect_gone("web");
}

#[test]
fn container_ignoring_sigterm_is_killed_after_grace_period() {
    let mut play = Play::seeded(10);
    play.apply(PodScript::pod("web").grace_secs(20).container("app", "stubborn")).until(&running("web"));
    play.remove("web").until(&stopping("web")).wait(seconds(19)).expect(&stopping("web"));
    play.wait(seconds(3)).until(&gone("web")).settle(minutes(1));
}

#[test]
fn pod_readded_within_grace_period_restarts_after_termination() {
    let pod = PodScript::pod("web").grace_secs(30).container("app", "slow 10s");
    let mut play = Play::seeded(11);
    play.apply(pod.clone()).until(&running("web")).remove("web").until(&stopping("web"));
    play.apply(pod).settle(minutes(3)).expect_running("web");
}

#[test]
fn readded_manifest_keeps_restart_count_for_a_minute() {
    let mut play = Play::seeded(13);
    play.apply("web").until(&running("web")).remove("web").wait(seconds(20));
    play.apply("web").until(&running("web")).settle(minutes(2)).expect_restart_count("web", 1);
    play.remove("web").wait(minutes(2)).expect(&gone("web")).apply("web").until(&running("web"));
    play.settle(minutes(2)).expect_restart_count("web", 0);
}

#[test]
fn a_dead_sandbox_is_replaced_and_the_pod_runs_again() {
    let mut play = Play::seeded(12);
    play.apply(PodScript::pod("web").init("setup", "exit 0 after 1s").container("app", "run")).until(&running("web"));
    play.change(|sim| {
        let id = sim.runtime.picture.sandboxes.keys().next().cloned().expect("the pod has a sandbox");
        sim.kill_sandbox(&id);
    });
    play.settle(minutes(3)).expect_running("web").expect_restart_count("web", 1);
}

#[test]
fn hundred_pods_start_and_stop_at_once() {
    let mut play = Play::seeded(13);
    for number in 0..100 {
        play.apply(format!("pod{number}").as_str());
    }
    play.settle(minutes(5));
    for number in 0..100 {
        play.expect_starts(&format!("pod{number}"), 1).remove(&format!("pod{number}"));
    }
    play.settle(minutes(5));
    assert!(play.look(|sim| sim.runtime.picture.sandboxes.is_empty()));
}
