//! Effects on sandboxes: run, stop, remove.
//!
//! Owns: the calls and the files they require. Never: decides when a sandbox is due.
//! Upstream: `createPodSandbox`, `killPodWithSyncResult`, `removeSandbox`.

use std::{collections::BTreeSet, path::Path};

use rubelet_core::{
    container,
    effect::{EffectError, ErrorKind, Facts},
    id::SandboxId,
    objects::{Object, ObjectKey, Presence},
    op::RunSandbox,
};

use super::{Recalled, failure};
use crate::world::World;

/// Upstream's limit.
const RESOLV_CONF_LIMIT_BYTES: u64 = 10 << 20;
const LOG_DIR_MODE: u32 = 0o755;

/// Repeating it fails in the runtime: the sandbox's name includes the attempt.
pub async fn run_sandbox(world: &World, order: &RunSandbox, recalled: &Recalled) -> Result<Facts, EffectError> {
    let resolv_conf = read_resolv_conf(world).await?;
    let RunSandbox { uid, attempt, cgroup_parent, volume_groups, .. } = order;
    let identity = container::Identity { uid, attempt: *attempt, cgroup_parent, volume_groups };
    let config = container::sandbox_config(&order.pod, identity, &world.settings, &resolv_conf)
        .map_err(|error| EffectError { kind: ErrorKind::Retry, message: error.0 })?;
    let log_directory = Path::new(&config.log_directory);
    world
        .host
        .make_dir_beneath(&world.paths.pod_logs_dir, log_directory, LOG_DIR_MODE)
        .await
        .map_err(|error| failure::io("make log directory", log_directory, &error))?;
    let handler = runtime_handler(world, order).await?;
    failure::unless(recalled)?;
    let id = world.runtime.run_pod_sandbox(&config, &handler).await.map_err(|error| failure::retry(&error))?;
    Ok(Facts::Sandbox { id: SandboxId::new(id) })
}

/// From the pod's RuntimeClass; empty is the runtime's default. A standalone node has no RuntimeClasses and uses the default,
/// as upstream.
async fn runtime_handler(world: &World, order: &RunSandbox) -> Result<String, EffectError> {
    let key = order.pod.spec.as_ref().and_then(ObjectKey::runtime_class);
    let Some((key, cluster)) = key.zip(world.cluster.as_ref()) else { return Ok(String::new()) };
    let found = cluster.objects.gather(&order.uid, BTreeSet::from([key.clone()])).await;
    match found.find(&key, Presence::Required) {
        Ok(Some(Object::RuntimeClass(class))) => Ok(class.handler.clone()),
        Ok(_) => Ok(String::new()),
        Err(error) => Err(EffectError { kind: ErrorKind::MissingObject, message: error.message }),
    }
}

pub async fn stop_sandbox(world: &World, id: &SandboxId) -> Result<Facts, EffectError> {
    failure::gone_is_done(world.runtime.stop_pod_sandbox(id.as_str()).await)?;
    Ok(Facts::Nothing)
}

/// Stops the sandbox again first, as upstream does: that removes what is left of its network.
pub async fn remove_sandbox(world: &World, id: &SandboxId) -> Result<Facts, EffectError> {
    failure::gone_is_done(world.runtime.stop_pod_sandbox(id.as_str()).await)?;
    failure::gone_is_done(world.runtime.remove_pod_sandbox(id.as_str()).await)?;
    Ok(Facts::Nothing)
}

pub(super) async fn read_resolv_conf(world: &World) -> Result<String, EffectError> {
    let Some(path) = &world.settings.node.resolv_conf else { return Ok(String::new()) };
    match world.host.read_file(path, RESOLV_CONF_LIMIT_BYTES).await {
        Ok(content) => Ok(String::from_utf8_lossy(&content).into_owned()),
        Err(error) => Err(failure::io("read", path, &error)),
    }
}
