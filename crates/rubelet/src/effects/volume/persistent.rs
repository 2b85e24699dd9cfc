//! Setup of persistent volumes that lie on the node: local directories and host paths.
//!
//! Owns: the bind mount of a local volume into the pod's directory. Never: removes anything of a volume.
//! Upstream: `pkg/volume/local`, `pkg/volume/hostpath`.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{EffectError, ErrorKind},
    volumes::{
        self,
        claims::{PersistentKind, PersistentSource},
    },
};
use rubelet_host::port::{FileKind, SharedFiles, Sharing};

use super::{block, csi, files::Owner, ownership, set_up_host_path};
use crate::{
    effects::{directories::component, failure},
    metrics::storage::StorageOperation,
    world::World,
};

/// The parent of the mount point, as upstream makes it.
const PARENT_MODE: u32 = 0o750;

pub(super) async fn set_up(world: &World, owner: &Owner<'_>, source: &PersistentSource) -> Result<(), EffectError> {
    match &source.kind {
        PersistentKind::HostPath { path, must_be } => set_up_host_path(world, path, *must_be).await,
        PersistentKind::Local { path } => {
            component(&source.name)?;
            let place = source.path(owner.dir);
            bind(world, path, &place).await?;
            if source.read_only { Ok(()) } else { share(world, owner.pod, source, &place).await }
        }
        PersistentKind::Csi(volume) if volume.is_block => block::publish(world, owner, source, volume).await,
        PersistentKind::Csi(volume) => csi::publish(world, owner, source, volume).await,
    }
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

async fn bind(world: &World, from: &Path, to: &Path) -> Result<(), EffectError> {
    let host = &world.host;
    match host.file_kind(from).await.map_err(|error| failure::io("stat", from, &error))? {
        Some(FileKind::Directory) => {}
        Some(_) => return Err(failure::refused("only directory and block device are supported".to_owned())),
        None => {
            let message = format!("path {:?} does not exist", from.display().to_string());
            return Err(EffectError { kind: ErrorKind::Retry, message });
        }
    }
    if let Some(parent) = to.parent() {
        let made = host.make_dir_beneath(&world.paths.pods_dir(), parent, PARENT_MODE).await;
        made.map_err(|error| failure::io("make directory", parent, &error))?;
    }
    host.bind_sub_path(from, Path::new(""), to).await.map_err(|error| failure::io("mount at", to, &error))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

    use rubelet_core::id::PodUid;
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
            kind: PersistentKind::Local { path },
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
