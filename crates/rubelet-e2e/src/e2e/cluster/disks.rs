//! Volumes that need no CSI driver: a block device of the node as it is, and those of a FlexVolume driver.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::command::{SHORT, command, output};
use serde_json::{Value, json};

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane,
    csi::{claimed, exec, local_claim, local_volume, spec_with},
    pod, spec,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a local block device is used by its pods, also by those that end while the agent is down, and is released",
        plane: Plane::Shared,
        run: block,
    },
    ClusterCase {
        name: "a FlexVolume driver that is installed later mounts volumes of pods and claims",
        plane: Plane::Shared,
        run: flex,
    },
];

/// Mounts memory, and writes there what it was told.
const FLEX_DRIVER: &str = r#"#!/bin/sh
ok() { echo '{"status": "Success"}'; exit 0; }
case "$1" in
init) echo '{"status": "Success", "capabilities": {"attach": false}}' ;;
mount) mount -t tmpfs -o size=64k flex "$2" && echo "$3" > "$2/told" && ok ;;
unmount) umount "$2" && ok ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
"#;

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

fn flex(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut volume = local_volume(cluster, "flex")?;
    let spec = volume["spec"].as_object_mut().context("a volume has a spec")?;
    spec.remove("local");
    spec.insert("flexVolume".to_owned(), json!({ "driver": "example.com/mem", "options": { "of": "the-volume" } }));
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [volume] }))?;
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": "login" },
        "type": "example.com/mem",
        "stringData": { "password": "open" },
    });
    let source = json!({ "driver": "example.com/mem", "secretRef": { "name": "login" } });
    let inline = json!({ "name": "data", "flexVolume": source });
    cluster.apply_all(vec![
        secret,
        local_claim(cluster, "flex"),
        pod("inline", &spec_with(cluster, OBEDIENT, &[inline])),
        pod("claimed", &spec_with(cluster, OBEDIENT, &[claimed("data", "local-flex")])),
    ])?;
    cluster.wait("the pod says that its driver is missing", 60, |cluster| {
        let fields = "--field-selector=involvedObject.name=inline";
        let events = cluster.kubectl(&["get", "events", fields, "-o", "json"])?;
        ensure!(events.contains("no volume plugin matched"), "{events}");
        Ok(())
    })?;
    let dir = cluster.node.agent.volume_plugins().join("example.com~mem");
    fs::create_dir_all(&dir)?;
    // It gets its name when it is complete.
    fs::write(dir.join(".mem"), FLEX_DRIVER)?;
    fs::set_permissions(dir.join(".mem"), fs::Permissions::from_mode(0o755))?;
    fs::rename(dir.join(".mem"), dir.join("mem"))?;
    for (name, told) in
        [("inline", r#""kubernetes.io/secret/password":"b3Blbg==""#), ("claimed", r#""of":"the-volume""#)]
    {
        cluster.wait_running(name, 150)?;
        let seen = exec(cluster, name, "cat /data/told")?;
        let pod = format!(r#""kubernetes.io/pod.name":"{name}""#);
        ensure!(seen.contains(told) && seen.contains(&pod), "{name} has {seen}");
    }
    cluster.node.agent.kill();
    cluster.kubectl(&["delete", "pod", "inline", "claimed", "--wait=false"])?;
    cluster.start()?;
    cluster.wait_none(90)?;
    let table = fs::read_to_string("/proc/self/mounts")?;
    ensure!(!table.contains("example.com~mem"), "mounts are left:\n{table}");
    cluster.kubectl(&["delete", "pvc/local-flex"])?;
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
