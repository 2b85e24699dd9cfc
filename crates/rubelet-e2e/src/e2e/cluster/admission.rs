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
    ClusterCase {
        name: "pods of lower priority are preempted for a critical pod, which starts when they have ended",
        plane: Plane::Shared,
        run: preemption,
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

/// Upstream's `critical_pod_test`: a critical pod requests all that the node has.
fn preemption(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    // Ends slower than the critical pod could start, and with a failure.
    const SLOW: &str = "trap 'sleep 2; exit 3' TERM; while :; do sleep 1 & wait $!; done";
    cluster.start()?;
    let node = cluster.name.clone();
    let bound = |script: &str, resources: Value| {
        let mut spec = spec(&node, script);
        spec["nodeName"] = json!(node);
        spec["terminationGracePeriodSeconds"] = json!(20);
        spec["containers"][0]["resources"] = resources;
        spec
    };
    let small = json!({ "cpu": "100m", "memory": "100Mi" });
    cluster.apply_all(vec![
        pod("best-effort", &bound(OBEDIENT, json!({}))),
        pod("burstable", &bound(SLOW, json!({ "requests": small }))),
        pod("guaranteed", &bound(SLOW, json!({ "requests": small, "limits": small }))),
    ])?;
    for name in ["best-effort", "burstable", "guaranteed"] {
        cluster.wait_running(name, 60)?;
    }
    let status = cluster.plane().api().get(&format!("/api/v1/nodes/{node}"))?["status"].take();
    let all = json!({ "cpu": status["allocatable"]["cpu"], "memory": status["allocatable"]["memory"] });
    let mut critical = bound(OBEDIENT, json!({ "requests": all }));
    critical["priorityClassName"] = json!("system-cluster-critical");
    cluster.apply(pod("critical", &critical))?;
    let started = cluster.wait_running("critical", 60)?;
    for name in ["burstable", "guaranteed"] {
        cluster.wait(&format!("{name} is preempted"), 30, |cluster| {
            let pod = cluster.pod(name)?;
            let status = pod.status();
            ensure!(status["phase"] == "Failed" && status["reason"] == "Preempting", "{status}");
            let mut conditions = status["conditions"].as_array().into_iter().flatten();
            let disruption = conditions.find(|condition| condition["type"] == "DisruptionTarget");
            let words = "Pod was preempted by Kubelet to accommodate a critical pod.";
            let is_told = disruption.is_some_and(|it| it["reason"] == "TerminationByKubelet" && it["message"] == words);
            ensure!(is_told, "{status}");
            Ok(())
        })?;
        let ended = cluster.pod(name)?;
        let ended_at = ended.container("main")["state"]["terminated"]["finishedAt"].as_str().map(str::to_owned);
        let started_at = started.container("main")["state"]["running"]["startedAt"].as_str().map(str::to_owned);
        ensure!(
            ended_at.is_some() && ended_at <= started_at,
            "{name} ended {ended_at:?}, critical began {started_at:?}"
        );
    }
    cluster.wait_running("best-effort", 10)?;
    cluster.wait("the events are there", 30, |cluster| {
        let events = cluster.kubectl(&["get", "events", "--field-selector", "reason=Preempting", "-o", "name"])?;
        ensure!(events.lines().count() == 2, "{events}");
        Ok(())
    })?;
    let mut hopeless = critical.clone();
    hopeless["containers"][0]["resources"]["requests"]["cpu"] = json!("1000");
    cluster.apply(pod("hopeless", &hopeless))?;
    let words = "preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: ";
    wait_refused(cluster, "hopeless", "UnexpectedAdmissionError", words)?;
    cluster.kubectl(&["delete", "pod", "--all"])?;
    cluster.wait_none(60)
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
