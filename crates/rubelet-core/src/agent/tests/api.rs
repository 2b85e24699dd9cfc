//! The agent and the API server: pods from it, statuses and mirror pods to it.

use serde_json::{Value, json};

use super::*;
use crate::op::ApiOp;
use crate::{id::ContainerId, node_object::NodeObject, pod_config::MIRROR_ANNOTATION};

fn in_cluster(sources: &[Source]) -> TestAgent {
    TestAgent::new(Settings { sources: sources.to_vec(), ..Settings::for_node("node") })
}

/// A pod as the API server holds it.
fn stored(text: &str, version: u64, status: &Value) -> Pod {
    let mut pod = mk_pod(text);
    pod.metadata.resource_version = Some(version.to_string());
    pod.status = Some(serde_json::from_value(status.clone()).unwrap());
    pod
}

impl TestAgent {
    fn listed_by_api(&mut self, pods: &[Pod]) {
        let pods = pods.iter().cloned().map(Arc::new).collect();
        self.handle(Event::Config { source: Source::Api, pods });
    }

    /// Requests to the API server without a response.
    fn api_requests(&self) -> Vec<&'static str> {
        let api = |op: &&Op| {
            matches!(
                op,
                Op::Api(ApiOp::GetNode)
                    | Op::Api(ApiOp::PatchStatus { .. })
                    | Op::Api(ApiOp::DeletePod { .. })
                    | Op::Api(ApiOp::CreateMirrorPod { .. })
                    | Op::Api(ApiOp::DeleteMirrorPod { .. })
            )
        };
        self.in_flight.iter().map(|(_, op)| op).filter(api).map(Op::name).collect()
    }

    /// A pod without containers releases all it held, and the next relist does not show it.
    fn cleared(&mut self) {
        let clearing = ["TearDownVolumes", "RemovePodCgroup", "RemovePodDir", "RemoveLogDir", "MakePodDirs"];
        while let Some(step) = self.pending().into_iter().find(|step| clearing.contains(step)) {
            self.carried_out(&[step], "sandbox gone");
        }
        self.at_secs += 60;
        self.handle(Event::Due);
        self.relisted(&[]);
    }

    fn patch(&self) -> Value {
        let patches = self.in_flight.iter().filter_map(|(_, op)| match op {
            Op::Api(ApiOp::PatchStatus { patch, .. }) => Some(patch["status"].clone()),
            _ => None,
        });
        let [patch] = patches.collect::<Vec<_>>().try_into().expect("one patch is under way");
        patch
    }

    /// The API server applies the patch, as a real one would.
    fn patched(&mut self, before: &Pod, version: u64) -> Pod {
        let after = with_patch(before, &self.patch(), version);
        self.answer("PatchStatus", Ok(Facts::ApiPod(Arc::new(after.clone()))));
        after
    }
}

/// The stored pod after a patch of its status.
pub(super) fn with_patch(before: &Pod, patch: &Value, version: u64) -> Pod {
    let mut status = serde_json::to_value(&before.status).unwrap();
    for (field, value) in patch.as_object().unwrap().iter().filter(|(field, _)| !field.starts_with('$')) {
        match field.as_str() {
            "conditions" => merge_conditions(&mut status["conditions"], value),
            _ => status[field] = value.clone(),
        }
    }
    let mut after = before.clone();
    after.status = Some(serde_json::from_value(status).unwrap());
    after.metadata.resource_version = Some(version.to_string());
    after
}

fn merge_conditions(stored: &mut Value, patch: &Value) {
    if stored.is_null() {
        *stored = json!([]);
    }
    let stored = stored.as_array_mut().unwrap();
    for change in patch.as_array().unwrap() {
        match stored.iter_mut().find(|known| known["type"] == change["type"]) {
            Some(known) => known.as_object_mut().unwrap().extend(change.as_object().unwrap().clone()),
            None => stored.push(change.clone()),
        }
    }
}

fn refused(kind: ErrorKind) -> Result<Facts, EffectError> {
    Err(EffectError { kind, message: "patch pods: refused".to_owned() })
}

#[test]
fn status_of_a_pod_that_an_earlier_process_rejected_stays() {
    let (message, start) = ("Pod was rejected: no room", "2026-06-01T11:00:00Z");
    let status = json!({ "phase": "Failed", "reason": "Evicted", "message": message, "startTime": start });
    let pod = stored("always | main a", 7, &status);
    let mut test = in_cluster(&[Source::Api]);
    test.listed_by_api(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup"], "sandbox gone");
    assert_eq!(test.lifecycle("u1"), "Finished");
    assert!(!test.pending().contains(&"PatchStatus"), "{:#}", test.patch());
    let shown = test.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
    assert_eq!(shown.reason.as_deref(), Some("Evicted"));
}

#[test]
fn api_pod_is_deleted_after_resources_are_reclaimed() {
    let mut test = in_cluster(&[Source::Api]);
    let pod = stored("always | main a", 1, &json!({ "phase": "Pending" }));
    test.listed_by_api(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    assert_eq!(test.patch()["phase"], "Running");
    let running = test.patched(&pod, 2);
    assert!(test.api_requests().is_empty());

    let mut deleted = running;
    deleted.metadata = mk_pod("always | deleted | main a").metadata;
    deleted.metadata.resource_version = Some("3".to_owned());
    test.listed_by_api(std::slice::from_ref(&deleted));
    assert_eq!(test.lifecycle("u1"), "Terminating");
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(0) 0s");
    let mut held = deleted.clone();
    if test.api_requests() == ["PatchStatus"] {
        assert_ne!(test.patch()["phase"], "Failed", "something may still run");
        held = test.patched(&deleted, 4);
    }
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(0) 0s");
    if test.api_requests() == ["PatchStatus"] {
        held = test.patched(&held, 5);
    }
    assert!(!test.api_requests().contains(&"DeletePod"), "its volumes are not torn down");
    test.answer("TearDownVolumes", Ok(Facts::Nothing));
    assert!(!test.api_requests().contains(&"DeletePod"), "its cgroup is still there");
    test.answer("RemovePodCgroup", Ok(Facts::Nothing));
    while test.api_requests() == ["PatchStatus"] {
        held = test.patched(&held, 6);
    }
    assert_eq!(held.status.as_ref().unwrap().phase.as_deref(), Some("Succeeded"));
    assert_eq!(test.api_requests(), ["DeletePod"]);
    test.answer("DeletePod", Ok(Facts::Nothing));
    assert!(test.api_requests().is_empty());
    assert!(!test.pending().contains(&"RemoveContainer"), "its traces stay until the API server has forgotten it");
    test.listed_by_api(&[]);
    test.answer("RemoveContainer", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s");
    assert!(test.api_requests().is_empty());
}

#[test]
fn pod_deleted_before_our_response_leaves_no_state() {
    let pod = stored("always | main a", 1, &json!({ "phase": "Pending" }));
    let done = Ok(Facts::ApiPod(Arc::new(pod.clone())));
    for answer in [done, refused(ErrorKind::Gone), refused(ErrorKind::Retry), refused(ErrorKind::TimedOut)] {
        let mut test = in_cluster(&[Source::Api]);
        test.listed_by_api(std::slice::from_ref(&pod));
        test.runtime_is_up(&[]);
        test.inspected("sandbox gone");
        test.listed_by_api(&[]);
        test.answer("PatchStatus", answer);
        test.cleared();
        assert_eq!(test.lifecycle("u1"), "unknown");
        assert_eq!(test.agent.entries_of_gone_pods(), Vec::<String>::new());
    }
}

#[test]
fn failed_mirror_pod_creation_leaves_no_state() {
    let mut test = in_cluster(&[Source::File, Source::Api]);
    test.config(&[mk_pod("always | static | main a")]);
    test.listed_by_api(&[]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.answer("CreateMirrorPod", refused(ErrorKind::Retry));
    test.config(&[]);
    test.cleared();
    assert_eq!(test.agent.entries_of_gone_pods(), Vec::<String>::new());
}

#[test]
fn resize_in_the_api_shows_as_infeasible_and_changes_nothing() {
    let sized = |memory: &str, version: u64, status: &Value| {
        let mut pod = stored("always | main a", version, status);
        let limits = json!({ "limits": { "memory": memory }, "requests": { "memory": memory } });
        pod.spec.as_mut().unwrap().containers[0].resources = Some(serde_json::from_value(limits).unwrap());
        pod
    };
    let mut test = in_cluster(&[Source::Api]);
    let pod = sized("64Mi", 1, &json!({ "phase": "Pending" }));
    test.listed_by_api(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    let running = test.patched(&pod, 2);
    let resized = sized("1Gi", 3, &serde_json::to_value(&running.status).unwrap());
    test.listed_by_api(std::slice::from_ref(&resized));
    let status = test.patched(&resized, 4).status.unwrap();
    let container = &status.container_statuses.unwrap()[0];
    let shown = serde_json::to_value((&container.resources, &container.allocated_resources)).unwrap();
    let held = json!({ "memory": "64Mi" });
    assert_eq!(shown, json!([{ "limits": held, "requests": held }, held]));
    let conditions = serde_json::to_value(&status.conditions).unwrap();
    let pending = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == "PodResizePending");
    assert_eq!(pending.map(|pending| &pending["reason"]), Some(&json!("Infeasible")));
    assert!(test.api_requests().is_empty());
}

#[test]
fn a_pod_that_ended_before_the_agent_began_is_never_started() {
    let mut test = in_cluster(&[Source::Api]);
    let status = json!({ "phase": "Succeeded", "containerStatuses": [{
        "name": "a", "image": "a:1", "imageID": "", "ready": false, "restartCount": 0,
        "state": { "terminated": { "exitCode": 0 } },
    }] });
    test.listed_by_api(&[stored("always | main a", 1, &status)]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup"], "sandbox gone");
    assert_eq!(test.lifecycle("u1"), "Finished");
    assert!(!test.pending().iter().any(|op| ["RunSandbox", "MakePodDirs"].contains(op)));
}

#[test]
fn the_newest_status_wins_and_only_one_is_under_way() {
    let mut test = in_cluster(&[Source::Api]);
    let pod = stored("always | main a | main b", 1, &json!({ "phase": "Pending" }));
    test.listed_by_api(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    assert_eq!(test.api_requests(), ["PatchStatus"]);
    test.handle(Event::Hint { pod: "u1".into() });
    test.inspected("a: running 5s; b: running 1s");
    assert_eq!(test.api_requests(), ["PatchStatus"], "the first has not been answered");
    let after = test.patched(&pod, 2);
    assert_eq!(test.api_requests(), ["PatchStatus"]);
    assert!(test.patch().to_string().contains(r#""name":"b""#));
    test.patched(&after, 3);
    assert!(test.api_requests().is_empty());
}

/// One API pod; every patch is applied at once.
struct PatchedPod {
    test: TestAgent,
    pod: Pod,
    phases: Vec<String>,
    removed: Vec<ContainerId>,
}

impl PatchedPod {
    fn of(pod: Pod) -> Self {
        PatchedPod::in_world(Settings { sources: vec![Source::Api], ..Settings::for_node("node") }, pod)
    }

    fn in_world(settings: Settings, pod: Pod) -> Self {
        let mut test = TestAgent::new(settings);
        test.listed_by_api(std::slice::from_ref(&pod));
        test.runtime_is_up(&[]);
        PatchedPod { test, pod, phases: Vec::new(), removed: Vec::new() }
    }

    fn after(&mut self, happening: impl FnOnce(&mut TestAgent)) -> &mut Self {
        happening(&mut self.test);
        while self.test.api_requests() == ["PatchStatus"] {
            let version = self.next_version();
            self.pod = self.test.patched(&self.pod, version);
            let status = self.pod.status.as_ref().unwrap();
            self.phases.push(format!("{} {}", status.phase.as_deref().unwrap_or(""), status.pod_ip.is_some()));
        }
        self
    }

    fn next_version(&self) -> u64 {
        self.pod.metadata.resource_version.as_ref().map_or(1, |version| version.parse::<u64>().unwrap() + 1)
    }

    /// A user deletes the pod.
    fn deleted(&mut self) -> &mut Self {
        let version = self.next_version();
        self.pod.metadata.resource_version = Some(version.to_string());
        self.pod.metadata.generation = self.pod.metadata.generation.map(|generation| generation + 1);
        let asked = mk_pod("always | deleted | main a").metadata;
        self.pod.metadata.deletion_timestamp = asked.deletion_timestamp;
        self.pod.metadata.deletion_grace_period_seconds = asked.deletion_grace_period_seconds;
        let pod = self.pod.clone();
        self.after(|test| test.listed_by_api(&[pod]))
    }

    fn done(&mut self, step: &'static str) -> &mut Self {
        self.after(|test| test.answer(step, Ok(Facts::Nothing)))
    }

    /// What was removed is gone, whatever `state` lists.
    fn seen(&mut self, state: &'static str) -> &mut Self {
        let mut found = PodFacts { looked_at: self.test.now().uptime, ..facts(state) };
        found.containers.retain(|container| !self.removed.contains(&container.id));
        self.after(|test| test.answer("InspectPod", Ok(Facts::Pod(found))))
    }

    /// Everything up to a container's start, while the pod stays as it is.
    fn prepared(&mut self, state: &'static str) -> &mut Self {
        for step in ["RemoveContainer", "MakePodDirs", "InspectImage", "InspectPod"] {
            let image = ImageFacts { id: "sha256:1".to_owned(), ..ImageFacts::default() };
            let removed = self.test.in_flight.iter().filter_map(|(_, op)| match op {
                Op::Container(ContainerOp::Remove { id, .. }) => Some(id.clone()),
                _ => None,
            });
            self.removed.extend(removed);
            match step {
                step if !self.test.pending().contains(&step) => {}
                "InspectPod" => drop(self.seen(state)),
                "InspectImage" => drop(self.after(|test| test.answer(step, Ok(Facts::Image(Some(image)))))),
                "RemoveContainer" => drop(self.done(step).seen(state)),
                _ => drop(self.done(step)),
            }
        }
        self
    }

    /// A container event came.
    fn hinted(&mut self, state: &'static str) -> &mut Self {
        self.after(|test| test.handle(Event::Hint { pod: "u1".into() })).seen(state)
    }
}

#[test]
fn pod_start_takes_three_status_writes() {
    let mut told = PatchedPod::of(stored("always | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("sandbox gone").done("MakePodDirs");
    told.hinted("sandbox ready 0s").done("RunSandbox").seen("sandbox ready 0s");
    told.prepared("sandbox ready 0s");
    // Created, started, result: three looks within milliseconds.
    told.hinted("sandbox ready 0s; a: created 0s").done("StartContainer");
    told.seen("sandbox ready 0s; a: running 0s").hinted("sandbox ready 0s; a: running 0s");
    assert_eq!(told.phases, ["Pending false", "Pending true", "Running true"]);
}

#[test]
fn completed_pod_is_reported_terminal_before_its_sandbox_stops() {
    let mut told = PatchedPod::of(stored("never | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("a: running 5s");
    let before = told.phases.len();
    told.hinted("a: exit(0) 0s");
    assert_eq!(told.phases[before..], ["Succeeded true"], "nothing runs and nothing will");
    told.done("StopSandbox").seen("sandbox notready 60s; a: exit(0) 0s");
    told.done("TearDownVolumes").done("RemovePodCgroup");
    assert_eq!(told.phases[before..], ["Succeeded true", "Succeeded true"], "its end, and that its sandbox is gone");
}

#[test]
fn terminal_status_is_not_reverted_when_its_response_is_lost() {
    let mut told = PatchedPod::of(stored("never | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("a: running 5s");
    let test = &mut told.test;
    test.handle(Event::Hint { pod: "u1".into() });
    test.inspected("a: exit(0) 0s");
    assert_eq!(test.patch()["phase"], "Succeeded");
    test.answer("PatchStatus", Err(EffectError { kind: ErrorKind::Unavailable, message: "lost".to_owned() }));
    test.answer("StopSandbox", Ok(Facts::Nothing));
    // The look after it is still in flight.
    test.at_secs += 3;
    test.handle(Event::Due);
    assert_eq!(test.patch()["phase"], "Succeeded");
}

#[test]
fn terminal_status_waits_for_sidecars_and_a_fresh_look() {
    let mut told = PatchedPod::of(stored("never | sidecar s | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("s: running 9s; a: running 5s");
    told.hinted("s: running 9s; a: exit(0) 0s");
    assert!(told.phases.iter().all(|phase| phase.starts_with("Running")), "{:?}", told.phases);
    told.done("StopContainer");
    assert!(told.phases.iter().all(|phase| phase.starts_with("Running")), "{:?}", told.phases);
    told.seen("s: exit(0) 0s; a: exit(0) 0s");
    assert_eq!(told.phases.last().map(String::as_str), Some("Succeeded true"));
}

#[test]
fn stop_of_a_pod_takes_at_most_three_status_writes() {
    let mut pod = stored("always | main a", 1, &json!({ "phase": "Pending" }));
    pod.metadata.generation = Some(1);
    let mut told = PatchedPod::of(pod);
    told.seen("a: running 5s");
    let before = told.phases.len();
    told.deleted();
    told.hinted("a: exit(0) 0s").done("StopContainer").seen("a: exit(0) 0s");
    told.done("StopSandbox").seen("sandbox notready 60s; a: exit(0) 0s");
    told.done("TearDownVolumes").done("RemovePodCgroup");
    assert_eq!(told.test.api_requests(), ["DeletePod"]);
    let written = told.phases.split_off(before);
    assert_eq!(written, ["Running true", "Succeeded true"], "its generation, and its end");
}

#[test]
fn sandbox_that_cannot_be_stopped_does_not_block_the_status() {
    let mut told = PatchedPod::of(stored("always | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("a: running 5s");
    told.deleted();
    let before = told.phases.len();
    told.done("StopContainer").seen("a: exit(0) 0s");
    assert_eq!(told.phases.len(), before, "its sandbox is about to stop");
    told.after(|test| test.answer("StopSandbox", refused(ErrorKind::Retry))).seen("a: exit(0) 0s");
    assert_eq!(told.phases.len(), before + 1);
}

#[test]
fn failed_container_start_is_reported() {
    let mut told = PatchedPod::of(stored("always | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("sandbox ready 1s").prepared("sandbox ready 1s").hinted("sandbox ready 1s; a: created 0s");
    told.after(|test| test.answer("StartContainer", refused(ErrorKind::Retry)));
    told.seen("sandbox ready 1s; a: created 0s");
    let status = told.pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0].clone();
    assert_eq!(status.container_id.as_deref(), Some("containerd://a0"));
    assert_eq!(status.state.unwrap().waiting.unwrap().reason.as_deref(), Some("RunContainerError"));
}

#[test]
fn restarted_container_is_reported_when_it_runs() {
    let mut told = PatchedPod::of(stored("always | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("a: running 5s").hinted("a: exit(1) 0s").prepared("a: exit(1) 0s").done("StartContainer");
    told.seen("a: exit(1), running 0s").hinted("a: exit(1), exit(1) 0s").prepared("a: exit(1), exit(1) 0s");
    let waits_for = |told: &PatchedPod| {
        let state = told.pod.status.as_ref()?.container_statuses.as_ref()?[0].state.clone()?;
        state.waiting?.reason
    };
    assert_eq!(waits_for(&told).as_deref(), Some("CrashLoopBackOff"));
    told.after(|test| {
        test.at_secs += 15;
        test.handle(Event::Due);
    });
    told.prepared("a: exit(1), exit(1) 15s");
    let writes = told.phases.len();
    told.done("StartContainer");
    assert_eq!((told.phases.len(), waits_for(&told).as_deref()), (writes, Some("CrashLoopBackOff")));
    told.seen("a: exit(1), exit(1) 15s, running 0s");
    assert_eq!((told.phases.len(), waits_for(&told)), (writes + 1, None));
}

#[test]
fn pod_host_ips_follow_the_node_object() {
    let settings =
        Settings { sources: vec![Source::Api], host_ips: vec!["10.0.0.1".into()], ..Settings::for_node("node") };
    let mut told = PatchedPod::in_world(settings, stored("always | main a", 1, &json!({ "phase": "Pending" })));
    told.seen("a: running 5s");
    let shown = |told: &PatchedPod| told.pod.status.as_ref().unwrap().host_ip.clone().unwrap();
    assert_eq!(shown(&told), "10.0.0.1", "the node shows none yet");
    let node = |version: u64, ip: &str| NodeObject { version, host_ips: vec![ip.to_owned()], ..NodeObject::default() };
    told.after(|test| test.handle(Event::Node(node(2, "10.0.0.2"))));
    assert_eq!(shown(&told), "10.0.0.2");
    let writes = told.phases.len();
    told.after(|test| test.handle(Event::Node(node(3, "10.0.0.2"))));
    told.after(|test| test.handle(Event::Node(node(1, "10.0.0.1"))));
    assert_eq!((shown(&told).as_str(), told.phases.len()), ("10.0.0.2", writes), "an older look changes nothing");
}

#[test]
fn failed_status_patch_is_retried_unless_pod_is_gone() {
    let mut test = in_cluster(&[Source::Api]);
    test.listed_by_api(&[stored("always | main a", 1, &json!({}))]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test.answer("PatchStatus", refused(ErrorKind::Retry));
    assert!(test.api_requests().is_empty(), "not at once");
    test.at_secs += 1;
    test.handle(Event::Due);
    assert_eq!(test.api_requests(), ["PatchStatus"]);
    test.answer("PatchStatus", refused(ErrorKind::Gone));
    test.at_secs += 60;
    test.handle(Event::Due);
    assert!(test.api_requests().is_empty());
}

#[test]
fn status_retries_stay_frequent_while_api_is_unreachable() {
    let mut test = in_cluster(&[Source::Api]);
    test.listed_by_api(&[stored("always | main a", 1, &json!({}))]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    for _ in 0..20 {
        test.answer("PatchStatus", refused(ErrorKind::Unavailable));
        test.at_secs += 3;
        test.handle(Event::Due);
        assert_eq!(test.api_requests(), ["PatchStatus"], "at {} s", test.at_secs);
    }
    test.answer("PatchStatus", refused(ErrorKind::Retry));
    test.at_secs += 1;
    test.handle(Event::Due);
    assert_eq!(test.api_requests(), ["PatchStatus"], "one that is not yet itself is asked again soon");
}

#[test]
fn status_overwritten_by_another_writer_is_restored() {
    let mut test = in_cluster(&[Source::Api]);
    let pod = stored("always | main a", 1, &json!({ "phase": "Pending" }));
    test.listed_by_api(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    let mut ours = test.patched(&pod, 2);
    ours.status.as_mut().unwrap().phase = Some("Pending".to_owned());
    ours.metadata.resource_version = Some("3".to_owned());
    test.listed_by_api(std::slice::from_ref(&ours));
    assert!(test.api_requests().is_empty(), "there is a moment to settle");
    test.at_secs += 10;
    test.handle(Event::Due);
    assert_eq!(test.patch(), json!({ "phase": "Running" }));
}

#[test]
fn mirror_pod_is_recreated_when_deleted_or_outdated() {
    let mut test = in_cluster(&[Source::File, Source::Api]);
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    assert!(test.api_requests().is_empty(), "who knows what the API server already has?");
    test.listed_by_api(&[]);
    assert_eq!(test.api_requests(), ["CreateMirrorPod"]);
    test.answer("CreateMirrorPod", Ok(Facts::Nothing));

    let mirror = |hash: &str, traits: &str| {
        let mut pod = stored(traits, 5, &json!({ "phase": "Pending" }));
        pod.metadata.uid = Some("m1".to_owned());
        pod.metadata.annotations.get_or_insert_default().insert(MIRROR_ANNOTATION.to_owned(), hash.to_owned());
        pod
    };
    let plain = "always | main a";
    test.listed_by_api(&[mirror("u1", plain)]);
    assert!(test.api_requests().is_empty());
    let mirror_uid = |test: &TestAgent| test.agent.snapshot().pods[&PodUid::new("u1")].mirror_uid.clone();
    assert_eq!(mirror_uid(&test), Some("m1".into()), "under which its streams may be asked for");
    test.inspected("a: running 5s");
    assert_eq!(test.patch()["phase"], "Running", "its status appears on its mirror");
    test.patched(&mirror("u1", plain), 6);

    test.listed_by_api(&[mirror("u1", "always | deleted | main a")]);
    assert_eq!(test.lifecycle("u1"), "Syncing", "its mirror's end is not its own");
    assert_eq!(test.api_requests(), ["DeleteMirrorPod"]);
    test.answer("DeleteMirrorPod", Ok(Facts::Nothing));
    test.listed_by_api(&[]);
    assert_eq!(mirror_uid(&test), None);
    assert_eq!(test.api_requests(), ["CreateMirrorPod"]);
    test.answer("CreateMirrorPod", Ok(Facts::Nothing));
    test.listed_by_api(&[mirror("an older manifest", plain)]);
    assert!(test.api_requests().contains(&"DeleteMirrorPod"));
}

#[test]
fn mirror_pod_is_deleted_after_its_static_pod_terminated() {
    let mut test = in_cluster(&[Source::File, Source::Api]);
    let mirror = mirror_of_u1();
    test.listed_by_api(std::slice::from_ref(&mirror));
    assert!(test.api_requests().is_empty(), "the manifests were not read yet");
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test.patched(&mirror, 6);
    test.config(&[]);
    assert!(test.api_requests().is_empty(), "it is still ending");
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(0) 0s");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(0) 0s");
    assert_eq!(test.api_requests(), ["DeleteMirrorPod"]);
}

#[test]
fn mirror_pod_without_manifest_is_deleted_after_sources_are_ready() {
    let mut test = in_cluster(&[Source::File, Source::Api]);
    test.listed_by_api(&[mirror_of_u1()]);
    assert!(test.api_requests().is_empty(), "the manifests were not read yet");
    test.config(&[]);
    assert_eq!(test.api_requests(), ["DeleteMirrorPod"]);
}

fn mirror_of_u1() -> Pod {
    let mut mirror = stored("always | main a", 5, &json!({}));
    mirror.metadata.uid = Some("m1".to_owned());
    mirror.metadata.annotations.get_or_insert_default().insert(MIRROR_ANNOTATION.to_owned(), "u1".to_owned());
    mirror
}

fn node_in(zone: &str, version: u64) -> NodeObject {
    NodeObject { version, labels: Arc::new([("zone".to_owned(), zone.to_owned())].into()), ..NodeObject::default() }
}

/// Its node affinity requires zone b.
fn picky() -> Pod {
    let mut pod = stored("always | main a", 1, &json!({ "phase": "Pending" }));
    pod.spec.as_mut().unwrap().node_selector = Some([("zone".to_owned(), "b".to_owned())].into());
    pod
}

#[test]
fn node_affinity_mismatch_refetches_node() {
    for (answer, lifecycle) in [
        (Ok(Facts::Node(node_in("b", 6))), "Syncing"),
        (Ok(Facts::Node(node_in("c", 6))), "rejected"),
        (refused(ErrorKind::Unavailable), "rejected"),
    ] {
        let mut test = in_cluster(&[Source::Api]);
        test.handle(Event::Node(node_in("a", 5)));
        test.listed_by_api(&[picky()]);
        test.runtime_is_up(&[]);
        assert_eq!((test.lifecycle("u1").as_str(), test.api_requests()), ("Waiting", vec!["GetNode"]));
        // An older Node object does not replace a newer one.
        test.answer("GetNode", answer);
        test.handle(Event::Node(node_in("a", 5)));
        assert!(!test.api_requests().contains(&"GetNode"));
        let is_rejected = test.events.contains(&"NodeAffinity".to_owned());
        assert_eq!(is_rejected, lifecycle == "rejected", "{:?}", test.events);
    }
}

#[test]
fn node_fetched_before_pod_arrival_is_not_used() {
    let mut test = in_cluster(&[Source::Api]);
    test.handle(Event::Node(node_in("a", 5)));
    test.listed_by_api(&[picky()]);
    test.runtime_is_up(&[]);
    test.at_secs += 1;
    let mut later = picky();
    later.metadata.uid = Some("u2".to_owned());
    later.metadata.name = Some("later".to_owned());
    test.listed_by_api(&[picky(), later]);
    test.answer("GetNode", Ok(Facts::Node(node_in("c", 6))));
    assert_eq!(test.lifecycle("u2"), "Waiting");
    test.answer("GetNode", Ok(Facts::Node(node_in("b", 7))));
    assert_eq!(test.lifecycle("u2"), "Syncing");
}
