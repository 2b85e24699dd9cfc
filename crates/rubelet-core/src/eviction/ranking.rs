//! The order in which pods are evicted.
//!
//! Owns: upstream's ranking per signal, and which files of a pod count for which file system. Never: leaves pods out.
//! Upstream: `rankMemoryPressure`, `rankPIDPressure`, `rankDiskPressureFunc`, `buildSignalToRankFunc`.

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::{Pod, PodSpec, Volume};

use super::{
    threshold::{Resource, Signal},
    usage::{DiskLayout, DiskUsage, PodUsage},
};
use crate::container::resources::pod_requests;

/// A pod that may be evicted.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    pub pod: &'a Pod,
    pub spec: &'a PodSpec,
    /// `None`: it could not be measured. Such pods come first, as upstream has it.
    pub usage: Option<&'a PodUsage>,
}

/// The first is evicted first.
pub fn rank(candidates: &mut [Candidate<'_>], signal: Signal, layout: DiskLayout) {
    match signal.resource() {
        Resource::Pids => candidates.sort_by_key(|candidate| {
            (candidate.priority(), candidate.usage.is_some(), Reverse(candidate.used(signal, layout)))
        }),
        Resource::Memory | Resource::EphemeralStorage | Resource::Inodes => candidates.sort_by_key(|candidate| {
            let (used, requested) = (candidate.used(signal, layout), candidate.requested(signal.resource()));
            let over = i128::from(used).saturating_sub(i128::from(requested));
            (candidate.usage.is_some(), over <= 0, candidate.priority(), Reverse(over))
        }),
    }
}

impl Candidate<'_> {
    fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or(0)
    }

    /// What it uses of the resource that the signal is about.
    pub fn used(&self, signal: Signal, layout: DiskLayout) -> u64 {
        let Some(usage) = self.usage else { return 0 };
        match signal.resource() {
            Resource::Memory => usage.memory_bytes,
            Resource::Pids => usage.processes,
            Resource::EphemeralStorage => counted_files(usage, self.spec, signal, layout).bytes,
            Resource::Inodes => counted_files(usage, self.spec, signal, layout).inodes,
        }
    }

    /// Inodes and processes cannot be requested. (Upstream subtracts requested bytes from a number of inodes.)
    fn requested(&self, resource: Resource) -> u64 {
        let name = match resource {
            Resource::Memory | Resource::EphemeralStorage => resource.name(),
            Resource::Inodes | Resource::Pids => return 0,
        };
        u64::try_from(pod_requests(self.spec, name).unwrap_or_default().value()).unwrap_or(0)
    }
}

/// The files of the pod that are on the file system of the signal.
fn counted_files(usage: &PodUsage, spec: &PodSpec, signal: Signal, layout: DiskLayout) -> DiskUsage {
    let is_of_images = matches!(signal, Signal::ImageFsAvailable | Signal::ImageFsInodesFree);
    let (layers, others) = match (layout, is_of_images) {
        (DiskLayout::Shared, _) | (DiskLayout::Split, false) => (true, true),
        (DiskLayout::DedicatedImages, false) => (false, true),
        (DiskLayout::DedicatedImages, true) => (true, false),
        // Images belong to no pod.
        (DiskLayout::Split, true) => (false, false),
    };
    let layers = usage.containers.values().filter(|_| layers).map(|container| container.rootfs);
    let logs = usage.containers.values().filter(|_| others).map(|container| container.logs);
    let volumes = spec.volumes.iter().flatten().filter(|volume| others && is_local(volume));
    let volumes = volumes.filter_map(|volume| usage.volumes.get(&volume.name).copied());
    layers.chain(logs).chain(volumes).sum()
}

fn is_local(volume: &Volume) -> bool {
    volume.host_path.is_some() || is_local_ephemeral(volume)
}

/// It is deleted with its pod and uses the node's disk.
pub(super) fn is_local_ephemeral(volume: &Volume) -> bool {
    let on_disk = volume.empty_dir.as_ref().is_some_and(|it| it.medium.as_deref().unwrap_or_default().is_empty());
    on_disk || volume.config_map.is_some() || volume.git_repo.is_some()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::eviction::usage::ContainerUsage;

    fn pod(name: &str, priority: i32, request: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": {
                "priority": priority,
                "containers": [{ "name": "a", "resources": { "requests": { "memory": request, "ephemeral-storage": request } } }],
                "volumes": [{ "name": "v", "emptyDir": {} }, { "name": "m", "emptyDir": { "medium": "Memory" } }],
            },
        }))
        .expect("a pod")
    }

    fn usage(used: u64) -> PodUsage {
        let disk = |bytes| DiskUsage { bytes, inodes: bytes / 10 };
        let container = ContainerUsage { memory_bytes: used, rootfs: disk(used), logs: disk(1000) };
        PodUsage {
            memory_bytes: used,
            processes: used,
            containers: BTreeMap::from([("a".to_owned(), container)]),
            volumes: BTreeMap::from([("v".to_owned(), disk(10)), ("m".to_owned(), disk(1 << 40))]),
            others: DiskUsage::default(),
        }
    }

    /// Each is `name priority request used`, or without `used` for a pod that could not be measured.
    fn ranked(signal: Signal, layout: DiskLayout, pods: &[&str]) -> String {
        let pods: Vec<(Pod, Option<PodUsage>)> = pods
            .iter()
            .map(|text| {
                let words: Vec<&str> = text.split(' ').collect();
                (
                    pod(words[0], words[1].parse().unwrap(), words[2]),
                    words.get(3).map(|used| usage(used.parse().unwrap())),
                )
            })
            .collect();
        let mut candidates: Vec<Candidate<'_>> = pods
            .iter()
            .map(|(pod, usage)| Candidate { pod, spec: pod.spec.as_ref().unwrap(), usage: usage.as_ref() })
            .collect();
        rank(&mut candidates, signal, layout);
        candidates.iter().map(|it| it.pod.metadata.name.clone().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn memory_over_its_request_then_priority_then_how_far_over() {
        let memory = |pods: &[&str]| ranked(Signal::MemoryAvailable, DiskLayout::Shared, pods);
        assert_eq!(memory(&["within 0 100 90", "over 1000 100 101"]), "over within");
        assert_eq!(memory(&["high 10 100 900", "low 5 100 101"]), "low high");
        assert_eq!(memory(&["less 0 100 200", "more 0 500 700", "most 0 0 300"]), "most more less");
        assert_eq!(memory(&["over 0 0 1000", "unknown 1000 0"]), "unknown over");
    }

    #[test]
    fn processes_by_priority_then_number() {
        assert_eq!(ranked(Signal::PidAvailable, DiskLayout::Shared, &["a 0 0 5", "b 0 0 9", "c -1 0 1"]), "c b a");
    }

    #[test]
    fn files_count_for_the_file_system_they_are_on() {
        for (signal, layout, bytes) in [
            (Signal::NodeFsAvailable, DiskLayout::Shared, 1510),
            (Signal::ImageFsAvailable, DiskLayout::Shared, 1510),
            (Signal::NodeFsAvailable, DiskLayout::DedicatedImages, 1010),
            (Signal::ImageFsAvailable, DiskLayout::DedicatedImages, 500),
            (Signal::NodeFsAvailable, DiskLayout::Split, 1510),
            (Signal::ImageFsAvailable, DiskLayout::Split, 0),
            (Signal::NodeFsInodesFree, DiskLayout::Shared, 151),
        ] {
            let (pod, usage) = (pod("p", 0, "0"), usage(500));
            let candidate = Candidate { pod: &pod, spec: pod.spec.as_ref().unwrap(), usage: Some(&usage) };
            assert_eq!(candidate.used(signal, layout), bytes, "{signal} {layout:?}");
        }
        let disk = |pods: &[&str]| ranked(Signal::NodeFsAvailable, DiskLayout::Shared, pods);
        assert_eq!(disk(&["asked 0 1Mi 5000", "did-not 5 0 100"]), "did-not asked");
    }
}
