//! The rules of the status manager, one by one.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PodCondition, PodReadinessGate, Probe};
use proptest::prelude::{Just, Strategy, prop_oneof, proptest};

use super::*;
use crate::{
    manifest::SOURCE_ANNOTATION,
    observation::RuntimeStatus,
    pod::status::{PodWorkerState, StatusInput, conditions::CONTAINERS_READY, pod_status},
    pod_config::MIRROR_ANNOTATION,
    test_support::{ago, facts, later, mk_pod, now, show},
};

/// A status manager with the pods of one node.
#[derive(Default)]
struct StatusFixture {
    manager: StatusManager,
    pods: PodManager,
}

impl StatusFixture {
    fn with(pod: &Pod) -> StatusFixture {
        let mut fixture = StatusFixture::default();
        fixture.pods.add_pod(Arc::new(pod.clone()));
        fixture
    }

    fn set(&mut self, pod: &Pod, seen: &str) -> StatusUpdate {
        let previous = self.manager.pod_statuses.get(&PodUid::of(pod)).map(|versioned| Arc::clone(&versioned.status));
        let status = status_of(pod, seen, previous.as_deref(), now());
        self.offer(pod, status, now())
    }

    fn offer(&mut self, pod: &Pod, status: PodStatus, now: Now) -> StatusUpdate {
        self.manager.set_pod_status(pod, status, StatusContext { pods: &self.pods, now })
    }

    fn terminate(&mut self, pod: &Pod) -> StatusUpdate {
        self.manager.terminate_pod(pod, StatusContext { pods: &self.pods, now: later(60) })
    }

    fn readiness(&mut self, container: &str, readiness: ContainerReadiness) -> StatusUpdate {
        let context = StatusContext { pods: &self.pods, now: later(60) };
        self.manager.set_container_readiness(&"u1".into(), &container.into(), readiness, context)
    }

    fn startup(&mut self, container: &str, startup: Startup) -> StatusUpdate {
        let context = StatusContext { pods: &self.pods, now: later(60) };
        self.manager.set_container_startup(&"u1".into(), &container.into(), startup, context)
    }

    /// `patch m1 v2` or `delete u1`, for each pod with a request.
    fn due(&mut self, batch: Batch) -> String {
        let mut shown = Vec::new();
        for uid in self.manager.sync_batch(batch, &self.pods) {
            let context = StatusContext { pods: &self.pods, now: now() };
            match self.manager.next_step(&uid, RunningContainers::None, context) {
                Some(StatusStep::Patch { pod, version, .. }) => shown.push(format!("patch {} v{version}", pod.uid)),
                Some(StatusStep::Delete { pod }) => shown.push(format!("delete {}", pod.uid)),
                None => {}
            }
        }
        shown.join(", ")
    }

    /// The API server applied the status, and the watch has shown it.
    fn stored(&mut self, pod: &Pod) -> Pod {
        let status = PodStatus::clone(&self.manager.pod_statuses[&"u1".into()].status);
        let pod = Pod { status: Some(status), ..pod.clone() };
        self.watched(&pod);
        pod
    }

    fn watched(&mut self, pod: &Pod) {
        self.pods.update_pod(Arc::new(pod.clone()));
        self.manager.mark_for_reconcile(self.pods.translate_pod_uid(&PodUid::of(pod)), &self.pods);
    }

    fn show(&self) -> String {
        show(&self.manager.pod_statuses[&"u1".into()].status)
    }

    fn line(&self, start: &str) -> String {
        let shown = self.show();
        shown.lines().find(|line| line.starts_with(start)).expect("such a line").to_owned()
    }
}

fn status_of(pod: &Pod, seen: &str, previous: Option<&PodStatus>, now: Now) -> PodStatus {
    pod_status(&StatusInput {
        pod,
        facts: &facts(seen),
        previous,
        stored: None,
        waiting: &BTreeMap::new(),
        restarting: &BTreeSet::new(),
        is_resize_pending: false,
        worker_state: PodWorkerState::Syncing,
        host_ips: &[],
        runtime: &RuntimeStatus { name: "containerd".to_owned(), ..RuntimeStatus::default() },
        failed: None,
        now,
    })
}

fn changed(version: u64) -> StatusUpdate {
    StatusUpdate::Changed { version }
}

/// The API server's copy of a static pod.
fn mirror_of(pod: &Pod, uid: &str) -> Pod {
    let mut mirror = pod.clone();
    mirror.metadata.uid = Some(uid.to_owned());
    let annotations = mirror.metadata.annotations.get_or_insert_default();
    annotations.insert(MIRROR_ANNOTATION.to_owned(), "u1".to_owned());
    annotations.insert(SOURCE_ANNOTATION.to_owned(), "api".to_owned());
    mirror
}

fn condition(type_: &str, status: &str) -> PodCondition {
    PodCondition { type_: type_.to_owned(), status: status.to_owned(), ..PodCondition::default() }
}

fn phase(pod: &mut Pod, phase: &str) {
    pod.status.get_or_insert_default().phase = Some(phase.to_owned());
}

#[test]
fn only_a_changed_status_gets_a_new_version() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    assert_eq!(fixture.set(&pod, ""), changed(1));
    assert_eq!(fixture.set(&pod, ""), StatusUpdate::Unchanged);
    assert_eq!(fixture.set(&pod, "a: running"), changed(2));
    assert_eq!(fixture.set(&pod, "a: running"), StatusUpdate::Unchanged);
}

#[test]
fn a_pod_being_deleted_is_sent_even_when_nothing_changed() {
    let pod = mk_pod("always | deleted | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    assert_eq!(fixture.set(&pod, "a: running"), changed(2));
}

#[test]
fn start_time_and_dates_of_unchanged_conditions_stay() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running 30s");
    let mut late = status_of(&pod, "a: running 30s; sandbox ready 20s", None, later(100));
    late.message = Some("news".to_owned());
    assert_eq!(fixture.offer(&pod, late, later(100)), changed(2));
    assert!(fixture.show().starts_with("Running \"news\" ip=10.1.0.7 host= qos=BestEffort start=-60s"));
    assert_eq!(fixture.line("PodScheduled"), "PodScheduled=True +0s");
}

#[test]
fn a_static_pod_s_dates_follow_its_first_sandbox() {
    let pod = mk_pod("always | static | main a");
    let mut fixture = StatusFixture::with(&pod);
    let early = Now { wall: ago(65), ..now() };
    fixture.offer(&pod, status_of(&pod, "sandbox gone", None, early), early);
    assert!(fixture.line("Pending").ends_with("start=-65s"));
    fixture.set(&pod, "a: running");
    assert!(fixture.line("Running").ends_with("start=-60s"));
    assert_eq!(fixture.line("PodScheduled"), "PodScheduled=True -60s");
}

#[test]
fn a_status_without_dates_is_dated_now() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    let rejected = PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some("NodePorts".to_owned()),
        message: Some("Pod was rejected: no".to_owned()),
        ..PodStatus::default()
    };
    let moment = Now { wall: later(3).wall + Duration::from_millis(500), ..later(3) };
    fixture.offer(&pod, rejected, moment);
    assert_eq!(fixture.show(), "Failed(NodePorts) \"Pod was rejected: no\" ip= host= qos=- start=+3s");
    let start = fixture.manager.pod_statuses[&"u1".into()].status.start_time.clone();
    assert_eq!(start, Some(Time(later(3).wall)), "in whole seconds, as it will be stored");
}

#[test]
fn observed_generation_never_decreases() {
    let mut pod = mk_pod("always | main a");
    pod.metadata.generation = Some(7);
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "");
    pod.metadata.generation = Some(6);
    fixture.set(&pod, "a: running");
    assert_eq!(fixture.manager.pod_statuses[&"u1".into()].status.observed_generation, Some(7));
}

#[test]
fn a_disruption_is_dated_and_conditions_of_others_are_not() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    let mut status = status_of(&pod, "a: running", None, now());
    status.conditions.as_mut().expect("some").extend([condition(DISRUPTION_TARGET, "True"), condition("lb", "True")]);
    fixture.offer(&pod, status, later(3));
    assert_eq!(fixture.line(DISRUPTION_TARGET), "DisruptionTarget=True +3s");
    assert_eq!(fixture.line("lb"), "lb=True @never");
}

#[test]
fn restart_rules_allow_a_container_to_come_back() {
    let rule =
        |action: &str| serde_json::json!([{ "action": action, "exitCodes": { "operator": "In", "values": [9] } }]);
    for (container, own_policy, rules, allowed) in [
        ("a", None, None, false),
        ("a", Some("Always"), None, true),
        ("b", Some("Always"), None, false),
        ("b", Some("Never"), Some(rule("Restart")), false),
        ("b", Some("Never"), Some(rule("RestartAllContainers")), true),
    ] {
        let mut pod = mk_pod("never | main a | main b");
        let shown = format!("{container} {own_policy:?} {rules:?}");
        let spec = pod.spec.as_mut().expect("a spec");
        let found = spec.containers.iter_mut().find(|found| found.name == container).expect("it is there");
        found.restart_policy = own_policy.map(str::to_owned);
        found.restart_policy_rules = rules.map(|rules| serde_json::from_value(rules).expect("rules"));
        let mut fixture = StatusFixture::with(&pod);
        fixture.set(&pod, "a: exit(1); b: running");
        let change = fixture.offer(&pod, status_of(&pod, "a: running; b: running", None, now()), now());
        assert_eq!(change == changed(2), allowed, "{shown}: {change:?}");
    }
}

#[test]
fn a_container_that_ended_for_good_cannot_come_back() {
    for (pod, before, after, allowed) in [
        ("always | main a", "a: exit(0)", "a: running", true),
        ("onfailure | main a", "a: exit(1)", "a: running", true),
        ("onfailure | main a", "a: exit(0)", "a: running", false),
        ("never | main a", "a: exit(1)", "a: running", false),
        ("never | main a", "a: exit(1)", "a: created", false),
        ("never | main a", "a: running", "a: exit(1)", true),
        ("never | init i | main a", "i: exit(0)", "i: running", false),
        ("never | sidecar s | main a", "s: exit(0)", "s: running", true),
        ("onfailure | init i | main a", "i: exit(1)", "i: running", true),
    ] {
        let pod = mk_pod(pod);
        let mut fixture = StatusFixture::with(&pod);
        fixture.set(&pod, before);
        let old = fixture.show();
        // Without the previous status, which would be kept on the way.
        let offered = status_of(&pod, after, None, now());
        match fixture.offer(&pod, offered, now()) {
            StatusUpdate::Changed { .. } => assert!(allowed, "{before} to {after}"),
            StatusUpdate::Refused(_) => {
                assert!(!allowed, "{before} to {after}");
                assert_eq!(fixture.show(), old, "the old status is kept");
            }
            StatusUpdate::Unchanged => panic!("{before} to {after} is a change"),
        }
    }
}

#[test]
fn illegal_transition_names_the_container() {
    let pod = mk_pod("never | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: exit(1)");
    let StatusUpdate::Refused(why) = fixture.offer(&pod, status_of(&pod, "a: running", None, now()), now()) else {
        panic!("refused");
    };
    assert_eq!(why.to_string(), "terminated container a attempted illegal transition to non-terminated state");
}

#[test]
fn readiness_changes_the_container_and_both_conditions() {
    let pod = mk_pod("always | main a | main b");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running; b: running");
    assert_eq!(fixture.readiness("a0", ContainerReadiness::Unready), changed(2));
    assert_eq!(fixture.line("main a"), "main a: running -30s, restarts=0 started");
    assert_eq!(fixture.line("Ready"), "Ready=False(ContainersNotReady) \"containers with unready status: [a]\" +60s");
    assert_eq!(
        fixture.line("ContainersReady"),
        "ContainersReady=False(ContainersNotReady) \"containers with unready status: [a]\" +60s"
    );
    assert_eq!(fixture.line("Initialized"), "Initialized=True +0s");
    assert_eq!(fixture.readiness("a0", ContainerReadiness::Unready), StatusUpdate::Unchanged);
    assert_eq!(fixture.readiness("a0", ContainerReadiness::Ready), changed(3));
}

#[test]
fn probe_results_of_unknown_containers_are_ignored() {
    let pod = mk_pod("always | main a");
    assert_eq!(
        StatusFixture::default().readiness("a0", ContainerReadiness::Ready),
        StatusUpdate::Unchanged,
        "no such pod"
    );
    let mut fixture = StatusFixture::with(&pod);
    assert_eq!(fixture.readiness("a0", ContainerReadiness::Ready), StatusUpdate::Unchanged, "no status yet");
    fixture.set(&pod, "a: running");
    assert_eq!(fixture.readiness("a9", ContainerReadiness::Unready), StatusUpdate::Unchanged, "no such container");
    assert_eq!(fixture.startup("a9", Startup::NotStarted), StatusUpdate::Unchanged, "no such container");
}

#[test]
fn startup_changes_the_container_only() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    assert_eq!(fixture.startup("a0", Startup::NotStarted), changed(2));
    assert_eq!(fixture.line("main a"), "main a: running -30s, restarts=0 ready");
    assert_eq!(fixture.startup("a0", Startup::NotStarted), StatusUpdate::Unchanged);
}

#[test]
fn termination_fails_containers_without_an_observed_exit() {
    let lost =
        "exit 137(ContainerStatusUnknown) \"The container could not be located when the pod was terminated\" @never";
    for (pod, seen, phase, containers) in [
        ("always | main a", "a: running", "Failed", vec![format!("main a: {lost}, restarts=0")]),
        ("always | main a", "", "Failed", vec![format!("main a: {lost}, restarts=0")]),
        ("never | main a", "a: exit(0)", "Succeeded", vec!["main a: exit 0(Completed) -30s, restarts=0".to_owned()]),
        (
            "always | init i | init j | main a",
            "",
            "Failed",
            vec![
                format!("init i: {lost}, restarts=0"),
                "init j: waiting(PodInitializing), restarts=0".to_owned(),
                "main a: waiting(PodInitializing), restarts=0".to_owned(),
            ],
        ),
        (
            "always | init i | main a",
            "i: exit(0)",
            "Failed",
            vec!["init i: exit 0(Completed) -30s, restarts=0 ready".to_owned(), format!("main a: {lost}, restarts=0")],
        ),
        (
            "always | sidecar s | main a",
            "s: running",
            "Failed",
            vec![format!("init s: {lost}, restarts=0"), format!("main a: {lost}, restarts=0")],
        ),
        (
            "always | static | main a",
            "a: exit(0)",
            "Running",
            vec!["main a: exit 0(Completed) -30s, restarts=0".to_owned()],
        ),
        // It is initialized again, in a new sandbox.
        (
            "always | init i | init j | main a",
            "i: exit(0); j: running; a: running",
            "Failed",
            vec![
                "init i: exit 0(Completed) -30s, restarts=0 ready".to_owned(),
                format!("init j: {lost}, restarts=0"),
                format!("main a: {lost}, restarts=0"),
            ],
        ),
    ] {
        let pod = mk_pod(pod);
        let mut fixture = StatusFixture::with(&pod);
        fixture.set(&pod, seen);
        assert_eq!(fixture.terminate(&pod), changed(2));
        let shown = fixture.show();
        let lines: Vec<_> =
            shown.lines().filter(|line| line.starts_with("init ") || line.starts_with("main ")).collect();
        assert_eq!(lines, containers, "{seen}");
        assert!(shown.starts_with(phase), "{shown}");
    }
}

#[test]
fn pod_with_unstarted_sidecar_was_never_initialized() {
    let mut pod = mk_pod("always | sidecar s | main a");
    pod.spec.as_mut().expect("a spec").init_containers.as_mut().expect("one")[0].startup_probe = Some(Probe::default());
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "s: running");
    fixture.terminate(&pod);
    assert_eq!(fixture.line("main a"), "main a: waiting(PodInitializing), restarts=0");
}

#[test]
fn a_pod_that_is_terminated_without_a_status_has_failed() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    assert_eq!(fixture.terminate(&pod), changed(1));
    assert!(fixture.show().starts_with("Failed"));
}

#[test]
fn a_terminated_pod_is_not_ready_any_more() {
    let pod = mk_pod("always | static | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    fixture.terminate(&pod);
    assert_eq!(fixture.line("Ready"), "Ready=False(ContainersNotReady) \"containers with unready status: [a]\" +60s");
    assert_eq!(fixture.line("PodScheduled"), "PodScheduled=True -60s");

    let mut unready = StatusFixture::with(&pod);
    unready.set(&pod, "a: exit(1)");
    unready.terminate(&pod);
    assert!(unready.line("Ready").ends_with("-30s"), "{}", unready.line("Ready"));
}

#[test]
fn reclaimed_pod_stays_reclaimed() {
    let pod = mk_pod("never | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    assert_eq!(fixture.manager.pod_statuses[&"u1".into()].reclaimed, Reclaimed::No);
    fixture.terminate(&pod);
    let mut again = PodStatus::clone(&fixture.manager.pod_statuses[&"u1".into()].status);
    again.message = Some("late".to_owned());
    assert_eq!(fixture.offer(&pod, again, later(70)), changed(3));
    assert_eq!(fixture.manager.pod_statuses[&"u1".into()].reclaimed, Reclaimed::Yes);
}

#[test]
fn versions_continue_if_an_orphaned_pod_returns() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "");
    fixture.set(&pod, "a: running");
    fixture.manager.note_synced(&"u1".into(), 2);
    fixture.manager.remove_orphaned_statuses(&BTreeSet::from(["u1".into()]));
    assert!(fixture.manager.versioned_pod_status(&"u1".into()).is_some());
    fixture.manager.remove_orphaned_statuses(&BTreeSet::new());
    assert!(fixture.manager.versioned_pod_status(&"u1".into()).is_none());
    assert_eq!(fixture.set(&pod, "a: running"), changed(3));
}

#[test]
fn pod_gone_from_node_and_api_leaves_no_state() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    fixture.stored(&pod);
    fixture.manager.note_synced(&"u1".into(), 1);
    fixture.manager.mark_unconfirmed(&"u1".into());
    fixture.manager.note_gone(&"u1".into(), &"u1".into());
    fixture.manager.forget_api_pod(&"u1".into());
    fixture.manager.remove_orphaned_statuses(&BTreeSet::new());
    assert_eq!(fixture.manager.uids().count(), 0, "{:?}", fixture.manager);
}

#[test]
fn no_status_is_sent_for_a_pod_missing_in_the_api() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "");
    fixture.manager.note_gone(&"u1".into(), &"u1".into());
    assert_eq!(fixture.manager.changed.len(), 0);
    fixture.set(&pod, "a: running");
    assert_eq!((fixture.due(Batch::Changed).as_str(), fixture.manager.changed.len()), ("", 0));
    fixture.watched(&pod);
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v2");
}

#[test]
fn patch_without_response_is_followed_by_a_whole_one() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    let patch = |fixture: &mut StatusFixture| {
        let context = StatusContext { pods: &fixture.pods, now: now() };
        match fixture.manager.next_step(&"u1".into(), RunningContainers::Possible, context) {
            Some(StatusStep::Patch { patch, .. }) => patch["status"].clone(),
            other => panic!("{other:?}"),
        }
    };
    fixture.set(&pod, "a: running");
    let pod = fixture.stored(&pod);
    fixture.manager.mark_unconfirmed(&"u1".into());
    assert_eq!(patch(&mut fixture)["phase"], "Running", "although the copy known here has it");
    fixture.manager.note_synced(&"u1".into(), 1);
    let news = PodStatus { message: Some("news".to_owned()), ..pod.status.clone().expect("it was stored") };
    fixture.offer(&pod, news, now());
    assert_eq!(patch(&mut fixture), serde_json::json!({ "message": "news" }));
}

#[test]
fn a_change_is_sent_until_the_api_server_has_its_version() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "");
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v1");
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v1", "asking is not sending");
    fixture.manager.note_synced(&"u1".into(), 1);
    assert_eq!(fixture.due(Batch::Changed), "");
    fixture.set(&pod, "a: running");
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v2");
    fixture.manager.note_synced(&"u1".into(), 2);
    fixture.manager.note_synced(&"u1".into(), 1);
    assert_eq!(fixture.due(Batch::Changed), "", "a late answer takes nothing back");
}

#[test]
fn restart_sends_no_status_the_api_already_has() {
    let pod = mk_pod("always | main a");
    let mut before = StatusFixture::with(&pod);
    before.set(&pod, "a: running");
    let pod = before.stored(&pod);

    let mut fixture = StatusFixture::with(&pod);
    assert_eq!(fixture.set(&pod, "a: running"), changed(1));
    assert_eq!(fixture.due(Batch::Changed), "");
    assert_eq!(fixture.manager.changed.len(), 0, "it counts as told");
    fixture.watched(&pod);
    assert_eq!(fixture.manager.changed.len(), 0, "for ever");
}

#[test]
fn another_spelling_of_a_quantity_is_not_sent() {
    let limit = |pod: &mut PodStatus, text: &str| {
        let memory = k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.to_owned());
        let limits = Some(BTreeMap::from([("memory".to_owned(), memory)]));
        pod.container_statuses.as_mut().expect("one")[0].resources.get_or_insert_default().limits = limits;
    };
    let mut pod = mk_pod("always | main a");
    let mut status = status_of(&pod, "a: running", None, now());
    limit(&mut status, "100M");
    pod.status = Some(status.clone());

    let mut fixture = StatusFixture::with(&pod);
    limit(&mut status, "100000000");
    fixture.offer(&pod, status.clone(), now());
    assert_eq!(fixture.due(Batch::Changed), "");
    assert_eq!(fixture.manager.changed.len(), 0, "it counts as told");
    limit(&mut status, "100Mi");
    fixture.offer(&pod, status, now());
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v2");
}

#[test]
fn static_pod_status_is_sent_only_to_its_mirror() {
    let pod = mk_pod("always | static | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "");
    assert_eq!(fixture.due(Batch::Changed), "");
    assert_eq!(fixture.due(Batch::Reconcile), "");
    fixture.watched(&mirror_of(&pod, "m1"));
    assert_eq!(fixture.due(Batch::Changed), "patch m1 v1");
    fixture.manager.note_synced(&"m1".into(), 1);
    assert_eq!(fixture.due(Batch::Changed), "");
    assert_eq!(
        fixture.manager.pod_status(&"m1".into(), &fixture.pods),
        fixture.manager.pod_status(&"u1".into(), &fixture.pods)
    );
    fixture.watched(&mirror_of(&pod, "m2"));
    assert_eq!(fixture.due(Batch::Changed), "patch m2 v1", "a mirror made anew has heard nothing");
}

#[test]
fn a_status_the_api_server_holds_differently_is_sent_again() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    fixture.manager.note_synced(&"u1".into(), 1);
    let mut pod = fixture.stored(&pod);
    assert_eq!(fixture.due(Batch::Reconcile), "", "the API server has it");
    let start = &mut pod.status.as_mut().expect("it was stored").start_time;
    *start = start.take().map(|start| Time(start.0 + Duration::from_millis(500)));
    fixture.watched(&pod);
    let ours = &fixture.manager.pod_statuses[&"u1".into()].status;
    assert!(!needs_reconcile(&"u1".into(), ours, &fixture.pods), "nor does a fraction of a second differ");

    phase(&mut pod, "Pending");
    fixture.watched(&pod);
    assert_eq!(fixture.due(Batch::Changed), "", "reconciling waits for its round");
    assert_eq!(fixture.due(Batch::Reconcile), "patch u1 v1");
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v1", "it counts as not sent");
}

#[test]
fn a_static_pod_is_reconciled_with_its_mirror() {
    let pod = mk_pod("always | static | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: running");
    let mut mirror = mirror_of(&pod, "m1");
    mirror.status = Some(PodStatus::clone(&fixture.manager.pod_statuses[&"u1".into()].status));
    fixture.watched(&mirror);
    fixture.manager.note_synced(&"m1".into(), 1);
    assert_eq!(fixture.due(Batch::Reconcile), "");
    phase(&mut mirror, "Pending");
    fixture.watched(&mirror);
    assert_eq!(fixture.due(Batch::Reconcile), "patch m1 v1");
}

#[test]
fn terminations_are_sent_first_then_readiness_then_the_rest() {
    let named = |uid: &str| {
        let mut pod = mk_pod("never | main a");
        pod.metadata.uid = Some(uid.to_owned());
        pod.metadata.name = Some(uid.to_owned());
        pod
    };
    let mut fixture = StatusFixture::default();
    for uid in ["a", "b", "c"] {
        let mut pod = named(uid);
        phase(&mut pod, "Running");
        fixture.pods.add_pod(Arc::new(pod.clone()));
        let ours = match uid {
            "a" => PodStatus {
                phase: Some("Running".to_owned()),
                message: Some("noise".to_owned()),
                ..PodStatus::default()
            },
            "b" => status_of(&pod, "a: running", None, now()),
            _ => PodStatus { phase: Some("Failed".to_owned()), ..PodStatus::default() },
        };
        fixture.offer(&pod, ours, now());
    }
    assert_eq!(fixture.due(Batch::Changed), "patch c v1, patch b v1, patch a v1");
}

#[test]
fn awaited_changes_are_urgent() {
    let mut pod = mk_pod("never | main a");
    let running = status_of(&pod, "a: running", None, now());
    pod.status = Some(running.clone());
    let pod = Arc::new(pod);
    let with = |change: fn(&mut PodStatus)| {
        let mut ours = running.clone();
        change(&mut ours);
        urgency(Some(&pod), &ours)
    };
    assert_eq!(with(|_| {}), 0);
    assert_eq!(with(|ours| ours.message = Some("noise".to_owned())), 0);
    assert_eq!(with(|ours| ours.phase = Some("Pending".to_owned())), 1);
    assert_eq!(with(|ours| ours.pod_ip = None), 1);
    assert_eq!(with(|ours| ours.conditions = None), 1, "it is not ready any more");
    assert_eq!(with(|ours| ours.phase = Some("Failed".to_owned())), 2);
    assert_eq!(urgency(None, &PodStatus::default()), 0);
}

#[test]
fn empty_equals_absent_and_amounts_equal_by_value() {
    use serde_json::{Value, json};
    let in_container = |fields: Value| {
        let mut container = json!({ "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0 });
        container.as_object_mut().expect("an object").extend(fields.as_object().expect("fields").clone());
        json!({ "containerStatuses": [container] })
    };
    let sized = |limit: &str, request: &str| json!({ "limits": { "cpu": limit }, "requests": { "cpu": request } });
    let ended = |message: &str| json!({ "terminated": { "exitCode": 1, "message": message } });
    let date = "2026-06-01T12:00:00Z";
    for (one, other, equal) in [
        (json!({ "resourceClaimStatuses": [{ "name": "c" }] }), json!({}), true),
        (
            json!({ "extendedResourceClaimStatus": { "requestMappings": [], "resourceClaimName": "c" } }),
            json!({}),
            true,
        ),
        (json!({ "podIPs": [], "hostIPs": [], "containerStatuses": [] }), json!({}), true),
        (json!({ "podIPs": [{ "ip": "10.0.0.1" }] }), json!({}), false),
        (json!({ "allocatedResources": {}, "resources": {} }), json!({}), true),
        (json!({ "resources": { "limits": {}, "requests": {}, "claims": [] } }), json!({}), true),
        (json!({ "allocatedResources": { "cpu": "1" } }), json!({ "allocatedResources": { "cpu": "1000m" } }), true),
        (json!({ "allocatedResources": { "cpu": "1" } }), json!({ "allocatedResources": { "cpu": "2" } }), false),
        (json!({ "resources": sized("1", "0.5") }), json!({ "resources": sized("1000m", "500m") }), true),
        (json!({ "resources": sized("1", "1") }), json!({ "resources": sized("2", "1") }), false),
        (json!({ "resources": sized("1", "1") }), json!({}), false),
        (
            in_container(json!({ "resources": sized("1", "0.5") })),
            in_container(json!({ "resources": sized("1000m", "500m") })),
            true,
        ),
        (
            in_container(json!({ "resources": sized("1", "1") })),
            in_container(json!({ "resources": sized("1", "2") })),
            false,
        ),
        (in_container(json!({ "lastState": {} })), in_container(json!({})), true),
        (in_container(json!({ "state": { "running": { "startedAt": date } } })), in_container(json!({})), false),
        (
            in_container(json!({ "state": { "waiting": { "reason": "", "message": "" } } })),
            in_container(json!({ "state": { "waiting": {} } })),
            true,
        ),
        (
            in_container(json!({ "lastState": ended("") })),
            in_container(json!({ "lastState": { "terminated": { "exitCode": 1 } } })),
            true,
        ),
        (in_container(json!({ "lastState": ended("x") })), in_container(json!({ "lastState": ended("y") })), false),
    ] {
        let status = |fields: &Value| -> PodStatus { serde_json::from_value(fields.clone()).expect("a status") };
        assert_eq!(is_pod_status_by_kubelet_equal(&status(&one), &status(&other)), equal, "{one} and {other}");
    }
}

#[test]
fn foreign_conditions_and_spellings_are_equal() {
    let pod = mk_pod("always | main a");
    let ours = status_of(&pod, "a: running", None, now());
    let mut theirs = ours.clone();
    let conditions = theirs.conditions.as_mut().expect("some");
    conditions.push(PodCondition { type_: "lb".to_owned(), status: "True".to_owned(), ..PodCondition::default() });
    conditions[0].last_transition_time = Some(Time(ago(1)));
    theirs.reason = Some(String::new());
    theirs.ephemeral_container_statuses = Some(Vec::new());
    let resources = |text: &str| {
        let cpu = k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.to_owned());
        Some(BTreeMap::from([("cpu".to_owned(), cpu)]))
    };
    let mut ours = ours;
    ours.container_statuses.as_mut().expect("one")[0].allocated_resources = resources("1000m");
    theirs.container_statuses.as_mut().expect("one")[0].allocated_resources = resources("1");
    assert!(is_pod_status_by_kubelet_equal(&ours, &theirs));
    theirs.conditions.as_mut().expect("some")[0].message = Some("else".to_owned());
    assert!(!is_pod_status_by_kubelet_equal(&ours, &theirs));
}

#[test]
fn a_pod_is_deleted_only_when_asked_for_ended_and_reclaimed() {
    let ended = |text: &str| {
        let mut pod = mk_pod(text);
        phase(&mut pod, "Failed");
        pod
    };
    assert!(can_be_deleted(&ended("always | deleted | main a"), Reclaimed::Yes));
    assert!(!can_be_deleted(&ended("always | deleted | main a"), Reclaimed::No));
    assert!(!can_be_deleted(&ended("always | main a"), Reclaimed::Yes), "nobody asked");
    assert!(!can_be_deleted(&mk_pod("always | deleted | main a"), Reclaimed::Yes), "the API has not seen it end");
    let mirror = mirror_of(&ended("always | static | deleted | main a"), "m1");
    assert!(!can_be_deleted(&mirror, Reclaimed::Yes), "a mirror pod goes with its static pod");
}

#[test]
fn pod_is_deleted_once_after_its_final_status() {
    let pod = mk_pod("always | deleted | main a");
    let mut fixture = StatusFixture::with(&pod);
    fixture.set(&pod, "a: exit(0)");
    fixture.terminate(&pod);
    assert_eq!(fixture.due(Batch::Changed), "patch u1 v2");
    fixture.manager.note_synced(&"u1".into(), 2);
    fixture.stored(&pod);
    assert_eq!(fixture.due(Batch::Changed), "delete u1");
    assert_eq!(fixture.due(Batch::Changed), "delete u1", "until it is gone");
    fixture.manager.note_gone(&"u1".into(), &"u1".into());
    assert_eq!(fixture.due(Batch::Reconcile), "");
}

#[test]
fn merging_keeps_conditions_of_others_and_replaces_ours() {
    let mut stored = mk_pod("always | main a");
    let ours = status_of(&stored, "a: running", None, now());
    let held = PodStatus {
        conditions: Some(vec![
            condition("lb", "True"),
            condition("Ready", "False"),
            condition("DisruptionTarget", "True"),
        ]),
        ..PodStatus::default()
    };
    stored.status = Some(held);
    let merged = merge_pod_status(&stored, &ours, RunningContainers::Possible, now());
    let types: Vec<_> = merged.conditions.iter().flatten().map(|it| format!("{}={}", it.type_, it.status)).collect();
    assert_eq!(types[..2], ["lb=True", "DisruptionTarget=True"]);
    assert!(types.contains(&"Ready=True".to_owned()) && !types.contains(&"Ready=False".to_owned()), "{types:?}");
}

#[test]
fn merging_keeps_the_claims_the_api_server_has() {
    let mut stored = mk_pod("always | main a");
    let ours = status_of(&stored, "a: running", None, now());
    let held = PodStatus {
        resource_claim_statuses: Some(vec![Default::default()]),
        extended_resource_claim_status: Some(Default::default()),
        node_allocatable_resource_claim_statuses: Some(vec![Default::default()]),
        ..PodStatus::default()
    };
    stored.status = Some(held.clone());
    let merged = merge_pod_status(&stored, &ours, RunningContainers::Possible, now());
    assert_eq!(merged.resource_claim_statuses, held.resource_claim_statuses);
    assert_eq!(merged.extended_resource_claim_status, held.extended_resource_claim_status);
    assert_eq!(merged.node_allocatable_resource_claim_statuses, held.node_allocatable_resource_claim_statuses);
}

#[test]
fn the_date_of_a_condition_changes_with_its_status_only() {
    let mut stored = mk_pod("always | main a");
    stored.status = Some(status_of(&stored, "a: running", None, now()));
    let mut ours = status_of(&stored, "a: running", None, now());
    for condition in ours.conditions.iter_mut().flatten() {
        condition.last_transition_time = Some(Time(later(70).wall));
    }
    let merged = merge_pod_status(&stored, &ours, RunningContainers::Possible, later(70));
    assert_eq!(status_patch(&stored, &merged), None);
    let ready = ours.conditions.iter_mut().flatten().find(|it| it.type_ == "Ready").expect("every status has one");
    ready.status = "False".to_owned();
    let merged = merge_pod_status(&stored, &ours, RunningContainers::Possible, later(70));
    let date = conditions::find(&merged, "Ready").and_then(|ready| ready.last_transition_time.clone());
    assert_eq!(date, Some(Time(later(70).wall)));
}

#[test]
fn phase_is_not_terminal_while_a_container_may_run() {
    let mut stored = mk_pod("never | main a");
    phase(&mut stored, "Running");
    let mut ours = status_of(&stored, "a: exit(1)", None, now());
    ours.reason = Some("Evicted".to_owned());
    ours.message = Some("no room".to_owned());
    ours.conditions.as_mut().expect("some").push(condition(DISRUPTION_TARGET, "True"));

    let early = merge_pod_status(&stored, &ours, RunningContainers::Possible, later(9));
    assert_eq!(
        (early.phase.as_deref(), early.reason.as_deref(), early.message.as_deref()),
        (Some("Running"), None, None)
    );
    assert!(conditions::find(&early, DISRUPTION_TARGET).is_none());

    let late = merge_pod_status(&stored, &ours, RunningContainers::None, later(9));
    assert_eq!((late.phase.as_deref(), late.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    let disruption = conditions::find(&late, DISRUPTION_TARGET).expect("sent with the end");
    assert_eq!(disruption.last_transition_time, Some(Time(later(9).wall)));

    for (before, date) in [("True", ago(9)), ("False", later(9).wall)] {
        let known = PodCondition { last_transition_time: Some(Time(ago(9))), ..condition(DISRUPTION_TARGET, before) };
        stored.status.get_or_insert_default().conditions = Some(vec![known]);
        let late = merge_pod_status(&stored, &ours, RunningContainers::None, later(9));
        let disruption = conditions::find(&late, DISRUPTION_TARGET).expect("sent with the end");
        assert_eq!(disruption.last_transition_time, Some(Time(date)), "it was {before}");
    }
    stored.status.get_or_insert_default().conditions = None;

    phase(&mut stored, "Failed");
    let again = merge_pod_status(&stored, &ours, RunningContainers::None, later(20));
    assert!(conditions::find(&again, DISRUPTION_TARGET).is_none(), "it is sent with the end or never");
}

#[test]
fn an_ended_pod_is_never_sent_as_ready() {
    let stored = mk_pod("always | main a");
    let mut ours = status_of(&stored, "a: running", None, now());
    ours.phase = Some("Failed".to_owned());
    let mut merged = |ready: &str, containers_ready: &str| {
        for (name, status) in [(READY, ready), (CONTAINERS_READY, containers_ready)] {
            let conditions = ours.conditions.as_mut().expect("some");
            let dated = PodCondition { last_transition_time: Some(Time(ago(5))), ..condition(name, status) };
            conditions::replace_or_append(conditions, dated);
        }
        let shown = show(&merge_pod_status(&stored, &ours, RunningContainers::None, later(9)));
        shown.lines().filter(|line| line.contains("Ready=")).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(merged("True", "True"), "Ready=False(PodFailed) +9s, ContainersReady=False(PodFailed) +9s");
    assert_eq!(merged("False", "True"), "Ready=False(PodFailed) -5s, ContainersReady=False(PodFailed) +9s");
    assert_eq!(merged("False", "False"), "Ready=False -5s, ContainersReady=False -5s", "it has nothing to withdraw");
}

#[test]
fn changed_readiness_gates_need_a_reconcile() {
    let mut pod = mk_pod("always | main a");
    pod.status = Some(status_of(&pod, "a: running", None, now()));
    assert!(!need_to_reconcile_pod_readiness(&pod), "no gates");
    pod.spec.as_mut().expect("a spec").readiness_gates =
        Some(vec![PodReadinessGate { condition_type: "lb".to_owned() }]);
    assert!(need_to_reconcile_pod_readiness(&pod), "the gate is closed, yet the pod is ready");
    let told = conditions::pod_ready_condition(&pod, pod.status.as_ref().expect("a status"));
    let mut with = |ready: PodCondition| {
        let held = pod.status.as_mut().and_then(|status| status.conditions.as_mut()).expect("some");
        conditions::replace_or_append(held, ready);
        need_to_reconcile_pod_readiness(&pod)
    };
    assert!(!with(told.clone()), "it says so");
    assert!(with(PodCondition { message: None, ..told }), "it does not say why");
}

fn any_look() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just(""),
        Just("a: created"),
        Just("a: running"),
        Just("a: exit(0)"),
        Just("a: exit(1)"),
        Just("a: unknown"),
        Just("a: exit(1), running"),
    ]
}

proptest! {
    #[test]
    fn versions_grow_with_changes_and_only_then(
        policy in prop_oneof![Just("always"), Just("onfailure"), Just("never")],
        looks in proptest::collection::vec(any_look(), 1..12),
    ) {
        let pod = mk_pod(&format!("{policy} | main a"));
        let mut fixture = StatusFixture::with(&pod);
        let mut version = 0;
        for look in looks {
            let before = fixture.manager.pod_statuses.get(&"u1".into()).cloned();
            match fixture.set(&pod, look) {
                StatusUpdate::Changed { version: new } => {
                    assert_eq!(new, version + 1);
                    version = new;
                }
                StatusUpdate::Unchanged | StatusUpdate::Refused(_) => {
                    assert_eq!(fixture.manager.pod_statuses.get(&"u1".into()).cloned(), before);
                }
            }
            assert_eq!(fixture.manager.pod_statuses[&"u1".into()].version, version);
        }
    }

    #[test]
    fn setting_a_status_twice_is_setting_it_once(look in any_look()) {
        let pod = mk_pod("onfailure | main a");
        let mut fixture = StatusFixture::with(&pod);
        let status = status_of(&pod, look, None, now());
        assert_eq!(fixture.offer(&pod, status.clone(), now()), changed(1));
        assert_eq!(fixture.offer(&pod, status, later(50)), StatusUpdate::Unchanged);
    }
}

#[test]
fn patch_is_dated_by_its_first_unsent_change() {
    let pod = mk_pod("always | main a");
    let mut fixture = StatusFixture::with(&pod);
    let mut since = |phase: &str, secs: u64, then: fn(&mut StatusManager, u64)| {
        let status = PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
        fixture.offer(&pod, status, later(secs));
        let context = StatusContext { pods: &fixture.pods, now: later(secs) };
        let step = fixture.manager.next_step(&"u1".into(), RunningContainers::None, context);
        let Some(StatusStep::Patch { version, since, .. }) = step else { panic!("{step:?}") };
        then(&mut fixture.manager, version);
        since
    };
    let [first, third] = [1, 3].map(|secs| later(secs).uptime);
    assert_eq!(since("Pending", 1, |_, _| {}), first);
    assert_eq!(since("Running", 2, |manager, version| manager.note_synced(&"u1".into(), version)), first);
    assert_eq!(since("Failed", 3, |_, _| {}), third);
}
