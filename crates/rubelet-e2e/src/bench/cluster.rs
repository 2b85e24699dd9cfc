//! Benchmarks on a real control plane: the cost for the node and its API server.
//!
//! Owns: these measurements. A start is timed by a watching client: from the pod's first event to the one with phase
//! Running. Requests are those in the API server's audit log.

use std::{
    fs,
    io::BufRead as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use jiff::Timestamp;
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{self, Program},
    clock::{self, Stopwatch},
    progress::step,
    sweep_orphans,
};
use serde_json::{Value, json};

use super::{Row, Usage, first_line_at, machine, median, ms_between, render, resident_mb};
use crate::e2e::cluster::{ClusterNode, OBEDIENT, Plane, Planes, pod, spec};

const PODS: usize = 30;
const STARTS: usize = 10;
const IDLE: Duration = Duration::from_secs(60);
/// Until all writes after one or many starts are done.
const SETTLE: Duration = Duration::from_secs(3);
const SETTLE_ALL: Duration = Duration::from_secs(15);

pub fn run(runtime: Runtime, kubelet: Option<&Path>) -> anyhow::Result<()> {
    let binary = step("building Rubelet (release)", agent::build)?;
    let programs = Programs::ensure(runtime)?;
    sweep_orphans()?;
    let planes = Planes::ensure()?;
    let measure = |name: &str, program: &Program| {
        let mut node = ClusterNode::new(&planes, Plane::Shared, Testbed::start(&programs)?, program)?;
        node.start()?;
        let lives = step(&format!("{name}: lives of {STARTS} pods"), || lives(&node))?;
        let ends = step(&format!("{name}: ends of {STARTS} pods"), || ends(&node))?;
        let idle = step(&format!("{name}: a minute with {PODS} pods"), || idle(&node))?;
        anyhow::Ok(Measured { lives, ends, idle })
    };
    let ours = measure("Rubelet", &Program::Rubelet(binary))?;
    let peer = kubelet.map(|path| measure("upstream", &Program::Upstream(path.to_owned()))).transpose()?;
    println!("\n{}", render(&machine(runtime), &ROWS, &ours, peer.as_ref()));
    Ok(())
}

#[derive(Debug)]
struct Measured {
    lives: Lives,
    ends: Ends,
    idle: Idle,
}

/// Of one pod, from its creation to its end.
#[derive(Debug)]
struct Lives {
    running_ms: f64,
    start_patches: f64,
    /// Calls to the runtime from its creation until it runs, and `SETTLE` longer.
    start_calls: f64,
    requests: f64,
}

/// Of a pod that runs to its end.
#[derive(Debug)]
struct Ends {
    /// From the container's last line to the terminal phase seen by a watcher.
    phase_ms: f64,
    /// Those of its start included.
    patches: f64,
}

#[derive(Debug)]
struct Idle {
    resident_mb: f64,
    cpu_secs: f64,
    requests: f64,
}

const ROWS: [Row<Measured>; 9] = [
    ("pod created to Running seen by a watcher, median of 10", "ms", |m| m.lives.running_ms, ""),
    ("status patches per pod start", "", |m| m.lives.start_patches, ""),
    ("calls to the runtime per pod start", "", |m| m.lives.start_calls, ""),
    ("container's last line to the terminal phase seen by a watcher, median of 10", "ms", |m| m.ends.phase_ms, ""),
    ("status patches of a pod that runs to its end", "", |m| m.ends.patches, ""),
    ("requests per pod life", "", |m| m.lives.requests, ""),
    ("resident memory, 30 pods", "MB", |m| m.idle.resident_mb, ""),
    ("processor per minute, 30 idle pods", "s", |m| m.idle.cpu_secs, ""),
    ("requests per minute, 30 idle pods", "", |m| m.idle.requests, ""),
];

fn lives(cluster: &ClusterNode) -> anyhow::Result<Lives> {
    // The first start on a fresh runtime unpacks and caches, so it is not measured.
    life(cluster, "first")?;
    let mut all = Vec::new();
    for number in 0..STARTS {
        all.push(life(cluster, &format!("one{number}"))?);
    }
    let mean = |read: fn(&Lives) -> f64| all.iter().map(read).sum::<f64>() / STARTS as f64;
    Ok(Lives {
        running_ms: median(all.iter().map(|life| life.running_ms).collect())?,
        start_patches: mean(|life| life.start_patches),
        start_calls: mean(|life| life.start_calls),
        requests: mean(|life| life.requests),
    })
}

fn life(cluster: &ClusterNode, name: &str) -> anyhow::Result<Lives> {
    let (before, calls_before) = (requests(cluster)?, runtime_calls(cluster)?);
    let running_ms = until_phase(cluster, name, (OBEDIENT, "Running"))?;
    thread::sleep(SETTLE);
    let (patches, calls) = (status_patches(cluster, name)?, runtime_calls(cluster)?);
    cluster.kubectl(&["delete", "pod", name, "--wait=false"])?;
    cluster.wait_none(60)?;
    thread::sleep(SETTLE);
    let after = requests(cluster)?;
    let of_life = after.iter().skip(before.len()).filter(|entry| !is_heartbeat(entry)).count();
    Ok(Lives { running_ms, start_patches: patches as f64, start_calls: calls - calls_before, requests: of_life as f64 })
}

fn ends(cluster: &ClusterNode) -> anyhow::Result<Ends> {
    let (mut phase_ms, mut patches) = (Vec::new(), 0);
    for number in 0..STARTS {
        let name = format!("end{number}");
        // The second is for the patches of the start.
        until_phase(cluster, &name, ("sleep 1; echo end", "Succeeded"))?;
        let seen = Timestamp::try_from(clock::wall())?;
        phase_ms.push(ms_between(first_line_at(&log_of(cluster, &name)?)?, seen));
        thread::sleep(SETTLE);
        patches += status_patches(cluster, &name)?;
        cluster.kubectl(&["delete", "pod", &name, "--wait=false"])?;
        cluster.wait_none(60)?;
    }
    Ok(Ends { phase_ms: median(phase_ms)?, patches: patches as f64 / STARTS as f64 })
}

fn log_of(cluster: &ClusterNode, pod: &str) -> anyhow::Result<PathBuf> {
    let prefix = format!("{}_{pod}_", cluster.name);
    let mut dirs = fs::read_dir(cluster.node.agent.pod_logs_dir())?.flatten();
    let dir = dirs.find(|dir| dir.file_name().to_string_lossy().starts_with(&prefix)).context("no log directory")?;
    Ok(dir.path().join("main/0.log"))
}

/// From the pod's first event to the one with this phase. It is created with `nodeName`, so that no scheduler is involved.
fn until_phase(cluster: &ClusterNode, name: &str, (script, phase): (&str, &str)) -> anyhow::Result<f64> {
    let mut spec = spec(&cluster.name, script);
    spec["nodeName"] = json!(cluster.name);
    if phase == "Succeeded" {
        spec["restartPolicy"] = json!("Never");
    }
    let api = cluster.plane().api();
    let path = format!("/api/v1/namespaces/{}/pods", cluster.name);
    let version = api.get(&path)?["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
    let watch = format!("{path}?watch=true&resourceVersion={version}&fieldSelector=metadata.name%3D{name}");
    let events = api.watch(&watch, Duration::from_secs(60))?;
    thread::scope(|scope| {
        let creating = scope.spawn(|| cluster.create(pod(name, &spec)));
        let mut created = None;
        for line in events.lines() {
            let event: Value = serde_json::from_str(&line?)?;
            let since = *created.get_or_insert_with(Stopwatch::start);
            if event["object"]["status"]["phase"] == phase {
                creating.join().map_err(|_| anyhow::anyhow!("creating the pod panicked"))??;
                return Ok(since.secs() * 1000.0);
            }
        }
        bail!("the watch ended before {name} was {phase}")
    })
}

fn idle(cluster: &ClusterNode) -> anyhow::Result<Idle> {
    fill(cluster, PODS)?;
    let (asked, used) = (requests(cluster)?.len(), Usage::read(&cluster.node)?);
    thread::sleep(IDLE);
    let used_ns = Usage::read(&cluster.node)?.cpu_ns.saturating_sub(used.cpu_ns);
    Ok(Idle {
        resident_mb: resident_mb(&cluster.node)?,
        cpu_secs: used_ns as f64 / 1e9,
        requests: (requests(cluster)?.len() - asked) as f64,
    })
}

/// This many pods `many0`, `many1`, …, until all their start-up writes are done.
pub(super) fn fill(cluster: &ClusterNode, count: usize) -> anyhow::Result<()> {
    let names: Vec<String> = (0..count).map(|number| format!("many{number}")).collect();
    cluster.apply_all(names.iter().map(|name| pod(name, &spec(&cluster.name, OBEDIENT))).collect())?;
    cluster.wait("all of them run", 600, |cluster| {
        let running = cluster.pods()?.iter().filter(|pod| pod.check_running().is_ok()).count();
        ensure!(running == count, "{running} run");
        Ok(())
    })?;
    thread::sleep(SETTLE_ALL);
    Ok(())
}

/// The node's requests in the audit log.
fn requests(cluster: &ClusterNode) -> anyhow::Result<Vec<Value>> {
    let user = format!("system:node:{}", cluster.name);
    let log = fs::read_to_string(cluster.plane().audit_log()).context("the API server's notes")?;
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    // A watch is logged when it begins and when it ends.
    Ok(entries.filter(|entry| entry["user"]["username"] == user && entry["stage"] != "ResponseStarted").collect())
}

fn status_patches(cluster: &ClusterNode, pod: &str) -> anyhow::Result<usize> {
    Ok(requests(cluster)?.iter().filter(|entry| is_about(entry, pod) && is_status_patch(entry)).count())
}

/// All calls to the runtime so far, as the agent counts them.
fn runtime_calls(cluster: &ClusterNode) -> anyhow::Result<f64> {
    let page = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{}/proxy/metrics", cluster.name)])?;
    let calls = page.lines().filter(|line| line.starts_with("kubelet_runtime_operations_total{"));
    Ok(calls.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

fn is_about(entry: &Value, pod: &str) -> bool {
    entry["objectRef"]["resource"] == "pods" && entry["objectRef"]["name"] == pod
}

fn is_status_patch(entry: &Value) -> bool {
    entry["verb"] == "patch" && entry["objectRef"]["subresource"] == "status"
}

/// The requests of a node without pods.
fn is_heartbeat(entry: &Value) -> bool {
    ["leases", "nodes", "csinodes", "runtimeclasses", "services"]
        .iter()
        .any(|kind| entry["objectRef"]["resource"] == *kind)
}
