//! The cgroups of system and Kubernetes daemons get their limits when the agent starts.
//!
//! Owns: setting them once. Their limits are in `core/node_allocatable.rs`. Never: creates one; that is the administrator's.
//! Upstream: `enforceNodeAllocatableCgroups`, `enforceExistingCgroup`.

use anyhow::anyhow;
use rubelet_core::{
    config::KubeletConfiguration,
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons, node_allocatable,
};
use rubelet_host::update_cgroup;

use crate::world::World;

/// The events to record. An error if a limit cannot be set: the node must not be used without it.
pub async fn enforce(world: &World, config: &KubeletConfiguration) -> anyhow::Result<Vec<EventRecord>> {
    let protects_memory = world.settings.node.memory_qos.is_some();
    let mut events = Vec::new();
    for reserved in node_allocatable::reserved_cgroups(config, protects_memory) {
        let cgroup = reserved.cgroup.clone().map_err(|problem| anyhow!(reserved.failed(&problem)))?;
        let updated = tokio::task::spawn_blocking(move || update_cgroup(&cgroup)).await?;
        updated.map_err(|error| anyhow!(reserved.failed(&error.to_string())))?;
        tracing::info!(cgroup = reserved.name, "reserved cgroup limited");
        events.push(EventRecord::new(
            InvolvedObject::Node,
            Severity::Normal,
            event_reasons::SUCCESSFUL_NODE_ALLOCATABLE_ENFORCEMENT,
            reserved.updated(),
        ));
    }
    Ok(events)
}
