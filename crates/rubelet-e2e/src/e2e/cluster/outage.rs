//! The API server is down for two minutes: the node keeps working, and then reports.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::clock::Stopwatch;
use serde_json::json;

use crate::{
    control_plane::ControlPlaneOptions,
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder, spec},
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "the API server is away for two minutes: pods go on, and their state is told on its return",
    plane: Plane::Own(ControlPlaneOptions::default),
    run: outage,
}];

const AWAY: Duration = Duration::from_secs(120);

fn outage(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let notes = cluster.node.notes("crash");
    let mut crash = spec(&cluster.name, "echo start >> /notes/main; sleep 2; exit 7");
    crash["containers"][0]["volumeMounts"] = json!([{ "name": "notes", "mountPath": "/notes" }]);
    crash["volumes"] = json!([{ "name": "notes", "hostPath": { "path": notes, "type": "DirectoryOrCreate" } }]);
    let web = spec(&cluster.name, OBEDIENT);
    cluster.apply_all(vec![pod("crash", &crash), pod("web0", &web), pod("web1", &web), pod("dies", &web)])?;
    for name in ["web0", "web1", "dies"] {
        cluster.wait_running(name, 90)?;
    }
    cluster.wait("the first crash", 60, |cluster| {
        let pod = cluster.pod("crash")?;
        ensure!(pod.container("main")["restartCount"].as_i64() >= Some(1), "{}", pod.container("main"));
        Ok(())
    })?;
    let before = identities(cluster)?;
    let starts_before = starts(cluster);
    let record = cluster.record()?;

    cluster.own_plane()?.kill_apiserver();
    let away = Stopwatch::start();
    // A container dies during the outage.
    kill_container(cluster, &before["dies"].id)?;
    cluster.wait("crash is started again", 100, |cluster| {
        ensure!(starts(cluster) > starts_before, "{} starts, as before", starts(cluster));
        Ok(())
    })?;
    thread::sleep(AWAY.saturating_sub(away.elapsed()));
    cluster.own_plane()?.start_apiserver()?;

    // Upstream's client waits up to 30 s before it retries.
    let limit_secs = if cluster.node.agent.is_upstream() { 60 } else { 5 };
    cluster.wait("what happened is told", limit_secs, |cluster| {
        let pod = cluster.pod("crash")?;
        let told = pod.container("main")["restartCount"].as_u64().context("no restartCount")?;
        let started = starts(cluster);
        ensure!(told + 1 == started, "crash was started {started} times, and restartCount is {told}");
        let dies = cluster.pod("dies")?;
        dies.check_running()?;
        ensure!(dies.container("main")["restartCount"] == 1, "dies: {}", dies.container("main"));
        Ok(())
    })?;
    cluster.wait_ready(60)?;
    for name in ["web0", "web1"] {
        let after = cluster.wait_running(name, 60)?.identity("main")?;
        ensure!(after == before[name], "{name}: before {:?}, after {after:?}", before[name]);
    }
    recorder::check_order(&record.finish()?)
}

fn identities(cluster: &ClusterNode) -> anyhow::Result<BTreeMap<String, crate::e2e::node::Identity>> {
    let pods = cluster.pods()?;
    let stable = pods.iter().filter(|pod| pod.name() != "crash");
    stable.map(|pod| Ok((pod.name().to_owned(), pod.identity("main")?))).collect()
}

fn starts(cluster: &ClusterNode) -> u64 {
    let text = fs::read_to_string(cluster.node.notes("crash").join("main")).unwrap_or_default();
    u64::try_from(text.lines().count()).unwrap_or_default()
}

fn kill_container(cluster: &ClusterNode, id: &str) -> anyhow::Result<()> {
    let id = id.trim_start_matches("containerd://");
    cluster.node.bed.ctr(["tasks", "kill", "--signal", "SIGKILL", id]).map(drop)
}
