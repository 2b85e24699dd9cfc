//! Volumes that a controller attaches, turn by turn.

use super::*;
use crate::volumes::{
    claims::{PersistentKind, PersistentSource},
    csi::{AccessMode, CsiVolume, DriverRules},
    devices::{Device, DeviceName},
    teardown::PodVolume,
};

/// A pod whose only volume is a claim.
fn claiming(uid: &str) -> Pod {
    let mut pod = fed(uid);
    let claim = serde_json::json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
    pod.spec.as_mut().unwrap().volumes = Some(vec![serde_json::from_value(claim).unwrap()]);
    pod
}

/// What its claim stands for, over a driver whose CSIDriver object is this.
fn resolved(driver: &serde_json::Value) -> Result<Facts, EffectError> {
    resolved_to("pv", "h", driver)
}

fn resolved_to(name: &str, handle: &str, driver: &serde_json::Value) -> Result<Facts, EffectError> {
    let object = serde_json::json!({"metadata": {"name": "d"}, "spec": driver});
    let rules = DriverRules::of(Some(&serde_json::from_value(object).unwrap()));
    let source = serde_json::json!({"driver": "d", "volumeHandle": handle});
    let source = serde_json::from_value(source).unwrap();
    let kind = PersistentKind::Csi(CsiVolume::persistent(&source, AccessMode::ReadWriteOnce, rules));
    let name = name.to_owned();
    let source = PersistentSource { name, read_only: false, is_exclusive: false, kind, size: None, group: None };
    Ok(Facts::Volume(Arc::new(source)))
}

/// A pod that waits for its volume to be attached.
fn waiting_for_attachment(driver: &serde_json::Value) -> TestAgent {
    waiting_on(Settings::for_node("node"), driver)
}

fn waiting_on(settings: Settings, driver: &serde_json::Value) -> TestAgent {
    let mut test = unresolved(settings);
    test.answer("ResolveClaim", resolved(driver));
    test
}

/// A pod whose claim is being resolved for the first time.
fn unresolved(settings: Settings) -> TestAgent {
    let mut test = TestAgent::new(settings);
    test.config(&[claiming("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.answer("MakePodDirs", Ok(Facts::Nothing));
    test.events.clear();
    test
}

/// Whether the limit is asked for within this time, and not before its end.
fn asks_for_the_limit(test: &mut TestAgent, driver: &serde_json::Value, after_secs: u64) -> bool {
    for _ in 0..after_secs {
        assert!(!test.pending().contains(&"CheckAttachLimit"), "too early, at {} s", test.at_secs);
        test.at_secs += 1;
        test.handle(Event::Due);
        if test.pending().contains(&"ResolveClaim") {
            test.answer("ResolveClaim", resolved(driver));
        }
    }
    test.pending().contains(&"CheckAttachLimit")
}

#[test]
fn pod_is_rejected_when_the_node_has_too_many_volumes() {
    let driver = serde_json::json!({"nodeAllocatableUpdatePeriodSeconds": 60});
    let mut test = waiting_for_attachment(&driver);
    assert!(!asks_for_the_limit(&mut test, &driver, 122), "as long as upstream waits for all volumes");
    assert!(asks_for_the_limit(&mut test, &driver, 1));
    test.answer("CheckAttachLimit", Ok(Facts::AttachLimit { is_exceeded: false }));
    assert!(!asks_for_the_limit(&mut test, &driver, 122));
    assert!(asks_for_the_limit(&mut test, &driver, 1));
    test.answer("CheckAttachLimit", Err(EffectError { kind: ErrorKind::Gone, message: "no attachment".to_owned() }));
    assert!(test.events.is_empty(), "{:?}", test.events);
    assert!(asks_for_the_limit(&mut test, &driver, 123));
    test.answer("CheckAttachLimit", Ok(Facts::AttachLimit { is_exceeded: true }));
    assert_eq!(test.events, ["VolumeAttachmentLimitExceeded"]);
    let status = test.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
    assert_eq!(
        (status.phase.as_deref(), status.reason.as_deref()),
        (Some("Failed"), Some("VolumeAttachmentLimitExceeded"))
    );
    let expected = "Pod was rejected: Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[v], \
                    unattached volumes=[v], failed to process volumes=[]: context deadline exceeded";
    assert_eq!(status.message.as_deref(), Some(expected));
    assert_eq!(test.lifecycle("u1"), "Terminated");
}

#[test]
fn attach_limit_is_not_asked_for_without_a_period() {
    let mut test = waiting_for_attachment(&serde_json::json!({}));
    assert!(!asks_for_the_limit(&mut test, &serde_json::json!({}), 1_000));
    assert_eq!(test.lifecycle("u1"), "Syncing");
}

#[test]
fn driver_volume_fails_to_attach_without_the_controller() {
    let settings = Settings { sources: vec![Source::File, Source::Api], ..Settings::for_node("node") };
    let mut test = waiting_on(Settings { attaches_by_controller: false, ..settings }, &serde_json::json!({}));
    assert_eq!(test.events, ["FailedAttachVolume"]);
    for _ in 0..3 {
        assert!(resolves_after(&mut test, 60));
        test.handle(Event::Refresh { pod: PodUid::new("u1") });
        test.answer("ResolveClaim", resolved(&serde_json::json!({})));
    }
    assert_eq!(test.events.len(), 1, "it is said once: {:?}", test.events);
    let steps = test.agent.snapshot().pods[&PodUid::new("u1")].steps.clone();
    let is_told = |text: &str| text.contains("volume v, which only the attach/detach controller can attach");
    assert!(steps.iter().any(|step| is_told(&step.detail)), "{steps:?}");
}

#[test]
fn events_of_two_volumes_that_wait_are_recorded_once_each() {
    let mut pod = claiming("u1");
    let more = serde_json::json!({"name": "w", "persistentVolumeClaim": {"claimName": "c2"}});
    pod.spec.as_mut().unwrap().volumes.as_mut().unwrap().push(serde_json::from_value(more).unwrap());
    let mount = serde_json::json!([{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]);
    let container = &mut pod.spec.as_mut().unwrap().containers[0];
    container.volume_mounts = serde_json::from_value(mount).unwrap();
    let settings = Settings { sources: vec![Source::File, Source::Api], ..Settings::for_node("node") };
    let mut test = TestAgent::new(Settings { attaches_by_controller: false, ..settings });
    test.config(&[pod]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.answer("MakePodDirs", Ok(Facts::Nothing));
    test.events.clear();
    for (name, handle) in [("pv", "h"), ("pv2", "h2")] {
        test.answer("ResolveClaim", resolved_to(name, handle, &serde_json::json!({})));
    }
    for _ in 0..3 {
        test.handle(Event::Refresh { pod: PodUid::new("u1") });
    }
    assert_eq!(test.events, ["FailedAttachVolume", "FailedAttachVolume"]);
}

/// Passes this time; true if the claim is resolved again at its end, and not before.
fn resolves_after(test: &mut TestAgent, secs: u64) -> bool {
    for _ in 0..secs {
        assert!(!test.pending().contains(&"ResolveClaim"), "too early, at {} s", test.at_secs);
        test.at_secs += 1;
        test.handle(Event::Due);
    }
    test.pending().contains(&"ResolveClaim")
}

#[test]
fn volume_that_waits_for_attachment_learns_that_its_driver_needs_none() {
    let unattached = serde_json::json!({"attachRequired": false});
    let mut test = waiting_for_attachment(&serde_json::json!({}));
    assert!(resolves_after(&mut test, 60));
    test.answer("ResolveClaim", Err(EffectError { kind: ErrorKind::Unavailable, message: "no answer".to_owned() }));
    assert_eq!(test.events, ["FailedMount"]);
    assert!(resolves_after(&mut test, 60), "it waits on, without a back-off");
    test.answer("ResolveClaim", resolved(&serde_json::json!({})));
    assert!(resolves_after(&mut test, 60));
    assert!(!test.pending().contains(&"StageDevice"), "{:?}", test.pending());
    test.answer("ResolveClaim", resolved(&unattached));
    assert!(test.pending().contains(&"StageDevice"), "{:?}", test.pending());
    test.answer("StageDevice", Ok(Facts::Nothing));
    assert!(setup_of(&test, "v").is_some());
}

#[test]
fn claim_that_is_not_bound_is_resolved_again_within_ten_seconds() {
    let mut test = unresolved(Settings::for_node("node"));
    for wait_secs in [1, 1, 2, 4, 8, 10, 10, 10] {
        let message = "error processing PVC default/c: PVC is not bound".to_owned();
        test.answer("ResolveClaim", Err(EffectError { kind: ErrorKind::MissingObject, message }));
        assert!(resolves_after(&mut test, wait_secs), "after {wait_secs} s");
    }
    test.answer("ResolveClaim", resolved(&serde_json::json!({"attachRequired": false})));
    assert!(test.pending().contains(&"StageDevice"), "{:?}", test.pending());
}

#[test]
fn claim_is_resolved_again_between_tries_of_its_volume() {
    let driver = |is_told: bool| serde_json::json!({"attachRequired": false, "podInfoOnMount": is_told});
    let is_told = |test: &TestAgent| {
        test.in_flight.iter().any(|(_, op)| {
            let Op::Volume(VolumeOp::Stage { source, .. } | VolumeOp::SetUp { claimed: Some(source), .. }) = op else {
                return false;
            };
            matches!(&source.kind, PersistentKind::Csi(volume) if volume.rules.pod_info)
        })
    };
    let mut test = waiting_for_attachment(&driver(false));
    for wait_secs in [1, 1, 2, 4] {
        test.answer("StageDevice", unready("no"));
        assert!(resolves_after(&mut test, wait_secs) && !test.pending().contains(&"StageDevice"));
        test.answer("ResolveClaim", resolved(&driver(false)));
        assert!(!is_told(&test));
    }
    test.answer("StageDevice", Ok(Facts::Nothing));
    for (wait_secs, kind) in [
        (1, ErrorKind::FailedByDriver),
        (1, ErrorKind::Retry),
        (2, ErrorKind::FailedByDriver),
        (4, ErrorKind::Uncertain),
    ] {
        let has_driver_answered = kind == ErrorKind::FailedByDriver;
        volume_set_up(&mut test, "v", Err(EffectError { kind, message: "no".to_owned() }));
        assert!(resolves_after(&mut test, wait_secs) && setup_of(&test, "v").is_none());
        test.answer("ResolveClaim", resolved(&driver(true)));
        assert!(is_told(&test));
        // A driver that was not called, or is busy, has not forgotten what is staged.
        assert_eq!(test.pending().contains(&"StageDevice"), has_driver_answered);
        if has_driver_answered {
            test.answer("StageDevice", Ok(Facts::Nothing));
        }
        assert!(is_told(&test) && !test.pending().contains(&"ResolveClaim"));
    }
    volume_set_up(&mut test, "v", Ok(Facts::Nothing));
    assert!(test.pending().contains(&"RunSandbox"), "{:?}", test.pending());
}

#[test]
fn volume_that_is_set_up_stays_what_it_was_whatever_its_claim_says() {
    let driver = |is_told: bool| serde_json::json!({"attachRequired": false, "podInfoOnMount": is_told});
    let uid = PodUid::new("u1");
    let mut test = waiting_for_attachment(&driver(false));
    test.answer("StageDevice", Ok(Facts::Nothing));
    volume_set_up(&mut test, "v", Ok(Facts::Nothing));
    test.answer("RunSandbox", Ok(Facts::Nothing));
    test.inspected("a: running");
    for (name, handle, is_kept) in [("pv2", "h2", true), ("pv", "h2", true), ("pv2", "h", true), ("pv", "h", false)] {
        assert!(resolves_after(&mut test, 60));
        test.answer("ResolveClaim", resolved_to(name, handle, &driver(true)));
        let known = test.agent.records[&uid].claimed_volumes()["v"].clone();
        let PersistentKind::Csi(volume) = &known.kind else { panic!("{known:?}") };
        let found = (known.name.as_str(), volume.handle.as_str(), volume.rules.pod_info);
        assert_eq!(found, ("pv", "h", !is_kept), "after {name} of {handle}");
        let other = DeviceName::of(&Device::csi("d", "h2"));
        assert!(test.agent.node.devices.users(&other).is_empty(), "the pod cannot use it");
    }
}

#[test]
fn volume_that_hangs_at_its_end_delays_no_other() {
    let volume = |name: &str| PodVolume { plugin_dir: "kubernetes.io~csi".into(), name: name.into(), is_block: false };
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[]);
    test.answer("ListPodDirs", Ok(Facts::PodDirs { uids: vec![PodUid::new("old")], log_dirs: Vec::new() }));
    test.inspected("sandbox gone");
    let mounted = ["fails", "hangs", "quick"].map(volume);
    test.answer("TearDownVolumes", Ok(Facts::MountedVolumes(BTreeSet::from(mounted))));
    let left = |test: &TestAgent| test.in_flight.iter().filter(|(_, op)| op.name() == "UnmountVolume").count();
    assert_eq!(left(&test), 3, "side by side");
    test.answer("UnmountVolume", Err(EffectError { kind: ErrorKind::Retry, message: "busy".to_owned() }));
    assert_eq!(left(&test), 2);
    let is_quick = |op: &Op| matches!(op, Op::Volume(VolumeOp::Unmount { volume, .. }) if volume.name == "quick");
    let quick = test.in_flight.iter().position(|(_, op)| is_quick(op)).unwrap();
    let (id, _) = test.in_flight.remove(quick);
    test.handle(Event::Done { id, result: Ok(Facts::Nothing) });
    assert_eq!(left(&test), 1, "the one that hangs");
    test.at_secs += 1;
    test.handle(Event::Due);
    assert_eq!(left(&test), 2, "the one that failed is tried again meanwhile");
    test.answer("UnmountVolume", Ok(Facts::Nothing));
    assert!(!test.pending().contains(&"TearDownVolumes"), "the pod's end waits for all");
    test.answer("UnmountVolume", Ok(Facts::Nothing));
    assert!(test.pending().contains(&"TearDownVolumes"));
    test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    assert!(test.pending().contains(&"RemovePodDir"));
}

/// Gives the result of the setup of this volume.
fn volume_set_up(test: &mut TestAgent, volume: &str, result: Result<Facts, EffectError>) {
    let position = setup_of(test, volume).expect("it is being set up");
    let (id, _) = test.in_flight.remove(position);
    test.handle(Event::Done { id, result });
}

fn setup_of(test: &TestAgent, volume: &str) -> Option<usize> {
    let is_it = |op: &Op| matches!(op, Op::Volume(VolumeOp::SetUp { volume: name, .. }) if name == volume);
    test.in_flight.iter().position(|(_, op)| is_it(op))
}

/// A running pod of a previous process, with a config map volume, `v`, that is set up, and another one, `w`, that is not.
fn running_with(volume: &serde_json::Value) -> TestAgent {
    let mut pod = fed("u1");
    let spec = pod.spec.as_mut().unwrap();
    spec.volumes.as_mut().unwrap().push(serde_json::from_value(volume.clone()).unwrap());
    let mount = serde_json::json!({"name": "w", "mountPath": "/w"});
    spec.containers[0].volume_mounts.as_mut().unwrap().push(serde_json::from_value(mount).unwrap());
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[pod]);
    test.runtime_is_up(&[listed("u1", "web")]);
    test.inspected("a: running");
    test.answer("MakePodDirs", Ok(Facts::Nothing));
    volume_set_up(&mut test, "v", Ok(Facts::Nothing));
    test
}

#[test]
fn volume_that_cannot_be_set_up_delays_no_refresh_of_others() {
    let directory = serde_json::json!({"name": "w", "hostPath": {"path": "/gone", "type": "Directory"}});
    let missing = serde_json::json!({"name": "w", "configMap": {"name": "gone"}});
    for (volume, refreshed_alone) in [(directory, false), (missing, true)] {
        let mut test = running_with(&volume);
        for _ in 0..60 {
            let is_refreshed = test.pending().contains(&"RefreshVolumes") || setup_of(&test, "v").is_some();
            assert!(!is_refreshed, "too early, at {} s", test.at_secs);
            if setup_of(&test, "w").is_some() {
                volume_set_up(&mut test, "w", unready("it is not there"));
            }
            test.at_secs += 1;
            test.handle(Event::Due);
        }
        let found = (test.pending().contains(&"RefreshVolumes"), setup_of(&test, "v").is_some());
        assert_eq!(found, (!refreshed_alone, refreshed_alone), "{volume}");
    }
}

#[test]
fn file_system_that_answers_again_ends_only_back_offs_that_it_caused() {
    let directory = serde_json::json!({"name": "w", "hostPath": {"path": "/mnt/nfs", "type": "Directory"}});
    for (kind, expected) in [(ErrorKind::FileSystemLate, true), (ErrorKind::Retry, false)] {
        let mut test = running_with(&directory);
        volume_set_up(&mut test, "w", Err(EffectError { kind, message: "no".to_owned() }));
        assert_eq!(setup_of(&test, "w"), None);
        test.handle(Event::FileSystemAnswered);
        assert_eq!(setup_of(&test, "w").is_some(), expected);
    }
}

#[test]
fn device_that_waited_for_a_file_system_is_staged_when_it_answers() {
    let needs_no_attachment = serde_json::json!({"attachRequired": false});
    for (kind, expected) in [(ErrorKind::FileSystemLate, true), (ErrorKind::Retry, false)] {
        let mut test = waiting_for_attachment(&needs_no_attachment);
        test.answer("StageDevice", Err(EffectError { kind, message: "no".to_owned() }));
        test.handle(Event::FileSystemAnswered);
        // Claims are read again between two tries.
        let begins = |test: &TestAgent| test.pending().contains(&"ResolveClaim");
        assert_eq!(begins(&test), expected, "{:?}", test.pending());
        if expected {
            test.answer("ResolveClaim", resolved(&needs_no_attachment));
            assert!(test.pending().contains(&"StageDevice"), "{:?}", test.pending());
        }
    }
}
