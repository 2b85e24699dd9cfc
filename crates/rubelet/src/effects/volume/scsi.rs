//! SCSI disks as the kernel shows them, for iSCSI and Fibre Channel.
//!
//! Owns: reads of sysfs and of the links below `/dev/disk`, scans of hosts, the removal of disks. Never: mounts one.
//! Upstream: `pkg/volume/util/device_util_linux.go`, `scsiHostRescan`, `deleteDevice`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use rubelet_core::effect::EffectError;
use rubelet_host::port::Program;

use super::entries;
use crate::{effects::failure, world::World};

/// A file of sysfs.
const MAX_BYTES: u64 = 4096;
/// A scan asks the target, which may be far away.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(60);
const MULTIPATH_TIMEOUT: Duration = Duration::from_secs(60);

/// Where the kernel and udev show disks: `/sys` and `/dev`, or a record of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a> {
    pub sys: &'a Path,
    pub dev: &'a Path,
}

impl Places<'static> {
    pub(super) fn real() -> Self {
        Places { sys: Path::new("/sys"), dev: Path::new("/dev") }
    }
}

/// The SCSI hosts of the sessions with a target, by portal.
pub(super) async fn hosts_of_target(
    world: &World,
    places: Places<'_>,
    iqn: &str,
) -> Result<BTreeMap<String, u32>, EffectError> {
    let mut hosts = BTreeMap::new();
    for (number, session) in sessions(world, places, iqn).await? {
        for connection in
            entries(world, &session, None).await?.into_iter().filter(|name| name.starts_with("connection"))
        {
            let dir = session.join(&connection).join("iscsi_connection").join(&connection);
            for (address, port) in [("address", "port"), ("persistent_address", "persistent_port")] {
                // A connection that ends meanwhile is none.
                let (Some(address), Some(port)) =
                    (text(world, &dir.join(address)).await, text(world, &dir.join(port)).await)
                else {
                    continue;
                };
                let address = if address.contains(':') { format!("[{address}]") } else { address };
                hosts.insert(format!("{address}:{port}"), number);
            }
        }
    }
    Ok(hosts)
}

/// The disks of a unit behind a target, one per session.
pub(super) async fn disks_of_target(
    world: &World,
    places: Places<'_>,
    iqn: &str,
    lun: i32,
) -> Result<BTreeSet<String>, EffectError> {
    let mut disks = BTreeSet::new();
    for (number, session) in sessions(world, places, iqn).await? {
        let unit = session.join(format!("target{number}:0:0/{number}:0:0:{lun}/block"));
        disks.extend(entries(world, &unit, None).await?.into_iter().next());
    }
    Ok(disks)
}

/// The sessions with a target: their hosts, and their directories.
async fn sessions(world: &World, places: Places<'_>, iqn: &str) -> Result<Vec<(u32, PathBuf)>, EffectError> {
    let mut found = Vec::new();
    let class = places.sys.join("class/iscsi_host");
    for host in entries(world, &class, None).await? {
        let Some(number) = host.strip_prefix("host").and_then(|number| number.parse().ok()) else { continue };
        let device = class.join(&host).join("device");
        for session in entries(world, &device, None).await?.into_iter().filter(|name| name.starts_with("session")) {
            let dir = device.join(&session);
            let target = text(world, &dir.join("iscsi_session").join(&session).join("targetname")).await;
            if target.as_deref() == Some(iqn) {
                found.push((number, dir));
            }
        }
    }
    Ok(found)
}

/// The disk below `/dev` that a link there leads to.
pub(super) async fn disk_of_link(world: &World, places: Places<'_>, link: &Path) -> Option<PathBuf> {
    let target = world.host.read_link(link).await.ok().flatten()?;
    Some(places.dev.join(target.file_name()?))
}

/// The multipath device that a disk is a path of.
pub(super) async fn multipath_of(world: &World, places: Places<'_>, disk: &Path) -> Option<PathBuf> {
    let name = disk.file_name()?.to_str()?;
    if name.starts_with("dm-") {
        return Some(disk.to_owned());
    }
    let block = places.sys.join("block");
    for mapped in entries(world, &block, None).await.ok()?.into_iter().filter(|name| name.starts_with("dm-")) {
        let slaves = entries(world, &block.join(&mapped).join("slaves"), None).await.ok()?;
        if slaves.iter().any(|slave| slave == name) {
            return Some(places.dev.join(mapped));
        }
    }
    None
}

/// The paths of a multipath device.
pub(super) async fn slaves_of(world: &World, places: Places<'_>, mapped: &Path) -> Vec<String> {
    let Some(name) = mapped.file_name() else { return Vec::new() };
    entries(world, &places.sys.join("block").join(name).join("slaves"), None).await.unwrap_or_default()
}

/// Looks for one unit behind a host, or for all.
pub(super) async fn scan(world: &World, places: Places<'_>, host: &str, what: &str) -> Result<(), EffectError> {
    let file = places.sys.join("class/scsi_host").join(host).join("scan");
    control(world, &file, what).await
}

/// Hosts of all kinds.
pub(super) async fn scsi_hosts(world: &World, places: Places<'_>) -> Result<Vec<String>, EffectError> {
    entries(world, &places.sys.join("class/scsi_host"), None).await
}

/// Removes a disk from the kernel; a missing one is no error.
pub(super) async fn delete_disk(world: &World, places: Places<'_>, disk: &str) -> Result<(), EffectError> {
    let file = places.sys.join("block").join(disk).join("device/delete");
    match world.host.file_kind(&file).await {
        Ok(None) => Ok(()),
        Ok(Some(_)) => control(world, &file, "1").await,
        Err(error) => Err(failure::io("stat", &file, &error)),
    }
}

/// Removes a multipath device.
pub(super) async fn flush_multipath(world: &World, mapped: &Path) -> Result<(), EffectError> {
    let args = vec!["-f".to_owned(), mapped.display().to_string()];
    let flush = Program { timeout: MULTIPATH_TIMEOUT, ..Program::new("multipath", args, mapped) };
    let flushed = world.host.run_program(&flush).await;
    let why = match flushed {
        Ok(output) if output.is_success() => return Ok(()),
        Ok(output) => format!("{}\n{}", output.status, super::mounting::combined_output(&output)),
        Err(error) => error.to_string(),
    };
    let message = format!("failed to flush multipath device {}: {why}", mapped.display());
    Err(failure::retryable(message))
}

async fn control(world: &World, file: &Path, text: &str) -> Result<(), EffectError> {
    let written = world.host.write_control(file, text.as_bytes(), CONTROL_TIMEOUT).await;
    written.map_err(|error| failure::io("write", file, &error))
}

async fn text(world: &World, file: &Path) -> Option<String> {
    let content = world.host.read_file(file, MAX_BYTES).await.ok()?;
    Some(String::from_utf8_lossy(&content).trim().to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::world::testing::world_in;

    /// A record of what the kernel and udev show of a target with two portals, a multipath device of its disks, and a Fibre
    /// Channel disk.
    pub(in crate::effects::volume) fn record(dir: &Path) -> (PathBuf, PathBuf) {
        let (sys, dev) = (dir.join("sys"), dir.join("dev"));
        let put = |path: String, content: &str| {
            let file = sys.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        };
        for (host, address, disk) in [(3, "10.0.0.1", "sdb"), (4, "fd00::1", "sdc")] {
            let session = format!("class/iscsi_host/host{host}/device/session{host}");
            put(format!("{session}/iscsi_session/session{host}/targetname"), "iqn.2001-04.com.example:a\n");
            let connection = format!("{session}/connection{host}:0/iscsi_connection/connection{host}:0");
            for (name, content) in
                [("address", address), ("port", "3260"), ("persistent_address", address), ("persistent_port", "3260")]
            {
                put(format!("{connection}/{name}"), &format!("{content}\n"));
            }
            put(format!("{session}/target{host}:0:0/{host}:0:0:1/block/{disk}/size"), "1");
            put(format!("class/scsi_host/host{host}/scan"), "");
            put(format!("block/dm-0/slaves/{disk}"), "");
            put(format!("block/{disk}/device/delete"), "");
        }
        for name in ["sda", "sdd"] {
            put(format!("block/{name}/device/delete"), "");
        }
        let links = dev.join("disk/by-path");
        fs::create_dir_all(&links).unwrap();
        symlink("../../sdd", links.join("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-2")).unwrap();
        symlink("../../sdd1", links.join("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-2-part1")).unwrap();
        fs::create_dir_all(dev.join("disk/by-id")).unwrap();
        symlink("../../sdb", dev.join("disk/by-id/scsi-3600508b4")).unwrap();
        (sys, dev)
    }

    #[tokio::test]
    async fn sessions_and_disks_of_a_target_are_found_in_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let (world, (sys, dev)) = (world_in(dir.path()), record(dir.path()));
        let places = Places { sys: &sys, dev: &dev };
        let hosts = hosts_of_target(&world, places, "iqn.2001-04.com.example:a").await.unwrap();
        assert_eq!(hosts.get("10.0.0.1:3260"), Some(&3));
        assert_eq!(hosts.get("[fd00::1]:3260"), Some(&4));
        assert!(hosts_of_target(&world, places, "iqn.2001-04.com.example:b").await.unwrap().is_empty());
        let disks = disks_of_target(&world, places, "iqn.2001-04.com.example:a", 1).await.unwrap();
        assert_eq!(disks.iter().collect::<Vec<_>>(), ["sdb", "sdc"]);
        assert!(disks_of_target(&world, places, "iqn.2001-04.com.example:a", 2).await.unwrap().is_empty());
        assert_eq!(multipath_of(&world, places, &dev.join("sdc")).await, Some(dev.join("dm-0")));
        assert_eq!(multipath_of(&world, places, &dev.join("sdd")).await, None);
        assert_eq!(slaves_of(&world, places, &dev.join("dm-0")).await, ["sdb", "sdc"]);
        scan(&world, places, "host3", "0 0 1").await.unwrap();
        assert_eq!(fs::read_to_string(sys.join("class/scsi_host/host3/scan")).unwrap(), "0 0 1");
        delete_disk(&world, places, "sdb").await.unwrap();
        assert_eq!(fs::read_to_string(sys.join("block/sdb/device/delete")).unwrap(), "1");
        delete_disk(&world, places, "sdx").await.unwrap();
    }
}
