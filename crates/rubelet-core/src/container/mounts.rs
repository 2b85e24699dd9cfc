//! The mounts of a container.
//!
//! Owns: volume mounts, subPaths, the hosts file, the termination message file. Never: makes or mounts anything.
//! Upstream: `makeMounts` in `kubelet_pods.go` and in `kuberuntime_container.go`.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, PodSpec, Volume, VolumeMount};
use rubelet_cri::v1::{ImageSpec, Mount, MountPropagation};

use super::{
    ConfigError,
    environment::{Environment, expand_path},
    hosts, recursive_read_only,
};
use crate::{
    fnv::fnv32a,
    id::PodUid,
    op::StartContainer,
    settings::Settings,
    volumes::{
        self,
        claims::{PersistentKind, PersistentSource},
        files::FilePlugin,
    },
};

pub fn mounts(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    environment: &Environment,
    settings: &Settings,
) -> Result<Vec<Mount>, ConfigError> {
    let selinux_relabel = settings.node.selinux_enabled;
    let mut mounts = Vec::new();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let mut made = volume_mount(order, spec, container, mount, settings)?;
        if let Some(id) = order.image_volumes.get(&mount.name) {
            made.image = Some(image_of_volume(order, spec, mount, id));
            made.image_sub_path = sub_path(container, mount, environment)?;
        } else if has_sub_path(mount) {
            made.host_path = text(&sub_path_place(order, container, mount, index, settings));
        }
        mounts.push(made);
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

/// A subPath that a container sees in place of the whole volume. It must be mounted at `place` before the container starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubPath {
    /// The volume's name.
    pub name: String,
    pub volume: PathBuf,
    /// Below the volume: relative, without `..`.
    pub path: PathBuf,
    pub place: PathBuf,
}

pub fn sub_paths(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    environment: &Environment,
    settings: &Settings,
) -> Result<Vec<SubPath>, ConfigError> {
    let mut sub_paths = Vec::new();
    let mounts = container.volume_mounts.iter().flatten().enumerate();
    // The runtime finds paths in images.
    for (index, mount) in mounts.filter(|(_, it)| has_sub_path(it) && !order.image_volumes.contains_key(&it.name)) {
        let path = sub_path(container, mount, environment)?;
        sub_paths.push(SubPath {
            name: mount.name.clone(),
            volume: volume_source(order, spec, container, mount, settings)?.host_path,
            path: path.into(),
            place: sub_path_place(order, container, mount, index, settings),
        });
    }
    Ok(sub_paths)
}

/// The expanded subPath; empty for none.
fn sub_path(container: &Container, mount: &VolumeMount, environment: &Environment) -> Result<String, ConfigError> {
    let path = match mount.sub_path_expr.as_deref().filter(|expression| !expression.is_empty()) {
        Some(expression) => expand_path(expression, environment)?.ok_or_else(|| {
            // An invalid path, with upstream's error for one it cannot create.
            let (volume, container) = (&mount.name, &container.name);
            ConfigError(format!(
                "failed to create subPath directory for volumeMount {volume:?} of container {container:?}"
            ))
        })?,
        None => mount.sub_path.clone().unwrap_or_default(),
    };
    if path.starts_with('/') {
        return Err(ConfigError(format!("error SubPath `{path}` must not be an absolute path")));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(ConfigError(format!("unable to provision SubPath `{path}`: must not contain '..'")));
    }
    Ok(path)
}

pub fn has_sub_path(mount: &VolumeMount) -> bool {
    [&mount.sub_path, &mount.sub_path_expr].into_iter().flatten().any(|path| !path.is_empty())
}

/// The same place as upstream's.
fn sub_path_place(
    order: &StartContainer,
    container: &Container,
    mount: &VolumeMount,
    index: usize,
    settings: &Settings,
) -> PathBuf {
    let dir = pod_dir(&settings.root_dir, &order.uid).join("volume-subpaths");
    let volume = order.claimed.get(&mount.name).map_or(&mount.name, |source| &source.name);
    dir.join(volume).join(&container.name).join(index.to_string())
}

/// A container that mounts something over `/etc/hosts` gets no hosts file.
pub fn has_hosts_file(spec: &PodSpec, container: &Container, pod_ips: &[String]) -> bool {
    hosts::is_managed(spec, pod_ips)
        && !container.volume_mounts.iter().flatten().any(|mount| mount.mount_path == hosts::HOSTS_PATH)
}

/// One for all containers of the pod.
pub fn hosts_file(root_dir: &Path, uid: &PodUid) -> PathBuf {
    pod_dir(root_dir, uid).join("etc-hosts")
}

/// The termination message file of this instance; `None` when the container has none.
/// Upstream's name is random. Ours is deterministic, so that a repeated start finds the file it made before.
pub fn termination_message_file(order: &StartContainer, container: &Container, root_dir: &Path) -> Option<PathBuf> {
    container.termination_message_path.as_ref().filter(|path| !path.is_empty())?;
    let instance = format!("{}/{}", order.sandbox, order.attempt);
    let name = format!("{:08x}", fnv32a(instance.as_bytes()));
    Some(pod_dir(root_dir, &order.uid).join("containers").join(&container.name).join(name))
}

fn volume_mount(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    mount: &VolumeMount,
    settings: &Settings,
) -> Result<Mount, ConfigError> {
    let source = volume_source(order, spec, container, mount, settings)?;
    let recursive_read_only = recursive_read_only::resolve(mount, order.recursive_read_only_mounts)
        .map_err(|error| ConfigError(format!("failed to resolve recursive read-only mode: {error}")))?;
    Ok(Mount {
        container_path: absolute(&mount.mount_path),
        host_path: text(&source.host_path),
        readonly: mount.read_only.unwrap_or(false) || source.is_read_only,
        selinux_relabel: source.is_ours && settings.node.selinux_enabled,
        propagation: propagation(mount)?.into(),
        recursive_read_only,
        ..Mount::default()
    })
}

fn volume_source(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    mount: &VolumeMount,
    settings: &Settings,
) -> Result<VolumeSource, ConfigError> {
    let mut volumes = spec.volumes.iter().flatten();
    let volume = volumes.find(|volume| volume.name == mount.name);
    let pod_dir = pod_dir(&settings.root_dir, &order.uid);
    if let Some(source) = order.claimed.get(&mount.name) {
        return Ok(VolumeSource::claimed(source, &pod_dir));
    }
    volume.and_then(|volume| VolumeSource::of(volume, &pod_dir)).ok_or_else(|| {
        ConfigError(format!("cannot find volume {:?} to mount into container {:?}", mount.name, container.name))
    })
}

fn image_of_volume(order: &StartContainer, spec: &PodSpec, mount: &VolumeMount, id: &str) -> ImageSpec {
    let volume = spec.volumes.iter().flatten().find(|volume| volume.name == mount.name);
    let reference = volume.and_then(|volume| volume.image.as_ref()?.reference.clone());
    ImageSpec {
        image: id.to_owned(),
        user_specified_image: reference.unwrap_or_default(),
        annotations: order.pod.metadata.annotations.clone().unwrap_or_default(),
        ..ImageSpec::default()
    }
}

struct VolumeSource {
    host_path: PathBuf,
    /// Its files may be relabelled. Those of the node and of servers must not be, and those mounted with a label cannot.
    is_ours: bool,
    is_read_only: bool,
}

impl VolumeSource {
    fn claimed(source: &PersistentSource, pod_dir: &Path) -> Self {
        let is_ours = match &source.kind {
            PersistentKind::HostPath { .. } | PersistentKind::Nfs(_) => false,
            PersistentKind::Flex(volume) => volume.capabilities.selinux_relabel,
            PersistentKind::Local(_) | PersistentKind::Iscsi(_) | PersistentKind::Fc(_) | PersistentKind::Csi(_) => {
                true
            }
        };
        // What is mounted with its label need not be relabelled.
        let is_ours = is_ours && source.mount_context().is_none();
        VolumeSource { host_path: source.path(pod_dir), is_ours, is_read_only: source.read_only }
    }

    fn of(volume: &Volume, pod_dir: &Path) -> Option<Self> {
        if let Some(plugin) = FilePlugin::of(volume) {
            let host_path = volumes::files_path(pod_dir, plugin, &volume.name);
            return Some(VolumeSource { host_path, is_ours: true, is_read_only: true });
        }
        if volume.empty_dir.is_some() {
            let host_path = volumes::empty_dir_path(pod_dir, &volume.name);
            return Some(VolumeSource { host_path, is_ours: true, is_read_only: false });
        }
        if volume.image.is_some() {
            // The runtime mounts it from the image.
            return Some(VolumeSource { host_path: PathBuf::new(), is_ours: false, is_read_only: true });
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

pub(super) fn pod_dir(root_dir: &Path, uid: &PodUid) -> PathBuf {
    root_dir.join("pods").join(uid.as_str())
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
