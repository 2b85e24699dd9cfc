//! Many pods with many volumes of all kinds, while the agent is killed.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{clock::Stopwatch, sweep::mounts_below};
use serde_json::{Value, json};

use crate::{
    bench::Usage,
    e2e::cluster::{
        ClusterCase, ClusterNode, OBEDIENT, Plane,
        csi::{claim, claimed, driver::Driver, spec_with, wait_only_driver},
        pod,
    },
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "pods with ten volumes each, CSI among them, start while the agent is killed, and leave nothing",
    plane: Plane::Shared,
    run: crowd,
}];

/// `cargo xtask volumes` starts fifty.
const PODS: usize = 10;

fn crowd(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let Cost { restarts, .. } = crowd_of(cluster, PODS)?;
    ensure!(restarts == 0, "containers started {restarts} times again: a volume was missing");
    Ok(())
}

/// What a crowd cost.
#[derive(Debug)]
pub struct Cost {
    /// Until all run, with the death of the agent in the middle.
    pub start_secs: f64,
    /// From their deletion until no volume of theirs is left.
    pub end_secs: f64,
    /// The agent's processor.
    pub cpu_secs: f64,
    /// Of containers, which end if a volume lacks what belongs there or has more.
    pub restarts: u64,
}

/// Starts that many pods with ten volumes each and kills the agent in the middle.
pub fn crowd_of(cluster: &mut ClusterNode, count: usize) -> anyhow::Result<Cost> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    cluster.apply_all(vec![
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": "1" } }),
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "password" }, "stringData": { "a": "2" } }),
    ])?;
    let names: Vec<String> = (0..count).map(|number| format!("crowd{number}")).collect();
    let volumes = names.iter().map(|name| local_volume(cluster, name)).collect::<anyhow::Result<Vec<_>>>()?;
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": volumes }))?;
    let mut objects: Vec<Value> = names.iter().map(|name| claim(&driver, name, "ReadWriteOnce")).collect();
    objects.extend(names.iter().map(|name| local_claim(cluster, name)));
    objects.extend(names.iter().map(|name| manifest(cluster, &driver, name)));
    let idle = Usage::read(&cluster.node)?;
    let watch = Stopwatch::start();
    cluster.apply_all(objects)?;
    cluster.wait("some of them run", 240, |cluster| {
        let running = ready(cluster)?;
        ensure!(running >= count / 4, "{running} run");
        Ok(())
    })?;
    let first = Usage::read(&cluster.node)?.cpu_ns.saturating_sub(idle.cpu_ns);
    cluster.node.agent.kill();
    thread::sleep(Duration::from_secs(1));
    cluster.node.agent.spawn()?;
    cluster.wait("all of them run", 480, |cluster| {
        let running = ready(cluster)?;
        ensure!(running == count, "{running} run");
        Ok(())
    })?;
    let start_secs = watch.secs();
    let pods = cluster.pods()?;
    let crowd = pods.iter().filter(|pod| pod.name().starts_with("crowd"));
    let restarts = crowd.filter_map(|pod| pod.container("main")["restartCount"].as_u64()).sum();
    // Asked again for an inline volume, by the agent that started again, this version of the driver forgets where it is mounted.
    driver.kill(cluster)?;
    let watch = Stopwatch::start();
    cluster.kubectl(&["delete", "--wait=false", "pod", "--selector=app=crowd"])?;
    wait_only_driver(cluster, 300)?;
    cluster.kubectl(&["delete", "pvc", "--all"])?;
    driver.wait_nothing_left(cluster, 180)?;
    let end_secs = watch.secs();
    let cpu_secs = (first + Usage::read(&cluster.node)?.cpu_ns) as f64 / 1e9;
    cluster.wait("no mount and no directory of the pods and their volumes is left", 60, |cluster| {
        let left = leftovers(cluster)?;
        ensure!(left.is_empty(), "left: {left:?}");
        Ok(())
    })?;
    let selector = format!("--selector=of={}", cluster.name);
    cluster.kubectl(&["delete", "pv", &selector])?;
    driver.remove(cluster)?;
    Ok(Cost { start_secs, end_secs, cpu_secs, restarts })
}

/// Directories of pods that are gone with what is mounted there, and directories of volumes that no pod uses.
fn leftovers(cluster: &ClusterNode) -> anyhow::Result<Vec<PathBuf>> {
    let root = cluster.node.agent.root_dir();
    let pods = root.join("pods");
    let alive: Vec<PathBuf> = cluster.pods()?.iter().map(|pod| pods.join(pod.uid())).collect();
    let mut left = entries(&pods)?;
    left.extend(mounts_below(&pods)?);
    left.retain(|path| !alive.iter().any(|pod| path.starts_with(pod)));
    left.extend(volume_dirs(&root.join("plugins/kubernetes.io"))?);
    Ok(left)
}

/// Every plugin has directories with one for each volume, as `csi/<driver>` and `local-volume/mounts`. They may stay when they are empty.
fn volume_dirs(plugins: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for plugin in entries(plugins)? {
        for dir in entries(&plugin)? {
            found.extend(entries(&dir)?);
        }
    }
    // Those of block volumes are deeper.
    for dir in ["staging", "publish"].map(|dir| plugins.join("csi/volumeDevices").join(dir)) {
        found.retain(|path| *path != dir);
        found.extend(entries(&dir)?);
    }
    Ok(found)
}

/// Of a directory that may be missing.
fn entries(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("list {}", dir.display()))?,
    };
    Ok(entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?)
}

fn ready(cluster: &ClusterNode) -> anyhow::Result<usize> {
    Ok(cluster.pods()?.iter().filter(|pod| pod.name().starts_with("crowd") && pod.is_ready()).count())
}

/// Its container ends if a volume lacks what belongs there, or has lines of another pod. More than one of its own is right: when the agent
/// dies that asked for a start, the runtime cuts the start off, perhaps after the script has begun.
fn manifest(cluster: &ClusterNode, driver: &Driver, name: &str) -> Value {
    let volumes = [
        json!({ "name": "scratch", "emptyDir": {} }),
        json!({ "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }),
        json!({ "name": "settings", "configMap": { "name": "settings" } }),
        json!({ "name": "password", "secret": { "secretName": "password" } }),
        json!({ "name": "joined", "projected": { "sources": [
            { "configMap": { "name": "settings" } },
            { "serviceAccountToken": { "path": "token", "expirationSeconds": 600 } },
        ] } }),
        json!({ "name": "labels", "downwardAPI": {
            "items": [{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }],
        } }),
        json!({ "name": "host", "hostPath": { "path": "/etc" } }),
        claimed("claim", name),
        json!({ "name": "inline", "csi": { "driver": driver.name } }),
        claimed("local", &format!("local-{name}")),
    ];
    let check = "[ $(cat /settings/a) = 1 ] && [ $(cat /password/a) = 2 ] && [ -s /joined/token ] && [ -s /host/passwd ] \
                 && grep -q crowd /labels/labels && for dir in scratch memory claim inline local; do \
                 echo $HOSTNAME >> /$dir/by && [ \"$(uniq /$dir/by)\" = $HOSTNAME ] || exit 1; done";
    let spec = spec_with(cluster, &format!("{check} && {OBEDIENT}"), &volumes);
    let mut pod = pod(name, &spec);
    pod["metadata"]["labels"] = json!({ "app": "crowd" });
    pod
}

pub fn local_volume(cluster: &ClusterNode, name: &str) -> anyhow::Result<Value> {
    let path = cluster.node.bed.layout.dir.join("local").join(name);
    fs::create_dir_all(&path).with_context(|| format!("make {}", path.display()))?;
    Ok(json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": { "name": format!("{}-{name}", cluster.name), "labels": { "of": cluster.name } },
        "spec": {
            "capacity": { "storage": "8Mi" },
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "local": { "path": path },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                { "key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.name] },
            ] }] } },
        },
    }))
}

pub fn local_claim(cluster: &ClusterNode, name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": format!("local-{name}") },
        "spec": {
            "storageClassName": "",
            "volumeName": format!("{}-{name}", cluster.name),
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "8Mi" } },
        },
    })
}
