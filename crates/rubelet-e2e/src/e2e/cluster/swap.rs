//! Swap of containers on cgroup version 2.
//!
//! Upstream: `test/e2e_node/swap_test.go`. On a cluster, because static pods are critical, and those get none.

use std::path::PathBuf;

use anyhow::ensure;
use rubelet_testbed::{
    CgroupDriver,
    agent::AgentOptions,
    command::{SHORT, command, output},
};
use serde_json::json;

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, Plane, pod, spec},
    eviction::{MIB, meminfo_bytes, memory_bytes},
    memory::{PAGE_BYTES, cgroup_of, check},
};

pub const WITH_CGROUP_V2: &[ClusterCase] = &[ClusterCase {
    name: "burstable containers get their share of swap, and the others none",
    plane: Plane::Shared,
    run: limited_swap,
}];

fn limited_swap(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let _swap = SwapFile::on(cluster.node.bed.layout.dir.join("swap"))?;
    cluster.node.bed.use_driver(CgroupDriver::of_machine())?;
    let mut config = cluster.node.agent.own_cgroups()?;
    config.insert("memorySwap".to_owned(), json!({ "swapBehavior": "LimitedSwap" }));
    let options = AgentOptions { cluster: Some(cluster.membership()?), config, ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let (swap, memory) = (meminfo_bytes("SwapTotal:")?, memory_bytes()?);
    ensure!(swap > 0, "there is no swap");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as upstream computes it")]
    #[expect(clippy::cast_precision_loss, reason = "as upstream computes it")]
    let share = (96.0 * MIB as f64 / memory as f64 * swap as f64) as u64;
    let burstable = json!({ "requests": { "memory": "96Mi" }, "limits": { "memory": "128Mi" } });
    let equal = json!({ "requests": { "memory": "32Mi" }, "limits": { "memory": "32Mi" } });
    let guaranteed = json!({ "limits": { "memory": "32Mi", "cpu": "100m" } });
    let with = |resources| {
        let mut spec = spec(&cluster.name, "sleep 3600");
        spec["containers"][0]["resources"] = resources;
        spec
    };
    let mut critical = with(burstable.clone());
    critical["priorityClassName"] = json!("system-node-critical");
    for (name, spec, expected) in [
        ("burstable", with(burstable), share / PAGE_BYTES * PAGE_BYTES),
        ("critical", critical, 0),
        ("equal", with(equal), 0),
        ("guaranteed", with(guaranteed), 0),
        ("best-effort", with(json!({})), 0),
    ] {
        cluster.apply(pod(name, &spec))?;
        let cgroup = cgroup_of(&cluster.node, &cluster.wait_running(name, 60)?)?;
        check(&cgroup, &[("memory.swap.max", expected)])?;
    }
    Ok(())
}

/// 256 MiB of swap for the whole machine until this is dropped.
struct SwapFile(PathBuf);

impl SwapFile {
    fn on(path: PathBuf) -> anyhow::Result<Self> {
        let mut dd = command("dd", ["if=/dev/zero", "bs=1M", "count=256", "status=none"]);
        output(dd.arg(format!("of={}", path.display())), SHORT)?;
        output(command("chmod", ["600"]).arg(&path), SHORT)?;
        output(command("mkswap", [""; 0]).arg(&path), SHORT)?;
        output(command("swapon", [""; 0]).arg(&path), SHORT)?;
        Ok(SwapFile(path))
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        if let Err(error) = output(command("swapoff", [""; 0]).arg(&self.0), SHORT) {
            eprintln!("swapoff {}: {error:#}", self.0.display());
        }
    }
}
