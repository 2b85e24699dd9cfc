//! Plans for a pod in a given state, as tables of one line each.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ConfigMapVolumeSource, Container, ContainerState, ContainerStateTerminated, ContainerStatus, ExecAction,
    ImageVolumeSource, PersistentVolumeClaimVolumeSource, PodStatus, Probe, Volume, VolumeMount,
};

use crate::{
    cgroups::CgroupTree,
    effect::{EffectError, ErrorKind, Facts, ImageFacts, Reason},
    event::Source,
    flights::{Flights, PodSubject, Subject},
    id::{ContainerId, PodRef, PodUid},
    images::Images,
    observation::{PodFacts, Remains, RuntimeStatus},
    op::{ContainerOp, Op, PodOp, VolumeOp},
    pod::{
        Desired, Failure, Grace, Lifecycle, PodRecord, Preparation, TerminationCause, VolumeRecord,
        hooks::{Hook, HookAction, HookRequest, PreStop},
        plan::{Plan, PodState},
        restart::CrashLoop,
        status::{FailureReason, PodFailure},
        sync_pod::{self, SyncContext},
        termination,
    },
    probes::{ProbeKind, ProbeOutcome, Probed, ProbedStage},
    settings::Settings,
    test_support::{ago, facts, later, mk_pod, now},
    time::{Now, Uptime},
    volumes::{
        HostPathType,
        claims::{PersistentKind, PersistentSource},
        csi::{AccessMode, CsiVolume, DriverRules},
        devices::Devices,
        expansion::ClaimedSize,
    },
};

/// A record and its flights.
#[derive(Clone)]
struct TestPod {
    record: PodRecord,
    flights: Flights,
}

impl TestPod {
    fn state(&self) -> PodState<'_> {
        PodState { record: &self.record, flights: self.flights.of_pod(&self.record.id.uid) }
    }

    fn send(&mut self, subject: PodSubject, op: impl Into<Op>) {
        let subject = Subject::Pod(self.record.id.uid.clone(), subject);
        self.flights.begin(subject, op.into(), Duration::from_secs(1), now());
    }
}

impl Deref for TestPod {
    type Target = PodRecord;

    fn deref(&self) -> &PodRecord {
        &self.record
    }
}

impl DerefMut for TestPod {
    fn deref_mut(&mut self) -> &mut PodRecord {
        &mut self.record
    }
}

fn record(pod: &str, lifecycle: Lifecycle) -> TestPod {
    let pod = mk_pod(pod);
    let mut record = PodRecord::new(PodRef::of(&pod), Arc::new(pod), Desired::By(Source::File), 1, now());
    record.lifecycle = lifecycle;
    record.prepared = Preparation::Directories;
    TestPod { record, flights: Flights::default() }
}

/// The container of this name in the pod's spec.
fn container_of<'a>(record: &'a mut PodRecord, name: &str) -> &'a mut Container {
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    let mut all = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
    all.find(|container| container.name == name).expect("it is there")
}

/// Sandboxes that are not ready count as stopped, and exit times are known, as after a look.
fn observed(mut record: TestPod, text: &str) -> (TestPod, crate::observation::PodFacts) {
    let facts = facts(text);
    for sandbox in &facts.sandboxes {
        record.stopped_sandboxes.insert(sandbox.id.clone());
    }
    for container in &facts.containers {
        if let Some(exit) = container.exit() {
            let age = now().wall_since(exit.finished_at);
            record.instance_mut(&container.id).finished_at = Some(now().uptime.saturating_sub(age));
        }
    }
    (record, facts)
}

fn plan_of(pod: &str, state: &str) -> String {
    let (record, facts) = observed(record(pod, Lifecycle::Syncing), state);
    show(&sync_plan(&record, &facts))
}

fn sync_plan(record: &TestPod, facts: &crate::observation::PodFacts) -> Plan {
    sync_plan_after(record, facts, None)
}

/// With the status reported before.
fn sync_plan_after(record: &TestPod, facts: &PodFacts, reported: Option<&PodStatus>) -> Plan {
    sync_plan_of(&Images::default(), record, facts, reported)
}

fn sync_plan_with(images: &Images, record: &TestPod, facts: &PodFacts) -> Plan {
    sync_plan_of(images, record, facts, None)
}

fn sync_plan_of(images: &Images, record: &TestPod, facts: &PodFacts, reported: Option<&PodStatus>) -> Plan {
    sync_plan_on(&Devices::default(), images, record, facts, reported)
}

fn sync_plan_on(
    devices: &Devices,
    images: &Images,
    record: &TestPod,
    facts: &PodFacts,
    reported: Option<&PodStatus>,
) -> Plan {
    let settings = Settings::for_node("node");
    let (runtime, cgroups) = (&RuntimeStatus::default(), CgroupTree::new(&settings, None));
    let context = SyncContext {
        images,
        network_problem: None,
        host_ips: &[],
        runtime,
        cgroups,
        settings: &settings,
        devices,
        node: None,
        reported,
    };
    sync_pod::plan(record.state(), facts, context, now())
}

/// The node has the images that this plan waits for, or their inspection fails.
fn answered(plan: &Plan, record: &PodRecord, answer: &Result<Option<ImageFacts>, EffectError>) -> Images {
    let mut images = Images::default();
    for request in &plan.images {
        images.ensure_image(&record.id, request, now()).expect("it was not asked for yet");
        images.done(&record.id.uid, &request.target, answer, now());
    }
    images
}

fn ended(record: &TestPod, facts: &crate::observation::PodFacts, cause: TerminationCause) -> String {
    let settings = Settings::for_node("node");
    show(&termination::ended(record.state(), facts, cause, CgroupTree::new(&settings, None), now()))
}

fn show(plan: &Plan) -> String {
    let mut parts: Vec<String> = plan.steps.iter().map(|step| show_op(&step.op)).collect();
    parts.extend(plan.images.iter().map(|request| format!("image for {}", request.target.name())));
    for (name, waiting) in &plan.waiting {
        let until = plan.wake_at.map(|moment| moment.since(now().uptime).as_secs());
        parts.push(format!("wait {name} for {}s ({})", until.unwrap_or_default(), waiting.reason));
    }
    parts.extend(plan.next.iter().map(|next| format!("to {}", next.name())));
    for (is_so, word) in [(plan.is_over, "over"), (plan.is_gone, "gone")] {
        parts.extend(is_so.then(|| word.to_owned()));
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") }
}

fn show_op(op: &Op) -> String {
    match op {
        Op::Pod(PodOp::SetUpCgroup { cgroup, .. }) => format!("set up cgroup {}", cgroup.path),
        Op::Pod(PodOp::RemoveCgroup(place)) => format!("remove cgroup {}", place.cgroup_paths.join(" or ")),
        Op::Pod(PodOp::MakeDirs { .. }) => "make directories".to_owned(),
        Op::Volume(VolumeOp::Resolve { volume, .. }) => format!("resolve claim {volume}"),
        Op::Volume(VolumeOp::CheckAttachLimit { volume, .. }) => format!("check attach limit for {volume}"),
        Op::Volume(VolumeOp::Expand { volume, .. }) => format!("expand volume {volume}"),
        Op::Volume(VolumeOp::SetUp { volume, .. }) => format!("set up volume {volume}"),
        Op::Volume(VolumeOp::Refresh { .. }) => "refresh volumes".to_owned(),
        Op::Volume(VolumeOp::Unmount { volume, .. }) => format!("unmount volume {volume}"),
        Op::Volume(VolumeOp::TearDown(_)) => "tear down volumes".to_owned(),
        Op::Pod(PodOp::RemoveDir(_)) => "remove pod directory".to_owned(),
        Op::Pod(PodOp::RemoveLogDir(place)) => format!("remove logs {}", place.log_dir_name()),
        Op::Pod(PodOp::RunSandbox(order)) => format!("run sandbox #{}", order.attempt),
        Op::Pod(PodOp::StopSandbox { id, .. }) => format!("stop sandbox {id}"),
        Op::Pod(PodOp::RemoveSandbox { id, .. }) => format!("remove sandbox {id}"),
        Op::Container(ContainerOp::Start(order)) => format!("start {} #{}", order.container, order.attempt),
        Op::Container(ContainerOp::Resume { id, .. }) => format!("resume {id}"),
        Op::Container(ContainerOp::Stop { id, grace_secs, .. }) => format!("stop {id} in {grace_secs}s"),
        Op::Container(ContainerOp::Remove { id, .. }) => format!("remove {id}"),
        Op::Container(ContainerOp::RunHook(order)) => format!("{:?} of {} in {:?}", order.hook, order.id, order.limit),
        other => format!("{other:?}"),
    }
}

#[test]
fn a_pod_comes_up_step_by_step() {
    for (pod, state, expected) in [
        ("always | main a | main b", "sandbox gone", "run sandbox #0"),
        ("always | main a | main b", "", "image for a, image for b"),
        ("always | main a | main b", "a: running 5s", "image for b"),
        ("always | main a | main b", "a: running 5s; b: running 5s", "nothing"),
    ] {
        assert_eq!(plan_of(pod, state), expected, "{pod} in state {state:?}");
    }
}

#[test]
fn restart_count_continues_from_runtime_or_logs() {
    for (state, logged, expected) in [
        ("", None, "start a #0"),
        ("", Some(4), "start a #5"),
        ("a: exit(1) x3 5s", None, "start a #3"),
        ("a: exit(1) x3 5s", Some(9), "start a #3"),
    ] {
        let (record, mut facts) = observed(record("always | main a", Lifecycle::Syncing), state);
        facts.logged_attempts.extend(logged.map(|logged| ("a".to_owned(), logged)));
        let images = answered(&sync_plan(&record, &facts), &record, &Ok(Some(ImageFacts::default())));
        assert_eq!(show(&sync_plan_with(&images, &record, &facts)), expected, "{state} {logged:?}");
    }
}

#[test]
fn start_has_cgroup_parent_and_target() {
    let (mut record, facts) =
        observed(record("always | main a | main b | ephemeral e", Lifecycle::Syncing), "a: running 5s");
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    spec.ephemeral_containers.as_mut().expect("one")[0].target_container_name = Some("a".to_owned());
    let images = answered(&sync_plan(&record, &facts), &record, &Ok(Some(ImageFacts::default())));
    let orders = sync_plan_with(&images, &record, &facts).steps.into_iter().map(|step| match step.op {
        Op::Container(ContainerOp::Start(order)) => (order.container, order.cgroup_parent, order.target),
        other => panic!("{other:?}"),
    });
    let cgroup = || "/kubepods/besteffort/podu1".to_owned();
    let expected = [("e".to_owned(), cgroup(), Some("a0".into())), ("b".to_owned(), cgroup(), None)];
    assert_eq!(orders.collect::<Vec<_>>(), expected);
}

#[test]
fn failed_start_is_retried_after_its_back_off() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "");
    for (retry_at, expected) in [(later(1).uptime, "nothing"), (now().uptime, "image for a")] {
        let failure = Failure { retry_at, ..Failure::after(None, "no".to_owned(), now()) };
        record.failures.insert(PodSubject::Container("a".to_owned()), failure);
        assert_eq!(show(&sync_plan(&record, &facts)), expected);
    }
}

#[test]
fn the_cgroup_directories_and_volumes_come_before_the_sandbox() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "sandbox gone");
    record.prepared = Preparation::Nothing;
    assert_eq!(show(&sync_plan(&record, &facts)), "set up cgroup /kubepods/besteffort/podu1");
    record.prepared = Preparation::Cgroup;
    assert_eq!(show(&sync_plan(&record, &facts)), "make directories");
    record.prepared = Preparation::Directories;
    assert_eq!(show(&sync_plan(&record, &facts)), "run sandbox #0");
    with_volumes(&mut record, &["v", "w"]);
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume v, set up volume w", "side by side");
    assert_eq!(sync_plan(&record, &facts).waits_for.expect("a wait").to_string(), "the pod's volumes: v, w");
    record.volumes.entry("v".to_owned()).or_default().is_set_up = true;
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume w");
    let (mut record, facts) = observed(self::record("always | main a | main b", Lifecycle::Syncing), "");
    with_volumes(&mut record, &["v"]);
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume v", "once for all containers");
}

#[test]
fn volume_that_failed_delays_only_itself() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "sandbox gone");
    with_volumes(&mut record, &["v", "w"]);
    let mut failure = None;
    for wait_ms in [500, 1000, 2000] {
        let after = Failure::of_volume(failure.as_ref(), "no".to_owned(), now());
        assert_eq!(after.retry_at.since(now().uptime), Duration::from_millis(wait_ms));
        failure = Some(after);
    }
    record.failures.insert(PodSubject::Volume("v".to_owned()), failure.expect("a failure"));
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume w");
}

#[test]
fn claim_is_resolved_before_its_volume_is_set_up() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "sandbox gone");
    with_volumes(&mut record, &["v"]);
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    spec.volumes.as_mut().expect("volumes")[0].persistent_volume_claim =
        Some(PersistentVolumeClaimVolumeSource::default());
    assert_eq!(show(&sync_plan(&record, &facts)), "resolve claim v");
    record.volumes.entry("v".to_owned()).or_default().claimed = Some(host_path_volume("pv"));
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume v");
}

#[test]
fn claimed_volume_is_resolved_again_then_published_again_or_expanded() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: running 5s");
    with_volumes(&mut record, &["v"]);
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    spec.volumes.as_mut().expect("volumes")[0].persistent_volume_claim =
        Some(PersistentVolumeClaimVolumeSource::default());
    let driver = serde_json::json!({"metadata": {}, "spec": {"requiresRepublish": true, "attachRequired": false}});
    let driver = serde_json::from_value(driver).unwrap();
    let csi = serde_json::from_value(serde_json::json!({"driver": "d", "volumeHandle": "h"})).unwrap();
    let volume = CsiVolume::persistent(&csi, AccessMode::ReadWriteOnce, DriverRules::of(Some(&driver)));
    let claim =
        serde_json::json!({"metadata": {"name": "c", "namespace": "n"}, "status": {"capacity": {"storage": "1Gi"}}});
    let claim = serde_json::from_value(claim).unwrap();
    let source = |size: &str| {
        Arc::new(PersistentSource {
            name: "pv".to_owned(),
            read_only: false,
            is_exclusive: false,
            kind: PersistentKind::Csi(volume.clone()),
            size: ClaimedSize::of(&claim, size),
            group: None,
        })
    };
    let known = |record: &mut PodRecord, resolved: &str| {
        let known = record.volumes.entry("v".to_owned()).or_default();
        known.is_set_up = true;
        known.resolved(&source(resolved), now());
    };
    record.volumes.entry("v".to_owned()).or_default().claimed = Some(source("1Gi"));
    record.volumes.entry("v".to_owned()).or_default().is_set_up = true;
    record.refresh_at = Some(now().uptime);
    assert_eq!(show(&sync_plan(&record, &facts)), "resolve claim v");
    record.refresh_at = Some(now().uptime + Duration::from_secs(1));
    known(&mut record, "1Gi");
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume v");
    known(&mut record, "2Gi");
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume v", "its tokens expire");
    record.volumes.get_mut("v").expect("a volume").is_republish_due = false;
    assert_eq!(show(&sync_plan(&record, &facts)), "expand volume v");
    // An expansion that fails delays neither of the others.
    let known = record.volumes.get_mut("v").expect("a volume");
    let failure = Failure::of_volume(None, "no space".to_owned(), now());
    (known.is_republish_due, known.expansion_failure) = (true, Some(failure.clone()));
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume v");
    record.volumes.get_mut("v").expect("a volume").is_republish_due = false;
    let plan = sync_plan(&record, &facts);
    assert_eq!((show(&plan).as_str(), plan.wake_at), ("nothing", Some(failure.retry_at)));
    record.refresh_at = Some(now().uptime);
    assert_eq!(show(&sync_plan(&record, &facts)), "resolve claim v");
    record.refresh_at = Some(now().uptime + Duration::from_secs(1));
    // The controller has not written yet that the node is next, or has to make the volume smaller again.
    let known = record.volumes.get_mut("v").expect("a volume");
    (known.expansion_failure, known.expansion_waits) = (None, true);
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
    let known = record.volumes.get_mut("v").expect("a volume");
    known.resolved(&source("2Gi"), now());
    known.is_republish_due = false;
    assert_eq!(show(&sync_plan(&record, &facts)), "expand volume v");
}

#[test]
fn claim_of_a_running_pod_is_resolved_again_after_a_restart() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: running 5s");
    with_volumes(&mut record, &["v"]);
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing", "an emptyDir is left alone");
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    spec.volumes.as_mut().expect("volumes")[0].persistent_volume_claim =
        Some(PersistentVolumeClaimVolumeSource::default());
    assert_eq!(show(&sync_plan(&record, &facts)), "resolve claim v");
    record.volumes.entry("v".to_owned()).or_default().is_set_up = true;
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
}

#[test]
fn volume_that_cannot_be_set_up_delays_no_claim_of_a_running_pod() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: running 5s");
    with_volumes(&mut record, &["v", "w", "x"]);
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    for volume in &mut spec.volumes.as_mut().expect("volumes")[..2] {
        volume.persistent_volume_claim = Some(PersistentVolumeClaimVolumeSource::default());
    }
    for (name, is_set_up) in [("v", true), ("w", false)] {
        let claimed = Some(host_path_volume("pv"));
        record.volumes.insert(name.to_owned(), VolumeRecord { claimed, is_set_up, ..VolumeRecord::default() });
    }
    for name in ["w", "x"] {
        let failure = Failure::of_volume(None, "no".to_owned(), now());
        record.failures.insert(PodSubject::Volume(name.to_owned()), failure);
    }
    record.refresh_at = Some(now().uptime);
    assert_eq!(show(&sync_plan(&record, &facts)), "resolve claim v");
    record.failures.clear();
    assert_eq!(show(&sync_plan(&record, &facts)), "set up volume w, set up volume x, resolve claim v");
}

#[test]
fn wait_for_a_volume_of_one_pod_is_told_in_upstreams_words() {
    let words = |is_block| {
        let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "sandbox gone");
        with_volumes(&mut record, &["v"]);
        let csi = serde_json::from_value(serde_json::json!({"driver": "d", "volumeHandle": "h"})).unwrap();
        let volume = CsiVolume::persistent(&csi, AccessMode::ReadWriteOncePod, DriverRules::of(None));
        let kind = PersistentKind::Csi(CsiVolume { is_block, ..volume });
        let source = PersistentSource { is_exclusive: true, kind, ..(*host_path_volume("pv")).clone() };
        let source = Arc::new(source);
        record.volumes.entry("v".to_owned()).or_default().claimed = Some(source.clone());
        assert_eq!(show_with_events(&sync_plan(&record, &facts)), "nothing", "the disk was not looked at yet");
        let mut devices = Devices::default();
        devices.add_user(&PodUid::new("other"), &source);
        devices.look_due(now());
        devices.listed(Vec::new());
        show_with_events(&sync_plan_on(&devices, &Images::default(), &record, &facts, None))
    };
    let why =
        r#"for volume \"pv\" : volume uses the ReadWriteOncePod access mode and is already in use by another pod""#;
    assert_eq!(words(false), format!(r#"nothing, FailedMount "MountVolume.SetUp failed {why}"#));
    assert_eq!(words(true), format!(r#"nothing, FailedMapVolume "MapVolume.SetUpDevice failed {why}"#));
}

fn host_path_volume(name: &str) -> Arc<PersistentSource> {
    let kind = PersistentKind::HostPath { path: "/disk".into(), must_be: HostPathType::Unchecked };
    let name = name.to_owned();
    Arc::new(PersistentSource { name, read_only: false, is_exclusive: false, kind, size: None, group: None })
}

/// Every container mounts these volumes.
fn with_volumes(record: &mut PodRecord, names: &[&str]) {
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    let volumes = names.iter().map(|name| Volume { name: (*name).to_owned(), ..Volume::default() });
    spec.volumes = Some(volumes.collect());
    for container in &mut spec.containers {
        let mounts = names.iter().map(|name| VolumeMount { name: (*name).to_owned(), ..VolumeMount::default() });
        container.volume_mounts = Some(mounts.collect());
    }
}

#[test]
fn images_of_volumes_come_before_containers_that_mount_them() {
    let (mut record, facts) = observed(record("always | main a | main b", Lifecycle::Syncing), "");
    let image = |name: &str| {
        let source = ImageVolumeSource { reference: Some(format!("{name}:1")), ..ImageVolumeSource::default() };
        Volume { name: name.to_owned(), image: Some(source), ..Volume::default() }
    };
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    spec.volumes = Some(vec![image("v"), image("unused")]);
    spec.containers[0].volume_mounts = Some(vec![VolumeMount { name: "v".to_owned(), ..VolumeMount::default() }]);
    let first = sync_plan(&record, &facts);
    assert_eq!(show(&first), "image for v, image for unused, image for b", "b mounts none of them");
    assert_eq!(first.waits_for.as_ref().expect("a wait").to_string(), "the image of volume v");

    let refused = EffectError { kind: ErrorKind::Reject(Reason::ErrImagePull), message: "no".to_owned() };
    let images = answered(&first, &record, &Err(refused));
    let failed = sync_plan_with(&images, &record, &facts);
    assert_eq!(failed.waiting["a"].reason, Reason::ErrImagePull);
    assert_eq!(failed.waiting["a"].message, "Failed to inspect image \"v:1\": no");
    let events: Vec<_> = failed.events.iter().map(|event| (event.reason.as_str(), event.message.as_str())).collect();
    assert_eq!(events, [("Failed", "Error: ErrImagePull")]);
    record.container_mut("a").waiting = failed.waiting.get("a").cloned();
    assert!(sync_plan_with(&images, &record, &facts).events.is_empty(), "once per reason");

    let mut images = answered(&first, &record, &Ok(Some(ImageFacts::default())));
    let ready = sync_plan_with(&images, &record, &facts);
    assert_eq!(show(&ready), "start b #0, image for v, image for unused, image for a");
    let own = ready.images.last().expect("that of the container");
    images.ensure_image(&record.id, own, now());
    images.done(&record.id.uid, &own.target, &Ok(Some(ImageFacts::default())), now());
    let started = sync_plan_with(&images, &record, &facts);
    let Op::Container(ContainerOp::Start(order)) = &started.steps[0].op else { panic!("a starts") };
    assert_eq!(order.image_volumes.keys().collect::<Vec<_>>(), ["v"]);

    let (_, facts) = observed(self::record("always | main a", Lifecycle::Syncing), "a: running 5s; b: running 5s");
    assert!(!started.image_volumes_settled && sync_plan(&record, &facts).image_volumes_settled);
}

#[test]
fn a_running_pod_needs_nothing_not_even_its_directories() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: running 5s");
    record.prepared = Preparation::Nothing;
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
}

#[test]
fn init_containers_run_one_after_the_other() {
    for (state, expected) in [
        ("", "image for i"),
        ("i: running 5s", "nothing"),
        ("i: exit(0) 5s", "image for j"),
        ("i: exit(0) 9s; j: running 5s", "nothing"),
        ("i: exit(0) 9s; j: exit(1) 5s", "image for j"),
        ("i: exit(0) 9s; j: exit(0) 5s", "image for m"),
        ("j: exit(0) 5s", "image for m"),
        ("m: running 5s", "nothing"),
        ("i: created 5s", "resume i0"),
    ] {
        assert_eq!(plan_of("always | init i | init j | main m", state), expected, "{state:?}");
    }
    assert_eq!(plan_of("never | init i | main m", "i: exit(1) 5s"), "stop sandbox sb0");
}

#[test]
fn sidecars_start_in_order_and_are_kept_running() {
    for (state, expected) in [
        ("", "image for s"),
        ("s: running 5s", "image for j"),
        ("s: running 9s; j: running 5s", "nothing"),
        ("s: exit(1) 9s; j: running 5s", "image for s"),
        // An exited sidecar does not advance the initialization, whatever its exit code.
        ("s: exit(0) 5s", "image for s"),
        ("s: running 9s; j: exit(0) 5s", "image for m"),
        ("s: exit(0) 9s; j: exit(0) 8s; m: running 5s", "image for s"),
    ] {
        assert_eq!(plan_of("always | sidecar s | init j | main m", state), expected, "{state:?}");
    }
    // Sidecars do not keep a finished pod running.
    assert_eq!(plan_of("never | sidecar s | main m", "s: running 9s; m: exit(0) 5s"), "over");
    assert_eq!(plan_of("never | sidecar s | main m", "s: exit(1) 9s; m: exit(0) 5s"), "over");
}

#[test]
fn a_new_sandbox_is_initialized_anew() {
    let (record, mut facts) =
        observed(record("always | init i | main m", Lifecycle::Syncing), "sandbox notready 90s, ready 5s");
    let old = crate::test_support::facts("i: exit(0) 80s; m: exit(137) 20s");
    facts.containers = old.containers;
    for container in &mut facts.containers {
        container.sandbox = "sb0".into();
    }
    assert_eq!(show(&sync_plan(&record, &facts)), "image for i");
}

#[test]
fn restart_policy_decides_which_containers_restart() {
    for (pod, state, expected) in [
        ("always | main a | main b", "a: exit(0) 5s; b: running 5s", "image for a"),
        ("onfailure | main a | main b", "a: exit(0) 5s; b: running 5s", "nothing"),
        ("onfailure | main a | main b", "a: exit(1) 5s; b: running 5s", "image for a"),
        ("never | main a | main b", "a: exit(1) 5s; b: running 5s", "nothing"),
        ("never | main a", "a: exit(1) 5s", "over"),
        ("never | main a", "sandbox notready; a: exit(1) 5s", "nothing"),
        ("never | init i | main a", "sandbox notready; i: exit(0) 5s", "run sandbox #1"),
        ("never | main a", "sandbox notready; a: created 5s", "run sandbox #1"),
        ("onfailure | main a", "sandbox notready; a: exit(0) 5s", "nothing"),
        ("onfailure | main a", "sandbox notready; a: exit(1) 5s", "run sandbox #1"),
        ("always | main a", "sandbox notready; a: exit(0) 5s", "run sandbox #1"),
    ] {
        assert_eq!(plan_of(pod, state), expected, "{pod} in state {state:?}");
    }
}

#[test]
fn container_restart_policy_brings_its_pod_back() {
    let (mut record, facts) =
        observed(record("never | main a | main b", Lifecycle::Syncing), "sandbox notready; a: exit(1) 5s");
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
    container_of(&mut record, "a").restart_policy = Some("Always".to_owned());
    assert_eq!(show(&sync_plan(&record, &facts)), "run sandbox #1");
}

#[test]
fn pod_is_stopped_before_its_lost_sandbox_is_replaced() {
    for (state, expected) in [
        ("sandbox ready 90s, ready 10s; a: running 5s", "stop a0 in 30s"),
        ("sandbox ready 90s, ready 10s", "stop sandbox sb1"),
        ("sandbox notready; a: running 5s", "stop a0 in 30s"),
        ("sandbox notready", "run sandbox #1"),
    ] {
        let (record, facts) = observed(record("always | main a", Lifecycle::Syncing), state);
        assert_eq!(show(&sync_plan(&record, &facts)), expected, "{state:?}");
    }
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "sandbox notready");
    record.stopped_sandboxes.clear();
    assert_eq!(show_with_events(&sync_plan(&record, &facts)), "stop sandbox sb0", "it holds its network");
}

#[test]
fn sandbox_stop_is_recorded_when_it_begins() {
    let (mut record, facts) =
        observed(record("always | main a", Lifecycle::Syncing), "sandbox ready 90s, ready 10s; a: running 5s");
    let killing = r#"Killing "Stopping container a""#;
    let changed = r#"SandboxChanged "Pod sandbox changed, it will be killed and re-created.""#;
    assert_eq!(show_with_events(&sync_plan(&record, &facts)), format!("stop a0 in 30s, {changed}, {killing}"));
    let failure = Failure { retry_at: now().uptime, ..Failure::after(None, "no".to_owned(), now()) };
    record.failures.insert(PodSubject::Container("a".to_owned()), failure);
    assert_eq!(show_with_events(&sync_plan(&record, &facts)), "stop a0 in 30s");
    record.failures.clear();
    let stop = stopping(&record, "a");
    record.send(PodSubject::Container("a".to_owned()), stop);
    assert_eq!(show_with_events(&sync_plan(&record, &facts)), "nothing");
}

#[test]
fn third_crash_waits_twenty_seconds() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: exit(1) x3 5s");
    let mut crash_loop = CrashLoop::after_restart(None, "a:1", Uptime::ZERO, Duration::from_secs(300), now().uptime);
    crash_loop.delay *= 2;
    record.container_mut("a").crash_loop = Some(crash_loop);
    let plan = sync_plan(&record, &facts);
    assert_eq!(show(&plan), "remove a1, remove a0, wait a for 15s (CrashLoopBackOff)");
    assert_eq!(plan.waiting["a"].message, "back-off 20s restarting failed container=a pod=web_default(u1)");
    assert_eq!(plan.events[0].message, "Back-off restarting failed container a in pod web_default(u1)");
    record.container_mut("a").waiting = plan.waiting.get("a").cloned();
    assert!(sync_plan(&record, &facts).events.is_empty(), "recorded once");
}

#[test]
fn a_container_created_and_not_started_is_started_not_doubled() {
    assert_eq!(plan_of("always | main a", "a: created 5s"), "resume a0");
}

/// A record whose container `a` has failed this probe.
fn unhealthy(pod: &str, state: &str, kind: ProbeKind, change: impl FnOnce(&mut Probe)) -> (TestPod, PodFacts) {
    let (mut record, facts) = observed(record(pod, Lifecycle::Syncing), state);
    let exec = Some(ExecAction { command: Some(vec!["check".to_owned()]) });
    let mut probe = Probe { exec, failure_threshold: Some(1), ..Probe::default() };
    change(&mut probe);
    let container = container_of(&mut record, "a");
    match kind {
        ProbeKind::Liveness => container.liveness_probe = Some(probe),
        ProbeKind::Startup => container.startup_probe = Some(probe),
        ProbeKind::Readiness => container.readiness_probe = Some(probe),
    }
    let (spec, status) = (record.spec().clone(), PodStatus::default());
    let running = crate::test_support::facts("a: running 5s");
    let id = record.id.clone();
    let probed = Probed { id: &id, spec: &spec, facts: &running, status: &status, stage: ProbedStage::Running };
    assert_eq!(record.probes.plan(&probed, 1, now()).requests.len(), 1);
    record.probes.done(&id, &"a0".into(), kind, &ProbeOutcome::Failure("no".to_owned()));
    (record, facts)
}

fn show_with_events(plan: &Plan) -> String {
    let events = plan.events.iter().map(|event| format!("{} {:?}", event.reason, event.message));
    std::iter::once(show(plan)).chain(events).collect::<Vec<_>>().join(", ")
}

#[test]
fn a_container_that_fails_a_probe_is_stopped_and_started_again() {
    let given = |secs| move |probe: &mut Probe| probe.termination_grace_period_seconds = secs;
    for (pod, state, kind, grace, expected) in [
        (
            "always | main a",
            "a: running 5s",
            ProbeKind::Liveness,
            None,
            r#"stop a0 in 30s, Killing "Container a failed liveness probe, will be restarted""#,
        ),
        (
            "always | main a",
            "a: running 5s",
            ProbeKind::Startup,
            Some(7),
            r#"stop a0 in 7s, Killing "Container a failed startup probe, will be restarted""#,
        ),
        (
            "never | main a | main b",
            "a: running 5s; b: running 5s",
            ProbeKind::Liveness,
            Some(90),
            r#"stop a0 in 90s, Killing "Container a failed liveness probe""#,
        ),
        (
            "always | sidecar a | main b",
            "a: running 5s",
            ProbeKind::Startup,
            None,
            r#"stop a0 in 30s, Killing "Init container a failed startup probe""#,
        ),
        (
            "always | sidecar a | main b",
            "a: running 5s; b: running 5s",
            ProbeKind::Liveness,
            None,
            r#"stop a0 in 30s, Killing "Init container a failed liveness probe""#,
        ),
        // A readiness failure stops nothing.
        ("always | main a", "a: running 5s", ProbeKind::Readiness, None, "nothing"),
        // The pod has no use for it any more, and ends with its sidecars.
        ("never | main a", "a: running 5s", ProbeKind::Liveness, Some(90), "over"),
        ("never | sidecar s | main a", "s: running 9s; a: running 5s", ProbeKind::Startup, None, "over"),
        // It exited by itself before it was stopped.
        ("onfailure | main a", "a: exit(0) 5s", ProbeKind::Liveness, None, "over"),
        ("always | main a", "a: exit(137), running 5s", ProbeKind::Liveness, None, "nothing"),
    ] {
        let (record, facts) = unhealthy(pod, state, kind, given(grace));
        assert_eq!(show_with_events(&sync_plan(&record, &facts)), expected, "{pod} {state} {kind:?}");
    }
}

#[test]
fn restart_rules_keep_the_pod_until_the_exit_code() {
    let (mut record, facts) = unhealthy("never | main a", "a: running 5s", ProbeKind::Liveness, |_| {});
    let rules = |rules: serde_json::Value| serde_json::from_value(rules).expect("rules");
    container_of(&mut record, "a").restart_policy = Some("Never".to_owned());
    for (given, expected) in [
        (serde_json::json!([]), "over"),
        (
            serde_json::json!([{ "action": "Restart", "exitCodes": { "operator": "In", "values": [42] } }]),
            "stop a0 in 30s",
        ),
    ] {
        container_of(&mut record, "a").restart_policy_rules = Some(rules(given));
        let plan = sync_plan(&record, &facts);
        assert_eq!(show(&plan), expected);
        assert!(plan.restarting.is_empty(), "its exit code decides");
    }
}

#[test]
fn container_stopped_for_restart_ignores_its_exit_code() {
    for policy in ["always", "onfailure", "never"] {
        let (mut record, mut facts) =
            observed(record(&format!("{policy} | main a"), Lifecycle::Syncing), "a: running 5s");
        facts.containers[0].hash = Some(1);
        let plan = sync_plan(&record, &facts);
        let killing = r#"Killing "Container a definition changed, will be restarted""#;
        assert_eq!(show_with_events(&plan), format!("stop a0 in 30s, {killing}"), "{policy}");
        for (pre_stop, retry_at) in [(Some(PreStop::Took(Duration::ZERO)), None), (None, Some(now().uptime))] {
            let mut again = record.clone();
            again.instance_mut(&"a0".into()).pre_stop = pre_stop;
            let failure = |retry_at| Failure { retry_at, ..Failure::after(None, "no".to_owned(), now()) };
            again.failures.extend(retry_at.map(|retry_at| (PodSubject::Container("a".to_owned()), failure(retry_at))));
            assert_eq!(show_with_events(&sync_plan(&again, &facts)), "stop a0 in 30s", "{policy}: recorded once");
        }
        record.instance_mut(&"a0".into()).is_restarting = plan.restarting.contains(&"a0".into());
        let ended = crate::test_support::facts("a: exit(0) 5s");
        assert_eq!(show(&sync_plan(&record, &ended)), "image for a", "{policy}");
    }
    // A container that exited before its definition changed is not restarted for it.
    let (record, mut facts) =
        observed(record("never | main a | main b", Lifecycle::Syncing), "a: exit(0) 5s; b: running 9s");
    facts.containers.iter_mut().filter(|it| it.name == "a").for_each(|it| it.hash = Some(1));
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
}

#[test]
fn sidecar_startup_probe_blocks_next_container() {
    let (mut record, facts) = observed(record("always | sidecar a | main b", Lifecycle::Syncing), "a: running 5s");
    assert_eq!(show(&sync_plan(&record, &facts)), "image for b");
    container_of(&mut record, "a").startup_probe = Some(Probe::default());
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
}

#[test]
fn init_containers_that_cannot_stay_are_stopped_and_started_again() {
    let unknown = r#"Killing "Init container is in \"unknown\" state, try killing it before restart""#;
    let changed = r#"Killing "Init container s definition changed""#;
    for (pod, state, hash, expected) in [
        ("always | init s | main m", "s: unknown 5s", None, unknown),
        ("always | sidecar s | main m", "s: unknown 5s", None, unknown),
        ("always | sidecar s | main m", "s: unknown 9s; m: running 5s", None, unknown),
        ("always | sidecar s | main m", "s: running 9s; m: running 5s", Some(1), changed),
    ] {
        let (record, mut facts) = observed(record(pod, Lifecycle::Syncing), state);
        facts.containers.iter_mut().filter(|container| container.name == "s").for_each(|it| it.hash = hash);
        let plan = sync_plan(&record, &facts);
        assert_eq!(show_with_events(&plan), format!("stop s0 in 30s, {expected}"), "{pod} {state}");
        assert!(plan.restarting.contains(&"s0".into()), "{pod} {state}");
    }
    let (mut record, mut facts) =
        observed(record("always | sidecar s | main m", Lifecycle::Syncing), "s: running 9s; m: running 5s");
    facts.containers.iter_mut().filter(|container| container.name == "s").for_each(|it| {
        it.hash = Some(crate::container::hash(container_of(&mut record, "s")));
    });
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing", "its definition is the same");
}

#[test]
fn sidecar_post_start_hook_blocks_next_container() {
    let (mut record, facts) = observed(record("always | sidecar s | main m", Lifecycle::Syncing), "s: running 5s");
    with_hook(&mut record, "s", serde_json::json!({ "postStart": { "exec": { "command": ["x"] } } }));
    assert_eq!(show(&sync_plan(&record, &facts)), "image for m", "the hook is over");
    let order =
        HookRequest::of(&record, "s", &"s0".into(), Hook::PostStart, Duration::from_secs(1)).expect("it has one");
    record.send(PodSubject::Container("s".to_owned()), ContainerOp::RunHook(order));
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
    record.flights = Flights::default();
    record.instance_mut(&"s0".into()).has_post_start_failed = true;
    assert_eq!(show_with_events(&sync_plan(&record, &facts)), r#"stop s0 in 30s, Killing "FailedPostStartHook""#);
}

#[test]
fn a_container_in_an_unknown_state_is_stopped_first() {
    for policy in ["always", "onfailure", "never"] {
        let (record, facts) = observed(record(&format!("{policy} | main a"), Lifecycle::Syncing), "a: unknown 5s");
        let plan = sync_plan(&record, &facts);
        assert_eq!(show(&plan), "stop a0 in 30s", "{policy}");
        assert!(plan.restarting.contains(&"a0".into()), "{policy}: it is started again");
    }
}

#[test]
fn one_dead_instance_per_container_is_kept() {
    assert_eq!(plan_of("always | main a", "a: exit(1) x3, running 5s"), "remove a1, remove a0");
}

#[test]
fn finished_container_lost_by_the_runtime_is_not_restarted() {
    for (pod, exit_code, runs) in [
        ("never | main a", 1, false),
        ("onfailure | main a", 0, false),
        ("onfailure | main a", 1, true),
        ("always | main a", 0, true),
    ] {
        let end = ContainerStateTerminated { exit_code, ..Default::default() };
        let state = ContainerState { terminated: Some(end), ..Default::default() };
        let container = ContainerStatus { name: "a".to_owned(), state: Some(state), ..Default::default() };
        let reported = PodStatus { container_statuses: Some(vec![container]), ..Default::default() };
        let (record, facts) = observed(record(pod, Lifecycle::Syncing), "");
        let plan = sync_plan_after(&record, &facts, Some(&reported));
        assert_eq!(plan.is_over, !runs, "{pod} after exit code {exit_code}");
        assert_eq!(!plan.images.is_empty(), runs, "{pod} after exit code {exit_code}");
    }
}

#[test]
fn pods_wait_for_the_network_unless_they_use_the_nodes() {
    for (pod, expected) in [("always | main a", "nothing"), ("always | host | main a", "run sandbox #0")] {
        let (record, facts) = observed(record(pod, Lifecycle::Syncing), "sandbox gone");
        let settings = Settings::for_node("node");
        let cgroups = CgroupTree::new(&settings, None);
        let context = SyncContext {
            images: &Images::default(),
            network_problem: Some("no CNI"),
            host_ips: &[],
            runtime: &RuntimeStatus::default(),
            cgroups,
            settings: &settings,
            devices: &Devices::default(),
            node: None,
            reported: None,
        };
        let plan = sync_pod::plan(record.state(), &facts, context, now());
        assert_eq!(show(&plan), expected, "{pod}");
        let said: Vec<_> = plan.events.iter().map(|event| (event.reason.as_str(), event.message.as_str())).collect();
        let not_ready: &[_] = &[("NetworkNotReady", "network is not ready: no CNI")];
        assert_eq!(said, if expected == "nothing" { not_ready } else { &[] }, "{pod}");
    }
}

/// The stop of the container's first instance.
fn stopping(record: &PodRecord, name: &str) -> ContainerOp {
    let (pod, id) = (record.id.clone(), ContainerId::new(format!("{name}0")));
    ContainerOp::Stop { pod, name: name.to_owned(), id, grace_secs: 30 }
}

fn end_of(pod: &str, state: &str) -> String {
    let grace = Grace::starting(30, now());
    let (record, facts) = observed(record(pod, Lifecycle::terminating(grace, TerminationCause::Removed)), state);
    show(&termination::terminating(record.state(), &facts, grace, TerminationCause::Removed, now()))
}

#[test]
fn a_pod_ends_containers_first_sidecars_last_then_the_sandbox() {
    for (state, expected) in [
        ("s: running 9s; t: running 9s; a: running 5s; b: running 5s", "stop a0 in 30s, stop b0 in 30s"),
        ("s: running 9s; t: running 9s; a: exit(0) 5s", "stop t0 in 30s"),
        ("s: running 9s; t: running 7s; a: exit(0) 5s", "stop t0 in 30s"),
        ("s: running 9s; t: exit(0) 1s", "stop s0 in 30s"),
        ("s: exit(0) 1s", "stop sandbox sb0"),
        ("sandbox notready; s: exit(0) 1s", "to Terminated"),
        ("sandbox gone", "to Terminated"),
    ] {
        assert_eq!(end_of("always | sidecar s | sidecar t | main a | main b", state), expected, "{state:?}");
    }
}

#[test]
fn only_sidecars_have_what_is_left_of_the_grace_period() {
    let grace = Grace::starting(30, now());
    let lifecycle = Lifecycle::terminating(grace, TerminationCause::Removed);
    for (state, expected) in [
        ("s: running 20s; i: running 15s", "stop i0 in 30s"),
        ("s: running 20s; i: exit(0) 15s; a: running 5s", "stop a0 in 30s"),
        ("s: running 20s; i: exit(0) 15s; a: exit(0) 5s", "stop s0 in 18s"),
    ] {
        let (record, facts) = observed(record("always | sidecar s | init i | main a", lifecycle.clone()), state);
        let plan = termination::terminating(record.state(), &facts, grace, TerminationCause::Removed, later(12));
        assert_eq!(show(&plan), expected, "{state}");
    }
}

#[test]
fn unstopped_dead_sandbox_keeps_pod_terminating() {
    let grace = Grace::starting(30, now());
    let ending = Lifecycle::terminating(grace, TerminationCause::Removed);
    let (mut record, facts) = observed(record("always | main a", ending), "sandbox notready");
    record.stopped_sandboxes.clear();
    assert_eq!(
        show(&termination::terminating(record.state(), &facts, grace, TerminationCause::Removed, now())),
        "stop sandbox sb0"
    );
}

#[test]
fn failed_stop_is_retried_after_its_back_off() {
    let grace = Grace::starting(30, now());
    let ending = Lifecycle::terminating(grace, TerminationCause::Removed);
    let (mut record, facts) = observed(record("always | main a", ending), "a: running 5s");
    record.failures.insert(PodSubject::Container("a".to_owned()), Failure::after(None, "no".to_owned(), now()));
    let plan = |now| {
        show_with_events(&termination::terminating(record.state(), &facts, grace, TerminationCause::Removed, now))
    };
    assert_eq!(plan(now()), "nothing");
    assert_eq!(plan(later(1)), "stop a0 in 30s", "not recorded again");
}

#[test]
fn remains_of_a_removed_static_pod_are_kept_for_a_minute() {
    let lifecycle = Lifecycle::Terminated { cause: TerminationCause::Removed };
    let (mut record, facts) = observed(record("always | static | main a", lifecycle), "sandbox gone");
    (record.desired, record.remains) = (Desired::No, Some(Remains::PodDir));
    let plan = |now| {
        let plan = termination::ended(record.state(), &facts, TerminationCause::Removed, None, now);
        (show(&plan), plan.wake_at)
    };
    assert_eq!(plan(later(59)), ("nothing".to_owned(), Some(later(60).uptime)));
    assert_eq!(plan(later(60)), ("remove pod directory".to_owned(), None));
}

#[test]
fn sidecars_end_together_when_the_grace_period_is_over() {
    let grace = Grace::starting(30, now());
    let lifecycle = Lifecycle::terminating(grace, TerminationCause::Completed);
    let pod = "never | sidecar s | sidecar t | main a";
    let (record, facts) = observed(record(pod, lifecycle), "s: running 9s; t: running 9s; a: exit(0) 5s");
    let plan = |now| termination::terminating(record.state(), &facts, grace, TerminationCause::Completed, now);
    assert_eq!(show(&plan(now())), "stop t0 in 30s");
    assert_eq!(plan(now()).wake_at, Some(grace.ends_at));
    let late = plan(later(30));
    assert_eq!((show(&late).as_str(), late.wake_at), ("stop s0 in 2s, stop t0 in 2s", None));
}

#[test]
fn volumes_stay_until_late_containers_are_stopped() {
    let lifecycle = Lifecycle::Terminated { cause: TerminationCause::Removed };
    let (mut record, facts) = observed(record("always | main a", lifecycle), "a: running 5s");
    assert_eq!(ended(&record, &facts, TerminationCause::Removed), "stop a0 in 30s");
    let stop = stopping(&record, "a");
    record.send(PodSubject::Container("a".to_owned()), stop);
    assert_eq!(ended(&record, &facts, TerminationCause::Removed), "nothing");
}

#[test]
fn the_sandbox_is_not_stopped_under_a_container_that_is_starting() {
    let grace = Grace::starting(30, now());
    let lifecycle = Lifecycle::terminating(grace, TerminationCause::Removed);
    let (mut record, facts) = observed(record("always | main a", lifecycle), "");
    let op = ContainerOp::Resume { pod: record.id.clone(), name: "a".to_owned(), id: "a0".into() };
    record.send(PodSubject::Container("a".to_owned()), op);
    assert_eq!(
        show(&termination::terminating(record.state(), &facts, grace, TerminationCause::Removed, now())),
        "nothing"
    );
}

#[test]
fn remains_of_a_removed_pod_are_removed_in_order() {
    let lifecycle = Lifecycle::Terminated { cause: TerminationCause::Removed };
    let (mut record, facts) = observed(record("always | main a", lifecycle), "sandbox notready; a: exit(1) x2 5s");
    record.desired = Desired::No;
    let mut steps = vec![ended(&record, &facts, TerminationCause::Removed)];
    for remains in [Remains::Volumes, Remains::Cgroup, Remains::PodDir] {
        record.remains = Some(remains);
        steps.push(ended(&record, &facts, TerminationCause::Removed));
    }
    for (state, remains) in [
        ("sandbox notready", Remains::PodDir),
        ("sandbox gone", Remains::PodDir),
        ("sandbox gone", Remains::Logs),
        ("sandbox gone", Remains::Nothing),
    ] {
        record.remains = Some(remains);
        let facts = crate::test_support::facts(state);
        steps.push(ended(&record, &facts, TerminationCause::Removed));
    }
    assert_eq!(
        steps,
        [
            "tear down volumes",
            "tear down volumes",
            "remove cgroup /kubepods/podu1 or /kubepods/burstable/podu1 or /kubepods/besteffort/podu1",
            "remove a0, remove a1",
            "remove sandbox sb0",
            "remove pod directory",
            "remove logs default_web_u1",
            "to Finished, gone"
        ]
    );
}

#[test]
fn volumes_of_a_previous_process_are_torn_down() {
    let lifecycle = Lifecycle::Terminated { cause: TerminationCause::Removed };
    let (mut record, facts) = observed(record("always | main a", lifecycle), "sandbox gone");
    for prepared in [Preparation::Nothing, Preparation::Cgroup, Preparation::Directories] {
        record.prepared = prepared;
        assert_eq!(ended(&record, &facts, TerminationCause::Removed), "tear down volumes", "{prepared:?}");
    }
}

#[test]
fn a_completed_pod_keeps_its_dead_containers() {
    let lifecycle = Lifecycle::Terminated { cause: TerminationCause::Completed };
    let (mut record, facts) = observed(record("never | main a", lifecycle), "sandbox notready; a: exit(0) 5s");
    for remains in [Remains::PodDir, Remains::Logs, Remains::Nothing] {
        record.remains = Some(remains);
        assert_eq!(ended(&record, &facts, TerminationCause::Completed), "to Finished");
    }
}

#[test]
fn a_grace_period_only_shrinks() {
    let long = Grace::starting(30, now());
    let short = Grace::starting(5, now());
    assert_eq!(long.shrunk_to(short), short);
    assert_eq!(short.shrunk_to(long), short);
    assert_eq!(Grace::starting(0, now()).secs, 1);
    assert_eq!(Grace::starting(0, now()).remaining_secs(now()), 2);
    assert_eq!(long.remaining_secs(later(12)), 18);
    let half_a_second_later = Now { uptime: now().uptime + Duration::from_millis(12_500), ..now() };
    assert_eq!(long.remaining_secs(half_a_second_later), 18, "a second begun counts");
}

#[test]
fn failed_step_back_off_doubles_up_to_a_maximum() {
    let waits = |after: fn(Option<&Failure>, String, Now) -> Failure| {
        let mut last: Option<Failure> = None;
        let mut next = || {
            let failure = last.insert(after(last.as_ref(), "no".to_owned(), now()));
            failure.retry_at.since(now().uptime).as_secs()
        };
        (0..11).map(|_| next()).collect::<Vec<_>>()
    };
    assert_eq!(waits(Failure::after), [1, 2, 4, 8, 15, 15, 15, 15, 15, 15, 15]);
    assert_eq!(waits(Failure::of_removal), [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
}

#[test]
#[should_panic(expected = "a pod's life goes forward")]
fn lifecycle_never_goes_back() {
    let mut record = record("always | main a", Lifecycle::Terminated { cause: TerminationCause::Removed });
    record.enter(Lifecycle::Syncing, now());
}

#[test]
fn lifecycle_transition_clears_failures_and_sets_its_date() {
    let ending = |secs| Lifecycle::terminating(Grace::starting(secs, now()), TerminationCause::Removed);
    let mut record = record("always | main a", ending(30));
    record.failures.insert(PodSubject::Pod, Failure::after(None, "no".to_owned(), now()));
    record.enter(ending(5), later(3));
    assert_eq!((record.since, record.failures.len()), (now(), 1), "its grace period shrank");
    record.enter(Lifecycle::Terminated { cause: TerminationCause::Removed }, later(4));
    assert_eq!((record.since, record.failures.len()), (later(4), 0));
}

#[test]
fn pod_is_planned_at_its_first_retry() {
    let at = |secs: u64| later(secs).uptime;
    let failing = |retry_secs: u64| Failure { retry_at: at(retry_secs), ..Failure::after(None, String::new(), now()) };
    for (failures, flights, expected) in [
        (vec![], vec![], None),
        (vec![(PodSubject::Pod, 9), (PodSubject::Volumes, 8)], vec![], Some(8)),
        // The retry is due and was not sent: something else blocks it.
        (vec![(PodSubject::Pod, 0)], vec![], None),
        // It is in flight.
        (vec![(PodSubject::Pod, 3)], vec![PodSubject::Pod], None),
        (vec![(PodSubject::Pod, 9)], vec![PodSubject::Volumes], Some(9)),
    ] {
        let mut record = record("always | main a", Lifecycle::Syncing);
        let shown = format!("{failures:?} {flights:?}");
        record.failures = failures.into_iter().map(|(subject, secs)| (subject, failing(secs))).collect();
        for subject in flights {
            record.send(subject, PodOp::MakeDirs { pod: record.id.clone() });
        }
        assert_eq!(record.state().next_retry(now()), expected.map(at), "{shown}");
    }
}

#[test]
fn only_active_pods_have_a_deadline() {
    let ending = Lifecycle::terminating(Grace::starting(30, now()), TerminationCause::Completed);
    let failure = || PodFailure::new(FailureReason::DeadlineExceeded, "");
    for (lifecycle, failure, expected) in [
        (Lifecycle::Syncing, None, Some(later(40).uptime)),
        (Lifecycle::Syncing, Some(failure()), None),
        (ending, None, None),
    ] {
        let shown = format!("{lifecycle:?} {failure:?}");
        let mut record = record("always | main a", lifecycle);
        Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec").active_deadline_seconds = Some(100);
        record.failure = failure;
        assert_eq!(record.active_deadline(ago(60), now()), expected, "{shown}");
    }
}

fn with_hook(record: &mut PodRecord, name: &str, lifecycle: serde_json::Value) {
    container_of(record, name).lifecycle = Some(serde_json::from_value(lifecycle).expect("a lifecycle"));
}

#[test]
fn pre_stop_hook_runs_first_within_the_grace_period() {
    let grace = Grace::starting(20, now());
    let ending = Lifecycle::terminating(grace, TerminationCause::Removed);
    let (mut record, facts) = observed(record("always | main a | main b", ending), "a: running 5s; b: running 5s");
    with_hook(&mut record, "a", serde_json::json!({ "preStop": { "sleep": { "seconds": 3 } } }));
    let plan =
        |record: &TestPod| termination::terminating(record.state(), &facts, grace, TerminationCause::Removed, now());
    let first = show_with_events(&plan(&record));
    let killing = r#"Killing "Stopping container a", Killing "Stopping container b""#;
    assert_eq!(first, format!("PreStop of a0 in 20s, stop b0 in 20s, {killing}"));
    // The hook took 3.9 s: whole seconds count, as upstream.
    record.instance_mut(&"a0".into()).pre_stop = Some(PreStop::Took(Duration::from_millis(3900)));
    let then = r#"stop a0 in 17s, stop b0 in 20s, Killing "Stopping container b""#;
    assert_eq!(show_with_events(&plan(&record)), then);
    record.instance_mut(&"a0".into()).pre_stop = Some(PreStop::Took(Duration::from_secs(20)));
    assert_eq!(show(&plan(&record)), "stop a0 in 2s, stop b0 in 20s");
}

#[test]
fn sidecar_pre_stop_runs_early_but_sidecar_stops_last() {
    let grace = Grace::starting(20, now());
    let ending = Lifecycle::terminating(grace, TerminationCause::Removed);
    let pod = "always | sidecar s | sidecar t | main a";
    let (mut record, both) = observed(record(pod, ending), "s: running 5s; t: running 5s; a: running 5s");
    with_hook(&mut record, "s", serde_json::json!({ "preStop": { "sleep": { "seconds": 3 } } }));
    let plan = |record: &TestPod, facts: &PodFacts, now| {
        show_with_events(&termination::terminating(record.state(), facts, grace, TerminationCause::Removed, now))
    };
    let killing = r#"Killing "Stopping container a", Killing "Stopping container s""#;
    assert_eq!(plan(&record, &both, now()), format!("stop a0 in 20s, PreStop of s0 in 20s, {killing}"));
    record.instance_mut(&"s0".into()).pre_stop = Some(PreStop::Took(Duration::from_secs(3)));
    assert_eq!(plan(&record, &both, now()), r#"stop a0 in 20s, Killing "Stopping container a""#);
    // It is stopped after the others: no second hook, no second event, and the rest of the grace period.
    let alone = facts("s: running 5s; t: exit(0) 1s; a: exit(0) 1s");
    assert_eq!(plan(&record, &alone, later(12)), "stop s0 in 8s");
}

#[test]
fn a_container_that_does_not_run_has_no_pre_stop_hook() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: unknown 5s");
    with_hook(&mut record, "a", serde_json::json!({ "preStop": { "exec": { "command": ["x"] } } }));
    assert_eq!(show(&sync_plan(&record, &facts)), "stop a0 in 30s");
}

#[test]
fn a_container_whose_post_start_hook_failed_is_stopped() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: running 5s");
    record.instance_mut(&"a0".into()).has_post_start_failed = true;
    assert_eq!(show_with_events(&sync_plan(&record, &facts)), r#"stop a0 in 30s, Killing "FailedPostStartHook""#);
    let shown =
        |state: &str| record.state().facts_for_status(&Arc::new(crate::test_support::facts(state))).containers.len();
    assert_eq!((shown("a: running 5s"), shown("a: exit(1) 5s")), (0, 1), "it never ran, and it ended");
}

#[test]
fn post_start_hook_blocks_next_container() {
    let (mut record, facts) = observed(record("always | main a | main b", Lifecycle::Syncing), "a: running 5s");
    let facts = Arc::new(facts);
    assert_eq!(show(&sync_plan(&record, &facts)), "image for b");
    with_hook(&mut record, "a", serde_json::json!({ "postStart": { "exec": { "command": ["x"] } } }));
    let order =
        HookRequest::of(&record, "a", &"a0".into(), Hook::PostStart, Duration::from_secs(1)).expect("it has one");
    record.send(PodSubject::Container("a".to_owned()), ContainerOp::RunHook(order.clone()));
    assert_eq!(show(&sync_plan(&record, &facts)), "nothing");
    assert!(record.state().facts_for_status(&facts).containers.is_empty());
    let both = Arc::new(crate::test_support::facts("a: running 5s; b: running 5s"));
    let names: Vec<_> =
        record.state().facts_for_status(&both).containers.iter().map(|container| container.name.clone()).collect();
    assert_eq!(names, ["b"], "the others show");
    record.flights = Flights::default();
    assert_eq!(record.hook_ended(&order, None, now()), None);
    assert_eq!(record.state().facts_for_status(&facts).containers.len(), 1);
    assert_eq!(show(&sync_plan(&record, &facts)), "image for b");
}

#[test]
fn start_with_a_post_start_hook_blocks_next_container() {
    let post_start = serde_json::json!({ "postStart": { "exec": { "command": ["x"] } } });
    let no_pull = || EffectError { kind: ErrorKind::Retry, message: "no".to_owned() };
    for (state, answer, expected) in [
        ("", None, "image for a"),
        ("", Some(Ok(Some(ImageFacts::default()))), "start a #0"),
        ("", Some(Err(no_pull())), "image for a, image for b"),
        // Containers without a hook are not blocked.
        ("a: running 5s", None, "image for e, image for b"),
        ("a: running 5s", Some(Ok(Some(ImageFacts::default()))), "start e #0, start b #0"),
    ] {
        let pod = if state.is_empty() { "always | main a | main b" } else { "always | main a | main b | ephemeral e" };
        let (mut record, facts) = observed(record(pod, Lifecycle::Syncing), state);
        with_hook(&mut record, "a", post_start.clone());
        let asked = sync_plan(&record, &facts);
        let images = answer.as_ref().map(|answer| answered(&asked, &record, answer)).unwrap_or_default();
        assert_eq!(show(&sync_plan_with(&images, &record, &facts)), expected, "{state} {answer:?}");
    }
}

#[test]
fn failed_hook_is_recorded_without_its_output() {
    let hooks = serde_json::json!({
        "preStop": { "exec": { "command": ["x"] } }, "postStart": { "exec": { "command": ["x"] } },
    });
    let error = || Some(EffectError { kind: ErrorKind::Retry, message: "a secret".to_owned() });
    for (hook, error, reported, held) in [
        (Hook::PreStop, None, None, None),
        (Hook::PreStop, error(), Some("FailedPreStopHook: PreStopHook failed"), None),
        (Hook::PostStart, None, None, None),
        (
            Hook::PostStart,
            error(),
            Some("FailedPostStartHook: PostStartHook failed"),
            Some("PostStartHookError: a secret"),
        ),
    ] {
        let mut record = record("always | main a", Lifecycle::Syncing);
        with_hook(&mut record, "a", hooks.clone());
        let order = HookRequest::of(&record, "a", &"a0".into(), hook, Duration::from_secs(9)).expect("it has one");
        record.instance_mut(&"a0".into()).pre_stop = Some(PreStop::Began(now().uptime));
        let has_failed = error.is_some();
        let event = record.hook_ended(&order, error, later(4));
        let said = event.map(|event| format!("{}: {}", event.reason, event.message));
        assert_eq!(said.as_deref(), reported, "{hook:?}");
        let waits =
            record.container("a").waiting.as_ref().map(|waiting| format!("{}: {}", waiting.reason, waiting.message));
        assert_eq!(waits.as_deref(), held, "{hook:?}");
        let is_failed_start = hook == Hook::PostStart && has_failed;
        assert_eq!(record.instance(&"a0".into()).has_post_start_failed, is_failed_start, "{hook:?}");
        if hook == Hook::PreStop {
            assert_eq!(
                record.instance(&"a0".into()).pre_stop,
                Some(PreStop::Took(Duration::from_secs(4))),
                "well or not"
            );
        }
    }
}

#[test]
fn http_hook_without_host_uses_the_pod_address() {
    let address = |host: &str| Ok(format!("http://{host}:1/"));
    let missing = Err("failed to find networking container".to_owned());
    for (pod, host, seen, expected) in [
        ("always | main a", "", None, missing.clone()),
        ("always | main a", "", Some("sandbox gone"), missing),
        ("always | main a", "", Some("a: running"), address("10.1.0.7")),
        ("always | main a", "h", None, address("h")),
        ("always | main a", "h", Some("a: running"), address("h")),
        ("always | host | main a", "", None, address("127.0.0.1")),
    ] {
        let mut record = record(pod, Lifecycle::Syncing);
        record.facts = seen.map(|seen| Arc::new(facts(seen)));
        with_hook(&mut record, "a", serde_json::json!({ "preStop": { "httpGet": { "port": 1, "host": host } } }));
        let order =
            HookRequest::of(&record, "a", &"a0".into(), Hook::PreStop, Duration::from_secs(1)).expect("it has one");
        let found = match order.action {
            HookAction::Http(get) => Ok(get.url),
            HookAction::Invalid(why) => Err(why),
            other => panic!("{other:?}"),
        };
        assert_eq!(found, expected, "{pod} {host} {seen:?}");
    }
}

#[test]
fn https_hook_sent_over_http_is_recorded() {
    let mut record = record("always | main a", Lifecycle::Syncing);
    with_hook(&mut record, "a", serde_json::json!({ "preStop": { "httpGet": { "port": 1, "host": "h" } } }));
    let order = HookRequest::of(&record, "a", &"a0".into(), Hook::PreStop, Duration::from_secs(1)).unwrap();
    let event = order.fell_back(&Facts::HookFellBack { address: "h:1".to_owned() }).unwrap();
    assert_eq!(event.reason, "LifecycleHTTPFallback");
    assert_eq!(event.message, "request to HTTPS lifecycle hook h:1 got HTTP response, retry with HTTP succeeded");
    assert_eq!(order.fell_back(&Facts::Nothing), None);
}

#[test]
fn an_ephemeral_container_starts_once_whatever_else_the_pod_does() {
    for (pod, state, expected) in [
        ("always | main a | ephemeral e", "a: running 5s", "image for e"),
        // Also in a pod that is not initialized.
        ("always | init i | main a | ephemeral e", "i: running 5s", "image for e"),
        ("always | main a | ephemeral e", "a: running 5s; e: running 1s", "nothing"),
        ("always | main a | ephemeral e", "a: running 5s; e: exit(1) 1s", "nothing"),
        ("always | main a | ephemeral e", "a: running 5s; e: created 1s", "resume e0"),
        // It does not keep a finished pod running, and is not started in one.
        ("never | main a | ephemeral e", "a: exit(0) 5s; e: running 1s", "over"),
        ("never | main a | ephemeral e", "a: exit(0) 5s", "over"),
    ] {
        assert_eq!(plan_of(pod, state), expected, "{state:?}");
    }
}

#[test]
fn time_beyond_the_calendar_is_clamped() {
    let never = now().uptime + Duration::from_secs(u64::MAX);
    assert_eq!(PodRecord::wall(never, now()), Timestamp::MAX);
    assert_eq!(PodRecord::wall(now().uptime + Duration::from_secs(60), now()), now().wall + Duration::from_secs(60));
}

#[test]
fn pod_is_planned_when_its_volume_refresh_is_due() {
    let (mut record, facts) = observed(record("always | main a", Lifecycle::Syncing), "a: running 5s");
    with_volumes(&mut record, &["v"]);
    let spec = Arc::make_mut(&mut record.pod).spec.as_mut().expect("a spec");
    spec.volumes.as_mut().expect("volumes")[0].config_map = Some(ConfigMapVolumeSource::default());
    record.volumes.entry("v".to_owned()).or_default().is_set_up = true;
    for (refresh_at, expected) in [
        (None, ("nothing", None)),
        (Some(later(9).uptime), ("nothing", Some(later(9).uptime))),
        (Some(now().uptime), ("refresh volumes", None)),
    ] {
        record.refresh_at = refresh_at;
        let plan = sync_plan(&record, &facts);
        assert_eq!((show(&plan).as_str(), plan.wake_at), expected);
    }
}

#[test]
fn created_container_of_an_ended_pod_is_not_shown() {
    let created = Arc::new(facts("a: created 5s"));
    let shown = |record: &TestPod| record.state().facts_for_status(&created).containers.len();
    let mut record = record("never | main a", Lifecycle::Syncing);
    assert_eq!(shown(&record), 1, "a previous process created it, and this one starts it");
    Arc::make_mut(&mut record.pod).status =
        Some(PodStatus { phase: Some("Failed".to_owned()), ..PodStatus::default() });
    assert_eq!(shown(&record), 0, "the API has the pod as ended, before and after a restart");
}
