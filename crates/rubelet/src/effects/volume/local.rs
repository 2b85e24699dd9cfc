//! Setup of local persistent volumes.
//!
//! Owns: the mount of a block device for all pods, the bind mount into the pod's directory, and its owner. Never: removes
//! anything of a volume.
//! Upstream: `pkg/volume/local`.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{EffectError, EventRecord, Facts, InvolvedObject, Severity},
    event_reasons,
    id::PodRef,
    volumes::{
        self,
        claims::PersistentSource,
        local::{self, LOCAL_PLUGIN, LocalVolume},
        mounting::bind_options,
    },
};
use rubelet_host::port::FileKind;

use super::{
    DIR_MODE, VolumePod, device_map, make_dir,
    mounting::{self, Mount},
    persistent,
};
use crate::{
    effects::{directories::component, failure},
    world::World,
};

/// Mounts a block device once for all pods; a directory needs nothing.
pub(super) async fn stage(
    world: &World,
    source: &PersistentSource,
    volume: &LocalVolume,
) -> Result<Facts, EffectError> {
    let target = device_dir(world, &source.name)?;
    if volume.is_block {
        return Ok(Facts::Nothing);
    }
    if !is_device(world, volume).await? || mounting::is_mounted(world, &target).await? {
        return Ok(Facts::Nothing);
    }
    make_dir(world, &world.paths.root_dir, &target, DIR_MODE).await?;
    let (device, options) = (volume.path.display().to_string(), volume.device_options(source.read_only));
    let order = Mount { source: &device, target: &target, fs_type: &volume.fs_type, options: &options };
    let mounted = mounting::format_and_mount(world, order).await;
    mounted.map(|()| Facts::Nothing).map_err(|error| EffectError {
        message: format!(
            "local: failed to mount device {device} at {} (fstype: {}), error {error}",
            target.display(),
            volume.fs_type
        ),
        ..error
    })
}

pub(super) async fn unstage(world: &World, name: &str) -> Result<Facts, EffectError> {
    let target = device_dir(world, name)?;
    mounting::check_references(world, &target).await?;
    mounting::unmount_and_remove(world, &target).await?;
    let bound = local::block_dir(&world.paths.root_dir).join(component(name)?);
    device_map::unbind_left(world, &bound).await?;
    world.host.remove_tree(&bound).await.map_err(|error| failure::io("remove", &bound, &error))?;
    Ok(Facts::Nothing)
}

/// Makes the file system on a device as large as it. A directory, and a device without one, are as large as they are.
pub(super) async fn grow(world: &World, source: &PersistentSource, volume: &LocalVolume) -> Result<(), EffectError> {
    if volume.is_block || !is_device(world, volume).await? {
        return Ok(());
    }
    mounting::grow(world, &volume.path.display().to_string(), &device_dir(world, &source.name)?).await
}

/// The block device of a volume that is used without a file system.
pub(super) fn device(volume: &LocalVolume) -> Result<PathBuf, EffectError> {
    volume.problem().map_or(Ok(volume.path.clone()), |problem| Err(failure::refused(problem)))
}

pub(super) async fn set_up(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    volume: &LocalVolume,
) -> Result<(), EffectError> {
    component(&source.name)?;
    let from = if is_device(world, volume).await? { device_dir(world, &source.name)? } else { volume.path.clone() };
    let target = source.path(owner.dir);
    let is_shared = is_mounted_for_another(world, &target).await?;
    if is_shared && !mounting::is_mounted(world, &target).await? {
        warn_of_another_group(world, owner.pod, source, &from).await?;
    }
    mounting::bind(world, &from, &target, &bind_options(&volume.mount_options, source.read_only)).await?;
    // As upstream, the first pod's group stays as long as the volume is in use.
    if source.read_only || is_shared { Ok(()) } else { persistent::share(world, owner.pod, source, &target).await }
}

/// Tells that the volume keeps the group that another pod gave it.
async fn warn_of_another_group(
    world: &World,
    pod: &Pod,
    source: &PersistentSource,
    place: &Path,
) -> Result<(), EffectError> {
    let Some(wanted) = pod.spec.as_ref().and_then(volumes::fs_group) else { return Ok(()) };
    let group = world.host.file_group(place).await.map_err(|error| failure::io("stat", place, &error))?;
    if group != wanted {
        let name = &source.name;
        let message = format!(
            "The requested fsGroup is {wanted}, but the volume {name} has GID {group}. The volume may not be shareable."
        );
        let (pod, reason) = (InvolvedObject::Pod(PodRef::of(pod)), event_reasons::ALREADY_MOUNTED_VOLUME);
        world.events.record(EventRecord::new(pod, Severity::Warning, reason, message), world.clock.now().wall);
    }
    Ok(())
}

fn device_dir(world: &World, name: &str) -> Result<PathBuf, EffectError> {
    Ok(local::devices_dir(&world.paths.root_dir).join(component(name)?))
}

/// A block device, or else a directory.
async fn is_device(world: &World, volume: &LocalVolume) -> Result<bool, EffectError> {
    if let Some(problem) = volume.problem() {
        return Err(failure::refused(problem));
    }
    let path = &volume.path;
    match world.host.file_kind(path).await.map_err(|error| failure::io("stat", path, &error))? {
        Some(FileKind::Directory) => Ok(false),
        Some(FileKind::BlockDevice) => Ok(true),
        Some(_) => Err(failure::refused("only directory and block device are supported".to_owned())),
        None => {
            let message = format!("path {:?} does not exist", path.display().to_string());
            Err(failure::retryable(message))
        }
    }
}

/// Another pod has the same volume.
async fn is_mounted_for_another(world: &World, own: &Path) -> Result<bool, EffectError> {
    let Some(name) = own.file_name() else { return Ok(false) };
    let pods_dir = world.paths.pods_dir();
    let mounts = world.host.mounts_below(&pods_dir).await;
    let mounts = mounts.map_err(|error| failure::io("look for mounts below", &pods_dir, &error))?;
    let suffix = Path::new("volumes").join(LOCAL_PLUGIN).join(name);
    // Mounts are named as the kernel knows them, so a pod's directory is known by its last part.
    let own_pod = own.ancestors().nth(3).and_then(Path::file_name);
    let pod_of = |mount: &Path| mount.ancestors().nth(3).and_then(Path::file_name).map(ToOwned::to_owned);
    Ok(mounts.iter().any(|mount| mount.ends_with(&suffix) && pod_of(mount).as_deref() != own_pod))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, process::Command};

    use rubelet_core::{
        id::PodUid,
        volumes::{claims::PersistentKind, devices::Device},
    };
    use rubelet_host::port::MountPoint;
    use serde_json::json;

    use super::*;
    use crate::{
        effects::{
            directories::{make_pod_dirs, remove_pod_dir, tests::pod_ref},
            volume::{devices, set_up_volume, tear_down_volumes},
        },
        world::testing::world_in,
    };

    const UID: &str = "0001";

    fn volume(path: PathBuf) -> PersistentSource {
        // A name of no file system stands for the default, as no name does.
        let (fs_type, mount_options) = (String::new(), vec!["noexec".to_owned()]);
        let kind = PersistentKind::Local(LocalVolume { path, fs_type, mount_options, is_block: false });
        PersistentSource { name: "pv".to_owned(), read_only: false, is_exclusive: false, kind, size: None, group: None }
    }

    fn stage_of(source: &PersistentSource) -> &LocalVolume {
        match &source.kind {
            PersistentKind::Local(volume) => volume,
            other => panic!("{other:?}"),
        }
    }

    async fn set_up(world: &World, uid: &str, source: &PersistentSource) -> Result<(), String> {
        set_up_for(world, uid, 4321, source).await
    }

    async fn set_up_for(world: &World, uid: &str, group: u32, source: &PersistentSource) -> Result<(), String> {
        make_pod_dirs(world, &pod_ref(uid)).await.unwrap();
        let spec = json!({"containers": [], "securityContext": {"fsGroup": group}});
        let pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        let done = set_up_volume(world, &pod, &PodUid::new(uid), "data", Some(source)).await;
        done.map(drop).map_err(|error| error.message)
    }

    async fn mount_at(world: &World, path: &Path) -> Option<MountPoint> {
        world.host.mount_points().await.unwrap().into_iter().find(|mount| mount.path == path)
    }

    /// A loop device of this size; it is freed with its file.
    struct LoopDevice(PathBuf);

    impl LoopDevice {
        fn new(file: &Path) -> Self {
            fs::File::create(file).unwrap().set_len(32 << 20).unwrap();
            let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
            assert!(made.status.success(), "{made:?}");
            LoopDevice(PathBuf::from(String::from_utf8(made.stdout).unwrap().trim()))
        }
    }

    impl Drop for LoopDevice {
        fn drop(&mut self) {
            let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
        }
    }

    #[tokio::test]
    async fn block_device_is_formatted_once_and_mounted_for_all_pods() {
        let dir = tempfile::tempdir().unwrap();
        let (root, device) = (dir.path().canonicalize().unwrap(), LoopDevice::new(&dir.path().join("disk")));
        let (world, source) = (world_in(&root), volume(device.0.clone()));
        let global = world.paths.root_dir.join("plugins/kubernetes.io/local-volume/mounts/pv");
        for _ in 0..2 {
            stage(&world, &source, stage_of(&source)).await.unwrap();
        }
        assert_eq!(mount_at(&world, &global).await.unwrap().fs_type, "ext4");
        set_up(&world, UID, &source).await.unwrap();
        let place = world.paths.pod_dir(&PodUid::new(UID)).join("volumes/kubernetes.io~local-volume/pv");
        fs::write(place.join("file"), "kept").unwrap();
        assert_eq!(fs::metadata(place.join("file")).unwrap().gid(), 4321);
        assert!(mount_at(&world, &place).await.unwrap().options.contains("noexec"));
        let Facts::Devices(found) = devices::list_devices(&world).await.unwrap() else { panic!("no devices") };
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].device, Device::Local { name: "pv".to_owned() });
        assert!(found[0].pods.contains(&PodUid::new(UID)));
        tear_down_volumes(&world, &pod_ref(UID)).await.unwrap();
        remove_pod_dir(&world, &PodUid::new(UID)).await.unwrap();
        let Facts::Devices(found) = devices::list_devices(&world).await.unwrap() else { panic!("no devices") };
        assert!(found[0].pods.is_empty());
        let elsewhere = root.join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        world.host.bind_sub_path(&global, Path::new(""), &elsewhere).await.unwrap();
        let error = unstage(&world, "pv").await.unwrap_err();
        assert!(error.message.contains("is still mounted by other references ["), "{error}");
        assert!(global.join("file").exists());
        world.host.unmount(&elsewhere).await.unwrap();
        for _ in 0..2 {
            unstage(&world, "pv").await.unwrap();
        }
        assert!(!global.exists());
        // The next pod finds the file system, and its files.
        stage(&world, &source, stage_of(&source)).await.unwrap();
        assert_eq!(fs::read_to_string(global.join("file")).unwrap(), "kept");
        unstage(&world, "pv").await.unwrap();
    }

    /// The kernel lets a mounted ext4 grow only by who may exceed limits, which root in a container may not.
    fn may_grow_mounted() -> bool {
        const CAP_SYS_RESOURCE: u32 = 24;
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
        u64::from_str_radix(effective, 16).unwrap() >> CAP_SYS_RESOURCE & 1 == 1
    }

    #[tokio::test]
    async fn file_system_grows_with_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let (root, file) = (dir.path().canonicalize().unwrap(), dir.path().join("disk"));
        let device = LoopDevice::new(&file);
        let (world, source) = (world_in(&root), volume(device.0.clone()));
        stage(&world, &source, stage_of(&source)).await.unwrap();
        let global = world.paths.root_dir.join("plugins/kubernetes.io/local-volume/mounts/pv");
        let blocks = || rustix::fs::statvfs(&global).unwrap().f_blocks;
        let before = blocks();
        fs::File::options().write(true).open(&file).unwrap().set_len(64 << 20).unwrap();
        assert!(Command::new("losetup").arg("--set-capacity").arg(&device.0).status().unwrap().success());
        let grown = grow(&world, &source, stage_of(&source)).await;
        if may_grow_mounted() {
            grown.unwrap();
            assert!(blocks() > before, "{before} blocks, then {}", blocks());
        } else {
            let error = grown.unwrap_err().message;
            assert!(error.contains("resize2fs: Permission denied to resize filesystem"), "{error}");
        }
        unstage(&world, "pv").await.unwrap();
    }

    #[tokio::test]
    async fn unformatted_device_is_not_mounted_read_only() {
        let dir = tempfile::tempdir().unwrap();
        let (world, device) = (world_in(dir.path()), LoopDevice::new(&dir.path().join("disk")));
        let source = PersistentSource { read_only: true, ..volume(device.0.clone()) };
        let error = stage(&world, &source, stage_of(&source)).await.unwrap_err();
        let why = "as we are manipulating it in read-only mode";
        assert!(error.message.starts_with("local: failed to mount device /dev/loop"), "{error}");
        assert!(error.message.ends_with(why), "{error}");
        assert!(!world.paths.root_dir.join("plugins/kubernetes.io/local-volume/mounts/pv").exists());
    }

    #[tokio::test]
    async fn second_pod_keeps_the_group_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let (world, disk) = (world_in(dir.path()), dir.path().join("disk"));
        fs::create_dir(&disk).unwrap();
        set_up(&world, UID, &volume(disk.clone())).await.unwrap();
        fs::write(disk.join("later"), "").unwrap();
        std::os::unix::fs::chown(disk.join("later"), None, Some(0)).unwrap();
        set_up(&world, "0002", &volume(disk.clone())).await.unwrap();
        assert_eq!(fs::metadata(disk.join("later")).unwrap().gid(), 0);
        assert_eq!(world.events.since(0).len(), 0);
        set_up_for(&world, "0003", 99, &volume(disk.clone())).await.unwrap();
        let told: Vec<_> = world.events.since(0).into_iter().map(|it| (it.record.reason, it.record.message)).collect();
        let message = "The requested fsGroup is 99, but the volume pv has GID 4321. The volume may not be shareable.";
        assert_eq!(told, [("AlreadyMountedVolume".to_owned(), message.to_owned())]);
        for uid in [UID, "0002", "0003"] {
            tear_down_volumes(&world, &pod_ref(uid)).await.unwrap();
        }
    }
}
