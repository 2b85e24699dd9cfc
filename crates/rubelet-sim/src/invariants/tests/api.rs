//! Tests that every rule over API writes can be broken.

use rubelet_kube::port::{ApiErrorKind, ObjectPath, PatchKind, Verb};
use serde_json::{Value, json};

use super::{broken_by, sandbox, start};
use crate::{
    api::act::Request,
    runtime::act::Act,
    script::{PodScript, Policy},
    simulation::SimState,
};

fn pods() -> ObjectPath {
    ObjectPath::all("v1", "pods").within("default")
}

fn web() -> ObjectPath {
    pods().named("web")
}

/// A user's pod; its uid.
fn made(sim: &mut SimState) -> String {
    let body = json!({ "metadata": { "name": "web", "namespace": "default" }, "spec": {
        "nodeName": "node", "terminationGracePeriodSeconds": 30, "containers": [],
    }});
    let pod = sim.ask(Verb::Create, pods(), body).unwrap();
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    sim.rules.pod_made(&uid);
    uid
}

fn asks(sim: &mut SimState, verb: Verb, path: ObjectPath, body: Value) {
    let request = Request { verb, path, query: Vec::new(), body };
    sim.rules.api_called(sim.now, &request);
    if sim.serve_agent(&request).is_ok() {
        sim.rules.api_answered(sim.now, &request);
    }
    sim.rules.api_returned(&request);
}

fn tells(sim: &mut SimState, uid: &str, status: &Value) {
    let patch = json!({ "metadata": { "uid": uid }, "status": status });
    asks(sim, Verb::Patch(PatchKind::StrategicMerge), web().sub("status"), patch);
}

fn deletes(sim: &mut SimState, uid: &str) {
    asks(sim, Verb::Delete, web(), json!({ "gracePeriodSeconds": 0, "preconditions": { "uid": uid } }));
}

#[track_caller]
fn check(rules: &[&str], steps: impl FnOnce(&mut SimState, &str)) {
    let script = PodScript::pod("web").policy(Policy::Never).container("app", "run");
    let broken = broken_by(&script, |sim| {
        let uid = made(sim);
        steps(sim, &uid);
    });
    assert_eq!(broken, rules);
}

#[test]
fn valid_api_requests_break_no_rule() {
    check(&[], |sim, uid| {
        asks(sim, Verb::Get, pods(), Value::Null);
        let home = sandbox(sim, uid, 0);
        let app = start(sim, &home, "app", 0);
        let running = json!([{ "name": "app", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": { "running": {} } }]);
        let conditions =
            json!([{ "type": "Ready", "status": "True" }, { "type": "ContainersReady", "status": "True" }]);
        tells(sim, uid, &json!({ "phase": "Running", "containerStatuses": running, "conditions": conditions }));
        sim.ask(Verb::Delete, web(), json!({})).unwrap();
        let stop = Act::Term(app.clone());
        sim.rules.called(sim.now, &stop, &sim.runtime.picture);
        sim.exit_container(&app, 0, "Completed");
        sim.perform(&Act::StopSandbox(home)).unwrap();
        sim.cgroups.clear();
        tells(sim, uid, &json!({ "phase": "Succeeded", "containerStatuses": null, "conditions": null }));
        deletes(sim, uid);
    });
}

#[test]
fn writes_without_uid_or_with_grace_break_rules() {
    check(&["status writes carry the UID"], |sim, _| {
        asks(
            sim,
            Verb::Patch(PatchKind::StrategicMerge),
            web().sub("status"),
            json!({ "status": { "phase": "Pending" } }),
        );
    });
    check(&["deletions carry the UID", "the agent deletes without grace"], |sim, _| {
        asks(sim, Verb::Delete, web(), json!({ "gracePeriodSeconds": 5 }));
        sim.rules.violations.retain(|it| it.rule != "a pod is deleted when it holds nothing");
    });
    check(&["the agent makes no pods but mirrors"], |sim, _| {
        asks(sim, Verb::Create, pods(), json!({ "metadata": { "name": "other" } }));
    });
}

#[test]
fn concurrent_status_writes_break_a_rule() {
    check(&["one status write per pod at a time"], |sim, uid| {
        let body = json!({ "metadata": { "uid": uid }, "status": {} });
        let patch = Verb::Patch(PatchKind::StrategicMerge);
        let request = Request { verb: patch, path: web().sub("status"), query: Vec::new(), body };
        sim.rules.api_called(sim.now, &request);
        sim.rules.api_called(sim.now, &request);
    });
}

#[test]
fn premature_api_deletion_breaks_a_rule() {
    const RULE: &str = "a pod is deleted when it holds nothing";
    check(&[RULE], |sim, uid| {
        sim.ask(Verb::Delete, web(), json!({})).unwrap();
        deletes(sim, uid);
    });
    check(&[RULE], |sim, uid| {
        tells(sim, uid, &json!({ "phase": "Failed" }));
        deletes(sim, uid);
    });
    check(&[RULE], |sim, uid| {
        sim.ask(Verb::Delete, web(), json!({})).unwrap();
        tells(sim, uid, &json!({ "phase": "Failed" }));
        sandbox(sim, uid, 0);
        deletes(sim, uid);
    });
}

#[test]
fn reverted_or_premature_status_breaks_a_rule() {
    let container = |ready: bool, count: i32| {
        json!([{ "name": "app", "ready": ready, "restartCount": count, "image": "", "imageID": "",
            "state": { "waiting": {} } }])
    };
    check(&["a status never goes back"], |sim, uid| {
        tells(sim, uid, &json!({ "phase": "Failed" }));
        tells(sim, uid, &json!({ "phase": "Running" }));
    });
    check(&["a status never goes back"], |sim, uid| {
        tells(sim, uid, &json!({ "containerStatuses": container(false, 2) }));
        tells(sim, uid, &json!({ "containerStatuses": container(false, 1) }));
    });
    check(&["only what runs is ready"], |sim, uid| {
        tells(sim, uid, &json!({ "containerStatuses": container(true, 0) }));
    });
    check(&["only what runs is ready"], |sim, uid| {
        tells(sim, uid, &json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] }));
    });
    check(&["an ended pod runs nothing"], |sim, uid| {
        let home = sandbox(sim, uid, 0);
        start(sim, &home, "app", 0);
        tells(sim, uid, &json!({ "phase": "Failed" }));
    });
}

#[test]
fn excess_writes_and_stops_before_a_list_break_rules() {
    check(&["statuses are written for a reason"], |sim, uid| {
        for number in 0..4 {
            tells(sim, uid, &json!({ "message": number.to_string() }));
        }
    });
    for version in [None, Some("0"), Some("1")] {
        check(&["nothing ends before a consistent list"], |sim, uid| {
            let home = sandbox(sim, uid, 0);
            let app = start(sim, &home, "app", 0);
            if let Some(version) = version {
                sim.rules.api_answered(sim.now, &read(&[("resourceVersion", version)]));
            }
            sim.rules.called(sim.now, &Act::Term(app), &sim.runtime.picture);
        });
    }
}

fn read(query: &[(&'static str, &str)]) -> Request {
    let query = query.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Request { verb: Verb::Get, path: pods(), query, body: Value::Null }
}

#[test]
fn needless_list_breaks_a_rule() {
    const RULE: &str = "a list has a reason";
    let stream = || read(&[("watch", "true"), ("sendInitialEvents", "true")]);
    let watch = || read(&[("watch", "true"), ("resourceVersion", "7")]);
    let lists = |sim: &mut SimState, request: &Request| sim.rules.api_called(sim.now, request);
    check(&[RULE], |sim, _| {
        lists(sim, &stream());
        sim.rules.read_failed(&watch(), false, ApiErrorKind::Unreachable);
        sim.rules.read_failed(&watch(), false, ApiErrorKind::Server);
        lists(sim, &read(&[]));
    });
    check(&[], |sim, _| {
        lists(sim, &stream());
        sim.rules.read_failed(&stream(), true, ApiErrorKind::Unreachable);
        lists(sim, &read(&[]));
        lists(sim, &watch());
        sim.rules.read_failed(&watch(), false, ApiErrorKind::Expired);
        lists(sim, &stream());
        sim.rules.agent_begins(sim.now);
        lists(sim, &stream());
    });
}

#[test]
fn unrecorded_event_breaks_a_rule() {
    let writes = |sim: &mut SimState| {
        let path = ObjectPath::all("v1", "events").within("default");
        let request = Request { verb: Verb::Create, path, query: Vec::new(), body: Value::Null };
        sim.rules.api_called(sim.now, &request);
        request
    };
    check(&["an event is written once"], |sim, _| {
        sim.rules.event_recorded();
        writes(sim);
        writes(sim);
    });
    check(&[], |sim, _| {
        sim.rules.event_recorded();
        let request = writes(sim);
        sim.rules.read_failed(&request, false, ApiErrorKind::Server);
        writes(sim);
    });
}
