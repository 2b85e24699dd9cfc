//! How the agent lists its pods: consistently, not from a stale cache.

use std::fs;

use anyhow::ensure;
use serde_json::Value;

use crate::{
    control_plane::ControlPlaneOptions,
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "the list of pods is streamed and consistent, also when the agent starts again",
        plane: Plane::Shared,
        run: streamed,
    },
    ClusterCase {
        name: "an API server without streamed lists is listed consistently",
        plane: Plane::Own(without_streams),
        run: listed,
    },
];

fn without_streams() -> ControlPlaneOptions {
    ControlPlaneOptions { feature_gates: Some("WatchList=false"), ..ControlPlaneOptions::default() }
}

fn streamed(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    run_over_a_restart(cluster)?;
    let reads = pod_reads(cluster)?;
    let lists: Vec<_> = reads.iter().filter(|read| read.verb == "list").collect();
    ensure!(lists.is_empty(), "lists that are not streamed: {lists:?}");
    let streams = reads.iter().filter(|read| read.asks("sendInitialEvents=true") && !read.asks("resourceVersion="));
    let count = streams.count();
    ensure!(count == 2, "{count} consistent streams for two starts: {reads:#?}");
    ensure!(reads.first().is_some_and(|read| read.asks("sendInitialEvents=true")), "not streamed first: {reads:#?}");
    Ok(())
}

fn listed(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    run_over_a_restart(cluster)?;
    let reads = pod_reads(cluster)?;
    let is_refused = |read: &&Read| read.asks("sendInitialEvents=true") && read.code == 422;
    ensure!(reads.iter().filter(is_refused).count() == 2, "each start tries once to stream: {reads:#?}");
    let lists: Vec<_> = reads.iter().filter(|read| read.verb == "list").collect();
    ensure!(lists.len() == 2, "each start lists once: {reads:#?}");
    // Upstream reads from the server's cache.
    let is_from_cache = lists.iter().any(|list| list.asks("resourceVersion=0"));
    ensure!(is_from_cache == cluster.node.agent.is_upstream(), "{lists:#?}");
    Ok(())
}

/// A running pod is untouched by a restart of the agent.
fn run_over_a_restart(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply_all(vec![pod("web", &spec(&cluster.name, OBEDIENT))])?;
    cluster.wait_running("web", 120)?;
    let before = cluster.pod("web")?.container("main")["containerID"].clone();
    cluster.node.agent.kill();
    cluster.start()?;
    cluster.apply_all(vec![pod("later", &spec(&cluster.name, OBEDIENT))])?;
    cluster.wait_running("later", 120)?;
    let after = cluster.pod("web")?.container("main")["containerID"].clone();
    ensure!(before == after, "the container was {before}, and is {after}");
    Ok(())
}

#[derive(Debug)]
struct Read {
    verb: String,
    uri: String,
    code: i64,
}

impl Read {
    fn asks(&self, option: &str) -> bool {
        self.uri.contains(option)
    }
}

/// Lists and watches of all pods of the node, each once, from the audit log.
fn pod_reads(cluster: &ClusterNode) -> anyhow::Result<Vec<Read>> {
    let user = format!("system:node:{}", cluster.name);
    let log = fs::read_to_string(cluster.plane().audit_log())?;
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut seen = std::collections::BTreeSet::new();
    let of_pods = |entry: &Value| {
        let object = &entry["objectRef"];
        entry["user"]["username"] == user && object["resource"] == "pods" && object["name"].is_null()
    };
    let reads = entries.filter(of_pods).filter(|entry| seen.insert(entry["auditID"].to_string()));
    let read = |entry: Value| Read {
        verb: entry["verb"].as_str().unwrap_or_default().to_owned(),
        uri: entry["requestURI"].as_str().unwrap_or_default().to_owned(),
        code: entry["responseStatus"]["code"].as_i64().unwrap_or_default(),
    };
    Ok(reads.map(read).filter(|read| read.verb == "list" || read.verb == "watch").collect())
}
