//! Block volumes of CSI drivers: devices for containers.
//!
//! Owns: what lies where, with upstream's paths: the driver publishes to `volumeDevices/publish/<volume>/<pod>`; the device is
//! bound to `volumeDevices/<volume>/dev/<pod>`; a link in the pod's directory leads containers to it. The link is made first and
//! removed last, so that what was published is found by it. Never: keeps a device from its removal by a loop device, as
//! upstream does; those of upstream are released.
//! Upstream: `csi_block.go`, `util/volumepathhandler`.

use std::path::{Path, PathBuf};

use rubelet_core::{
    effect::EffectError,
    id::PodUid,
    volumes::{
        claims::{self, CSI_PLUGIN, PersistentSource, VOLUME_DEVICES, links_dir},
        csi::CsiVolume,
    },
};

use super::{DIR_MODE, VolumePod, component, csi, device_map, make_dir};
use crate::{effects::failure, world::World};

pub(super) fn devices_dir(world: &World) -> PathBuf {
    csi::devices_dir(world).join(VOLUME_DEVICES)
}

/// The directory is for parts of all block volumes, and not one volume's own.
pub(super) fn is_shared_dir(dir: &Path) -> bool {
    dir.ends_with("staging") || dir.ends_with("publish")
}

pub(super) fn publish_path(world: &World, volume: &str, pod: &PodUid) -> Result<PathBuf, EffectError> {
    Ok(devices_dir(world).join("publish").join(component(volume)?).join(component(pod.as_str())?))
}

/// The directory with the `vol_data.json` of a block volume.
pub(super) fn data_dir(world: &World, volume: &str) -> Result<PathBuf, EffectError> {
    Ok(devices_dir(world).join(component(volume)?).join("data"))
}

/// The place that upstream's agent expects to be mounted.
fn bound_path(world: &World, volume: &str, pod: &PodUid) -> Result<PathBuf, EffectError> {
    component(pod.as_str())?;
    Ok(claims::bound_device(&world.paths.root_dir, component(volume)?, pod))
}

pub(super) async fn publish(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    volume: &CsiVolume,
) -> Result<(), EffectError> {
    let (host, root_dir) = (&world.host, &world.paths.root_dir);
    let target = publish_path(world, &source.name, owner.uid)?;
    let link = source.path(owner.dir);
    let client = csi::client(world, &volume.driver)?;
    let capabilities = csi::capabilities(&client).await?;
    let request = csi::publish_request(world, owner, source, (volume, &capabilities), &target).await?;
    for dir in [target.parent(), link.parent()].into_iter().flatten() {
        make_dir(world, root_dir, dir, DIR_MODE).await?;
    }
    host.make_link(&target, &link).await.map_err(|error| failure::io("make link", &link, &error))?;
    client.publish(request).await.map_err(|error| csi::answered(&error))?;
    if host.file_kind(&target).await.map_err(|error| failure::io("stat", &target, &error))?.is_none() {
        let message = format!("kubernetes.io/csi: the driver made no device at {}", target.display());
        return Err(failure::retryable(message));
    }
    let bound = bound_path(world, &source.name, owner.uid)?;
    let (Some(dir), Some(name)) = (target.parent(), target.file_name()) else { return Ok(()) };
    host.bind_sub_path(dir, Path::new(name), &bound).await.map_err(|error| failure::io("mount at", &bound, &error))
}

/// Undoes what was published for the pod, by the driver that did it.
pub(super) async fn unpublish(world: &World, pod_dir: &Path, uid: &PodUid, volume: &str) -> Result<(), EffectError> {
    let host = &world.host;
    let bound = bound_path(world, volume, uid)?;
    device_map::unbind(world, &bound).await?;
    let target = publish_path(world, volume, uid)?;
    // Without the file nothing was published: it is written before the first call, and removed after the last.
    if let Some(data) = csi::read_data(world, &data_dir(world, volume)?).await? {
        let client = csi::client(world, &data.driver_name)?;
        let done = client.unpublish(&data.volume_handle, &target).await;
        done.map_err(|error| csi::called("blockMapper.UnmapPodDevice failed", &error))?;
    }
    if csi::has_mounts(world, &target).await? {
        let message = format!("kubernetes.io/csi: {} is still mounted", target.display());
        return Err(failure::retryable(message));
    }
    host.remove_tree(&target).await.map_err(|error| failure::io("remove", &target, &error))?;
    let link = links_dir(pod_dir, CSI_PLUGIN).join(volume);
    host.remove_file(&link).await.map_err(|error| failure::io("remove", &link, &error))
}
