//! The look at devices on disk.
//!
//! Owns: which devices have a staging directory, and which pods' directories refer to them. Never: asks a driver.
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

use super::csi;
use crate::{effects::failure, world::World};

/// Block volumes have their own directory beside the drivers'.
const VOLUME_DEVICES: &str = "volumeDevices";

pub async fn list_devices(world: &World) -> Result<Facts, EffectError> {
    let mut found: BTreeMap<Device, BTreeSet<PodUid>> = BTreeMap::new();
    for driver_dir in dirs(world, &csi::devices_dir(world)).await? {
        if driver_dir.ends_with(VOLUME_DEVICES) {
            continue;
        }
        for dir in dirs(world, &driver_dir).await? {
            found.extend(device_in(world, &dir).await?.map(|device| (device, BTreeSet::new())));
        }
    }
    if found.is_empty() {
        return Ok(Facts::Devices(Vec::new()));
    }
    for pod_dir in dirs(world, &world.paths.pods_dir()).await? {
        let uid = pod_dir.file_name().map(|name| PodUid::new(name.to_string_lossy()));
        for dir in dirs(world, &pod_dir.join("volumes").join(CSI_PLUGIN)).await? {
            if let (Some(device), Some(uid)) = (device_in(world, &dir).await?, &uid)
                && let Some(pods) = found.get_mut(&device)
            {
                pods.insert(uid.clone());
            }
        }
    }
    Ok(Facts::Devices(found.into_iter().map(|(device, pods)| FoundDevice { device, pods }).collect()))
}

/// `None` if there is no data file, or if it names none.
async fn device_in(world: &World, dir: &Path) -> Result<Option<Device>, EffectError> {
    let Some(data) = csi::read_data(world, dir).await? else { return Ok(None) };
    let device = Device { driver: data.driver_name, handle: data.volume_handle };
    Ok(Some(device).filter(|device| !device.driver.is_empty() && !device.handle.is_empty()))
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
