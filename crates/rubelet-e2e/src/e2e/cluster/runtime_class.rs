//! Pods with a RuntimeClass: which handler runs them.

use std::fs;

use anyhow::ensure;
use serde_json::json;

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a pod runs by the handler of its RuntimeClass, and waits for a class that is missing",
    plane: Plane::Shared,
    run: handler,
}];

/// A second handler of the testbed's containerd.
const HANDLER: &str = "second";

fn handler(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    // RuntimeClasses are cluster-scoped.
    let name = format!("class-of-{}", cluster.name);
    let class = json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": { "name": name },
        "handler": HANDLER,
    });
    cluster.plane().apply(&class)?;
    let mut spec = spec(&cluster.name, OBEDIENT);
    spec["nodeName"] = json!(cluster.name);
    spec["runtimeClassName"] = json!(name);
    spec["terminationGracePeriodSeconds"] = json!(1);
    // The API server rejects pods of an unknown class; the class is deleted after the pod's creation.
    cluster.apply(pod("web", &spec))?;
    cluster.plane().kubectl(&["delete", "runtimeclass", &name])?;
    cluster.start()?;
    let missing = format!("Failed to create pod sandbox: runtimeclass.node.k8s.io \"{name}\" not found");
    cluster.wait("the pod says what it waits for", 30, |cluster| {
        let events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
        let of_sandbox: Vec<_> = events.iter().filter(|event| event["reason"] == "FailedCreatePodSandBox").collect();
        ensure!(of_sandbox.iter().any(|event| event["message"] == *missing), "{of_sandbox:?}");
        Ok(())
    })?;
    cluster.plane().apply(&class)?;
    cluster.wait_running("web", 30)?;
    let state = cluster.node.bed.layout.dir.join("state").join(HANDLER).join("k8s.io");
    let run_by_it = fs::read_dir(&state).map(Iterator::count).unwrap_or(0);
    ensure!(run_by_it == 2, "{run_by_it} containers in {}, instead of the sandbox's and the pod's", state.display());
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.plane().kubectl(&["delete", "runtimeclass", &name])?;
    cluster.wait_none(30)
}
