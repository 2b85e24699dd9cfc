//! A standalone node that runs low on memory: of all pods, and of the whole node.
//!
//! Static pods are critical, so none of them is evicted, as upstream; `cluster/eviction.rs` has evictions. Here is seen how soon
//! after the threshold was crossed the agent acts.
//! Upstream: `test/e2e_node/eviction_test.go`, `managerImpl.evictPod`.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::AgentOptions,
    clock::{self, Stopwatch},
    image::BUSYBOX,
};
use serde_json::{Value, json};

use crate::e2e::{Case, cgroups, node::Node};

pub const CASES: &[Case] = &[Case {
    name: "low memory of all pods is noticed at once, and no static pod is evicted for it",
    run: memory_of_pods,
}];

/// On a machine of its own, whose memory only tests use.
pub const WITH_CGROUP_V2: &[Case] = &[Case {
    name: "low memory of the whole node is noticed at once, and no static pod is evicted for it",
    run: memory_of_node,
}];

pub const MIB: u64 = 1 << 20;

/// What makes a node run low on memory.
struct Shortage {
    config: Value,
    /// The memory of this cgroup is short when its working set is larger.
    cgroup: PathBuf,
    working_set_bytes: u64,
    /// As in `evictionHard`.
    threshold: String,
    hog_mib: u64,
}

/// All pods together have 600 MiB, of which 100 are to stay free. On version 2 the hog is throttled from 541 MiB on, which the
/// kernel reports as a stall.
fn memory_of_pods(node: &mut Node) -> anyhow::Result<()> {
    let is_v2 = cgroups::is_v2();
    let config = json!({
        "systemReserved": { "memory": (memory_bytes()? - 600 * MIB).to_string() },
        "featureGates": { "MemoryQoS": is_v2 },
    });
    let cgroup = cgroup_of_pods(node);
    let threshold = "100Mi".to_owned();
    run_low(node, &Shortage { config, cgroup, working_set_bytes: 500 * MIB, threshold, hog_mib: 560 })?;
    if is_v2 && !node.agent.is_upstream() {
        node.wait("the kernel reports a stall", 20, |node| {
            let log = fs::read_to_string(node.agent.log())?;
            ensure!(log.contains("tasks waited for memory"), "there was none");
            Ok(())
        })?;
    }
    Ok(())
}

/// The node has 400 MiB more than the threshold.
fn memory_of_node(node: &mut Node) -> anyhow::Result<()> {
    let (all, cgroup) = (memory_bytes()?, memory_tree());
    let threshold_mib = (all - working_set(&cgroup)?) / MIB - 400;
    let working_set_bytes = all - threshold_mib * MIB;
    let threshold = format!("{threshold_mib}Mi");
    run_low(node, &Shortage { config: json!({}), cgroup, working_set_bytes, threshold, hog_mib: 600 })
}

fn run_low(node: &mut Node, shortage: &Shortage) -> anyhow::Result<()> {
    let mut config = node.agent.own_cgroups()?;
    config.extend(shortage.config.as_object().cloned().unwrap_or_default());
    config.insert("evictionHard".to_owned(), json!({ "memory.available": shortage.threshold }));
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    apply(node, "modest", "64Mi", "sleep 3600")?;
    node.wait_running("modest", 60)?;
    ensure!(!has_logged(node, "EvictionThresholdMet")?, "the memory is low without the hog");
    apply(node, "hog", "10Mi", &hog_script(shortage.hog_mib))?;

    clock::wait("the memory runs low", Duration::from_secs(60), Duration::from_millis(10), || {
        let used = working_set(&shortage.cgroup)?;
        ensure!(used > shortage.working_set_bytes, "{} MiB are used", used / MIB);
        Ok(())
    })?;
    println!("    noticed {:.2} s after the threshold was crossed", secs_until_logged(node, "EvictionThresholdMet")?);
    if !node.agent.is_upstream() {
        node.wait("the node is under pressure", 20, |node| {
            let report: Value = serde_json::from_str(&node.agent.ask(&["node", "-o", "json"])?)?;
            ensure!(report["pressures"] == json!(["Memory"]), "{report}");
            Ok(())
        })?;
    }
    for name in ["modest", "hog"] {
        let seen = node.wait_running(name, 10)?;
        ensure!(seen.container("main")["restartCount"] == 0, "{}", seen.status());
    }
    Ok(())
}

/// The agent's log has an event of this reason before anybody else sees it.
fn has_logged(node: &Node, reason: &str) -> anyhow::Result<bool> {
    Ok(fs::read_to_string(node.agent.log())?.contains(&format!("reason=\"{reason}\"")))
}

pub fn secs_until_logged(node: &Node, reason: &str) -> anyhow::Result<f64> {
    let since = Stopwatch::start();
    clock::wait("the agent acts", Duration::from_secs(60), Duration::from_millis(20), || {
        ensure!(has_logged(node, reason)?, "its log has no event {reason}");
        Ok(since.secs())
    })
}

fn apply(node: &Node, name: &str, request: &str, script: &str) -> anyhow::Result<()> {
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "containers": [{
                "name": "main", "image": BUSYBOX, "command": ["sh", "-c", script],
                "resources": { "requests": { "memory": request } },
            }],
        },
    });
    node.drop_file(&format!("{name}.json"), manifest.to_string().as_bytes())
}

/// Allocates this much memory and keeps it.
pub fn hog_script(mib: u64) -> String {
    format!("trap 'exit 3' TERM; (head -c {} /dev/zero; sleep 3600) | tail & wait", mib * MIB)
}

pub fn memory_bytes() -> anyhow::Result<u64> {
    meminfo_bytes("MemTotal:")
}

pub fn meminfo_bytes(field: &str) -> anyhow::Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    let kib = info.lines().find_map(|line| line.strip_prefix(field)).with_context(|| format!("no {field}"))?;
    Ok(kib.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// The memory cgroup of all pods, of either version.
pub fn kubepods(node: &Node) -> anyhow::Result<PathBuf> {
    let path = cgroup_of_pods(node);
    ensure!(path.join("memory.stat").exists(), "no cgroup of all pods");
    Ok(path)
}

fn cgroup_of_pods(node: &Node) -> PathBuf {
    memory_tree().join(node.bed.layout.cgroup_root().trim_start_matches('/')).join("kubepods")
}

fn memory_tree() -> PathBuf {
    Path::new("/sys/fs/cgroup").join(if cgroups::is_v2() { "" } else { "memory" })
}

/// The root of version 2 does not have its usage in a file of its own.
pub fn working_set(cgroup: &Path) -> anyhow::Result<u64> {
    let number = |name: &str| -> anyhow::Result<u64> { Ok(fs::read_to_string(cgroup.join(name))?.trim().parse()?) };
    let stat = fs::read_to_string(cgroup.join("memory.stat"))?;
    let field = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let of_root = || Some(field("anon ")? + field("file ")?);
    let used = number("memory.usage_in_bytes").or_else(|_| number("memory.current")).ok().or_else(of_root);
    let inactive = field("total_inactive_file ").or_else(|| field("inactive_file ")).unwrap_or(0);
    Ok(used.context("no usage")?.saturating_sub(inactive))
}
