//! Tables and snapshots for `pod_status`.

use insta::assert_snapshot;
use k8s_openapi::api::core::v1::{PodCondition, PodReadinessGate, Probe, VolumeMount};
use proptest::prelude::{Just, Strategy, prop_oneof, proptest};

use super::*;
use crate::{
    id::ContainerId,
    observation::{ContainerResources, ContainerState, ContainerUser, Exit, RuntimeHandler},
    test_support::{ago, facts, later, mk_pod, now, show},
};

/// The input of `pod_status`, with usual values.
struct Case {
    pod: Pod,
    facts: PodFacts,
    previous: Option<PodStatus>,
    stored: Option<PodStatus>,
    waiting: BTreeMap<String, Waiting>,
    restarting: BTreeSet<ContainerId>,
    is_resize_pending: bool,
    worker_state: PodWorkerState,
    host_ips: Vec<String>,
    runtime: RuntimeStatus,
    failed: Option<PodFailure>,
    now: Now,
}

impl Case {
    fn new(pod: &str, seen: &str) -> Case {
        Case {
            pod: mk_pod(pod),
            facts: facts(seen),
            previous: None,
            stored: None,
            waiting: BTreeMap::new(),
            restarting: BTreeSet::new(),
            is_resize_pending: false,
            worker_state: PodWorkerState::Syncing,
            host_ips: vec!["192.0.2.1".to_owned()],
            runtime: RuntimeStatus { name: "containerd".to_owned(), ..RuntimeStatus::default() },
            failed: None,
            now: now(),
        }
    }

    fn waiting(mut self, container: &str, reason: Reason, message: &str) -> Case {
        let waiting = Waiting { reason, message: message.to_owned() };
        self.waiting.insert(container.to_owned(), waiting);
        self
    }

    fn worker_state(mut self, worker_state: PodWorkerState) -> Case {
        self.worker_state = worker_state;
        self
    }

    /// The same pod after another look.
    fn then(mut self, seen: &str, now: Now) -> Case {
        self.previous = Some(self.status());
        self.facts = facts(seen);
        self.now = now;
        self
    }

    /// The agent restarted: no previous status.
    fn restarted(mut self) -> Case {
        self.previous = None;
        self.now = later(500);
        self
    }

    fn status(&self) -> PodStatus {
        pod_status(&StatusInput {
            pod: &self.pod,
            facts: &self.facts,
            previous: self.previous.as_ref(),
            stored: self.stored.as_ref(),
            waiting: &self.waiting,
            restarting: &self.restarting,
            is_resize_pending: self.is_resize_pending,
            worker_state: self.worker_state,
            host_ips: &self.host_ips,
            runtime: &self.runtime,
            failed: self.failed.as_ref(),
            now: self.now,
        })
    }

    fn show(&self) -> String {
        show(&self.status())
    }

    fn phase(&self) -> String {
        self.status().phase.expect("every status has a phase")
    }
}

#[test]
fn new_pod_is_pending_and_creating() {
    assert_snapshot!(Case::new("always | main b | main a", "sandbox gone").show(), @r#"
    Pending ip= host=192.0.2.1 qos=BestEffort start=+0s
    main a: waiting(ContainerCreating), restarts=0
    main b: waiting(ContainerCreating), restarts=0
    PodReadyToStartContainers=False +0s
    Initialized=True +0s
    Ready=False(ContainersNotReady) "containers with unready status: [b a]" +0s
    ContainersReady=False(ContainersNotReady) "containers with unready status: [b a]" +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn a_static_pod_is_ready_since_its_last_container_started() {
    assert_snapshot!(Case::new("always | static | main a | main b", "a: running 50s; b: running 20s").show(), @r#"
    Running ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: running -50s, restarts=0 started ready
    main b: running -20s, restarts=0 started ready
    PodReadyToStartContainers=True -60s
    Initialized=True -60s
    Ready=True -20s
    ContainersReady=True -20s
    PodScheduled=True -60s
    "#);
}

#[test]
fn containers_wait_while_init_containers_run_in_order() {
    let case = Case::new("always | init one | init two | main a", "one: exit(0) 40s; two: running 30s");
    assert_snapshot!(case.show(), @r#"
    Pending ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    init one: exit 0(Completed) -40s, restarts=0 ready
    init two: running -30s, restarts=0 started
    main a: waiting(PodInitializing), restarts=0
    PodReadyToStartContainers=True +0s
    Initialized=False(ContainersNotInitialized) "containers with incomplete status: [two]" +0s
    Ready=False(ContainersNotReady) "containers with unready status: [a]" +0s
    ContainersReady=False(ContainersNotReady) "containers with unready status: [a]" +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn a_failed_init_container_of_a_run_once_pod_fails_it() {
    assert_snapshot!(Case::new("never | init one | main a", "one: exit(3) 40s").show(), @r#"
    Failed ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    init one: exit 3(Error) -40s, restarts=0
    main a: waiting(PodInitializing), restarts=0
    PodReadyToStartContainers=True +0s
    Initialized=False(ContainersNotInitialized) "containers with incomplete status: [one]" +0s
    Ready=False(PodFailed) +0s
    ContainersReady=False(PodFailed) +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn a_crashing_container_waits_with_the_reason_of_its_back_off() {
    let case = Case::new("always | main a", "a: exit(1) x3 5s").waiting(
        "a",
        Reason::CrashLoopBackOff,
        "back-off 40s restarting failed container=a pod=web_default(u1)",
    );
    assert_snapshot!(case.show(), @r#"
    Running ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: waiting(CrashLoopBackOff) "back-off 40s restarting failed container=a pod=web_default(u1)", last exit 1(Error) -5s, restarts=2
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=False(ContainersNotReady) "containers with unready status: [a]" +0s
    ContainersReady=False(ContainersNotReady) "containers with unready status: [a]" +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn a_container_that_cannot_pull_shows_why() {
    let case = Case::new("always | main a", "").waiting("a", Reason::ErrImagePull, "not found");
    assert_snapshot!(case.show(), @r#"
    Pending ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: waiting(ErrImagePull) "not found", restarts=0
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=False(ContainersNotReady) "containers with unready status: [a]" +0s
    ContainersReady=False(ContainersNotReady) "containers with unready status: [a]" +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn oom_kill_becomes_the_last_state() {
    assert_snapshot!(Case::new("always | main a", "a: oom, running 10s").show(), @r#"
    Running ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: running -10s, last exit 137(OOMKilled) -130s, restarts=1 started ready
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=True +0s
    ContainersReady=True +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn a_run_once_pod_that_is_done_has_succeeded() {
    assert_snapshot!(Case::new("never | main a | main b", "a: exit(0) 20s; b: exit(0) 10s").show(), @r#"
    Succeeded ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: exit 0(Completed) -20s, restarts=0
    main b: exit 0(Completed) -10s, restarts=0
    PodReadyToStartContainers=True +0s
    Initialized=True(PodCompleted) +0s
    Ready=False(PodCompleted) +0s
    ContainersReady=False(PodCompleted) +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn sidecar_does_not_keep_the_pod_from_completing() {
    let running = Case::new("never | sidecar s | main a", "s: running 40s; a: running 30s");
    assert_snapshot!(running.show(), @r#"
    Running ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    init s: running -40s, restarts=0 started ready
    main a: running -30s, restarts=0 started ready
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=True +0s
    ContainersReady=True +0s
    PodScheduled=True +0s
    "#);
    assert_eq!(Case::new("never | sidecar s | main a", "s: exit(137) 1s; a: exit(0) 30s").phase(), "Succeeded");
}

#[test]
fn a_sidecar_that_restarts_does_not_take_an_initialized_pod_back() {
    let first_start = Case::new("always | sidecar s | main a", "s: created");
    assert!(first_start.show().contains("Initialized=False(ContainersNotInitialized)"));
    assert_eq!(first_start.phase(), "Pending");
    let restart = Case::new("always | sidecar s | main a", "s: exit(1), created 1s; a: running 30s");
    assert!(restart.show().contains("Initialized=True"), "{}", restart.show());
    assert_eq!(restart.phase(), "Running");
}

#[test]
fn starting_sidecar_blocks_only_uninitialized_pods() {
    for (seen, expected) in [("s: running", "Pending"), ("s: running; a: running", "Running")] {
        let mut case = Case::new("always | sidecar s | main a", seen);
        let init = case.pod.spec.as_mut().expect("a spec").init_containers.as_mut().expect("a sidecar");
        init[0].startup_probe = Some(Probe::default());
        let mut previous = case.status();
        previous.init_container_statuses.as_mut().expect("a sidecar")[0].started = Some(false);
        case.previous = Some(previous);
        assert_eq!(case.phase(), expected, "{seen}");
        assert!(case.show().contains("init s: running -30s, restarts=0\n"), "{}", case.show());
    }
}

#[test]
fn initialized_stays_true_while_init_containers_rerun() {
    let case =
        Case::new("always | init i | main a", "i: exit(0); a: running").then("i: exit(0), running 5s", later(60));
    assert!(case.show().contains("\nInitialized=True +0s"), "{}", case.show());
}

#[test]
fn only_ready_sandbox_with_an_address_is_ready_to_start() {
    for (seen, expected) in [
        ("sandbox ready 90s", "True"),
        ("sandbox gone", "False"),
        ("sandbox notready 90s", "False"),
        ("sandbox notready 90s, ready 10s", "True"),
        ("sandbox ready 90s, notready 10s", "False"),
        ("sandbox ready 90s, ready 10s", "False"),
    ] {
        let shown = Case::new("always | main a", seen).show();
        assert!(shown.contains(&format!("PodReadyToStartContainers={expected}")), "{seen}: {shown}");
    }
    let mut without_address = Case::new("always | main a", "");
    without_address.facts.sandboxes[0].ips.clear();
    assert!(without_address.show().contains("PodReadyToStartContainers=False"));
    let mut other_network = Case::new("always | main a", "");
    other_network.facts.sandboxes[0].host_network = true;
    assert!(other_network.show().contains("PodReadyToStartContainers=False"));
}

#[test]
fn phases_follow_states_and_restart_policy() {
    for (pod, seen, expected) in [
        ("always | main a", "a: exit(0)", "Running"),
        ("always | main a", "a: exit(1)", "Running"),
        ("onfailure | main a", "a: exit(0)", "Succeeded"),
        ("onfailure | main a", "a: exit(1)", "Running"),
        ("never | main a", "a: exit(0)", "Succeeded"),
        ("never | main a", "a: exit(1)", "Failed"),
        ("never | main a | main b", "a: exit(0); b: exit(1)", "Failed"),
        ("never | main a | main b", "a: exit(1); b: running", "Running"),
        ("never | main a | main b", "a: exit(1)", "Pending"),
        ("always | main a", "a: created", "Pending"),
        ("always | main a", "a: unknown", "Pending"),
        ("always | init i | main a", "i: exit(1)", "Pending"),
        ("onfailure | init i | main a", "i: exit(1)", "Pending"),
        ("never | init i | main a", "i: exit(1)", "Failed"),
        ("always | sidecar s | main a", "s: running", "Pending"),
        ("always | sidecar s | main a", "s: created; a: exit(0)", "Pending"),
        ("onfailure | sidecar s | main a", "s: running; a: exit(0)", "Running"),
        ("always | init i | main a", "i: running; a: exit(0)", "Pending"),
        ("never", "", "Pending"),
    ] {
        assert_eq!(Case::new(pod, seen).phase(), expected, "{pod}: {seen}");
    }
}

#[test]
fn pod_in_new_sandbox_is_pending_until_sidecar_started() {
    for (sandbox_of_a, expected) in [("sb0", "Pending"), ("sb1", "Running")] {
        let mut case =
            Case::new("always | sidecar s | main a", "sandbox notready 90s, ready 10s; s: running 5s; a: exit(0)");
        case.pod.spec.as_mut().expect("a spec").init_containers.as_mut().expect("one")[0].startup_probe =
            Some(Probe::default());
        case.facts.containers.iter_mut().filter(|it| it.name == "a").for_each(|it| it.sandbox = sandbox_of_a.into());
        assert_eq!(case.phase(), expected, "{sandbox_of_a}");
    }
}

#[test]
fn terminated_pod_has_terminal_phase_unless_static() {
    for (pod, seen, expected) in [
        ("always | main a", "a: exit(0)", "Succeeded"),
        ("always | main a", "a: exit(137)", "Failed"),
        ("always | main a", "a: exit(0), created", "Failed"),
        ("always | static | main a", "a: exit(137)", "Running"),
        ("never | static | main a", "a: exit(137)", "Failed"),
    ] {
        assert_eq!(Case::new(pod, seen).worker_state(PodWorkerState::Terminated).phase(), expected, "{pod}: {seen}");
    }
}

#[test]
fn terminating_pod_shows_exits_instead_of_waiting_reasons() {
    let case = Case::new("always | main a", "a: exit(1) x2 5s").waiting("a", Reason::CrashLoopBackOff, "");
    let shown = case.worker_state(PodWorkerState::Terminating).show();
    assert!(shown.contains("main a: exit 1(Error) -5s, last exit 1(Error) -105s, restarts=1"), "{shown}");
}

#[test]
fn lost_container_is_shown_with_its_restart_count() {
    let case = Case::new("always | main a", "a: running 30s").then("", later(60));
    assert_snapshot!(case.show(), @r#"
    Running ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: waiting(ContainerCreating), last exit 137(ContainerStatusUnknown) "The container could not be located when the pod was deleted.  The container used to be Running" @never, restarts=1
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=False(ContainersNotReady) "containers with unready status: [a]" +60s
    ContainersReady=False(ContainersNotReady) "containers with unready status: [a]" +60s
    PodScheduled=True +0s
    "#);
    let again = case.then("", later(70));
    assert_eq!(again.status().container_statuses.expect("one")[0].restart_count, 1);
}

#[test]
fn lost_container_shows_the_last_known_exit() {
    let case = Case::new("always | main a", "a: exit(2), running 30s").then("", later(60));
    assert!(
        case.show().contains("waiting(ContainerCreating), last exit 2(Error) -130s, restarts=1"),
        "{}",
        case.show()
    );
}

#[test]
fn a_lost_container_of_a_deleted_pod_was_not_restarted() {
    let case = Case::new("always | deleted | main a", "a: running 30s").then("", later(60));
    assert_eq!(case.status().container_statuses.expect("one")[0].restart_count, 0);
}

#[test]
fn running_container_in_unknown_state_has_failed() {
    let case = Case::new("never | main a", "a: running 30s").then("a: unknown", later(60));
    let shown = case.show();
    assert!(shown.contains("main a: exit 137(ContainerStatusUnknown)"), "{shown}");
    assert_eq!(case.then("a: unknown", later(70)).show().lines().nth(1), shown.lines().nth(1));
}

#[test]
fn unknown_container_does_not_show_the_previous_exit() {
    let case = Case::new("never | main a", "a: exit(1)").then("a: exit(1), unknown", later(60));
    let shown = case.worker_state(PodWorkerState::Terminating).show();
    assert!(shown.contains("\nmain a: waiting, last exit 1(Error) -130s"), "{shown}");
}

#[test]
fn an_init_container_that_completed_waits_for_nothing() {
    for (seen, expected) in [("i: exit(0)", "init i: exit 0"), ("i: exit(1)", "init i: waiting(ErrImagePull)")] {
        let case = Case::new("always | init i | main a", seen).waiting("i", Reason::ErrImagePull, "no");
        assert!(case.show().contains(&format!("\n{expected}")), "{}", case.show());
    }
}

#[test]
fn unknown_container_of_a_syncing_pod_waits_for_restart() {
    let case = Case::new("never | main a | main b", "a: running 30s; b: running 30s");
    let shown = case.then("a: unknown; b: running 90s", later(60)).show();
    let line = shown.lines().nth(1).unwrap_or_default();
    assert!(shown.starts_with("Running") && line.starts_with("main a: waiting"), "{shown}");
    assert!(line.contains("last exit 137(ContainerStatusUnknown)"), "{shown}");
}

#[test]
fn container_that_never_started_shows_the_unix_epoch() {
    let mut case = Case::new("never | main a", "a: exit(128) 5s");
    for container in &mut case.facts.containers {
        if let ContainerState::Exited(exit) = &mut container.state {
            exit.started_at = None;
        }
    }
    let status = case.status();
    let state = status.container_statuses.unwrap_or_default().remove(0).state.unwrap_or_default();
    let started_at = state.terminated.and_then(|ended| ended.started_at);
    assert_eq!(started_at, Some(Time(Timestamp::UNIX_EPOCH)));
}

#[test]
fn lost_init_container_completed_if_later_ones_exist() {
    assert_snapshot!(Case::new("always | init i | main a", "a: running 30s").show(), @r#"
    Running ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    init i: exit 0(Completed) "Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally" @never, restarts=0 ready
    main a: running -30s, restarts=0 started ready
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=True +0s
    ContainersReady=True +0s
    PodScheduled=True +0s
    "#);
}

#[test]
fn finished_container_stays_finished_when_runtime_loses_it() {
    let mut case = Case::new("never | main a | main b", "a: exit(2); b: running 30s");
    case.previous = Some(case.status());
    case.facts.containers.clear();
    // Its last start failed, and no look has shown it running since.
    case.waiting.insert("a".to_owned(), Waiting { reason: Reason::RunContainerError, message: String::new() });
    let shown = case.show();
    assert!(shown.contains("main a: exit 2(Error)"), "{shown}");
}

#[test]
fn a_dead_container_collected_meanwhile_is_still_the_last_state() {
    let case = Case::new("always | main a", "a: exit(2), running 30s").then("a: exit(2), running 30s", later(5));
    let mut collected = case;
    collected.previous = Some(collected.status());
    collected.facts.containers.truncate(1);
    let shown = collected.show();
    assert!(shown.contains("main a: running -30s, last exit 2(Error) -130s, restarts=1"), "{shown}");
}

#[test]
fn restart_counts_go_on_after_the_runtime_lost_its_state() {
    let mut case = Case::new("always | main a", "");
    case.facts.logged_attempts.insert("a".to_owned(), 4);
    assert_eq!(case.status().container_statuses.expect("one")[0].restart_count, 4);
    let ended = Case::new("always | main a", "a: exit(1) x3").then("a: running", later(10));
    let mut ended = ended;
    ended.facts.containers[0].id = "fresh".into();
    assert_eq!(ended.status().container_statuses.expect("one")[0].restart_count, 3);
}

#[test]
fn ids_images_and_mounts_are_as_users_know_them() {
    let mounted = serde_json::json!([
        { "name": "v", "mountPath": "/v" },
        { "name": "w", "mountPath": "/w", "readOnly": true },
        { "name": "x", "mountPath": "/x", "readOnly": false },
    ]);
    let shown = serde_json::json!([
        { "name": "v", "mountPath": "/v" },
        { "name": "w", "mountPath": "/w", "readOnly": true, "recursiveReadOnly": "Disabled" },
        { "name": "x", "mountPath": "/x" },
    ]);
    for (seen, id, image, image_id) in [
        ("", None, "a:1", ""),
        ("a: running", Some("containerd://a0"), "docker.io/library/a:1", "sha256:a"),
        ("a: exit(1)", Some("containerd://a0"), "docker.io/library/a:1", "sha256:a"),
    ] {
        let mut case = Case::new("always | main a", seen);
        let mounts = |case: &mut Case, given: &serde_json::Value| {
            let container = &mut case.pod.spec.as_mut().expect("a spec").containers[0];
            container.volume_mounts = serde_json::from_value(given.clone()).expect("mounts");
            serde_json::to_value(&case.status().container_statuses.expect("one")[0].volume_mounts).expect("json")
        };
        assert_eq!(mounts(&mut case, &serde_json::json!([])), serde_json::Value::Null, "{seen}");
        assert_eq!(mounts(&mut case, &mounted), shown, "{seen}");
        let status = &case.status().container_statuses.expect("one")[0];
        assert_eq!(status.container_id.as_deref(), id, "{seen}");
        assert_eq!((status.image.as_str(), status.image_id.as_str()), (image, image_id), "{seen}");
        let ended = status.state.as_ref().and_then(|state| state.terminated.as_ref());
        assert_eq!(ended.and_then(|ended| ended.container_id.as_deref()), id.filter(|_| ended.is_some()), "{seen}");
    }
}

/// The resources of the only container, and of the pod as a whole.
fn resources(case: &Case) -> String {
    let status = case.status();
    let container = &status.container_statuses.as_ref().expect("one")[0];
    let shown = (&container.resources, &container.allocated_resources, &status.resources, &status.allocated_resources);
    serde_json::to_string(&shown).expect("json")
}

#[test]
fn resources_are_what_the_runtime_reports_of_a_running_container() {
    let mut case = Case::new("always | main a", "a: running");
    let given = serde_json::json!({
        "requests": { "cpu": "1m", "memory": "20M", "ephemeral-storage": "1Mi" },
        "limits": { "cpu": "1", "memory": "100M" },
    });
    case.pod.spec.as_mut().expect("a spec").containers[0].resources = serde_json::from_value(given).expect("resources");
    let spec =
        r#"{"limits":{"cpu":"1","memory":"100M"},"requests":{"cpu":"1m","ephemeral-storage":"1Mi","memory":"20M"}}"#;
    let requests = r#"{"cpu":"1m","ephemeral-storage":"1Mi","memory":"20M"}"#;
    let of_pod = r#"{"limits":{"cpu":"1","memory":"100000000"},"requests":{"memory":"20M"}},"#;
    assert_eq!(resources(&case), format!("[{spec},{requests},{of_pod}{requests}]"));
    case.facts.containers[0].resources = ContainerResources {
        cpu_limit_millis: Some(500),
        cpu_request_millis: Some(2),
        memory_limit_bytes: Some(100_000_000),
    };
    let told = spec.replace(r#""cpu":"1","memory":"100M""#, r#""cpu":"500m","memory":"100000000""#);
    assert_eq!(resources(&case), format!("[{told},{requests},{of_pod}{requests}]"));
    let mut silent = case.then("a: running", later(9));
    assert_eq!(resources(&silent), format!("[{told},{requests},{of_pod}{requests}]"), "what was told stays");
    silent.facts = facts("a: exit(0)");
    silent.worker_state = PodWorkerState::Terminated;
    assert_eq!(resources(&silent), format!("[{spec},{requests},{spec},{requests}]"));
}

#[test]
fn requests_follow_the_runtime_or_the_last_report() {
    let mut case = Case::new("always | main a", "a: running");
    let sized = |cpu: &str, memory: &str| {
        serde_json::from_value(serde_json::json!({ "requests": { "cpu": cpu, "memory": memory } })).expect("resources")
    };
    case.pod.spec.as_mut().expect("a spec").containers[0].resources = sized("500m", "20M");
    case.facts.containers[0].resources.cpu_request_millis = Some(300);
    let told = r#"[{"requests":{"cpu":"300m","memory":"20M"}},{"cpu":"500m","memory":"20M"},"#;
    let of_pod = r#"{"requests":{"cpu":"500m","memory":"20M"}},{"cpu":"500m","memory":"20M"}]"#;
    assert_eq!(resources(&case), format!("{told}{of_pod}"));
    let mut silent = case.then("a: running", later(9));
    silent.pod.spec.as_mut().expect("a spec").containers[0].resources = sized("500m", "30M");
    assert!(
        resources(&silent).starts_with(r#"[{"requests":{"cpu":"300m","memory":"20M"}},"#),
        "{}",
        resources(&silent)
    );
}

#[test]
fn a_sum_of_resources_is_written_as_its_first_addend_is() {
    for (one, other, expected) in [
        (("cpu", "500m"), None, "500m"),
        (("cpu", "0.5"), None, "0.5"),
        (("cpu", "500m"), Some("500m"), "1"),
        (("memory", "64Mi"), Some("64Mi"), "128Mi"),
        (("memory", "1Mi"), Some("1000000"), "2048576"),
        (("memory", "1M"), Some("1M"), "2M"),
    ] {
        let mut case = Case::new("always | main a | main b", "");
        let (name, first) = one;
        for (container, text) in case.pod.spec.as_mut().expect("a spec").containers.iter_mut().zip([Some(first), other])
        {
            let given = text.map(|text| serde_json::json!({ "requests": { name: text } }));
            container.resources = given.map(|given| serde_json::from_value(given).expect("resources"));
        }
        let total = case.status().allocated_resources.expect("something is asked for")[name].0.clone();
        assert_eq!(total, expected, "{first} and {other:?}");
    }
}

#[test]
fn container_user_is_shown_if_the_runtime_reports_it() {
    let mut case = Case::new("always | main a", "a: running");
    let shown = |case: &Case| case.status().container_statuses.expect("one")[0].user.clone();
    assert_eq!(shown(&case), None);
    case.facts.containers[0].user = Some(ContainerUser { uid: 1000, gid: 50, supplemental_groups: vec![50, 60] });
    let linux = shown(&case).and_then(|user| user.linux).expect("the runtime said");
    assert_eq!((linux.uid, linux.gid, linux.supplemental_groups), (1000, 50, Some(vec![50, 60])));
}

#[test]
fn ephemeral_container_waits_only_before_its_start() {
    let pod = "always | main a | ephemeral e";
    let state =
        |case: Case| case.status().ephemeral_container_statuses.expect("one")[0].state.clone().expect("a state");
    let pulling = || Case::new(pod, "a: running").waiting("e", Reason::ErrImagePull, "no");
    assert_eq!(state(pulling()).waiting.and_then(|waiting| waiting.reason).as_deref(), Some("ErrImagePull"));
    let ended = Case::new(pod, "a: running; e: exit(3)").waiting("e", Reason::ErrImagePull, "no");
    assert_eq!(ended.phase(), "Running");
    assert_eq!(state(ended).terminated.map(|end| end.exit_code), Some(3));
}

#[test]
fn host_network_pod_has_node_addresses_one_per_family() {
    let mut case = Case::new("always | host | main a", "a: running");
    case.facts.sandboxes[0].ips.clear();
    case.facts.sandboxes[0].host_network = true;
    case.host_ips = ["192.0.2.1", "2001:db8::1", "192.0.2.9"].map(str::to_owned).to_vec();
    let shown = case.show();
    assert!(shown.contains("ip=192.0.2.1,2001:db8::1 host=192.0.2.1,2001:db8::1"), "{shown}");
    assert!(shown.contains("PodReadyToStartContainers=True"), "{shown}");
}

#[test]
fn pod_ips_list_node_family_first_and_outlive_sandbox() {
    let mut case = Case::new("always | main a", "a: running");
    case.host_ips = vec!["2001:db8::1".to_owned()];
    case.facts.sandboxes[0].ips = vec!["10.1.0.7".to_owned(), "fd00::7".to_owned()];
    assert!(case.show().contains("ip=fd00::7,10.1.0.7"));
    let mut ended = case.then("sandbox notready; a: exit(0)", later(5));
    assert!(ended.show().contains("ip=fd00::7,10.1.0.7"));
    ended.facts.sandboxes[0].state = SandboxState::Ready;
    assert!(ended.show().contains("ip= "), "a ready sandbox without an address has none: {}", ended.show());
}

#[test]
fn a_sandbox_that_is_not_ready_has_no_address() {
    let mut case = Case::new("always | main a", "sandbox notready");
    case.facts.sandboxes[0].ips = vec!["10.1.0.7".to_owned()];
    assert!(case.show().contains("ip= "), "{}", case.show());
}

#[test]
fn foreign_status_fields_are_kept() {
    let theirs = PodStatus {
        qos_class: Some("Guaranteed".to_owned()),
        resource_claim_statuses: Some(vec![Default::default()]),
        extended_resource_claim_status: Some(Default::default()),
        node_allocatable_resource_claim_statuses: Some(vec![Default::default()]),
        nominated_node_name: Some("node".to_owned()),
        ..PodStatus::default()
    };
    let mut case = Case::new("always | main a", "a: running");
    case.pod.status = Some(theirs.clone());
    let status = case.status();
    assert_eq!(status.qos_class, theirs.qos_class);
    assert_eq!(status.resource_claim_statuses, theirs.resource_claim_statuses);
    assert_eq!(status.extended_resource_claim_status, theirs.extended_resource_claim_status);
    assert_eq!(status.node_allocatable_resource_claim_statuses, theirs.node_allocatable_resource_claim_statuses);
    assert_eq!(status.nominated_node_name, theirs.nominated_node_name);
    case.pod.status = Some(PodStatus { qos_class: Some(String::new()), ..theirs });
    assert_eq!(case.status().qos_class.as_deref(), Some("BestEffort"), "nobody said yet");
}

#[test]
fn disruption_condition_is_never_withdrawn() {
    let mut case = Case::new("always | main a", "a: running");
    let mut previous = case.status();
    let disruption = PodCondition {
        type_: conditions::DISRUPTION_TARGET.to_owned(),
        status: "True".to_owned(),
        ..PodCondition::default()
    };
    previous.conditions.as_mut().expect("some").push(disruption);
    case.previous = Some(previous);
    assert!(case.show().contains("\nDisruptionTarget=True"), "{}", case.show());
}

#[test]
fn infeasible_resize_is_dated_by_its_request() {
    let mut case = Case::new("always | main a", "a: running");
    case.is_resize_pending = true;
    let case = case.then("a: running", later(50));
    let pending = "\nPodResizePending=True(Infeasible) \"In-place resize is not supported by this node's agent\" +0s";
    assert!(case.show().contains(pending), "{}", case.show());
}

#[test]
fn rejected_pod_has_only_a_qos_class() {
    let failure = PodFailure::new(FailureReason::OutOf("cpu".to_owned()), "no");
    let shown = show(&rejected(&mk_pod("always | main a"), &failure));
    assert_eq!(shown, "Failed(OutOfcpu) \"Pod was rejected: no\" ip= host= qos=BestEffort start=@never");
}

#[test]
fn conditions_have_the_generation_of_the_spec() {
    for (given, expected) in [(None, None), (Some(0), None), (Some(7), Some(7))] {
        let mut case = Case::new("always | main a", "a: running");
        case.pod.metadata.generation = given;
        let conditions = case.status().conditions.expect("some");
        assert!(conditions.iter().all(|condition| condition.observed_generation == expected), "{conditions:?}");
    }
}

#[test]
fn pod_without_container_statuses_has_unknown_containers() {
    let ready = conditions::pod_ready_condition(&mk_pod("always | main a"), &PodStatus::default());
    assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("False", Some("UnknownContainerStatuses")));
}

#[test]
fn a_mirror_pod_keeps_its_start_time_whatever_the_sandboxes_are() {
    let mut case = Case::new("always | static | main a", "sandbox ready 60s");
    case.stored = Some(PodStatus { start_time: Some(Time(ago(90))), ..PodStatus::default() });
    assert!(case.show().contains("start=-90s"), "{}", case.show());
}

#[test]
fn start_time_is_first_sandbox_or_reported_one() {
    for (pod, sandboxes, expected) in [
        ("always | main a", "sandbox ready 60s", "start=-90s"),
        ("always | static | main a", "sandbox ready 60s", "start=-60s"),
        // The runtime has lost the first sandbox.
        ("always | static | main a", "sandbox ready 30s", "start=-90s"),
        // Its creation was interrupted, so the runtime has no date for it.
        ("always | static | main a", "sandbox notready 40s", "start=-90s"),
    ] {
        let mut case = Case::new(pod, sandboxes);
        if sandboxes.ends_with("30s") {
            case.facts.sandboxes[0].attempt = 1;
        }
        if sandboxes.contains("notready") {
            case.facts.sandboxes[0].created_at = None;
        }
        case.previous = Some(PodStatus { start_time: Some(Time(ago(90))), ..PodStatus::default() });
        assert!(case.show().contains(expected), "{pod}: {}", case.show());
    }
}

#[test]
fn pod_failure_overrides_container_states_and_lasts() {
    let mut case = Case::new("always | main a", "a: running");
    let failure = PodFailure::new(FailureReason::DeadlineExceeded, "it took too long");
    case.failed = Some(failure);
    assert_snapshot!(case.show(), @r#"
    Failed(DeadlineExceeded) "it took too long" ip=10.1.0.7 host=192.0.2.1 qos=BestEffort start=-60s
    main a: running -30s, restarts=0 started ready
    PodReadyToStartContainers=True +0s
    Initialized=True +0s
    Ready=False(PodFailed) +0s
    ContainersReady=False(PodFailed) +0s
    PodScheduled=True +0s
    "#);
    let mut after = case.then("a: exit(0)", later(5));
    after.failed = None;
    assert!(after.show().starts_with("Failed(DeadlineExceeded) \"it took too long\""));
}

#[test]
fn terminal_phase_in_the_api_never_changes() {
    let mut case = Case::new("always | main a", "a: running");
    case.pod.status = Some(PodStatus { phase: Some("Succeeded".to_owned()), ..PodStatus::default() });
    case.failed = Some(PodFailure::new(FailureReason::DeadlineExceeded, ""));
    assert_eq!(case.phase(), "Succeeded");
}

#[test]
fn closed_readiness_gates_keep_a_pod_from_being_ready() {
    let mut case = Case::new("always | main a", "a: running");
    let gate = |name: &str| PodReadinessGate { condition_type: name.to_owned() };
    case.pod.spec.as_mut().expect("a spec").readiness_gates = Some(vec![gate("lb"), gate("dns")]);
    let condition = PodCondition { type_: "dns".to_owned(), status: "False".to_owned(), ..PodCondition::default() };
    case.pod.status = Some(PodStatus { conditions: Some(vec![condition]), ..PodStatus::default() });
    let shown: Vec<_> =
        case.show().lines().filter(|line| line.contains("eady=") || line.contains("dns")).map(str::to_owned).collect();
    assert_snapshot!(shown.join("\n"), @r#"
    dns=False @never
    Ready=False(ReadinessGatesNotReady) "corresponding condition of pod readiness gate \"lb\" does not exist., the status of pod readiness gate \"dns\" is not \"True\", but False" +0s
    ContainersReady=True +0s
    "#);
}

/// `Ready=` and `ContainersReady=` with their dates.
fn readiness(case: &Case) -> String {
    let shown = case.show();
    shown.lines().filter(|line| line.contains("Ready=")).collect::<Vec<_>>().join(", ")
}

#[test]
fn static_pod_is_unready_since_its_last_stop_or_start() {
    for (pod, seen, expected) in [
        ("always | static | main a", "", "-60s"),
        ("always | static | init i | main a", "i: exit(0) 5s; a: exit(1) 30s", "-30s"),
        ("always | static | sidecar s | main a", "s: exit(1) 5s; a: exit(1) 30s", "-5s"),
    ] {
        let shown = readiness(&Case::new(pod, seen));
        assert!(shown.split(", C").all(|condition| condition.ends_with(expected)), "{pod}: {seen}: {shown}");
    }
}

#[test]
fn readiness_gate_that_opens_late_dates_ready_when_it_opens() {
    let mut case = Case::new("always | main a", "a: running 50s");
    case.pod.spec.as_mut().expect("a spec").readiness_gates =
        Some(vec![PodReadinessGate { condition_type: "lb".to_owned() }]);
    let mut case = case.then("a: running 50s", later(100));
    let open = PodCondition { type_: "lb".to_owned(), status: "True".to_owned(), ..PodCondition::default() };
    case.pod.status = Some(PodStatus { conditions: Some(vec![open]), ..PodStatus::default() });
    assert_eq!(readiness(&case), "Ready=True +100s, ContainersReady=True +0s");
    case.pod.status = Some(case.status());
    assert_eq!(readiness(&case.restarted()), "Ready=True +100s, ContainersReady=True +0s");
}

#[test]
fn startup_probe_that_passes_dates_ready_when_it_passes() {
    for pod in ["always | main a", "always | static | main a"] {
        let mut case = Case::new(pod, "a: running 50s");
        case.pod.spec.as_mut().expect("a spec").containers[0].startup_probe = Some(Probe::default());
        let mut starting = case.status();
        starting.container_statuses.as_mut().expect("one")[0].started = Some(true);
        case.previous = Some(starting);
        case.now = later(100);
        assert_eq!(readiness(&case), "Ready=True +100s, ContainersReady=True +100s", "{pod}");
    }
}

#[test]
fn probe_result_holds_only_for_its_container() {
    let mut case = Case::new("always | main a", "a: running");
    case.pod.spec.as_mut().expect("a spec").containers[0].readiness_probe = Some(Probe::default());
    let mut ready = case.status();
    assert!(!ready.container_statuses.as_ref().expect("one")[0].ready, "nobody has asked it yet");
    ready.container_statuses.as_mut().expect("one")[0].ready = true;
    case.previous = Some(ready);
    assert!(case.status().container_statuses.expect("one")[0].ready);
    case.facts.containers[0].id = "another".into();
    assert!(!case.status().container_statuses.expect("one")[0].ready);
}

#[test]
fn container_stopped_by_a_probe_does_not_end_its_pod() {
    let mut case = Case::new("onfailure | main a", "a: exit(0)");
    assert_eq!(case.phase(), "Succeeded");
    case.restarting.insert("a0".into());
    assert!(case.show().starts_with("Running"), "{}", case.show());
    assert!(case.show().contains("\nmain a: waiting, last exit 0(Completed) -30s"), "{}", case.show());
    assert_eq!(
        case.worker_state(PodWorkerState::Terminated).phase(),
        "Succeeded",
        "a pod that ends starts nothing again"
    );
}

#[test]
fn an_agent_that_restarts_finds_the_same_status() {
    for (pod, seen) in [
        ("always | static | main a", "a: running 30s"),
        ("always | static | init i | main a", "i: exit(0) 50s; a: running 40s"),
        ("always | static | sidecar s | main a | main b", "s: running 55s; a: running 30s; b: exit(1), running 10s"),
        ("always | static | main a", "a: exit(1) 30s"),
    ] {
        // The agent first looked at the pod before it had a sandbox.
        let mut first = Case::new(pod, "sandbox gone");
        first.now = Now { wall: ago(65), ..now() };
        let ran = seen.replace("exit(1) 30s", "running 40s");
        let before = first.then(&ran, now()).then(seen, now()).then(seen, later(7));
        let shown = before.show();
        assert_eq!(before.restarted().show(), shown, "{pod}: {seen}");
    }
}

#[test]
fn a_condition_keeps_its_date_until_its_status_changes() {
    let case = Case::new("always | main a", "a: running 30s").then("a: running 30s", later(100));
    assert!(case.show().contains("\nReady=True +0s"), "{}", case.show());
    let crashed = case.then("a: exit(1) 2s", later(200));
    assert!(crashed.show().contains("[a]\" +200s"), "{}", crashed.show());
}

#[test]
fn termination_messages_share_the_limit_and_keep_utf8() {
    let mut case = Case::new("never | main a | main b", "a: exit(1); b: exit(1)");
    let ContainerState::Exited(Exit { message, .. }) = &mut case.facts.containers[0].state else { panic!("exited") };
    *message = "é".repeat(12 * 1024);
    let name = case.facts.containers[0].name.clone();
    let statuses = case.status().container_statuses.expect("two");
    let status = statuses.iter().find(|status| status.name == name).expect("it is there");
    let end = status.state.as_ref().and_then(|state| state.terminated.as_ref()).expect("it ended");
    assert_eq!(end.message.as_ref().map(String::len), Some(6 * 1024));
}

#[test]
fn every_container_has_its_share_of_the_message_limit() {
    let mut case = Case::new("never | init i | main a | ephemeral e", "i: exit(0); a: exit(1), exit(1)");
    for container in &mut case.facts.containers {
        let ContainerState::Exited(exit) = &mut container.state else { panic!("all have ended") };
        exit.message = "x".repeat(12 * 1024);
    }
    let status = case.status();
    let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let states = all.flat_map(|container| [&container.state, &container.last_state]).flatten();
    let lengths: Vec<_> =
        states.filter_map(|state| state.terminated.as_ref()?.message.as_ref()).map(String::len).collect();
    assert_eq!(lengths, [4 * 1024; 3]);
}

#[test]
fn waiting_messages_and_the_pods_own_are_cut_between_characters() {
    for (containers, expected) in [(1, 4096), (64, 4096), (500, 524)] {
        let names: String = (0..containers).map(|number| format!(" | main c{number}")).collect();
        let pod = mk_pod(&format!("always{names}"));
        let message = "xé".repeat(1 << 20);
        let waiting: Vec<_> = (0..containers)
            .map(|number| {
                serde_json::json!({ "name": format!("c{number}"), "image": "", "imageID": "", "ready": false,
                    "restartCount": 0, "state": { "waiting": { "reason": "CreateContainerError", "message": message } } })
            })
            .take(2)
            .collect();
        let status = serde_json::json!({ "message": message, "containerStatuses": waiting });
        let mut status: PodStatus = serde_json::from_value(status).unwrap();
        normalize::normalize_status(&pod, &mut status);
        let longest = |message: Option<&String>| message.map(String::len).unwrap_or_default();
        assert!((4095..=4096).contains(&longest(status.message.as_ref())));
        let state = status.container_statuses.unwrap()[0].state.clone().unwrap().waiting.unwrap();
        assert!((expected - 1..=expected).contains(&longest(state.message.as_ref())), "{containers}");
    }
}

#[test]
fn foreign_status_is_normalized_to_our_order_and_precision() {
    let pod = mk_pod("always | init j | init i | main b | main a | ephemeral f | ephemeral e");
    let time = "2026-06-01T12:00:00.9Z";
    let container = |name: &str| {
        serde_json::json!({
            "name": name, "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": { "running": { "startedAt": time } },
            "lastState": { "terminated": { "exitCode": 0, "startedAt": time, "finishedAt": time } },
        })
    };
    let mut status: PodStatus = serde_json::from_value(serde_json::json!({
        "startTime": time,
        "conditions": [{ "type": "t", "status": "True", "lastProbeTime": time, "lastTransitionTime": time }],
        "initContainerStatuses": [container("other"), container("i"), container("j")],
        "containerStatuses": [container("b"), container("a")],
        "ephemeralContainerStatuses": [container("f"), container("e")],
    }))
    .expect("a status");
    normalize_status(&pod, &mut status);
    let all = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let names: Vec<_> = all.into_iter().flatten().flatten().map(|container| container.name.as_str()).collect();
    assert_eq!(names, ["j", "i", "other", "a", "b", "e", "f"]);
    let text = format!("{status:?}");
    assert_eq!((text.matches("12:00:00Z").count(), text.contains("00.9")), (3 + 7 * 3, false), "{text}");
}

fn any_facts() -> impl Strategy<Value = String> {
    let state =
        || prop_oneof![Just("created"), Just("running"), Just("exit(0)"), Just("exit(1)"), Just("unknown"), Just("")];
    (state(), state(), state()).prop_map(|(init, a, b)| {
        let named = [("i", init), ("a", a), ("b", b)].into_iter().filter(|(_, state)| !state.is_empty());
        named.map(|(name, state)| format!("{name}: {state}")).collect::<Vec<_>>().join("; ")
    })
}

proptest! {
    #[test]
    fn the_phase_never_leaves_a_terminal_one(
        policy in prop_oneof![Just("always"), Just("onfailure"), Just("never")],
        looks in proptest::collection::vec(any_facts(), 1..6),
    ) {
        let mut case = Case::new(&format!("{policy} | init i | main a | main b"), "");
        let mut ended: Option<String> = None;
        for look in looks {
            case = case.then(&look, now());
            let phase = case.phase();
            if let Some(ended) = &ended {
                assert_eq!(ended, &phase);
            }
            ended = ended.or(Some(phase).filter(|phase| is_terminal(phase)));
        }
    }

    #[test]
    fn the_same_facts_give_the_same_status(looks in proptest::collection::vec(any_facts(), 1..4)) {
        let mut case = Case::new("onfailure | init i | main a | main b", "");
        for look in looks {
            case = case.then(&look, now());
        }
        let once = case.status();
        case.previous = Some(once.clone());
        assert_eq!(case.status(), once);
    }
}

#[test]
fn volume_mounts_show_whether_they_are_recursively_read_only() {
    let mount = |mode: Option<&str>, read_only: bool| VolumeMount {
        name: "data".to_owned(),
        mount_path: "/data".to_owned(),
        read_only: Some(read_only),
        recursive_read_only: mode.map(str::to_owned),
        ..VolumeMount::default()
    };
    let mut case = Case::new("always | main a", "sandbox gone");
    case.pod.spec.as_mut().unwrap().containers[0].volume_mounts = Some(vec![
        mount(None, false),
        mount(None, true),
        mount(Some("Disabled"), true),
        mount(Some("IfPossible"), true),
        mount(Some("Enabled"), true),
    ]);
    let shown = |case: &Case| {
        let status = case.status().container_statuses.unwrap().remove(0);
        let modes = status.volume_mounts.unwrap().into_iter().map(|mount| mount.recursive_read_only);
        modes.map(|mode| mode.unwrap_or_else(|| "-".to_owned())).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(shown(&case), "- Disabled Disabled Disabled Disabled");

    let handler = RuntimeHandler { recursive_read_only_mounts: true, ..RuntimeHandler::default() };
    case.runtime.handlers.push(handler);
    assert_eq!(shown(&case), "- Disabled Disabled Enabled Enabled");

    let mut case = case.then("a: running", later(10)).then("a: running", later(20));
    case.runtime.handlers.clear();
    assert_eq!(shown(&case), "- Disabled Disabled Enabled Enabled", "the mounts of a container do not change");
    assert_eq!(shown(&case.then("a: exit(1), running", later(30))), "- Disabled Disabled Disabled Disabled");
}
