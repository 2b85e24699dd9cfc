//! The memory of the simulated node.
//!
//! Owns: how much memory each pod uses, and what the host reports of it. Never: kills anything: the kernel of the simulation
//! has no out-of-memory killer, so that a late eviction shows as a broken rule.

use std::collections::BTreeMap;

use rubelet_host::port::{ContainerFigures, MemoryFigures, NodeFigures, PodFigures};

use crate::runtime::store::Picture;

pub(crate) const CAPACITY_BYTES: u64 = 8 << 30;
/// Of the system and the agent.
const SYSTEM_BYTES: u64 = 1 << 30;
/// Of each running container.
const CONTAINER_BYTES: u64 = 16 << 20;
/// The node evicts pods when less is available.
pub(crate) const THRESHOLD_BYTES: u64 = 512 << 20;

/// What single containers use beyond the usual, by container ID.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub hogs: BTreeMap<String, u64>,
}

impl Memory {
    pub(crate) fn node(&self, picture: &Picture) -> NodeFigures {
        let running = picture.containers.values().filter(|container| container.is_running());
        let of_pods: u64 = running.map(|container| self.of(&container.id)).sum();
        let memory = MemoryFigures { limit_bytes: CAPACITY_BYTES, working_set_bytes: SYSTEM_BYTES + of_pods };
        NodeFigures { memory: Some(memory), max_tasks: Some(32_768), tasks: Some(300), ..NodeFigures::default() }
    }

    pub(crate) fn available(&self, picture: &Picture) -> u64 {
        let memory = self.node(picture).memory.unwrap_or_default();
        memory.limit_bytes.saturating_sub(memory.working_set_bytes)
    }

    pub(crate) fn pod(&self, uid: &str, picture: &Picture) -> PodFigures {
        let running =
            picture.containers.values().filter(|container| container.pod.uid == uid && container.is_running());
        let figures = |id: &String| ContainerFigures { working_set_bytes: self.of(id), processes: 1 };
        let containers: BTreeMap<_, _> =
            running.map(|container| (container.id.clone(), figures(&container.id))).collect();
        let working_set_bytes = containers.values().map(|figures| figures.working_set_bytes).sum();
        PodFigures { working_set_bytes, containers }
    }

    fn of(&self, container: &str) -> u64 {
        CONTAINER_BYTES + self.hogs.get(container).copied().unwrap_or(0)
    }
}
