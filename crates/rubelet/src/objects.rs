//! The config maps, secrets, runtime classes, CSI drivers, services and tokens that pods of this node need, cached while they are needed.
//!
//! Owns: one watch per needed object, the hint to the loop when one changes. Never: decides which pod needs what (snapshots
//! have it), lists a whole kind (except services), stores unused fields of an object, logs a value.
//! Upstream: `pkg/kubelet/util/manager`, `pkg/kubelet/{configmap,secret,token}`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;
use rubelet_core::{
    event::Event,
    fnv::fnv32a,
    id::PodUid,
    needs::Needs,
    objects::{self, Lookup, Object, ObjectError, ObjectErrorKind, ObjectKey, ObjectKind},
    snapshot::Snapshot,
    time::Uptime,
    volumes::{files::Gathered, pod_certificates::CertificateKey},
};
use rubelet_kube::{
    error_chain,
    port::{ApiErrorKind, ApiServer, Call, Lane, ObjectPath, Verb},
};
use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::timeout,
};

pub use self::services::{KnownServices, Patience};
use self::{
    pod_certificates::{CertificateReports, CertificateStore},
    tokens::TokenCache,
};
use crate::{event_log::EventLog, metrics::Metrics, world::Clock};

mod follow;
mod pod_certificates;
mod services;
#[cfg(test)]
pub(crate) mod tests;
mod tokens;

/// How long a pod's step waits for the first list of a new watch. The step is retried, and the list hints when it arrives;
/// this wait only avoids a failure event.
const FIRST_LIST: Duration = Duration::from_secs(3);
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a cached value is valid under `Strategy::Cache`, as upstream.
const CACHE_TTL: Duration = Duration::from_secs(60);

/// `configMapAndSecretChangeDetectionStrategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    #[default]
    Watch,
    /// Read again when the last response is a minute old.
    Cache,
    /// Read each time.
    Get,
}

impl Strategy {
    /// The validated configuration has no other values.
    pub fn of(word: &str) -> Self {
        match word {
            "Cache" => Strategy::Cache,
            "Get" => Strategy::Get,
            _ => Strategy::Watch,
        }
    }
}

/// Dropping the last clone ends all watches.
#[derive(Clone)]
pub struct ObjectCache {
    shared: Arc<Shared>,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

impl fmt::Debug for ObjectCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectCache").field("strategy", &self.shared.strategy).finish_non_exhaustive()
    }
}

/// State shared by the watches and the readers. No lock is held over an await.
struct Shared {
    api: Arc<dyn ApiServer>,
    clock: Clock,
    strategy: Strategy,
    /// Spreads the retries of many nodes over time.
    node_name: String,
    inbox: OnceLock<mpsc::Sender<Event>>,
    entries: Mutex<BTreeMap<ObjectKey, Entry>>,
    services: KnownServices,
    tokens: TokenCache,
    certificates: CertificateStore,
    /// Where certificates are reported; unset, none are requested.
    certificate_reports: OnceLock<CertificateReports>,
}

/// An object that some pod needs.
struct Entry {
    /// The pods that need it; never empty.
    pods: BTreeSet<PodUid>,
    cached: watch::Sender<CachedObject>,
    watching: Option<AbortHandle>,
    /// A reader timed out before the first list.
    was_missed: bool,
}

#[derive(Clone)]
enum CachedObject {
    Unread,
    Read {
        /// `None`: the object does not exist.
        object: Option<Arc<Object>>,
        at: Uptime,
    },
}

impl ObjectCache {
    pub fn new(api: Arc<dyn ApiServer>, strategy: Strategy, node_name: &str, clock: Clock) -> Self {
        let shared = Shared {
            api,
            clock,
            strategy,
            node_name: node_name.to_owned(),
            inbox: OnceLock::new(),
            entries: Mutex::default(),
            services: KnownServices::default(),
            tokens: TokenCache::default(),
            certificates: CertificateStore::default(),
            certificate_reports: OnceLock::new(),
        };
        ObjectCache { shared: Arc::new(shared), tasks: Arc::default() }
    }

    /// From now on pods get certificates.
    pub fn enable_pod_certificates(&self, events: EventLog, metrics: Arc<Metrics>) {
        // It is enabled once, before the loop runs.
        let _ = self.shared.certificate_reports.set(CertificateReports { events, metrics });
    }

    /// Starts the watch of services, and hints the loop of changes from now on.
    pub fn connect(&self, inbox: mpsc::Sender<Event>) {
        if self.shared.inbox.set(inbox).is_ok() {
            self.spawn(services::follow(self.shared.clone()));
        }
    }

    /// Makes the entries, their watches and the tokens equal to what pods need now. Only pods that changed between two snapshots
    /// are processed; an object that one pod releases and another requires in the same turn keeps its watch.
    pub fn update_needs(&self, before: &Snapshot, newest: &Snapshot) {
        let nothing = Arc::default();
        let mut entries = locked(&self.shared.entries);
        let mut given_up = BTreeSet::new();
        for pod in &newest.changed {
            let [before, now] =
                [before, newest].map(|snapshot| snapshot.pods.get(pod).map_or(&nothing, |view| &view.needs));
            if before == now {
                continue;
            }
            for key in now.objects.difference(&before.objects) {
                let entry = entries.entry(key.clone()).or_insert_with(|| self.begin(key));
                entry.pods.insert(pod.clone());
            }
            for key in before.objects.difference(&now.objects) {
                if let Some(entry) = entries.get_mut(key) {
                    entry.pods.remove(pod);
                    given_up.insert(key);
                }
            }
            self.shared.tokens.update_needs(&before.tokens, &now.tokens);
            if let Some(reports) = self.shared.certificate_reports.get() {
                let begin =
                    |key: &CertificateKey| self.spawn(pod_certificates::follow(self.shared.clone(), key.clone()));
                let needs = [&before.certificates, &now.certificates];
                self.shared.certificates.update_needs(needs, reports, begin);
            }
        }
        for key in given_up {
            if entries.get(key).is_some_and(|entry| entry.pods.is_empty()) {
                entries.remove(key);
            }
        }
    }

    /// The objects, or the error of each. An object missing from the pod's published needs is an error.
    pub async fn gather(&self, pod: &PodUid, keys: BTreeSet<ObjectKey>) -> objects::Objects {
        let lookups = keys.into_iter().map(|key| async {
            let lookup = self.look_up(pod, &key).await;
            (key, lookup)
        });
        objects::Objects(join_all(lookups).await.into_iter().collect())
    }

    /// All sources of a volume's content.
    pub async fn gather_for_volume(&self, pod: &PodUid, needs: Needs) -> Gathered {
        let tokens = needs.tokens.into_iter().map(|key| async {
            let token = self.shared.tokens.token(&*self.shared.api, &key, &self.shared.clock).await;
            (key, token)
        });
        let certificates = needs.certificates.into_iter().map(|key| async {
            let bundle = self.shared.certificates.bundle(&key).await;
            (key, bundle)
        });
        let (objects, tokens, certificates) =
            tokio::join!(self.gather(pod, needs.objects), join_all(tokens), join_all(certificates));
        Gathered { objects, tokens: tokens.into_iter().collect(), certificates: certificates.into_iter().collect() }
    }

    pub fn services(&self) -> &KnownServices {
        &self.shared.services
    }

    async fn look_up(&self, pod: &PodUid, key: &ObjectKey) -> Lookup {
        let Some(mut cached) = self.shared.subscribe(pod, key) else { return Err(key.not_registered()) };
        match self.shared.strategy_of(key) {
            Strategy::Watch => {
                let read =
                    timeout(FIRST_LIST, cached.wait_for(|cached| matches!(cached, CachedObject::Read { .. }))).await;
                match read.ok().and_then(Result::ok).as_deref() {
                    Some(CachedObject::Read { object, .. }) => object.clone().ok_or_else(|| key.not_found()),
                    Some(CachedObject::Unread) | None => Err(self.shared.missed(key)),
                }
            }
            Strategy::Cache => {
                let last = cached.borrow().clone();
                self.shared.look_up_cached(key, last).await
            }
            Strategy::Get => match self.shared.fetch(key).await? {
                Some(object) => Ok(Arc::new(object)),
                None => Err(key.not_found()),
            },
        }
    }

    fn begin(&self, key: &ObjectKey) -> Entry {
        let watching = match self.shared.strategy_of(key) {
            Strategy::Watch => Some(self.spawn(follow::follow(self.shared.clone(), key.clone()))),
            Strategy::Cache | Strategy::Get => None,
        };
        let cached = watch::Sender::new(CachedObject::Unread);
        Entry { pods: BTreeSet::new(), cached, watching, was_missed: false }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let mut tasks = locked(&self.tasks);
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended
                && error.is_panic()
            {
                std::panic::resume_unwind(error.into_panic());
            }
        }
        tasks.spawn(task)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(task) = &self.watching {
            task.abort();
        }
    }
}

impl Shared {
    /// `None`: the pod does not need this object.
    fn subscribe(&self, pod: &PodUid, key: &ObjectKey) -> Option<watch::Receiver<CachedObject>> {
        let entries = locked(&self.entries);
        let entry = entries.get(key).filter(|entry| entry.pods.contains(pod))?;
        Some(entry.cached.subscribe())
    }

    /// Trust bundles are always watched, as upstream.
    fn strategy_of(&self, key: &ObjectKey) -> Strategy {
        if key.is_trust_bundle() { Strategy::Watch } else { self.strategy }
    }

    /// Upstream's text. When the list arrives later, its pods are hinted.
    fn missed(&self, key: &ObjectKey) -> ObjectError {
        if let Some(entry) = locked(&self.entries).get_mut(key) {
            entry.was_missed = true;
        }
        if key.is_trust_bundle() {
            let message = "ClusterTrustBundle informer has not yet synced".to_owned();
            return ObjectError { kind: ObjectErrorKind::Unreadable, message };
        }
        let kind = match key.kind {
            ObjectKind::ConfigMap => "configmap",
            ObjectKind::Secret => "secret",
            ObjectKind::RuntimeClass => "runtimeclass",
            ObjectKind::CsiDriver => "csidriver",
            ObjectKind::ClusterTrustBundle | ObjectKind::TrustBundlesOfSigner => "clustertrustbundle",
        };
        let message = format!("failed to sync {kind} cache: timed out waiting for the condition");
        ObjectError { kind: ObjectErrorKind::Unreadable, message }
    }

    async fn look_up_cached(&self, key: &ObjectKey, last: CachedObject) -> Lookup {
        let now = self.clock.now().uptime;
        if let CachedObject::Read { object: Some(object), at } = &last
            && now.since(*at) < CACHE_TTL
        {
            return Ok(object.clone());
        }
        let object = match (self.fetch(key).await, last) {
            (Ok(found), _) => {
                let object = found.map(Arc::new);
                if let Some(entry) = locked(&self.entries).get(key) {
                    entry.cached.send_replace(CachedObject::Read { object: object.clone(), at: now });
                }
                object
            }
            // A stale value is preferred to none, as upstream.
            (Err(_), CachedObject::Read { object, .. }) => object,
            (Err(error), CachedObject::Unread) => return Err(error),
        };
        object.ok_or_else(|| key.not_found())
    }

    /// `None`: the object does not exist.
    async fn fetch(&self, key: &ObjectKey) -> Result<Option<Object>, ObjectError> {
        let path = collection(key).named(&key.name);
        let (lane, verb, timeout) = (Lane::Ordinary, Verb::Get, CALL_TIMEOUT);
        let call = Call { lane, verb, path, query: Vec::new(), body: None, timeout };
        let unreadable = |message| ObjectError { kind: ObjectErrorKind::Unreadable, message };
        match self.api.call(call).await {
            // The error's text may quote a secret value.
            Ok(body) => Object::read(key.kind, &body).map(Some).map_err(|error| {
                unreadable(format!("{key} cannot be read: line {}, column {}", error.line(), error.column()))
            }),
            Err(error) if error.kind == ApiErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(error_chain(&error))),
        }
    }

    /// Differs between nodes and between objects.
    fn seed(&self, subject: &str) -> u64 {
        u64::from(fnv32a(format!("{}/{subject}", self.node_name).as_bytes()))
    }
}

fn collection(key: &ObjectKey) -> ObjectPath {
    match key.kind {
        ObjectKind::ConfigMap => ObjectPath::all("v1", "configmaps").within(&key.namespace),
        ObjectKind::Secret => ObjectPath::all("v1", "secrets").within(&key.namespace),
        ObjectKind::RuntimeClass => ObjectPath::all("node.k8s.io/v1", "runtimeclasses"),
        ObjectKind::CsiDriver => ObjectPath::all("storage.k8s.io/v1", "csidrivers"),
        ObjectKind::ClusterTrustBundle | ObjectKind::TrustBundlesOfSigner => {
            ObjectPath::all("certificates.k8s.io/v1beta1", "clustertrustbundles")
        }
    }
}

/// A panic while the lock was held leaves nothing that the next write does not replace.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
