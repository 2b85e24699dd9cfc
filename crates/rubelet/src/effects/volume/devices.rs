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
        claims::{CSI_PLUGIN, VOLUME_DEVICES, links_dir},
        devices::{CsiDevice, Device, FoundDevice},
        fc, flex,
        iscsi::{self, IscsiDevice},
        local::{self, LOCAL_PLUGIN},
    },
};
use rubelet_host::port::FileKind;

use super::{block, csi, device_map, entries};
use crate::{effects::failure, world::World};

/// Fails as a whole where a device cannot be read: one that is left out would be taken for one that is detached.
pub async fn list_devices(world: &World) -> Result<Facts, EffectError> {
    let listed = list(world).await;
    listed.inspect_err(
        |error| tracing::warn!(%error, "failed to look at devices on disk; none is unstaged until it works"),
    )
}

async fn list(world: &World) -> Result<Facts, EffectError> {
    let mut found: BTreeMap<Device, BTreeSet<PodUid>> = BTreeMap::new();
    let mut contexts = BTreeMap::new();
    for driver_dir in dirs(world, &csi::devices_dir(world)).await? {
        let is_block = driver_dir == block::devices_dir(world);
        for dir in dirs(world, &driver_dir).await? {
            let device = if is_block { block_device_in(world, &dir).await? } else { csi_device(world, &dir).await? };
            match device {
                Some((device, context)) => {
                    found.insert(device.clone(), BTreeSet::new());
                    contexts.insert(device, context);
                }
                None if is_block && block::is_shared_dir(&dir) => {}
                // Its process was killed before the first call to the driver, or after the last.
                None => csi::remove_unused(world, &dir).await,
            }
        }
    }
    for dir in dirs(world, &local::devices_dir(&world.paths.root_dir)).await? {
        found.extend(local_device(&dir).map(|device| (device, BTreeSet::new())));
    }
    for (dir, device) in scsi_devices(world).await? {
        let pods = pods_of_disk(world, &dir).await?;
        found.entry(device).or_default().extend(pods);
    }
    for (dir, device) in bound_devices(world).await? {
        let pods = device_map::pods_of(world, &dir).await?;
        found.entry(device).or_default().extend(pods);
    }
    for device in flex_devices(world).await? {
        found.insert(device, BTreeSet::new());
    }
    let mut are_known = Vec::new();
    for pod_dir in dirs(world, &world.paths.pods_dir()).await? {
        let Some(uid) = pod_dir.file_name().map(|name| PodUid::new(name.to_string_lossy())) else { continue };
        for device in devices_of_pod(world, &pod_dir, &found, &mut are_known).await? {
            found.entry(device).or_default().insert(uid.clone());
        }
    }
    world.metrics.storage.reconstructed(&are_known);
    let devices = found.into_iter().map(|(device, pods)| {
        let context = contexts.remove(&device).flatten();
        FoundDevice { device, pods, context }
    });
    Ok(Facts::Devices(devices.collect()))
}

/// The devices that a pod's directory refers to. `are_known`: of each of its CSI volumes, whether its data file names one.
async fn devices_of_pod(
    world: &World,
    pod_dir: &Path,
    found: &BTreeMap<Device, BTreeSet<PodUid>>,
    are_known: &mut Vec<bool>,
) -> Result<Vec<Device>, EffectError> {
    let volumes = pod_dir.join("volumes");
    let mut devices = Vec::new();
    // Without a device, as yet, a driver's volume is one that was never staged.
    let of_drivers: Vec<_> = found.keys().filter(|device| matches!(device, Device::Csi(_))).collect();
    if !of_drivers.is_empty() {
        for dir in dirs(world, &volumes.join(CSI_PLUGIN)).await? {
            let read = csi_device(world, &dir).await;
            let is_unreadable = read.is_err();
            let read = read
                .inspect_err(|error| tracing::warn!(dir = %dir.display(), %error, "failed to read a volume of a pod"));
            let device = read.ok().flatten().map(|(device, _)| device);
            are_known.push(device.is_some());
            if is_unreadable || device.is_none() && csi::has_mounts(world, &dir).await? {
                // Any of them may be what is mounted there.
                devices.extend(of_drivers.iter().map(|device| (*device).clone()));
            }
            devices.extend(device.filter(|device| found.contains_key(device)));
        }
    }
    for name in entries(world, &links_dir(pod_dir, CSI_PLUGIN), None).await? {
        let is_it = |device: &&&Device| matches!(device, Device::Csi(it) if it.block.as_ref() == Some(&name));
        devices.extend(of_drivers.iter().find(is_it).map(|device| (*device).clone()));
    }
    // A directory of the node is in use without a device of its own.
    let local = dirs(world, &volumes.join(LOCAL_PLUGIN)).await?;
    devices.extend(local.iter().filter_map(|dir| local_device(dir)));
    let flex = flex_volumes_of_pod(world, &volumes).await?;
    devices.extend(flex.into_iter().filter(|device| found.contains_key(device)));
    Ok(devices)
}

/// The directories where disks of targets and fabrics are mounted.
async fn scsi_devices(world: &World) -> Result<Vec<(PathBuf, Device)>, EffectError> {
    let mut found = Vec::new();
    for iface in dirs(world, &iscsi::devices_dir(&world.paths.root_dir)).await? {
        for dir in dirs(world, &iface).await? {
            let device = IscsiDevice::parse(&name_of(&iface), &name_of(&dir));
            found.extend(device.map(|device| (dir, Device::Iscsi(device))));
        }
    }
    for dir in dirs(world, &fc::devices_dir(&world.paths.root_dir)).await? {
        if !dir.ends_with(VOLUME_DEVICES) {
            let device = Device::Fc { dir: name_of(&dir) };
            found.push((dir, device));
        }
    }
    Ok(found)
}

/// The volumes that drivers mounted for all pods: `<driver>/mounts/<volume>` or `<vendor>/<driver>/mounts/<volume>`.
async fn flex_devices(world: &World) -> Result<Vec<Device>, EffectError> {
    let mut drivers = Vec::new();
    for dir in dirs(world, &flex::devices_dir(&world.paths.root_dir)).await? {
        let name = name_of(&dir);
        for below in dirs(world, &dir).await? {
            match name_of(&below).as_str() {
                flex::MOUNTS => drivers.push((name.clone(), below)),
                driver => drivers.push((format!("{name}/{driver}"), below.join(flex::MOUNTS))),
            }
        }
    }
    let mut devices = Vec::new();
    for (driver, dir) in drivers {
        let names = entries(world, &dir, None).await?;
        devices.extend(names.into_iter().map(|name| Device::Flex { driver: driver.clone(), name }));
    }
    Ok(devices)
}

/// The volumes of such drivers in a pod's directory; some of them have no device.
async fn flex_volumes_of_pod(world: &World, volumes: &Path) -> Result<Vec<Device>, EffectError> {
    let mut found = Vec::new();
    for dir in dirs(world, volumes).await? {
        let Some(driver) = flex::driver_of_dir(&name_of(&dir)) else { continue };
        let names = entries(world, &dir, None).await?;
        found.extend(names.into_iter().map(|name| Device::Flex { driver: driver.clone(), name }));
    }
    Ok(found)
}

fn name_of(dir: &Path) -> String {
    dir.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned()
}

/// The directories where block devices are bound for pods.
async fn bound_devices(world: &World) -> Result<Vec<(PathBuf, Device)>, EffectError> {
    let root_dir = &world.paths.root_dir;
    let mut bound = Vec::new();
    for dir in dirs(world, &local::block_dir(root_dir)).await? {
        bound.extend(local_device(&dir).map(|device| (dir, device)));
    }
    for iface in dirs(world, &iscsi::block_dir(root_dir)).await? {
        for dir in dirs(world, &iface).await? {
            let device = IscsiDevice::parse(&name_of(&iface), &name_of(&dir));
            bound.extend(device.map(|device| (dir, Device::Iscsi(device))));
        }
    }
    for dir in dirs(world, &fc::block_dir(root_dir)).await? {
        let device = Device::Fc { dir: name_of(&dir) };
        bound.push((dir, device));
    }
    Ok(bound)
}

/// The pods that a disk is mounted for: only the mount table says which disk a pod's directory shows.
async fn pods_of_disk(world: &World, dir: &Path) -> Result<BTreeSet<PodUid>, EffectError> {
    let failed = |error: io::Error| failure::io("look for mounts of", dir, &error);
    let own = world.host.mounts_below(dir).await.map_err(failed)?;
    let table = world.host.mount_points().await.map_err(failed)?;
    let Some(disk) = table.iter().find(|mount| own.contains(&mount.path)).map(|mount| mount.device) else {
        return Ok(BTreeSet::new());
    };
    let pods_dir = world.paths.pods_dir();
    let below = world.host.mounts_below(&pods_dir).await.map_err(failed)?;
    // `<uid>/volumes/<plugin>/<volume>`; parts of volumes are mounted elsewhere, and never longer than these.
    let uid = |path: &PathBuf| {
        let mut above = path.ancestors().skip(2);
        let volumes = above.next().filter(|dir| dir.ends_with("volumes"));
        volumes.and(above.next()?.file_name()).map(|uid| PodUid::new(uid.to_string_lossy()))
    };
    let shown = table.iter().filter(|mount| mount.device == disk && below.contains(&mount.path));
    Ok(shown.filter_map(|mount| uid(&mount.path)).collect())
}

/// With the SELinux label that it is mounted with. `None` if there is no data file, or if it names none.
async fn csi_device(world: &World, dir: &Path) -> Result<Option<(Device, Option<String>)>, EffectError> {
    let Some(data) = csi::read_data(world, dir).await? else { return Ok(None) };
    let is_named = !data.driver_name.is_empty() && !data.volume_handle.is_empty();
    Ok(is_named.then(|| (Device::csi(&data.driver_name, &data.volume_handle), data.selinux_mount_context)))
}

fn local_device(dir: &Path) -> Option<Device> {
    Some(Device::Local { name: dir.file_name()?.to_str()?.to_owned() })
}

/// The directory has the name of its persistent volume.
async fn block_device_in(world: &World, dir: &Path) -> Result<Option<(Device, Option<String>)>, EffectError> {
    let block = dir.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(csi_device(world, &dir.join("data")).await?.map(|(device, _)| match device {
        Device::Csi(device) => (Device::Csi(CsiDevice { block, ..device }), None),
        other => (other, None),
    }))
}

/// The directories in a directory; none if it does not exist.
async fn dirs(world: &World, path: &Path) -> Result<Vec<PathBuf>, EffectError> {
    let names = entries(world, path, Some(FileKind::Directory)).await?;
    Ok(names.into_iter().map(|name| path.join(name)).collect())
}
