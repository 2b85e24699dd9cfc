//! The CRI configuration of containers and sandboxes.
//!
//! Owns: the translation of a pod into CRI messages, byte-compatible with upstream where it is read back. Never: I/O;
//! what must be read from the node (resolv.conf, hosts) is an input.
//! Upstream: `kuberuntime_container*.go`, `kuberuntime_sandbox*.go`, `labels.go`, `kubelet_pods.go`.

pub mod config;
pub mod dns;
pub mod environment;
pub mod expansion;
pub mod go_json;
pub mod hash;
pub mod hosts;
pub mod image_name;
pub mod labels;
pub mod logs;
pub mod mounts;
pub mod recursive_read_only;
pub mod resources;
pub mod sandbox_config;
pub mod security;

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodSpec};

pub use self::{
    config::{container_config, sub_paths},
    hash::hash,
    sandbox_config::{Identity, sandbox_config},
};
use crate::id::{name_of, namespace_of};

/// Why a pod's configuration cannot be built; users see the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// The container, init container or ephemeral container of this name.
pub fn find<'pod>(pod: &'pod Pod, name: &str) -> Result<Cow<'pod, Container>, ConfigError> {
    let spec = spec(pod)?;
    if let Some(container) = all(spec).find(|container| container.name == name) {
        return Ok(Cow::Borrowed(container));
    }
    let ephemeral = find_ephemeral(spec, name).map(|ephemeral| Cow::Owned(of_ephemeral(ephemeral)));
    ephemeral.ok_or_else(|| ConfigError(format!("container {name:?} is not in the pod's spec")))
}

pub fn find_ephemeral<'pod>(spec: &'pod PodSpec, name: &str) -> Option<&'pod EphemeralContainer> {
    spec.ephemeral_containers.iter().flatten().find(|ephemeral| ephemeral.name == name)
}

/// An ephemeral container as a container; the API does not let it have probes, hooks and restarts.
pub fn of_ephemeral(ephemeral: &EphemeralContainer) -> Container {
    let it = ephemeral.clone();
    Container {
        args: it.args,
        command: it.command,
        env: it.env,
        env_from: it.env_from,
        image: it.image,
        image_pull_policy: it.image_pull_policy,
        name: it.name,
        resources: it.resources,
        security_context: it.security_context,
        stdin: it.stdin,
        stdin_once: it.stdin_once,
        termination_message_path: it.termination_message_path,
        termination_message_policy: it.termination_message_policy,
        tty: it.tty,
        volume_devices: it.volume_devices,
        volume_mounts: it.volume_mounts,
        working_dir: it.working_dir,
        ..Container::default()
    }
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

/// `name_namespace(uid)`: the form in upstream's messages.
fn described(pod: &Pod, uid: &str) -> String {
    format!("{}_{}({uid})", name_of(pod), namespace_of(pod))
}
