//! Effects on pods in the API: status, deletion, mirror pods.
//!
//! Owns: the requests and what their failures mean. Never: what a status contains, or when a pod is deleted (`rubelet_core`).
//! Upstream: `statusManager.syncPod`, `PatchPodStatus`, `pod/mirror_client.go`.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use k8s_openapi::{
    api::core::v1::{Node, Pod, Secret},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use rubelet_core::{
    api_pod,
    effect::{EffectError, ErrorKind, Facts},
    id::{PodRef, namespace_of},
    manifest::HASH_ANNOTATION,
    node_object::NodeObject,
    pod_config::MIRROR_ANNOTATION,
    volumes::csi::SecretName,
};
use rubelet_kube::{
    error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, PatchKind, Verb},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::failure;
use crate::world::World;

/// A request within an effect, which has its own deadline.
pub(super) const TIMEOUT: Duration = Duration::from_secs(25);

pub async fn patch_status(world: &World, pod: &PodRef, patch: &Value) -> Result<Facts, EffectError> {
    let path = path_of(pod).sub("status");
    let stored = request(world, Verb::Patch(PatchKind::StrategicMerge), path, Some(patch)).await?;
    let stored = api_pod::decode(&stored).map_err(|error| unreadable(pod, &error))?;
    Ok(Facts::ApiPod(Arc::new(stored)))
}

/// With grace period 0, because it is over; the UID precondition protects another pod of this name.
pub async fn delete_pod(world: &World, pod: &PodRef) -> Result<Facts, EffectError> {
    let options = json!({ "gracePeriodSeconds": 0, "preconditions": { "uid": pod.uid } });
    request(world, Verb::Delete, path_of(pod), Some(&options)).await?;
    Ok(Facts::Nothing)
}

/// The node owns its mirror pods: the API server rejects them otherwise.
pub async fn create_mirror_pod(world: &World, pod: &Pod) -> Result<Facts, EffectError> {
    let node = node(world).await.map_err(|error| {
        let kind = if error.kind == ErrorKind::Gone { ErrorKind::Retry } else { error.kind };
        EffectError { kind, message: format!("the node is not registered: {}", error.message) }
    })?;
    let mirror = mirror_of(pod, &node);
    let path = ObjectPath::all("v1", "pods").within(namespace_of(pod));
    let body = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": mirror.metadata, "spec": mirror.spec });
    match api(world)?.call(call(Verb::Create, path, Some(&body))).await {
        Ok(_) => Ok(Facts::Nothing),
        // The watch shows whether it is the expected one.
        Err(error) if error.kind == ApiErrorKind::AlreadyExists => Ok(Facts::Nothing),
        Err(error) => Err(failed(&error)),
    }
}

pub async fn get_node(world: &World) -> Result<Facts, EffectError> {
    Ok(Facts::Node(NodeObject::of(&node(world).await?)))
}

async fn node(world: &World) -> Result<Node, EffectError> {
    let path = ObjectPath::all("v1", "nodes").named(&world.settings.node_name);
    get_object(world, path).await
}

/// An object of the API. Not for a Secret: what is said of an answer that cannot be read may show a part of it.
pub(super) async fn get_object<T: DeserializeOwned>(world: &World, path: ObjectPath) -> Result<T, EffectError> {
    let answer = get(world, path).await?;
    serde_json::from_slice(&answer)
        .map_err(|error| failure::caused(ErrorKind::Retry, "the answer cannot be read", &error))
}

pub(super) async fn get_secret(world: &World, name: &SecretName) -> Result<Secret, EffectError> {
    let SecretName { namespace, name } = name;
    let path = ObjectPath::all("v1", "secrets").within(&**namespace).named(&**name);
    let answer = get(world, path).await?;
    serde_json::from_slice(&answer).map_err(|_| failure::retryable("the answer cannot be read".to_owned()))
}

fn mirror_of(pod: &Pod, node: &Node) -> Pod {
    let mut mirror = Pod { status: None, ..pod.clone() };
    let annotations = mirror.metadata.annotations.get_or_insert_default();
    let hash = annotations.get(HASH_ANNOTATION).cloned().unwrap_or_default();
    annotations.insert(MIRROR_ANNOTATION.to_owned(), hash);
    mirror.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone().unwrap_or_default(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    mirror
}

fn path_of(pod: &PodRef) -> ObjectPath {
    ObjectPath::all("v1", "pods").within(&*pod.namespace).named(&*pod.name)
}

pub(super) async fn get(world: &World, path: ObjectPath) -> Result<Bytes, EffectError> {
    request(world, Verb::Get, path, None).await
}

async fn request(world: &World, verb: Verb, path: ObjectPath, body: Option<&Value>) -> Result<Bytes, EffectError> {
    api(world)?.call(call(verb, path, body)).await.map_err(|error| failed(&error))
}

fn call(verb: Verb, path: ObjectPath, body: Option<&Value>) -> Call {
    let body = body.map(|body| Bytes::from(body.to_string()));
    Call { lane: Lane::Ordinary, verb, path, query: Vec::new(), body, timeout: TIMEOUT }
}

fn api(world: &World) -> Result<&dyn ApiServer, EffectError> {
    let none = || failure::refused("this node has no API server".to_owned());
    world.cluster.as_ref().map(|cluster| cluster.api.as_ref()).ok_or_else(none)
}

/// A missing pod needs no status; an unreachable server is retried; any other error is retried later. Another pod of the same
/// name (409) is reported by the watch.
fn failed(error: &ApiError) -> EffectError {
    let kind = match error.kind {
        ApiErrorKind::NotFound => ErrorKind::Gone,
        ApiErrorKind::Unreachable => ErrorKind::Unavailable,
        _ => ErrorKind::Retry,
    };
    EffectError { kind, message: error_chain(error) }
}

fn unreadable(pod: &PodRef, error: &serde_json::Error) -> EffectError {
    failure::caused(ErrorKind::Retry, format_args!("pod {pod}: the answer cannot be read"), error)
}
