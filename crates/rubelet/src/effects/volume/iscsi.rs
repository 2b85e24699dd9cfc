//! Setup of iSCSI volumes.
//!
//! Owns: the sessions with targets through iscsiadm, the search for disks, their mount for all pods, the logout after the last
//! of a target. Never: shows secrets.
//! Upstream: `pkg/volume/iscsi`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

use rubelet_core::{
    effect::{EffectError, Facts},
    time::Uptime,
    volumes::{
        claims::PersistentSource,
        iscsi::{self, DISCOVERY_KEYS, DiskLink, IscsiDevice, IscsiVolume, SESSION_KEYS, iscsiadm},
        mounting::join_options,
    },
};
use rubelet_host::port::{Ended, Program, ProgramOutput};
use serde::{Deserialize, Serialize};

use super::{
    DIR_MODE, csi, data_file, device_map, entries, make_dir,
    mounting::{self, Mount, combined_output},
    remove_dir,
    scsi::{self, Places},
};
use crate::{
    effects::{directories::component, failure},
    world::World,
};

/// A login waits for the target for up to two minutes.
const ISCSIADM_TIMEOUT: Duration = Duration::from_secs(150);
/// For udev to make the link to a disk.
const LINK_TIMEOUT: Duration = Duration::from_secs(30);
const MULTIPATH_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_PERIOD: Duration = Duration::from_secs(1);
/// Below the mount, so that it is seen again when the disk is unmounted.
const DATA_FILE: &str = "iscsi.json";

/// What `iscsi.json` says, with upstream's fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct IscsiData {
    vol_name: String,
    portals: Vec<String>,
    iqn: String,
    lun: String,
    init_iface: String,
    iface: String,
    initiator_name: String,
}

/// One login or logout of a target at a time: its disks share sessions.
async fn target_lock(iqn: &str) -> tokio::sync::OwnedMutexGuard<()> {
    type Locks = Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>;
    static TARGETS: LazyLock<Locks> = LazyLock::new(Mutex::default);
    let lock = {
        let mut targets = TARGETS.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody holds are forgotten.
        targets.retain(|_, lock| Arc::strong_count(lock) > 1);
        targets.entry(iqn.to_owned()).or_default().clone()
    };
    lock.lock_owned().await
}

pub(super) async fn stage(
    world: &World,
    source: &PersistentSource,
    volume: &IscsiVolume,
) -> Result<Facts, EffectError> {
    let device = volume.device(&source.name);
    let target = device_dir(world, &device)?;
    if !volume.is_block && mounting::is_mounted(world, &target).await? {
        return Ok(Facts::Nothing);
    }
    // First, so that the disk is detached by it whatever comes of this.
    let dir = if volume.is_block { device.block_dir(&world.paths.root_dir) } else { target.clone() };
    write_data(world, source, volume, &dir).await?;
    let disk = attach(world, source, volume, &device).await?;
    if volume.is_block {
        return Ok(Facts::Nothing);
    }
    let options = join_options(&volume.mount_options, source.read_only.then_some("ro"));
    let disk = disk.display().to_string();
    let order = Mount { source: &disk, target: &target, fs_type: &volume.fs_type, options: &options };
    mounting::format_and_mount(world, order).await.map(|()| Facts::Nothing)
}

/// Makes the directory of a disk, with the file that says how to detach it.
async fn write_data(
    world: &World,
    source: &PersistentSource,
    volume: &IscsiVolume,
    dir: &Path,
) -> Result<(), EffectError> {
    let device = volume.device(&source.name);
    make_dir(world, &world.paths.root_dir, dir, DIR_MODE).await?;
    let data = IscsiData {
        vol_name: source.name.clone(),
        portals: volume.portals.clone(),
        iqn: device.iqn.clone(),
        lun: device.lun.to_string(),
        init_iface: volume.base_iface.clone(),
        iface: device.iface.clone(),
        initiator_name: volume.initiator_name.clone().unwrap_or_default(),
    };
    data_file::write(world, dir, DATA_FILE, &data).await
}

/// The disk that this process or a previous one attached, or the multipath device of its paths.
pub(super) async fn disk(world: &World, device: &IscsiDevice) -> Result<PathBuf, EffectError> {
    let places = Places::real();
    let disks = scsi::disks_of_target(world, places, &device.iqn, device.lun).await?;
    let disks: Vec<_> = disks.iter().map(|disk| places.dev.join(disk)).collect();
    for disk in &disks {
        if let Some(mapped) = scsi::multipath_of(world, places, disk).await {
            return Ok(mapped);
        }
    }
    let lost = || failure::retryable(format!("iscsi: disk {} of {} is not attached any more", device.lun, device.iqn));
    disks.into_iter().next().ok_or_else(lost)
}

pub(super) async fn unstage(world: &World, device: &IscsiDevice) -> Result<Facts, EffectError> {
    let target = device_dir(world, device)?;
    mounting::check_references(world, &target).await?;
    if mounting::is_mounted(world, &target).await? {
        world.host.unmount(&target).await.map_err(|error| failure::io("unmount", &target, &error))?;
    }
    let bound = device.block_dir(&world.paths.root_dir);
    device_map::unbind_left(world, &bound).await?;
    detach(world, device, [&target, &bound]).await.map_err(|error| EffectError {
        message: format!("iscsi: failed to detach disk: {}\nError: {error}", target.display()),
        ..error
    })?;
    remove_dir(world, &target, &[DATA_FILE]).await?;
    world.host.remove_tree(&bound).await.map_err(|error| failure::io("remove", &bound, &error))?;
    Ok(Facts::Nothing)
}

fn device_dir(world: &World, device: &IscsiDevice) -> Result<PathBuf, EffectError> {
    let dir = device.dir(&world.paths.root_dir);
    for part in [dir.file_name(), dir.parent().and_then(Path::file_name)] {
        component(&part.unwrap_or_default().to_string_lossy())?;
    }
    Ok(dir)
}

/// The disk, or the multipath device of its paths.
async fn attach(
    world: &World,
    source: &PersistentSource,
    volume: &IscsiVolume,
    device: &IscsiDevice,
) -> Result<PathBuf, EffectError> {
    let _target = target_lock(&device.iqn).await;
    let shown = run(world, device, iscsiadm::iface(&volume.base_iface, &iscsiadm::SHOW)).await?;
    if !shown.is_success() {
        let message = format!("iscsi: could not read iface {} error: {}", volume.base_iface, combined_output(&shown));
        return Err(failure::retryable(message));
    }
    let Some(transport) = iscsi::transport(&shown.stdout).map(str::to_owned) else {
        return Err(failure::retryable(format!("could not parse iface file for {}", device.iface)));
    };
    let secrets = csi::secret_texts(world, volume.secret.as_ref()).await?;
    if let Some(name) = &volume.initiator_name {
        clone_iface(world, device, &shown.stdout, name).await?;
    }
    let attaching = Attaching { world, source, volume, device, transport: &transport, secrets: &secrets };
    let (mut disks, mut last, mut rounds) = (BTreeMap::new(), None, 0);
    loop {
        rounds += 1;
        for portal in &volume.portals {
            if disks.contains_key(portal) {
                continue;
            }
            match attaching.path(portal).await {
                Ok(disk) => drop(disks.insert(portal.clone(), disk)),
                Err(error) => last = Some(error),
            }
        }
        if iscsi::has_enough_paths(disks.len(), volume.portals.len(), rounds) {
            break;
        }
    }
    let Some(first) = disks.values().next().cloned() else {
        if volume.initiator_name.is_some() {
            let _ = run(world, device, iscsiadm::iface(&device.iface, &iscsiadm::DELETE)).await;
        }
        let last = last.map(|error| error.message).unwrap_or_default();
        return Err(failure::retryable(format!("failed to get any path for iscsi disk, last err seen:\n{last}")));
    };
    let timeout = if volume.portals.len() > 1 { MULTIPATH_TIMEOUT } else { Duration::ZERO };
    let began = world.clock.now().uptime;
    loop {
        for disk in disks.values() {
            if let Some(mapped) = scsi::multipath_of(world, Places::real(), disk).await {
                return Ok(mapped);
            }
        }
        if !sleep_unless_late(world, began, timeout).await {
            return Ok(first);
        }
    }
}

/// What one path to a disk needs.
struct Attaching<'a> {
    world: &'a World,
    source: &'a PersistentSource,
    volume: &'a IscsiVolume,
    device: &'a IscsiDevice,
    transport: &'a str,
    secrets: &'a BTreeMap<String, String>,
}

impl Attaching<'_> {
    async fn path(&self, portal: &str) -> Result<PathBuf, EffectError> {
        let Attaching { world, device, .. } = self;
        let places = Places::real();
        let number = match self.host(portal).await? {
            Some(number) => number,
            None => {
                self.log_in(portal).await?;
                let lost = || {
                    failure::retryable(format!("Could not get SCSI host number for portal {portal} after logging in"))
                };
                self.host(portal).await?.ok_or_else(lost)?
            }
        };
        scsi::scan(world, places, &format!("host{number}"), &format!("0 0 {}", device.lun)).await?;
        let links = places.dev.join("disk/by-path");
        let wanted = iscsi::disk_link(self.transport, portal, &device.iqn, device.lun);
        let began = world.clock.now().uptime;
        loop {
            if let Some(disk) = disk_of(world, places, &links, &wanted).await {
                return Ok(disk);
            }
            if !sleep_unless_late(world, began, LINK_TIMEOUT).await {
                let (DiskLink::Named(name) | DiskLink::EndsWith(name)) = &wanted;
                let (path, secs) = (links.join(name), LINK_TIMEOUT.as_secs());
                return Err(failure::retryable(format!(
                    "Timed out waiting for device at path {} after {secs}s",
                    path.display()
                )));
            }
        }
    }

    /// The SCSI host of the session with this portal.
    async fn host(&self, portal: &str) -> Result<Option<u32>, EffectError> {
        let hosts = scsi::hosts_of_target(self.world, Places::real(), &self.device.iqn).await?;
        Ok(hosts.get(portal).copied())
    }

    async fn log_in(&self, portal: &str) -> Result<(), EffectError> {
        let Attaching { world, volume, device, .. } = self;
        let discovery = |action: &[&str]| iscsiadm::discovery(portal, &device.iface, action);
        let node = |action: &[&str]| iscsiadm::node(portal, device, action);
        let go = |args: Vec<String>| run(world, device, args);
        // It may be known already.
        go(discovery(&iscsiadm::NEW)).await?;
        if volume.discovery_chap {
            let begin = format!("iscsi: failed to update discoverydb to portal {portal} error: ");
            self.update("discovery.sendtargets.auth.authmethod", &DISCOVERY_KEYS, &begin, &discovery).await?;
        }
        let found = go(discovery(&["--discover"])).await?;
        if !found.is_success() {
            go(discovery(&iscsiadm::DELETE)).await?;
            let (said, status) = (combined_output(&found), found.status);
            return Err(failure::retryable(format!(
                "iscsi: failed to sendtargets to portal {portal} output: {said}, err {status}"
            )));
        }
        // Only the unit of this volume is looked for; a version that does not know the setting finds more of them.
        go(node(&iscsiadm::update("node.session.scan", "manual"))).await?;
        if volume.session_chap {
            let begin = format!("iscsi: failed to update iscsi node to portal {portal} error: ");
            self.update("node.session.auth.authmethod", &SESSION_KEYS, &begin, &node).await?;
        }
        let logged_in = go(node(&["--login"])).await?;
        if !logged_in.is_success() {
            go(node(&iscsiadm::DELETE)).await?;
            let (said, status) = (combined_output(&logged_in), logged_in.status);
            return Err(failure::retryable(format!("iscsi: failed to attach disk: Error: {said} ({status})")));
        }
        // A node that starts must not wait for its targets.
        go(node(&iscsiadm::update("node.startup", "manual"))).await?;
        Ok(())
    }

    /// The secret is in arguments only, which are never shown.
    async fn update(
        &self,
        method: &str,
        keys: &[&str],
        begin: &str,
        command: &(dyn Fn(&[&str]) -> Vec<String> + Sync),
    ) -> Result<(), EffectError> {
        let Attaching { world, device, .. } = self;
        let known = keys.iter().filter_map(|key| Some((*key, self.secrets.get(*key)?.as_str())));
        let set = known.filter(|(_, value)| !value.is_empty());
        for (key, value) in [(method, "CHAP")].into_iter().chain(set) {
            let updated = run(world, device, command(&iscsiadm::update(key, value))).await?;
            if !updated.is_success() {
                let name = &self.source.name;
                return Err(failure::retryable(format!(
                    "{begin}failed to update key {key:?} for volume {name}: {}",
                    updated.status
                )));
            }
        }
        Ok(())
    }
}

/// An interface with the volume's own initiator name.
async fn clone_iface(world: &World, device: &IscsiDevice, shown: &str, initiator: &str) -> Result<(), EffectError> {
    let made = run(world, device, iscsiadm::iface(&device.iface, &iscsiadm::NEW)).await?;
    if !made.is_success() && made.status != Ended::Exit(iscsiadm::SESSION_EXISTS) {
        return Err(failure::retryable(format!(
            "iscsi: failed to create new iface: {} ({})",
            combined_output(&made),
            made.status
        )));
    }
    let mut settings = iscsi::iface_settings(shown);
    settings.insert("iface.initiatorname", initiator);
    for (key, value) in settings {
        let updated = run(world, device, iscsiadm::iface(&device.iface, &iscsiadm::update(key, value))).await?;
        if !updated.is_success() && made.is_success() {
            run(world, device, iscsiadm::iface(&device.iface, &iscsiadm::DELETE)).await?;
            return Err(failure::retryable(format!(
                "iscsi: failed to update iface records: {} ({})",
                combined_output(&updated),
                updated.status
            )));
        }
    }
    Ok(())
}

/// Removes the disk from the node, and ends the sessions with its target if it was the last one.
async fn detach(world: &World, device: &IscsiDevice, dirs: [&Path; 2]) -> Result<(), EffectError> {
    let places = Places::real();
    let others = other_volumes(world, device).await?;
    if others.iter().any(|other| (&other.iqn, other.lun) == (&device.iqn, device.lun)) {
        // Another volume is the same disk, by another portal or with another initiator.
        return Ok(());
    }
    let disks = scsi::disks_of_target(world, places, &device.iqn, device.lun).await?;
    let mut mapped = BTreeSet::new();
    for disk in &disks {
        mapped.extend(scsi::multipath_of(world, places, &places.dev.join(disk)).await);
    }
    for device in &mapped {
        // As upstream: the logout may help.
        let _ = scsi::flush_multipath(world, device).await;
    }
    for disk in &disks {
        scsi::delete_disk(world, places, disk).await?;
    }
    let mut data =
        IscsiData { portals: vec![device.portal.clone()], iface: device.iface.clone(), ..IscsiData::default() };
    for dir in dirs {
        if let Some(found) = data_file::read(world, dir, DATA_FILE).await? {
            data = found;
        }
    }
    let _target = target_lock(&device.iqn).await;
    let others = other_volumes(world, device).await?;
    if others.iter().any(|other| (&other.portal, &other.iqn) == (&device.portal, &device.iqn)) {
        return Ok(());
    }
    for portal in &data.portals {
        for action in [&["--logout"][..], &iscsiadm::DELETE] {
            let ended = run(world, device, iscsiadm::node(portal, device, action)).await?;
            let is_unknown = iscsiadm::NOTHING_KNOWN.map(Ended::Exit).contains(&ended.status);
            if !ended.is_success() && !is_unknown {
                return Err(failure::retryable(format!(
                    "failed to finish detachISCSIDisk, err: {} {}",
                    ended.status,
                    combined_output(&ended)
                )));
            }
        }
    }
    if !data.initiator_name.is_empty() && data.iface != data.init_iface {
        let ended = run(world, device, iscsiadm::iface(&data.iface, &iscsiadm::DELETE)).await?;
        if !ended.is_success() && !iscsiadm::NOTHING_KNOWN.map(Ended::Exit).contains(&ended.status) {
            return Err(failure::retryable(format!(
                "iscsi: failed to delete iface Error: {}",
                combined_output(&ended)
            )));
        }
    }
    Ok(())
}

/// Those that have directories, on all interfaces.
async fn other_volumes(world: &World, own: &IscsiDevice) -> Result<BTreeSet<IscsiDevice>, EffectError> {
    let root_dir = &world.paths.root_dir;
    let mut volumes = BTreeSet::new();
    for root in [iscsi::devices_dir(root_dir), iscsi::block_dir(root_dir)] {
        for iface in entries(world, &root, None).await? {
            let dirs = entries(world, &root.join(&iface), None).await?;
            volumes.extend(dirs.iter().filter_map(|dir| IscsiDevice::parse(&iface, dir)));
        }
    }
    volumes.remove(own);
    Ok(volumes)
}

/// Commands about one target follow each other.
async fn run(world: &World, device: &IscsiDevice, args: Vec<String>) -> Result<ProgramOutput, EffectError> {
    let on = Path::new("iscsi").join(&device.iqn);
    let program = Program { timeout: ISCSIADM_TIMEOUT, ..Program::new("iscsiadm", args, &on) };
    world.host.run_program(&program).await.map_err(|error| failure::retryable(format!("iscsi: {error}")))
}

async fn disk_of(world: &World, places: Places<'_>, links: &Path, wanted: &DiskLink) -> Option<PathBuf> {
    let names = entries(world, links, None).await.ok()?;
    let name = names.into_iter().find(|name| match wanted {
        DiskLink::Named(wanted) => name == wanted,
        DiskLink::EndsWith(end) => name.starts_with("pci-") && name.ends_with(end),
    })?;
    scsi::disk_of_link(world, places, &links.join(name)).await
}

/// Sleeps for a second. `false`: the timeout is over.
async fn sleep_unless_late(world: &World, began: Uptime, timeout: Duration) -> bool {
    if world.clock.now().uptime.since(began) >= timeout {
        return false;
    }
    tokio::time::sleep(POLL_PERIOD).await;
    true
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rubelet_core::{
        id::PodUid,
        volumes::{claims::PersistentKind, devices::Device},
    };
    use serde_json::json;

    use super::*;
    use crate::{
        effects::{
            directories::{make_pod_dirs, tests::pod_ref},
            volume::{devices, set_up_volume, tear_down_volumes},
        },
        world::testing::world_in,
    };

    /// For a machine with a target on loopback, which `RUBELET_TEST_IQN` names; its unit 1 is an empty disk.
    #[tokio::test]
    #[ignore = "needs an iSCSI target and iscsid: run it in the emulated machine"]
    async fn iscsi_disk_is_logged_in_formatted_kept_and_logged_out() {
        let iqn = std::env::var("RUBELET_TEST_IQN").expect("RUBELET_TEST_IQN names a target");
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(&dir.path().canonicalize().unwrap());
        let source = json!({"targetPortal": "127.0.0.1", "iqn": iqn, "lun": 1, "fsType": "ext4"});
        let volume = IscsiVolume::inline(&serde_json::from_value(source).unwrap(), "default");
        let device = volume.device("data");
        let kind = PersistentKind::Iscsi(volume.clone());
        let source = PersistentSource {
            name: "data".to_owned(),
            read_only: false,
            is_exclusive: false,
            kind,
            size: None,
            group: None,
        };
        let (uid, pod) = (PodUid::new("0001"), json!({"metadata": {}, "spec": {"containers": []}}));
        let pod = serde_json::from_value(pod).unwrap();
        let place = world.paths.pod_dir(&uid).join("volumes/kubernetes.io~iscsi/data");
        let sessions = || {
            let shown = std::process::Command::new("iscsiadm").args(["-m", "session"]).output().unwrap();
            String::from_utf8(shown.stdout).unwrap()
        };
        for round in 0..2 {
            make_pod_dirs(&world, &pod_ref("0001")).await.unwrap();
            stage(&world, &source, &volume).await.unwrap();
            stage(&world, &source, &volume).await.unwrap();
            println!("staged: {}", sessions());
            assert!(sessions().contains(&iqn));
            set_up_volume(&world, &pod, &uid, "data", Some(&source)).await.unwrap();
            if round == 0 {
                fs::write(place.join("file"), "kept").unwrap();
            }
            assert_eq!(fs::read_to_string(place.join("file")).unwrap(), "kept");
            let Facts::Devices(found) = devices::list_devices(&world).await.unwrap() else { panic!("no devices") };
            assert_eq!(found[0].device, Device::Iscsi(device.clone()));
            assert!(found[0].pods.contains(&uid));
            tear_down_volumes(&world, &pod_ref("0001")).await.unwrap();
            let Facts::Devices(found) = devices::list_devices(&world).await.unwrap() else { panic!("no devices") };
            assert!(found[0].pods.is_empty());
            unstage(&world, &device).await.unwrap();
            assert!(!sessions().contains(&iqn), "{}", sessions());
            unstage(&world, &device).await.unwrap();
        }
    }
}
