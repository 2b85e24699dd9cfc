//! Fifty pods at once, and no leftovers.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{bail, ensure};
use rubelet_testbed::{agent::AgentOptions, image::BUSYBOX, sweep};
use serde_json::json;

use crate::e2e::{Case, node::Node};

pub const CASES: &[Case] = &[
    Case { name: "fifty pods dropped at once all run; removed at once they leave nothing", run: fifty },
    Case { name: "a root directory behind a symbolic link works to the end of a pod", run: linked_root },
];

const PODS: usize = 50;

fn fifty(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let names: Vec<String> = (0..PODS).map(|number| format!("many{number}")).collect();
    for name in &names {
        drop_pod_with_volumes(node, name)?;
    }
    node.wait("all of them run", 300, |node| {
        let pods = node.pods()?;
        let running = pods.iter().filter(|pod| pod.check_running().is_ok()).count();
        ensure!(running == PODS, "{running} of {} run", pods.len());
        Ok(())
    })?;
    let ids: BTreeSet<String> = node.bed.ctr(["containers", "list", "-q"])?.lines().map(str::to_owned).collect();
    ensure!(ids.len() == 2 * PODS, "the runtime has {} containers and sandboxes", ids.len());
    for name in &names {
        node.remove(name)?;
    }
    node.wait("the agent shows none", 120, |node| {
        let pods = node.pods()?;
        ensure!(pods.is_empty(), "{} are left", pods.len());
        Ok(())
    })?;
    // Dead sandboxes are collected once a minute, as upstream does.
    node.wait("nothing is left of them", 150, |node| check_nothing_left(node, &ids))
}

fn linked_root(node: &mut Node) -> anyhow::Result<()> {
    let real = node.bed.layout.dir.join("real/kubelet");
    fs::create_dir_all(&real)?;
    let link = node.bed.layout.dir.join("link");
    std::os::unix::fs::symlink(node.bed.layout.dir.join("real"), &link)?;
    node.reconfigure(&AgentOptions { root_dir: Some(link.join("kubelet")), ..AgentOptions::default() })?;
    node.agent.start()?;
    drop_pod_with_volumes(node, "web")?;
    let pod = node.wait_running("web", 60)?;
    ensure!(real.join("pods").join(pod.uid()).is_dir(), "the pod's directory is not where the link leads");
    let ids: BTreeSet<String> = node.bed.ctr(["containers", "list", "-q"])?.lines().map(str::to_owned).collect();
    node.remove("web")?;
    node.wait_gone("web", 60)?;
    node.wait("nothing is left of it", 150, |node| check_nothing_left(node, &ids))
}

/// With a volume on disk and one in memory, so that a mount and a directory could be left.
fn drop_pod_with_volumes(node: &Node, name: &str) -> anyhow::Result<()> {
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": BUSYBOX,
                "command": ["sh", "-c", "echo x > /disk/x && echo x > /memory/x && exec sleep 3600"],
                "volumeMounts": [{ "name": "disk", "mountPath": "/disk" }, { "name": "memory", "mountPath": "/memory" }],
            }],
            "volumes": [
                { "name": "disk", "emptyDir": {} },
                { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
            ],
        },
    });
    node.drop_file(&format!("{name}.json"), serde_json::to_string(&manifest)?.as_bytes())
}

/// No sandbox, container, cgroup, mount, veth, directory or log of any pod.
fn check_nothing_left(node: &Node, ids: &BTreeSet<String>) -> anyhow::Result<()> {
    let dir = &node.bed.layout.dir;
    let containers = node.bed.ctr(["containers", "list", "-q"])?;
    ensure!(containers.trim().is_empty(), "{} containers or sandboxes", containers.lines().count());
    let mut mounts: Vec<PathBuf> = sweep::mounts_below(dir)?;
    // With both agents the root directory is a mount of its own if it was not shared.
    mounts.retain(|point| !point.ends_with("kubelet"));
    ensure!(mounts.is_empty(), "{} mounts, as {}", mounts.len(), mounts[0].display());
    let ports = fs::read_dir(Path::new("/sys/class/net").join(node.bed.bridge()?).join("brif"))?.count();
    ensure!(ports == 0, "{ports} veths");
    if let Some(cgroup) = cgroup_of(Path::new("/sys/fs/cgroup"), ids, 0) {
        bail!("cgroup {}", cgroup.display());
    }
    for place in [node.agent.root_dir().join("pods"), node.agent.pod_logs_dir()] {
        let left: Vec<_> = fs::read_dir(&place)?.flatten().map(|entry| entry.path()).collect();
        ensure!(left.is_empty(), "{} directories, as {}", left.len(), left[0].display());
    }
    for link in fs::read_dir("/var/log/containers").into_iter().flatten().flatten() {
        let leads_to_us = fs::read_link(link.path()).is_ok_and(|target| target.starts_with(dir));
        ensure!(!leads_to_us, "link {}", link.path().display());
    }
    Ok(())
}

fn cgroup_of(dir: &Path, ids: &BTreeSet<String>, depth: u32) -> Option<PathBuf> {
    let entries = fs::read_dir(dir).ok()?.flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if entry.file_name().to_str().is_some_and(|name| ids.contains(name)) {
            return Some(entry.path());
        }
        if depth < 4
            && let Some(found) = cgroup_of(&entry.path(), ids, depth + 1)
        {
            return Some(found);
        }
    }
    None
}
