//! Builders for views, and the lists made from them.

use std::{collections::BTreeMap, sync::Arc};

use insta::assert_snapshot;
use jiff::Timestamp;
use rubelet_core::{
    event::Source,
    id::PodUid,
    snapshot::{NodeView, PodView, Snapshot},
};
use serde_json::{Value, json};

use super::{pod_list, running_pods};

pub(crate) fn at(moment: &str) -> Timestamp {
    moment.parse().unwrap()
}

/// A pod from a file with these containers and this status, whose running containers are those of its status.
pub(crate) fn view(namespace: &str, name: &str, containers: &[&str], init: &[&str], status: Value) -> PodView {
    let named = |names: &[&str]| -> Vec<Value> {
        names.iter().map(|name| json!({ "name": name, "image": format!("{name}:1") })).collect()
    };
    let pod = json!({
        "metadata": { "namespace": namespace, "name": name, "managedFields": [{ "manager": "x" }] },
        "spec": { "containers": named(containers), "initContainers": named(init) },
    });
    PodView {
        source: Some(Source::File),
        mirror_uid: None,
        pod: Arc::new(serde_json::from_value(pod).unwrap()),
        status: Arc::new(serde_json::from_value(status).unwrap()),
        lifecycle: "Syncing".to_owned(),
        lifecycle_since: at("2026-11-15T18:00:00Z"),
        running: BTreeMap::new(),
        counts: Default::default(),
        facts: None,
        needs: Arc::default(),
        volumes: BTreeMap::new(),
        steps: Vec::new(),
    }
}

pub(crate) fn snapshot<const N: usize>(node: &str, pods: [(&str, PodView); N]) -> Snapshot {
    Snapshot {
        node: NodeView { name: node.to_owned(), runtime: "containerd 2.4.2".to_owned(), ..NodeView::default() },
        changed: pods.iter().map(|(uid, _)| PodUid::new(*uid)).collect(),
        pods: pods.into_iter().map(|(uid, view)| (PodUid::new(uid), Arc::new(view))).collect(),
        eviction: Arc::default(),
    }
}

#[test]
fn pod_lists_hold_desired_and_running_pods() {
    let mut web = view("default", "web-n1", &["a", "b"], &[], json!({ "phase": "Running" }));
    web.running = [("a".to_owned(), "c1".to_owned())].into();
    let mut stray = view("default", "stray", &[], &[], json!({}));
    stray.source = None;
    stray.running = [("x".to_owned(), "c2".to_owned())].into();
    let quiet = view("default", "quiet-n1", &["a"], &[], json!({}));
    let snapshot = snapshot("n1", [("u1", web), ("u2", stray), ("u3", quiet)]);
    assert_snapshot!(pod_list(&snapshot), @r#"{"apiVersion":"v1","items":[{"metadata":{"name":"web-n1","namespace":"default"},"spec":{"containers":[{"image":"a:1","name":"a"},{"image":"b:1","name":"b"}],"initContainers":[]},"status":{"phase":"Running"}},{"metadata":{"name":"quiet-n1","namespace":"default"},"spec":{"containers":[{"image":"a:1","name":"a"}],"initContainers":[]},"status":{}}],"kind":"PodList","metadata":{}}"#);
    assert_snapshot!(running_pods(&snapshot), @r#"{"apiVersion":"v1","items":[{"metadata":{"name":"web-n1","namespace":"default","uid":"u1"},"spec":{"containers":[{"image":"a:1","name":"a","resources":{}}]},"status":{}},{"metadata":{"name":"stray","namespace":"default","uid":"u2"},"spec":{"containers":[{"image":"","name":"x","resources":{}}]},"status":{}}],"kind":"PodList","metadata":{}}"#);
}
