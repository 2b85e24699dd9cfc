//! Volumes of real servers of this machine, in a cluster: the agent is replaced under them, and a disk is a device of its pod.

use std::{fs, path::Path, sync::PoisonError, thread, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::Program;
use serde_json::{Value, json};

use crate::{
    control_plane::upstream_kubelet,
    e2e::{
        cluster::{
            ClusterCase, ClusterNode, OBEDIENT, Plane,
            csi::{claimed, spec_with, takeover::State},
            pod,
        },
        network_volumes::{IQN, NfsServer, ONE_AT_A_TIME, SHARE, Target, sessions},
    },
};

/// On machines that have the servers.
pub const WITH_SERVERS: &[ClusterCase] = &[ClusterCase {
    name: "NFS volumes and an iSCSI device stay with their pods when upstream's kubelet and this agent take turns",
    plane: Plane::Shared,
    run: takeover,
}];

const PODS: [&str; 3] = ["files", "more", "raw"];
/// In the paths of their mounts.
const KINDS: [&str; 2] = ["kubernetes.io~nfs", "volumeDevices"];
/// Long enough for every pod to be synced on an emulated machine.
const SETTLE: Duration = Duration::from_secs(45);

fn takeover(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (_server, _target) = (NfsServer::start()?, Target::start()?);
    let upstream = Program::Upstream(upstream_kubelet()?);
    let tested = cluster.node.agent.program().clone();
    cluster.node.agent.become_program(&upstream);
    cluster.start()?;
    make_pods(cluster)?;
    for name in PODS {
        cluster.wait_running(name, 300)?;
    }
    thread::sleep(SETTLE);
    let state = |cluster: &ClusterNode| State::of(cluster, PODS.map(|pod| (pod, "main")).into_iter(), &KINDS);
    for (program, name) in [(&tested, "the agent under test"), (&upstream, "upstream's kubelet")] {
        let before = state(cluster)?;
        cluster.node.agent.stop();
        cluster.node.agent.become_program(program);
        cluster.start()?;
        thread::sleep(SETTLE);
        let after = state(cluster)?;
        ensure!(after == before, "under {name}:\n{after:#?}\nbefore:\n{before:#?}");
        ticks(cluster).with_context(|| format!("under {name}"))?;
    }
    // The last one to end them has neither mounted nor mapped them for the pods that run.
    cluster.node.agent.stop();
    cluster.node.agent.become_program(&tested);
    cluster.start()?;
    cluster.kubectl(&["delete", "pod", "--all", "--wait=false"])?;
    cluster.wait_none(300)?;
    cluster.wait("nothing of the servers is left", 120, |cluster| {
        let root = cluster.node.agent.root_dir().display().to_string();
        let table = fs::read_to_string("/proc/self/mounts")?;
        let left: Vec<_> =
            table.lines().filter(|line| line.contains(&root) && KINDS.iter().any(|kind| line.contains(kind))).collect();
        ensure!(left.is_empty(), "{left:?}");
        ensure!(!sessions()?.contains(IQN), "a session: {}", sessions()?);
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pvc", "--all"])?;
    cluster.kubectl(&["delete", "pv", &format!("--selector=of={}", cluster.name)]).map(drop)
}

/// The pod goes on writing to the server.
fn ticks(cluster: &ClusterNode) -> anyhow::Result<()> {
    let read = || fs::read_to_string(Path::new(SHARE).join("tick")).context("read what the pod writes");
    let before = read()?;
    cluster.wait("the pod writes to the server", 60, |_| {
        ensure!(read()? != before, "it does not");
        Ok(())
    })
}

fn make_pods(cluster: &ClusterNode) -> anyhow::Result<()> {
    let name = format!("{}-disk", cluster.name);
    let spec = |more: Value| {
        let mut spec = json!({
            "storageClassName": "",
            "volumeMode": "Block",
            "accessModes": ["ReadWriteOnce"],
        });
        if let (Some(spec), Value::Object(more)) = (spec.as_object_mut(), more) {
            spec.extend(more);
        }
        spec
    };
    let disk = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": { "name": name, "labels": { "of": cluster.name } },
        "spec": spec(json!({
            "capacity": { "storage": "64Mi" },
            "persistentVolumeReclaimPolicy": "Retain",
            "iscsi": { "targetPortal": "127.0.0.1", "iqn": IQN, "lun": 1 },
        })),
    });
    cluster.plane().apply(&disk)?;
    let claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": "disk" },
        "spec": spec(json!({ "volumeName": name, "resources": { "requests": { "storage": "64Mi" } } })),
    });
    let share = || json!({ "name": "share", "nfs": { "server": "127.0.0.1", "path": SHARE } });
    let ticking = "while :; do date +%s > /share/tick; sleep 1; done";
    let files = spec_with(cluster, ticking, &[share()]);
    let more = spec_with(cluster, OBEDIENT, &[share()]);
    let mut raw =
        spec_with(cluster, &format!("[ -b /dev/raw ] && dd if=/dev/raw of=/dev/null bs=4k count=1 && {OBEDIENT}"), &[]);
    raw["containers"][0]["volumeDevices"] = json!([{ "name": "raw", "devicePath": "/dev/raw" }]);
    raw["volumes"] = json!([claimed("raw", "disk")]);
    let pods = PODS.iter().zip([files, more, raw]).map(|(name, spec)| pod(name, &spec));
    cluster.apply_all([claim].into_iter().chain(pods).collect())
}
