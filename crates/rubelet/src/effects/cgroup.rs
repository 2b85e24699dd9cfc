//! A pod's cgroup, and its parents.
//!
//! Owns: creating, listing and removing them. Never: names one or decides a limit (`rubelet-core/src/cgroups.rs`).
//! Upstream: `pcm.EnsureExists`, `pcm.Destroy`, `UpdateQOSCgroups`, `GetAllPodsFromCgroups`.

use std::{io, path::Path};

use rubelet_core::{
    cgroups::Cgroup,
    effect::{EffectError, Facts},
};

use super::failure;
use crate::world::World;

pub(super) async fn set_up_pod_cgroup(world: &World, cgroup: &Cgroup) -> Result<Facts, EffectError> {
    apply(world, cgroup).await?;
    Ok(Facts::Nothing)
}

/// Sets the limits of the QoS cgroups from the top down, and lists the pod cgroups in them.
pub(super) async fn sync_qos_cgroups(world: &World, tiers: &[Cgroup]) -> Result<Facts, EffectError> {
    let mut names = Vec::new();
    for tier in tiers {
        apply(world, tier).await?;
        let children = world.host.list_cgroups(Path::new(&tier.path)).await;
        names.extend(children.map_err(|error| failed("list", &tier.path, &error))?);
    }
    Ok(Facts::Cgroups { names })
}

pub(super) async fn remove_pod_cgroup(world: &World, paths: &[String]) -> Result<(), EffectError> {
    for path in paths {
        world.host.remove_cgroup(Path::new(path)).await.map_err(|error| failed("remove", path, &error))?;
    }
    Ok(())
}

async fn apply(world: &World, cgroup: &Cgroup) -> Result<(), EffectError> {
    let unset = world.host.apply_cgroup(cgroup).await.map_err(|error| failed("set up", &cgroup.path, &error))?;
    for limit in unset {
        tracing::warn!(cgroup = cgroup.path, "failed to set cgroup limit: {limit}");
    }
    Ok(())
}

fn failed(what: &str, path: &str, error: &io::Error) -> EffectError {
    let mut failed = failure::io(&format!("{what} cgroup"), Path::new(path), error);
    if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) {
        failed.message += "; rubelet needs to write below /sys/fs/cgroup, or cgroupsPerQOS: false and enforceNodeAllocatable: [] \
                    in its configuration";
    }
    failed
}
