//! Attachments of CSI volumes, which the attach/detach controller makes.
//!
//! Owns: what a VolumeAttachment says of this node, and the words when it does not say that the volume is attached. Never:
//! makes one.
//! Upstream: `csi_attacher.go` (`WaitForAttach`), `csiPlugin.VerifyExhaustedResource`.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentStatus};
use rubelet_core::{
    effect::{EffectError, Facts},
    volumes::{
        claims::{PersistentKind, PersistentSource},
        csi::CsiVolume,
    },
};
use rubelet_kube::port::ObjectPath;

use super::csi::sha256_hex;
use crate::{
    effects::{failure, status},
    metrics::storage::StorageOperation,
    plugins::limits,
    world::World,
};

/// gRPC's `ResourceExhausted`, with which a driver says that a node has too many of its volumes.
const RESOURCE_EXHAUSTED: i32 = 8;

/// The name of the object that says whether a volume is attached to this node.
pub(super) fn name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", sha256_hex(&[handle, driver, node]))
}

/// `publish_context`, with the metric of its check.
pub(super) async fn verified(
    world: &World,
    source: &PersistentSource,
    volume: &CsiVolume,
) -> Result<BTreeMap<String, String>, EffectError> {
    let began = world.clock.now().uptime;
    let found = publish_context(world, source, volume).await;
    if source.is_attached_by_controller() {
        let took = world.clock.now().uptime.since(began);
        let operation = StorageOperation::VerifyControllerAttached;
        world.metrics.storage.ended(&source.plugin(), operation, found.is_ok(), took);
    }
    found
}

/// What the attach/detach controller's driver left for the node; empty for volumes that are not attached.
pub(super) async fn publish_context(
    world: &World,
    source: &PersistentSource,
    volume: &CsiVolume,
) -> Result<BTreeMap<String, String>, EffectError> {
    if !source.is_attached_by_controller() {
        return Ok(BTreeMap::new());
    }
    let name = name(&volume.handle, &volume.driver, &world.settings.node_name);
    let attachment = get(world, &name).await.map_err(|error| {
        let handle = &volume.handle;
        failure::retryable(format!(
            "kubernetes.io/csi: volume {handle} has GET error for volume attachment {name}: {error}"
        ))
    })?;
    if attachment.metadata.deletion_timestamp.is_some() {
        return Err(failure::retryable("volume attachment is being deleted".to_owned()));
    }
    let attached = attachment.status.unwrap_or_default();
    if !attached.attached {
        let reported = attached.attach_error.and_then(|error| error.message);
        let unattached = || format!("volume {} is not attached for volume attachment {name}", volume.handle);
        return Err(failure::retryable(reported.unwrap_or_else(unattached)));
    }
    Ok(attached.attachment_metadata.unwrap_or_default())
}

/// Whether the node has as many volumes as the driver can have here; an error while the attachment cannot be read. If so, CSINode
/// gets the driver's current limit, so that the scheduler counts with it; a failure of that update does not change the answer.
pub(super) async fn check_limit(world: &World, source: &PersistentSource) -> Result<Facts, EffectError> {
    let PersistentKind::Csi(volume) = &source.kind else { return Ok(Facts::AttachLimit { is_exceeded: false }) };
    let name = name(&volume.handle, &volume.driver, &world.settings.node_name);
    let attachment = get(world, &name).await?;
    let is_exceeded = attachment.status.as_ref().is_some_and(exhausts_node);
    if is_exceeded && let Some(cluster) = &world.cluster {
        limits::update(world, &cluster.csi_node, &volume.driver).await;
    }
    Ok(Facts::AttachLimit { is_exceeded })
}

fn exhausts_node(status: &VolumeAttachmentStatus) -> bool {
    let error = status.attach_error.as_ref().filter(|_| !status.attached);
    error.and_then(|error| error.error_code) == Some(RESOURCE_EXHAUSTED)
}

async fn get(world: &World, name: &str) -> Result<VolumeAttachment, EffectError> {
    let path = ObjectPath::all("storage.k8s.io/v1", "volumeattachments").named(name);
    status::get_object(world, path).await
}
