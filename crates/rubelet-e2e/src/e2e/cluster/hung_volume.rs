//! A volume whose file system hangs for a while, and then answers again.

use std::{
    cell::Cell,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use jiff::Timestamp;
use rubelet_testbed::{
    clock::{self, Stopwatch},
    sweep::mounts_below,
};
use serde_json::{Value, json};

use crate::{
    e2e::{
        cluster::{
            ClusterCase, ClusterNode, OBEDIENT, Plane,
            csi::{claimed, local_claim, local_volume, spec_with},
            pod,
        },
        node::PodSeen,
    },
    fuse::{self, FuseMount},
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a file system that hangs delays only its own pods, which go on when it answers again",
    plane: Plane::Shared,
    run: hung_volume,
}];

/// Long enough for a lease that is not renewed to be noticed.
const HANG: Duration = Duration::from_secs(45);
/// The agent renews its lease every 10 s, and the node is given up after 40 s.
const MAX_LEASE_AGE: Duration = Duration::from_secs(30);
/// Of the pods without the hung volume, and of their ends with a grace period of 1 s.
const START_SECS: u64 = 10;
const END_SECS: u64 = 11;
/// Until waiting pods go on after the file system answers.
const RETRY_SECS: u64 = 10;
/// Upstream's back-off of a volume, at most 122 s, goes on although the file system answers.
const UPSTREAM_RETRY_SECS: u64 = 150;

fn hung_volume(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let volumes = [local_volume(cluster, "hung")?, local_volume(cluster, "good")?];
    let path = volumes[0]["spec"]["local"]["path"].as_str().context("it is local")?;
    let files = FuseMount::serving(Path::new(path))?;
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": volumes }))?;
    cluster.apply_all(vec![local_claim(cluster, "hung"), local_claim(cluster, "good")])?;
    cluster.apply_all(vec![reader(cluster, "early"), reader(cluster, "late")])?;
    let early = cluster.wait_running("early", 60)?;
    let late = cluster.wait_running("late", 60)?;

    files.hang();
    let hang = Hang::begin(cluster)?;
    cluster.apply(reader(cluster, "new"))?;
    hang.other_pod("other")?;
    hang.stop("early")?;
    hang.expect_reason("new")?;
    // The agent knows by now that the file system hangs.
    hang.stop("late")?;
    hang.other_pod("another")?;
    hang.wait("it has hung for a while", 2 * HANG.as_secs(), |_| {
        ensure!(hang.since.elapsed() >= clock::patient(HANG), "{:.0} s", hang.since.secs());
        Ok(())
    })?;
    check_waiting(cluster, "new")?;
    check_not_forgotten(cluster, &[&early, &late])?;
    hang.end()?;

    files.resume();
    let retry_secs = if cluster.node.agent.is_upstream() { UPSTREAM_RETRY_SECS } else { RETRY_SECS };
    let new = cluster.wait_running("new", retry_secs)?;
    for name in ["early", "late"] {
        wait_gone(cluster, name, retry_secs)?;
    }
    cluster.kubectl(&["delete", "pod", "new"])?;
    cluster.wait_none(60)?;
    cluster.wait("nothing of the pods is mounted", 60, |cluster| {
        let left = mounts_of(cluster, &[&early, &late, &new])?;
        ensure!(left.is_empty(), "left: {left:?}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pvc", "--all"])?;
    let selector = format!("--selector=of={}", cluster.name);
    cluster.kubectl(&["delete", "pv", &selector])?;
    Ok(())
}

/// What holds as long as the file system hangs.
struct Hang<'a> {
    cluster: &'a ClusterNode,
    since: Stopwatch,
    ready_since: Value,
    oldest_lease: Cell<Duration>,
}

impl<'a> Hang<'a> {
    fn begin(cluster: &'a ClusterNode) -> anyhow::Result<Self> {
        let ready_since = cluster.node_condition("Ready")?["lastTransitionTime"].clone();
        Ok(Hang { cluster, since: Stopwatch::start(), ready_since, oldest_lease: Cell::default() })
    }

    /// As the cluster's, and notes how old the lease becomes.
    fn wait(
        &self,
        what: &str,
        limit_secs: u64,
        ask: impl Fn(&ClusterNode) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.cluster.wait(what, limit_secs, |cluster| {
            self.oldest_lease.set(self.oldest_lease.get().max(lease_age(cluster)?));
            ask(cluster)
        })
    }

    /// A pod on other file systems starts and ends as always.
    fn other_pod(&self, name: &str) -> anyhow::Result<()> {
        let volumes = [json!({ "name": "scratch", "emptyDir": {} }), claimed("good", "local-good")];
        let script = format!("echo $HOSTNAME > /scratch/by && cp /scratch/by /good/by && {OBEDIENT}");
        self.cluster.apply(pod(name, &spec_with(self.cluster, &script, &volumes)))?;
        self.wait(&format!("{name} runs while the file system hangs"), START_SECS, |cluster| {
            cluster.pod(name)?.check_running()
        })?;
        self.cluster.kubectl(&["delete", "pod", name, "--wait=false"])?;
        wait_gone(self.cluster, name, END_SECS)
    }

    /// Deletes a pod whose container waits for the file system. What else of it may end depends on the agent.
    fn stop(&self, name: &str) -> anyhow::Result<()> {
        self.cluster.kubectl(&["delete", "pod", name, "--wait=false"])?;
        self.wait(&format!("the container of {name} has ended"), END_SECS, |cluster| {
            let containers = cluster.node.containers()?;
            let left = containers.iter().find(|container| container.pod == name && container.is_running);
            ensure!(left.is_none(), "it runs: {left:?}");
            Ok(())
        })
    }

    /// Why the pod does not start. Upstream waits for the file system, and does not say so.
    fn expect_reason(&self, name: &str) -> anyhow::Result<()> {
        if self.cluster.node.agent.is_upstream() {
            return Ok(());
        }
        let volume = format!("volume \"{}-hung\"", self.cluster.name);
        let words = [&*volume, "/local/hung", "(fuse, hung) has not answered for"];
        let fields = format!("--field-selector=reason=FailedMount,involvedObject.name={name}");
        self.wait(&format!("an event says why {name} waits"), 60, |cluster| {
            let events = cluster.kubectl(&["get", "events", &fields, "-o", "jsonpath={.items[*].message}"])?;
            ensure!(words.iter().all(|words| events.contains(words)), "{events:?}");
            Ok(())
        })
    }

    /// The node was ready all the time.
    fn end(self) -> anyhow::Result<()> {
        let oldest = self.oldest_lease.get();
        ensure!(oldest < clock::patient(MAX_LEASE_AGE), "the lease was not renewed for {:.1} s", oldest.as_secs_f64());
        let ready = self.cluster.node_condition("Ready")?;
        ensure!(ready["status"] == "True" && ready["lastTransitionTime"] == self.ready_since, "{ready}");
        Ok(())
    }
}

fn lease_age(cluster: &ClusterNode) -> anyhow::Result<Duration> {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{}", cluster.name);
    let lease = cluster.plane().api().get(&path)?;
    let renewed: Timestamp = lease["spec"]["renewTime"].as_str().context("no renewTime")?.parse()?;
    Ok(clock::wall().duration_since(renewed.into()).unwrap_or_default())
}

/// Reads the file of the volume all the time, and fails if it is another.
fn reader(cluster: &ClusterNode, name: &str) -> Value {
    let read = format!("[ \"$(cat /data/{})\" = {} ] || exit 1", fuse::FILE, fuse::CONTENT);
    let script = format!("trap 'exit 0' TERM; while :; do {read}; sleep 1 & wait $!; done");
    let mut spec = spec_with(cluster, &script, &[claimed("data", "local-hung")]);
    spec["restartPolicy"] = json!("Never");
    pod(name, &spec)
}

fn check_waiting(cluster: &ClusterNode, name: &str) -> anyhow::Result<()> {
    let pod = cluster.pod(name)?;
    let has_started = pod.container_statuses().iter().any(|status| !status["state"]["waiting"].is_object());
    ensure!(pod.phase() == "Pending" && !has_started, "{name} does not wait: {}", pod.status());
    Ok(())
}

/// Pods that are deleted stay in the API as long as something of them is mounted.
fn check_not_forgotten(cluster: &ClusterNode, deleted: &[&PodSeen]) -> anyhow::Result<()> {
    let known = cluster.pods()?;
    let is_known = |pod: &PodSeen| known.iter().any(|known| known.uid() == pod.uid());
    let forgotten: Vec<_> = deleted.iter().copied().filter(|pod| !is_known(pod)).collect();
    let left = mounts_of(cluster, &forgotten)?;
    ensure!(left.is_empty(), "their pods are gone from the API, but not these mounts: {left:?}");
    Ok(())
}

fn wait_gone(cluster: &ClusterNode, name: &str, limit_secs: u64) -> anyhow::Result<()> {
    cluster.wait(&format!("{name} is gone"), limit_secs, |cluster| {
        let pods = cluster.pods()?;
        let left = pods.iter().find(|pod| pod.name() == name);
        ensure!(left.is_none(), "it is still there: {}", left.map_or(&Value::Null, |pod| pod.status()));
        Ok(())
    })
}

/// What is mounted for these pods; nothing there is looked at.
fn mounts_of(cluster: &ClusterNode, pods: &[&PodSeen]) -> anyhow::Result<Vec<PathBuf>> {
    let mut mounts = mounts_below(&cluster.node.agent.root_dir())?;
    mounts.retain(|mount| pods.iter().any(|pod| mount.iter().any(|part| part == pod.uid())));
    Ok(mounts)
}
