//! Pods' cgroups as the kernel has them, and pods the node does not take.

#![expect(clippy::needless_pass_by_value, reason = "literals are easiest to read where they are handed over")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::{
    e2e::{Case, node::Node},
    image::BUSYBOX,
};

pub const CASES: &[Case] = &[
    Case { name: "a pod's cgroup has upstream's name and limits, holds its containers, and goes with it", run: limits },
    Case { name: "pods this node cannot take fail with upstream's reason, and the others run", run: rejected },
];

fn pod(name: &str, spec: Value) -> Value {
    let mut manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{ "name": "main", "image": BUSYBOX, "command": ["sleep", "3600"] }],
        },
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        match field.as_str() {
            "resources" | "ports" => manifest["spec"]["containers"][0][field] = value.clone(),
            _ => manifest["spec"][field] = value.clone(),
        }
    }
    manifest
}

fn apply(node: &Node, name: &str, spec: Value) -> anyhow::Result<()> {
    node.drop_file(&format!("{name}.json"), serde_json::to_string(&pod(name, spec))?.as_bytes())
}

fn limits(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let resources =
        json!({ "requests": { "cpu": "250m", "memory": "32Mi" }, "limits": { "cpu": "500m", "memory": "64Mi" } });
    apply(node, "limited", json!({ "resources": resources }))?;
    apply(node, "free", json!({}))?;
    let limited = node.wait_running("limited", 60)?;
    let free = node.wait_running("free", 60)?;
    let root = PathBuf::from(node.bed.layout.cgroup_root().trim_start_matches('/')).join("kubepods");
    let burstable = root.join("burstable").join(format!("pod{}", limited.uid()));
    let best_effort = root.join("besteffort").join(format!("pod{}", free.uid()));
    let expected: &[(&Path, &str, &str)] = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        &[
            (&burstable, "cpu.weight", "10"),
            (&burstable, "cpu.max", "50000 100000"),
            (&burstable, "memory.max", "67108864"),
            (&best_effort, "cpu.weight", "1"),
        ]
    } else {
        &[
            (&burstable, "cpu.shares", "256"),
            (&burstable, "cpu.cfs_quota_us", "50000"),
            (&burstable, "memory.limit_in_bytes", "67108864"),
            (&best_effort, "cpu.shares", "2"),
        ]
    };
    for (cgroup, file, value) in expected {
        let read = places(&cgroup.join(file)).into_iter().find_map(|path| fs::read_to_string(path).ok());
        let read = read.with_context(|| format!("{} has no {file}", cgroup.display()))?;
        ensure!(read.trim() == *value, "{} {file}: {} instead of {value}", cgroup.display(), read.trim());
    }
    let children = places(&burstable).into_iter().flat_map(fs::read_dir).flatten().flatten();
    let containers = children.filter(|entry| entry.file_name().len() == 64).count();
    ensure!(containers > 0, "no container lives in {}", burstable.display());
    node.remove("limited")?;
    node.wait_gone("limited", 30)?;
    node.wait("its cgroup is gone", 30, |_| {
        ensure!(places(&burstable).is_empty(), "left: {:?}", places(&burstable));
        Ok(())
    })?;
    ensure!(!places(&best_effort).is_empty(), "the other pod's cgroup went, too");
    Ok(())
}

/// Where this is in the trees of the node, one or many.
fn places(path: &Path) -> Vec<PathBuf> {
    let trees = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let trees = std::iter::once(PathBuf::from("/sys/fs/cgroup")).chain(trees);
    trees.map(|tree| tree.join(path)).filter(|place| place.exists()).collect()
}

fn rejected(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let port = json!([{ "containerPort": 80, "hostPort": 48_080 }]);
    apply(node, "first", json!({ "ports": port }))?;
    node.wait_running("first", 60)?;
    let sysctls = json!({ "sysctls": [{ "name": "kernel.msgmax", "value": "1" }] });
    for (name, spec, reason) in [
        ("second", json!({ "ports": port }), "NodePorts"),
        ("elsewhere", json!({ "nodeSelector": { "zone": "elsewhere" } }), "NodeAffinity"),
        ("unsafe", json!({ "securityContext": sysctls }), "SysctlForbidden"),
    ] {
        apply(node, name, spec)?;
        let seen = node.wait(&format!("{name} is rejected"), 30, |node| {
            let pod = node.pod(name)?;
            ensure!(pod.phase() == "Failed", "its phase is {}", pod.phase());
            Ok(pod)
        })?;
        let status = seen.status();
        ensure!(status["reason"] == reason, "{name}: {status}");
        let message = status["message"].as_str().unwrap_or_default();
        ensure!(message.starts_with("Pod was rejected: "), "{name}: {status}");
    }
    node.wait_running("first", 1)?;
    node.remove("second")?;
    node.wait_gone("second", 30)
}
