//! What a pod holds on the node's disks, apart from writable layers.
//!
//! Owns: which files of a pod are counted as what. Never: caches, asks the runtime.
//! Upstream: `volume_stat_calculator.go`, `makePodStorageStats`, `host_stats_provider.go`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rubelet_core::{
    container::logs,
    id::{PodRef, PodUid},
};
use rubelet_host::{
    port::{FileKind, Host, VolumeFigures},
    stats::disk::{FileSystem, Usage},
};

use crate::world::Paths;

/// Volumes that are deleted with their pod and use the node's disk.
const EPHEMERAL: [&str; 2] = ["kubernetes.io~empty-dir", "kubernetes.io~configmap"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodFiles {
    /// Those that cannot be measured are missing.
    pub volumes: Vec<Volume>,
    /// By container.
    pub logs: BTreeMap<String, Usage>,
    /// Other files of the pod: its hosts file.
    pub others: Usage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub name: String,
    pub is_ephemeral: bool,
    pub used: Usage,
    pub on: FileSystem,
}

/// The files of a pod; each directory is measured in the lane of its device.
pub(crate) async fn pod_files(host: &dyn Host, paths: &Paths, pod: &PodRef, containers: &[String]) -> PodFiles {
    let log_dir = logs::pod_dir(&paths.pod_logs_dir, &pod.namespace, &pod.name, &pod.uid);
    let mut logs = BTreeMap::new();
    for name in containers {
        if let Ok(usage) = host.files_usage(&log_dir.join(name)).await {
            logs.insert(name.clone(), usage);
        }
    }
    let of_logs = host.files_usage(&log_dir).await.unwrap_or_default();
    let hosts = host.files_usage(&paths.pod_dir(&pod.uid).join("etc-hosts")).await.unwrap_or_default();
    PodFiles { volumes: volumes(host, paths, &pod.uid).await, logs, others: of_logs.saturating_add(hosts) }
}

/// `<plugin>/<volume>`.
async fn volumes(host: &dyn Host, paths: &Paths, uid: &PodUid) -> Vec<Volume> {
    let mut volumes = Vec::new();
    for (plugin, dir) in directories(host, &paths.volumes_dir(uid)).await {
        for (name, path) in directories(host, &dir).await {
            if let Ok(VolumeFigures { used, on, is_mount }) = host.volume_figures(&path).await {
                let is_ephemeral = EPHEMERAL.contains(&plugin.as_str()) && !is_mount;
                volumes.push(Volume { name, is_ephemeral, used, on });
            }
        }
    }
    volumes
}

async fn directories(host: &dyn Host, dir: &Path) -> Vec<(String, PathBuf)> {
    let entries = host.list_dir(dir).await.unwrap_or_default();
    let dirs = entries.into_iter().filter(|entry| entry.kind == FileKind::Directory);
    dirs.map(|entry| (entry.name.clone(), dir.join(entry.name))).collect()
}
