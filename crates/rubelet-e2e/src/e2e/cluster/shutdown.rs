//! A shutdown of the machine, as the API server sees it. The real logind takes part, as in `e2e/shutdown.rs`.

use std::{collections::BTreeMap, sync::PoisonError};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{agent::AgentOptions, clock::Stopwatch};
use serde_json::json;

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, Plane, pod, spec},
    node::PodSeen,
    shutdown::{
        GROUPS, ONE_AT_A_TIME, all_names, announce, check_failed, check_order, config_of_groups, is_inhibited, names,
        script,
    },
};

/// On machines with systemd.
pub const WITH_LOGIND: &[ClusterCase] = &[ClusterCase {
    name: "a shutdown of the machine goes on when the API server has the ends of all pods, and the node is ready after the boot",
    plane: Plane::Shared,
    run: shutdown,
}];

fn shutdown(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let options =
        AgentOptions { cluster: Some(cluster.membership()?), config: config_of_groups(), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    wait_inhibited(cluster, true)?;
    for (group, (priority, _)) in GROUPS.into_iter().enumerate() {
        let class = format!("{}-{group}", cluster.name);
        cluster.kubectl(&["create", "priorityclass", &class, &format!("--value={priority}")])?;
        for name in names(group) {
            let mut spec = spec(&cluster.name, script(&name));
            spec["priorityClassName"] = json!(class);
            spec["terminationGracePeriodSeconds"] = json!(300);
            cluster.apply(pod(&name, &spec))?;
        }
    }
    for name in all_names() {
        cluster.wait_running(&name, 600)?;
    }
    announce(true)?;
    wait_inhibited(cluster, false)?;
    // Not waited for: the machine could be down by now.
    let mut ended: BTreeMap<String, PodSeen> =
        cluster.pods()?.into_iter().map(|seen| (seen.name().to_owned(), seen)).collect();
    ended.values().try_for_each(check_failed)?;
    let in_order: Option<Vec<PodSeen>> = all_names().map(|name| ended.remove(&name)).collect();
    check_order(&in_order.context("a pod is missing")?)?;
    let ready = cluster.node_condition("Ready")?;
    ensure!(ready["status"] == "False" && ready["message"] == "node is shutting down", "{ready}");

    cluster.node.agent.kill();
    cluster.node.bed.reboot()?;
    cluster.node.agent.start()?;
    cluster.wait_ready(120)?;
    let since = cluster.node_condition("Ready")?["lastTransitionTime"].clone();
    let watch = Stopwatch::start();
    cluster.wait("half a minute has passed", 60, |_| {
        ensure!(watch.secs() > 30.0, "{:.0} s so far", watch.secs());
        Ok(())
    })?;
    let ready = cluster.node_condition("Ready")?;
    ensure!(ready["status"] == "True" && ready["lastTransitionTime"] == since, "not ready since {since}: {ready}");
    cluster.pods()?.iter().try_for_each(check_failed)
}

fn wait_inhibited(cluster: &ClusterNode, expected: bool) -> anyhow::Result<()> {
    cluster.wait(&format!("the shutdown is inhibited: {expected}"), 400, |_| {
        ensure!(is_inhibited()? == expected, "it is not so");
        Ok(())
    })
}
