//! Pods' cgroups in the kernel, and pods the node rejects.

#![expect(clippy::needless_pass_by_value, reason = "literals are easiest to read where they are handed over")]

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    CgroupDriver,
    agent::AgentOptions,
    command::{SHORT, command, output},
    image::BUSYBOX,
};
use serde_json::{Value, json};

use crate::e2e::{Case, node::Node};

pub const CASES: &[Case] = &[
    Case {
        name: "a pod's cgroup has upstream's name and limits, holds its containers, and goes with it",
        run: cgroupfs,
    },
    Case {
        name: "all pods and reserved cgroups get the limits of node allocatable, and without its cgroup the agent does not start",
        run: node_allocatable_cgroupfs,
    },
    Case { name: "pods this node cannot take fail with upstream's reason, and the others run", run: rejected },
];

/// On machines that have it.
pub const WITH_SYSTEMD: &[Case] = &[
    Case {
        name: "a pod's cgroup is a slice of systemd's with upstream's name and limits, holds its containers, and goes with it",
        run: systemd,
    },
    Case {
        name: "all pods and reserved slices of systemd's get the limits of node allocatable, and without its slice the agent does not start",
        run: node_allocatable_systemd,
    },
];

/// All controllers in one hierarchy.
pub fn is_v2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// The cgroup of a container's first process; in version 1, in the memory hierarchy.
pub fn of_container(node: &Node, id: &str) -> anyhow::Result<PathBuf> {
    let tasks = node.bed.ctr(["tasks", "list"])?;
    let task = tasks.lines().find(|line| line.starts_with(id)).context("the container has no task")?;
    let pid = task.split_whitespace().nth(1).context("a task without a process")?;
    let controller = if is_v2() { "" } else { "memory" };
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let found = table.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(controller)?.strip_prefix(':'));
    Ok(PathBuf::from(found.with_context(|| format!("no cgroup of memory: {table}"))?))
}

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

fn cgroupfs(node: &mut Node) -> anyhow::Result<()> {
    let root = PathBuf::from(node.bed.layout.cgroup_root().trim_start_matches('/')).join("kubepods");
    let tiers = Tiers { burstable: root.join("burstable"), best_effort: root.join("besteffort") };
    limits(node, &tiers, |tier, uid| tier.join(format!("pod{uid}")), str::to_owned)
}

/// A slice's name contains those of its parents.
fn systemd(node: &mut Node) -> anyhow::Result<()> {
    node.bed.use_driver(CgroupDriver::Systemd)?;
    let root = node.bed.layout.slice_root();
    let tier = |name: &str| format!("{root}.slice/{root}-kubepods.slice/{root}-kubepods-{name}.slice").into();
    let tiers = Tiers { burstable: tier("burstable"), best_effort: tier("besteffort") };
    let pod = |tier: &Path, uid: &str| {
        let name = tier.file_stem().unwrap_or_default().to_string_lossy();
        tier.join(format!("{name}-pod{}.slice", uid.replace('-', "_")))
    };
    limits(node, &tiers, pod, |id| format!("cri-containerd-{id}.scope"))
}

/// The cgroups of the QoS classes.
struct Tiers {
    burstable: PathBuf,
    best_effort: PathBuf,
}

/// `of_pod` names a pod's cgroup below its class's, `of_container` a container's.
fn limits(
    node: &mut Node,
    tiers: &Tiers,
    of_pod: impl Fn(&Path, &str) -> PathBuf,
    of_container: impl Fn(&str) -> String,
) -> anyhow::Result<()> {
    let config = json!({ "podPidsLimit": 200 }).as_object().cloned().unwrap_or_default();
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    let resources =
        json!({ "requests": { "cpu": "250m", "memory": "32Mi" }, "limits": { "cpu": "500m", "memory": "64Mi" } });
    apply(node, "limited", json!({ "resources": resources }))?;
    apply(node, "free", json!({}))?;
    let limited = node.wait_running("limited", 60)?;
    let free = node.wait_running("free", 60)?;
    let burstable = of_pod(&tiers.burstable, limited.uid());
    let best_effort = of_pod(&tiers.best_effort, free.uid());
    let id = limited.container("main")["containerID"].as_str().unwrap_or_default().to_owned();
    let container = burstable.join(of_container(id.trim_start_matches("containerd://")));
    let expected: &[(&Path, &str, &str)] = if is_v2() {
        &[
            (&burstable, "cpu.weight", "10"),
            (&burstable, "cpu.max", "50000 100000"),
            (&burstable, "memory.max", "67108864"),
            (&burstable, "pids.max", "200"),
            (&container, "memory.max", "67108864"),
            (&container, "cpu.max", "50000 100000"),
            (&tiers.burstable, "cpu.weight", "10"),
            (&best_effort, "cpu.weight", "1"),
            (&best_effort, "memory.max", "max"),
        ]
    } else {
        &[
            (&burstable, "cpu.shares", "256"),
            (&burstable, "cpu.cfs_quota_us", "50000"),
            (&burstable, "memory.limit_in_bytes", "67108864"),
            (&burstable, "pids.max", "200"),
            (&container, "memory.limit_in_bytes", "67108864"),
            (&container, "cpu.cfs_quota_us", "50000"),
            (&tiers.burstable, "cpu.shares", "256"),
            (&best_effort, "cpu.shares", "2"),
        ]
    };
    for (cgroup, file, value) in expected {
        let read = places(&cgroup.join(file)).into_iter().find_map(|path| fs::read_to_string(path).ok());
        let read = read.with_context(|| format!("{} has no {file}", cgroup.display()))?;
        ensure!(read.trim() == *value, "{} {file}: {} instead of {value}", cgroup.display(), read.trim());
    }
    node.remove("limited")?;
    node.wait_gone("limited", 30)?;
    node.wait("its cgroup is gone", 30, |_| {
        ensure!(places(&burstable).is_empty(), "left: {:?}", places(&burstable));
        Ok(())
    })?;
    ensure!(!places(&best_effort).is_empty(), "the other pod's cgroup went, too");
    Ok(())
}

fn node_allocatable_cgroupfs(node: &mut Node) -> anyhow::Result<()> {
    let root = node.bed.layout.cgroup_root();
    let name = |last: &str| format!("{root}/{last}");
    node_allocatable(node, name, make_cgroup)
}

fn node_allocatable_systemd(node: &mut Node) -> anyhow::Result<()> {
    node.bed.use_driver(CgroupDriver::Systemd)?;
    let root = node.bed.layout.slice_root();
    let name = |last: &str| format!("/{root}.slice/{root}-{last}.slice");
    node_allocatable(node, name, |path| {
        let slice = path.rsplit('/').next().unwrap_or_default();
        output(&mut command("systemctl", ["start", slice]), SHORT)?;
        // Systemd enables only the controllers that it needs, and never that of huge pages.
        make_cgroup(path)
    })
}

/// Upstream's `node_container_manager_test`. `name` is of a cgroup below that of the test.
fn node_allocatable(
    node: &mut Node,
    name: impl Fn(&str) -> String,
    make: impl Fn(&str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (system, kube, kubepods) = (name("system"), name("kube"), name("kubepods"));
    let config = json!({
        "enforceNodeAllocatable": ["pods", "system-reserved", "kube-reserved-compressible"],
        "systemReserved": { "cpu": "100m", "memory": "64Mi", "pid": "1000" },
        "kubeReserved": { "cpu": "200m", "memory": "32Mi" },
        "systemReservedCgroup": system,
        "kubeReservedCgroup": kube,
    });
    let mut all = node.agent.own_cgroups()?;
    all.extend(config.as_object().cloned().unwrap_or_default());
    node.reconfigure(&AgentOptions { config: all, ..AgentOptions::default() })?;
    make(&system)?;
    let error = format!("{:#}", node.agent.start().err().context("it starts without the cgroup")?);
    let expected = format!("Failed to enforce Kube Reserved Compressible Cgroup Limits on {kube:?}: ");
    let log = fs::read_to_string(node.agent.log())?.replace('\\', "");
    ensure!(error.contains(&expected) || log.contains(&expected), "{error}\n{log}");

    make(&kube)?;
    node.agent.start()?;
    let number = |path: &str| -> anyhow::Result<u64> { Ok(fs::read_to_string(path)?.trim().parse()?) };
    let most_pids = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let total = meminfo.split_whitespace().nth(1).context("MemTotal")?.parse::<u64>()? << 10;
    let (memory, pids) = ((total - (96 << 20)).to_string(), (most_pids - 1000).to_string());
    let expected = if is_v2() {
        [
            (&system, "cpu.weight", "4"),
            (&system, "memory.max", "67108864"),
            (&system, "pids.max", "1000"),
            (&kube, "cpu.weight", "8"),
            (&kube, "memory.max", "max"),
            (&kubepods, "memory.max", memory.as_str()),
            (&kubepods, "pids.max", pids.as_str()),
        ]
    } else {
        [
            (&system, "cpu.shares", "102"),
            (&system, "memory.limit_in_bytes", "67108864"),
            (&system, "pids.max", "1000"),
            (&kube, "cpu.shares", "204"),
            (&kube, "memory.limit_in_bytes", "9223372036854771712"),
            (&kubepods, "memory.limit_in_bytes", memory.as_str()),
            (&kubepods, "pids.max", pids.as_str()),
        ]
    };
    node.wait("every limit is set", 30, |_| {
        for (cgroup, file, value) in expected {
            let path = Path::new(cgroup.trim_start_matches('/')).join(file);
            let read = places(&path).into_iter().find_map(|path| fs::read_to_string(path).ok());
            let read = read.with_context(|| format!("{cgroup} has no {file}"))?;
            ensure!(read.trim() == value, "{cgroup} {file}: {} instead of {value}", read.trim());
        }
        Ok(())
    })
}

/// In every hierarchy, with all controllers.
fn make_cgroup(path: &str) -> anyhow::Result<()> {
    for tree in places(Path::new("cgroup.procs")) {
        let mut dir = tree.parent().context("a tree")?.to_owned();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            for controller in ["+cpu", "+cpuset", "+memory", "+pids", "+hugetlb"] {
                // Only version 2 has the file, and a node may lack a controller.
                let _ = fs::OpenOptions::new()
                    .write(true)
                    .open(dir.join("cgroup.subtree_control"))
                    .and_then(|mut file| io::Write::write_all(&mut file, controller.as_bytes()));
            }
            dir.push(part);
            fs::create_dir_all(&dir)?;
        }
    }
    Ok(())
}

/// The path in each hierarchy of the node.
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
