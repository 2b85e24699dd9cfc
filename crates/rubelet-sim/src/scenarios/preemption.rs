//! Critical pods for which others are preempted.

use serde_json::json;

use crate::{
    faults::{ApiFaultRates, FaultRates},
    play::{
        Play, minutes,
        predicates::{disrupted, running, stopping},
        seconds,
    },
    script::PodScript,
};

const CRITICAL: i32 = 2_000_000_000;

/// A pod with a slow end that requests this much of the node's one processor.
fn asking(name: &str, cpu: &str) -> PodScript {
    let resources = json!({ "requests": { "cpu": cpu } });
    PodScript::pod(name).grace_secs(30).container("app", "slow 8s").field("resources", resources)
}

#[test]
fn critical_pod_starts_when_the_pod_preempted_for_it_has_ended() {
    let mut play = Play::clustered(1);
    play.create(asking("keep", "400m")).create(asking("give", "500m").priority(7));
    play.until(&running("keep")).until(&running("give")).create(asking("high", "600m").priority(CRITICAL));
    play.until(&stopping("give")).wait(seconds(5)).expect_not(&running("high")).until(&running("high"));
    play.expect_not(&running("give")).settle(minutes(1)).expect_running("keep").expect_running("high");
    play.expect(&disrupted("give")).expect_starts("high", 1).expect_starts("keep", 1);
}

#[test]
fn agent_restart_while_a_critical_pod_waits_preempts_no_further_pod() {
    for seed in 2..6 {
        let mut play = Play::clustered(seed);
        play.create(asking("keep", "400m")).create(asking("give", "500m"));
        play.until(&running("keep")).until(&running("give")).create(asking("high", "600m").priority(CRITICAL));
        play.until(&stopping("give")).wait(seconds(seed)).crash_agent().wait(seconds(2)).start_agent();
        play.settle(minutes(2)).expect_running("keep").expect_running("high").expect_starts("keep", 1);
        play.expect(&disrupted("give"));
    }
}

#[test]
fn static_pod_preempts_pods_of_the_api_despite_faults() {
    for seed in 6..10 {
        let mut play = Play::clustered(seed);
        play.storm(FaultRates {
            api: ApiFaultRates { done_but_error: 0.3, event_late: 0.3, ..ApiFaultRates::default() },
            ..FaultRates::default()
        });
        play.create(asking("one", "500m")).create(asking("two", "500m"));
        play.until(&running("one")).until(&running("two")).apply(asking("static", "700m"));
        play.until(&running("static")).settle(minutes(2)).expect_running("static").expect_starts("static", 1);
        play.expect(&disrupted("one")).expect(&disrupted("two"));
    }
}
