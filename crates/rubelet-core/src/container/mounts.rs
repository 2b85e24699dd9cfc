//! What does a container find mounted, and where does it come from?
//!
//! Owns: volume mounts, the hosts file, the termination message file. Never: makes or mounts anything.
//! Upstream: `makeMounts` in `kubelet_pods.go` and in `kuberuntime_container.go`.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, PodSpec, Volume, VolumeMount};
use rubelet_cri::v1::{Mount, MountPropagation};

use super::{ConfigError, hash, hosts};
use crate::{
    effect::StartContainer,
    id::PodUid,
    settings::Settings,
    volumes::{self, files::FilePlugin},
};

pub fn mounts(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    settings: &Settings,
) -> Result<Vec<Mount>, ConfigError> {
    let selinux_relabel = settings.node.selinux_enabled;
    let mut mounts = Vec::new();
    for mount in container.volume_mounts.iter().flatten() {
        mounts.push(volume_mount(order, spec, container, mount, settings)?);
    }
    if has_hosts_file(spec, container, &order.pod_ips) {
        mounts.push(Mount {
            container_path: hosts::HOSTS_PATH.to_owned(),
            host_path: text(&hosts_file(&settings.root_dir, &order.uid)),
            selinux_relabel,
            ..Mount::default()
        });
    }
    if let Some(host_path) = termination_message_file(order, container, &settings.root_dir) {
        mounts.push(Mount {
            container_path: absolute(container.termination_message_path.as_deref().unwrap_or_default()),
            host_path: text(&host_path),
            selinux_relabel,
            ..Mount::default()
        });
    }
    Ok(mounts)
}

/// A container that mounts something over `/etc/hosts` keeps its own.
pub fn has_hosts_file(spec: &PodSpec, container: &Container, pod_ips: &[String]) -> bool {
    hosts::is_managed(spec, pod_ips)
        && !container.volume_mounts.iter().flatten().any(|mount| mount.mount_path == hosts::HOSTS_PATH)
}

/// One for all containers of the pod.
pub fn hosts_file(root_dir: &Path, uid: &PodUid) -> PathBuf {
    pod_dir(root_dir, uid).join("etc-hosts")
}

/// The file into which this instance of the container may write why it ended; `None` when the container wants none.
///
/// Upstream's name is random. Ours follows from what it is for, so that a repeated start finds the file it made before.
pub fn termination_message_file(order: &StartContainer, container: &Container, root_dir: &Path) -> Option<PathBuf> {
    container.termination_message_path.as_ref().filter(|path| !path.is_empty())?;
    let instance = format!("{}/{}", order.sandbox, order.attempt);
    let name = format!("{:08x}", hash::fnv32a(instance.as_bytes()));
    Some(pod_dir(root_dir, &order.uid).join("containers").join(&container.name).join(name))
}

fn volume_mount(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    mount: &VolumeMount,
    settings: &Settings,
) -> Result<Mount, ConfigError> {
    let place = |what: &str| format!("{what} {:?} of container {:?}", mount.name, container.name);
    if [&mount.sub_path, &mount.sub_path_expr].into_iter().flatten().any(|path| !path.is_empty()) {
        // The whole volume in place of a part of it would show the container what it must not see.
        return Err(ConfigError(place("failed to prepare subPath for volumeMount")));
    }
    let source = spec
        .volumes
        .iter()
        .flatten()
        .find(|volume| volume.name == mount.name)
        .and_then(|volume| VolumeSource::of(volume, &settings.root_dir, &order.uid))
        .ok_or_else(|| {
            ConfigError(format!("cannot find volume {:?} to mount into container {:?}", mount.name, container.name))
        })?;
    refuse_recursive_read_only(mount)?;
    Ok(Mount {
        container_path: absolute(&mount.mount_path),
        host_path: text(&source.host_path),
        readonly: mount.read_only.unwrap_or(false) || source.is_read_only,
        selinux_relabel: source.is_ours && settings.node.selinux_enabled,
        propagation: propagation(mount)?.into(),
        ..Mount::default()
    })
}

struct VolumeSource {
    host_path: PathBuf,
    /// Made for this pod: its files may be relabelled. The node's own must not be.
    is_ours: bool,
    is_read_only: bool,
}

impl VolumeSource {
    fn of(volume: &Volume, root_dir: &Path, uid: &PodUid) -> Option<Self> {
        let pod_dir = pod_dir(root_dir, uid);
        if let Some(plugin) = FilePlugin::of(volume) {
            let host_path = volumes::files_path(&pod_dir, plugin, &volume.name);
            return Some(VolumeSource { host_path, is_ours: true, is_read_only: true });
        }
        if volume.empty_dir.is_some() {
            let host_path = volumes::empty_dir_path(&pod_dir, &volume.name);
            return Some(VolumeSource { host_path, is_ours: true, is_read_only: false });
        }
        let host_path = PathBuf::from(&volume.host_path.as_ref()?.path);
        Some(VolumeSource { host_path, is_ours: false, is_read_only: false })
    }
}

fn propagation(mount: &VolumeMount) -> Result<MountPropagation, ConfigError> {
    match mount.mount_propagation.as_deref() {
        None | Some("None") => Ok(MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") => Ok(MountPropagation::PropagationBidirectional),
        Some(other) => Err(ConfigError(format!("invalid MountPropagation mode: {other:?}"))),
    }
}

/// No runtime is asked for its features yet, so none is taken to have this one.
fn refuse_recursive_read_only(mount: &VolumeMount) -> Result<(), ConfigError> {
    match mount.recursive_read_only.as_deref() {
        Some("Enabled") => Err(ConfigError(format!(
            "failed to resolve recursive read-only mode: volume {:?} requested recursive read-only mode, but it is not \
             supported by the runtime",
            mount.name
        ))),
        Some(_) | None => Ok(()),
    }
}

fn pod_dir(root_dir: &Path, uid: &PodUid) -> PathBuf {
    root_dir.join("pods").join(uid.as_str())
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
