//! Views of a snapshot for users and programs.
//!
//! Owns: the rows of `rubelet pods`, the data of `rubelet node`, the lists of `/pods` and `/runningpods`. Pure: a snapshot in, a value out.
//! Upstream: `printPod` of `pkg/printers` for the columns, `GetPods` and `GetRunningPods` for the lists.

use std::sync::Arc;

use jiff::Timestamp;
use rubelet_core::{
    event::Source,
    id::{PodUid, name_of, namespace_of},
    snapshot::{EvictionView, NodeView, PodView, Snapshot},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(crate) mod find;
pub(crate) mod status_column;

/// The data of `rubelet pods`: the node's problems and a row per pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PodTable {
    pub node: NodeView,
    /// By namespace, then name.
    pub rows: Vec<PodRow>,
}

/// Timestamps, not ages: the client computes ages when it prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PodRow {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    /// `1/2`
    pub ready: String,
    pub status: String,
    pub restarts: i32,
    pub last_restart: Option<Timestamp>,
    pub created: Timestamp,
    pub ip: Option<String>,
    /// `None`: the pod is in no source.
    pub source: Option<Source>,
}

/// The data of `rubelet node`. The node's fields are on the top level, so that a [`NodeView`] can be read from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeReport {
    #[serde(flatten)]
    pub node: NodeView,
    pub eviction: Arc<EvictionView>,
}

pub(crate) fn node_report(snapshot: &Snapshot) -> NodeReport {
    NodeReport { node: snapshot.node.clone(), eviction: snapshot.eviction.clone() }
}

pub(crate) fn pod_table(snapshot: &Snapshot) -> PodTable {
    let mut rows: Vec<PodRow> = snapshot.pods.iter().map(|(uid, view)| pod_row(uid, view)).collect();
    rows.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    PodTable { node: snapshot.node.clone(), rows }
}

fn pod_row(uid: &PodUid, view: &PodView) -> PodRow {
    let column = status_column::of(view);
    PodRow {
        uid: uid.clone(),
        namespace: namespace_of(&view.pod).to_owned(),
        name: name_of(&view.pod).to_owned(),
        ready: format!("{}/{}", column.ready, column.total),
        status: column.status,
        restarts: column.restarts,
        last_restart: column.last_restart,
        created: created(view),
        ip: view.status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).find(|ip| !ip.is_empty()),
        source: view.source,
    }
}

/// A static pod has no creation time of its own, so the most durable timestamp comes first.
fn created(view: &PodView) -> Timestamp {
    let asked = view.pod.metadata.creation_timestamp.as_ref();
    asked.or(view.status.start_time.as_ref()).map_or(view.lifecycle_since, |time| time.0)
}

/// The body of `/pods`: every desired pod, with its status.
pub(crate) fn pod_list(snapshot: &Snapshot) -> Value {
    let wanted = snapshot.pods.values().filter(|view| view.source.is_some());
    list(wanted.map(|view| {
        let mut metadata = view.pod.metadata.clone();
        metadata.managed_fields = None;
        json!({ "metadata": metadata, "spec": view.pod.spec, "status": *view.status })
    }))
}

/// The body of `/runningpods`: every pod with a running container, desired or not, with only the runtime's data.
pub(crate) fn running_pods(snapshot: &Snapshot) -> Value {
    let running = snapshot.pods.iter().filter(|(_, view)| !view.running.is_empty());
    list(running.map(|(uid, view)| {
        let containers: Vec<Value> = view
            .running
            .keys()
            .map(|container| json!({ "name": container, "image": image_of(view, container), "resources": {} }))
            .collect();
        json!({
            "metadata": { "name": name_of(&view.pod), "namespace": namespace_of(&view.pod), "uid": uid },
            "spec": { "containers": containers },
            "status": {},
        })
    }))
}

fn list(items: impl Iterator<Item = Value>) -> Value {
    json!({ "kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items.collect::<Vec<_>>() })
}

fn image_of<'a>(view: &'a PodView, container: &str) -> &'a str {
    let spec = view.pod.spec.iter();
    let mut asked = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let status = &view.status;
    let seen = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let mut seen = seen.into_iter().flatten().flatten();
    asked
        .find(|asked| asked.name == container)
        .and_then(|asked| asked.image.as_deref())
        .or_else(|| seen.find(|seen| seen.name == container).map(|seen| seen.image.as_str()))
        .unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests;
