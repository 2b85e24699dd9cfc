//! Effects on images: status, pull.
//!
//! Owns: the calls, and upstream's reasons for their failures. Never: policies, back-off, how many at once.
//! Upstream: `images.imageManager`, `getImageUser`.

use rubelet_core::{
    container::{image_name, sandbox_config},
    effect::{EffectError, EventRecord, Facts, ImageFacts, ImageUser, InvolvedObject, Reason, Severity},
    event_reasons,
    id::PodRef,
    images::keyring::{self, Credentials},
    objects::{Object, ObjectKey},
};
use rubelet_cri::{
    port::{RpcError, RpcErrorKind, RpcResult},
    v1,
};

use super::failure;
use crate::world::World;

/// `Facts::Image(None)`: the image is not on the node.
pub async fn inspect_image(world: &World, image: &str) -> Result<Facts, EffectError> {
    let spec = spec_of(image)?;
    let found = world.runtime.image_status(&spec).await.map_err(|error| inspect_failure(image, &error))?;
    Ok(Facts::Image(found.map(facts_of)))
}

pub async fn pull_image(world: &World, pod: &PodRef, image: &str, secrets: &[String]) -> Result<Facts, EffectError> {
    let spec = spec_of(image)?;
    let pulled = pull(world, pod, &spec, secrets).await.map_err(|error| pull_failure(image, &error))?;
    // The response does not have the image's user.
    let spec = v1::ImageSpec { image: pulled, ..v1::ImageSpec::default() };
    let found = world.runtime.image_status(&spec).await.map_err(|error| inspect_failure(image, &error))?;
    Ok(Facts::Image(found.map(facts_of)))
}

/// With each of the pod's credentials in turn, or without any if none matches this registry.
async fn pull(world: &World, pod: &PodRef, spec: &v1::ImageSpec, secrets: &[String]) -> RpcResult<String> {
    let sandbox = sandbox_config::for_pull(pod);
    let mut credentials = credentials(world, pod, &spec.image, secrets).await.into_iter().peekable();
    if credentials.peek().is_none() {
        return world.runtime.pull_image(spec, None, &sandbox).await;
    }
    loop {
        let auth = credentials.next().map(|Credentials { username, password }| v1::AuthConfig {
            username,
            password,
            ..v1::AuthConfig::default()
        });
        let pulled = world.runtime.pull_image(spec, auth, &sandbox).await;
        if pulled.is_ok() || credentials.peek().is_none() {
            return pulled;
        }
    }
}

/// A missing secret is reported as an event; the image may be public.
async fn credentials(world: &World, pod: &PodRef, image: &str, secrets: &[String]) -> Vec<Credentials> {
    let Some(cluster) = world.cluster.as_ref().filter(|_| !secrets.is_empty()) else { return Vec::new() };
    // The API allows a reference without a name; upstream ignores it.
    let names = secrets.iter().filter(|name| !name.is_empty());
    let keys: Vec<_> = names.map(|name| ObjectKey::secret(&pod.namespace, name)).collect();
    let gathered = cluster.objects.gather(&pod.uid, keys.iter().cloned().collect()).await;
    let secret = |key: &ObjectKey| match gathered.0.get(key)?.as_deref() {
        Ok(Object::Secret(secret)) => Some(secret),
        _ => None,
    };
    let missing: Vec<_> = keys.iter().filter(|key| secret(key).is_none()).map(|key| key.name.as_str()).collect();
    if !missing.is_empty() {
        let record = EventRecord::new(
            InvolvedObject::Pod(pod.clone()),
            Severity::Warning,
            event_reasons::FAILED_TO_RETRIEVE_IMAGE_PULL_SECRET,
            format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                missing.join(", ")
            ),
        );
        world.events.record(record, world.clock.now().wall);
    }
    keyring::credentials(image, keys.iter().filter_map(secret))
}

fn spec_of(image: &str) -> Result<v1::ImageSpec, EffectError> {
    let image =
        image_name::with_default_tag(image).map_err(|error| failure::config(error, Reason::InvalidImageName))?;
    Ok(v1::ImageSpec { image, ..v1::ImageSpec::default() })
}

fn facts_of(image: v1::Image) -> ImageFacts {
    let user = match image.uid {
        Some(uid) => ImageUser::Uid(uid.value),
        None if !image.username.is_empty() => ImageUser::Name(image.username),
        None => ImageUser::Unset,
    };
    ImageFacts { id: image.id, size_bytes: image.size, user }
}

fn inspect_failure(image: &str, error: &RpcError) -> EffectError {
    let mut failed = failure::step(error, Reason::ImageInspectError);
    failed.message = format!("Failed to inspect image {image:?}: {}", error.grpc_text());
    failed
}

/// CRI has no codes for these two: the runtime's message begins with them.
fn pull_failure(image: &str, error: &RpcError) -> EffectError {
    let known = [
        (Reason::RegistryUnavailable, "the registry is unavailable"),
        (Reason::SignatureValidationFailed, "the signature validation failed"),
    ];
    for (reason, because) in known {
        if let Some(detail) = error.description().strip_prefix(reason.as_str()) {
            let mut failed = failure::step(error, reason);
            failed.message = format!("image pull failed for {image} because {because}{detail}");
            return failed;
        }
    }
    let mut failed = failure::step(error, Reason::ErrImagePull);
    if error.kind != RpcErrorKind::Other {
        failed.message = error.grpc_text();
    }
    failed
}

#[cfg(test)]
mod tests {
    use rubelet_core::effect::ErrorKind;

    use super::*;

    #[test]
    fn pull_failures_carry_upstreams_reason_and_words() {
        let failed = |kind, message: &str| {
            let error = RpcError::new("PullImage", kind, message);
            let failed = pull_failure("web:1", &error);
            (failed.kind, failed.message)
        };
        assert_eq!(
            failed(RpcErrorKind::Other, "RegistryUnavailable: no route"),
            (
                ErrorKind::Reject(Reason::RegistryUnavailable),
                "image pull failed for web:1 because the registry is unavailable: no route".to_owned()
            )
        );
        assert_eq!(
            failed(RpcErrorKind::Other, "SignatureValidationFailed"),
            (
                ErrorKind::Reject(Reason::SignatureValidationFailed),
                "image pull failed for web:1 because the signature validation failed".to_owned()
            )
        );
        assert_eq!(failed(RpcErrorKind::Other, "boom"), (ErrorKind::Reject(Reason::ErrImagePull), "boom".to_owned()));
        assert_eq!(
            failed(RpcErrorKind::NotFound, "no such image"),
            (ErrorKind::Reject(Reason::ErrImagePull), "rpc error: code = NotFound desc = no such image".to_owned())
        );
        assert_eq!(failed(RpcErrorKind::Unavailable, "gone").0, ErrorKind::Unavailable);
    }
}
