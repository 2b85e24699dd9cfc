//! Admission of pods bound to this node without the scheduler, by its current Node object.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::{
    control_plane::{ControlPlaneOptions, TaintEviction},
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "pods are judged by the node's labels and resources as they are now",
        plane: Plane::Shared,
        run: live_node,
    },
    ClusterCase {
        name: "a taint that tells pods to leave keeps new ones out, one that keeps the scheduler out does not",
        // Otherwise the control plane may evict the pod before the node rejects it.
        plane: Plane::Own(|| ControlPlaneOptions {
            taint_eviction: TaintEviction::Off,
            ..ControlPlaneOptions::default()
        }),
        run: tainted_node,
    },
];

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
    // The pod may arrive before the label.
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

fn tainted_node(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let node = cluster.name.clone();
    let bound = |tolerations: Value| {
        let mut spec = spec(&node, OBEDIENT);
        spec["nodeName"] = json!(node);
        spec["tolerations"] = tolerations;
        spec["terminationGracePeriodSeconds"] = json!(1);
        spec
    };
    cluster.kubectl(&["taint", "node", &node, "old=yes:NoSchedule"])?;
    cluster.apply(pod("unmoved", &bound(json!([]))))?;
    cluster.wait_running("unmoved", 60)?;
    cluster.kubectl(&["taint", "node", &node, "closed=yes:NoExecute"])?;
    wait_taint_known(cluster)?;
    let other = json!([{ "key": "closed", "value": "no", "effect": "NoExecute" }]);
    let fitting = json!([{ "key": "closed", "operator": "Exists", "effect": "NoExecute" }]);
    cluster.apply_all(vec![
        pod("plain", &bound(json!([]))),
        pod("other", &bound(other)),
        pod("fitting", &bound(fitting)),
    ])?;
    for name in ["plain", "other"] {
        let words = "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
        wait_refused(cluster, name, "TaintToleration", words)?;
    }
    for name in ["fitting", "unmoved"] {
        cluster.wait_running(name, 60)?;
    }
    cluster.kubectl(&["delete", "pod", "--all"])?;
    cluster.wait_none(30)
}

/// Node and pods arrive by different watches: a pod may overtake a taint. Pods are
/// created until one is rejected.
fn wait_taint_known(cluster: &ClusterNode) -> anyhow::Result<()> {
    let mut number = 0;
    cluster.wait("the agent knows of the taint", 60, |cluster| {
        number += 1;
        let name = format!("scout{number}");
        let mut spec = spec(&cluster.name, "true");
        spec["nodeName"] = json!(cluster.name);
        spec["restartPolicy"] = json!("Never");
        cluster.apply(pod(&name, &spec))?;
        let phase = cluster.wait(&format!("{name} has ended"), 60, |cluster| {
            let seen = cluster.pod(&name)?;
            ensure!(["Succeeded", "Failed"].contains(&seen.phase()), "{}", seen.status());
            Ok(seen.phase().to_owned())
        })?;
        ensure!(phase == "Failed", "{name} was let in");
        Ok(())
    })
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
