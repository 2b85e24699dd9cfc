//! The number of the agent's status writes.

use std::{fs, thread, time::Duration};

use anyhow::ensure;
use rubelet_testbed::{agent::Program, image::BUSYBOX};
use serde_json::{Value, json};

use crate::{
    control_plane::upstream_kubelet,
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a takeover from upstream's kubelet writes no status",
        plane: Plane::Shared,
        run: takeover_writes_none,
    },
    ClusterCase {
        name: "the stop of a pod takes at most three status writes",
        plane: Plane::Shared,
        run: stop_writes_three,
    },
];

/// Upstream's additional writes: generation, terminated containers, phase.
const WRITES_PER_STOP: usize = 3;

fn stop_writes_three(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let names = ["one", "two", "three"];
    cluster.apply_all(names.iter().map(|name| pod(name, &spec(&cluster.name, OBEDIENT))).collect())?;
    for name in names {
        cluster.wait_running(name, 120)?;
    }
    cluster.wait_still(Duration::from_secs(12), 120, |cluster| Ok(status_writes(cluster)?.len()))?;
    let before = status_writes(cluster)?.len();
    cluster.kubectl(&["delete", "pod", "--all", "--timeout=60s"])?;
    let written = status_writes(cluster)?.split_off(before);
    for name in names {
        let own: Vec<_> = written.iter().filter(|line| line.starts_with(&format!("{name:?}:"))).collect();
        ensure!((1..=WRITES_PER_STOP).contains(&own.len()), "{} statuses of {name} were written: {own:#?}", own.len());
    }
    Ok(())
}

fn takeover_writes_none(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let tested = cluster.node.agent.program().clone();
    cluster.node.agent.become_program(&Program::Upstream(upstream_kubelet()?));
    cluster.start()?;
    let pods = varied_pods(cluster);
    let count = pods.len();
    cluster.apply(
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": "1" } }),
    )?;
    cluster.apply_all(pods)?;
    cluster.wait("all pods run or are done", 120, |cluster| {
        let pods = cluster.pods()?;
        let settled = pods.iter().filter(|pod| pod.is_ready() || pod.phase() == "Succeeded").count();
        ensure!(settled == count, "{settled} of {count} pods are settled");
        Ok(())
    })?;
    cluster.wait_still(Duration::from_secs(12), 120, |cluster| Ok(status_writes(cluster)?.len()))?;
    let before = status_writes(cluster)?.len();
    cluster.node.agent.stop();
    cluster.node.agent.become_program(&tested);
    cluster.start()?;
    // Every probe ran, and every pod was synced and reconciled.
    thread::sleep(Duration::from_secs(20));
    let written = unexpected_writes(cluster, before)?;
    ensure!(written.is_empty(), "{} statuses of {count} pods were written:\n{}", written.len(), written.join("\n"));
    Ok(())
}

/// One pod for each special case of a status.
fn varied_pods(cluster: &ClusterNode) -> Vec<Value> {
    let probe = json!({ "exec": { "command": ["true"] }, "periodSeconds": 2 });
    let sidecar =
        json!({ "name": "sidecar", "image": BUSYBOX, "restartPolicy": "Always", "command": ["sh", "-c", OBEDIENT] });
    let main: [(&str, Value); 8] = [
        ("plain", json!({})),
        ("limits", json!({ "resources": { "limits": { "cpu": "50m", "memory": "100M" } } })),
        (
            "odd-limits",
            json!({ "resources": {
            "limits": { "cpu": "0.25", "memory": "50e6" }, "requests": { "cpu": "1m", "memory": "0.01Gi" },
        } }),
        ),
        ("requests", json!({ "resources": { "requests": { "cpu": "0.02", "memory": "16Mi" } } })),
        ("probes", json!({ "readinessProbe": probe, "livenessProbe": probe, "startupProbe": probe })),
        ("user", json!({ "securityContext": { "runAsUser": 1000, "runAsGroup": 2000 } })),
        (
            "volumes",
            json!({ "volumeMounts": [
            { "name": "scratch", "mountPath": "/scratch" },
            { "name": "settings", "mountPath": "/settings", "readOnly": true },
            { "name": "settings", "mountPath": "/part", "subPath": "a", "readOnly": true, "recursiveReadOnly": "IfPossible" },
            { "name": "labels", "mountPath": "/labels" },
        ] }),
        ),
        ("hook", json!({ "lifecycle": { "postStart": { "exec": { "command": ["true"] } } } })),
    ];
    let pod_wide: [(&str, Value); 5] = [
        ("done", json!({ "restartPolicy": "Never" })),
        ("init", json!({ "initContainers": [{ "name": "first", "image": BUSYBOX, "command": ["true"] }, sidecar] })),
        ("host-network", json!({ "hostNetwork": true })),
        ("host-namespaces", json!({ "hostPID": true, "hostIPC": true })),
        ("groups", json!({ "securityContext": { "supplementalGroups": [10, 20], "fsGroup": 30 } })),
    ];
    let spec_of = |name: &str| spec(&cluster.name, if name == "done" { "exit 0" } else { OBEDIENT });
    let of_main = main.into_iter().map(|(name, fields)| {
        let mut spec = spec_of(name);
        extend(&mut spec["containers"][0], fields);
        if name == "volumes" {
            spec["volumes"] = json!([
                { "name": "scratch", "emptyDir": {} },
                { "name": "settings", "configMap": { "name": "settings" } },
                { "name": "labels", "downwardAPI": { "items": [{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }] } },
            ]);
        }
        pod(name, &spec)
    });
    let of_pod = pod_wide.into_iter().map(|(name, fields)| {
        let mut spec = spec_of(name);
        extend(&mut spec, fields);
        pod(name, &spec)
    });
    of_main.chain(of_pod).collect()
}

fn extend(object: &mut Value, fields: Value) {
    let (Value::Object(object), Value::Object(fields)) = (object, fields) else { unreachable!("both are objects") };
    object.extend(fields);
}

/// Writes after the first `before`, by an agent without changes to report. When upstream's kubelet restarts,
/// it takes the network's readiness back from a pod that ended, and writes a memory limit of `100M` as bytes; that is not
/// counted.
pub(super) fn unexpected_writes(cluster: &ClusterNode, before: usize) -> anyhow::Result<Vec<String>> {
    let mut written = status_writes(cluster)?.split_off(before);
    if cluster.node.agent.is_upstream() {
        written
            .retain(|line| !["\"done\":", "\"limits\":", "\"odd-limits\":"].iter().any(|name| line.starts_with(name)));
    }
    Ok(written)
}

/// The node's writes of pod status, from the audit log.
pub(super) fn status_writes(cluster: &ClusterNode) -> anyhow::Result<Vec<String>> {
    let user = format!("system:node:{}", cluster.name);
    let log = fs::read_to_string(cluster.plane().audit_log())?;
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_write = |entry: &Value| {
        entry["user"]["username"] == user
            && entry["objectRef"]["resource"] == "pods"
            && entry["objectRef"]["subresource"] == "status"
            && entry["verb"] != "get"
    };
    let body = |entry: Value| format!("{}: {}", entry["objectRef"]["name"], entry["requestObject"]);
    Ok(entries.filter(is_write).map(body).collect())
}
