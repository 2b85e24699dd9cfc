//! The size of CSI volumes: growth while in use.

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane,
    csi::{claim, claimed, driver::Driver, events, spec_with},
    pod,
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a CSI volume grows under its running pod, and the claim, the pod and events tell so",
    plane: Plane::Shared,
    run: growth,
}];

fn growth(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let spec = spec_with(cluster, OBEDIENT, &[claimed("data", "data")]);
    cluster.apply_all(vec![claim(&driver, "data", "ReadWriteOnce"), pod("web", &spec)])?;
    let before = cluster.wait_running("web", 120)?.identity("main")?;
    let bigger = json!({ "spec": { "resources": { "requests": { "storage": "16Mi" } } } }).to_string();
    cluster.kubectl(&["patch", "pvc", "data", "--patch", &bigger])?;
    let claim = cluster.wait("the claim's status has the new size", 120, |cluster| {
        let claim = cluster.object("v1", "persistentvolumeclaims/data")?;
        let status = &claim["status"];
        ensure!(status["capacity"]["storage"] == "16Mi", "{status}");
        let conditions = status["conditions"].as_array();
        ensure!(conditions.is_none_or(Vec::is_empty) && status["allocatedResourceStatuses"].is_null(), "{status}");
        Ok(claim)
    })?;
    let volume = claim["spec"]["volumeName"].as_str().context("the claim names its volume")?;
    let message = format!("MountVolume.NodeExpandVolume succeeded for volume \"{volume}\" {}", cluster.name);
    for object in ["web", "data"] {
        cluster.wait(&format!("an event of {object} tells so"), 20, |cluster| {
            let found = events(cluster, object)?;
            let event = found.iter().find(|event| event["reason"] == "FileSystemResizeSuccessful");
            let event = event.with_context(|| format!("events: {found:?}"))?;
            ensure!(event["message"] == message.as_str() && event["type"] == "Normal", "{event}");
            Ok(())
        })?;
    }
    let after = cluster.pod("web")?.identity("main")?;
    ensure!(after == before, "the pod was disturbed: {before:?}, then {after:?}");
    cluster.kubectl(&["delete", "pod/web", "pvc/data"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}
