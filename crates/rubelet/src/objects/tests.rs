//! The object cache with a scripted API server.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rubelet_core::{objects::RuntimeClass, snapshot::PodView, volumes::files::TokenKey};
use rubelet_kube::port::{ApiError, Watch, WatchEvent, WatchStream};
use serde_json::{Value, json};

use super::*;
use crate::server::views::tests::view;

/// Holds objects by their path, and sends changes to watches.
#[derive(Default)]
struct Script {
    objects: BTreeMap<String, Value>,
    watches: BTreeMap<String, mpsc::Sender<Result<WatchEvent, ApiError>>>,
    /// Every call and watch, one line each.
    heard: Vec<String>,
    is_away: bool,
    version: u64,
}

#[derive(Clone, Default)]
pub(crate) struct Scripted(Arc<Mutex<Script>>);

impl Scripted {
    fn with<T>(&self, act: impl FnOnce(&mut Script) -> T) -> T {
        act(&mut self.0.lock().unwrap())
    }

    /// Stores the object and notifies its watch.
    pub(crate) async fn put(&self, path: &str, mut object: Value) {
        let (event, watch) = self.with(|script| {
            script.version += 1;
            object["metadata"]["resourceVersion"] = json!(script.version.to_string());
            script.objects.insert(path.to_owned(), object.clone());
            (WatchEvent::Modified(Bytes::from(object.to_string())), script.watches.get(path).cloned())
        });
        if let Some(watch) = watch {
            watch.send(Ok(event)).await.unwrap();
        }
    }

    async fn delete(&self, path: &str) {
        let (object, watch) =
            self.with(|script| (script.objects.remove(path).unwrap(), script.watches.get(path).cloned()));
        watch.unwrap().send(Ok(WatchEvent::Deleted(Bytes::from(object.to_string())))).await.unwrap();
    }

    fn is_watched(&self, path: &str) -> bool {
        self.with(|script| script.watches.get(path).is_some_and(|watch| !watch.is_closed()))
    }

    fn heard(&self) -> Vec<String> {
        self.with(|script| std::mem::take(&mut script.heard))
    }
}

/// `metadata.name=x` of a collection is the object's own path.
fn path_of(collection: &ObjectPath, query: &[(&'static str, String)]) -> String {
    let selector = query.iter().find(|(name, _)| *name == "fieldSelector").map(|(_, value)| value.as_str());
    match selector.and_then(|selector| selector.strip_prefix("metadata.name=")) {
        Some(name) => format!("{collection}/{name}"),
        None => collection.to_string(),
    }
}

#[async_trait]
impl ApiServer for Scripted {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.with(|script| {
            let is_list = call.path.name.is_none();
            let path = path_of(&call.path, &call.query);
            script.heard.push(format!("{:?} {path}", call.verb));
            if script.is_away {
                return Err(ApiError::new(ApiErrorKind::Unreachable, "connection refused"));
            }
            if call.verb == Verb::Create {
                let request: Value = serde_json::from_slice(&call.body.unwrap()).unwrap();
                let token = format!("token {}", script.heard.len());
                let status = json!({"token": token, "expirationTimestamp": "2026-01-01T01:00:00Z"});
                return Ok(Bytes::from(json!({"spec": request["spec"], "status": status}).to_string()));
            }
            let found = script.objects.get(&path);
            match (found, is_list) {
                (found, true) => {
                    let items: Vec<_> = found.into_iter().collect();
                    let metadata = json!({"resourceVersion": script.version.to_string()});
                    Ok(Bytes::from(json!({"metadata": metadata, "items": items}).to_string()))
                }
                (Some(object), false) => Ok(Bytes::from(object.to_string())),
                (None, false) => Err(ApiError::new(ApiErrorKind::NotFound, format!("{path} not found"))),
            }
        })
    }

    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        if watch.query.contains(&("sendInitialEvents", "true".to_owned())) {
            return Err(ApiError::new(ApiErrorKind::Invalid, "no streamed lists"));
        }
        let (sender, receiver) = mpsc::channel(8);
        self.with(|script| {
            let path = path_of(&watch.collection, &watch.query);
            script.heard.push(format!("Watch {path}"));
            script.watches.insert(path, sender);
        });
        Ok(Box::pin(futures_util::stream::unfold(receiver, |mut receiver| async {
            receiver.recv().await.map(|event| (event, receiver))
        })))
    }
}

const MAP: &str = "/api/v1/namespaces/prod/configmaps/m";

/// The snapshot after `last` in which this pod needs this, or nothing if it is gone.
pub(crate) fn next_snapshot(last: &Snapshot, pod: &PodUid, needs: Option<Needs>) -> Snapshot {
    let mut next = Snapshot { changed: BTreeSet::from([pod.clone()]), ..last.clone() };
    match needs {
        Some(needs) => {
            let view = view("prod", "web", &[], &[], json!({}));
            next.pods.insert_mut(pod.clone(), Arc::new(PodView { needs: Arc::new(needs), ..view }));
        }
        None => drop(next.pods.remove_mut(pod)),
    }
    next
}

struct ObjectsFixture {
    api: Scripted,
    objects: ObjectCache,
    snapshot: Snapshot,
    hints: mpsc::Receiver<Event>,
}

impl ObjectsFixture {
    fn new(strategy: Strategy) -> Self {
        let api = Scripted::default();
        let clock = Clock::simulated("2026-01-01T00:00:00Z".parse().unwrap(), Arc::default());
        let objects = ObjectCache::new(Arc::new(api.clone()), strategy, "node", clock);
        let (sender, hints) = mpsc::channel(16);
        objects.connect(sender);
        ObjectsFixture { api, objects, snapshot: Snapshot::default(), hints }
    }

    /// Publishes the pod's needs; `None` if it is gone.
    fn publish(&mut self, pod: &str, needs: Option<Needs>) {
        let next = next_snapshot(&self.snapshot, &pod.into(), needs);
        self.objects.update_needs(&self.snapshot, &next);
        self.snapshot = next;
    }

    /// With these pods, each of which needs config map `m`.
    fn with_pods(mut self, pods: &[&str]) -> Self {
        for pod in pods {
            self.publish(pod, Some(config_map_m()));
        }
        self
    }

    /// The value of key `k` of config map `m`, as one pod gets it.
    async fn read(&self, pod: &str) -> String {
        let key = ObjectKey::config_map("prod", "m");
        let found = self.objects.gather(&PodUid::new(pod), BTreeSet::from([key.clone()])).await;
        match &found.0[&key] {
            Ok(object) => String::from_utf8(object.data()["k"].clone()).unwrap(),
            Err(error) => format!("{:?}: {}", error.kind, error.message),
        }
    }

    /// The hints so far, once all tasks are idle.
    async fn hinted(&mut self) -> Vec<String> {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let mut pods = Vec::new();
        while let Ok(event) = self.hints.try_recv() {
            match event {
                Event::Refresh { pod } => pods.push(pod.to_string()),
                other => panic!("{other:?}"),
            }
        }
        pods
    }
}

fn config_map_m() -> Needs {
    Needs { objects: BTreeSet::from([ObjectKey::config_map("prod", "m")]), ..Needs::default() }
}

fn map(value: &str) -> Value {
    json!({"metadata": {"name": "m", "namespace": "prod"}, "data": {"k": value}})
}

#[tokio::test(start_paused = true)]
async fn object_change_hints_only_pods_that_use_it() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch);
    fixture.api.put(MAP, map("1")).await;
    fixture.publish("a", Some(config_map_m()));
    assert_eq!(fixture.read("a").await, "1");
    assert_eq!(fixture.hinted().await, Vec::<String>::new());
    fixture.api.put(MAP, map("2")).await;
    assert_eq!(fixture.hinted().await, ["a"]);
    assert_eq!(fixture.read("a").await, "2");
    let mut labelled = map("2");
    labelled["metadata"]["labels"] = json!({"x": "y"});
    fixture.api.put(MAP, labelled).await;
    assert_eq!(fixture.hinted().await, Vec::<String>::new());
    fixture.publish("b", Some(config_map_m()));
    assert_eq!(fixture.read("b").await, "2");
    fixture.api.put(MAP, map("3")).await;
    assert_eq!(fixture.hinted().await, ["a", "b"]);
}

#[tokio::test(start_paused = true)]
async fn one_watch_serves_all_pods_and_ends_with_the_last() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch);
    fixture.publish("a", Some(Needs::default()));
    fixture.hinted().await;
    assert!(!fixture.api.is_watched(MAP));
    fixture.publish("a", Some(config_map_m()));
    fixture.hinted().await;
    assert!(fixture.api.is_watched(MAP), "it begins before anybody reads");
    fixture.publish("b", Some(config_map_m()));
    fixture.publish("a", Some(Needs::default()));
    fixture.hinted().await;
    assert!(fixture.api.is_watched(MAP));
    let (with_c, mut both) = (next_snapshot(&fixture.snapshot, &"c".into(), Some(config_map_m())), BTreeSet::new());
    both.extend(["b".into(), "c".into()]);
    let replaced = Snapshot { changed: both, ..next_snapshot(&with_c, &"b".into(), None) };
    fixture.objects.update_needs(&fixture.snapshot, &replaced);
    fixture.snapshot = replaced;
    fixture.hinted().await;
    assert!(fixture.api.is_watched(MAP), "one pod goes and another comes in the same turn");
    let watches = fixture.api.heard().into_iter().filter(|line| *line == format!("Watch {MAP}")).count();
    assert_eq!(watches, 1);
    fixture.publish("c", None);
    fixture.hinted().await;
    assert!(!fixture.api.is_watched(MAP));
    assert!(locked(&fixture.objects.shared.entries).is_empty());
}

#[tokio::test(start_paused = true)]
async fn object_that_is_not_among_a_pods_needs_is_an_error() {
    for strategy in [Strategy::Watch, Strategy::Cache, Strategy::Get] {
        let fixture = ObjectsFixture::new(strategy).with_pods(&["a"]);
        fixture.api.put(MAP, map("1")).await;
        assert_eq!(fixture.read("a").await, "1");
        assert_eq!(fixture.read("b").await, r#"Unreadable: object "prod"/"m" not registered"#, "{strategy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn missing_object_is_not_found_until_created_and_after_deletion() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch).with_pods(&["a"]);
    assert_eq!(fixture.read("a").await, r#"NotFound: configmap "m" not found"#);
    fixture.hinted().await;
    fixture.api.put(MAP, map("1")).await;
    assert_eq!(fixture.hinted().await, ["a"]);
    assert_eq!(fixture.read("a").await, "1");
    fixture.api.delete(MAP).await;
    assert_eq!(fixture.hinted().await, ["a"]);
    assert_eq!(fixture.read("a").await, r#"NotFound: configmap "m" not found"#);
}

#[tokio::test(start_paused = true)]
async fn runtime_class_is_cluster_scoped_and_gives_handler() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch);
    let path = "/apis/node.k8s.io/v1/runtimeclasses/sandboxed";
    let spec = serde_json::from_value(json!({"containers": [], "runtimeClassName": "sandboxed"})).unwrap();
    let key = ObjectKey::runtime_class(&spec).unwrap();
    fixture.publish("a", Some(Needs { objects: BTreeSet::from([key.clone()]), ..Needs::default() }));
    let read = async |fixture: &ObjectsFixture| {
        fixture.objects.gather(&"a".into(), BTreeSet::from([key.clone()])).await.0[&key].clone()
    };
    let error = read(&fixture).await.unwrap_err();
    assert_eq!(error.message, r#"runtimeclass.node.k8s.io "sandboxed" not found"#);
    fixture.hinted().await;
    fixture.api.put(path, json!({"metadata": {"name": "sandboxed"}, "handler": "gvisor"})).await;
    assert_eq!(fixture.hinted().await, ["a"]);
    let class = Object::RuntimeClass(RuntimeClass { handler: "gvisor".to_owned() });
    assert_eq!(*read(&fixture).await.unwrap(), class);
    fixture.publish("a", None);
    fixture.hinted().await;
    assert!(!fixture.api.is_watched(path));
}

#[tokio::test(start_paused = true)]
async fn bundles_of_a_signer_are_followed_together() {
    // Bundles are watched whatever the strategy for config maps and secrets.
    let mut fixture = ObjectsFixture::new(Strategy::Get);
    let path = "/apis/certificates.k8s.io/v1beta1/clustertrustbundles";
    let key = ObjectKey::trust_bundles_of_signer("example.com/s");
    let bundle = |name: &str, pem: &str| json!({"metadata": {"name": name}, "spec": {"trustBundle": pem}});
    fixture.publish("a", Some(Needs { objects: BTreeSet::from([key.clone()]), ..Needs::default() }));
    let read = async |fixture: &ObjectsFixture| {
        let found = fixture.objects.gather(&"a".into(), BTreeSet::from([key.clone()])).await.0[&key].clone();
        match found.as_deref() {
            Ok(Object::TrustBundles(bundles)) => {
                bundles.iter().map(|(name, bundle)| format!("{name}={}", bundle.pem)).collect::<Vec<_>>().join(" ")
            }
            other => format!("{other:?}"),
        }
    };
    assert_eq!(read(&fixture).await, "", "there are none");
    fixture.hinted().await;
    for (name, pem, expected) in [("a", "1", "a=1"), ("b", "2", "a=1 b=2"), ("a", "3", "a=3 b=2")] {
        fixture.api.put(path, bundle(name, pem)).await;
        assert_eq!(fixture.hinted().await, ["a"]);
        assert_eq!(read(&fixture).await, expected);
    }
    fixture.api.delete(path).await;
    assert_eq!(fixture.hinted().await, ["a"]);
    assert_eq!(read(&fixture).await, "b=2");
}

#[tokio::test(start_paused = true)]
async fn an_immutable_object_is_read_and_not_watched() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch).with_pods(&["a", "b"]);
    let mut object = map("1");
    object["immutable"] = json!(true);
    fixture.api.put(MAP, object).await;
    assert_eq!(fixture.read("a").await, "1");
    fixture.hinted().await;
    assert!(!fixture.api.is_watched(MAP));
    assert_eq!(fixture.read("b").await, "1");
    assert_eq!(fixture.api.heard().iter().filter(|line| **line == format!("Get {MAP}")).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn late_first_list_hints_waiting_pod() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch).with_pods(&["a"]);
    fixture.api.put(MAP, map("1")).await;
    fixture.api.with(|script| script.is_away = true);
    let waited = "Unreadable: failed to sync configmap cache: timed out waiting for the condition";
    assert_eq!(fixture.read("a").await, waited);
    fixture.api.with(|script| script.is_away = false);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(fixture.hinted().await, ["a"]);
    assert_eq!(fixture.read("a").await, "1");
}

#[tokio::test(start_paused = true)]
async fn cached_object_is_reread_after_a_minute_and_survives_outage() {
    let fixture = ObjectsFixture::new(Strategy::Cache).with_pods(&["a"]);
    fixture.api.put(MAP, map("1")).await;
    assert_eq!(fixture.read("a").await, "1");
    fixture.api.put(MAP, map("2")).await;
    assert_eq!(fixture.read("a").await, "1");
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(fixture.read("a").await, "2");
    tokio::time::sleep(Duration::from_secs(61)).await;
    fixture.api.with(|script| script.is_away = true);
    assert_eq!(fixture.read("a").await, "2");
    assert!(!fixture.api.is_watched(MAP));
}

#[tokio::test(start_paused = true)]
async fn without_a_cache_every_look_is_a_read() {
    let fixture = ObjectsFixture::new(Strategy::Get).with_pods(&["a"]);
    fixture.api.put(MAP, map("1")).await;
    assert_eq!(fixture.read("a").await, "1");
    fixture.api.put(MAP, map("2")).await;
    assert_eq!(fixture.read("a").await, "2");
    fixture.api.with(|script| script.is_away = true);
    assert_eq!(fixture.read("a").await, "Unreadable: connection refused");
}

#[tokio::test(start_paused = true)]
async fn token_is_requested_once_renewed_and_dropped_with_pod() {
    let mut fixture = ObjectsFixture::new(Strategy::Watch);
    let key = TokenKey {
        namespace: "prod".to_owned(),
        service_account: "sa".to_owned(),
        pod_name: "web".to_owned(),
        pod_uid: "a".into(),
        audience: None,
        expiration_secs: 3600,
    };
    let needs = Needs { tokens: BTreeSet::from([key.clone()]), ..Needs::default() };
    fixture.publish("a", Some(needs.clone()));
    let token = async |fixture: &ObjectsFixture| {
        fixture.objects.gather_for_volume(&key.pod_uid, needs.clone()).await.tokens.remove(&key).unwrap()
    };
    let requests = |fixture: &ObjectsFixture| {
        fixture.api.heard().into_iter().filter(|line| line.starts_with("Create")).collect::<Vec<_>>()
    };
    let first = token(&fixture).await.unwrap();
    assert_eq!(token(&fixture).await.unwrap(), first);
    assert_eq!(requests(&fixture), ["Create /api/v1/namespaces/prod/serviceaccounts/sa/token"]);
    tokio::time::sleep(Duration::from_secs(2_900)).await;
    fixture.api.with(|script| script.is_away = true);
    assert_eq!(token(&fixture).await.unwrap(), first);
    assert_eq!(requests(&fixture).len(), 1);
    tokio::time::sleep(Duration::from_secs(800)).await;
    assert_eq!(token(&fixture).await.unwrap_err(), "token expired and refresh failed: connection refused");
    fixture.publish("a", None);
    assert_eq!(token(&fixture).await.unwrap_err(), "token of prod/sa for pod web not registered");
    fixture.publish("a", Some(needs.clone()));
    assert_eq!(token(&fixture).await.unwrap_err(), "failed to fetch token: connection refused");
}

#[tokio::test(start_paused = true)]
async fn services_are_waited_for_and_kept_up_with() {
    use rubelet_core::container::environment::{Services, services::Links};
    let mut fixture = ObjectsFixture::new(Strategy::Watch);
    let services = "/api/v1/services";
    let host = async |fixture: &ObjectsFixture, patience| match fixture
        .objects
        .services()
        .variables("prod", Links::All, patience)
        .await
    {
        Services::Unread => "unread".to_owned(),
        Services::Read(variables) => {
            let host = variables.get("DB_SERVICE_HOST").cloned().unwrap_or_default();
            String::from_utf8(host).unwrap()
        }
    };
    assert_eq!(host(&fixture, Patience::Now).await, "unread");
    assert_eq!(host(&fixture, Patience::Wait).await, "");
    fixture.hinted().await;
    let service = |ip: &str| json!({"metadata": {"name": "db", "namespace": "prod"}, "spec": {"clusterIP": ip, "ports": [{"port": 1}]}});
    fixture.api.put(services, service("10.0.0.1")).await;
    fixture.hinted().await;
    assert_eq!(host(&fixture, Patience::Now).await, "10.0.0.1");
    fixture.api.delete(services).await;
    fixture.hinted().await;
    assert_eq!(host(&fixture, Patience::Now).await, "");
}
