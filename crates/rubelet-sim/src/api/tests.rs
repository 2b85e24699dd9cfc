//! Tests that the fake behaves like the real server.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use rubelet_kube::port::{ApiErrorKind, ApiServer as _, ObjectPath, PatchKind, Verb, Watch, WatchEvent, WatchStream};
use serde_json::{Value, json};

use super::*;
use crate::simulation::AgentState;

fn pods() -> ObjectPath {
    ObjectPath::all("v1", "pods").within("default")
}

fn simulation() -> Arc<Simulation> {
    let simulation = Simulation::new(1);
    simulation.with(|sim| sim.agent = AgentState::Alive(Incarnation(1)));
    simulation
}

fn pod(name: &str) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "nodeName": "node", "terminationGracePeriodSeconds": 30 },
    })
}

fn ask(simulation: &Simulation, verb: Verb, path: ObjectPath, body: Value) -> Result<Value, ApiErrorKind> {
    simulation.with(|sim| sim.ask(verb, path, body)).map_err(|error| error.kind)
}

fn delete(simulation: &Simulation, options: Value) -> Result<Value, ApiErrorKind> {
    ask(simulation, Verb::Delete, pods().named("web"), options)
}

fn stored(simulation: &Simulation) -> Result<Value, ApiErrorKind> {
    ask(simulation, Verb::Get, pods().named("web"), Value::Null)
}

fn ends(simulation: &Simulation) -> (Value, Value) {
    let metadata = stored(simulation).unwrap()["metadata"].clone();
    (metadata["deletionGracePeriodSeconds"].clone(), metadata["deletionTimestamp"].clone())
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_stays_until_it_is_deleted_without_grace() {
    let simulation = simulation();
    ask(&simulation, Verb::Create, pods(), pod("web")).unwrap();
    assert_eq!(stored(&simulation).unwrap()["status"]["phase"], "Pending");
    delete(&simulation, json!({})).unwrap();
    assert_eq!(ends(&simulation), (json!(30), json!("2026-01-01T00:00:30Z")));
    // Longer, or not given: no change. Shorter: counted from the first request.
    delete(&simulation, json!({ "gracePeriodSeconds": 60 })).unwrap();
    delete(&simulation, json!({})).unwrap();
    assert_eq!(ends(&simulation), (json!(30), json!("2026-01-01T00:00:30Z")));
    delete(&simulation, json!({ "gracePeriodSeconds": 10 })).unwrap();
    assert_eq!(ends(&simulation), (json!(10), json!("2026-01-01T00:00:10Z")));
    assert_eq!(stored(&simulation).unwrap()["metadata"]["generation"], 2);
    tokio::time::advance(Duration::from_secs(8)).await;
    delete(&simulation, json!({ "gracePeriodSeconds": 5 })).unwrap();
    assert_eq!(ends(&simulation), (json!(1), json!("2026-01-01T00:00:08Z")));
    let other = json!({ "gracePeriodSeconds": 0, "preconditions": { "uid": "another" } });
    assert_eq!(delete(&simulation, other), Err(ApiErrorKind::Conflict));
    delete(&simulation, json!({ "gracePeriodSeconds": 0 })).unwrap();
    assert_eq!(stored(&simulation), Err(ApiErrorKind::NotFound));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_ended_or_has_no_node_goes_at_once() {
    for (field, value) in [("/spec/nodeName", Value::Null), ("/status/phase", json!("Failed"))] {
        let simulation = simulation();
        ask(&simulation, Verb::Create, pods(), pod("web")).unwrap();
        simulation.with(|sim| {
            let key = store::Key::pod("web");
            let mut object = Value::clone(sim.api.object(&key).unwrap());
            *object.pointer_mut(field).unwrap() = value.clone();
            sim.api.put(key, object);
        });
        delete(&simulation, json!({})).unwrap();
        assert_eq!(stored(&simulation), Err(ApiErrorKind::NotFound), "{field}");
    }
}

#[tokio::test(start_paused = true)]
async fn api_writes_respect_subresources_and_preconditions() {
    let simulation = simulation();
    let made = ask(&simulation, Verb::Create, pods(), pod("web")).unwrap();
    assert_eq!(ask(&simulation, Verb::Create, pods(), pod("web")), Err(ApiErrorKind::AlreadyExists));
    let patch = |path: ObjectPath, body: Value| ask(&simulation, Verb::Patch(PatchKind::StrategicMerge), path, body);
    let status = pods().named("web").sub("status");
    let after = patch(status.clone(), json!({ "spec": { "x": 1 }, "status": { "phase": "Running" } })).unwrap();
    assert_eq!((&after["spec"], &after["status"]["phase"]), (&made["spec"], &json!("Running")));
    let again = patch(status.clone(), json!({ "status": { "phase": "Running" } })).unwrap();
    assert_eq!(again["metadata"]["resourceVersion"], after["metadata"]["resourceVersion"], "nothing changed");
    let foreign = json!({ "metadata": { "uid": "another" }, "status": { "phase": "Failed" } });
    assert_eq!(patch(status, foreign), Err(ApiErrorKind::Conflict));
    let whole = patch(pods().named("web"), json!({ "spec": { "x": 1 }, "status": { "phase": "Failed" } })).unwrap();
    assert_eq!((&whole["status"]["phase"], &whole["metadata"]["generation"]), (&json!("Running"), &json!(2)));
    assert_eq!(ask(&simulation, Verb::Update, pods().named("web"), made), Err(ApiErrorKind::Conflict));
}

async fn watching(simulation: &Arc<Simulation>, version: &str) -> Result<WatchStream, ApiErrorKind> {
    let api = FakeApi::new(simulation.clone(), Incarnation(1));
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
async fn watch_replays_history_and_continues() {
    let simulation = simulation();
    ask(&simulation, Verb::Create, pods(), pod("web")).unwrap();
    ask(&simulation, Verb::Create, pods(), json!({ "metadata": { "name": "elsewhere" }, "spec": {} })).unwrap();
    let mut events = watching(&simulation, "0").await.unwrap();
    assert_eq!(told(&mut events).await, "+web");
    delete(&simulation, json!({})).unwrap();
    delete(&simulation, json!({ "gracePeriodSeconds": 0 })).unwrap();
    assert_eq!(told(&mut events).await, "~web");
    assert_eq!(told(&mut events).await, "-web");
    assert_eq!(told(&mut events).await, "bookmark 4");
    simulation.with(|sim| sim.restart_api());
    assert_eq!(told(&mut events).await, "Unreachable");
    assert_eq!(told(&mut events).await, "end");
    assert_eq!(watching(&simulation, "3").await.err(), Some(ApiErrorKind::Expired));
    assert!(watching(&simulation, "4").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn stopped_api_server_refuses_and_hung_one_times_out() {
    let simulation = simulation();
    simulation.with(|sim| sim.take_api_down());
    assert_eq!(watching(&simulation, "0").await.err(), Some(ApiErrorKind::Unreachable));
    simulation.with(|sim| sim.heal_api());
    let mut events = watching(&simulation, "0").await.unwrap();
    simulation.with(|sim| sim.silence_api());
    ask(&simulation, Verb::Create, pods(), pod("web")).unwrap();
    let waited = timeout(Duration::from_secs(90), told(&mut events)).await;
    assert!(waited.is_err(), "{waited:?}");
    simulation.with(|sim| sim.heal_api());
    assert_eq!(told(&mut events).await, "+web");
}
