//! An API server that is stale, rejects requests, keeps objects, or has undecodable ones.

use crate::{
    api::store::Streaming,
    faults::{ApiFaultRates, FaultRates},
    play::{
        Play, Within, minutes,
        predicates::{forgotten, known, phase, running, stored, stored_phase},
        seconds,
    },
    script::PodScript,
    simulation::SimState,
};

/// The limit for a mirror pod that cannot be created, in ten minutes: at most one try every five seconds.
const MIRROR_TRIES: usize = 120;

/// How often the trace contains it.
fn count(play: &Play, what: &str) -> usize {
    play.trace().iter().filter(|line| line.contains(what)).count()
}

fn has_event(sim: &SimState, pod: &str, reason: &str) -> bool {
    let is_it = |event: &serde_json::Value| event["involvedObject"]["name"] == pod && event["reason"] == reason;
    sim.api.of("events").any(|(_, event)| is_it(event))
}

#[test]
fn restart_with_stale_api_server_terminates_and_revives_no_pod() {
    for (seed, streaming) in [(1, Streaming::Served), (2, Streaming::Refused), (3, Streaming::Ignored)] {
        let mut play = Play::before_start(seed);
        play.change(|sim| sim.api.streaming = streaming).in_cluster().start_agent();
        play.create("old").until(&stored_phase("old", "Running")).lag().create("web");
        play.until(&stored_phase("web", "Running")).delete("old", Within::ItsOwnTime).until(&forgotten("old"));
        play.settle(minutes(1)).crash_agent().fail_over().start_agent().wait(minutes(5));
        play.expect(&running("web")).expect_starts("old", 1).catch_up();
        play.settle(minutes(2)).expect_starts("web", 1).expect_starts("old", 1);
    }
}

#[test]
fn stale_api_responses_do_not_revert_a_running_agent() {
    let mut play = Play::clustered(4);
    play.create("old").until(&stored_phase("old", "Running")).lag().create("web");
    play.until(&stored_phase("web", "Running")).delete("old", Within::ItsOwnTime).until(&forgotten("old"));
    play.fail_over().change(|sim| sim.api.forget_history()).wait(minutes(5)).expect(&running("web"));
    play.catch_up().settle(minutes(2)).expect_starts("web", 1).expect_starts("old", 1);
}

#[test]
fn watches_that_fail_are_resumed_without_a_list() {
    for seed in 5..9 {
        let mut play = Play::clustered(seed);
        play.create("web").settle(minutes(1));
        play.storm(FaultRates {
            api: ApiFaultRates { server_error: 0.3, watch_cut: 0.3, ..ApiFaultRates::default() },
            ..FaultRates::default()
        });
        for number in 0..20 {
            play.label("web", &number.to_string()).wait(seconds(20));
        }
        play.settle(minutes(3)).expect_starts("web", 1);
    }
}

#[test]
fn undecodable_pod_keeps_running_across_agent_restart() {
    let mut play = Play::clustered(10);
    play.create("web").create("other").settle(minutes(1)).crash_agent();
    let before = play.look(|sim| stored(sim, "web").cloned()).expect("it is there");
    play.garble("web").start_agent().wait(minutes(10)).expect(&running("web")).expect_starts("other", 1);
    play.create("new").until(&stored_phase("new", "Running"));
    play.rewrite("web", |pod| pod["spec"] = before["spec"].clone()).settle(minutes(2)).expect_starts("web", 1);
}

#[test]
fn undecodable_deleted_pod_is_terminated() {
    let mut play = Play::clustered(11);
    play.create("web").settle(minutes(1)).crash_agent().garble("web").start_agent().wait(minutes(2));
    play.expect(&running("web")).force_delete("web").settle(minutes(3)).expect_gone("web");
}

#[test]
fn an_object_the_server_fails_on_for_ever_delays_no_other() {
    let mut play = Play::clustered(12);
    play.change(|sim| {
        sim.api.failing.insert(("pods", "bad".to_owned()));
        sim.api.failing.insert(("events", "bad".to_owned()));
    });
    play.apply("bad").until(&running("bad")).wait(seconds(1)).create("web").wait(seconds(5));
    play.expect(&stored_phase("web", "Running"));
    assert!(play.look(|sim| has_event(sim, "web", "Started")), "its events are written meanwhile");
    play.wait(minutes(10));
    let tries = count(&play, "CREATE pods");
    assert!(tries < MIRROR_TRIES, "{tries} tries in ten minutes");
    play.change(|sim| sim.api.failing.clear()).settle(minutes(3)).expect_starts("bad", 1);
}

#[test]
fn static_pod_in_terminating_namespace_runs_without_mirror_pod() {
    let mut play = Play::clustered(13);
    play.change(|sim| sim.api.ending_namespaces = ["default".to_owned()].into());
    play.apply("web").until(&running("web")).wait(minutes(10)).expect(&forgotten("web")).expect_starts("web", 1);
    let tries = count(&play, "CREATE pods");
    assert!(tries < MIRROR_TRIES, "{tries} tries in ten minutes");
    play.change(|sim| sim.api.ending_namespaces.clear()).settle(minutes(3)).expect_starts("web", 1);
}

#[test]
fn a_pod_held_by_a_finalizer_is_stopped_and_deleted_once() {
    let mut play = Play::clustered(14);
    play.create("web").until(&stored_phase("web", "Running")).hold("web").delete("web", Within::ItsOwnTime);
    play.wait(minutes(10)).expect(&known("web")).expect_starts("web", 1);
    let tries = count(&play, "DELETE pods");
    assert!(tries <= 2, "deleted {tries} times");
    play.crash_agent().start_agent().wait(minutes(2)).expect_starts("web", 1).let_go("web");
    play.until(&forgotten("web")).settle(minutes(1)).expect_gone("web");
}

#[test]
fn expired_credentials_stop_no_pod_and_statuses_catch_up() {
    let mut play = Play::clustered(15);
    play.create("web").apply("static").settle(minutes(1)).expire_credentials_for(minutes(5));
    play.exit_container("web", "app", 1).wait(minutes(2)).crash_agent().start_agent().wait(minutes(2));
    play.expect(&running("web")).wait(minutes(2)).settle(minutes(1)).expect_restart_count("web", 1);
    play.expect_starts("static", 1);
}

#[test]
fn api_errors_leave_statuses_correct() {
    for seed in 16..20 {
        let mut play = Play::clustered(seed);
        play.storm(FaultRates {
            api: ApiFaultRates { rejected: 0.4, ..ApiFaultRates::default() },
            ..FaultRates::default()
        });
        play.create("web").create(PodScript::pod("job").container("app", "flaky 1")).apply("static").wait(minutes(3));
        play.delete("web", Within::ItsOwnTime).wait(minutes(1)).settle(minutes(3)).expect(&phase("static", "Running"));
    }
}
