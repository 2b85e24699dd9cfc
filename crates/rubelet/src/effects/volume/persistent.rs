//! Setup of persistent volumes, and of volumes of pods that need more than a directory.
//!
//! Owns: which kind is set up where, and giving a volume to the pod's group. Never: removes anything of a volume.
//! Upstream: `volume.SetVolumeOwnership`.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::EffectError,
    volumes::{
        self,
        claims::{PersistentKind, PersistentSource},
        mounting::bind_options,
    },
};
use rubelet_host::port::{SharedFiles, Sharing};

use super::{VolumePod, block, csi, device_map, fc, flex, iscsi, local, mounting, nfs, ownership, set_up_host_path};
use crate::{
    effects::{directories::component, failure},
    metrics::storage::StorageOperation,
    world::World,
};

pub(super) async fn set_up(world: &World, owner: &VolumePod<'_>, source: &PersistentSource) -> Result<(), EffectError> {
    match &source.kind {
        PersistentKind::HostPath { path, must_be } => set_up_host_path(world, path, *must_be).await,
        PersistentKind::Local(volume) if volume.is_block => {
            device_map::map(world, owner, source, &local::device(volume)?).await
        }
        PersistentKind::Iscsi(volume) if volume.is_block => {
            let disk = iscsi::disk(world, &volume.device(&source.name)).await?;
            device_map::map(world, owner, source, &disk).await
        }
        PersistentKind::Fc(volume) if volume.is_block => {
            device_map::map(world, owner, source, &fc::disk(world, &volume.device).await?).await
        }
        PersistentKind::Local(volume) => local::set_up(world, owner, source, volume).await,
        PersistentKind::Nfs(volume) => nfs::set_up(world, owner, source, volume).await,
        PersistentKind::Iscsi(volume) => {
            let from = volume.device(&source.name).dir(&world.paths.root_dir);
            set_up_disk(world, owner, source, &from, &volume.mount_options).await
        }
        PersistentKind::Fc(volume) => {
            let from = volumes::fc::devices_dir(&world.paths.root_dir).join(volume.device.dir_name());
            set_up_disk(world, owner, source, &from, &volume.mount_options).await
        }
        PersistentKind::Flex(volume) => flex::set_up(world, owner, source, volume).await,
        PersistentKind::Csi(volume) if volume.is_block => block::publish(world, owner, source, volume).await,
        PersistentKind::Csi(volume) => csi::publish(world, owner, source, volume).await,
    }
}

/// Shows the pod a disk that is mounted for all pods.
async fn set_up_disk(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    from: &Path,
    mount_options: &[String],
) -> Result<(), EffectError> {
    component(&source.name)?;
    let place = source.path(owner.dir);
    mounting::bind(world, from, &place, &bind_options(mount_options, source.read_only)).await?;
    if !source.read_only {
        // As upstream, a disk that cannot be given to the group is used all the same.
        let _ = share(world, owner.pod, source, &place).await;
    }
    Ok(())
}

/// `None` for a pod without an `fsGroup`.
fn sharing(pod: &Pod) -> Option<Sharing> {
    let spec = pod.spec.as_ref()?;
    let policy = spec.security_context.as_ref().and_then(|context| context.fs_group_change_policy.as_deref());
    let only_on_root_mismatch = policy == Some("OnRootMismatch");
    Some(Sharing { group: volumes::fs_group(spec)?, read_only: false, only_on_root_mismatch })
}

/// Gives a volume to the pod's `fsGroup`, if it has one.
pub(super) async fn share(
    world: &World,
    pod: &Pod,
    source: &PersistentSource,
    place: &Path,
) -> Result<(), EffectError> {
    let Some(sharing) = sharing(pod) else { return Ok(()) };
    let (done, began) = (SharedFiles::default(), world.clock.now().uptime);
    let shared = ownership::reported(world, pod, place, &done, world.host.share_tree(place, sharing, &done)).await;
    if shared.is_err() || done.get() > 0 {
        let took = world.clock.now().uptime.since(began);
        world.metrics.storage.ended(&source.plugin(), StorageOperation::ApplyAccessControl, shared.is_ok(), took);
    }
    shared.map_err(|error| failure::io("give to the pod's group", place, &error))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

    use rubelet_core::{id::PodUid, volumes::local::LocalVolume};
    use serde_json::json;

    use crate::{
        effects::{
            directories::{make_pod_dirs, remove_pod_dir, tests::pod_ref},
            volume::{set_up_volume, tear_down_volumes},
        },
        world::testing::world_in,
    };

    use super::*;

    const UID: &str = "0001";

    fn local(path: PathBuf) -> PersistentSource {
        PersistentSource {
            name: "pv".to_owned(),
            read_only: false,
            is_exclusive: false,
            size: None,
            group: None,
            kind: PersistentKind::Local(LocalVolume {
                path,
                fs_type: "ext4".to_owned(),
                mount_options: Vec::new(),
                is_block: false,
            }),
        }
    }

    async fn set_up(world: &World, source: &PersistentSource) -> Result<(), String> {
        let spec = json!({"containers": [], "securityContext": {"fsGroup": 4321}});
        let pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        let done = set_up_volume(world, &pod, &PodUid::new(UID), "data", Some(source)).await;
        done.map(drop).map_err(|error| error.message)
    }

    #[tokio::test]
    async fn local_volume_is_mounted_once_and_its_files_outlive_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let (world, disk) = (world_in(dir.path()), dir.path().join("disk"));
        fs::create_dir(&disk).unwrap();
        fs::write(disk.join("file"), "kept").unwrap();
        make_pod_dirs(&world, &pod_ref(UID)).await.unwrap();
        for _ in 0..2 {
            set_up(&world, &local(disk.clone())).await.unwrap();
        }
        let place = world.paths.pod_dir(&PodUid::new(UID)).join("volumes/kubernetes.io~local-volume/pv");
        assert_eq!(fs::read_to_string(place.join("file")).unwrap(), "kept");
        assert_eq!(fs::metadata(disk.join("file")).unwrap().gid(), 4321);
        assert_eq!(world.host.mounts_below(&place).await.unwrap().len(), 1);
        tear_down_volumes(&world, &pod_ref(UID)).await.unwrap();
        remove_pod_dir(&world, &PodUid::new(UID)).await.unwrap();
        assert_eq!(fs::read_to_string(disk.join("file")).unwrap(), "kept");
        assert!(!place.exists());
    }

    #[tokio::test]
    async fn local_volume_must_be_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        make_pod_dirs(&world, &pod_ref(UID)).await.unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let begin = "MountVolume.SetUp failed for volume \"pv\" : ";
        let missing = set_up(&world, &local(dir.path().join("none"))).await.unwrap_err();
        assert!(missing.starts_with(begin) && missing.ends_with("/none\" does not exist"), "{missing}");
        let file = set_up(&world, &local(dir.path().join("file"))).await;
        assert_eq!(file, Err(format!("{begin}only directory and block device are supported")));
    }
}
