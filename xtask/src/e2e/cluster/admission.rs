//! Pods that were sent to this node by hand: the node says itself whether it takes them, by its Node object as it is now.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "pods are judged by the node's labels and resources as they are now",
    plane: Plane::Shared,
    run: live_node,
}];

fn live_node(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let node = cluster.name.clone();
    let bound = |selector: Value, requests: Value| {
        let mut spec = spec(&node, OBEDIENT);
        spec["nodeName"] = json!(node);
        spec["nodeSelector"] = selector;
        spec["terminationGracePeriodSeconds"] = json!(1);
        spec["containers"][0]["resources"] = json!({ "requests": requests, "limits": requests });
        spec
    };
    // The pod may well come before the label does.
    cluster.kubectl(&["label", "node", &node, "zone=b"])?;
    cluster.apply_all(vec![
        pod("here", &bound(json!({ "zone": "b" }), json!({}))),
        pod("elsewhere", &bound(json!({ "zone": "c" }), json!({}))),
    ])?;
    cluster.wait_running("here", 60)?;
    wait_refused(cluster, "elsewhere", "NodeAffinity", "node(s) didn't match Pod's node affinity/selector")?;

    let has = json!({ "status": { "capacity": { "example.com/gpu": "1" } } }).to_string();
    cluster.kubectl(&["patch", "node", &node, "--subresource=status", "--patch", &has])?;
    cluster.wait("the resource may be used", 30, |cluster| {
        let status = cluster.plane().api().get(&format!("/api/v1/nodes/{node}"))?["status"].take();
        ensure!(status["allocatable"]["example.com/gpu"] == "1", "{}", status["allocatable"]);
        Ok(())
    })?;
    cluster.apply_all(vec![
        pod("two", &bound(json!({}), json!({ "example.com/gpu": "2" }))),
        pod("one", &bound(json!({}), json!({ "example.com/gpu": "1" }))),
        pod("unknown", &bound(json!({}), json!({ "example.com/license": "1" }))),
        pod("pages", &bound(json!({}), json!({ "memory": "8Mi", "hugepages-1Gi": "1024Gi" }))),
    ])?;
    wait_refused(cluster, "two", "OutOfexample.com/gpu", "requested: 2, used: 0, capacity: 1")?;
    wait_refused(cluster, "pages", "OutOfhugepages-1Gi", "requested: 1099511627776, used: 0")?;
    for name in ["one", "unknown"] {
        cluster.wait_running(name, 60)?;
    }
    cluster.kubectl(&["delete", "pod", "--all"])?;
    cluster.wait_none(30)
}

fn wait_refused(cluster: &ClusterNode, name: &str, reason: &str, words: &str) -> anyhow::Result<()> {
    cluster.wait(&format!("{name} is refused"), 30, |cluster| {
        let pod = cluster.pod(name)?;
        let status = pod.status();
        ensure!(status["phase"] == "Failed" && status["reason"] == reason, "{status}");
        ensure!(status["message"].as_str().is_some_and(|message| message.contains(words)), "{status}");
        Ok(())
    })
}
