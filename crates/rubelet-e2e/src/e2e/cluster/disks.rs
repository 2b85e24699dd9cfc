//! Volumes that need no CSI driver: a block device of the node as it is.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::ensure;
use rubelet_testbed::command::{SHORT, command, output};
use serde_json::{Value, json};

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane,
    csi::{claimed, exec, local_claim, local_volume},
    pod, spec,
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a local block device is used by its pods, also by those that end while the agent is down, and is released",
    plane: Plane::Shared,
    run: block,
}];

/// A file as a block device, until this is dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn over(file: &Path) -> anyhow::Result<Self> {
        File::create(file)?.set_len(8 << 20)?;
        let made = output(command("losetup", ["--find", "--show"]).arg(file), SHORT)?;
        Ok(LoopDevice(PathBuf::from(made.trim())))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = output(command("losetup", ["--detach"]).arg(&self.0), SHORT);
    }
}

fn block(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut volume = local_volume(cluster, "raw")?;
    let device = LoopDevice::over(&cluster.node.bed.layout.dir.join("local/raw-disk"))?;
    volume["spec"]["local"]["path"] = json!(device.0);
    volume["spec"]["volumeMode"] = json!("Block");
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [volume] }))?;
    let mut claim = local_claim(cluster, "raw");
    claim["spec"]["volumeMode"] = json!("Block");
    cluster.apply(claim)?;
    let write = "echo through-the-device | dd of=/dev/raw bs=64 seek=1 conv=notrunc,sync && sync";
    for (name, script) in
        [("writer", format!("[ -b /dev/raw ] && {write} && {OBEDIENT}")), ("reader", OBEDIENT.to_owned())]
    {
        cluster.apply(pod(name, &user(cluster, &script)))?;
        cluster.wait_running(name, 120)?;
    }
    cluster.wait("what was written is on the device", 10, |cluster| {
        let read = exec(cluster, "reader", "dd if=/dev/raw bs=64 skip=1 count=1 2>/dev/null | tr -d '\\0'")?;
        ensure!(read == "through-the-device\n", "the reader reads {read:?}");
        Ok(())
    })?;
    let events = cluster.kubectl(&["get", "events", "--field-selector=involvedObject.name=writer", "-o", "json"])?;
    ensure!(events.contains("SuccessfulMountVolume") && events.contains("volumeMapPath"), "{events}");
    let (bound, links) = places(cluster)?;
    ensure!((bound.len(), links) == (2, 2), "bound: {bound:?}, links: {links}");
    cluster.node.agent.kill();
    cluster.kubectl(&["delete", "pod", "writer", "--wait=false"])?;
    cluster.start()?;
    cluster.wait("the writer has ended", 90, |cluster| {
        let (bound, links) = places(cluster)?;
        ensure!((bound.len(), links) == (1, 1), "bound: {bound:?}, links: {links}");
        Ok(())
    })?;
    exec(cluster, "reader", "dd if=/dev/raw of=/dev/null bs=64 count=1")?;
    cluster.kubectl(&["delete", "pod", "reader"])?;
    cluster.wait("nothing of the volume is left", 60, |cluster| {
        let (bound, links) = places(cluster)?;
        let dir = cluster.node.agent.root_dir().join("plugins/kubernetes.io~local-volume/volumeDevices");
        let left = fs::read_dir(&dir)?.count();
        ensure!(bound.is_empty() && links == 0 && left == 0, "bound: {bound:?}, links: {links}, directories: {left}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pvc/local-raw"])?;
    let selector = format!("--selector=of={}", cluster.name);
    cluster.kubectl(&["delete", "pv", &selector])?;
    Ok(())
}

fn user(cluster: &ClusterNode, script: &str) -> Value {
    let mut spec = spec(&cluster.name, script);
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["containers"][0]["volumeDevices"] = json!([{ "name": "raw", "devicePath": "/dev/raw" }]);
    spec["volumes"] = json!([claimed("raw", "local-raw")]);
    spec
}

/// What is bound for pods, and how many pods have links.
fn places(cluster: &ClusterNode) -> anyhow::Result<(Vec<String>, usize)> {
    let root = cluster.node.agent.root_dir();
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let own = format!("{}/plugins/kubernetes.io~local-volume/volumeDevices/", root.display());
    let bound = table.lines().filter_map(|line| line.split(' ').nth(4).filter(|place| place.starts_with(&own)));
    let mut links = 0;
    for pod in fs::read_dir(root.join("pods"))? {
        let dir = pod?.path().join("volumeDevices/kubernetes.io~local-volume");
        links += usize::from(dir.is_dir() && fs::read_dir(dir)?.next().is_some());
    }
    Ok((bound.map(str::to_owned).collect(), links))
}
