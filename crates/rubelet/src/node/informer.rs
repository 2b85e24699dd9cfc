//! The Node object in the API.
//!
//! Owns: its watch, and the receivers of changes: the loop, for admission, and the reporter. Never: writes it.
//! Upstream: the node informer, `nodeHasSynced`, `GetCachedNode`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use rubelet_core::{event::Event, node_object::NodeObject};
use rubelet_kube::{
    port::{ApiServer, ObjectPath},
    reflector::{self, Delta, Selection},
};
use tokio::sync::{mpsc, watch};

use super::without_managed_fields;

/// A node changes rarely; otherwise the watch waits.
const CHANGES_BOUND: usize = 4;

/// The last state in the API.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum NodeWatchState {
    #[default]
    Unseen,
    /// The server responded, and the node has not existed yet.
    Absent,
    Seen(Arc<Node>),
    /// It existed and was deleted.
    Gone,
}

impl NodeWatchState {
    pub fn is_unseen(&self) -> bool {
        *self == NodeWatchState::Unseen
    }
}

/// Watches until the loop ends. The loop is notified before `node_states` changes.
pub async fn run(
    api: Arc<dyn ApiServer>,
    node_name: String,
    seed: u64,
    node_states: watch::Sender<NodeWatchState>,
    inbox: mpsc::Sender<Event>,
) {
    let selection =
        Selection { collection: ObjectPath::all("v1", "nodes"), fields: Some(format!("metadata.name={node_name}")) };
    let (sender, mut changes) = mpsc::channel(CHANGES_BOUND);
    let telling = async {
        while let Some(change) = changes.recv().await {
            let Some(state) = state_after(change, &node_states.borrow()) else { continue };
            if let NodeWatchState::Seen(node) = &state
                && inbox.send(Event::Node(NodeObject::of(node))).await.is_err()
            {
                return;
            }
            node_states.send_replace(state);
        }
    };
    tokio::select! {
        biased;
        // Neither is resumed after this: when one ends, both end.
        () = telling => {}
        () = reflector::follow(&*api, &selection, seed, &sender) => {}
    }
}

/// `None` if it cannot be decoded; the last state stays.
fn state_after(change: Delta, before: &NodeWatchState) -> Option<NodeWatchState> {
    let body = match change {
        Delta::Replaced(nodes) => nodes.into_iter().next(),
        Delta::Applied(node) => Some(node),
        Delta::Deleted(_) => None,
    };
    let Some(body) = body else {
        return Some(match before {
            NodeWatchState::Unseen | NodeWatchState::Absent => NodeWatchState::Absent,
            NodeWatchState::Seen(_) | NodeWatchState::Gone => NodeWatchState::Gone,
        });
    };
    match serde_json::from_slice(&body) {
        Ok(node) => Some(NodeWatchState::Seen(Arc::new(without_managed_fields(node)))),
        Err(error) => {
            tracing::warn!("failed to decode the Node object: {error}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use rubelet_kube::port::WatchEvent;
    use serde_json::json;
    use tokio::task::JoinSet;

    use super::*;
    use crate::fake_api::FakeApi;

    fn node(version: &str, zone: &str) -> serde_json::Value {
        json!({"metadata": {"name": "n1", "resourceVersion": version, "labels": {"zone": zone}}})
    }

    #[tokio::test(start_paused = true)]
    async fn node_watch_tells_deleted_from_never_created() {
        let body = |node: serde_json::Value| bytes::Bytes::from(node.to_string());
        let api = FakeApi::answering([Ok(json!({"metadata": {"resourceVersion": "1"}, "items": []}).to_string())])
            .watched([
                WatchEvent::Added(body(node("2", "a"))),
                WatchEvent::Modified(body(node("3", "b"))),
                WatchEvent::Deleted(body(node("4", "b"))),
            ]);
        let (node_states, mut seen) = watch::channel(NodeWatchState::Unseen);
        let (inbox, mut told) = mpsc::channel(8);
        let mut tasks = JoinSet::new();
        tasks.spawn(run(api, "n1".to_owned(), 1, node_states, inbox));
        for zone in ["a", "b"] {
            let Some(Event::Node(object)) = told.recv().await else { panic!("the loop hears of the node") };
            assert_eq!(object.labels["zone"], zone);
        }
        let gone = seen.wait_for(|state| *state == NodeWatchState::Gone);
        tokio::time::timeout(std::time::Duration::from_secs(60), gone).await.expect("it goes").unwrap();
        let empty = || Delta::Replaced(Vec::new());
        assert_eq!(state_after(empty(), &NodeWatchState::Unseen), Some(NodeWatchState::Absent));
        assert_eq!(state_after(empty(), &NodeWatchState::Gone), Some(NodeWatchState::Gone));
        assert_eq!(state_after(Delta::Applied(bytes::Bytes::from_static(b"{")), &NodeWatchState::Absent), None);
    }
}
