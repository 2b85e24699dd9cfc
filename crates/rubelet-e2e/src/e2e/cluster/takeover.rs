//! The agent is replaced under running pods: from upstream's kubelet to Rubelet, and back.

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{bail, ensure};
use rubelet_testbed::{agent::Program, image::BUSYBOX};
use serde_json::{Value, json};

use crate::{
    control_plane::upstream_kubelet,
    e2e::{
        cluster::{
            ClusterCase, ClusterNode, OBEDIENT, Plane,
            recorder::{self, Seen},
            spec,
        },
        node::Identity,
    },
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a node goes from upstream's kubelet to this agent and back, and no pod notices",
    plane: Plane::Shared,
    run: takeover,
}];

const PLAIN: usize = 9;
const WITH_VOLUMES: usize = 10;
/// Their UIDs depend on their manifests: a changed one would be another pod.
const STATIC: usize = 2;
/// Long enough for every probe to run and every pod to be synced.
const SETTLE: Duration = Duration::from_secs(20);

fn takeover(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let upstream = Program::Upstream(upstream_kubelet()?);
    let tested = cluster.node.agent.program().clone();
    cluster.node.agent.become_program(&upstream);
    cluster.start()?;
    make_pods(cluster)?;
    let before = cluster.wait("all pods are ready", 240, |cluster| {
        let identities = identities(cluster)?;
        ensure!(identities.len() == PLAIN + WITH_VOLUMES + STATIC, "{} pods are ready", identities.len());
        Ok(identities)
    })?;
    thread::sleep(SETTLE);
    for (program, name) in [(&tested, "the agent under test"), (&upstream, "upstream's kubelet")] {
        let record = cluster.record()?;
        cluster.node.agent.stop();
        cluster.node.agent.become_program(program);
        cluster.start()?;
        thread::sleep(SETTLE);
        let history = record.finish()?;
        recorder::check_order(&history)?;
        check_calm(&history).map_err(|err| err.context(format!("after the start of {name}")))?;
        let after = identities(cluster)?;
        for (pod, before) in &before {
            ensure!(after.get(pod) == Some(before), "{pod}: was {before:?}, under {name} {:?}", after.get(pod));
        }
    }
    Ok(())
}

/// Ready pods and their attributes that must not change.
fn identities(cluster: &ClusterNode) -> anyhow::Result<BTreeMap<String, Identity>> {
    let mut found = BTreeMap::new();
    for pod in cluster.pods()? {
        if !pod.is_ready() {
            bail!("{} is not ready: {}", pod.name(), pod.status());
        }
        let mut identity = pod.identity("main")?;
        if pod.is_mirror() {
            // Upstream's kubelet loses the start time of a static pod.
            identity.pod_start.clear();
        }
        found.insert(pod.name().to_owned(), identity);
    }
    Ok(found)
}

fn check_calm(history: &[Seen]) -> anyhow::Result<()> {
    for seen in history {
        // A static pod has no stored status with the last probe result: both agents show such a pod as not
        // ready until it was probed again.
        let is_probed_again = seen.pod.is_mirror() && seen.pod.has_startup_probe();
        ensure!(seen.pod.is_ready() || is_probed_again, "{} was not ready: {}", seen.pod.name(), seen.pod.status());
        ensure!(!seen.pod.is_being_deleted(), "{} was deleted", seen.pod.name());
    }
    Ok(())
}

fn make_pods(cluster: &ClusterNode) -> anyhow::Result<()> {
    let mut plain = spec(&cluster.name, OBEDIENT);
    plain["initContainers"] = json!([{ "name": "first", "image": BUSYBOX, "command": ["true"] }]);
    cluster.apply_all(vec![
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": "1" } }),
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "password" }, "stringData": { "b": "2" } }),
        deployment("plain", PLAIN, &plain),
        deployment("volumes", WITH_VOLUMES, &with_volumes(&cluster.name)),
    ])?;
    for (name, mut spec) in [("static", spec(&cluster.name, OBEDIENT)), ("control-plane", control_plane())] {
        spec.as_object_mut().expect("a spec is an object").remove("nodeSelector");
        let metadata = json!({ "name": name, "namespace": cluster.name, "labels": { "tier": name } });
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
        cluster.node.drop_file(&format!("{name}.json"), pod.to_string().as_bytes())?;
    }
    Ok(())
}

/// With kubeadm's settings for control plane components.
fn control_plane() -> Value {
    let probe =
        json!({ "exec": { "command": ["true"] }, "failureThreshold": 8, "periodSeconds": 10, "timeoutSeconds": 15 });
    json!({
        "hostNetwork": true,
        "priority": 2_000_001_000,
        "priorityClassName": "system-node-critical",
        "securityContext": { "seccompProfile": { "type": "RuntimeDefault" } },
        "containers": [{
            "name": "main",
            "image": BUSYBOX,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", OBEDIENT],
            "env": [{ "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.hostIP" } } }],
            "resources": { "requests": { "cpu": "10m", "memory": "10Mi" } },
            "livenessProbe": probe,
            "startupProbe": probe,
            "volumeMounts": [{ "name": "certs", "mountPath": "/etc/certs", "readOnly": true }],
        }],
        "volumes": [{ "name": "certs", "hostPath": { "path": "/etc/ssl", "type": "DirectoryOrCreate" } }],
    })
}

fn with_volumes(node: &str) -> Value {
    let mut spec = spec(node, OBEDIENT);
    let probe = json!({ "exec": { "command": ["test", "-e", "/settings/a"] }, "periodSeconds": 2 });
    let container = &mut spec["containers"][0];
    container["volumeMounts"] = json!([
        { "name": "scratch", "mountPath": "/scratch" },
        { "name": "memory", "mountPath": "/memory" },
        { "name": "settings", "mountPath": "/settings" },
        { "name": "password", "mountPath": "/password" },
    ]);
    container["readinessProbe"] = probe.clone();
    container["livenessProbe"] = probe.clone();
    container["startupProbe"] = probe;
    container["env"] = json!([
        { "name": "NODE", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } },
        { "name": "A", "valueFrom": { "configMapKeyRef": { "name": "settings", "key": "a" } } },
    ]);
    spec["volumes"] = json!([
        { "name": "scratch", "emptyDir": {} },
        { "name": "memory", "emptyDir": { "medium": "Memory" } },
        { "name": "settings", "configMap": { "name": "settings" } },
        { "name": "password", "secret": { "secretName": "password" } },
    ]);
    spec
}

fn deployment(name: &str, replicas: usize, spec: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": { "app": name } },
            "template": { "metadata": { "labels": { "app": name } }, "spec": spec },
        },
    })
}
