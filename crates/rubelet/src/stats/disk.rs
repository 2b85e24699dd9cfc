//! Disk usage of pods, images and the node.
//!
//! Owns: what is added up, how long a sum is cached, and that a hung disk blocks no request: its values are missing, and it
//! is not measured again until it responds.
//! Upstream: `volume_stat_calculator.go`, `host_stats_provider.go`, `ImageFsStats`, `makePodStorageStats`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use jiff::Timestamp;
use rubelet_core::{container::logs, id::PodUid, time::Uptime};
use rubelet_cri::{port::ContainerRuntime, v1};
use rubelet_host::{
    linux::blocking,
    mount,
    stats::disk::{self, FileSystem, Usage},
};
use tokio::{sync::Semaphore, time::timeout};

use super::targets::PodTarget;
use crate::world::{Clock, Paths};

/// How long a request waits for disks or for the runtime.
const PATIENCE: Duration = Duration::from_secs(10);
/// containerd itself measures its layers every ten seconds.
const LAYERS_COUNT_FOR: Duration = Duration::from_secs(10);

/// Volumes that are deleted with their pod and use the node's disk.
const EPHEMERAL: [&str; 2] = ["kubernetes.io~empty-dir", "kubernetes.io~configmap"];

/// Disk usage, as far as it is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disks {
    /// Of the agent's root directory.
    pub node: Option<FileSystem>,
    pub images: Option<Layer>,
    /// By container id.
    pub layers: BTreeMap<String, Layer>,
    pub pods: BTreeMap<PodUid, PodDisk>,
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
    pub volumes: Vec<Volume>,
    /// By container.
    pub logs: BTreeMap<String, Usage>,
    /// Other files of the pod: its logs, its hosts file.
    pub others: Usage,
    pub(super) counted: Uptime,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub name: String,
    pub is_ephemeral: bool,
    pub used: Usage,
    pub on: FileSystem,
}

/// The directories to measure.
pub(crate) struct DiskSources {
    pub runtime: Arc<dyn ContainerRuntime>,
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
    /// A thread is measuring, perhaps after its requests timed out.
    is_counting: Arc<AtomicBool>,
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
        DiskCounter { sources, kept: Arc::default(), turn: Semaphore::new(1), is_counting: Arc::default() }
    }

    /// The measurement after a bounded wait.
    pub(crate) async fn disks(&self, pods: &[PodTarget]) -> Disks {
        let _turn = self.turn.acquire().await.expect("nobody closes it");
        // Cancel-safe: an abandoned measurement continues and is available to the next request.
        let ((), ()) = tokio::join!(self.count(pods), self.ask_runtime());
        let kept = lock(&self.kept);
        Disks { node: kept.node, images: kept.images.clone(), layers: kept.layers.clone(), pods: kept.pods.clone() }
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
        if self.is_counting.swap(true, Ordering::AcqRel) {
            return;
        }
        let (kept, is_counting) = (self.kept.clone(), self.is_counting.clone());
        let (paths, clock) = (self.sources.paths.clone(), self.sources.clock.clone());
        let counting = blocking(move || {
            let _done = Done(is_counting);
            let node = disk::file_system(&paths.root_dir).ok();
            lock(&kept).node = node;
            for pod in due {
                let now = clock.now();
                let found =
                    PodDisk { at: now.wall, counted: now.uptime, ..pod_disk(&pod, &paths, counts_for.is_some()) };
                lock(&kept).pods.insert(pod.uid, found);
            }
            std::io::Result::Ok(())
        });
        // Late or not, the results so far are used.
        let _ = timeout(PATIENCE, counting).await;
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
        let known = blocking(move || {
            let images = images.map(|usage| places.layer(usage));
            let layers = layers
                .into_iter()
                .filter_map(|stats| Some((stats.attributes?.id, places.layer(stats.writable_layer?))));
            std::io::Result::Ok((layers.collect(), images))
        });
        let Ok(Ok((layers, images))) = timeout(PATIENCE, known).await else { return };
        let mut kept = lock(&self.kept);
        (kept.layers, kept.images, kept.layers_asked) = (layers, images, Some(now));
    }
}

/// File systems by a path on them: all layers are on the same one or two.
#[derive(Default)]
struct Places(BTreeMap<String, Option<FileSystem>>);

impl Places {
    fn layer(&mut self, usage: v1::FilesystemUsage) -> Layer {
        let mount_point = usage.fs_id.map(|id| id.mountpoint);
        let on = mount_point
            .and_then(|path| *self.0.entry(path).or_insert_with_key(|path| disk::file_system(Path::new(path)).ok()));
        Layer {
            at: Timestamp::from_nanosecond(i128::from(usage.timestamp)).unwrap_or_default(),
            used_bytes: usage.used_bytes.map(|bytes| bytes.value),
            inodes_used: usage.inodes_used.map(|inodes| inodes.value),
            on,
        }
    }
}

/// Marks the measurement as ended on drop.
struct Done(Arc<AtomicBool>);

impl Drop for Done {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

fn pod_disk(pod: &PodTarget, paths: &Paths, with_volumes: bool) -> PodDisk {
    let log_dir = logs::pod_dir(&paths.pod_logs_dir, &pod.namespace, &pod.name, &pod.uid);
    let hosts = paths.pod_dir(&pod.uid).join("etc-hosts");
    let of_container = |name: &str| Some((name.to_owned(), disk::files_usage(&log_dir.join(name)).ok()?));
    let volumes_dir = paths.volumes_dir(&pod.uid);
    PodDisk {
        at: Timestamp::default(),
        counted: Uptime::default(),
        volumes: if with_volumes { volumes(&volumes_dir) } else { Vec::new() },
        logs: pod.containers.iter().filter_map(|container| of_container(&container.name)).collect(),
        others: disk::files_usage(&log_dir).unwrap_or_default() + disk::file_usage(&hosts).unwrap_or_default(),
    }
}

/// `<plugin>/<volume>`; a volume that cannot be measured is omitted.
fn volumes(dir: &Path) -> Vec<Volume> {
    let names_in = |dir: &Path| -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let mut names: Vec<_> =
            dirs.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect();
        names.sort();
        names
    };
    let plugins = names_in(dir);
    let all = plugins.iter().flat_map(|(plugin, path)| names_in(path).into_iter().map(move |volume| (plugin, volume)));
    all.filter_map(|(plugin, (name, path))| {
        let on = disk::file_system(&path).ok()?;
        let is_mount = mount::is_mount_point(&path).ok()?;
        let used = if is_mount {
            Usage { bytes: on.used_bytes, inodes: on.inodes.saturating_sub(on.inodes_free) }
        } else {
            disk::tree_usage(&path).ok()?
        };
        let is_ephemeral = EPHEMERAL.contains(&plugin.as_str()) && !is_mount;
        Some(Volume { name, is_ephemeral, used, on })
    })
    .collect()
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
        let paths =
            Paths { root_dir: dir.to_owned(), pod_logs_dir: dir.join("logs"), container_links_dir: dir.join("links") };
        DiskCounter::new(DiskSources {
            runtime: Arc::new(CriClient::new("unix:///no.sock", "unix:///no.sock", Duration::from_secs(1)).unwrap()),
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
        assert_eq!((found.volumes[0].name.as_str(), found.volumes[0].is_ephemeral), ("shared", true));
        assert!(found.volumes[0].used.bytes >= 64 << 10 && found.volumes[0].used.inodes == 2, "{found:?}");
        assert_eq!((found.logs["a"].inodes, found.others.inodes), (1, 1));
        assert!(disks.pods[&PodUid::new("u2")].volumes.is_empty());

        // Cached for a minute, whatever changes on disk; a removed pod is dropped.
        fs::remove_file(volume.join("big")).unwrap();
        let again = counter.disks(&[pod("u1")]).await;
        assert_eq!(again.pods[&PodUid::new("u1")].volumes, found.volumes);
        assert_eq!(again.pods.len(), 1);
    }

    #[tokio::test]
    async fn hung_disk_is_not_measured_again_and_last_usage_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let counter = counter(dir.path());
        let known = counter.disks(&[pod("u1")]).await;
        counter.is_counting.store(true, Ordering::Release);
        let meanwhile = counter.disks(&[pod("u1"), pod("u2")]).await;
        assert_eq!(meanwhile.pods, known.pods);
        counter.is_counting.store(false, Ordering::Release);
        assert_eq!(counter.disks(&[pod("u1"), pod("u2")]).await.pods.len(), 2);
    }
}
