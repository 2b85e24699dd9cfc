//! How often does the agent write a pod's status?

use std::{fs, time::Duration};

use anyhow::ensure;
use serde_json::Value;

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "the stop of a pod takes at most three status writes",
    plane: Plane::Shared,
    run: stop_writes_three,
}];

/// Upstream's: its generation, its ended containers, its phase.
const WRITES_PER_STOP: usize = 3;

fn stop_writes_three(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let names = ["one", "two", "three"];
    cluster.apply_all(names.iter().map(|name| pod(name, &spec(&cluster.name, OBEDIENT))).collect())?;
    for name in names {
        cluster.wait_running(name, 120)?;
    }
    cluster.wait_still(Duration::from_secs(12), 120, |cluster| Ok(status_writes(cluster)?.len()))?;
    let before = status_writes(cluster)?.len();
    cluster.kubectl(&["delete", "pod", "--all", "--timeout=60s"])?;
    let written = status_writes(cluster)?.split_off(before);
    for name in names {
        let own: Vec<_> = written.iter().filter(|line| line.starts_with(&format!("{name:?}:"))).collect();
        ensure!((1..=WRITES_PER_STOP).contains(&own.len()), "{} statuses of {name} were written: {own:#?}", own.len());
    }
    Ok(())
}

/// What the node wrote about pods' status, as the API server noted it. Upstream's kubelet takes the network's readiness back
/// from a pod that ended, when it starts again; that is not counted.
pub(super) fn status_writes(cluster: &ClusterNode) -> anyhow::Result<Vec<String>> {
    let user = format!("system:node:{}", cluster.name);
    let log = fs::read_to_string(cluster.plane().audit_log())?;
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_write = |entry: &Value| {
        entry["user"]["username"] == user
            && entry["objectRef"]["resource"] == "pods"
            && entry["objectRef"]["subresource"] == "status"
            && entry["verb"] != "get"
            && !(cluster.node.agent.is_upstream() && entry["objectRef"]["name"] == "done")
    };
    let body = |entry: Value| format!("{}: {}", entry["objectRef"]["name"], entry["requestObject"]);
    Ok(entries.filter(is_write).map(body).collect())
}
