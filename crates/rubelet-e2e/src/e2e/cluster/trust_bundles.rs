//! Trust anchors of ClusterTrustBundles in volumes, where their gates are on.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::AgentOptions;
use serde_json::{Map, Value, json};

use crate::{
    control_plane::{ControlPlaneOptions, certificates::Authority},
    e2e::cluster::{ClusterCase, ClusterNode, Plane, pod, spec},
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a pod has the trust anchors of a bundle and of a signer, and sees what changes in them",
    plane: Plane::Own(with_bundles),
    run: anchors,
}];

fn with_bundles() -> ControlPlaneOptions {
    ControlPlaneOptions {
        feature_gates: Some("ClusterTrustBundle=true,ClusterTrustBundleProjection=true"),
        runtime_config: Some("certificates.k8s.io/v1beta1/clustertrustbundles=true"),
        ..ControlPlaneOptions::default()
    }
}

const SIGNER: &str = "example.com/signer";

/// Repeatedly writes how many certificates the container sees.
const WATCHER: &str = "trap 'exit 0' TERM; while :; do { echo NAMED=$(grep -c BEGIN /trust/named.pem); \
     echo SIGNED=$(grep -c BEGIN /trust/signed.pem); echo NONE=$(wc -c < /trust/none.pem); } > /notes/new; \
     mv /notes/new /notes/seen; sleep 1 & wait $!; done";

fn anchors(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let mut config = Map::new();
    let gates = json!({ "ClusterTrustBundle": true, "ClusterTrustBundleProjection": true });
    config.insert("featureGates".to_owned(), gates);
    let options = AgentOptions { cluster: Some(cluster.membership()?), config, ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    cluster.apply(pod("web", &watcher(&cluster.name)))?;
    let missing = "clustertrustbundle.certificates.k8s.io \"named\" not found";
    cluster.wait("it is told that the bundle is missing", 60, |cluster| {
        let events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
        let says = |event: &Value| event["message"].as_str().is_some_and(|message| message.contains(missing));
        ensure!(events.iter().any(says), "{events:?}");
        Ok(())
    })?;
    let dir = cluster.node.bed.layout.dir.join("anchors");
    let certificate = |name: &str| -> anyhow::Result<String> {
        let dir = dir.join(name);
        fs::create_dir_all(&dir)?;
        Ok(fs::read_to_string(Authority::open(&dir)?.certificate())?)
    };
    let (one, two) = (certificate("one")?, certificate("two")?);
    bundle(cluster, "named", None, &format!("{one}{two}"))?;
    bundle(cluster, "example.com:signer:a", Some("prod"), &one)?;
    bundle(cluster, "example.com:signer:b", Some("test"), &two)?;
    // An anchor of two bundles is shown once.
    bundle(cluster, "example.com:signer:d", Some("prod"), &one)?;
    let pod = cluster.wait_running("web", 120)?;
    expect(cluster, pod.uid(), &["NAMED=2", "SIGNED=1", "NONE=0"])?;
    bundle(cluster, "example.com:signer:c", Some("prod"), &two)?;
    bundle(cluster, "named", None, &one)?;
    expect(cluster, pod.uid(), &["NAMED=1", "SIGNED=2", "NONE=0"])?;
    cluster.plane().kubectl(&["delete", "clustertrustbundle", "example.com:signer:a", "example.com:signer:d"])?;
    expect(cluster, pod.uid(), &["NAMED=1", "SIGNED=1", "NONE=0"])?;
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(60)
}

fn watcher(node: &str) -> Value {
    let mut spec = spec(node, WATCHER);
    spec["nodeName"] = json!(node);
    spec["containers"][0]["volumeMounts"] =
        json!([{ "name": "notes", "mountPath": "/notes" }, { "name": "trust", "mountPath": "/trust" }]);
    let selector = json!({ "matchLabels": { "env": "prod" } });
    spec["volumes"] = json!([
        { "name": "notes", "emptyDir": {} },
        { "name": "trust", "projected": { "sources": [
            { "clusterTrustBundle": { "name": "named", "path": "named.pem" } },
            { "clusterTrustBundle": { "signerName": SIGNER, "labelSelector": selector, "path": "signed.pem" } },
            { "clusterTrustBundle": { "name": "none", "optional": true, "path": "none.pem" } },
        ] } },
    ]);
    spec
}

/// Bundles are cluster-scoped.
fn bundle(cluster: &ClusterNode, name: &str, env: Option<&str>, pem: &str) -> anyhow::Result<()> {
    let mut object = json!({
        "apiVersion": "certificates.k8s.io/v1beta1",
        "kind": "ClusterTrustBundle",
        "metadata": { "name": name, "labels": { "env": env.unwrap_or("none") } },
        "spec": { "trustBundle": pem },
    });
    if env.is_some() {
        object["spec"]["signerName"] = json!(SIGNER);
    }
    cluster.plane().apply(&object)
}

fn expect(cluster: &ClusterNode, uid: &str, lines: &[&str]) -> anyhow::Result<()> {
    // Upstream looks about once a minute.
    let limit_secs = if cluster.node.agent.is_upstream() { 180 } else { 15 };
    let notes: PathBuf = ["pods", uid, "volumes/kubernetes.io~empty-dir/notes/seen"].iter().collect();
    let notes = cluster.node.agent.root_dir().join(notes);
    cluster.wait("the container sees what it should", limit_secs, |_| {
        let seen = fs::read_to_string(&notes).with_context(|| notes.display().to_string())?;
        ensure!(seen.lines().eq(lines.iter().copied()), "{seen}");
        Ok(())
    })
}
