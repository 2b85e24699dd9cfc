//! Sidecar containers.

use serde_json::{Value, json};

use crate::{
    play::{
        Play, Within, minutes,
        predicates::{Predicate, forgotten, gone, is_called, phase, running, started, stopping, stored_phase},
        seconds,
    },
    script::{PodScript, Policy},
};

fn endless_hook() -> Value {
    json!({ "preStop": { "exec": { "command": ["sleep", "1000s"] } } })
}

/// So many containers of the pod run.
fn running_containers(pod: &'static str, count: usize) -> Predicate {
    Predicate::new(format!("{count} containers of {pod} run"), move |sim| {
        sim.runtime.running().filter(|found| is_called(&found.pod.name, pod)).count() == count
    })
}

#[test]
fn sidecars_run_beside_the_others_and_end_with_the_pod() {
    let mut play = Play::clustered(1);
    let pod = PodScript::pod("web").sidecar("first", "run").sidecar("second", "flaky 1").container("app", "run");
    play.create(pod).until(&started("web", 4)).settle(minutes(2)).expect(&running_containers("web", 3));
    play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).settle(minutes(1));
}

#[test]
fn hooks_of_sidecars_run_side_by_side_at_a_pods_natural_end() {
    let mut play = Play::clustered(2);
    let pod = PodScript::pod("job").policy(Policy::Never).grace_secs(20);
    let pod = pod.sidecar("first", "run").field("lifecycle", endless_hook());
    let pod = pod.sidecar("second", "run").field("lifecycle", endless_hook()).container("app", "exit 0 after 5s");
    play.create(pod).until(&running_containers("job", 3)).until(&running_containers("job", 2)).wait(seconds(18));
    play.expect(&running_containers("job", 2)).expect_not(&stopping("job")).wait(seconds(6));
    play.expect_not(&running("job")).until(&stored_phase("job", "Succeeded")).settle(minutes(1));
    play.expect_starts("job", 3);
}

#[test]
fn sidecars_ignoring_sigterm_are_killed_after_grace_period() {
    for (seed, app) in [(3, "exit 0 after 5s"), (4, "run")] {
        let mut play = Play::clustered(seed);
        let pod = PodScript::pod("job").policy(Policy::Never).grace_secs(20).sidecar("first", "stubborn");
        let pod = pod.sidecar("second", "stubborn").sidecar("third", "stubborn").container("app", app);
        play.create(pod).until(&running_containers("job", 4));
        if app == "run" {
            play.delete("job", Within::ItsOwnTime);
        }
        play.until(&running_containers("job", 3)).wait(seconds(19)).expect(&running_containers("job", 3));
        play.wait(seconds(5)).expect_not(&running("job")).settle(minutes(1));
    }
}

#[test]
fn a_sidecar_is_not_restarted_while_its_pod_ends() {
    let probe = |delay: u64| {
        json!({
            "exec": { "command": ["fail"] },
            "initialDelaySeconds": delay, "periodSeconds": 1, "failureThreshold": 1,
        })
    };
    let hook = json!({ "preStop": { "exec": { "command": ["sleep", "30s"] } } });
    let mut play = Play::clustered(5);
    let pod = PodScript::pod("job").policy(Policy::Never).grace_secs(60);
    let pod = pod.sidecar("side", "run").field("livenessProbe", probe(20)).container("app", "run");
    play.create(pod.field("livenessProbe", probe(10)).field("lifecycle", hook)).until(&running_containers("job", 2));
    play.wait(seconds(35)).expect(&running_containers("job", 2)).expect_starts("job", 2);
    play.until(&phase("job", "Succeeded")).settle(minutes(1)).expect_starts("job", 2);
}

#[test]
fn a_sidecar_that_exits_while_its_pod_ends_stays_down() {
    let mut play = Play::clustered(6);
    let pod = PodScript::pod("job").policy(Policy::Never).grace_secs(30).sidecar("first", "run");
    let pod = pod.sidecar("second", "run").field("lifecycle", endless_hook()).container("app", "exit 0 after 5s");
    play.create(pod).until(&running_containers("job", 3)).until(&running_containers("job", 2));
    play.wait(seconds(2)).exit_container("job", "first", 1).wait(seconds(10)).expect_starts("job", 3);
    play.until(&phase("job", "Succeeded")).settle(minutes(1)).delete("job", Within::ItsOwnTime).until(&gone("job"));
    play.settle(minutes(1)).expect_starts("job", 3);
}

#[test]
fn sidecar_in_back_off_may_start_with_a_new_agent() {
    let mut play = Play::before_start(159);
    play.in_cluster().start_agent();
    play.create(PodScript::pod("web").sidecar("side", "run").container("app", "run")).until(&running("web"));
    // The last back-off is longer than a settled state has to last.
    for _ in 0..6 {
        play.wait(minutes(3)).exit_container("web", "side", 1);
    }
    play.settle(minutes(1));
    let restarted = play.try_restart_in_peace();
    assert_eq!(restarted.map_err(|failure| failure.rule), Ok(()));
    play.expect_starts("web", 8);
}
