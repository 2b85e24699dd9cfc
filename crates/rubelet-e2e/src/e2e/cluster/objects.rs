//! Config maps, secrets, tokens and services, as containers see them: in their environment and in their volumes.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
    node::PodSeen,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a pod waits for its config map and secret, and sees what changes in them",
        plane: Plane::Shared,
        run: waits_and_sees,
    },
    ClusterCase {
        name: "a pod whose volume wants a CSI driver waits and says which is missing",
        plane: Plane::Shared,
        run: names_the_driver,
    },
];

/// Repeatedly writes what the container sees.
const WATCHER: &str = "trap 'exit 0' TERM; while :; do { env; echo FILE=$(cat /files/a); echo LABEL=$(cat /files/label); \
     echo TOKEN=$(head -c 3 /files/token); echo SECRET=$(cat /secret/b); } > /notes/new; mv /notes/new /notes/seen; sleep 1 & wait $!; done";

fn waits_and_sees(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    // Upstream refreshes volumes about once a minute; Rubelet by a watch.
    let soon_secs = if cluster.node.agent.is_upstream() { 150 } else { 8 };
    let mut object = pod("web", &watcher(&cluster.name));
    object["metadata"]["labels"] = json!({ "version": "one" });
    cluster.apply(object)?;
    cluster.wait("it is told that the config map is missing", 30, |cluster| {
        said(cluster, "configmap \"settings\" not found")
    })?;
    cluster.apply(settings("1"))?;
    cluster.wait("it is told that the secret is missing", soon_secs, |cluster| {
        said(cluster, "secret \"password\" not found")
    })?;
    cluster.apply(json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "password" }, "stringData": { "b": "hush" },
    }))?;
    let pod = cluster.wait_running("web", soon_secs + 20)?;
    expect(
        cluster,
        &pod,
        20,
        &["A=1", "P_b=hush", "FILE=1", "SECRET=hush", "LABEL=one", "TOKEN=eyJ", "KUBERNETES_SERVICE_PORT=443"],
    )?;
    cluster.apply(settings("2"))?;
    cluster.kubectl(&["label", "--overwrite", "pod/web", "version=two"])?;
    expect(cluster, &pod, soon_secs, &["A=1", "FILE=2", "LABEL=two"])?;
    ensure!(cluster.pod("web")?.container("main")["restartCount"] == 0, "{}", cluster.pod("web")?.status());
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)?;
    let left = fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!left.contains(pod.uid()), "something of the pod is still mounted: {left}");
    Ok(())
}

fn names_the_driver(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    // CSIDrivers are cluster-scoped.
    let driver = format!("{}.csi.example", cluster.name);
    let mut spec = spec(&cluster.name, OBEDIENT);
    spec["nodeName"] = json!(cluster.name);
    spec["volumes"] = json!([{ "name": "data", "csi": { "driver": driver } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
    cluster.apply(pod("web", &spec))?;
    let unregistered = format!("driver name {driver} not found in the list of registered CSI drivers");
    cluster.wait("it names the driver", 30, |cluster| said(cluster, &unregistered))?;
    if !cluster.node.agent.is_upstream() {
        // Upstream reads the object only once the driver has registered.
        cluster.wait("and what of it the API has", 10, |cluster| said(cluster, "(no CSIDriver object)"))?;
        cluster.plane().apply(&json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": { "name": driver },
            "spec": { "volumeLifecycleModes": ["Persistent"] },
        }))?;
        cluster.wait("also when that comes later", 10, |cluster| said(cluster, "(only supports [\"Persistent\"])"))?;
        cluster.plane().kubectl(&["delete", "csidriver", &driver])?;
    }
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

fn settings(value: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": value } })
}

fn watcher(node: &str) -> Value {
    let mut spec = spec(node, WATCHER);
    let container = &mut spec["containers"][0];
    container["env"] = json!([{ "name": "A", "valueFrom": { "configMapKeyRef": { "name": "settings", "key": "a" } } }]);
    container["envFrom"] = json!([{ "prefix": "P_", "secretRef": { "name": "password" } }]);
    container["volumeMounts"] = json!([
        { "name": "notes", "mountPath": "/notes" },
        { "name": "files", "mountPath": "/files" },
        { "name": "secret", "mountPath": "/secret" },
    ]);
    spec["volumes"] = json!([
        { "name": "notes", "emptyDir": {} },
        { "name": "secret", "secret": { "secretName": "password", "optional": true } },
        { "name": "files", "projected": { "sources": [
            { "configMap": { "name": "settings" } },
            { "serviceAccountToken": { "path": "token", "expirationSeconds": 600 } },
            { "downwardAPI": { "items": [
                { "path": "label", "fieldRef": { "fieldPath": "metadata.labels['version']" } },
            ] } },
        ] } },
    ]);
    spec
}

/// An event of the pod's, or the reason why its container waits.
fn said(cluster: &ClusterNode, words: &str) -> anyhow::Result<()> {
    let events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
    let in_event = events.iter().any(|event| event["message"].as_str().is_some_and(|message| message.contains(words)));
    let pod = cluster.pod("web")?;
    let in_status = pod.container("main").to_string().contains(&words.replace('"', "\\\""));
    ensure!(in_event || in_status, "nobody says {words}: {}", pod.status());
    Ok(())
}

fn expect(cluster: &ClusterNode, pod: &PodSeen, limit_secs: u64, lines: &[&str]) -> anyhow::Result<()> {
    let notes: PathBuf = ["pods", pod.uid(), "volumes/kubernetes.io~empty-dir/notes/seen"].iter().collect();
    let notes = cluster.node.agent.root_dir().join(notes);
    cluster.wait("the container sees what it should", limit_secs, |_| {
        let seen = fs::read_to_string(&notes).with_context(|| notes.display().to_string())?;
        for line in lines {
            ensure!(seen.lines().any(|found| found == *line), "no {line} in {seen}");
        }
        Ok(())
    })
}
