//! Periodic work: routines, housekeeping, and their events.

use std::time::Duration;

use super::*;
use crate::pod::restart::CrashLoop;

impl TestAgent {
    fn after(&mut self, secs: u64) -> Vec<&'static str> {
        self.at_secs += secs;
        self.handle(Event::Due);
        self.pending()
    }
}

fn up(settings: Settings, pods: &[Pod]) -> TestAgent {
    let mut test = TestAgent::new(settings);
    test.config(pods);
    test.runtime_is_up(&[]);
    test
}

#[test]
fn dead_containers_over_limit_go_unless_pod_terminates() {
    let mut named = web("u2");
    named.metadata.name = Some("other".to_owned());
    let settings = Settings { max_dead_containers: 0, ..Settings::for_node("node") };
    let mut test = up(settings, &[web("u1"), named]);
    for _ in 0..2 {
        test.inspected("a: exit(0) 300s, running 100s");
    }
    test.config(&[web("u1")]);
    test.after(61);
    let removed = test.in_flight.iter().filter_map(|(_, op)| match op {
        Op::Container(ContainerOp::Remove { pod, .. }) => Some(pod.uid.as_str()),
        _ => None,
    });
    assert_eq!(removed.collect::<Vec<_>>(), ["u1"], "{:?}", test.in_flight);
}

#[test]
fn directories_are_listed_again_after_a_lost_result() {
    let mut test = up(Settings::for_node("node"), &[]);
    test.answer("ListPodDirs", Ok(Facts::PodDirs { uids: Vec::new(), log_dirs: Vec::new() }));
    assert!(!test.after(299).contains(&"ListPodDirs"));
    assert!(test.after(1).contains(&"ListPodDirs"));
    let asked = |test: &TestAgent| {
        test.in_flight.iter().filter(|(_, op)| op.name() == "ListPodDirs").map(|(id, _)| *id).collect()
    };
    let before: Vec<_> = asked(&test);
    test.after(133);
    let given_up: Vec<_> = asked(&test);
    assert_eq!((before.len(), given_up.len()), (1, 0), "123 s and 10 more are over");
    assert!(test.after(300).contains(&"ListPodDirs"));
}

#[test]
fn every_pod_is_looked_at_when_the_runtime_returns() {
    let mut test = up(Settings::for_node("node"), &[web("u1")]);
    test.inspected("sandbox gone");
    test.after(10);
    test.answer("CheckRuntime", unavailable());
    test.after(1);
    let status = RuntimeStatus { name: "containerd".to_owned(), ..RuntimeStatus::default() };
    test.answer("CheckRuntime", Ok(Facts::Runtime(status)));
    assert!(test.pending().contains(&"InspectPod"), "before it is listed: {:?}", test.pending());
}

#[test]
fn pod_lifecycle_is_recorded_as_events() {
    let mut test = up(Settings::for_node("node"), &[fed("u1")]);
    test.inspected("sandbox ready 1s");
    test.carried_out(&["MakePodDirs", "SetUpVolume"], "sandbox ready 1s");
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    test.answer("StartContainer", Ok(Facts::Nothing));
    test.inspected("a: running 0s");
    test.handle(Event::Refresh { pod: PodUid::new("u1") });
    test.answer("RefreshVolumes", Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() }));
    test.config(&[]);
    assert_eq!(test.events, ["NodeReady", "Pulled", "Created", "Started", "FailedMount", "Killing"]);
}

#[test]
fn exceeded_deadline_is_recorded() {
    let mut pod = web("u1");
    pod.spec.as_mut().expect("a spec").active_deadline_seconds = Some(1);
    let mut test = up(Settings::for_node("node"), &[pod]);
    test.inspected("a: running 50s");
    assert_eq!(test.events, ["NodeReady", "DeadlineExceeded", "Killing"]);
}

#[test]
fn a_pod_that_has_ended_does_not_exceed_its_deadline() {
    let mut pod = web("u1");
    let spec = pod.spec.as_mut().expect("a spec");
    spec.active_deadline_seconds = Some(1);
    spec.restart_policy = Some("Never".to_owned());
    let mut test = up(Settings::for_node("node"), &[pod]);
    test.inspected("a: exit(1) 10s");
    assert_eq!(test.events, ["NodeReady"]);
    let status = test.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), None));
}

#[test]
fn the_image_is_looked_for_anew_at_every_start() {
    let mut test = up(Settings::for_node("node"), &[web("u1")]);
    test.inspected("sandbox ready 1s");
    test.carried_out(&["MakePodDirs"], "sandbox ready 1s");
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    test.answer("StartContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(1) 0s");
    assert!(test.pending().contains(&"InspectImage"), "{:?}", test.pending());
}

#[test]
fn a_new_label_reaches_the_volumes_made_of_labels_at_once() {
    let mut test = up(Settings::for_node("node"), &[fed("u1")]);
    test.inspected("a: running");
    test.carried_out(&["MakePodDirs", "SetUpVolume"], "a: running");
    let mut labelled = fed("u1");
    labelled.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())]));
    test.config(&[labelled]);
    assert!(test.pending().contains(&"RefreshVolumes"), "{:?}", test.pending());
}

#[test]
fn a_volume_that_comes_to_be_mounted_is_set_up() {
    let mut plain = fed("u1");
    plain.spec.as_mut().unwrap().containers[0].volume_mounts = None;
    let (before, with_volume) = (vec!["MakePodDirs"], vec!["MakePodDirs", "SetUpVolume"]);
    for (first, steps, is_set_up_again) in [(plain, before, true), (fed("u1"), with_volume, false)] {
        let mut test = up(Settings::for_node("node"), &[first]);
        test.inspected("sandbox gone");
        test.carried_out(&steps, "sandbox gone");
        let mut changed = fed("u1");
        changed.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())]));
        test.config(&[changed]);
        test.answer("RunSandbox", Ok(Facts::Nothing));
        test.inspected("sandbox ready 1s");
        assert_eq!(test.pending().contains(&"SetUpVolume"), is_set_up_again, "{:?}", test.pending());
    }
}

#[test]
fn nothing_is_awaited_for_a_pod_that_is_gone() {
    let mut test = up(Settings::for_node("node"), &[]);
    test.after(30);
    test.relisted(&[listed("stranger", "stranger")]);
    test.inspected("sandbox gone");
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup", "RemovePodDir"], "sandbox gone");
    // A hint arrives, and the pod is looked at while its last remains are removed.
    test.handle(Event::Hint { pod: PodUid::new("stranger") });
    assert!(test.pending().contains(&"InspectPod"));
    test.answer("RemoveLogDir", Ok(Facts::Nothing));
    assert_eq!(test.lifecycle("stranger"), "unknown");
    assert!(!test.pending().contains(&"InspectPod"), "{:?}", test.pending());
}

#[test]
fn crash_loop_depends_only_on_its_own_container() {
    let mut pod = web("u1");
    let spec = pod.spec.as_mut().unwrap();
    spec.containers.push(mk_pod("always | main b").spec.unwrap().containers.remove(0));
    let mut test = up(Settings::for_node("node"), &[pod]);
    // The run of `a` was short; that of `b`, which ended later, would have been long enough to reset the back-off.
    let state = "a: exit(1) 900s; b: exit(1) 1s";
    test.inspected(state);
    test.carried_out(&["MakePodDirs"], state);
    let started = test.now().uptime.saturating_sub(Duration::from_secs(1000));
    let record = test.agent.records.get_mut(&PodUid::new("u1")).unwrap();
    let known = CrashLoop::after_restart(None, "a:1", started, Duration::from_secs(300), started);
    record.container_mut("a").crash_loop = Some(known);
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    assert!(test.pending().contains(&"StartContainer"), "{:?}", test.pending());
    let crash_loop = test.agent.records[&PodUid::new("u1")].container("a").crash_loop.as_ref();
    assert_eq!(crash_loop.map(|known| known.delay), Some(Duration::from_secs(20)));
}
