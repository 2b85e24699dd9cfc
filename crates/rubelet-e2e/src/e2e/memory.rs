//! Memory of containers on cgroup version 2: what the kernel protects, and from where on it throttles.
//!
//! Upstream: `test/e2e_node/memory_qos_test.go`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{CgroupDriver, agent::AgentOptions, image::BUSYBOX};
use serde_json::{Value, json};

use crate::e2e::{
    Case, cgroups,
    eviction::{MIB, memory_bytes},
    node::{Node, PodSeen},
};

pub const WITH_CGROUP_V2: &[Case] = &[Case {
    name: "memory requests are protected and memory is throttled as MemoryQoS says, at each level",
    run: memory_qos,
}];

pub const PAGE_BYTES: u64 = 4096;

/// The cgroup of the only container of a running pod with these resources.
fn cgroup_of_pod(node: &Node, name: &str, resources: &Value) -> anyhow::Result<PathBuf> {
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "containers": [
                { "name": "main", "image": BUSYBOX, "command": ["sleep", "3600"], "resources": resources },
            ],
        },
    });
    node.drop_file(&format!("{name}.json"), manifest.to_string().as_bytes())?;
    cgroup_of(node, &node.wait_running(name, 60)?)
}

/// Of its container `main`.
pub fn cgroup_of(node: &Node, seen: &PodSeen) -> anyhow::Result<PathBuf> {
    let id = seen.container("main")["containerID"].as_str().unwrap_or_default();
    let path = cgroups::of_container(node, id.trim_start_matches("containerd://"))?;
    Ok(Path::new("/sys/fs/cgroup").join(path.strip_prefix("/")?))
}

pub fn check(cgroup: &Path, expected: &[(&str, u64)]) -> anyhow::Result<()> {
    for (file, bytes) in expected {
        let read = fs::read_to_string(cgroup.join(file)).with_context(|| format!("{}/{file}", cgroup.display()))?;
        let value = if *bytes == NO_LIMIT { "max".to_owned() } else { bytes.to_string() };
        ensure!(read.trim() == value, "{}/{file}: {} instead of {value}", cgroup.display(), read.trim());
    }
    Ok(())
}

const NO_LIMIT: u64 = u64::MAX;

/// Upstream's `memory.high`.
fn throttled_from(request: u64, limit: u64, factor_percent: u64) -> u64 {
    (request + (limit - request) * factor_percent / 100) / PAGE_BYTES * PAGE_BYTES
}

fn memory_qos(node: &mut Node) -> anyhow::Result<()> {
    let config = json!({
        "featureGates": { "MemoryQoS": true },
        "memoryReservationPolicy": "TieredReservation",
        "memoryThrottlingFactor": 0.8,
        "systemReserved": { "memory": "256Mi" },
    });
    node.bed.use_driver(CgroupDriver::of_machine())?;
    let mut all = node.agent.own_cgroups()?;
    all.extend(config.as_object().cloned().unwrap_or_default());
    node.reconfigure(&AgentOptions { config: all, ..AgentOptions::default() })?;
    node.agent.start()?;
    let limited = json!({ "requests": { "memory": "32Mi" }, "limits": { "memory": "64Mi" } });
    let limited = cgroup_of_pod(node, "limited", &limited)?;
    let open = cgroup_of_pod(node, "open", &json!({ "requests": { "memory": "16Mi" } }))?;
    let guaranteed = json!({ "limits": { "memory": "48Mi", "cpu": "100m" } });
    let guaranteed = cgroup_of_pod(node, "guaranteed", &guaranteed)?;

    let high = throttled_from(32 * MIB, 64 * MIB, 80);
    check(&limited, &[("memory.min", 0), ("memory.low", 32 * MIB), ("memory.high", high), ("memory.max", 64 * MIB)])?;
    let high = throttled_from(16 * MIB, memory_bytes()? - 256 * MIB, 80);
    check(&open, &[("memory.min", 0), ("memory.low", 16 * MIB), ("memory.high", high), ("memory.max", NO_LIMIT)])?;
    let expected = [("memory.min", 48 * MIB), ("memory.low", 0), ("memory.high", NO_LIMIT), ("memory.max", 48 * MIB)];
    check(&guaranteed, &expected)?;
    let pod = |container: &Path| container.parent().map(Path::to_owned).context("a pod's cgroup");
    check(&pod(&limited)?, &[("memory.min", 0), ("memory.low", 32 * MIB), ("memory.high", NO_LIMIT)])?;
    check(&pod(&open)?, &[("memory.min", 0), ("memory.low", 16 * MIB), ("memory.high", NO_LIMIT)])?;
    check(&pod(&guaranteed)?, &[("memory.min", 48 * MIB), ("memory.low", 0), ("memory.high", NO_LIMIT)])?;
    let burstable = pod(&pod(&limited)?)?;
    let kubepods = pod(&pod(&guaranteed)?)?;
    // Upstream writes them once a minute.
    node.wait("the classes are protected", 90, |_| {
        check(&burstable, &[("memory.min", 0), ("memory.low", 48 * MIB), ("memory.high", NO_LIMIT)])?;
        check(&kubepods, &[("memory.min", 96 * MIB), ("memory.low", 0)])
    })
}
