//! Termination while the pod's source changes it.

use std::time::Duration;

use serde_json::json;

use super::*;
use crate::pod::{
    hooks::HookRequest,
    status::{FailureReason, PodFailure},
};

/// An API pod; with a grace period it is being deleted.
fn api_pod(text: &str, grace_secs: Option<i64>) -> Pod {
    let mut pod = mk_pod(text);
    pod.metadata.deletion_timestamp = grace_secs.and(mk_pod("always | deleted").metadata.deletion_timestamp);
    pod.metadata.deletion_grace_period_seconds = grace_secs;
    pod
}

impl TestAgent {
    fn api_shows(&mut self, pod: &Pod) {
        self.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(pod.clone())] });
    }

    fn api_forgets_all(&mut self) {
        self.handle(Event::Config { source: Source::Api, pods: Vec::new() });
    }

    /// The stops and preStop hooks in flight, and the time each is given.
    fn stops(&self) -> Vec<(EffectId, u64)> {
        let given = |op: &Op| match op {
            Op::Container(ContainerOp::Stop { grace_secs, .. }) => Some(grace_secs.unsigned_abs()),
            Op::Container(ContainerOp::RunHook(HookRequest { limit, .. })) => Some(limit.as_secs()),
            _ => None,
        };
        self.in_flight.iter().filter_map(|(id, op)| Some((*id, given(op)?))).collect()
    }

    /// A look finds that the container's definition has changed.
    fn finds_another_definition(&mut self) {
        let mut facts = PodFacts { looked_at: self.now().uptime, ..facts("a: running 5s") };
        facts.containers[0].hash = Some(1);
        self.answer("InspectPod", Ok(Facts::Pod(facts)));
    }
}

fn running(pod: &Pod) -> TestAgent {
    let mut test = TestAgent::new(Settings { sources: vec![Source::Api], ..Settings::for_node("node") });
    test.api_shows(pod);
    test.runtime_is_up(&[]);
    test
}

fn with_pre_stop(mut pod: Pod) -> Pod {
    let hook = json!({ "preStop": { "exec": { "command": ["x"] } } });
    pod.spec.as_mut().expect("a spec").containers[0].lifecycle = Some(serde_json::from_value(hook).expect("a hook"));
    pod
}

#[test]
fn only_a_shorter_grace_period_restarts_stops() {
    for (first, second, expected) in [(30, 5, 5), (5, 30, 5)] {
        let pod = |grace_secs| api_pod("always | main a", grace_secs);
        let mut test = running(&pod(None));
        test.inspected("a: running 5s");
        test.api_shows(&pod(Some(first)));
        let [(before, given)] = test.stops()[..] else { panic!("{:?}", test.in_flight) };
        assert_eq!(given, first.unsigned_abs());
        test.api_shows(&pod(Some(second)));
        let [(after, given)] = test.stops()[..] else { panic!("{:?}", test.in_flight) };
        assert_eq!((given, after == before), (expected, first < second), "{first} s, then {second} s");
    }
}

#[test]
fn sidecar_is_stopped_after_a_container_that_is_being_started() {
    let pod = |grace_secs| api_pod("always | sidecar s | main a", grace_secs);
    let mut test = running(&pod(None));
    test.inspected("s: running 5s");
    test.carried_out(&["MakePodDirs"], "s: running 5s");
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    test.api_shows(&pod(Some(30)));
    assert_eq!((test.stops(), test.recalled.len()), (vec![], 1), "{:?}", test.in_flight);
    test.answer("StartContainer", Ok(Facts::Nothing));
    for (state, expected) in [("s: running 5s; a: running 0s", "a0"), ("s: running 5s; a: exit(0) 0s ago", "s0")] {
        test.inspected(state);
        let stopped = test.in_flight.iter().filter_map(|(_, op)| match op {
            Op::Container(ContainerOp::Stop { id, .. }) => Some(id.as_str()),
            _ => None,
        });
        assert_eq!(stopped.collect::<Vec<_>>(), [expected]);
        test.answer("StopContainer", Ok(Facts::Nothing));
    }
}

#[test]
fn running_hook_ends_with_a_shorter_grace_period() {
    let pod = |grace_secs| with_pre_stop(api_pod("always | main a", grace_secs));
    for (first, ends_after_secs) in [(Some(30), 5), (Some(3), 3), (None, 5)] {
        let mut test = running(&pod(None));
        if first.is_some() {
            test.inspected("a: running 5s");
            test.api_shows(&pod(first));
        } else {
            test.finds_another_definition();
        }
        let [(hook, _)] = test.stops()[..] else { panic!("{:?}", test.in_flight) };
        test.api_shows(&pod(Some(5)));
        test.at_secs += ends_after_secs - 1;
        test.handle(Event::Due);
        assert_eq!(test.stops().iter().map(|(id, _)| *id).collect::<Vec<_>>(), [hook], "{first:?}: it goes on");
        if first == Some(3) {
            test.answer("RunHook", Ok(Facts::Nothing));
        } else {
            test.at_secs += 1;
            test.handle(Event::Due);
        }
        assert!(test.stops().is_empty(), "{first:?}: {:?}", test.in_flight);
        test.inspected("a: running 5s");
        let pending = test.pending();
        assert!(pending.contains(&"StopContainer") && !pending.contains(&"RunHook"), "{first:?}: {pending:?}");
    }
}

#[test]
fn earlier_stop_is_bounded_by_the_pods_grace_period() {
    for (grace_secs, is_sent_again) in [(5, true), (30, false), (60, false)] {
        let mut test = running(&api_pod("always | main a", None));
        test.finds_another_definition();
        let [(before, 30)] = test.stops()[..] else { panic!("{:?}", test.in_flight) };
        test.api_shows(&api_pod("always | main a", Some(grace_secs)));
        let [(after, _)] = test.stops()[..] else { panic!("{:?}", test.in_flight) };
        assert_eq!(after != before, is_sent_again, "{grace_secs} s");
    }
}

#[test]
fn restarting_container_of_a_dead_sandbox_is_not_restarted() {
    let mut test = running(&api_pod("never | main a", None));
    test.finds_another_definition();
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(137) 5s");
    test.carried_out(&["StopSandbox", "TearDownVolumes"], "sandbox notready 60s; a: exit(137) 5s");
    let snapshot = test.agent.snapshot();
    assert_eq!(snapshot.pods[&PodUid::new("u1")].status.phase.as_deref(), Some("Failed"));
}

#[test]
fn hook_finished_before_termination_uses_no_grace_period() {
    let mut test = running(&with_pre_stop(api_pod("always | main a", None)));
    test.finds_another_definition();
    test.at_secs += 3;
    test.answer("RunHook", Ok(Facts::Nothing));
    test.api_shows(&with_pre_stop(api_pod("always | main a", Some(30))));
    test.inspected("a: running 5s");
    assert_eq!(test.stops().iter().map(|(_, secs)| *secs).collect::<Vec<_>>(), [30]);
}

#[test]
fn running_hook_uses_up_the_grace_period() {
    let mut test = running(&with_pre_stop(api_pod("always | main a", None)));
    test.inspected("a: running 5s");
    test.api_shows(&with_pre_stop(api_pod("always | main a", Some(30))));
    test.at_secs += 4;
    test.answer("RunHook", Ok(Facts::Nothing));
    test.inspected("a: running 5s");
    assert_eq!(test.stops().iter().map(|(_, secs)| *secs).collect::<Vec<_>>(), [26]);
}

#[test]
fn a_pod_removed_while_it_completes_leaves_nothing() {
    let mut test = running(&api_pod("never | main a", None));
    test.inspected("a: exit(0) 5s");
    assert_eq!(test.lifecycle("u1"), "Terminating");
    test.api_forgets_all();
    let stopped = "sandbox notready; a: exit(0) 5s";
    test.carried_out(&["StopSandbox", "TearDownVolumes", "RemovePodCgroup"], stopped);
    test.carried_out(&["RemoveContainer"], "sandbox notready");
    test.carried_out(&["RemoveSandbox", "RemovePodDir", "RemoveLogDir"], "sandbox gone");
    assert_eq!(test.lifecycle("u1"), "unknown");
}

#[test]
fn volumes_are_torn_down_again_if_the_pods_directory_cannot_be_removed() {
    let mut test = running(&api_pod("never | main a", None));
    test.inspected("a: exit(0) 5s");
    test.api_forgets_all();
    let stopped = "sandbox notready; a: exit(0) 5s";
    test.carried_out(&["StopSandbox", "TearDownVolumes", "RemovePodCgroup"], stopped);
    test.carried_out(&["RemoveContainer"], "sandbox notready");
    test.carried_out(&["RemoveSandbox"], "sandbox gone");
    let mounted = EffectError { kind: ErrorKind::Retry, message: "still mounted".to_owned() };
    test.answer("RemovePodDir", Err(mounted));
    test.at_secs += 2;
    test.handle(Event::Due);
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup", "RemovePodDir", "RemoveLogDir"], "sandbox gone");
    assert_eq!(test.lifecycle("u1"), "unknown");
}

#[test]
fn post_start_hook_runs_unless_the_pod_terminates() {
    let hook = json!({ "postStart": { "exec": { "command": ["x"] } } });
    let pod = |grace_secs| {
        let mut pod = api_pod("always | main a", grace_secs);
        pod.spec.as_mut().expect("a spec").containers[0].lifecycle =
            serde_json::from_value(hook.clone()).expect("a hook");
        pod
    };
    for (ends, expected) in [(false, true), (true, false)] {
        let mut test = running(&pod(None));
        test.inspected("a: created 1s");
        if ends {
            test.api_shows(&pod(Some(30)));
        }
        test.answer("ResumeContainer", Ok(Facts::Nothing));
        assert_eq!(test.pending().contains(&"RunHook"), expected, "{:?}", test.pending());
    }
    let mut test = running(&pod(None));
    test.inspected("sandbox ready 1s");
    test.carried_out(&["MakePodDirs"], "sandbox ready 1s");
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    test.answer("StartContainer", Ok(Facts::Container { id: "a0".into() }));
    let hooks = test.in_flight.iter().filter_map(|(_, op)| match op {
        Op::Container(ContainerOp::RunHook(order)) => Some((order.container.as_str(), order.id.as_str())),
        _ => None,
    });
    assert_eq!(hooks.collect::<Vec<_>>(), [("a", "a0")]);
    let limit = Duration::from_secs(2 * 3600);
    assert!(test.stops().iter().all(|(_, secs)| *secs == limit.as_secs()), "for ever with an end");
}

#[test]
fn pod_deleted_while_terminating_as_orphan_does_not_restart() {
    for grace_secs in [None, Some(30)] {
        let mut test = TestAgent::new(Settings { sources: vec![Source::Api], ..Settings::for_node("node") });
        test.api_forgets_all();
        test.runtime_is_up(&[listed("u1", "web")]);
        test.inspected("sandbox ready");
        assert_eq!(test.lifecycle("u1"), "Terminating", "no source knows it");
        test.api_shows(&api_pod("always | main a", grace_secs));
        test.carried_out(&["StopSandbox", "TearDownVolumes", "RemovePodCgroup"], "sandbox notready");
        let expected = if grace_secs.is_some() { "Terminating" } else { "Syncing" };
        assert_eq!(test.lifecycle("u1"), expected, "{grace_secs:?}");
    }
}

#[test]
fn pod_failed_by_its_node_is_stopped_removed_from_the_runtime_and_kept_for_readers() {
    let mut test = running(&api_pod("always | main a", None));
    test.inspected("a: running 5s");
    let uid = test.agent.records.keys().next().expect("one pod").clone();
    let now = test.now();
    let disruption = Some("low on memory".to_owned());
    let failure = PodFailure { disruption, ..PodFailure::new(FailureReason::Evicted, "low on memory") };
    test.agent.fail_pod(&uid, failure, 1, now);
    test.handle(Event::Due);
    assert_eq!(test.stops().len(), 1);
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(137) 0s ago");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(137) 0s ago");
    test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    assert!(
        !test.pending().contains(&"RemoveContainer"),
        "an agent restarted now knows its end by its containers alone"
    );
    let mut ended = api_pod("always | main a", None);
    ended.status.get_or_insert_default().phase = Some("Failed".to_owned());
    test.api_shows(&ended);
    test.answer("RemoveContainer", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s");
    test.answer("RemoveSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox gone");
    let snapshot = test.agent.snapshot();
    let view = snapshot.pods.get(&uid).expect("it is kept");
    let status = &view.status;
    assert_eq!((view.lifecycle.as_str(), status.phase.as_deref()), ("Finished", Some("Failed")));
    assert_eq!((status.reason.as_deref(), status.message.as_deref()), (Some("Evicted"), Some("low on memory")));
    let open: Vec<_> = view.steps.iter().filter(|step| step.state != crate::snapshot::StepState::Done).collect();
    assert!(open.is_empty(), "nothing waits for anything: {open:?}");
    let disruption = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
    let disruption = disruption.expect("the condition");
    assert_eq!(
        (disruption.status.as_str(), disruption.reason.as_deref(), disruption.message.as_deref()),
        ("True", Some("TerminationByKubelet"), Some("low on memory"))
    );
    let exit = status.container_statuses.as_ref().expect("a container")[0].state.as_ref().expect("a state");
    assert_eq!(exit.terminated.as_ref().expect("its exit").exit_code, 137);
}
