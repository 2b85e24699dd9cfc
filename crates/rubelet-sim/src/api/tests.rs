//! Is the fake as the real one is?

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use rubelet_kube::port::{ApiErrorKind, ApiServer as _, ObjectPath, PatchKind, Verb, Watch, WatchEvent, WatchStream};
use serde_json::{Value, json};

use super::*;
use crate::stage::AgentState;

fn pods() -> ObjectPath {
    ObjectPath::all("v1", "pods").within("default")
}

fn stage() -> Arc<Stage> {
    let stage = Stage::new(1);
    stage.with(|scene| scene.agent = AgentState::Alive(Life(1)));
    stage
}

fn pod(name: &str) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "nodeName": "node", "terminationGracePeriodSeconds": 30 },
    })
}

fn ask(stage: &Stage, verb: Verb, path: ObjectPath, body: Value) -> Result<Value, ApiErrorKind> {
    stage.with(|scene| scene.ask(verb, path, body)).map_err(|error| error.kind)
}

fn delete(stage: &Stage, options: Value) -> Result<Value, ApiErrorKind> {
    ask(stage, Verb::Delete, pods().named("web"), options)
}

fn stored(stage: &Stage) -> Result<Value, ApiErrorKind> {
    ask(stage, Verb::Get, pods().named("web"), Value::Null)
}

fn ends(stage: &Stage) -> (Value, Value) {
    let metadata = stored(stage).unwrap()["metadata"].clone();
    (metadata["deletionGracePeriodSeconds"].clone(), metadata["deletionTimestamp"].clone())
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_stays_until_it_is_deleted_without_grace() {
    let stage = stage();
    ask(&stage, Verb::Create, pods(), pod("web")).unwrap();
    assert_eq!(stored(&stage).unwrap()["status"]["phase"], "Pending");
    delete(&stage, json!({})).unwrap();
    assert_eq!(ends(&stage), (json!(30), json!("2026-01-01T00:00:30Z")));
    // Longer, or not said: nothing changes. Shorter: counted from the first request.
    delete(&stage, json!({ "gracePeriodSeconds": 60 })).unwrap();
    delete(&stage, json!({})).unwrap();
    assert_eq!(ends(&stage), (json!(30), json!("2026-01-01T00:00:30Z")));
    delete(&stage, json!({ "gracePeriodSeconds": 10 })).unwrap();
    assert_eq!(ends(&stage), (json!(10), json!("2026-01-01T00:00:10Z")));
    assert_eq!(stored(&stage).unwrap()["metadata"]["generation"], 2);
    tokio::time::advance(Duration::from_secs(8)).await;
    delete(&stage, json!({ "gracePeriodSeconds": 5 })).unwrap();
    assert_eq!(ends(&stage), (json!(1), json!("2026-01-01T00:00:08Z")));
    let other = json!({ "gracePeriodSeconds": 0, "preconditions": { "uid": "another" } });
    assert_eq!(delete(&stage, other), Err(ApiErrorKind::Conflict));
    delete(&stage, json!({ "gracePeriodSeconds": 0 })).unwrap();
    assert_eq!(stored(&stage), Err(ApiErrorKind::NotFound));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_ended_or_has_no_node_goes_at_once() {
    for (field, value) in [("/spec/nodeName", Value::Null), ("/status/phase", json!("Failed"))] {
        let stage = stage();
        ask(&stage, Verb::Create, pods(), pod("web")).unwrap();
        stage.with(|scene| {
            let key = store::Key::pod("web");
            let mut object = Value::clone(scene.api.object(&key).unwrap());
            *object.pointer_mut(field).unwrap() = value.clone();
            scene.api.put(key, object);
        });
        delete(&stage, json!({})).unwrap();
        assert_eq!(stored(&stage), Err(ApiErrorKind::NotFound), "{field}");
    }
}

#[tokio::test(start_paused = true)]
async fn writes_keep_to_their_part_of_the_object_and_to_their_preconditions() {
    let stage = stage();
    let made = ask(&stage, Verb::Create, pods(), pod("web")).unwrap();
    assert_eq!(ask(&stage, Verb::Create, pods(), pod("web")), Err(ApiErrorKind::AlreadyExists));
    let patch = |path: ObjectPath, body: Value| ask(&stage, Verb::Patch(PatchKind::StrategicMerge), path, body);
    let status = pods().named("web").sub("status");
    let after = patch(status.clone(), json!({ "spec": { "x": 1 }, "status": { "phase": "Running" } })).unwrap();
    assert_eq!((&after["spec"], &after["status"]["phase"]), (&made["spec"], &json!("Running")));
    let again = patch(status.clone(), json!({ "status": { "phase": "Running" } })).unwrap();
    assert_eq!(again["metadata"]["resourceVersion"], after["metadata"]["resourceVersion"], "nothing changed");
    let foreign = json!({ "metadata": { "uid": "another" }, "status": { "phase": "Failed" } });
    assert_eq!(patch(status, foreign), Err(ApiErrorKind::Conflict));
    let whole = patch(pods().named("web"), json!({ "spec": { "x": 1 }, "status": { "phase": "Failed" } })).unwrap();
    assert_eq!((&whole["status"]["phase"], &whole["metadata"]["generation"]), (&json!("Running"), &json!(2)));
    assert_eq!(ask(&stage, Verb::Update, pods().named("web"), made), Err(ApiErrorKind::Conflict));
}

async fn watching(stage: &Arc<Stage>, version: &str) -> Result<WatchStream, ApiErrorKind> {
    let api = FakeApi::new(stage.clone(), Life(1));
    let query = vec![("fieldSelector", "spec.nodeName=node".to_owned()), ("resourceVersion", version.to_owned())];
    api.watch(Watch { collection: ObjectPath::all("v1", "pods"), query }).await.map_err(|error| error.kind)
}

/// `+web`, `~web`, `-web`, `bookmark 3`.
async fn told(events: &mut WatchStream) -> String {
    let read = |body: &[u8]| serde_json::from_slice::<Value>(body).unwrap();
    let name = |body: &[u8]| read(body)["metadata"]["name"].as_str().unwrap().to_owned();
    match events.next().await {
        None => "end".to_owned(),
        Some(Err(error)) => format!("{:?}", error.kind),
        Some(Ok(WatchEvent::Added(object))) => format!("+{}", name(&object)),
        Some(Ok(WatchEvent::Modified(object))) => format!("~{}", name(&object)),
        Some(Ok(WatchEvent::Deleted(object))) => format!("-{}", name(&object)),
        Some(Ok(WatchEvent::Bookmark(object))) => {
            format!("bookmark {}", read(&object)["metadata"]["resourceVersion"].as_str().unwrap())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_tells_what_happened_since_and_goes_on() {
    let stage = stage();
    ask(&stage, Verb::Create, pods(), pod("web")).unwrap();
    ask(&stage, Verb::Create, pods(), json!({ "metadata": { "name": "elsewhere" }, "spec": {} })).unwrap();
    let mut events = watching(&stage, "0").await.unwrap();
    assert_eq!(told(&mut events).await, "+web");
    delete(&stage, json!({})).unwrap();
    delete(&stage, json!({ "gracePeriodSeconds": 0 })).unwrap();
    assert_eq!(told(&mut events).await, "~web");
    assert_eq!(told(&mut events).await, "-web");
    assert_eq!(told(&mut events).await, "bookmark 4");
    stage.with(|scene| scene.restart_api());
    assert_eq!(told(&mut events).await, "Unreachable");
    assert_eq!(told(&mut events).await, "end");
    assert_eq!(watching(&stage, "3").await.err(), Some(ApiErrorKind::Expired));
    assert!(watching(&stage, "4").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_refuses_and_a_silent_one_lets_time_pass() {
    let stage = stage();
    stage.with(|scene| scene.take_api_down());
    assert_eq!(watching(&stage, "0").await.err(), Some(ApiErrorKind::Unreachable));
    stage.with(|scene| scene.heal_api());
    let mut events = watching(&stage, "0").await.unwrap();
    stage.with(|scene| scene.silence_api());
    ask(&stage, Verb::Create, pods(), pod("web")).unwrap();
    let waited = timeout(Duration::from_secs(90), told(&mut events)).await;
    assert!(waited.is_err(), "{waited:?}");
    stage.with(|scene| scene.heal_api());
    assert_eq!(told(&mut events).await, "+web");
}
