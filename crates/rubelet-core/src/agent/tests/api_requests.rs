//! Requests to the API server when they fail, or when pods change meanwhile.

use serde_json::json;

use super::*;
use crate::op::ApiOp;
use crate::{api_requests::ApiRequest, manifest::HASH_ANNOTATION, pod_config::MIRROR_ANNOTATION, test_support::show};

fn in_cluster() -> TestAgent {
    TestAgent::new(Settings { sources: vec![Source::File, Source::Api], ..Settings::for_node("node") })
}

impl TestAgent {
    fn api_has(&mut self, pods: &[Pod]) {
        let pods = pods.iter().cloned().map(Arc::new).collect();
        self.handle(Event::Config { source: Source::Api, pods });
    }

    fn patches(&self) -> Vec<serde_json::Value> {
        let patch = |op: &Op| match op {
            Op::Api(ApiOp::PatchStatus { patch, .. }) => Some(patch["status"].clone()),
            _ => None,
        };
        self.in_flight.iter().filter_map(|(_, op)| patch(op)).collect()
    }

    fn wait(&mut self, secs: u64) {
        self.at_secs += secs;
        self.handle(Event::Due);
    }
}

fn failed(kind: ErrorKind) -> Result<Facts, EffectError> {
    Err(EffectError { kind, message: "no".to_owned() })
}

fn versioned(mut pod: Pod, version: u64) -> Pod {
    pod.metadata.resource_version = Some(version.to_string());
    pod
}

fn mirror(uid: &str, of: &str) -> Pod {
    let mut pod = versioned(mk_pod("always | main a"), 5);
    pod.metadata.uid = Some(uid.to_owned());
    pod.metadata.annotations.get_or_insert_default().insert(MIRROR_ANNOTATION.to_owned(), of.to_owned());
    pod
}

/// A running API pod with its first patch in flight.
fn patching() -> (TestAgent, Pod) {
    let mut test = in_cluster();
    let pod = versioned(mk_pod("always | main a"), 1);
    test.config(&[]);
    test.api_has(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    (test, pod)
}

#[test]
fn patch_after_an_unconfirmed_one_sends_everything() {
    let (mut test, _) = patching();
    assert!(test.patches()[0].get("message").is_none(), "{:?}", test.patches());
    test.answer("PatchStatus", failed(ErrorKind::TimedOut));
    test.wait(3);
    assert_eq!(test.patches()[0].get("message"), Some(&serde_json::Value::Null), "{:?}", test.patches());
}

#[test]
fn patch_without_response_is_sent_again() {
    let (mut test, _) = patching();
    test.in_flight.retain(|(_, op)| op.name() != "PatchStatus");
    test.wait(40);
    test.wait(3);
    assert_eq!(test.patches().len(), 1, "{:?}", test.pending());
}

#[test]
fn status_overwritten_with_the_spec_is_restored() {
    let (mut test, pod) = patching();
    let mut taken = versioned(pod, 2);
    taken.status = test.agent.statuses.pod_status(&"u1".into(), &test.agent.pods).map(|status| (**status).clone());
    test.answer("PatchStatus", Ok(Facts::ApiPod(Arc::new(taken.clone()))));
    let mut changed = versioned(taken, 3);
    changed.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())]));
    changed.status.as_mut().unwrap().phase = Some("Pending".to_owned());
    test.api_has(&[changed]);
    test.wait(10);
    assert_eq!(test.patches(), [json!({ "phase": "Running" })]);
}

#[test]
fn readiness_gate_opened_in_the_api_makes_pod_ready() {
    let mut test = in_cluster();
    let mut pod = versioned(mk_pod("always | main a"), 1);
    let gates = json!([{ "conditionType": "lb" }]);
    pod.spec.as_mut().unwrap().readiness_gates = Some(serde_json::from_value(gates).unwrap());
    test.config(&[]);
    test.api_has(std::slice::from_ref(&pod));
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    let ready = |test: &TestAgent| {
        let status = show(&test.agent.snapshot().pods[&PodUid::new("u1")].status);
        status.lines().any(|line| line.starts_with("Ready=True"))
    };
    assert!(!ready(&test));
    let mut open = versioned(pod, 2);
    let status = json!({ "conditions": [{ "type": "lb", "status": "True" }] });
    open.status = Some(serde_json::from_value(status).unwrap());
    test.api_has(&[open]);
    assert!(ready(&test));
}

#[test]
fn failed_mirror_creation_is_retried_and_missing_mirror_not_deleted() {
    let mut test = in_cluster();
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.api_has(&[]);
    test.answer("CreateMirrorPod", failed(ErrorKind::Retry));
    test.wait(1);
    test.answer("CreateMirrorPod", Ok(Facts::Nothing));
    test.api_has(&[mirror("m1", "an older manifest")]);
    test.answer("DeleteMirrorPod", failed(ErrorKind::Gone));
    assert!(
        !test.agent.api_requests.failed_requests().any(|request| matches!(request, ApiRequest::Mirror(_))),
        "nothing is tried again"
    );
}

#[test]
fn static_pod_gets_its_mirror_when_its_name_is_free() {
    let mut test = in_cluster();
    test.api_has(&[mirror("m1", "u1")]);
    test.config(&[web("old")]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test.answer("PatchStatus", failed(ErrorKind::Gone));
    let mut new = web("new");
    new.metadata.annotations.as_mut().unwrap().insert(HASH_ANNOTATION.to_owned(), "new".to_owned());
    test.config(&[new]);
    assert_eq!((test.lifecycle("old"), test.lifecycle("new")), ("Terminating".to_owned(), "Waiting".to_owned()));
    assert!(!test.pending().contains(&"DeleteMirrorPod"), "{:?}", test.pending());
    ended(&mut test);
    assert_eq!(test.lifecycle("new"), "Syncing");
    assert!(test.pending().contains(&"DeleteMirrorPod"), "{:?}", test.pending());
}

#[test]
fn a_static_pod_has_a_mirror_before_the_runtime_is_there() {
    let mut test = in_cluster();
    test.config(&[web("u1")]);
    test.api_has(&[]);
    assert_eq!((test.lifecycle("u1").as_str(), test.pending()), ("Waiting", vec!["CheckRuntime", "CreateMirrorPod"]));
}

#[test]
fn standalone_pod_does_not_wait_for_a_mirror() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    assert!(test.agent.api_requests.mirrors.is_empty());
}

#[test]
fn only_entries_of_gone_pods_are_listed() {
    let (mut test, _) = patching();
    test.config(&[web("static")]);
    let now = test.now();
    let error = || EffectError { kind: ErrorKind::Retry, message: String::new() };
    for request in ["u1", "ghost"].map(|uid| ApiRequest::Status(uid.into())) {
        test.agent.api_requests.failed(request, error(), now);
    }
    // One name is in a source, one only in the API server, and one only in the runtime.
    let mut only_mirror = mirror("m1", "x");
    only_mirror.metadata.name = Some("mirrored".to_owned());
    test.api_has(&[versioned(mk_pod("always | main a"), 1), only_mirror]);
    test.wait(30);
    test.relisted(&[listed("orphan", "orphaned")]);
    for request in ["web_default", "mirrored_default", "orphaned_default", "ghost_default"]
        .map(|name| ApiRequest::Mirror(name.to_owned()))
    {
        test.agent.api_requests.failed(request, error(), now);
    }
    test.agent.node.gone.extend(["u1", "ghost"].map(|uid| (PodUid::new(uid), now.uptime)));
    let expected = ["node: ghost", "requests: Status(ghost)", "requests: Mirror(\"ghost_default\")"];
    assert_eq!(test.agent.entries_of_gone_pods(), expected);
}
