//! Resolves claims to persistent volumes.
//!
//! Owns: the requests for both objects, and their errors in upstream's words. Never: decides whether they may be used
//! (`rubelet_core::volumes::claims`). A node may get these objects by name but not watch them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::{
    core::v1::{CSIVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod},
    storage::v1::CSIDriver,
};
use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    id::{PodUid, namespace_of},
    volumes::{
        self, affinity,
        claims::{ClaimRef, PersistentSource},
        csi::{self, CsiLifecycle, CsiVolume, DriverRules},
        in_tree, migration,
    },
};
use rubelet_kube::port::ObjectPath;
use serde::de::DeserializeOwned;

use super::{csi::inline_handle, flex};
use crate::{
    effects::{failure, status},
    world::World,
};

pub(super) async fn resolve(
    world: &World,
    pod: &Pod,
    volume: &str,
    node_labels: Option<&BTreeMap<String, String>>,
) -> Result<Facts, EffectError> {
    let spec = pod.spec.as_ref();
    let named = spec.and_then(|spec| volumes::mounted(spec).find(|known| known.name == volume));
    if let Some(source) = named.and_then(|named| named.csi.as_ref()) {
        return inline(world, pod, volume, source).await;
    }
    let inline = named.map_or(Ok(None), |named| in_tree::inline(named, namespace_of(pod)));
    if let Some(source) = inline.map_err(failure::refused)? {
        let source = if world.cluster.is_some() { source } else { source.without_controller() };
        return Ok(Facts::Volume(Arc::new(flex::with_capabilities(world, source).await?)));
    }
    let moved = named.map_or(Ok(None), |named| migration::inline(named, namespace_of(pod)));
    if let Some(moved) = moved.map_err(failure::refused)? {
        let object = csi_driver(world, &moved.source.driver).await?;
        let source = PersistentSource::migrated(&moved, object.as_ref());
        let source = source.map_err(|message| EffectError { kind: ErrorKind::MissingObject, message })?;
        return Ok(Facts::Volume(Arc::new(source)));
    }
    let Some(claim) = named.and_then(|named| ClaimRef::of(pod, named)) else {
        return Err(failure::refused(format!("volume {volume:?} has no claim")));
    };
    match source_of(world, pod, &claim).await {
        Ok((volume, source)) => {
            let unusable = |message: String| EffectError { kind: ErrorKind::MissingObject, message };
            affinity::check(&volume, node_labels).map_err(unusable)?;
            Ok(Facts::Volume(Arc::new(source)))
        }
        Err(error) => {
            let ClaimRef { namespace, name, .. } = &claim;
            Err(EffectError { message: format!("error processing PVC {namespace}/{name}: {error}"), ..error })
        }
    }
}

async fn source_of(
    world: &World,
    pod: &Pod,
    claim: &ClaimRef,
) -> Result<(PersistentVolume, PersistentSource), EffectError> {
    let unusable = |message: String| EffectError { kind: ErrorKind::MissingObject, message };
    let path = ObjectPath::all("v1", "persistentvolumeclaims").within(&*claim.namespace).named(&*claim.name);
    let found: PersistentVolumeClaim = get(world, path, "failed to fetch PVC from API server").await?;
    let name = claim.bound_to(pod, &found).map_err(unusable)?;
    let path = ObjectPath::all("v1", "persistentvolumes").named(&*name);
    let volume: PersistentVolume = get(world, path, &format!("failed to fetch PV {name} from API server")).await?;
    let volume = migration::persistent_volume(&volume).map_err(unusable)?.into_owned();
    let driver = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()).map(|source| source.driver.clone());
    let object = match driver {
        Some(driver) => csi_driver(world, &driver).await?,
        None => None,
    };
    let source = PersistentSource::of(claim, &found, &volume, object.as_ref()).map_err(unusable)?;
    Ok((volume, flex::with_capabilities(world, source).await?))
}

async fn inline(world: &World, pod: &Pod, volume: &str, source: &CSIVolumeSource) -> Result<Facts, EffectError> {
    let object = csi_driver(world, &source.driver).await?;
    let unsupported = csi::unsupported_lifecycle(&source.driver, object.as_ref(), CsiLifecycle::Ephemeral);
    // Upstream reads the object only once the driver has registered.
    let reasons: Vec<_> = [
        world.csi.client(&source.driver).err().map(|error| format!("failed to get CSI client: {error}")),
        unsupported.map(|why| format!("failed to check volume lifecycle mode: {why}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !reasons.is_empty() {
        let why = reasons.join("; ");
        let message =
            format!("MountVolume.SetUp failed for volume {volume:?} : kubernetes.io/csi: mounter.SetUpAt {why}");
        return Err(EffectError { kind: ErrorKind::MissingObject, message });
    }
    let handle = inline_handle(&PodUid::of(pod), volume);
    let inline = CsiVolume::inline(source, handle, namespace_of(pod), DriverRules::of(object.as_ref()));
    Ok(Facts::Volume(Arc::new(PersistentSource::inline(volume, source.read_only.unwrap_or(false), inline))))
}

/// `None` if there is none: drivers need not have one.
async fn csi_driver(world: &World, name: &str) -> Result<Option<CSIDriver>, EffectError> {
    let path = ObjectPath::all("storage.k8s.io/v1", "csidrivers").named(name);
    match get(world, path, &format!("failed to fetch CSIDriver {name} from API server")).await {
        Ok(driver) => Ok(Some(driver)),
        Err(error) if error.kind == ErrorKind::Gone => Ok(None),
        Err(error) => Err(error),
    }
}

async fn get<T: DeserializeOwned>(world: &World, path: ObjectPath, what: &str) -> Result<T, EffectError> {
    let found = status::get_object(world, path).await;
    found.map_err(|error| EffectError { message: format!("{what}: {error}"), ..error })
}
