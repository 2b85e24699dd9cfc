//! The size of CSI volumes: growth while in use, and the figures of the agent.

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::AgentOptions;
use serde_json::{Value, json};

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane,
    csi::{claim, claimed, driver::Driver, spec_with, wait_event},
    metrics::proxied,
    pod,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a CSI volume grows under its running pod, and the claim, the pod and events tell so",
        plane: Plane::Shared,
        run: growth,
    },
    ClusterCase {
        name: "the metrics and the summary have the figures of a CSI volume with its claim's name",
        plane: Plane::Shared,
        run: figures,
    },
];

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
        let event = wait_event(cluster, object, "FileSystemResizeSuccessful", &message)?;
        ensure!(event["message"] == message.as_str() && event["type"] == "Normal", "{event}");
    }
    let after = cluster.pod("web")?.identity("main")?;
    ensure!(after == before, "the pod was disturbed: {before:?}, then {after:?}");
    cluster.kubectl(&["delete", "pod/web", "pvc/data"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}

fn figures(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let mut config = cluster.node.agent.own_cgroups()?;
    config.insert("volumeStatsAggPeriod".to_owned(), json!("5s"));
    let options = AgentOptions { config, cluster: Some(cluster.membership()?), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let mut spec = spec_with(cluster, OBEDIENT, &[claimed("store", "data")]);
    let mut raw = claim(&driver, "raw", "ReadWriteOnce");
    raw["spec"]["volumeMode"] = json!("Block");
    spec["containers"][0]["volumeDevices"] = json!([{ "name": "device", "devicePath": "/dev/raw" }]);
    spec["volumes"] = json!([claimed("store", "data"), claimed("device", "raw")]);
    cluster.apply_all(vec![claim(&driver, "data", "ReadWriteOnce"), raw, pod("web", &spec)])?;
    cluster.wait_running("web", 120)?;
    let of_device = wait_figures(cluster, "device", "raw")?;
    ensure!(of_device["capacityBytes"].as_u64().is_some(), "{of_device}");
    let summary = wait_figures(cluster, "store", "data")?;
    let positive = |name: &str| summary[name].as_u64().filter(|figure| *figure > 0).with_context(|| name.to_owned());
    // The driver's volumes are directories: it tells the figures of the file system below.
    let (capacity, inodes) = (positive("capacityBytes")?, positive("inodes")?);
    ensure!(positive("availableBytes")? < capacity && positive("inodesFree")? < inodes, "{summary}");
    let names = ["capacity_bytes", "available_bytes", "used_bytes", "inodes", "inodes_free", "inodes_used"];
    cluster.wait("the metrics have them, too", 30, |cluster| {
        let page = proxied(cluster, "metrics")?;
        for name in names {
            let labels = format!("{{namespace=\"{}\",persistentvolumeclaim=\"data\"}} ", cluster.name);
            let start = format!("kubelet_volume_stats_{name}{labels}");
            let line =
                page.lines().find_map(|line| line.strip_prefix(&start)).with_context(|| format!("no {start}"))?;
            let figure: f64 = line.trim().parse()?;
            ensure!(figure > 0.0, "{start} is {figure}");
        }
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pod/web", "pvc/data", "pvc/raw"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}

/// What the summary has of a volume of the pod, with its claim.
fn wait_figures(cluster: &ClusterNode, volume: &str, claim: &str) -> anyhow::Result<Value> {
    let found = cluster.wait(&format!("the summary names claim {claim}"), 100, |cluster| {
        let summary: Value = serde_json::from_str(&proxied(cluster, "stats/summary")?)?;
        let mut pods = summary["pods"].as_array().into_iter().flatten();
        let pod = pods.find(|pod| pod["podRef"]["name"] == "web").context("the pod is not there")?;
        let mut volumes = pod["volume"].as_array().into_iter().flatten();
        let found = volumes.find(|found| found["name"] == volume);
        found.cloned().with_context(|| format!("volumes are {}", pod["volume"]))
    })?;
    ensure!(found["pvcRef"] == json!({ "name": claim, "namespace": cluster.name }), "{found}");
    Ok(found)
}
