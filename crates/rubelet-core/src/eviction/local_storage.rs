//! Limits on the local storage of a pod.
//!
//! Owns: which limits a pod has, and which of them it exceeds, in upstream's order and words. Never: measures.
//! Upstream: `localStorageEviction` of `eviction/eviction_manager.go`.

use k8s_openapi::{
    api::core::v1::{PodSpec, Volume},
    apimachinery::pkg::api::resource::Quantity as Text,
};

use super::{
    ranking::is_local_ephemeral,
    usage::{DiskLayout, PodUsage},
};
use crate::{
    container::resources::pod_limits,
    quantity::{self, Quantity},
};

const STORAGE: &str = "ephemeral-storage";

/// The limit that a pod exceeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Excess {
    /// As the metric counts it.
    pub signal: &'static str,
    pub message: String,
    pub used_bytes: u64,
}

/// Some limit of the pod is to be watched.
pub fn has_limits(spec: &PodSpec) -> bool {
    let mut volumes = spec.volumes.iter().flatten();
    volumes.any(|volume| size_limit(volume).is_some()) || pod_limits(spec, STORAGE).is_some()
}

pub(super) fn excess(spec: &PodSpec, usage: &PodUsage, layout: DiskLayout) -> Option<Excess> {
    empty_dir_excess(spec, usage).or_else(|| pod_excess(spec, usage)).or_else(|| container_excess(spec, usage, layout))
}

fn size_limit(volume: &Volume) -> Option<(&Text, u64)> {
    let text = volume.empty_dir.as_ref()?.size_limit.as_ref()?;
    let limit = u64::try_from(Quantity::parse(&text.0).ok()?.value()).ok()?;
    (limit > 0).then_some((text, limit))
}

fn empty_dir_excess(spec: &PodSpec, usage: &PodUsage) -> Option<Excess> {
    spec.volumes.iter().flatten().find_map(|volume| {
        let (text, limit) = size_limit(volume)?;
        let name = &volume.name;
        let used_bytes = usage.volumes.get(name)?.bytes;
        (used_bytes > limit).then(|| Excess {
            signal: "emptydirfs.limit",
            message: format!("Usage of EmptyDir volume {name:?} exceeds the limit {:?}. ", text.0),
            used_bytes,
        })
    })
}

fn pod_excess(spec: &PodSpec, usage: &PodUsage) -> Option<Excess> {
    let limit = pod_limits(spec, STORAGE)?;
    let of_containers = usage.containers.values().flat_map(|container| [container.rootfs, container.logs]);
    let volumes = spec.volumes.iter().flatten().filter(|volume| is_local_ephemeral(volume));
    let of_volumes = volumes.filter_map(|volume| usage.volumes.get(&volume.name).copied());
    let used: super::usage::DiskUsage = of_containers.chain(of_volumes).chain([usage.others]).sum();
    (i128::from(used.bytes) > i128::from(limit.value())).then(|| Excess {
        signal: "ephemeralpodfs.limit",
        message: format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {}. ",
            limit.binary_text().0
        ),
        used_bytes: used.bytes,
    })
}

/// Of regular containers only.
fn container_excess(spec: &PodSpec, usage: &PodUsage, layout: DiskLayout) -> Option<Excess> {
    spec.containers.iter().find_map(|container| {
        let limits = container.resources.as_ref()?.limits.as_ref()?;
        let limit = u64::try_from(quantity::amount(Some(limits), STORAGE).value()).ok().filter(|limit| *limit > 0)?;
        let used = usage.containers.get(&container.name)?;
        let layer = match layout {
            DiskLayout::Shared | DiskLayout::Split => used.rootfs.bytes,
            DiskLayout::DedicatedImages => 0,
        };
        let used_bytes = used.logs.bytes.saturating_add(layer);
        (used_bytes > limit).then(|| Excess {
            signal: "ephemeralcontainerfs.limit",
            message: format!(
                "Container {} exceeded its local ephemeral storage limit {:?}. ",
                container.name, limits[STORAGE].0
            ),
            used_bytes,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::eviction::usage::{ContainerUsage, DiskUsage};

    fn spec(pod_limit: &str) -> PodSpec {
        serde_json::from_value(json!({
            "containers": [
                { "name": "a", "resources": { "limits": { "ephemeral-storage": pod_limit } } },
                { "name": "b", "resources": { "limits": { "ephemeral-storage": "2Ki" } } },
            ],
            "volumes": [
                { "name": "v", "emptyDir": { "sizeLimit": "1Ki" } },
                { "name": "m", "emptyDir": { "medium": "Memory", "sizeLimit": "1Ki" } },
                { "name": "free", "emptyDir": {} },
            ],
        }))
        .expect("a spec")
    }

    fn found(pod_limit: &str, layout: DiskLayout, used: &[(&str, u64)]) -> String {
        let disk = |name: &str| {
            let bytes = used.iter().find(|(known, _)| *known == name).map_or(0, |(_, bytes)| *bytes);
            DiskUsage { bytes, inodes: 1 }
        };
        let container = |rootfs: &str, logs: &str| ContainerUsage {
            rootfs: disk(rootfs),
            logs: disk(logs),
            ..ContainerUsage::default()
        };
        let usage = PodUsage {
            containers: BTreeMap::from([
                ("a".to_owned(), container("a", "al")),
                ("b".to_owned(), container("b", "bl")),
            ]),
            volumes: ["v", "m", "free"].into_iter().map(|name| (name.to_owned(), disk(name))).collect(),
            others: disk("hosts"),
            ..PodUsage::default()
        };
        excess(&spec(pod_limit), &usage, layout).map_or(String::new(), |it| format!("{} {}", it.signal, it.message))
    }

    #[test]
    fn limits_are_checked_in_upstreams_order_and_words() {
        let shared = |used: &[(&str, u64)]| found("8Ki", DiskLayout::Shared, used);
        assert_eq!(shared(&[("v", 1024), ("b", 1024), ("bl", 1024)]), "");
        assert_eq!(
            shared(&[("v", 1025), ("a", 1 << 30)]),
            "emptydirfs.limit Usage of EmptyDir volume \"v\" exceeds the limit \"1Ki\". "
        );
        assert!(shared(&[("m", 1025)]).contains("volume \"m\""));
        let total =
            "ephemeralpodfs.limit Pod ephemeral local storage usage exceeds the total limit of containers 10Ki. ";
        assert_eq!(shared(&[("free", 9000), ("hosts", 2000)]), total);
        // Memory counts as memory.
        assert_eq!(shared(&[("m", 1000), ("free", 9500)]), "");
        let own = "ephemeralcontainerfs.limit Container b exceeded its local ephemeral storage limit \"2Ki\". ";
        assert_eq!(shared(&[("b", 2000), ("bl", 100)]), own);
        assert_eq!(found("8Ki", DiskLayout::DedicatedImages, &[("b", 2000), ("bl", 100)]), "");
        assert_eq!(found("8Ki", DiskLayout::DedicatedImages, &[("bl", 2049)]), own);
    }

    #[test]
    fn only_pods_with_limits_are_watched() {
        assert!(has_limits(&spec("1")));
        assert!(!has_limits(&PodSpec::default()));
    }
}
