//! Pods of this node in the API.
//!
//! Owns: the node's set of pods as the API server last said it. It speaks for the first time after a complete list, so nothing
//! is taken for unwanted while the API server is away. Never: keeps what a pod does not need (its managed fields).
//! Upstream: `config/apiserver.go`.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    event::{Event, Source},
    id::PodUid,
};
use rubelet_kube::{
    port::{ApiServer, ObjectPath},
    reflector::{self, Change, Selection},
};
use serde::Deserialize;
use tokio::sync::{mpsc, watch};

use crate::node::follow::Sight;

/// Who follows is faster than any server; what is beyond this waits in the connection.
const CHANGES_CAPACITY: usize = 64;

/// Follows the pods bound to the node until the loop is gone.
///
/// Nothing is told before the node was seen, for pods are judged by it.
pub async fn run(
    api: Arc<dyn ApiServer>,
    node_name: String,
    seed: u64,
    mut sights: watch::Receiver<Sight>,
    inbox: mpsc::Sender<Event>,
) {
    let selection =
        Selection { collection: ObjectPath::all("v1", "pods"), fields: Some(format!("spec.nodeName={node_name}")) };
    let (sender, mut changes) = mpsc::channel(CHANGES_CAPACITY);
    let following = reflector::follow(api.as_ref(), &selection, seed, &sender);
    let telling = async {
        if sights.wait_for(|sight| !sight.is_unseen()).await.is_err() {
            return;
        }
        let mut pods = Pods::default();
        while let Some(change) = changes.recv().await {
            pods.apply(change);
            // What has already come is told together.
            while let Ok(change) = changes.try_recv() {
                pods.apply(change);
            }
            if inbox.send(Event::Config { source: Source::Api, pods: pods.all() }).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        // Neither is taken up again after this: one of them is over, and so is the source.
        () = telling => {}
        () = following => {}
    }
}

/// By UID: two pods of one name are two pods.
#[derive(Debug, Default)]
struct Pods(BTreeMap<PodUid, Arc<Pod>>);

impl Pods {
    fn apply(&mut self, change: Change) {
        match change {
            Change::Replaced(objects) => {
                let mut before = std::mem::take(&mut self.0);
                for object in &objects {
                    self.put(object, &mut before);
                }
            }
            Change::Applied(object) => self.put(&object, &mut BTreeMap::new()),
            Change::Deleted(object) => {
                if let Some(uid) = uid_of(&object) {
                    self.0.remove(&uid);
                }
            }
        }
    }

    /// A pod that cannot be read stays as it was: an odd field must not end what runs.
    fn put(&mut self, object: &[u8], before: &mut BTreeMap<PodUid, Arc<Pod>>) {
        match serde_json::from_slice::<Pod>(object) {
            Ok(mut pod) => {
                pod.metadata.managed_fields = None;
                self.0.insert(PodUid::of(&pod), Arc::new(pod));
            }
            Err(error) => {
                let uid = uid_of(object);
                tracing::warn!(
                    uid = uid.as_ref().map(PodUid::as_str),
                    "a pod of the API server cannot be read: {error}"
                );
                if let Some(uid) = uid
                    && let Some(pod) = before.remove(&uid)
                {
                    self.0.insert(uid, pod);
                }
            }
        }
    }

    fn all(&self) -> Vec<Arc<Pod>> {
        self.0.values().cloned().collect()
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

    fn shown(pods: &Pods) -> String {
        let phase = |pod: &Pod| pod.status.clone().unwrap_or_default().phase.unwrap_or_default();
        let lines = pods.all().iter().map(|pod| format!("{} {}", PodUid::of(pod), phase(pod))).collect::<Vec<_>>();
        lines.join(", ")
    }

    #[test]
    fn a_list_replaces_all_and_changes_go_on_from_it() {
        let mut pods = Pods::default();
        pods.apply(Change::Replaced(vec![object("a", "Pending"), object("b", "Running")]));
        pods.apply(Change::Applied(object("a", "Running")));
        pods.apply(Change::Deleted(object("b", "Running")));
        assert_eq!(shown(&pods), "a Running");
        assert!(pods.all()[0].metadata.managed_fields.is_none());
        pods.apply(Change::Replaced(vec![object("c", "Pending")]));
        assert_eq!(shown(&pods), "c Pending");
    }

    #[test]
    fn a_pod_that_cannot_be_read_stays_as_it_was() {
        let odd = |uid: &str| Bytes::from(format!(r#"{{"metadata":{{"uid":"{uid}"}},"spec":{{"containers":7}}}}"#));
        let mut pods = Pods::default();
        pods.apply(Change::Replaced(vec![object("a", "Running")]));
        pods.apply(Change::Applied(odd("a")));
        assert_eq!(shown(&pods), "a Running");
        pods.apply(Change::Replaced(vec![odd("a"), odd("b"), Bytes::from_static(b"{")]));
        assert_eq!(shown(&pods), "a Running");
    }
}
