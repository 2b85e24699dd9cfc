//! Setup of Fibre Channel volumes.
//!
//! Owns: the search for the disk, its mount for all pods, its removal. Never: zones a fabric.
//! Upstream: `pkg/volume/fc`.

use std::path::{Path, PathBuf};

use rubelet_core::{
    effect::{EffectError, Facts},
    volumes::{
        claims::PersistentSource,
        fc::{self, FcDevice, FcVolume},
        mounting::join_options,
    },
};
use rubelet_host::port::Program;

use super::{
    DIR_MODE, device_map, entries, make_dir,
    mounting::{self, Mount},
    remove_dir,
    scsi::{self, Places},
};
use crate::{
    effects::{directories::component, failure},
    world::World,
};

pub(super) async fn stage(world: &World, source: &PersistentSource, volume: &FcVolume) -> Result<Facts, EffectError> {
    let target = device_dir(world, &volume.device.dir_name())?;
    if volume.is_block {
        // First, so that the disk is detached by it whatever comes of this.
        let bound = block_dir(world, &volume.device.dir_name())?;
        make_dir(world, &world.paths.root_dir, &bound, DIR_MODE).await?;
        return attach(world, Places::real(), &volume.device).await.map(|_| Facts::Nothing);
    }
    if mounting::is_mounted(world, &target).await? {
        return Ok(Facts::Nothing);
    }
    let disk = attach(world, Places::real(), &volume.device).await?;
    make_dir(world, &world.paths.root_dir, &target, DIR_MODE).await?;
    let options = join_options(&volume.mount_options, source.read_only.then_some("ro"));
    let disk = disk.display().to_string();
    let order = Mount { source: &disk, target: &target, fs_type: &volume.fs_type, options: &options };
    mounting::format_and_mount(world, order).await.map(|()| Facts::Nothing)
}

pub(super) async fn unstage(world: &World, dir: &str) -> Result<Facts, EffectError> {
    let target = device_dir(world, dir)?;
    mounting::check_references(world, &target).await?;
    let table = world.host.mount_points().await;
    let table = table.map_err(|error| failure::io("look for the mount at", &target, &error))?;
    let is_ours = |path: &Path| path.ends_with(Path::new("plugins/kubernetes.io/fc").join(dir));
    let disk = table.iter().rfind(|mount| is_ours(&mount.path)).map(|mount| PathBuf::from(&mount.source));
    if mounting::is_mounted(world, &target).await? {
        world.host.unmount(&target).await.map_err(|error| failure::io("unmount", &target, &error))?;
    }
    let bound = block_dir(world, dir)?;
    device_map::unbind_left(world, &bound).await?;
    // As long as the directory is there the disk is looked for again: a retry finds no mount any more.
    let disk = match (disk, FcDevice::parse(dir)) {
        (Some(disk), _) => Some(disk),
        (None, Some(device)) => find(world, Places::real(), &device).await,
        (None, None) => None,
    };
    if let Some(disk) = disk {
        let disk = scsi::disk_of_link(world, Places::real(), &disk).await.unwrap_or(disk);
        // Another volume may name the same disk in another way.
        let table = world.host.mount_points().await;
        let table = table.map_err(|error| failure::io("look for mounts of", &disk, &error))?;
        let is_mounted = table.iter().any(|mount| Path::new(&mount.source) == disk);
        if !is_mounted && !is_bound_elsewhere(world, &disk, dir).await? {
            detach(world, Places::real(), &disk).await.map_err(|error| EffectError {
                message: format!("fc: failed to detach disk: {}: {error}", disk.display()),
                ..error
            })?;
        }
    }
    remove_dir(world, &target, &[]).await?;
    world.host.remove_tree(&bound).await.map_err(|error| failure::io("remove", &bound, &error))?;
    Ok(Facts::Nothing)
}

/// The disk that this process or a previous one found, or the multipath device of its paths.
pub(super) async fn disk(world: &World, device: &FcDevice) -> Result<PathBuf, EffectError> {
    found(world, Places::real(), device).await
}

/// Another block volume names the same disk in another way.
async fn is_bound_elsewhere(world: &World, disk: &Path, own: &str) -> Result<bool, EffectError> {
    let names = entries(world, &fc::block_dir(&world.paths.root_dir), None).await?;
    for device in names.iter().filter(|name| *name != own).filter_map(|name| FcDevice::parse(name)) {
        if find(world, Places::real(), &device).await.as_deref() == Some(disk) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn block_dir(world: &World, dir: &str) -> Result<PathBuf, EffectError> {
    Ok(fc::block_dir(&world.paths.root_dir).join(component(dir)?))
}

fn device_dir(world: &World, dir: &str) -> Result<PathBuf, EffectError> {
    Ok(fc::devices_dir(&world.paths.root_dir).join(component(dir)?))
}

/// The disk, or the multipath device of its paths. Once, hosts are scanned for it.
async fn attach(world: &World, places: Places<'_>, device: &FcDevice) -> Result<PathBuf, EffectError> {
    if let Some(mapped) = find_mapped(world, places, device).await {
        return Ok(mapped);
    }
    for host in scsi::scsi_hosts(world, places).await? {
        // As upstream: a host that cannot be scanned is none with the disk.
        let _ = scsi::scan(world, places, &host, "- - -").await;
    }
    found(world, places, device).await
}

async fn found(world: &World, places: Places<'_>, device: &FcDevice) -> Result<PathBuf, EffectError> {
    let missing = || failure::retryable("no fc disk found".to_owned());
    find(world, places, device).await.ok_or_else(missing)
}

async fn find(world: &World, places: Places<'_>, device: &FcDevice) -> Option<PathBuf> {
    match find_mapped(world, places, device).await {
        Some(mapped) => Some(mapped),
        None => disks(world, places, device).await.pop(),
    }
}

async fn find_mapped(world: &World, places: Places<'_>, device: &FcDevice) -> Option<PathBuf> {
    for disk in disks(world, places, device).await {
        if let Some(mapped) = scsi::multipath_of(world, places, &disk).await {
            return Some(mapped);
        }
    }
    None
}

async fn disks(world: &World, places: Places<'_>, device: &FcDevice) -> Vec<PathBuf> {
    let dir = places.dev.join("disk").join(device.links_dir());
    let mut disks = Vec::new();
    for link in entries(world, &dir, None).await.unwrap_or_default() {
        if device.is_link(&link) {
            disks.extend(scsi::disk_of_link(world, places, &dir.join(&link)).await);
        }
    }
    disks
}

/// Removes all paths to the disk from the node.
async fn detach(world: &World, places: Places<'_>, disk: &Path) -> Result<(), EffectError> {
    let disks = match scsi::multipath_of(world, places, disk).await {
        Some(mapped) => {
            let disks = scsi::slaves_of(world, places, &mapped).await;
            scsi::flush_multipath(world, &mapped).await?;
            disks
        }
        None => disk.file_name().and_then(|name| name.to_str()).map(str::to_owned).into_iter().collect(),
    };
    for name in disks {
        let disk = places.dev.join(&name);
        let args = vec!["--flushbufs".to_owned(), disk.display().to_string()];
        // As upstream, the disk is removed all the same.
        let _ = world.host.run_program(&Program::new("blockdev", args, &disk)).await;
        scsi::delete_disk(world, places, &name).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::scsi::tests::record, *};
    use crate::world::testing::world_in;

    /// The kernel of a test machine has no Fibre Channel, so this is against a record of one.
    #[tokio::test]
    async fn disk_of_a_recorded_fabric_is_found_scanned_for_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (world, (sys, dev)) = (world_in(dir.path()), record(dir.path()));
        let places = Places { sys: &sys, dev: &dev };
        let by_target = FcDevice::Targets { wwns: vec!["50060e801049cfd1".to_owned()], lun: 2 };
        assert_eq!(attach(&world, places, &by_target).await.unwrap(), dev.join("sdd"));
        assert_eq!(fs::read_to_string(sys.join("class/scsi_host/host4/scan")).unwrap(), "- - -");
        let by_id = FcDevice::Ids(vec!["3600508b4".to_owned()]);
        assert_eq!(attach(&world, places, &by_id).await.unwrap(), dev.join("dm-0"), "its paths have a device");
        let missing = FcDevice::Ids(vec!["other".to_owned()]);
        assert_eq!(attach(&world, places, &missing).await.unwrap_err().message, "no fc disk found");
        detach(&world, places, &dev.join("sdd")).await.unwrap();
        assert_eq!(fs::read_to_string(sys.join("block/sdd/device/delete")).unwrap(), "1");
        assert_eq!(fs::read_to_string(sys.join("block/sda/device/delete")).unwrap(), "");
    }
}
