//! Resolves claims to persistent volumes.
//!
//! Owns: the requests for both objects, and their errors in upstream's words. Never: decides whether they may be used
//! (`rubelet_core::volumes::claims`). A node may get these objects by name but not watch them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    volumes::{
        self,
        claims::{ClaimRef, PersistentSource},
    },
};
use rubelet_kube::{error_chain, port::ObjectPath};
use serde::de::DeserializeOwned;

use crate::{
    effects::{failure, status},
    world::World,
};

pub(super) async fn resolve(world: &World, pod: &Pod, volume: &str) -> Result<Facts, EffectError> {
    let spec = pod.spec.as_ref();
    let named = spec.and_then(|spec| volumes::mounted(spec).find(|known| known.name == volume));
    let Some(claim) = named.and_then(|named| ClaimRef::of(pod, named)) else {
        return Err(failure::refused(format!("volume {volume:?} has no claim")));
    };
    match source_of(world, pod, &claim).await {
        Ok(source) => Ok(Facts::Volume(Arc::new(source))),
        Err(error) => {
            let ClaimRef { namespace, name, .. } = &claim;
            Err(EffectError { message: format!("error processing PVC {namespace}/{name}: {error}"), ..error })
        }
    }
}

async fn source_of(world: &World, pod: &Pod, claim: &ClaimRef) -> Result<PersistentSource, EffectError> {
    let unusable = |message: String| EffectError { kind: ErrorKind::MissingObject, message };
    let path = ObjectPath::all("v1", "persistentvolumeclaims").within(&*claim.namespace).named(&*claim.name);
    let found: PersistentVolumeClaim = get(world, path, "failed to fetch PVC from API server").await?;
    let name = claim.bound_to(pod, &found).map_err(unusable)?;
    let path = ObjectPath::all("v1", "persistentvolumes").named(&*name);
    let volume: PersistentVolume = get(world, path, &format!("failed to fetch PV {name} from API server")).await?;
    PersistentSource::of(claim, &found, &volume).map_err(unusable)
}

async fn get<T: DeserializeOwned>(world: &World, path: ObjectPath, what: &str) -> Result<T, EffectError> {
    let answer = status::get(world, path).await;
    let answer = answer.map_err(|error| EffectError { message: format!("{what}: {error}"), ..error })?;
    serde_json::from_slice(&answer).map_err(|error| EffectError {
        kind: ErrorKind::Retry,
        message: format!("{what}: the answer cannot be read: {}", error_chain(&error)),
    })
}
