//! Probes and lifecycle hooks.

use serde_json::json;

use crate::{
    play::{
        Play, minutes,
        predicates::{gone, phase, ready, running, started, stopping},
        seconds,
    },
    script::{PodScript, Policy},
};

#[test]
fn liveness_failure_restarts_container() {
    let probe = json!({ "exec": { "command": ["fail", "first"] }, "periodSeconds": 5, "failureThreshold": 2 });
    let pod = PodScript::pod("web").container("app", "run").field("livenessProbe", probe);
    let mut play = Play::seeded(1);
    play.apply(pod).until(&running("web")).wait(seconds(4)).expect_starts("web", 1);
    play.until(&started("web", 2)).settle(minutes(2)).expect_running("web").expect_starts("web", 2);
    play.expect_restart_count("web", 1);
}

#[test]
fn liveness_failure_with_exit_zero_restarts_on_failure_container() {
    let probe = json!({ "exec": { "command": ["fail", "first"] }, "periodSeconds": 1, "failureThreshold": 1 });
    let pod = PodScript::pod("job").policy(Policy::OnFailure).container("app", "run").field("livenessProbe", probe);
    let mut play = Play::seeded(2);
    play.apply(pod).until(&started("job", 2)).settle(minutes(2)).expect(&phase("job", "Running"));
}

#[test]
fn readiness_follows_probe_and_survives_agent_crash() {
    let probe = json!({ "exec": { "command": ["sleep", "2s"] }, "timeoutSeconds": 5, "periodSeconds": 5 });
    let pod = PodScript::pod("web").container("app", "run").field("readinessProbe", probe);
    let mut play = Play::seeded(3);
    play.apply(pod).until(&running("web")).wait(seconds(1)).expect_not(&ready("web"));
    play.until(&ready("web")).crash_agent().start_agent().until(&ready("web")).settle(minutes(1));
    play.expect_starts("web", 1);
}

#[test]
fn a_probe_that_takes_too_long_has_failed() {
    let probe = json!({ "exec": { "command": ["sleep", "20s"] }, "timeoutSeconds": 1, "periodSeconds": 5 });
    let pod = PodScript::pod("web").container("app", "run").field("readinessProbe", probe);
    let mut play = Play::seeded(4);
    play.apply(pod).until(&running("web")).wait(minutes(2)).expect_not(&ready("web"));
}

#[test]
fn pre_stop_hook_precedes_sigterm_and_uses_grace_period() {
    let hook = json!({ "preStop": { "exec": { "command": ["sleep", "6s"] } } });
    let pod = PodScript::pod("web").grace_secs(20).container("app", "run").field("lifecycle", hook);
    let mut play = Play::seeded(5);
    play.apply(pod).until(&running("web")).remove("web").wait(seconds(4)).expect(&running("web"));
    play.expect_not(&stopping("web")).until(&gone("web")).settle(minutes(1));
}
