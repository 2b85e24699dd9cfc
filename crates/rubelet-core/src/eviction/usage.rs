//! Figures of the node and its pods, as looks find them.
//!
//! Owns: the types. Never: decides; `eviction.rs` does.
//! Upstream: the summary API, as `makeSignalObservations` reads it.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::threshold::{Observation, Signal};
use crate::id::{ContainerId, PodRef, PodUid};

/// The node's figures; what could not be measured is missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeUsage {
    pub signals: BTreeMap<Signal, Observation>,
    /// `None`: it could not be found out.
    pub layout: Option<DiskLayout>,
}

/// Where the runtime keeps images and containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimePlaces {
    pub images: PathBuf,
    pub containers: PathBuf,
}

/// On which file systems the agent, images and writable layers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskLayout {
    /// All on one.
    #[default]
    Shared,
    /// Images and writable layers are on one of their own.
    DedicatedImages,
    /// Only images are on one of their own.
    Split,
}

/// What a look at a pod's figures needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodToMeasure {
    pub pod: PodRef,
    /// `None`: pods have no cgroups of their own.
    pub cgroup: Option<String>,
    /// The running ones.
    pub containers: BTreeMap<String, ContainerId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodFigures {
    /// Memory and processes.
    Cgroups,
    /// Files: writable layers, logs, volumes.
    Disks,
}

pub type PodUsages = BTreeMap<PodUid, PodUsage>;

/// A pod's figures, as far as they were asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodUsage {
    /// Its working set.
    pub memory_bytes: u64,
    pub processes: u64,
    /// By name.
    pub containers: BTreeMap<String, ContainerUsage>,
    /// By name.
    pub volumes: BTreeMap<String, DiskUsage>,
    /// Other files that belong to it: its hosts file.
    pub others: DiskUsage,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerUsage {
    pub memory_bytes: u64,
    /// The writable layer.
    pub rootfs: DiskUsage,
    pub logs: DiskUsage,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

impl std::iter::Sum for DiskUsage {
    fn sum<I: Iterator<Item = DiskUsage>>(all: I) -> DiskUsage {
        all.fold(DiskUsage::default(), |sum, each| DiskUsage {
            bytes: sum.bytes.saturating_add(each.bytes),
            inodes: sum.inodes.saturating_add(each.inodes),
        })
    }
}
