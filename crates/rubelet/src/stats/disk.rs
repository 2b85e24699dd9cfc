//! Disk usage of pods, images and the node.
//!
//! Owns: what is added up, how long a sum is cached, and that a hung disk blocks no request: its values are missing, and the
//! others are measured.
//! Upstream: `volume_stat_calculator.go`, `host_stats_provider.go`, `ImageFsStats`, `makePodStorageStats`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use rubelet_core::{
    id::{PodRef, PodUid},
    time::Uptime,
};
use rubelet_cri::{port::ContainerRuntime, v1};
use rubelet_host::{port::Host, stats::disk::FileSystem};
use tokio::{
    sync::{Semaphore, oneshot},
    task::JoinSet,
    time::timeout,
};

use super::{
    persistent_meter::{PersistentMeter, PersistentStats},
    pod_disk::{PodFiles, PodMeter, Purpose},
    targets::PodTarget,
    volume_meter::VolumeMeter,
};
use crate::world::{Clock, Paths};

/// How long a request waits for disks or for the runtime.
const PATIENCE: Duration = Duration::from_secs(10);
/// containerd itself measures its layers every ten seconds.
const LAYERS_COUNT_FOR: Duration = Duration::from_secs(10);

/// Disk usage, as far as it is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disks {
    /// Of the agent's root directory.
    pub node: Option<FileSystem>,
    pub images: Option<Layer>,
    /// By container id.
    pub layers: BTreeMap<String, Layer>,
    pub pods: BTreeMap<PodUid, PodDisk>,
    /// Volumes of claims and of CSI drivers.
    pub persistent: BTreeMap<PodUid, Vec<PersistentStats>>,
}

/// The writable layer of a container, or all images together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    pub at: Timestamp,
    pub used_bytes: Option<u64>,
    pub inodes_used: Option<u64>,
    /// Its file system.
    pub on: Option<FileSystem>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodDisk {
    pub at: Timestamp,
    pub files: PodFiles,
    pub(super) counted: Uptime,
}

/// The directories to measure.
pub(crate) struct DiskSources {
    pub runtime: Arc<dyn ContainerRuntime>,
    pub host: Arc<dyn Host>,
    pub volumes: VolumeMeter,
    pub persistent: PersistentMeter,
    pub paths: Paths,
    pub clock: Clock,
    /// `volumeStatsAggPeriod`; `None`: volumes are not measured.
    pub volumes_count_for: Option<Duration>,
}

impl std::fmt::Debug for DiskSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskSources").field("paths", &self.paths).finish_non_exhaustive()
    }
}

/// The valid measurement.
#[derive(Debug)]
pub(crate) struct DiskCounter {
    sources: DiskSources,
    kept: Arc<Mutex<Kept>>,
    /// Concurrent requests share a measurement.
    turn: Semaphore,
    /// At most one task measures, perhaps after its requests timed out.
    counting: Mutex<JoinSet<()>>,
}

#[derive(Debug, Default)]
struct Kept {
    /// At most one per pod.
    pods: BTreeMap<PodUid, PodDisk>,
    layers: BTreeMap<String, Layer>,
    images: Option<Layer>,
    layers_asked: Option<Uptime>,
    node: Option<FileSystem>,
}

impl DiskCounter {
    pub(crate) fn new(sources: DiskSources) -> Self {
        DiskCounter { sources, kept: Arc::default(), turn: Semaphore::new(1), counting: Mutex::default() }
    }

    /// The measurement after a bounded wait.
    pub(crate) async fn disks(&self, pods: &[PodTarget]) -> Disks {
        let _turn = self.turn.acquire().await.expect("nobody closes it");
        // Cancel-safe: an abandoned measurement continues and is available to the next request.
        let ((), ()) = tokio::join!(self.count(pods), self.ask_runtime());
        let meter = self.persistent();
        let persistent = pods.iter().map(|pod| (pod.uid.clone(), meter.of_pod(&pod.uid))).collect();
        let kept = lock(&self.kept);
        Disks {
            node: kept.node,
            images: kept.images.clone(),
            layers: kept.layers.clone(),
            pods: kept.pods.clone(),
            persistent,
        }
    }

    pub(crate) fn persistent(&self) -> &PersistentMeter {
        &self.sources.persistent
    }

    /// Measures pods whose values are stale or missing.
    async fn count(&self, pods: &[PodTarget]) {
        let now = self.sources.clock.now().uptime;
        let counts_for = self.sources.volumes_count_for;
        let due: Vec<PodTarget> = {
            let mut kept = lock(&self.kept);
            let living: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
            kept.pods.retain(|uid, _| living.contains(uid));
            let is_due = |pod: &&PodTarget| {
                let limit = counts_for.unwrap_or(Duration::from_secs(60));
                kept.pods.get(&pod.uid).is_none_or(|known| now.since(known.counted) >= limit)
            };
            pods.iter().filter(is_due).cloned().collect()
        };
        let (done, is_done) = oneshot::channel::<()>();
        {
            let mut counting = lock(&self.counting);
            while counting.try_join_next().is_some() {}
            if !counting.is_empty() {
                return;
            }
            let meter = Meter {
                host: self.sources.host.clone(),
                volumes: self.sources.volumes.clone(),
                paths: self.sources.paths.clone(),
                clock: self.sources.clock.clone(),
                with_volumes: counts_for.is_some(),
            };
            let kept = self.kept.clone();
            counting.spawn(async move {
                let _done = done;
                meter.run(due, &kept).await;
            });
        }
        // Late or not, the results so far are used.
        let _ = timeout(PATIENCE, is_done).await;
    }

    async fn ask_runtime(&self) {
        let now = self.sources.clock.now().uptime;
        if lock(&self.kept).layers_asked.is_some_and(|asked| now.since(asked) < LAYERS_COUNT_FOR) {
            return;
        }
        let runtime = &self.sources.runtime;
        let asked = timeout(PATIENCE, async { tokio::join!(runtime.list_container_stats(), runtime.image_fs_info()) });
        let Ok((layers, images)) = asked.await else { return };
        let (layers, images) = (layers.unwrap_or_default(), images.unwrap_or_default());
        let images = images.image_filesystems.into_iter().next();
        let mut places = Places::default();
        let known = async {
            let images = match images {
                Some(usage) => Some(places.layer(usage, &*self.sources.host).await),
                None => None,
            };
            let mut known = BTreeMap::new();
            for stats in layers {
                if let Some((attributes, layer)) = stats.attributes.zip(stats.writable_layer) {
                    known.insert(attributes.id, places.layer(layer, &*self.sources.host).await);
                }
            }
            (known, images)
        };
        let Ok((layers, images)) = timeout(PATIENCE, known).await else { return };
        let mut kept = lock(&self.kept);
        (kept.layers, kept.images, kept.layers_asked) = (layers, images, Some(now));
    }
}

/// File systems by a path on them: all layers are on the same one or two.
#[derive(Default)]
struct Places(BTreeMap<String, Option<FileSystem>>);

impl Places {
    async fn layer(&mut self, usage: v1::FilesystemUsage, host: &dyn Host) -> Layer {
        let on = match usage.fs_id.map(|id| id.mountpoint) {
            None => None,
            Some(path) => match self.0.get(&path) {
                Some(known) => *known,
                None => {
                    let found = host.file_system(Path::new(&path)).await.ok();
                    self.0.insert(path, found);
                    found
                }
            },
        };
        Layer {
            at: Timestamp::from_nanosecond(i128::from(usage.timestamp)).unwrap_or_default(),
            used_bytes: usage.used_bytes.map(|bytes| bytes.value),
            inodes_used: usage.inodes_used.map(|inodes| inodes.value),
            on,
        }
    }
}

/// Measures one pod after the other.
struct Meter {
    host: Arc<dyn Host>,
    volumes: VolumeMeter,
    paths: Paths,
    clock: Clock,
    with_volumes: bool,
}

impl Meter {
    async fn run(&self, due: Vec<PodTarget>, kept: &Mutex<Kept>) {
        let node = self.host.file_system(&self.paths.root_dir).await.ok();
        lock(kept).node = node;
        for pod in due {
            let now = self.clock.now();
            let containers: Vec<String> = pod.containers.iter().map(|container| container.name.clone()).collect();
            let id = PodRef { uid: pod.uid.clone(), namespace: pod.namespace.into(), name: pod.name.into() };
            let meter =
                PodMeter { host: &*self.host, paths: &self.paths, volumes: &self.volumes, purpose: Purpose::Stats };
            let mut files = meter.files(&id, &containers).await;
            if !self.with_volumes {
                files.volumes.clear();
            }
            lock(kept).pods.insert(pod.uid, PodDisk { at: now.wall, counted: now.uptime, files });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rubelet_cri::client::CriClient;

    use super::*;
    use crate::stats::targets::ContainerTarget;

    fn pod(uid: &str) -> PodTarget {
        let container = ContainerTarget {
            name: "a".to_owned(),
            id: "c1".to_owned(),
            image: String::new(),
            created: Timestamp::default(),
        };
        PodTarget {
            uid: PodUid::new(uid),
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            created: Timestamp::default(),
            sandbox_id: "s1".to_owned(),
            sandbox_image: String::new(),
            cgroups: Vec::new(),
            containers: vec![container],
        }
    }

    fn counter(dir: &Path) -> DiskCounter {
        let paths = Paths {
            root_dir: dir.to_owned(),
            pod_logs_dir: dir.join("logs"),
            volume_plugin_dir: dir.join("volume-plugins"),
            container_links_dir: dir.join("links"),
        };
        let host = Arc::new(rubelet_host::linux::LinuxHost::default());
        DiskCounter::new(DiskSources {
            runtime: Arc::new(CriClient::new("unix:///no.sock", "unix:///no.sock", Duration::from_secs(1)).unwrap()),
            volumes: VolumeMeter::new(host.clone(), Clock::system()),
            persistent: PersistentMeter::default(),
            host,
            paths,
            clock: Clock::system(),
            volumes_count_for: Some(Duration::from_secs(60)),
        })
    }

    #[tokio::test]
    async fn pod_volumes_logs_and_hosts_file_are_measured_without_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("pods/u1/volumes/kubernetes.io~empty-dir/shared");
        let logs = dir.path().join("logs/default_web_u1/a");
        for made in [&volume, &logs] {
            fs::create_dir_all(made).unwrap();
        }
        fs::write(volume.join("big"), vec![1; 64 << 10]).unwrap();
        fs::write(logs.join("0.log"), "hello").unwrap();
        fs::write(dir.path().join("pods/u1/etc-hosts"), "127.0.0.1 localhost").unwrap();
        let counter = counter(dir.path());
        let disks = counter.disks(&[pod("u1"), pod("u2")]).await;
        assert!(disks.node.is_some() && disks.images.is_none() && disks.layers.is_empty());
        let found = &disks.pods[&PodUid::new("u1")];
        assert_eq!((found.files.volumes[0].name.as_str(), found.files.volumes[0].is_ephemeral), ("shared", true));
        assert!(found.files.volumes[0].used.bytes >= 64 << 10 && found.files.volumes[0].used.inodes == 2, "{found:?}");
        assert_eq!((found.files.logs["a"].inodes, found.files.others.inodes), (1, 1));
        assert!(disks.pods[&PodUid::new("u2")].files.volumes.is_empty());

        // Cached for a minute, whatever changes on disk; a removed pod is dropped.
        fs::remove_file(volume.join("big")).unwrap();
        let again = counter.disks(&[pod("u1")]).await;
        assert_eq!(again.pods[&PodUid::new("u1")].files.volumes, found.files.volumes);
        assert_eq!(again.pods.len(), 1);
    }

    #[tokio::test]
    async fn late_measurement_is_not_started_twice_and_last_usage_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let counter = counter(dir.path());
        let known = counter.disks(&[pod("u1")]).await;
        lock(&counter.counting).spawn(std::future::pending());
        let meanwhile = counter.disks(&[pod("u1"), pod("u2")]).await;
        assert_eq!(meanwhile.pods, known.pods);
        lock(&counter.counting).abort_all();
        while lock(&counter.counting).try_join_next().is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(counter.disks(&[pod("u1"), pod("u2")]).await.pods.len(), 2);
    }
}
