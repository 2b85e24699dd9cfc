//! The look at devices on disk.
//!
//! Owns: which devices have a staging directory, and which pods' directories refer to them; directories that were never staged
//! or are no longer are removed. Never: asks a driver.
//! Upstream: reconstruction (`reconstruct.go`, `constructVolumeSpec`).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
};

use rubelet_core::{
    effect::{EffectError, Facts},
    id::PodUid,
    volumes::{
        claims::CSI_PLUGIN,
        devices::{Device, FoundDevice},
    },
};
use rubelet_host::port::FileKind;

use super::{block, csi};
use crate::{effects::failure, world::World};

pub async fn list_devices(world: &World) -> Result<Facts, EffectError> {
    let mut found: BTreeMap<Device, BTreeSet<PodUid>> = BTreeMap::new();
    for driver_dir in dirs(world, &csi::devices_dir(world)).await? {
        let is_block = driver_dir == block::devices_dir(world);
        for dir in dirs(world, &driver_dir).await? {
            let device = if is_block { block_device_in(world, &dir).await? } else { device_in(world, &dir).await? };
            match device {
                Some(device) => drop(found.insert(device, BTreeSet::new())),
                None if is_block && block::is_shared_dir(&dir) => {}
                // Its process was killed before the first call to the driver, or after the last. If one is just being staged,
                // that fails before the call, and is tried again.
                None => csi::remove(world, &[dir]).await?,
            }
        }
    }
    if found.is_empty() {
        return Ok(Facts::Devices(Vec::new()));
    }
    let mut are_known = Vec::new();
    for pod_dir in dirs(world, &world.paths.pods_dir()).await? {
        let uid = pod_dir.file_name().map(|name| PodUid::new(name.to_string_lossy()));
        for dir in dirs(world, &pod_dir.join("volumes").join(CSI_PLUGIN)).await? {
            let device = device_in(world, &dir).await?;
            are_known.push(device.is_some());
            if let (Some(device), Some(uid)) = (device, &uid)
                && let Some(pods) = found.get_mut(&device)
            {
                pods.insert(uid.clone());
            }
        }
        let links = block::links_dir(&pod_dir);
        for name in names(world, &links).await? {
            let users = found.iter_mut().find(|(device, _)| device.block.as_ref() == Some(&name));
            if let (Some((_, pods)), Some(uid)) = (users, &uid) {
                pods.insert(uid.clone());
            }
        }
    }
    world.metrics.storage.reconstructed(&are_known);
    Ok(Facts::Devices(found.into_iter().map(|(device, pods)| FoundDevice { device, pods }).collect()))
}

/// `None` if there is no data file, or if it names none.
async fn device_in(world: &World, dir: &Path) -> Result<Option<Device>, EffectError> {
    let Some(data) = csi::read_data(world, dir).await? else { return Ok(None) };
    let device = Device { driver: data.driver_name, handle: data.volume_handle, block: None };
    Ok(Some(device).filter(|device| !device.driver.is_empty() && !device.handle.is_empty()))
}

/// The directory has the name of its persistent volume.
async fn block_device_in(world: &World, dir: &Path) -> Result<Option<Device>, EffectError> {
    let block = dir.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(device_in(world, &dir.join("data")).await?.map(|device| Device { block, ..device }))
}

/// The names in a directory; none if it does not exist.
async fn names(world: &World, path: &Path) -> Result<Vec<String>, EffectError> {
    match world.host.list_dir(path).await {
        Ok(entries) => Ok(entries.into_iter().map(|entry| entry.name).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failure::io("list", path, &error)),
    }
}

/// The directories in a directory; none if it does not exist.
async fn dirs(world: &World, path: &Path) -> Result<Vec<PathBuf>, EffectError> {
    match world.host.list_dir(path).await {
        Ok(entries) => {
            let dirs = entries.into_iter().filter(|entry| entry.kind == FileKind::Directory);
            Ok(dirs.map(|entry| path.join(entry.name)).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failure::io("list", path, &error)),
    }
}
