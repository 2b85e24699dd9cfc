//! The node's permissions are revoked and restored.

use anyhow::ensure;
use rubelet_testbed::tail;

use crate::{
    control_plane::{ControlPlaneOptions, bootstrap},
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder, spec},
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "rights taken away are missed loudly, and given back all goes on",
    plane: Plane::Own(|| ControlPlaneOptions { authorization_mode: "RBAC", ..ControlPlaneOptions::default() }),
    run: rights,
}];

const BINDING: &str = "testbed:nodes";

fn rights(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let binding = bootstrap::binding(BINDING, "system:node", "system:nodes");
    cluster.plane().apply(&binding)?;
    cluster.start()?;
    cluster.apply(pod("before", &spec(&cluster.name, OBEDIENT)))?;
    let before = cluster.wait_running("before", 60)?.identity("main")?;
    let record = cluster.record()?;

    cluster.plane().kubectl(&["delete", "clusterrolebinding", BINDING])?;
    cluster.apply(pod("meanwhile", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait("the agent says what it may not", 60, |cluster| {
        let log = tail(&cluster.node.agent.log(), 2000);
        let line = log.lines().find(|line| line.contains("forbidden") && line.contains("system:node:"));
        ensure!(line.is_some(), "no line of its log speaks of what is forbidden");
        Ok(())
    })?;
    cluster.plane().apply(&binding)?;
    cluster.wait_running("meanwhile", 120)?;
    cluster.wait_ready(60)?;
    let after = cluster.wait_running("before", 60)?.identity("main")?;
    ensure!(after == before, "before {before:?}, after {after:?}");
    recorder::check_order(&record.finish()?)
}
