//! Every rule over what is written to the API can be broken.

use rubelet_kube::port::{ApiErrorKind, ObjectPath, PatchKind, Verb};
use serde_json::{Value, json};

use super::{broken_by, sandbox, start};
use crate::{
    api::act::Request,
    runtime::act::Act,
    script::{Policy, Script},
    stage::Scene,
};

fn pods() -> ObjectPath {
    ObjectPath::all("v1", "pods").within("default")
}

fn web() -> ObjectPath {
    pods().named("web")
}

/// A user's pod; its uid.
fn made(scene: &mut Scene) -> String {
    let body = json!({ "metadata": { "name": "web", "namespace": "default" }, "spec": {
        "nodeName": "node", "terminationGracePeriodSeconds": 30, "containers": [],
    }});
    let pod = scene.ask(Verb::Create, pods(), body).unwrap();
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    scene.rules.pod_made(&uid);
    uid
}

fn asks(scene: &mut Scene, verb: Verb, path: ObjectPath, body: Value) {
    let request = Request { verb, path, query: Vec::new(), body };
    scene.rules.api_called(scene.now, &request);
    if scene.serve_agent(&request).is_ok() {
        scene.rules.api_answered(scene.now, &request);
    }
    scene.rules.api_returned(&request);
}

fn tells(scene: &mut Scene, uid: &str, status: &Value) {
    let patch = json!({ "metadata": { "uid": uid }, "status": status });
    asks(scene, Verb::Patch(PatchKind::StrategicMerge), web().sub("status"), patch);
}

fn deletes(scene: &mut Scene, uid: &str) {
    asks(scene, Verb::Delete, web(), json!({ "gracePeriodSeconds": 0, "preconditions": { "uid": uid } }));
}

#[track_caller]
fn check(rules: &[&str], story: impl FnOnce(&mut Scene, &str)) {
    let script = Script::pod("web").policy(Policy::Never).container("app", "run");
    let broken = broken_by(&script, |scene| {
        let uid = made(scene);
        story(scene, &uid);
    });
    assert_eq!(broken, rules);
}

#[test]
fn an_orderly_course_breaks_no_rule() {
    check(&[], |scene, uid| {
        asks(scene, Verb::Get, pods(), Value::Null);
        let home = sandbox(scene, uid, 0);
        let app = start(scene, &home, "app", 0);
        let running = json!([{ "name": "app", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": { "running": {} } }]);
        let conditions =
            json!([{ "type": "Ready", "status": "True" }, { "type": "ContainersReady", "status": "True" }]);
        tells(scene, uid, &json!({ "phase": "Running", "containerStatuses": running, "conditions": conditions }));
        scene.ask(Verb::Delete, web(), json!({})).unwrap();
        let stop = Act::Term(app.clone());
        scene.rules.called(scene.now, &stop, &scene.runtime.picture);
        scene.exit_container(&app, 0, "Completed");
        scene.perform(&Act::StopSandbox(home)).unwrap();
        scene.cgroups.clear();
        tells(scene, uid, &json!({ "phase": "Succeeded", "containerStatuses": null, "conditions": null }));
        deletes(scene, uid);
    });
}

#[test]
fn writes_without_a_uid_or_with_grace_are_noticed() {
    check(&["status writes carry the UID"], |scene, _| {
        asks(
            scene,
            Verb::Patch(PatchKind::StrategicMerge),
            web().sub("status"),
            json!({ "status": { "phase": "Pending" } }),
        );
    });
    check(&["deletions carry the UID", "the agent deletes without grace"], |scene, _| {
        asks(scene, Verb::Delete, web(), json!({ "gracePeriodSeconds": 5 }));
        scene.rules.violations.retain(|it| it.rule != "a pod is deleted when it holds nothing");
    });
    check(&["the agent makes no pods but mirrors"], |scene, _| {
        asks(scene, Verb::Create, pods(), json!({ "metadata": { "name": "other" } }));
    });
}

#[test]
fn a_second_write_at_once_is_noticed() {
    check(&["one status write per pod at a time"], |scene, uid| {
        let body = json!({ "metadata": { "uid": uid }, "status": {} });
        let patch = Verb::Patch(PatchKind::StrategicMerge);
        let request = Request { verb: patch, path: web().sub("status"), query: Vec::new(), body };
        scene.rules.api_called(scene.now, &request);
        scene.rules.api_called(scene.now, &request);
    });
}

#[test]
fn a_deletion_of_what_still_holds_something_is_noticed() {
    const RULE: &str = "a pod is deleted when it holds nothing";
    check(&[RULE], |scene, uid| {
        scene.ask(Verb::Delete, web(), json!({})).unwrap();
        deletes(scene, uid);
    });
    check(&[RULE], |scene, uid| {
        tells(scene, uid, &json!({ "phase": "Failed" }));
        deletes(scene, uid);
    });
    check(&[RULE], |scene, uid| {
        scene.ask(Verb::Delete, web(), json!({})).unwrap();
        tells(scene, uid, &json!({ "phase": "Failed" }));
        sandbox(scene, uid, 0);
        deletes(scene, uid);
    });
}

#[test]
fn a_status_that_goes_back_or_ahead_of_the_truth_is_noticed() {
    let container = |ready: bool, count: i32| {
        json!([{ "name": "app", "ready": ready, "restartCount": count, "image": "", "imageID": "",
            "state": { "waiting": {} } }])
    };
    check(&["a status never goes back"], |scene, uid| {
        tells(scene, uid, &json!({ "phase": "Failed" }));
        tells(scene, uid, &json!({ "phase": "Running" }));
    });
    check(&["a status never goes back"], |scene, uid| {
        tells(scene, uid, &json!({ "containerStatuses": container(false, 2) }));
        tells(scene, uid, &json!({ "containerStatuses": container(false, 1) }));
    });
    check(&["only what runs is ready"], |scene, uid| {
        tells(scene, uid, &json!({ "containerStatuses": container(true, 0) }));
    });
    check(&["only what runs is ready"], |scene, uid| {
        tells(scene, uid, &json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] }));
    });
    check(&["an ended pod runs nothing"], |scene, uid| {
        let home = sandbox(scene, uid, 0);
        start(scene, &home, "app", 0);
        tells(scene, uid, &json!({ "phase": "Failed" }));
    });
}

#[test]
fn writes_without_end_and_an_end_without_a_list_are_noticed() {
    check(&["statuses are written for a reason"], |scene, uid| {
        for number in 0..4 {
            tells(scene, uid, &json!({ "message": number.to_string() }));
        }
    });
    for version in [None, Some("0"), Some("1")] {
        check(&["nothing ends before a consistent list"], |scene, uid| {
            let home = sandbox(scene, uid, 0);
            let app = start(scene, &home, "app", 0);
            if let Some(version) = version {
                scene.rules.api_answered(scene.now, &read(&[("resourceVersion", version)]));
            }
            scene.rules.called(scene.now, &Act::Term(app), &scene.runtime.picture);
        });
    }
}

fn read(query: &[(&'static str, &str)]) -> Request {
    let query = query.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Request { verb: Verb::Get, path: pods(), query, body: Value::Null }
}

#[test]
fn a_list_without_a_reason_is_noticed() {
    const RULE: &str = "a list has a reason";
    let stream = || read(&[("watch", "true"), ("sendInitialEvents", "true")]);
    let watch = || read(&[("watch", "true"), ("resourceVersion", "7")]);
    let lists = |scene: &mut Scene, request: &Request| scene.rules.api_called(scene.now, request);
    check(&[RULE], |scene, _| {
        lists(scene, &stream());
        scene.rules.read_failed(&watch(), false, ApiErrorKind::Unreachable);
        scene.rules.read_failed(&watch(), false, ApiErrorKind::Server);
        lists(scene, &read(&[]));
    });
    check(&[], |scene, _| {
        lists(scene, &stream());
        scene.rules.read_failed(&stream(), true, ApiErrorKind::Unreachable);
        lists(scene, &read(&[]));
        lists(scene, &watch());
        scene.rules.read_failed(&watch(), false, ApiErrorKind::Expired);
        lists(scene, &stream());
        scene.rules.agent_begins(scene.now);
        lists(scene, &stream());
    });
}

#[test]
fn an_event_that_nobody_recorded_is_noticed() {
    let writes = |scene: &mut Scene| {
        let path = ObjectPath::all("v1", "events").within("default");
        let request = Request { verb: Verb::Create, path, query: Vec::new(), body: Value::Null };
        scene.rules.api_called(scene.now, &request);
        request
    };
    check(&["an event is written once"], |scene, _| {
        scene.rules.event_recorded();
        writes(scene);
        writes(scene);
    });
    check(&[], |scene, _| {
        scene.rules.event_recorded();
        let request = writes(scene);
        scene.rules.read_failed(&request, false, ApiErrorKind::Server);
        writes(scene);
    });
}
