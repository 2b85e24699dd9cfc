//! `/stats/summary`: a sample as the JSON document `Summary` of `stats/v1alpha1`.
//!
//! Owns: the mapping of values to fields. Unknown values are omitted; one missing value never affects the others.
//! Upstream: `k8s.io/kubelet/pkg/apis/stats/v1alpha1`, `pkg/kubelet/server/stats/summary.go`, `cri_stats_provider.go`.

use jiff::Timestamp;
use rubelet_host::stats::{
    cgroup::{Memory, Pressure, Stall},
    disk::{FileSystem, Usage as DiskUsage},
    process::Interface,
};

use super::{
    disk::{Disks, Layer, PodDisk},
    persistent_meter::PersistentStats,
    sample::{ContainerSample, Measured, PodSample, Sample},
};

mod types;

pub(crate) use types::Summary;
use types::{
    ClaimReference, ContainerStats, CpuStats, FsStats, HealthStats, InterfaceStats, IoStats, MemoryStats, NetworkStats,
    NodeStats, PodReference, PodStats, ProcessStats, PsiData, PsiStats, RlimitStats, RuntimeStats, SwapStats, Time,
    Usage, VolumeStats,
};

/// The interface that CNI gives every pod.
const DEFAULT_INTERFACE: &str = "eth0";

/// CPU and memory only.
pub(crate) fn usage(sample: &Sample) -> Summary {
    Summary {
        node: NodeStats {
            node_name: sample.node_name.clone(),
            system_containers: sample.system.iter().map(|(name, own)| system(sample, name, own)).collect(),
            start_time: Time(boot_time(sample)),
            usage: node_usage(sample),
            network: None,
            fs: None,
            runtime: None,
            rlimit: None,
        },
        pods: sample.pods.iter().filter(|pod| !pod.containers.is_empty()).map(|pod| pod_usage(sample, pod)).collect(),
    }
}

/// All fields.
pub(crate) fn summary(sample: &Sample, disks: &Disks) -> Summary {
    let mut summary = usage(sample);
    let node = &mut summary.node;
    node.usage.io = sample.root.as_ref().map(|root| io(root, sample.at));
    node.network = network(&sample.interfaces, sample.at);
    node.fs = disks.node.as_ref().map(|found| {
        let used = DiskUsage { bytes: found.used_bytes, inodes: found.inodes.saturating_sub(found.inodes_free) };
        on_disk(sample.at, Some(used), Some(found))
    });
    let images = disks.images.as_ref().map(of_layer);
    node.runtime = Some(RuntimeStats { image_fs: images.clone(), container_fs: images });
    node.rlimit =
        Some(RlimitStats { time: Time(sample.at), maxpid: sample.machine.max_pid, curproc: sample.machine.tasks });
    for (container, (_, own)) in node.system_containers.iter_mut().zip(&sample.system) {
        container.usage.io = Some(io(own, sample.at));
    }
    let measured = sample.pods.iter().filter(|pod| !pod.containers.is_empty());
    for (stats, pod) in summary.pods.iter_mut().zip(measured) {
        complete_pod(stats, pod, sample.at, disks);
    }
    summary
}

fn complete_pod(stats: &mut PodStats, pod: &PodSample, at: Timestamp, disks: &Disks) {
    let disk = disks.pods.get(&pod.target.uid);
    stats.usage.io = pod.own.as_ref().map(|own| io(own, at));
    stats.network = network(&pod.interfaces, at);
    let count = pod.containers.iter().map(|container| container.processes.count).sum();
    stats.processes = Some(ProcessStats { process_count: count });
    for (container, sampled) in stats.containers.iter_mut().zip(&pod.containers) {
        container.usage.io = Some(io(&sampled.measured, at));
        container.rootfs = disks.layers.get(&sampled.target.id).map(of_layer);
        container.logs = disk.map(|disk| {
            let used = disk.files.logs.get(&container.name).copied().unwrap_or_default();
            on_disk(disk.at, Some(used), disks.node.as_ref())
        });
    }
    let volumes = disk.into_iter().flat_map(|disk| disk.files.volumes.iter().map(move |volume| (disk.at, volume)));
    stats.volumes = volumes
        .map(|(at, volume)| VolumeStats {
            fs: on_disk(at, Some(volume.used), Some(&volume.on)),
            name: volume.name.clone(),
            claim: None,
            health: None,
        })
        .chain(disks.persistent.get(&pod.target.uid).into_iter().flatten().map(persistent))
        .collect();
    stats.ephemeral_storage = disk.map(|disk| ephemeral(stats, disk, disks.node.as_ref()));
}

fn persistent(measured: &PersistentStats) -> VolumeStats {
    let PersistentStats { volume, claim, at, figures, is_abnormal } = measured;
    let claim = claim.as_ref().map(|claim| (claim.name.clone(), claim.namespace.clone()));
    VolumeStats {
        fs: FsStats {
            time: Time(*at),
            available_bytes: Some(figures.available_bytes),
            capacity_bytes: Some(figures.capacity_bytes),
            used_bytes: Some(figures.used_bytes),
            inodes_free: Some(figures.inodes_free),
            inodes: Some(figures.inodes),
            inodes_used: Some(figures.inodes_used),
        },
        name: volume.clone(),
        claim: claim.map(|(name, namespace)| ClaimReference { name, namespace }),
        health: is_abnormal.map(|abnormal| HealthStats { abnormal }),
    }
}

/// All disk usage of the pod on the node: layers, logs, ephemeral volumes.
fn ephemeral(stats: &PodStats, disk: &PodDisk, node: Option<&FileSystem>) -> FsStats {
    let layers = stats.containers.iter().filter_map(|container| {
        let rootfs = container.rootfs.as_ref()?;
        Some(DiskUsage { bytes: rootfs.used_bytes?, inodes: rootfs.inodes_used.unwrap_or(0) })
    });
    let volumes = disk.files.volumes.iter().filter(|volume| volume.is_ephemeral).map(|volume| volume.used);
    let used = layers
        .chain(disk.files.logs.values().copied())
        .chain(volumes)
        .fold(disk.files.others, DiskUsage::saturating_add);
    on_disk(disk.at, Some(used), node)
}

fn of_layer(layer: &Layer) -> FsStats {
    let mut stats = on_disk(layer.at, None, layer.on.as_ref());
    (stats.used_bytes, stats.inodes_used) = (layer.used_bytes, layer.inodes_used);
    stats
}

fn on_disk(at: Timestamp, used: Option<DiskUsage>, on: Option<&FileSystem>) -> FsStats {
    FsStats {
        time: Time(at),
        available_bytes: on.map(|on| on.available_bytes),
        capacity_bytes: on.map(|on| on.capacity_bytes),
        used_bytes: used.map(|used| used.bytes),
        inodes_free: on.map(|on| on.inodes_free),
        inodes: on.map(|on| on.inodes),
        inodes_used: used.map(|used| used.inodes),
    }
}

fn io(measured: &Measured, at: Timestamp) -> IoStats {
    IoStats { time: Time(at), psi: psi(measured.stats.io_pressure) }
}

fn network(interfaces: &[Interface], at: Timestamp) -> Option<NetworkStats> {
    if interfaces.is_empty() {
        return None;
    }
    let stats = |interface: &Interface| InterfaceStats {
        name: interface.name.clone(),
        rx_bytes: Some(interface.received.bytes),
        rx_errors: Some(interface.received.errors),
        tx_bytes: Some(interface.sent.bytes),
        tx_errors: Some(interface.sent.errors),
    };
    let default = interfaces.iter().find(|interface| interface.name == DEFAULT_INTERFACE);
    Some(NetworkStats {
        time: Time(at),
        default: default.map(stats).unwrap_or_default(),
        interfaces: interfaces.iter().map(stats).collect(),
    })
}

fn pod_usage(sample: &Sample, pod: &PodSample) -> PodStats {
    let target = &pod.target;
    PodStats {
        pod_ref: PodReference {
            name: target.name.clone(),
            namespace: target.namespace.clone(),
            uid: target.uid.to_string(),
        },
        start_time: Time(target.created),
        containers: pod.containers.iter().map(|container| container_usage(sample, container)).collect(),
        usage: pod.own.as_ref().map(|own| of_cgroup(own, sample.at)).unwrap_or_default(),
        network: None,
        volumes: Vec::new(),
        ephemeral_storage: None,
        processes: None,
    }
}

fn container_usage(sample: &Sample, container: &ContainerSample) -> ContainerStats {
    ContainerStats {
        name: container.target.name.clone(),
        start_time: Time(container.target.created),
        usage: of_cgroup(&container.measured, sample.at),
        rootfs: None,
        logs: None,
    }
}

/// The agent's own start time is known; for others the age of the cgroup is used.
fn system(sample: &Sample, name: &str, own: &Measured) -> ContainerStats {
    let created = own.stats.created.and_then(|created| Timestamp::try_from(created).ok());
    let start_time =
        if name == "kubelet" { sample.agent_started } else { created.unwrap_or_else(|| boot_time(sample)) };
    ContainerStats {
        name: name.to_owned(),
        start_time: Time(start_time),
        usage: of_cgroup(own, sample.at),
        rootfs: None,
        logs: None,
    }
}

fn boot_time(sample: &Sample) -> Timestamp {
    let secs = i64::try_from(sample.machine.boot_secs).unwrap_or(0);
    Timestamp::from_second(secs).unwrap_or_default()
}

/// The node's limits are those of the machine.
fn node_usage(sample: &Sample) -> Usage {
    let mut usage = sample.root.as_ref().map(|root| of_cgroup(root, sample.at)).unwrap_or_default();
    let machine = &sample.machine;
    if let Some(memory) = &mut usage.memory {
        memory.available_bytes = machine.memory_bytes.checked_sub(memory.working_set_bytes);
    }
    usage.swap = Some(SwapStats {
        time: Time(sample.at),
        swap_available_bytes: Some(machine.swap_free_bytes),
        swap_usage_bytes: machine.swap_used_bytes(),
    });
    usage
}

fn of_cgroup(measured: &Measured, at: Timestamp) -> Usage {
    let (stats, time) = (&measured.stats, Time(at));
    Usage {
        cpu: stats.cpu.as_ref().map(|cpu| CpuStats {
            time,
            usage_nano_cores: measured.nano_cores,
            usage_core_nano_seconds: cpu.usage_nanos,
            psi: psi(cpu.pressure),
        }),
        memory: stats.memory.as_ref().map(|memory| MemoryStats {
            time,
            available_bytes: memory.limit_bytes.map(|limit| limit.saturating_sub(memory.working_set_bytes)),
            usage_bytes: memory.usage_bytes,
            working_set_bytes: memory.working_set_bytes,
            rss_bytes: memory.rss_bytes,
            page_faults: memory.page_faults,
            major_page_faults: memory.major_page_faults,
            psi: psi(memory.pressure),
        }),
        swap: stats.memory.as_ref().map(|memory| swap(memory, time)),
        io: None,
    }
}

fn swap(memory: &Memory, time: Time) -> SwapStats {
    let limit = memory.swap_limit_bytes;
    SwapStats {
        time,
        swap_available_bytes: limit.map(|limit| limit.saturating_sub(memory.swap_bytes)),
        swap_usage_bytes: memory.swap_bytes,
    }
}

/// Zeros if the kernel does not measure it, as on cgroup v1: upstream shows them whenever its gate is on, and it is locked.
fn psi(pressure: Option<Pressure>) -> PsiStats {
    let pressure = pressure.unwrap_or_default();
    let data = |stall: Stall| PsiData {
        total: stall.total_micros,
        avg10: stall.avg10,
        avg60: stall.avg60,
        avg300: stall.avg300,
    };
    PsiStats { full: data(pressure.full), some: data(pressure.some) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use insta::assert_snapshot;

    use super::*;
    use crate::stats::example;

    #[test]
    fn summary_has_upstreams_layout() {
        let summary = summary(&example::sample(), &example::disks());
        assert_snapshot!(serde_json::to_string_pretty(&summary).unwrap());
    }

    #[test]
    fn a_missing_figure_costs_no_other() {
        let mut sample = example::sample();
        sample.root = None;
        sample.interfaces.clear();
        sample.pods[0].own = None;
        let disks = Disks { pods: BTreeMap::new(), images: None, ..example::disks() };
        let summary = serde_json::to_value(summary(&sample, &disks)).unwrap();
        let (node, pod) = (&summary["node"], &summary["pods"][0]);
        assert!(node["cpu"].is_null() && node["network"].is_null() && node["runtime"]["imageFs"].is_null(), "{node}");
        assert!(node["fs"]["usedBytes"].is_u64() && node["rlimit"]["curproc"].is_u64(), "{node}");
        assert!(pod["cpu"].is_null() && pod["ephemeral-storage"].is_null(), "{pod}");
        let container = &pod["containers"][0];
        assert!(container["cpu"]["usageNanoCores"].is_u64() && container["rootfs"]["usedBytes"].is_u64(), "{pod}");
    }

    #[test]
    fn unmeasured_pressure_is_zero() {
        let mut sample = example::sample();
        let work = &mut sample.pods[0].containers[0].measured.stats;
        work.cpu.as_mut().unwrap().pressure = None;
        work.memory.as_mut().unwrap().pressure = None;
        work.io_pressure = None;
        let summary = serde_json::to_value(summary(&sample, &example::disks())).unwrap();
        let none = serde_json::json!({ "total": 0, "avg10": 0.0, "avg60": 0.0, "avg300": 0.0 });
        for figure in ["cpu", "memory", "io"] {
            let psi = &summary["pods"][0]["containers"][0][figure]["psi"];
            assert_eq!((&psi["some"], &psi["full"]), (&none, &none), "{figure}");
        }
    }

    #[test]
    fn a_pod_whose_containers_all_ended_is_not_there() {
        let mut sample = example::sample();
        sample.pods[0].containers.clear();
        assert!(usage(&sample).pods.is_empty());
    }
}
