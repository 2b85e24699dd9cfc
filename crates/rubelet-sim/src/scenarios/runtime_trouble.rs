//! A runtime that crashes, hangs, returns wrong results or sends no events.

use std::collections::BTreeSet;

use crate::{
    faults::FaultRates,
    play::{
        Play, minutes,
        predicates::{calling, gone, is_called, running, sandboxed, stopping},
        seconds,
    },
    runtime::store::State,
    script::PodScript,
    simulation::SimState,
};

#[test]
fn running_pods_survive_runtime_outage_and_new_ones_start_after() {
    let mut play = Play::seeded(80);
    play.apply("old").until(&running("old")).runtime_down().apply("new").wait(minutes(10));
    play.runtime_up().settle(minutes(2));
    play.expect_running("new").expect_starts("old", 1).expect_starts("new", 1).expect_restart_count("old", 0);
}

#[test]
fn an_agent_that_starts_before_its_runtime_waits_for_it() {
    let mut play = Play::before_start(81);
    play.runtime_down().apply("web").start_agent().wait(minutes(3)).runtime_up();
    play.until(&running("web")).settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn runtime_crash_during_sandbox_creation_leaves_one_sandbox() {
    let mut play = Play::seeded(82);
    play.apply("web").until(&sandboxed("web")).runtime_down_for(seconds(30)).settle(minutes(3));
    play.expect_running("web").expect_starts("web", 1);
}

#[test]
fn stop_interrupted_by_runtime_crash_finishes_after_restart() {
    let mut play = Play::seeded(83);
    play.apply(PodScript::pod("web").grace_secs(20).container("app", "stubborn")).until(&running("web"));
    play.remove("web").until(&stopping("web")).runtime_down_for(seconds(60)).until(&gone("web")).settle(minutes(1));
}

#[test]
fn delayed_stop_gives_the_full_grace_period() {
    let mut play = Play::seeded(99);
    play.apply(PodScript::pod("web").grace_secs(20).container("app", "stubborn")).until(&running("web"));
    play.runtime_down_for(seconds(60)).remove("web").until(&stopping("web")).wait(seconds(18));
    play.expect(&stopping("web")).until(&gone("web")).settle(minutes(1));
}

#[test]
fn container_dead_after_runtime_outage_is_restarted() {
    let mut play = Play::seeded(84);
    play.apply("web").until(&running("web")).runtime_down().exit_container("web", "app", 1).wait(minutes(2));
    play.runtime_up().settle(minutes(2)).expect_running("web").expect_starts("web", 2).expect_restart_count("web", 1);
}

#[test]
fn relist_finds_dead_container_without_event_stream() {
    let mut play = Play::before_start(85);
    play.change(|sim| sim.runtime.has_events = false).start_agent().apply("web").until(&running("web"));
    play.wait(seconds(30)).exit_container("web", "app", 1).wait(seconds(3)).expect_starts("web", 2).settle(minutes(1));
}

#[test]
fn audit_finds_exit_whose_event_was_lost() {
    let mut play = Play::seeded(86);
    play.apply("web").until(&running("web")).wait(seconds(30));
    play.storm(FaultRates { event_lost: 1.0, ..FaultRates::default() }).exit_container("web", "app", 1).calm();
    play.settle(minutes(3)).expect_running("web").expect_starts("web", 2);
}

#[test]
fn stale_lists_double_no_container() {
    for seed in 87..91 {
        let mut play = Play::seeded(seed);
        play.storm(FaultRates { stale_list: 0.3, ..FaultRates::default() });
        play.apply("a").apply(PodScript::pod("b").container("app", "flaky 3")).wait(minutes(3));
        play.settle(minutes(3)).expect_starts("a", 1).expect_starts("b", 4);
    }
}

#[test]
fn runtime_calls_done_despite_error_cause_no_duplicates() {
    for seed in 91..95 {
        let mut play = Play::seeded(seed);
        play.storm(FaultRates { done_but_error: 0.4, ..FaultRates::default() }).apply("a").apply("b").wait(minutes(3));
        play.settle(minutes(3)).expect_running("a").expect_running("b");
        play.expect_starts("a", 1).expect_starts("b", 1);
    }
}

#[test]
fn hung_runtime_call_delays_only_its_pod() {
    let mut play = Play::seeded(95);
    play.apply("first").storm(FaultRates { hang: 1.0, ..FaultRates::default() }).wait(seconds(5)).calm();
    play.apply("second").until(&running("second")).settle(minutes(12)).expect_running("first");
}

#[test]
fn pods_start_when_network_becomes_ready() {
    let mut play = Play::before_start(96);
    play.change(|sim| sim.runtime.network_ready = false).start_agent().apply("web").wait(minutes(2));
    play.expect_starts("web", 0).change(|sim| sim.runtime.network_ready = true);
    play.settle(minutes(2)).expect_running("web");
}

#[test]
fn full_disk_only_delays_pod_setup() {
    let mut play = Play::seeded(97);
    play.disk_full_for(seconds(90)).apply("web").wait(minutes(1)).expect_starts("web", 0);
    play.settle(minutes(3)).expect_running("web").expect_starts("web", 1);
}

#[test]
fn pods_are_removed_while_disk_is_full() {
    let mut play = Play::seeded(98);
    play.apply("web").until(&running("web")).disk_full_for(minutes(30)).remove("web").until(&gone("web"));
    play.settle(minutes(2));
}

/// The agent dies while the runtime starts the pod's container, whose task then blocks its removal. Whether its death cancels
/// the start is drawn: the first seed counts in which it does.
fn leave_task(pod: &str, prepare: fn(&mut SimState)) -> Play {
    let cancelled = |sim: &SimState| -> BTreeSet<String> {
        let left = sim.runtime.picture.containers.values().filter(|container| is_called(&container.pod.name, pod));
        let ended = left.filter(|container| matches!(container.state, State::Exited { started_at: None, .. }));
        ended.map(|container| container.id.clone()).collect()
    };
    for seed in 57..77 {
        let mut play = Play::seeded(seed);
        play.change(prepare).apply(pod).until(&calling("StartContainer", pod)).crash_agent().wait(seconds(5));
        let left = play.look(cancelled);
        if !left.is_empty() {
            play.change(|sim| sim.runtime.leftover_tasks = left).start_agent();
            return play;
        }
    }
    panic!("in no seed the start was cancelled")
}

fn removals(play: &Play) -> usize {
    play.trace().iter().filter(|line| line.contains(" cri ") && line.contains(" RemoveContainer ")).count()
}

#[test]
fn leftover_task_of_a_cancelled_start_is_deleted() {
    let mut play = leave_task("web", |_| ());
    play.settle(minutes(3)).expect_running("web").expect_restart_count("web", 0);
    assert_eq!(removals(&play), 2, "refused once, then done");
    assert!(play.trace().iter().any(|line| line.contains("DeletedLeftoverTask")), "an event reports it");
}

#[test]
fn container_the_runtime_cannot_remove_is_left_alone_and_reported() {
    let mut play = leave_task("web", |sim| sim.runtime.is_containerd = false);
    // The pod does not wait for it: its next attempt runs.
    play.until(&running("web")).settle(minutes(3)).expect_restart_count("web", 1);
    let before = removals(&play);
    assert_eq!(before, 3, "then nothing waits for it any more");
    play.remove("web").wait(minutes(60)).expect_not(&gone("web"));
    let asked = removals(&play) - before;
    assert!((12..=24).contains(&asked), "{asked} removals in an hour");
    assert!(play.trace().iter().any(|line| line.contains("FailedRemove")), "an event reports it");
    play.change(|sim| sim.runtime.leftover_tasks.clear()).wait(minutes(6)).expect_gone("web");
}
