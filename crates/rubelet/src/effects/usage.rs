//! Figures of the node and of pods, for eviction.
//!
//! Owns: which figures make a signal, and that containers are found in their pod's cgroup. Never: compares them with a
//! threshold.
//! Upstream: the summary provider, `makeSignalObservations`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    eviction::{
        threshold::{Observation, Signal},
        usage::{
            ContainerUsage, DiskLayout, DiskUsage, NodeUsage, PodFigures, PodToMeasure, PodUsage, PodUsages,
            RuntimePlaces,
        },
    },
};
use rubelet_host::{
    port::{MemoryFigures, NodeFigures},
    stats::disk::{FileSystem, Usage},
};

use tokio::time::timeout;

use super::failure;
use crate::{
    stats::{
        pod_disk::{PodMeter, Purpose},
        targets::cgroup_of,
    },
    world::World,
};

/// A file system that does not say within this time what is free is left out: memory is looked at all the same.
const FILE_SYSTEM_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the runtime may take for the sizes of writable layers. Nothing else is looked at while pods are ranked.
const LAYERS_TIMEOUT: Duration = Duration::from_secs(10);

/// How long one look at pods waits for large volumes; after that it takes what is known of them.
const VOLUMES_PATIENCE: Duration = Duration::from_secs(10);

/// The runtime is not asked for anything.
pub(super) async fn measure_node(
    world: &World,
    kubepods: Option<&str>,
    places: Option<&RuntimePlaces>,
) -> Result<Facts, EffectError> {
    let figures = world.host.node_figures(kubepods.map(Path::new)).await;
    let figures = figures.map_err(|error| failure::io("measure", Path::new("/"), &error))?;
    let (node_fs, images, containers) = tokio::join!(
        file_system(world, Some(&world.paths.root_dir)),
        file_system(world, places.map(|places| places.images.as_path())),
        file_system(world, places.map(|places| places.containers.as_path())),
    );
    let mut signals = of_kernel(figures);
    signals.extend(of_file_system(node_fs, Signal::NodeFsAvailable, Signal::NodeFsInodesFree));
    signals.extend(of_file_system(images, Signal::ImageFsAvailable, Signal::ImageFsInodesFree));
    Ok(Facts::NodeUsage(NodeUsage { signals, layout: layout_of(node_fs, images, containers) }))
}

async fn file_system(world: &World, path: Option<&Path>) -> Option<FileSystem> {
    timeout(FILE_SYSTEM_TIMEOUT, world.host.file_system(path?)).await.ok()?.ok()
}

pub(super) async fn find_image_fs(world: &World) -> Result<Facts, EffectError> {
    let info = world.runtime.image_fs_info().await.map_err(|error| failure::retry(&error))?;
    let place = |usage: &rubelet_cri::v1::FilesystemUsage| Some(PathBuf::from(&usage.fs_id.as_ref()?.mountpoint));
    let nowhere = || EffectError { kind: ErrorKind::Retry, message: "the runtime names no file system".to_owned() };
    let images = info.image_filesystems.first().and_then(place).ok_or_else(nowhere)?;
    let containers = info.container_filesystems.first().and_then(place).unwrap_or_else(|| images.clone());
    Ok(Facts::RuntimePlaces(RuntimePlaces { images, containers }))
}

fn of_kernel(figures: NodeFigures) -> BTreeMap<Signal, Observation> {
    let memory = |figures: MemoryFigures| Observation {
        available: figures.limit_bytes.saturating_sub(figures.working_set_bytes),
        capacity: figures.limit_bytes,
    };
    let pids = figures.max_tasks.zip(figures.tasks);
    let pids = pids.map(|(max, tasks)| Observation { available: max.saturating_sub(tasks), capacity: max });
    let signals = [
        (Signal::MemoryAvailable, figures.memory.map(memory)),
        (Signal::AllocatableMemoryAvailable, figures.memory_of_pods.map(memory)),
        (Signal::PidAvailable, pids),
    ];
    signals.into_iter().filter_map(|(signal, observed)| Some((signal, observed?))).collect()
}

/// A file system without a fixed number of inodes has none to run out of.
fn of_file_system(
    found: Option<FileSystem>,
    bytes: Signal,
    inodes: Signal,
) -> impl Iterator<Item = (Signal, Observation)> {
    let of_bytes =
        found.map(|found| (bytes, Observation { available: found.available_bytes, capacity: found.capacity_bytes }));
    let of_inodes = found.filter(|found| found.inodes > 0);
    let of_inodes =
        of_inodes.map(|found| (inodes, Observation { available: found.inodes_free, capacity: found.inodes }));
    of_bytes.into_iter().chain(of_inodes)
}

fn layout_of(
    node: Option<FileSystem>,
    images: Option<FileSystem>,
    containers: Option<FileSystem>,
) -> Option<DiskLayout> {
    let (node, images, containers) = (node?.device, images?.device, containers?.device);
    Some(if images == node {
        DiskLayout::Shared
    } else if images == containers {
        DiskLayout::DedicatedImages
    } else {
        DiskLayout::Split
    })
}

/// A pod that cannot be measured is missing.
pub(super) async fn measure_pods(
    world: &World,
    pods: &[PodToMeasure],
    figures: PodFigures,
) -> Result<Facts, EffectError> {
    let usages = match figures {
        PodFigures::Cgroups => memory_of(world, pods).await,
        PodFigures::Disks => files_of(world, pods).await?,
    };
    Ok(Facts::PodUsages(usages))
}

async fn memory_of(world: &World, pods: &[PodToMeasure]) -> PodUsages {
    let mut usages = PodUsages::new();
    for pod in pods {
        let Some(cgroup) = &pod.cgroup else { continue };
        let Ok(Some(found)) = world.host.pod_figures(Path::new(cgroup)).await else { continue };
        let names: Vec<String> = found.containers.keys().cloned().collect();
        let of_container = |(name, id): (&String, &rubelet_core::id::ContainerId)| {
            let figures = found.containers.get(cgroup_of(id.as_str(), &names)?)?;
            let usage = ContainerUsage { memory_bytes: figures.working_set_bytes, ..ContainerUsage::default() };
            Some((name.clone(), usage))
        };
        let processes = found.containers.values().map(|figures| figures.processes);
        let usage = PodUsage {
            memory_bytes: found.working_set_bytes,
            processes: processes.fold(0, u64::saturating_add),
            containers: pod.containers.iter().filter_map(of_container).collect(),
            ..PodUsage::default()
        };
        usages.insert(pod.pod.uid.clone(), usage);
    }
    usages
}

async fn files_of(world: &World, pods: &[PodToMeasure]) -> Result<PodUsages, EffectError> {
    let stats = timeout(LAYERS_TIMEOUT, world.runtime.list_container_stats()).await;
    let late = |_| EffectError { kind: ErrorKind::TimedOut, message: "the runtime measures its layers".to_owned() };
    let stats = stats.map_err(late)?.map_err(|error| failure::retry(&error))?;
    let layer = |stats: rubelet_cri::v1::ContainerStats| {
        let layer = stats.writable_layer?;
        let bytes = layer.used_bytes.map_or(0, |value| value.value);
        let inodes = layer.inodes_used.map_or(0, |value| value.value);
        Some((stats.attributes?.id, DiskUsage { bytes, inodes }))
    };
    let layers: BTreeMap<String, DiskUsage> = stats.into_iter().filter_map(layer).collect();
    let purpose = Purpose::Eviction { until: world.clock.now().uptime + VOLUMES_PATIENCE, clock: &world.clock };
    let meter = PodMeter { host: &*world.host, paths: &world.paths, volumes: &world.volumes, purpose };
    let mut usages = PodUsages::new();
    for PodToMeasure { pod, containers, .. } in pods {
        let names: Vec<String> = containers.keys().cloned().collect();
        let files = meter.files(pod, &names).await;
        let of_container = |(name, id): (&String, &rubelet_core::id::ContainerId)| {
            let rootfs = layers.get(id.as_str()).copied().unwrap_or_default();
            let logs = files.logs.get(name).copied().map(disk_usage).unwrap_or_default();
            (name.clone(), ContainerUsage { rootfs, logs, ..ContainerUsage::default() })
        };
        let usage = PodUsage {
            containers: containers.iter().map(of_container).collect(),
            volumes: files.volumes.iter().map(|volume| (volume.name.clone(), disk_usage(volume.used))).collect(),
            others: disk_usage(files.others),
            ..PodUsage::default()
        };
        usages.insert(pod.uid.clone(), usage);
    }
    Ok(usages)
}

fn disk_usage(usage: Usage) -> DiskUsage {
    DiskUsage { bytes: usage.bytes, inodes: usage.inodes }
}

#[cfg(test)]
mod tests {
    use rubelet_core::id::{ContainerId, PodRef, PodUid};

    use super::*;
    use crate::world::testing::world_in;

    #[tokio::test]
    async fn node_has_memory_processes_and_disk_even_without_a_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        std::fs::create_dir_all(&world.paths.root_dir).unwrap();
        let Ok(Facts::NodeUsage(usage)) = measure_node(&world, None, None).await else { panic!("no figures") };
        for signal in [Signal::MemoryAvailable, Signal::PidAvailable, Signal::NodeFsAvailable] {
            let Observation { available, capacity } = usage.signals[&signal];
            assert!(available > 0 && available <= capacity, "{signal}: {available} of {capacity}");
        }
        assert_eq!(usage.layout, None);
        let here = RuntimePlaces { images: dir.path().to_owned(), containers: dir.path().to_owned() };
        let Ok(Facts::NodeUsage(usage)) = measure_node(&world, None, Some(&here)).await else { panic!("no figures") };
        assert_eq!(usage.layout, Some(DiskLayout::Shared));
        assert_eq!(usage.signals[&Signal::ImageFsAvailable].capacity, usage.signals[&Signal::NodeFsAvailable].capacity);
    }

    #[test]
    fn layout_follows_the_devices() {
        let on = |device| Some(FileSystem { device, ..FileSystem::default() });
        assert_eq!(layout_of(on(1), on(1), on(1)), Some(DiskLayout::Shared));
        assert_eq!(layout_of(on(1), on(2), on(2)), Some(DiskLayout::DedicatedImages));
        assert_eq!(layout_of(on(1), on(2), on(1)), Some(DiskLayout::Split));
        assert_eq!(layout_of(on(1), None, on(1)), None);
    }

    #[tokio::test]
    async fn pod_without_a_cgroup_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let pod = PodRef { uid: PodUid::new("u1"), namespace: "default".into(), name: "web".into() };
        let containers = BTreeMap::from([("a".to_owned(), ContainerId::new("c1"))]);
        let asked = PodToMeasure { pod, cgroup: Some("/no/such/pod".to_owned()), containers };
        assert!(memory_of(&world_in(dir.path()), &[asked]).await.is_empty());
    }
}
