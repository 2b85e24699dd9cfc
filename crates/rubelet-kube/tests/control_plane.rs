//! The client against a real control plane.
//!
//! `cargo xtask up --control-plane-only` starts one and prints its administrator's kubeconfig; then
//! `RUBELET_TEST_KUBECONFIG=/path/to/kubeconfig cargo test -p rubelet-kube --test control_plane -- --ignored`

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{path::PathBuf, sync::Arc, time::Duration};

use futures_util::StreamExt;
use rubelet_kube::{
    calls,
    client::{Client, RateLimit, RateLimits},
    kubeconfig::Kubeconfig,
    port::{ApiErrorKind, ApiServer, Lane, ObjectPath, PatchKind, Watch, WatchEvent},
    reflector::{Delta, Selection, follow},
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinSet};

const SOON: Duration = Duration::from_secs(20);

fn client() -> Arc<Client> {
    let path = std::env::var_os("RUBELET_TEST_KUBECONFIG").expect("RUBELET_TEST_KUBECONFIG names a kubeconfig");
    let limits = RateLimits { ordinary: RateLimit::NONE, events: RateLimit::NONE };
    Arc::new(Client::new(&Kubeconfig::read(&PathBuf::from(path)).unwrap(), limits).unwrap())
}

fn config_maps() -> ObjectPath {
    ObjectPath::all("v1", "configmaps").within("default")
}

/// Objects of one test, separate from those of others.
fn config_map(name: &str, value: &str) -> Value {
    json!({"metadata": {"name": name}, "data": {"key": value}})
}

fn named(name: &str) -> Selection {
    Selection { collection: config_maps(), fields: Some(format!("metadata.name={name}")) }
}

async fn delete(api: &dyn ApiServer, name: &str) {
    calls::delete(api, Lane::Ordinary, config_maps().named(name), &json!({}), SOON).await.unwrap();
}

#[tokio::test]
#[ignore = "needs a control plane"]
async fn an_object_is_made_found_changed_and_deleted() {
    let client = client();
    let name = "rubelet-calls";
    let list: Value = calls::get(&*client, Lane::Heartbeat, ObjectPath::all("v1", "nodes"), SOON).await.unwrap();
    assert_eq!(list["kind"], "NodeList");
    let made: Value =
        calls::create(&*client, Lane::Ordinary, config_maps(), &config_map(name, "a"), SOON).await.unwrap();
    assert_eq!(made["data"]["key"], "a");
    let again = calls::create::<_, Value>(&*client, Lane::Ordinary, config_maps(), &config_map(name, "a"), SOON).await;
    assert_eq!(again.unwrap_err().kind, ApiErrorKind::AlreadyExists);

    let patch = json!({"data": {"key": "b"}});
    for kind in [PatchKind::Merge, PatchKind::StrategicMerge] {
        let path = config_maps().named(name);
        let patched: Value = calls::patch(&*client, Lane::Ordinary, kind, path, &patch, SOON).await.unwrap();
        assert_eq!(patched["data"]["key"], "b");
    }
    let stale = calls::update::<_, Value>(&*client, Lane::Ordinary, config_maps().named(name), &made, SOON).await;
    assert_eq!(stale.unwrap_err().kind, ApiErrorKind::Conflict);

    delete(&*client, name).await;
    let gone = calls::get::<Value>(&*client, Lane::Ordinary, config_maps().named(name), SOON).await.unwrap_err();
    assert_eq!(gone.kind, ApiErrorKind::NotFound);
    assert_eq!(
        gone.to_string(),
        "get /api/v1/namespaces/default/configmaps/rubelet-calls: 404 Not Found: configmaps \"rubelet-calls\" not found"
    );
}

#[tokio::test]
#[ignore = "needs a control plane"]
async fn reflector_receives_every_change() {
    let client = client();
    let name = "rubelet-followed";
    let (sender, mut changes) = mpsc::channel(16);
    let mut tasks = JoinSet::new();
    let api = Arc::clone(&client);
    tasks.spawn(async move { follow(&*api, &named(name), 1, &sender).await });
    assert_eq!(changes.recv().await.unwrap(), Delta::Replaced(Vec::new()));

    let _: Value = calls::create(&*client, Lane::Ordinary, config_maps(), &config_map(name, "a"), SOON).await.unwrap();
    let Delta::Applied(object) = changes.recv().await.unwrap() else { panic!("it was made") };
    assert_eq!(serde_json::from_slice::<Value>(&object).unwrap()["data"]["key"], "a");
    delete(&*client, name).await;
    assert!(matches!(changes.recv().await.unwrap(), Delta::Deleted(_)));
    drop(changes);
    tasks.join_all().await;
}

#[tokio::test]
#[ignore = "needs a control plane"]
async fn hundreds_of_watches_do_not_delay_a_heartbeat() {
    let client = client();
    let mut opening = JoinSet::new();
    for number in 0..250 {
        let client = Arc::clone(&client);
        let fields = format!("metadata.name=rubelet-watched-{number}");
        let query = vec![("watch", "true".to_owned()), ("fieldSelector", fields)];
        opening.spawn(async move { client.watch(Watch { collection: config_maps(), query }).await.unwrap() });
    }
    let mut watches = opening.join_all().await;
    let _: Value = calls::get(&*client, Lane::Heartbeat, ObjectPath::all("v1", "nodes"), SOON).await.unwrap();
    let _: Value =
        calls::create(&*client, Lane::Ordinary, config_maps(), &config_map("rubelet-watched-249", "a"), SOON)
            .await
            .unwrap();
    let (heard, ..) = futures_util::future::select_all(watches.iter_mut().map(StreamExt::next)).await;
    let WatchEvent::Added(object) = heard.unwrap().unwrap() else { panic!("it was made") };
    assert_eq!(serde_json::from_slice::<Value>(&object).unwrap()["metadata"]["name"], "rubelet-watched-249");
    delete(&*client, "rubelet-watched-249").await;
}
