//! A pod's cgroup, and its parents.
//!
//! Owns: creating, listing and removing them. Never: names one or decides a limit (`rubelet-core/src/cgroups.rs`).
//! Upstream: `pcm.EnsureExists`, `pcm.Destroy`, `UpdateQOSCgroups`, `GetAllPodsFromCgroups`.

use std::{io, path::Path};

use rubelet_core::{
    cgroups::{Cgroup, UnsetLimit},
    effect::{EffectError, ErrorKind, Facts},
};

use super::failure;
use crate::world::World;

pub(super) async fn set_up_pod_cgroup(world: &World, cgroup: &Cgroup) -> Result<Facts, EffectError> {
    apply(world, cgroup).await?;
    Ok(Facts::Nothing)
}

/// Sets the limits of the QoS cgroups from the top down, and lists the pod cgroups in them. A limit that the kernel refuses is a
/// failure, but the others are set.
pub(super) async fn sync_qos_cgroups(world: &World, tiers: &[Cgroup]) -> Result<Facts, EffectError> {
    let mut names = Vec::new();
    let mut refused = Vec::new();
    for tier in tiers {
        refused.extend(apply(world, tier).await?);
        let children = world.host.list_cgroups(Path::new(&tier.path)).await;
        names.extend(children.map_err(|error| failed("list", &tier.path, &error))?);
    }
    if refused.is_empty() {
        return Ok(Facts::Cgroups { names });
    }
    Err(EffectError { kind: ErrorKind::Retry, message: refused.join(", ") })
}

pub(super) async fn remove_pod_cgroup(world: &World, paths: &[String]) -> Result<(), EffectError> {
    for path in paths {
        world.host.remove_cgroup(Path::new(path)).await.map_err(|error| failed("remove", path, &error))?;
    }
    Ok(())
}

/// Returns the limits that the kernel refused.
async fn apply(world: &World, cgroup: &Cgroup) -> Result<Vec<String>, EffectError> {
    let unset = world.host.apply_cgroup(cgroup).await.map_err(|error| failed("set up", &cgroup.path, &error))?;
    for limit in &unset {
        tracing::warn!(cgroup = cgroup.path, "failed to set cgroup limit: {limit}");
    }
    let refused = unset.into_iter().filter_map(|limit| match limit {
        UnsetLimit::NoController(_) => None,
        UnsetLimit::Refused(problem) => Some(problem),
    });
    Ok(refused.collect())
}

fn failed(what: &str, path: &str, error: &io::Error) -> EffectError {
    let mut failed = failure::io(&format!("{what} cgroup"), Path::new(path), error);
    if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) {
        failed.message += "; rubelet needs to write below /sys/fs/cgroup, or cgroupsPerQOS: false and enforceNodeAllocatable: [] \
                    in its configuration";
    }
    failed
}
