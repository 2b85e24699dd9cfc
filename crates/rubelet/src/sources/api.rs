//! Pods of this node in the API.
//!
//! Owns: the node's set of pods as last received. The source is ready after the first complete list, so no pod is
//! considered undesired while the API server is unreachable. The pods it keeps are those the core uses, not copies.
//! Upstream: `config/apiserver.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    api_pod,
    event::{Event, Source},
    id::PodUid,
    pod_config::{mark, seen},
};
use rubelet_kube::{
    port::{ApiServer, ObjectPath},
    reflector::{self, Delta, Selection},
};
use serde::Deserialize;
use tokio::sync::{mpsc, watch};

use crate::{node::informer::NodeWatchState, world::World};

/// The receiver is faster than any server; the rest waits in the connection.
const CHANGES_CAPACITY: usize = 64;

/// Watches the pods bound to the node until the loop ends.
///
/// Nothing is sent before the node was read, because admission needs it.
pub async fn run(
    api: Arc<dyn ApiServer>,
    world: World,
    seed: u64,
    mut node_states: watch::Receiver<NodeWatchState>,
    inbox: mpsc::Sender<Event>,
) {
    let fields = Some(format!("spec.nodeName={}", world.settings.node_name));
    let selection = Selection { collection: ObjectPath::all("v1", "pods"), fields };
    let (sender, mut changes) = mpsc::channel(CHANGES_CAPACITY);
    let following = reflector::follow(api.as_ref(), &selection, seed, &sender);
    let telling = async {
        if node_states.wait_for(|state| !state.is_unseen()).await.is_err() {
            return;
        }
        let mut pods = Pods::default();
        let mut unreadable = BTreeSet::new();
        while let Some(change) = changes.recv().await {
            let now = world.clock.now().wall;
            pods.apply(change, now);
            // Deltas that have already arrived are sent together.
            while let Ok(change) = changes.try_recv() {
                pods.apply(change, now);
            }
            if unreadable != pods.unreadable {
                unreadable.clone_from(&pods.unreadable);
                if inbox.send(Event::Unreadable { pods: unreadable.clone() }).await.is_err() {
                    return;
                }
            }
            if inbox.send(pods.take_news()).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        // Neither is resumed after this: when one ends, the source ends.
        () = telling => {}
        () = following => {}
    }
}

/// By UID: two pods of one name are two pods.
#[derive(Debug, Default)]
struct Pods {
    readable: BTreeMap<PodUid, Arc<Pod>>,
    /// Pods that exist and could never be decoded.
    unreadable: BTreeSet<PodUid>,
    news: News,
}

/// What the loop has not received yet.
#[derive(Debug, Default)]
struct News {
    /// There was a list: all pods are sent.
    is_whole: bool,
    changed: BTreeSet<PodUid>,
}

impl Pods {
    fn apply(&mut self, change: Delta, now: Timestamp) {
        match change {
            Delta::Replaced(objects) => {
                let before = std::mem::take(self).readable;
                self.news.is_whole = true;
                for object in &objects {
                    self.put(object, &before, now);
                }
            }
            Delta::Applied(object) => {
                let uid = uid_of(&object);
                self.news.changed.extend(uid.clone());
                let before = uid.as_ref().and_then(|uid| self.forget(uid)).map(|pod| (PodUid::of(&pod), pod));
                self.put(&object, &BTreeMap::from_iter(before), now);
            }
            Delta::Deleted(object) => {
                if let Some(uid) = uid_of(&object) {
                    self.forget(&uid);
                    self.news.changed.insert(uid);
                }
            }
        }
    }

    fn forget(&mut self, uid: &PodUid) -> Option<Arc<Pod>> {
        self.unreadable.remove(uid);
        self.readable.remove(uid)
    }

    /// An undecodable pod keeps its last state: an unknown field must not terminate a pod.
    fn put(&mut self, object: &[u8], before: &BTreeMap<PodUid, Arc<Pod>>, now: Timestamp) {
        match api_pod::decode(object) {
            Ok(mut pod) => {
                let uid = PodUid::of(&pod);
                let known = before.get(&uid);
                let first_seen = known.and_then(|known| seen(known)).map_or_else(|| now.to_string(), str::to_owned);
                mark(&mut pod, Source::Api, &first_seen);
                // After a relist most pods are unchanged.
                let same = known.filter(|known| ***known == pod).cloned();
                self.readable.insert(uid, same.unwrap_or_else(|| Arc::new(pod)));
            }
            Err(error) => {
                let uid = uid_of(object);
                tracing::warn!(uid = uid.as_ref().map(PodUid::as_str), "failed to decode a pod of the API: {error}");
                let Some(uid) = uid else { return };
                match before.get(&uid) {
                    Some(pod) => drop(self.readable.insert(uid, pod.clone())),
                    None => drop(self.unreadable.insert(uid)),
                }
            }
        }
    }

    fn take_news(&mut self) -> Event {
        let News { is_whole, changed } = std::mem::take(&mut self.news);
        let source = Source::Api;
        if is_whole {
            return Event::Config { source, pods: self.all() };
        }
        let (present, removed): (Vec<_>, Vec<_>) = changed.into_iter().partition(|uid| self.readable.contains_key(uid));
        let pods = present.iter().filter_map(|uid| self.readable.get(uid).cloned()).collect();
        Event::ConfigChange { source, pods, removed }
    }

    fn all(&self) -> Vec<Arc<Pod>> {
        self.readable.values().cloned().collect()
    }
}

fn uid_of(object: &[u8]) -> Option<PodUid> {
    #[derive(Deserialize)]
    struct Object {
        metadata: Meta,
    }
    #[derive(Deserialize)]
    struct Meta {
        uid: String,
    }
    let object: Object = serde_json::from_slice(object).ok()?;
    Some(PodUid::new(object.metadata.uid))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn object(uid: &str, phase: &str) -> Bytes {
        let text = format!(r#"{{"metadata":{{"uid":"{uid}","managedFields":[{{}}]}},"status":{{"phase":"{phase}"}}}}"#);
        Bytes::from(text)
    }

    impl Pods {
        fn hear(&mut self, change: Delta) {
            self.apply(change, Timestamp::UNIX_EPOCH);
        }
    }

    fn shown(pods: &Pods) -> String {
        let phase = |pod: &Pod| pod.status.clone().unwrap_or_default().phase.unwrap_or_default();
        let lines = pods.all().iter().map(|pod| format!("{} {}", PodUid::of(pod), phase(pod))).collect::<Vec<_>>();
        lines.join(", ")
    }

    #[test]
    fn a_list_replaces_all_and_changes_go_on_from_it() {
        let mut pods = Pods::default();
        pods.hear(Delta::Replaced(vec![object("a", "Pending"), object("b", "Running")]));
        pods.hear(Delta::Applied(object("a", "Running")));
        pods.hear(Delta::Deleted(object("b", "Running")));
        assert_eq!(shown(&pods), "a Running");
        assert!(pods.all()[0].metadata.managed_fields.is_none());
        pods.hear(Delta::Replaced(vec![object("c", "Pending")]));
        assert_eq!(shown(&pods), "c Pending");
    }

    #[test]
    fn only_changed_pods_are_sent_after_a_list() {
        let mut pods = Pods::default();
        let mut told = |changes: Vec<Delta>| {
            changes.into_iter().for_each(|change| pods.hear(change));
            let uids =
                |pods: &[Arc<Pod>]| pods.iter().map(|pod| PodUid::of(pod).to_string()).collect::<Vec<_>>().join(" ");
            match pods.take_news() {
                Event::Config { pods, .. } => format!("all: {}", uids(&pods)),
                Event::ConfigChange { pods, removed, .. } => format!("changed: {}; removed: {removed:?}", uids(&pods)),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(told(vec![Delta::Replaced(vec![object("a", "Pending"), object("b", "Running")])]), "all: a b");
        assert_eq!(told(vec![Delta::Applied(object("a", "Running"))]), "changed: a; removed: []");
        let gone = vec![Delta::Applied(object("c", "Pending")), Delta::Deleted(object("b", "Running"))];
        assert_eq!(told(gone), "changed: c; removed: [b]");
        let again = vec![Delta::Deleted(object("a", "Running")), Delta::Replaced(vec![object("c", "Running")])];
        assert_eq!(told(again), "all: c");
    }

    #[test]
    fn a_pod_that_cannot_be_read_stays_as_it_was() {
        let odd = |uid: &str| Bytes::from(format!(r#"{{"metadata":{{"uid":"{uid}"}},"spec":{{"containers":7}}}}"#));
        let mut pods = Pods::default();
        pods.hear(Delta::Replaced(vec![object("a", "Running")]));
        pods.hear(Delta::Applied(odd("a")));
        assert_eq!(shown(&pods), "a Running");
        pods.hear(Delta::Replaced(vec![odd("a"), odd("b"), odd("c"), Bytes::from_static(b"{")]));
        assert_eq!(shown(&pods), "a Running");
        // Pods that were never decoded count as present until they are decoded or deleted.
        assert_eq!(pods.unreadable, BTreeSet::from([PodUid::new("b"), PodUid::new("c")]));
        pods.hear(Delta::Applied(object("b", "Pending")));
        pods.hear(Delta::Deleted(odd("c")));
        assert_eq!((shown(&pods).as_str(), pods.unreadable.len()), ("a Running, b Pending", 0));
    }

    #[test]
    fn relist_of_known_pods_changes_nothing_and_keeps_first_seen() {
        let mut pods = Pods::default();
        pods.apply(Delta::Applied(object("a", "Pending")), Timestamp::UNIX_EPOCH);
        let before = pods.all();
        pods.apply(Delta::Replaced(vec![object("a", "Pending")]), Timestamp::MAX);
        assert!(Arc::ptr_eq(&before[0], &pods.all()[0]));
        pods.apply(Delta::Applied(object("a", "Running")), Timestamp::MAX);
        assert_eq!((shown(&pods).as_str(), seen(&pods.all()[0])), ("a Running", Some("1970-01-01T00:00:00Z")));
    }
}
