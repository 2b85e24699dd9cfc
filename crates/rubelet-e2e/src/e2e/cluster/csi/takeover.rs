//! The agent is replaced under pods with claims: from upstream's kubelet to Rubelet, and back.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::Program;
use serde_json::{Value, json};

use crate::{
    control_plane::upstream_kubelet,
    e2e::{
        cluster::{
            ClusterCase, ClusterNode, OBEDIENT, Plane,
            csi::{claim, claimed, driver::Driver, exec, local_claim, local_volume, spec_with, wait_only_driver},
            pod,
        },
        node::Identity,
    },
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "CSI and local volumes stay mounted when upstream's kubelet and this agent take turns",
    plane: Plane::Shared,
    run: takeover,
}];

/// Two share a claim; each agent ends one that another one started.
const PODS: [&str; 3] = ["files", "shared", "raw"];
/// In the paths of their mounts.
const KINDS: [&str; 4] = ["kubernetes.io~csi", "kubernetes.io/csi", "kubernetes.io~local-volume", "volumeDevices"];
/// Long enough for every pod to be synced, and for volumes that nobody wants to be taken down.
const SETTLE: Duration = Duration::from_secs(20);

fn takeover(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let upstream = Program::Upstream(upstream_kubelet()?);
    let tested = cluster.node.agent.program().clone();
    cluster.node.agent.become_program(&upstream);
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    make_pods(cluster, &driver)?;
    for name in PODS {
        cluster.wait_running(name, 150)?;
    }
    thread::sleep(SETTLE);
    let mut left = PODS.to_vec();
    for (program, name) in [(&tested, "the agent under test"), (&upstream, "upstream's kubelet")] {
        let before = settled(cluster, &left)?;
        cluster.node.agent.stop();
        cluster.node.agent.become_program(program);
        cluster.start()?;
        thread::sleep(SETTLE);
        let after = state(cluster, &left)?;
        ensure!(after == before, "under {name}:\n{after:#?}\nbefore:\n{before:#?}");
        // What the agent before has staged serves another pod, and stays when that is gone.
        let script = format!("echo {} >> /data/by; {OBEDIENT}", cluster.name);
        let spec = spec_with(cluster, &script, &[claimed("data", "data")]);
        cluster.apply(pod("next", &spec))?;
        cluster.wait_running("next", 60).with_context(|| format!("under {name}"))?;
        cluster.kubectl(&["delete", "pod", "next"])?;
        cluster.kubectl(&["delete", "pod", left.pop().context("there is a pod for each agent")?])?;
        exec(cluster, "files", "echo alive >> /data/by && cat /inline/a /local/a /data/by >/dev/null")
            .with_context(|| format!("under {name}"))?;
    }
    // Asked again for an inline volume, by an agent that starts, this version of the driver forgets where it is mounted.
    driver.kill(cluster)?;
    cluster.kubectl(&["delete", "pod", "files"])?;
    wait_only_driver(cluster, 60)?;
    cluster.kubectl(&["delete", "pvc", "--all"])?;
    driver.wait_nothing_left(cluster, 90)?;
    let selector = format!("--selector=of={}", cluster.name);
    cluster.kubectl(&["delete", "pv", &selector])?;
    driver.remove(cluster)
}

fn make_pods(cluster: &ClusterNode, driver: &Driver) -> anyhow::Result<()> {
    let local = local_volume(cluster, "disk")?;
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [local] }))?;
    let mut device = claim(driver, "device", "ReadWriteOnce");
    device["spec"]["volumeMode"] = json!("Block");
    let inline = json!({ "name": "inline", "csi": { "driver": driver.name } });
    let local = claimed("local", "local-disk");
    let script = format!("echo a | tee /inline/a /local/a >> /data/by; {OBEDIENT}");
    let files = spec_with(cluster, &script, &[claimed("data", "data"), local, inline]);
    let shared = spec_with(cluster, OBEDIENT, &[claimed("data", "data")]);
    let mut raw = spec_with(cluster, &format!("[ -b /dev/raw ] && {OBEDIENT}"), &[]);
    raw["containers"][0]["volumeDevices"] = json!([{ "name": "raw", "devicePath": "/dev/raw" }]);
    raw["volumes"] = json!([claimed("raw", "device")]);
    let mut objects = vec![claim(driver, "data", "ReadWriteOnce"), local_claim(cluster, "disk"), device];
    objects.extend(PODS.iter().zip([files, shared, raw]).map(|(name, spec)| pod(name, &spec)));
    cluster.apply_all(objects)
}

fn state(cluster: &ClusterNode, pods: &[&str]) -> anyhow::Result<State> {
    let pods = pods.iter().map(|pod| (*pod, "main")).chain([("csi-0", "driver")]);
    State::of(cluster, pods, &KINDS)
}

/// Once volumes of pods that have ended are detached, which takes some time after the pods are gone.
fn settled(cluster: &mut ClusterNode, pods: &[&str]) -> anyhow::Result<State> {
    // One claim is that of two pods, the other that of the block device.
    let count = if pods.contains(&"raw") { 2 } else { 1 };
    cluster.wait("only volumes of pods are in use and attached", 90, |cluster| {
        let state = state(cluster, pods)?;
        let in_use = state.in_use.as_array().map_or(0, Vec::len);
        ensure!((in_use, state.attachments.len()) == (count, count), "{state:#?}");
        Ok(())
    })?;
    state(cluster, pods)
}

/// What must stay as it is while one agent takes the place of another.
#[derive(Debug, PartialEq)]
pub struct State {
    pods: BTreeMap<String, Identity>,
    /// By number: another one is another mount.
    mounts: Vec<String>,
    in_use: Value,
    attachments: Vec<Value>,
}

impl State {
    /// Of these pods, each with one of its containers, and of the mounts with one of these kinds in their paths.
    pub fn of<'a>(
        cluster: &ClusterNode,
        pods: impl Iterator<Item = (&'a str, &'a str)>,
        kinds: &[&str],
    ) -> anyhow::Result<Self> {
        let mut identities = BTreeMap::new();
        for (name, container) in pods {
            let pod = cluster.pod(name)?;
            ensure!(pod.is_ready(), "{name} is not ready: {}", pod.status());
            identities.insert(name.to_owned(), pod.identity(container)?);
        }
        let root = cluster.node.agent.root_dir().display().to_string();
        let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
        // Its number, its parent's, its device, its root, and where it is.
        let mounts = table.lines().filter(|line| line.contains(&root) && kinds.iter().any(|kind| line.contains(kind)));
        let mut mounts: Vec<String> =
            mounts.map(|line| line.split(' ').take(5).collect::<Vec<_>>().join(" ")).collect();
        mounts.sort_unstable();
        ensure!(!mounts.is_empty(), "nothing is mounted");
        let node = cluster.plane().api().get(&format!("/api/v1/nodes/{}", cluster.name))?;
        let attachments = cluster.plane().api().list("/apis/storage.k8s.io/v1/volumeattachments")?;
        let own = attachments.iter().filter(|attachment| attachment["spec"]["nodeName"] == cluster.name.as_str());
        let attachments = own.map(|attachment| attachment["metadata"]["uid"].clone()).collect();
        Ok(State { pods: identities, mounts, in_use: node["status"]["volumesInUse"].clone(), attachments })
    }
}
