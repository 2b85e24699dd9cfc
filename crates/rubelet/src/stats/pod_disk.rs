//! What a pod holds on the node's disks, apart from writable layers.
//!
//! Owns: which files of a pod are counted as what, and how long its volumes are waited for. Never: asks the runtime.
//! Upstream: `volume_stat_calculator.go`, `makePodStorageStats`, `host_stats_provider.go`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use rubelet_core::{
    container::logs,
    id::{PodRef, PodUid},
    time::Uptime,
};
use rubelet_host::{
    port::{FileKind, Host, VolumeFigures},
    stats::disk::{FileSystem, Usage},
};

use super::volume_meter::VolumeMeter;
use crate::world::{Clock, Paths};

/// How long a sample waits for one volume before it takes the last figures.
const STATS_PATIENCE: Duration = Duration::from_secs(10);
/// How long eviction waits for one volume before it takes what is counted so far.
const EVICTION_PATIENCE: Duration = Duration::from_secs(1);
/// The plugins whose volumes are walked: they are on the node's disk or in its memory. The others' are asked for their figures.
const WALKED: [&str; 5] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
];
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

/// Measures pods' files; each directory in the lane of its device.
pub(crate) struct PodMeter<'a> {
    pub host: &'a dyn Host,
    pub paths: &'a Paths,
    pub volumes: &'a VolumeMeter,
    pub purpose: Purpose<'a>,
}

/// What figures are for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose<'a> {
    /// Complete sums, perhaps old ones.
    Stats,
    /// What a pod uses at least, until this moment.
    Eviction { until: Uptime, clock: &'a Clock },
}

impl PodMeter<'_> {
    pub(crate) async fn files(&self, pod: &PodRef, containers: &[String]) -> PodFiles {
        let (host, paths) = (self.host, self.paths);
        let log_dir = logs::pod_dir(&paths.pod_logs_dir, &pod.namespace, &pod.name, &pod.uid);
        let mut logs = BTreeMap::new();
        for name in containers {
            if let Ok(usage) = host.files_usage(&log_dir.join(name)).await {
                logs.insert(name.clone(), usage);
            }
        }
        let of_logs = host.files_usage(&log_dir).await.unwrap_or_default();
        let hosts = host.files_usage(&paths.pod_dir(&pod.uid).join("etc-hosts")).await.unwrap_or_default();
        PodFiles { volumes: self.volumes(&pod.uid).await, logs, others: of_logs.saturating_add(hosts) }
    }

    /// `<plugin>/<volume>`.
    async fn volumes(&self, uid: &PodUid) -> Vec<Volume> {
        let mut volumes = Vec::new();
        let plugins = directories(self.host, &self.paths.volumes_dir(uid)).await.into_iter();
        for (plugin, dir) in plugins.filter(|(plugin, _)| WALKED.contains(&plugin.as_str())) {
            for (name, path) in directories(self.host, &dir).await {
                if let Some(VolumeFigures { used, on, is_mount }) = self.figures(&path).await {
                    let is_ephemeral = EPHEMERAL.contains(&plugin.as_str()) && !is_mount;
                    volumes.push(Volume { name, is_ephemeral, used, on });
                }
            }
        }
        volumes
    }

    async fn figures(&self, volume: &Path) -> Option<VolumeFigures> {
        match self.purpose {
            Purpose::Stats => self.volumes.measured(volume, STATS_PATIENCE).await,
            Purpose::Eviction { until, clock } => {
                let patience = until.since(clock.now().uptime).min(EVICTION_PATIENCE);
                self.volumes.at_least(volume, patience).await
            }
        }
    }
}

async fn directories(host: &dyn Host, dir: &Path) -> Vec<(String, PathBuf)> {
    let entries = host.list_dir(dir).await.unwrap_or_default();
    let dirs = entries.into_iter().filter(|entry| entry.kind == FileKind::Directory);
    dirs.map(|entry| (entry.name.clone(), dir.join(entry.name))).collect()
}
