//! What a look and a result leave in the record of a pod.

use k8s_openapi::api::core::v1::PodStatus;
use serde_json::json;

use super::*;
use crate::{
    id::PodRef,
    op::PodPlace,
    pod::{Desired, InstanceRecord, hooks::PreStop},
    test_support::{facts, later, mk_pod, now, start_order},
};

fn record(pod: &str) -> PodRecord {
    let pod = mk_pod(pod);
    let mut record = PodRecord::new(PodRef::of(&pod), Arc::new(pod), Desired::By(Source::Api), 1, now());
    record.lifecycle = Lifecycle::Syncing;
    record
}

#[test]
fn instance_state_is_dropped_with_the_instance() {
    let mut record = record("always | main a");
    let known = InstanceRecord {
        pre_stop: Some(PreStop::Began(Uptime::ZERO)),
        has_post_start_failed: true,
        is_restarting: true,
        finished_at: Some(Uptime::from_secs(7)),
    };
    for id in ["a0", "old"].map(ContainerId::new) {
        record.instances.insert(id, known);
    }
    record.stopped_sandboxes.extend(["sb0".into(), "sb-old".into()]);
    apply_look(&mut record, facts("sandbox gone"), DuringLook::Change, now());
    assert_eq!(record.instances.len(), 2, "a look from before a change does not show what was started meanwhile");
    apply_look(&mut record, facts("sandbox notready; a: exit(1) 5s"), DuringLook::Nothing, now());
    assert_eq!(record.instances, BTreeMap::from([("a0".into(), known)]), "its end stays when it was");
    assert_eq!(record.stopped_sandboxes.into_iter().collect::<Vec<_>>(), ["sb0".into()]);
}

/// A restarted agent does not know the reason, and would write another status.
#[test]
fn pod_that_stays_down_keeps_no_waiting_reason() {
    for (policy, is_kept) in [("never", false), ("always", true)] {
        let mut record = record(&format!("{policy} | main a | main b"));
        let waiting =
            Waiting { reason: Reason::CreateContainerError, message: "the sandbox is not running".to_owned() };
        record.container_mut("b").waiting = Some(waiting);
        apply_look(&mut record, facts("sandbox notready; a: exit(137) 5s"), DuringLook::Nothing, now());
        assert_eq!(record.container("b").waiting.is_some(), is_kept, "{policy}");
    }
}

#[test]
fn container_waits_until_a_look_shows_its_start() {
    for (seen, post_start_failed, started, meanwhile, waits) in [
        ("a: running", false, false, DuringLook::Nothing, false),
        ("a: running", true, false, DuringLook::Nothing, true),
        ("a: exit(1)", false, false, DuringLook::Nothing, true),
        // It ran and exited between two looks.
        ("a: exit(1)", false, true, DuringLook::Nothing, false),
        ("a: exit(1)", false, true, DuringLook::Hint, false),
        ("a: exit(1)", false, true, DuringLook::Change, true),
    ] {
        let mut record = record("always | main a");
        let why = Waiting { reason: Reason::CrashLoopBackOff, message: String::new() };
        record.instance_mut(&"a0".into()).has_post_start_failed = post_start_failed;
        let container = record.container_mut("a");
        (container.waiting, container.has_unseen_start) = (Some(why), started);
        apply_look(&mut record, facts(seen), meanwhile, now());
        assert_eq!(
            record.container("a").waiting.is_some(),
            waits,
            "{seen} {post_start_failed} {started} {meanwhile:?}"
        );
        assert_eq!(record.is_fresh, meanwhile != DuringLook::Change);
    }
}

#[test]
fn a_start_that_succeeded_is_remembered_until_it_is_seen() {
    let order = start_order(&record("always | main a").pod);
    let resume =
        Op::Container(ContainerOp::Resume { pod: PodRef::of(&order.pod), name: "a".to_owned(), id: "a0".into() });
    for (op, expected) in
        [(resume, vec!["Started"]), (Op::Container(ContainerOp::Start(order)), vec!["Created", "Started"])]
    {
        let mut record = record("always | main a");
        let told: Vec<_> = succeeded(&mut record, &op).into_iter().map(|event| event.reason).collect();
        assert_eq!(
            (told, record.container("a").has_unseen_start),
            (expected.into_iter().map(str::to_owned).collect(), true)
        );
    }
}

#[test]
fn logged_attempts_count_only_if_the_runtime_lost_everything() {
    let logged = |seen: &str, attempt| {
        let mut facts = facts(seen);
        facts.logged_attempts.insert("a".to_owned(), attempt);
        facts
    };
    for (earlier, seen, expected) in [
        (None, "sandbox gone", 4),
        (None, "sandbox ready", 4),
        (Some("sandbox ready"), "sandbox gone", 4),
        (Some("sandbox ready"), "sandbox ready", 1),
        (Some("sandbox ready"), "sandbox notready", 1),
    ] {
        let mut record = record("always | main a");
        record.facts = earlier.map(|earlier| Arc::new(logged(earlier, 1)));
        apply_look(&mut record, logged(seen, 4), DuringLook::Nothing, now());
        assert_eq!(record.facts.expect("it was looked at").logged_attempts["a"], expected, "{earlier:?}, {seen}");
    }
}

#[test]
fn start_is_interrupted_only_without_another_explanation() {
    let messages = ["context canceled", "failed to start shim: start failed: : signal: killed: unknown"];
    for (message, (seen, never_ran, ordered, told, expected)) in messages.into_iter().cycle().zip([
        ("a: exit(128)", &["a0"][..], None, None, Some("a0")),
        ("a: exit(128)", &[], None, None, None),
        ("a: exit(128)", &["a0"], Some(0), None, None),
        ("a: exit(128)", &["a0"], None, Some("a0"), None),
        ("a: exit(128)", &["a0"], None, Some("b0"), Some("a0")),
        ("a: exit(1), exit(128)", &["a1"], None, None, Some("a1")),
        ("a: exit(1), exit(128)", &["a1"], Some(0), None, Some("a1")),
        ("a: exit(128), exit(128)", &["a0", "a1"], None, None, None),
        // Its number would be lost, whatever else the pod ran.
        ("a: exit(1), exit(128); b: exit(1)", &["a0 is gone", "a1"], None, None, None),
    ]) {
        let mut record = record("always | main a | main b");
        let mut facts = facts(seen);
        facts.containers.retain(|container| !never_ran.contains(&format!("{} is gone", container.id).as_str()));
        for container in facts.containers.iter_mut().filter(|container| never_ran.contains(&container.id.as_str())) {
            let ContainerState::Exited(exit) = &mut container.state else { panic!("all have ended") };
            (exit.started_at, exit.message) = (None, message.to_owned());
        }
        record.container_mut("a").last_attempt = ordered;
        let ended = |id| json!({ "terminated": { "exitCode": 128, "containerID": format!("containerd://{id}") } });
        let status = |id| {
            let container = json!({ "name": "a", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": ended(id) });
            serde_json::from_value::<PodStatus>(json!({ "containerStatuses": [container] })).expect("a status")
        };
        Arc::make_mut(&mut record.pod).status = told.map(status);
        let before: Vec<_> = facts.containers.iter().map(|container| container.id.clone()).collect();
        set_apart_interrupted_starts(&mut record, &mut facts);
        assert_eq!(
            record.container("a").interrupted_start.as_ref().map(ContainerId::as_str),
            expected,
            "{seen} {ordered:?} {told:?}"
        );
        let left: Vec<_> = before.into_iter().filter(|id| Some(id.as_str()) != expected).collect();
        assert_eq!(facts.containers.into_iter().map(|container| container.id).collect::<Vec<_>>(), left, "{seen}");
    }
}

#[test]
fn gone_is_success_for_a_stop_and_failure_for_a_start() {
    let pod = || record("always | main a").id;
    let (name, id) = (|| "a".to_owned(), || ContainerId::new("a0"));
    for (op, kind, fails) in [
        (
            Op::Container(ContainerOp::Stop { pod: pod(), name: name(), id: id(), grace_secs: 30 }),
            ErrorKind::Gone,
            false,
        ),
        (
            Op::Container(ContainerOp::Stop { pod: pod(), name: name(), id: id(), grace_secs: 30 }),
            ErrorKind::Retry,
            true,
        ),
        (Op::Container(ContainerOp::Remove { pod: pod(), name: name(), id: id() }), ErrorKind::Gone, false),
        (Op::Pod(PodOp::StopSandbox { pod: pod(), id: "sb0".into() }), ErrorKind::Gone, false),
        (Op::Pod(PodOp::RemoveSandbox { pod: pod(), id: "sb0".into() }), ErrorKind::Gone, false),
        (Op::Container(ContainerOp::Resume { pod: pod(), name: name(), id: id() }), ErrorKind::Gone, true),
        (Op::Volume(VolumeOp::TearDown(PodPlace { pod: pod(), cgroup_paths: Vec::new() })), ErrorKind::Gone, true),
    ] {
        let mut record = record("always | main a");
        let shown = format!("{op:?} {kind:?}");
        let flight = Flight { id: EffectId(1), op, sent_at: now().uptime, give_up_at: later(9).uptime };
        let error = EffectError { kind, message: "no".to_owned() };
        apply_result(&mut record, &PodSubject::Pod, &flight, Err(error), now());
        assert_eq!(record.failures.contains_key(&PodSubject::Pod), fails, "{shown}");
    }
}
