//! Block volumes of disks without a driver: devices for containers.
//!
//! Owns: where a pod's device is shown, with upstream's paths: bound to `<global map path>/<pod>`, and a link in the pod's
//! directory. The link is made first and removed last, so that what is bound is found by it. Never: attaches a disk; keeps a
//! device from its removal by a loop device, as upstream does; those of upstream are released.
//! Upstream: `util.MapBlockVolume`, `util.UnmapBlockVolume`, `util/volumepathhandler`.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    io,
    path::{Component, Path, PathBuf},
};

use rubelet_core::{
    effect::EffectError,
    id::PodUid,
    volumes::{
        claims::{BlockPlaces, PersistentSource, links_dir},
        fc::{self, FC_PLUGIN},
        iscsi::{self, ISCSI_PLUGIN},
        local::{self, LOCAL_PLUGIN},
    },
};
use rubelet_host::port::FileKind;

use super::{DIR_MODE, VolumePod, component, entries, make_dir, mounting};
use crate::{effects::failure, world::World};

/// As many as the kernel follows.
const MAX_LINKS: usize = 40;

/// Shows a block device to the pod.
pub(super) async fn map(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    device: &Path,
) -> Result<(), EffectError> {
    let (host, root_dir) = (&world.host, &world.paths.root_dir);
    let Some(BlockPlaces { bound_dir, link_dir }) = source.block_places(root_dir, owner.dir) else {
        return Err(failure::refused("the volume has no device".to_owned()));
    };
    let device = resolved(world, device).await?;
    let (Some(dir), Some(name)) = (device.parent(), device.file_name()) else {
        return Err(failure::refused(format!("{} is no block device", device.display())));
    };
    match host.file_kind(&device).await.map_err(|error| failure::io("stat", &device, &error))? {
        Some(FileKind::BlockDevice) => {}
        Some(_) => return Err(failure::refused(format!("{} is no block device", device.display()))),
        None => {
            let message = format!("path {:?} does not exist", device.display().to_string());
            return Err(failure::retryable(message));
        }
    }
    let link = link_dir.join(component(&source.name)?);
    for dir in [&link_dir, &bound_dir] {
        make_dir(world, root_dir, dir, DIR_MODE).await?;
    }
    host.make_link(&device, &link).await.map_err(|error| failure::io("make link", &link, &error))?;
    let bound = bound_dir.join(component(owner.uid.as_str())?);
    host.bind_sub_path(dir, Path::new(name), &bound).await.map_err(|error| failure::io("mount at", &bound, &error))
}

/// Undoes what was mapped for the pod of a plugin's volumes, by what is on disk.
pub(super) async fn unmap(world: &World, pod_dir: &Path, plugin: &str, uid: &PodUid) -> Result<(), EffectError> {
    let uid = component(uid.as_str())?;
    for dir in bound_dirs(world, plugin).await? {
        unbind(world, &dir.join(uid)).await?;
    }
    let links = links_dir(pod_dir, plugin);
    world.host.remove_tree(&links).await.map_err(|error| failure::io("remove", &links, &error))
}

/// The directories where devices of a plugin's volumes are bound.
async fn bound_dirs(world: &World, plugin: &str) -> Result<Vec<PathBuf>, EffectError> {
    let root_dir = &world.paths.root_dir;
    let below = |dir: PathBuf, names: Vec<String>| names.into_iter().map(move |name| dir.join(name));
    let dir = match plugin {
        LOCAL_PLUGIN => local::block_dir(root_dir),
        FC_PLUGIN => fc::block_dir(root_dir),
        ISCSI_PLUGIN => iscsi::block_dir(root_dir),
        _ => return Ok(Vec::new()),
    };
    let names = entries(world, &dir, None).await?;
    if plugin != ISCSI_PLUGIN {
        return Ok(below(dir, names).collect());
    }
    let mut dirs = Vec::new();
    for iface in below(dir, names) {
        let names = entries(world, &iface, None).await?;
        dirs.extend(below(iface, names));
    }
    Ok(dirs)
}

/// Ends what a device is bound to, and removes the file there.
pub(super) async fn unbind(world: &World, bound: &Path) -> Result<(), EffectError> {
    let host = &world.host;
    let released = host.release_loop_devices(bound).await;
    released.map_err(|error| failure::io("release the loop device over", bound, &error))?;
    mounting::unmount_all_below(world, bound).await?;
    host.remove_tree(bound).await.map_err(|error| failure::io("remove", bound, &error))
}

/// The pods that a device is bound for. A pod without a directory has ended.
pub(super) async fn pods_of(world: &World, dir: &Path) -> Result<BTreeSet<PodUid>, EffectError> {
    let pods: BTreeSet<_> = entries(world, &world.paths.pods_dir(), None).await?.into_iter().collect();
    let names = entries(world, dir, None).await?;
    Ok(names.into_iter().filter(|name| pods.contains(name)).map(PodUid::new).collect())
}

/// Unbinds what pods that have ended left of a device that no pod uses any more.
pub(super) async fn unbind_left(world: &World, dir: &Path) -> Result<(), EffectError> {
    if let Some(pod) = pods_of(world, dir).await?.first() {
        let message = format!("the device at {} is still mapped for pod {pod}", dir.display());
        return Err(failure::retryable(message));
    }
    let points = world.host.mounts_below(dir).await;
    for point in points.map_err(|error| failure::io("look for mounts below", dir, &error))? {
        unbind(world, &point).await?;
    }
    Ok(())
}

/// Without links: the name of a disk that users write may be one of udev's.
async fn resolved(world: &World, path: &Path) -> Result<PathBuf, EffectError> {
    let parts =
        |path: &Path| -> Vec<OsString> { path.components().rev().map(|part| part.as_os_str().to_owned()).collect() };
    let (mut found, mut rest, mut links) = (PathBuf::from("/"), parts(path), 0);
    while let Some(part) = rest.pop() {
        match Path::new(&part).components().next() {
            Some(Component::ParentDir) => drop(found.pop()),
            Some(Component::RootDir) => found = PathBuf::from("/"),
            Some(Component::Normal(name)) => {
                let next = found.join(name);
                let link = world.host.read_link(&next).await;
                match link.map_err(|error| failure::io("read link", &next, &error))? {
                    Some(_) if links == MAX_LINKS => {
                        let error = io::Error::other("too many links");
                        return Err(failure::io("resolve", path, &error));
                    }
                    Some(target) => {
                        links += 1;
                        rest.extend(parts(&target));
                    }
                    None => found = next,
                }
            }
            Some(Component::CurDir | Component::Prefix(_)) | None => {}
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileTypeExt, symlink},
        process::Command,
    };

    use rubelet_core::{
        effect::Facts,
        volumes::{claims::PersistentKind, devices::Device, local::LocalVolume},
    };
    use serde_json::json;

    use super::*;
    use crate::{
        effects::{
            directories::{make_pod_dirs, remove_pod_dir, tests::pod_ref},
            volume::{devices, local as local_volumes, set_up_volume, tear_down_volumes},
        },
        world::testing::world_in,
    };

    fn volume(path: PathBuf) -> PersistentSource {
        let volume = LocalVolume { path, fs_type: "ext4".to_owned(), mount_options: Vec::new(), is_block: true };
        let kind = PersistentKind::Local(volume);
        PersistentSource { name: "pv".to_owned(), read_only: false, is_exclusive: false, kind, size: None, group: None }
    }

    async fn set_up(world: &World, uid: &str, source: &PersistentSource) -> Result<Facts, String> {
        make_pod_dirs(world, &pod_ref(uid)).await.unwrap();
        let pod = serde_json::from_value(json!({"metadata": {}, "spec": {"containers": []}})).unwrap();
        set_up_volume(world, &pod, &PodUid::new(uid), "data", Some(source)).await.map_err(|error| error.message)
    }

    async fn found(world: &World) -> Vec<(Device, Vec<String>)> {
        let Facts::Devices(found) = devices::list_devices(world).await.unwrap() else { panic!("no devices") };
        let pods = |pods: &BTreeSet<PodUid>| pods.iter().map(ToString::to_string).collect();
        found.into_iter().map(|found| (found.device, pods(&found.pods))).collect()
    }

    #[tokio::test]
    async fn local_device_is_shown_to_each_pod_and_removed_by_what_is_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let (root, disk) = (dir.path().canonicalize().unwrap(), dir.path().join("disk"));
        fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&disk).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let device = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim());
        // As udev's names of disks are.
        fs::create_dir(root.join("by-id")).unwrap();
        symlink(&device, root.join("disk0")).unwrap();
        symlink("../disk0", root.join("by-id/disk")).unwrap();
        let (world, source) = (world_in(&root), volume(root.join("by-id/disk")));
        let bound = world.paths.root_dir.join("plugins/kubernetes.io~local-volume/volumeDevices/pv");
        for uid in ["0001", "0001", "0002"] {
            let Facts::Mapped(places) = set_up(&world, uid, &source).await.unwrap() else { panic!("not mapped") };
            assert_eq!(places.bound_dir, bound);
            assert_eq!(fs::read_link(places.link_dir.join("pv")).unwrap(), device);
            assert!(fs::metadata(bound.join(uid)).unwrap().file_type().is_block_device());
        }
        let local = Device::Local { name: "pv".to_owned() };
        assert_eq!(found(&world).await, [(local.clone(), vec!["0001".to_owned(), "0002".to_owned()])]);
        // Upstream's agent keeps the device by a loop device over what is bound.
        assert!(Command::new("losetup").arg("--find").arg(bound.join("0001")).status().unwrap().success());
        for uid in ["0001", "0002"] {
            let refused = local_volumes::unstage(&world, "pv").await.unwrap_err();
            assert!(refused.message.contains("is still mapped for pod"), "{refused}");
            tear_down_volumes(&world, &pod_ref(uid)).await.unwrap();
            remove_pod_dir(&world, &PodUid::new(uid)).await.unwrap();
            assert!(!bound.join(uid).exists());
        }
        assert_eq!(found(&world).await, [(local, Vec::new())]);
        for _ in 0..2 {
            local_volumes::unstage(&world, "pv").await.unwrap();
        }
        assert_eq!(found(&world).await, []);
        let loops = Command::new("losetup").arg("--associated").arg(bound.join("0001")).output().unwrap();
        assert!(loops.stdout.is_empty(), "{loops:?}");
        assert!(Command::new("losetup").arg("--detach").arg(&device).status().unwrap().success());
    }

    #[tokio::test]
    async fn directory_is_no_device() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let begin = "MapVolume.MapPodDevice failed for volume \"pv\" : ";
        let error = set_up(&world, "0001", &volume(dir.path().to_owned())).await.unwrap_err();
        assert!(error.starts_with(begin) && error.ends_with(" is no block device"), "{error}");
        let error = set_up(&world, "0001", &volume(PathBuf::from("/dev/none"))).await.unwrap_err();
        assert_eq!(error, format!("{begin}path \"/dev/none\" does not exist"));
        tear_down_volumes(&world, &pod_ref("0001")).await.unwrap();
    }
}
