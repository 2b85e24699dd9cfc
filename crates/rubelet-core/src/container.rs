//! A container as the runtime sees it: what goes into its CRI configuration, and into its sandbox's.
//!
//! Owns: the translation of a pod into CRI messages, byte-compatible with upstream where it is read back. Never: I/O;
//! what must be read from the node (resolv.conf, hosts) is an input.
//! Upstream: `kuberuntime_container*.go`, `kuberuntime_sandbox*.go`, `labels.go`, `kubelet_pods.go`.

pub mod config;
pub mod dns;
pub mod environment;
pub mod go_json;
pub mod hash;
pub mod hosts;
pub mod image_name;
pub mod labels;
pub mod logs;
pub mod mounts;
pub mod resources;
pub mod sandbox_config;
pub mod security;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

pub use self::{
    config::container_config,
    hash::hash,
    sandbox_config::{Identity, sandbox_config},
};
use crate::id::{name_of, namespace_of};

/// Why no configuration can be made of a pod; the text is what users see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// The container or init container of this name.
pub fn find<'pod>(pod: &'pod Pod, name: &str) -> Result<&'pod Container, ConfigError> {
    all(spec(pod)?)
        .find(|container| container.name == name)
        .ok_or_else(|| ConfigError(format!("container {name:?} is not in the pod's spec")))
}

fn spec(pod: &Pod) -> Result<&PodSpec, ConfigError> {
    pod.spec.as_ref().ok_or_else(|| ConfigError("the pod has no spec".to_owned()))
}

fn all(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.containers.iter().chain(spec.init_containers.iter().flatten())
}

pub fn is_host_network(spec: &PodSpec) -> bool {
    spec.host_network == Some(true)
}

/// `name_namespace(uid)`: how upstream's messages name a pod.
fn described(pod: &Pod, uid: &str) -> String {
    format!("{}_{}({uid})", name_of(pod), namespace_of(pod))
}
