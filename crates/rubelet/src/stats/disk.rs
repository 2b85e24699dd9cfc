//! Disk usage of pods, images and the node.
//!
//! Owns: what is added up, how long a sum is cached, and that a hung disk blocks no request: its values are missing, and the
//! others are measured.
//! Upstream: `volume_stat_calculator.go`, `host_stats_provider.go`, `ImageFsStats`, `makePodStorageStats`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use rubelet_core::{container::logs, id::PodUid, time::Uptime};
use rubelet_cri::{port::ContainerRuntime, v1};
use rubelet_host::{
    lanes::{Call, Lanes, Length},
    mount,
    stats::disk::{self, FileSystem, Usage},
};
use tokio::{
    sync::{Semaphore, oneshot},
    task::JoinSet,
    time::timeout,
};

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
    pub lanes: Lanes,
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
        let (done, is_done) = oneshot::channel::<()>();
        {
            let mut counting = lock(&self.counting);
            while counting.try_join_next().is_some() {}
            if !counting.is_empty() {
                return;
            }
            let meter = Meter {
                lanes: self.sources.lanes.clone(),
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
        let root_dir = self.sources.paths.root_dir.clone();
        let known = self.sources.lanes.run(&root_dir, Length::Short, move |_| {
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

/// Measures one directory after the other, each in the lane of its device.
struct Meter {
    lanes: Lanes,
    paths: Paths,
    clock: Clock,
    with_volumes: bool,
}

impl Meter {
    async fn run(&self, due: Vec<PodTarget>, kept: &Mutex<Kept>) {
        let node = self.on_device(&self.paths.root_dir, |path, _| disk::file_system(path)).await;
        lock(kept).node = node;
        for pod in due {
            let now = self.clock.now();
            let found = PodDisk { at: now.wall, counted: now.uptime, ..self.pod_disk(&pod).await };
            lock(kept).pods.insert(pod.uid, found);
        }
    }

    async fn pod_disk(&self, pod: &PodTarget) -> PodDisk {
        let log_dir = logs::pod_dir(&self.paths.pod_logs_dir, &pod.namespace, &pod.name, &pod.uid);
        let containers: Vec<String> = pod.containers.iter().map(|container| container.name.clone()).collect();
        let of_logs = self.on_device(&log_dir, move |dir, _| {
            let of_container = |name: String| Some((name.clone(), disk::files_usage(&dir.join(name)).ok()?));
            Ok((containers.into_iter().filter_map(of_container).collect(), disk::files_usage(dir).unwrap_or_default()))
        });
        let (logs, others): (BTreeMap<_, _>, Usage) = of_logs.await.unwrap_or_default();
        let hosts = self.paths.pod_dir(&pod.uid).join("etc-hosts");
        let hosts = self.on_device(&hosts, |path, _| disk::file_usage(path)).await.unwrap_or_default();
        let volumes = if self.with_volumes { self.volumes(&pod.uid).await } else { Vec::new() };
        PodDisk {
            at: Timestamp::default(),
            counted: Uptime::default(),
            volumes,
            logs,
            others: others.saturating_add(hosts),
        }
    }

    /// `<plugin>/<volume>`; a volume that cannot be measured is omitted.
    async fn volumes(&self, uid: &PodUid) -> Vec<Volume> {
        let names = self.on_device(&self.paths.volumes_dir(uid), |dir, _| Ok(volume_dirs(dir))).await;
        let mut volumes = Vec::new();
        for (is_ephemeral, name, path) in names.unwrap_or_default() {
            let measured = self.on_device(&path, move |path, call| {
                let on = disk::file_system(path)?;
                let is_mount = mount::is_mount_point(path)?;
                let used = if is_mount {
                    Usage { bytes: on.used_bytes, inodes: on.inodes.saturating_sub(on.inodes_free) }
                } else {
                    disk::tree_usage(path, &|| call.go_on())?
                };
                Ok(Volume { name, is_ephemeral: is_ephemeral && !is_mount, used, on })
            });
            volumes.extend(measured.await);
        }
        volumes
    }

    /// `None` if it cannot be measured.
    async fn on_device<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce(&Path, &Call) -> io::Result<T> + Send + 'static,
    ) -> Option<T> {
        let owned = path.to_owned();
        self.lanes.run(path, Length::Long, move |call| work(&owned, call)).await.ok()
    }
}

/// Whether it uses the node's disk until its pod is deleted, its name, its path.
fn volume_dirs(dir: &Path) -> Vec<(bool, String, PathBuf)> {
    let names_in = |dir: &Path| -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let mut names: Vec<_> =
            dirs.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect();
        names.sort();
        names
    };
    let of_plugin = |(plugin, path): (String, PathBuf)| {
        let is_ephemeral = EPHEMERAL.contains(&plugin.as_str());
        names_in(&path).into_iter().map(move |(name, path)| (is_ephemeral, name, path))
    };
    names_in(dir).into_iter().flat_map(of_plugin).collect()
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
            lanes: Lanes::own_files(),
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
