//! CSI volumes that are not attached: the node has too many, or nobody attaches them.
//!
//! Owns: what their pods are told. No driver is needed: nothing is asked of it before its volume is attached.

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::AgentOptions;
use serde_json::{Value, json};

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane,
    csi::{claimed, spec_with, wait_bound, wait_event},
    pod,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a pod with one CSI volume more than the node can attach is rejected, for another node",
        plane: Plane::Shared,
        run: one_too_many,
    },
    ClusterCase {
        name: "a CSI volume without the attach/detach controller is not attached, and its pod says so",
        plane: Plane::Shared,
        run: without_controller,
    },
];

const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";

fn one_too_many(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let name = apply_volume(cluster)?;
    apply_pod(cluster)?;
    let attachment = cluster.wait("a VolumeAttachment exists", 60, |cluster| {
        let mut all = cluster.plane().api().list(ATTACHMENTS)?.into_iter();
        let own = all.find(|attachment| attachment["spec"]["source"]["persistentVolumeName"] == name.as_str());
        own.with_context(|| "no attachment".to_owned())
    })?;
    let attachment = attachment["metadata"]["name"].as_str().context("it has a name")?.to_owned();
    let error = json!({ "message": "the node has too many", "errorCode": 8 });
    let status = json!({ "status": { "attached": false, "attachError": error } }).to_string();
    let patch = ["--subresource=status", "--type=merge", "--patch", &status];
    cluster.kubectl(&[&["patch", "volumeattachment", &attachment][..], &patch[..]].concat())?;
    cluster.wait("the pod is rejected", 180, |cluster| {
        let status = cluster.object("v1", "pods/web")?["status"].clone();
        let message = "Pod was rejected: Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[data], \
                       unattached volumes=[data], failed to process volumes=[]: context deadline exceeded";
        ensure!(status["phase"] == "Failed" && status["reason"] == "VolumeAttachmentLimitExceeded", "{status}");
        ensure!(status["message"] == message, "{status}");
        Ok(())
    })?;
    let event = wait_event(cluster, "web", "VolumeAttachmentLimitExceeded", "volume attachment limit")?;
    ensure!(event["type"] == "Warning", "{event}");
    remove(cluster, &name)
}

fn without_controller(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let mut config = cluster.node.agent.own_cgroups()?;
    config.insert("enableControllerAttachDetach".to_owned(), json!(false));
    let options = AgentOptions { config, cluster: Some(cluster.membership()?), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let node = cluster.plane().api().get(&format!("/api/v1/nodes/{}", cluster.name))?;
    let annotation = &node["metadata"]["annotations"]["volumes.kubernetes.io/controller-managed-attach-detach"];
    ensure!(annotation.is_null(), "the controller would attach: {annotation}");
    let name = apply_volume(cluster)?;
    apply_pod(cluster)?;
    let message = format!(
        "AttachVolume.Attach failed for volume \"{name}\" : attaching volumes from the kubelet is not supported"
    );
    let event = wait_event(cluster, "web", "FailedAttachVolume", &message)?;
    ensure!(event["message"].as_str().is_some_and(|text| text.trim() == message), "{event}");
    ensure!(cluster.pod("web")?.phase() == "Pending", "the pod does not wait");
    remove(cluster, &name)
}

/// A bound claim on a volume of a driver that is not there. Returns the name of both.
fn apply_volume(cluster: &ClusterNode) -> anyhow::Result<String> {
    let name = format!("{}.limits.rubelet.test", cluster.name);
    let driver = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIDriver",
        "metadata": { "name": name },
        "spec": { "attachRequired": true, "nodeAllocatableUpdatePeriodSeconds": 10 },
    });
    let volume = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "8Mi" },
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": { "namespace": cluster.name, "name": "data" },
            "csi": { "driver": name, "volumeHandle": "one-too-many" },
        },
    });
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [driver, volume] }))?;
    cluster.apply(json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": "data" },
        "spec": {
            "storageClassName": "",
            "volumeName": name,
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "8Mi" } },
        },
    }))?;
    wait_bound(cluster, "data")?;
    Ok(name)
}

/// It names its node itself: the scheduler would keep it from a node without the driver.
fn apply_pod(cluster: &ClusterNode) -> anyhow::Result<()> {
    let mut spec: Value = spec_with(cluster, OBEDIENT, &[claimed("data", "data")]);
    spec["nodeName"] = json!(cluster.name);
    cluster.apply(pod("web", &spec))
}

fn remove(cluster: &ClusterNode, name: &str) -> anyhow::Result<()> {
    cluster.kubectl(&["delete", "pod/web", "pvc/data"])?;
    cluster.wait("nothing keeps it attached", 90, |cluster| {
        let all = cluster.plane().api().list(ATTACHMENTS)?;
        let left = all.iter().find(|attachment| attachment["spec"]["source"]["persistentVolumeName"] == name);
        ensure!(left.is_none(), "{left:?}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "persistentvolume,csidriver", name])?;
    Ok(())
}
