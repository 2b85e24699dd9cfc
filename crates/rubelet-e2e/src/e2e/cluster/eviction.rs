//! Eviction for want of memory, disk space, inodes and processes, and for local storage limits.
//!
//! Upstream: `test/e2e_node/eviction_test.go`, whose cases these follow on a node of their own size: the memory of all pods
//! is limited, and the agent's directory is a small file system.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::AgentOptions,
    clock,
    command::{SHORT, command, output},
};
use serde_json::{Map, Value, json};

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
    eviction::{MIB, hog_script, kubepods, memory_bytes, secs_until_logged, working_set},
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "the pod that uses up the memory of all pods is evicted, and the others stay",
        plane: Plane::Shared,
        run: memory,
    },
    ClusterCase {
        name: "the pod that fills the disk, or uses up its inodes, is evicted, and what it held is freed",
        plane: Plane::Shared,
        run: disk,
    },
    ClusterCase { name: "the pod that uses up the processes is evicted", plane: Plane::Shared, run: processes },
    ClusterCase {
        name: "pods that exceed limits on local storage are evicted",
        plane: Plane::Shared,
        run: local_storage,
    },
];

/// Runs until SIGTERM. Upstream calls an evicted pod Succeeded if its containers exit with 0.
const WAIT: &str = "trap 'exit 3' TERM; while :; do sleep 1 & wait $!; done";

impl ClusterNode {
    /// Starts the agent with these settings, its own cgroups, and perhaps another directory.
    fn start_with(&mut self, fields: &Value, root_dir: Option<PathBuf>) -> anyhow::Result<()> {
        let mut config: Map<String, Value> = self.node.agent.own_cgroups()?;
        config.extend(fields.as_object().cloned().unwrap_or_default());
        let period = clock::patient(Duration::from_secs(20));
        config.insert("evictionPressureTransitionPeriod".to_owned(), json!(format!("{}s", period.as_secs())));
        let cluster = Some(self.membership()?);
        self.node.reconfigure(&AgentOptions { cluster, config, root_dir, ..AgentOptions::default() })?;
        self.start()
    }

    fn run_pods(&self, pods: &[(&str, Value)]) -> anyhow::Result<()> {
        self.apply_all(pods.iter().map(|(name, spec)| pod(name, spec)).collect())?;
        for (name, _) in pods {
            self.wait_running(name, 60)?;
        }
        Ok(())
    }

    /// Waits until the pod is evicted and its status is final; returns its message.
    fn wait_evicted(&self, name: &str) -> anyhow::Result<String> {
        self.wait(&format!("{name} is evicted"), 90, |cluster| {
            let seen = cluster.pod(name)?;
            let status = seen.status();
            ensure!(status["phase"] == "Failed" && status["reason"] == "Evicted", "{status}");
            Ok(status["message"].as_str().unwrap_or_default().to_owned())
        })
    }

    /// The event of an eviction is written once.
    fn eviction_event(&self, name: &str) -> anyhow::Result<Value> {
        let path = format!("/api/v1/namespaces/{}/events", self.name);
        let events = self.plane().api().list(&path)?.into_iter();
        let mut found = events.filter(|it| it["reason"] == "Evicted" && it["involvedObject"]["name"] == name);
        let event = found.next().context("no event Evicted")?;
        ensure!(event["count"] == 1 && found.next().is_none(), "more than one event: {event}");
        Ok(event)
    }

    fn wait_pressure(&self, kind: &str, expected: &str) -> anyhow::Result<()> {
        self.wait(&format!("{kind} is {expected}"), 90, |cluster| {
            let condition = cluster.node_condition(kind)?;
            ensure!(condition["status"] == expected, "{condition}");
            Ok(())
        })
    }

    fn check_untouched(&self, pods: &[&str]) -> anyhow::Result<()> {
        for name in pods {
            let seen = self.pod(name)?;
            seen.check_running()?;
            ensure!(seen.container_statuses().iter().all(|status| status["restartCount"] == 0), "{}", seen.status());
        }
        Ok(())
    }
}

/// All pods together have 600 MiB; the hog takes 540 of them, and 100 are to stay free.
fn memory(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let all = memory_bytes()?;
    cluster.start_with(
        &json!({
            "evictionHard": { "memory.available": "100Mi" },
            "systemReserved": { "memory": (all - 600 * MIB).to_string() },
        }),
        None,
    )?;
    let name = cluster.name.clone();
    let mut modest = spec(&name, OBEDIENT);
    modest["containers"][0]["resources"] = json!({ "requests": { "memory": "64Mi" } });
    cluster.run_pods(&[("modest", modest), ("other", spec(&name, OBEDIENT))])?;
    cluster.apply(pod("hog", &spec(&name, &hog_script(540))))?;
    let cgroup = kubepods(&cluster.node)?;
    clock::wait("the memory of all pods runs low", Duration::from_secs(60), Duration::from_millis(10), || {
        let used = working_set(&cgroup)?;
        ensure!(used > 500 * MIB, "{} MiB are used", used / MIB);
        Ok(())
    })?;
    let secs = secs_until_logged(&cluster.node, "Evicted")?;
    println!("    evicted {secs:.2} s after the threshold was crossed");
    cluster.wait("the API has the event", 60, |cluster| cluster.eviction_event("hog"))?;

    let message = cluster.wait_evicted("hog")?;
    ensure!(
        message.starts_with("The node was low on resource: memory. Threshold quantity: 100Mi, available: "),
        "{message}"
    );
    ensure!(
        message.contains("Container main was using ") && message.ends_with("has larger consumption of memory. "),
        "{message}"
    );
    let event = cluster.eviction_event("hog")?;
    let annotations = &event["metadata"]["annotations"];
    ensure!(annotations["starved_resource"] == "memory" && annotations["offending_containers"] == "main", "{event}");
    let seen = cluster.pod("hog")?;
    let conditions = seen.status()["conditions"].as_array().cloned().unwrap_or_default();
    let target = conditions.iter().find(|it| it["type"] == "DisruptionTarget").context("no DisruptionTarget")?;
    ensure!(target["status"] == "True" && target["reason"] == "TerminationByKubelet", "{target}");
    ensure!(seen.container("main")["state"]["terminated"]["reason"] != "OOMKilled", "{}", seen.status());

    cluster.wait_pressure("MemoryPressure", "True")?;
    let mut bound = spec(&name, OBEDIENT);
    bound["nodeName"] = json!(name);
    cluster.apply(pod("late", &bound))?;
    let refusal = cluster.wait_evicted("late")?;
    ensure!(refusal == "Pod was rejected: The node had condition: [MemoryPressure]. ", "{refusal}");
    cluster.check_untouched(&["modest"])?;
    if !cluster.node.agent.is_upstream() {
        // Upstream may evict it first: what it knows of the hog is some seconds old.
        cluster.check_untouched(&["other"])?;
    }
    cluster.wait_pressure("MemoryPressure", "False")
}

/// The agent's directory is a file system of 512 MiB with 4000 inodes, of which 200 MiB and 2000 are to stay free.
fn disk(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let small = SmallDisk::mount(cluster.node.bed.layout.dir.join("small"))?;
    let hard = json!({ "evictionHard": { "nodefs.available": "200Mi", "nodefs.inodesFree": "2000" } });
    cluster.start_with(&hard, Some(small.0.clone()))?;
    let name = cluster.name.clone();
    let with_volume = |script: &str| {
        let mut spec = spec(&name, script);
        spec["volumes"] = json!([{ "name": "data", "emptyDir": {} }]);
        spec["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
        spec
    };
    let write = |mib: u64| format!("dd if=/dev/zero of=/data/big bs=1M count={mib}; {WAIT}");
    cluster.run_pods(&[("modest", with_volume(&write(20)))])?;
    cluster.apply(pod("filler", &with_volume(&write(350))))?;
    let message = cluster.wait_evicted("filler")?;
    ensure!(
        message.starts_with("The node was low on resource: ephemeral-storage. Threshold quantity: 200Mi"),
        "{message}"
    );
    cluster.wait_pressure("DiskPressure", "True")?;
    cluster.wait_pressure("DiskPressure", "False")?;
    let many = format!("i=0; while [ $i -lt 3000 ]; do : > /data/$i; i=$((i+1)); done; {WAIT}");
    cluster.apply(pod("files", &with_volume(&many)))?;
    let message = cluster.wait_evicted("files")?;
    ensure!(message.starts_with("The node was low on resource: inodes. Threshold quantity: 2k"), "{message}");
    cluster.wait_pressure("DiskPressure", "False")?;
    cluster.check_untouched(&["modest"])?;
    cluster.kubectl(&["delete", "pod", "--all", "--wait=false"])?;
    cluster.wait_none(60)?;
    cluster.node.agent.stop();
    Ok(())
}

/// The node may run 1500 processes more than it does.
fn processes(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let read = |path: &str| -> anyhow::Result<u64> { Ok(fs::read_to_string(path)?.trim().parse()?) };
    let max = read("/proc/sys/kernel/pid_max")?.min(read("/proc/sys/kernel/threads-max")?);
    let loads = fs::read_to_string("/proc/loadavg")?;
    let tasks = loads.split(' ').nth(3).and_then(|it| it.split_once('/')).context("no tasks in /proc/loadavg")?;
    let keep = max - tasks.1.parse::<u64>()? - 1500;
    cluster.start_with(&json!({ "evictionHard": { "pid.available": keep.to_string() } }), None)?;
    let name = cluster.name.clone();
    cluster.run_pods(&[("modest", spec(&name, OBEDIENT))])?;
    let script = "trap 'exit 3' TERM; i=0; while [ $i -lt 2500 ]; do sleep 3600 & i=$((i+1)); done; wait";
    cluster.apply(pod("forker", &spec(&name, script)))?;
    let message = cluster.wait_evicted("forker")?;
    ensure!(message.starts_with("The node was low on resource: pids. Threshold quantity: "), "{message}");
    cluster.wait_pressure("PIDPressure", "True")?;
    cluster.check_untouched(&["modest"])
}

fn local_storage(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start_with(&json!({}), None)?;
    let name = cluster.name.clone();
    let limited = |script: &str, limit: &str, size: &str| {
        let mut spec = spec(&name, &format!("{script}; {WAIT}"));
        spec["volumes"] = json!([{ "name": "data", "emptyDir": { "sizeLimit": size } }]);
        let container = &mut spec["containers"][0];
        container["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
        container["resources"] = json!({ "limits": { "ephemeral-storage": limit } });
        spec
    };
    let volume = "dd if=/dev/zero of=/data/big bs=1M count=20";
    let layer = "dd if=/dev/zero of=/big bs=1M count=20";
    let logs = "yes | head -c 12000000";
    cluster.run_pods(&[("within", limited(volume, "100Mi", "30Mi"))])?;
    let pods = [
        ("volume", limited(volume, "100Mi", "10Mi"), "Usage of EmptyDir volume \"data\" exceeds the limit \"10Mi\". "),
        ("layer", limited(layer, "10Mi", "30Mi"), "total limit of containers 10Mi. "),
        ("logs", limited(logs, "10Mi", "30Mi"), "total limit of containers 10Mi. "),
    ];
    cluster.apply_all(pods.iter().map(|(name, spec, _)| pod(name, spec)).collect())?;
    for (name, _, expected) in &pods {
        let message = cluster.wait_evicted(name)?;
        ensure!(message.contains(expected), "{name}: {message}");
        cluster.eviction_event(name)?;
    }
    cluster.check_untouched(&["within"])
}

/// A small file system, unmounted at the end.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(dir: PathBuf) -> anyhow::Result<Self> {
        fs::create_dir_all(&dir)?;
        let mut mount = command("mount", ["-t", "tmpfs", "-o", "size=512m,nr_inodes=4000,mode=755", "small"]);
        output(mount.arg(&dir), SHORT)?;
        Ok(SmallDisk(dir))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = output(command("umount", ["-R", "-l"]).arg(&self.0), SHORT) {
            eprintln!("unmount {}: {error:#}", self.0.display());
        }
    }
}
