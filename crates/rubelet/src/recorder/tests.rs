//! Tests of what reaches the API server.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{
    api::core::v1::{Container, PodSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use rubelet_core::{
    effect::{EventRecord, Severity},
    snapshot::PodView,
};
use rubelet_kube::port::{ApiErrorKind, Call, Lane, PatchKind, Verb};
use serde_json::json;
use tokio::task::JoinHandle;

use super::{writer::TRIES, *};
use crate::fake_api::FakeApi;

#[tokio::test(start_paused = true)]
async fn a_recorded_event_is_created_and_then_counted_up() {
    let (api, events) = (FakeApi::answering([]), EventLog::default());
    let task = start(&api, &events);
    events.record(about_pod("Pulled"), at(0));
    api.until_called(1).await;
    events.record(about_pod("Pulled"), at(5));
    let calls = api.until_called(2).await;
    task.abort();
    assert_eq!(calls[0].path.to_string(), "/api/v1/namespaces/shop/events");
    assert_eq!((calls[0].verb, calls[0].lane), (Verb::Create, Lane::Events));
    let created = body(&calls[0]);
    let name = created["metadata"]["name"].as_str().unwrap();
    assert_eq!(created["involvedObject"]["resourceVersion"], "41");
    assert_eq!(calls[1].path.to_string(), format!("/api/v1/namespaces/shop/events/{name}"));
    assert_eq!(calls[1].verb, Verb::Patch(PatchKind::StrategicMerge));
    assert_eq!(body(&calls[1]), json!({ "count": 2, "lastTimestamp": "2027-01-15T08:00:05Z", "message": "text" }));
}

#[tokio::test(start_paused = true)]
async fn expired_event_is_recreated_with_its_count() {
    let api = FakeApi::answering([Ok("{}".to_owned()), Err(ApiErrorKind::NotFound)]);
    let events = EventLog::default();
    let task = start(&api, &events);
    events.record(about_pod("Pulled"), at(0));
    api.until_called(1).await;
    events.record(about_pod("Pulled"), at(7200));
    let calls = api.until_called(3).await;
    task.abort();
    assert_eq!(calls[2].verb, Verb::Create);
    assert_eq!(body(&calls[2])["count"], 2);
}

#[tokio::test(start_paused = true)]
async fn events_repeated_during_outage_are_created_once_with_count() {
    let api = FakeApi::answering([Err(ApiErrorKind::Unreachable), Err(ApiErrorKind::Unreachable)]);
    let events = EventLog::default();
    let task = start(&api, &events);
    events.record(about_pod("Unhealthy"), at(0));
    api.until_called(2).await;
    for second in 1..=4 {
        events.record(about_pod("Unhealthy"), at(second));
    }
    let calls = api.until_called(3).await;
    events.record(about_pod("Unhealthy"), at(5));
    api.until_called(4).await;
    task.abort();
    let verbs: Vec<_> = api.calls().iter().map(|call| call.verb).collect();
    assert_eq!(verbs, [Verb::Create, Verb::Create, Verb::Create, Verb::Patch(PatchKind::StrategicMerge)]);
    assert_eq!(body(&calls[2])["count"], 5);
    assert_eq!(body(&api.calls()[3])["count"], 6);
}

#[tokio::test(start_paused = true)]
async fn an_event_the_server_fails_on_delays_no_other() {
    for failure in [ApiErrorKind::Server, ApiErrorKind::Unreachable] {
        let api = FakeApi::answering([Err(failure)]);
        let events = EventLog::default();
        events.record(about_pod("Bad"), at(0));
        let task = start(&api, &events);
        api.until_called(1).await;
        events.record(about_pod("Good"), at(0));
        let began = tokio::time::Instant::now();
        let calls = api.until_called(2).await;
        assert_eq!((&body(&calls[1])["reason"], began.elapsed()), (&json!("Good"), Duration::ZERO));
        let calls = api.until_called(3).await;
        task.abort();
        assert_eq!((&body(&calls[2])["reason"], began.elapsed().as_secs()), (&json!("Bad"), 10));
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_is_given_up_after_twelve_tries() {
    let api = FakeApi::answering((0..TRIES).map(|_| Err(ApiErrorKind::Unreachable)));
    let events = EventLog::default();
    events.record(about_pod("First"), at(0));
    let task = start(&api, &events);
    let calls = api.until_called(12).await;
    assert_eq!(body(&calls[11])["reason"], "First");
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(api.calls().len(), 12);
    events.record(about_pod("Second"), at(0));
    let calls = api.until_called(13).await;
    task.abort();
    assert_eq!(body(&calls[12])["reason"], "Second");
}

#[tokio::test(start_paused = true)]
async fn an_event_the_server_refuses_is_not_sent_again() {
    let api = FakeApi::answering([Err(ApiErrorKind::NotFound)]);
    let events = EventLog::default();
    events.record(about_pod("First"), at(0));
    events.record(about_pod("Second"), at(0));
    let task = start(&api, &events);
    let calls = api.until_called(2).await;
    task.abort();
    assert_eq!(body(&calls[1])["reason"], "Second");
}

#[test]
fn lapped_event_log_reader_counts_lost_events() {
    let events = EventLog::default();
    let mut reader = Reader::default();
    for number in 0..1200 {
        events.record(EventRecord { message: number.to_string(), ..about_pod("Many") }, at(0));
    }
    let read = reader.read(&events);
    assert_eq!(read.len(), 1000);
    assert_eq!(reader.sequence, 1200);
    assert!(reader.read(&events).is_empty());
}

#[test]
fn events_name_their_involved_object() {
    let pod = || PodRef { uid: "u1".into(), namespace: "shop".into(), name: "web".into() };
    let container = |name: &str| InvolvedObject::Container { pod: pod(), container: name.to_owned() };
    let shown = |about: &InvolvedObject| {
        let object = object_of(about, "n1", &snapshot())?;
        let parts =
            [object.kind, object.namespace, object.name, object.uid, object.resource_version, object.field_path];
        Some(parts.map(Option::unwrap_or_default).join("|"))
    };
    let cases = [
        (InvolvedObject::Node, Some("Node||n1|||")),
        (InvolvedObject::Pod(pod()), Some("Pod|shop|web|u1|41|")),
        (container("main"), Some("Pod|shop|web|u1|41|spec.containers{main}")),
        (container("prepare"), Some("Pod|shop|web|u1|41|spec.initContainers{prepare}")),
        (InvolvedObject::Pod(PodRef { uid: "gone".into(), ..pod() }), Some("Pod|shop|web|gone||")),
        (InvolvedObject::Manifest("/m/web.yaml".to_owned()), None),
    ];
    for (about, expected) in cases {
        assert_eq!(shown(&about).as_deref(), expected, "{about}");
    }
}

fn start(api: &Arc<FakeApi>, events: &EventLog) -> JoinHandle<()> {
    let (_, snapshots) = watch::channel(Arc::new(snapshot()));
    tokio::spawn(run(api.clone(), events.clone(), "n1".to_owned(), snapshots))
}

fn about_pod(reason: &str) -> EventRecord {
    EventRecord::new(
        InvolvedObject::Pod(PodRef { uid: "u1".into(), namespace: "shop".into(), name: "web".into() }),
        Severity::Normal,
        reason,
        "text",
    )
}

fn snapshot() -> Snapshot {
    let container = |name: &str| Container { name: name.to_owned(), ..Container::default() };
    let pod = Pod {
        metadata: ObjectMeta { resource_version: Some("41".to_owned()), ..ObjectMeta::default() },
        spec: Some(PodSpec {
            containers: vec![container("main")],
            init_containers: Some(vec![container("prepare")]),
            ..PodSpec::default()
        }),
        status: None,
    };
    let view = PodView {
        source: None,
        mirror_uid: None,
        pod: Arc::new(pod),
        status: Arc::default(),
        lifecycle: "Syncing".to_owned(),
        lifecycle_since: at(0),
        running: BTreeMap::new(),
        counts: Default::default(),
        facts: None,
        needs: Arc::default(),
        volumes: Default::default(),
        steps: Vec::new(),
    };
    Snapshot { pods: [("u1".into(), Arc::new(view))].into_iter().collect(), ..Snapshot::default() }
}

fn body(call: &Call) -> serde_json::Value {
    serde_json::from_slice(call.body.as_deref().unwrap()).unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}
