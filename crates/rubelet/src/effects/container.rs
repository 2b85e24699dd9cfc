//! Effects on containers: start, stop, remove.
//!
//! Owns: the calls, the files a container needs before it starts, its log link. Never: decides, pulls, runs hooks.
//! Upstream: `startContainer`, `killContainer`, `removeContainer`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::Container;
use rubelet_core::{
    container::{
        self, ConfigError,
        environment::{
            self, Sources,
            files::{self, EnvFileError, FileKey, FileValues},
            services::Links,
        },
        expansion::MAX_EXEC_BYTES,
        hosts, is_host_network, labels, logs,
        mounts::{self, SubPath},
    },
    effect::{EffectError, Facts, Reason},
    id::{ContainerId, PodRef, namespace_of},
    objects::Objects,
    op::StartContainer,
    pod_manager::is_static_pod,
    volumes,
};
use rubelet_cri::{
    port::{RpcError, RpcErrorKind},
    v1,
};
use rubelet_host::port::FileKind;

use super::{Recalled, failure, sandbox::read_resolv_conf};
use crate::{objects::Patience, world::World};

const LOG_DIR_MODE: u32 = 0o755;
const CONTAINER_DIR_MODE: u32 = 0o750;
const HOSTS_MODE: u32 = 0o644;
/// The container may run as any user, and must be able to write its termination message.
const TERMINATION_MESSAGE_MODE: u32 = 0o666;
/// A size limit for copying the host's hosts file.
const NODE_HOSTS_LIMIT_BYTES: u64 = 16 << 20;

/// Creates and starts. Repeating it fails in the runtime: the container's name includes the attempt.
pub async fn start_container(world: &World, order: &StartContainer, recalled: &Recalled) -> Result<Facts, EffectError> {
    let rejected = |error: ConfigError| failure::config(error, Reason::CreateContainerConfigError);
    let spec = &*container::find(&order.pod, &order.container).map_err(rejected)?;
    let sources = gather(world, order, spec).await;
    let config = container::container_config(order, &sources, &world.settings).map_err(rejected)?;
    let sub_paths = container::sub_paths(order, &sources, &world.settings).map_err(rejected)?;
    let resolv_conf = read_resolv_conf(world).await?;
    let (uid, attempt, cgroup_parent) = (&order.uid, order.sandbox_attempt, order.cgroup_parent.as_str());
    let identity = container::Identity { uid, attempt, cgroup_parent, volume_groups: &order.volume_groups() };
    let sandbox = container::sandbox_config(&order.pod, identity, &world.settings, &resolv_conf).map_err(rejected)?;
    make_files(world, order, spec, &sandbox).await?;
    for part in &sub_paths {
        bind_sub_path(world, &spec.name, part).await.map_err(rejected)?;
    }
    failure::unless(recalled)?;
    let id = world
        .runtime
        .create_container(order.sandbox.as_str(), &config, &sandbox)
        .await
        .map_err(|error| failure::step(&error, Reason::CreateContainerError))?;
    failure::unless(recalled)?;
    world.runtime.start_container(&id).await.map_err(|error| failure::step(&error, Reason::RunContainerError))?;
    let log = Path::new(&sandbox.log_directory).join(&config.log_path);
    link_log(world, &log, &config.labels, &id).await;
    Ok(Facts::Container { id: ContainerId::new(id) })
}

/// Starts the container that an interrupted attempt has created.
pub async fn resume_container(world: &World, id: &ContainerId, recalled: &Recalled) -> Result<Facts, EffectError> {
    let status = world
        .runtime
        .container_status(id.as_str())
        .await
        .map_err(|error| failure::step(&error, Reason::RunContainerError))?;
    failure::unless(recalled)?;
    if status.state() == v1::ContainerState::ContainerCreated {
        world
            .runtime
            .start_container(id.as_str())
            .await
            .map_err(|error| failure::step(&error, Reason::RunContainerError))?;
    }
    link_log(world, Path::new(&status.log_path), &status.labels, id.as_str()).await;
    Ok(Facts::Container { id: id.clone() })
}

/// SIGTERM, then SIGKILL after the grace period.
pub async fn stop_container(world: &World, id: &ContainerId, grace_secs: i64) -> Result<Facts, EffectError> {
    failure::gone_is_done(world.runtime.stop_container(id.as_str(), grace_secs).await)?;
    Ok(Facts::Nothing)
}

/// Logs first, as upstream does: a container whose logs cannot be removed stays, and its removal is retried.
pub async fn remove_container(world: &World, id: &ContainerId) -> Result<Facts, EffectError> {
    match world.runtime.container_status(id.as_str()).await {
        Ok(status) => remove_logs(world, &status).await?,
        Err(error) if error.kind == RpcErrorKind::NotFound => return Ok(Facts::Nothing),
        Err(error) => return Err(failure::retry(&error)),
    }
    match world.runtime.remove_container(id.as_str()).await {
        Err(error) if error.kind == RpcErrorKind::FailedPrecondition => remove_with_task(world, id, error).await,
        result => failure::gone_is_done(result).map(|()| Facts::Nothing),
    }
}

/// containerd's CRI removes no container whose task exists. It may have lost sight of one when the client of a start went away:
/// then it lists the container as ended and its removal fails for ever, unless the task is deleted first.
async fn remove_with_task(world: &World, id: &ContainerId, refusal: RpcError) -> Result<Facts, EffectError> {
    match world.runtime.delete_leftover_task(id.as_str()).await {
        Ok(()) => {}
        Err(error) if error.kind == RpcErrorKind::Unimplemented => return Err(failure::retry(&refusal)),
        Err(error) => {
            let message = format!("{}; deleting its task: {}", refusal.grpc_text(), error.grpc_text());
            return Err(EffectError { message, ..failure::retry(&error) });
        }
    }
    failure::gone_is_done(world.runtime.remove_container(id.as_str()).await)?;
    Ok(Facts::LeftoverTask { error: refusal.description() })
}

/// The inputs of the container's environment besides the pod itself.
async fn gather(world: &World, order: &StartContainer, spec: &Container) -> Sources {
    let needs = environment::needs(&order.pod, spec);
    let files = read_env_files(world, order, spec).await;
    let Some(cluster) = &world.cluster else {
        return Sources { objects: Objects::standalone(needs), files, ..Sources::default() };
    };
    let has_links = order.pod.spec.as_ref().and_then(|spec| spec.enable_service_links).unwrap_or(true);
    let links = if has_links { Links::All } else { Links::Master };
    let patience = if is_static_pod(&order.pod) { Patience::Now } else { Patience::Wait };
    let (objects, services) = tokio::join!(
        cluster.objects.gather(&order.uid, needs),
        cluster.objects.services().variables(namespace_of(&order.pod), links, patience),
    );
    Sources { objects, services, files }
}

/// The environment variables that come from files of the pod's volumes, each file read once.
async fn read_env_files(world: &World, order: &StartContainer, spec: &Container) -> FileValues {
    let needs = files::needs(spec);
    let mut keys: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for FileKey { volume, path, key } in &needs {
        keys.entry((volume, path)).or_default().insert(key);
    }
    let pod_dir = world.paths.pod_dir(&order.uid);
    let mut found = FileValues::new();
    let mut bytes = 0;
    for ((volume, path), keys) in keys {
        let Some(dir) = volumes::mounted_empty_dir(&order.pod, &pod_dir, volume) else { continue };
        let values = match world.host.read_in_root(&dir, Path::new(path), files::MAX_FILE_BYTES).await {
            Ok(content) => files::values(&content, &keys),
            Err(error) => keys.iter().map(|key| (*key, Err(EnvFileError(error.to_string())))).collect(),
        };
        for (key, value) in values {
            match &value {
                Ok(value) => bytes += value.len(),
                Err(error) => {
                    tracing::warn!(container = spec.name, volume, path, key, "failed to read env file: {error}")
                }
            }
            found.insert(FileKey { volume: volume.to_owned(), path: path.to_owned(), key: key.to_owned() }, value);
        }
        // No process can have a larger environment, so the rest is not read.
        if bytes > MAX_EXEC_BYTES {
            break;
        }
    }
    found
}

/// The cause is logged only: it could reveal files of the node to the container's owner.
async fn bind_sub_path(world: &World, container: &str, part: &SubPath) -> Result<(), ConfigError> {
    let SubPath { name, volume, path, place } = part;
    world.host.bind_sub_path(volume, path, place).await.map_err(|error| {
        tracing::warn!(container, volume = %volume.display(), path = %path.display(), "failed to mount subPath: {error}");
        ConfigError(format!("failed to prepare subPath for volumeMount {name:?} of container {container:?}"))
    })
}

async fn make_files(
    world: &World,
    order: &StartContainer,
    spec: &Container,
    sandbox: &v1::PodSandboxConfig,
) -> Result<(), EffectError> {
    let host = &world.host;
    let log_dir = Path::new(&sandbox.log_directory).join(&spec.name);
    let made = host.make_dir_beneath(&world.paths.pod_logs_dir, &log_dir, LOG_DIR_MODE).await;
    made.map_err(|error| failure::io("make", &log_dir, &error))?;
    let pod = order.pod.spec.as_ref();
    if pod.is_some_and(|pod| mounts::has_hosts_file(pod, spec, &order.pod_ips)) {
        write_hosts(world, order).await?;
    }
    if let Some(path) = mounts::termination_message_file(order, spec, &world.settings.root_dir) {
        let dir = path.parent().unwrap_or(&path);
        let pods_dir = world.paths.pods_dir();
        let made = host.make_dir_beneath(&pods_dir, dir, CONTAINER_DIR_MODE).await;
        made.map_err(|error| failure::io("make", dir, &error))?;
        // A repeated start leaves the file alone that the first container may be writing to.
        let made = host.make_file_beneath(&pods_dir, &path, TERMINATION_MESSAGE_MODE).await;
        made.map_err(|error| failure::io("write", &path, &error))?;
    }
    Ok(())
}

async fn write_hosts(world: &World, order: &StartContainer) -> Result<(), EffectError> {
    let is_host_network = order.pod.spec.as_ref().is_some_and(is_host_network);
    let node_hosts = if is_host_network { read(world, Path::new(hosts::HOSTS_PATH)).await? } else { Vec::new() };
    let content = hosts::content(
        &order.pod,
        &order.pod_ips,
        &world.settings.node.cluster_domain,
        &String::from_utf8_lossy(&node_hosts),
    )
    .map_err(|error| failure::config(error, Reason::CreateContainerConfigError))?;
    let path = mounts::hosts_file(&world.settings.root_dir, &order.uid);
    // Replacing the file would detach it from containers that mount it; so a correct file is left alone.
    let is_current =
        world.host.read_file(&path, NODE_HOSTS_LIMIT_BYTES).await.is_ok_and(|current| current == content.as_bytes());
    if is_current {
        return Ok(());
    }
    world
        .host
        .write_file_beneath(&world.paths.pods_dir(), &path, content.as_bytes(), HOSTS_MODE)
        .await
        .map_err(|error| failure::io("write", &path, &error))
}

async fn read(world: &World, path: &Path) -> Result<Vec<u8>, EffectError> {
    world.host.read_file(path, NODE_HOSTS_LIMIT_BYTES).await.map_err(|error| failure::io("read", path, &error))
}

/// Log shippers find logs by these links. A container runs without one, so a failure is only logged.
async fn link_log(world: &World, log: &Path, labels: &labels::Map, id: &str) {
    let Some(link) = link_path(world, labels, id) else { return };
    // With another log driver there is no file, and the link would dangle.
    if !matches!(world.host.file_kind(log).await, Ok(Some(_))) {
        return;
    }
    let links = &world.paths.container_links_dir;
    let made = match world.host.file_kind(links).await {
        Ok(Some(FileKind::Directory)) => Ok(()),
        // Only a new one: it may be a link of the operator's, whose target keeps its mode.
        _ => world.host.make_dir(links, LOG_DIR_MODE).await,
    };
    let made = match made {
        Ok(()) => world.host.make_link(log, &link).await,
        Err(error) => Err(error),
    };
    if let Err(error) = made {
        tracing::warn!(link = %link.display(), %error, "failed to link container log");
    }
}

async fn remove_logs(world: &World, status: &v1::ContainerStatus) -> Result<(), EffectError> {
    for path in log_files(world, Path::new(&status.log_path)).await? {
        let removed = world.host.remove_file_beneath(&world.paths.root_of(&path), &path).await;
        removed.map_err(|error| failure::io("remove", &path, &error))?;
    }
    if let Some(link) = link_path(world, &status.labels, &status.id) {
        world.host.remove_file(&link).await.map_err(|error| failure::io("remove", &link, &error))?;
    }
    Ok(())
}

/// The log and its rotated predecessors: everything whose name starts with the log's.
async fn log_files(world: &World, log: &Path) -> Result<Vec<PathBuf>, EffectError> {
    let (Some(dir), Some(name)) = (log.parent(), log.file_name().and_then(|name| name.to_str())) else {
        return Ok(Vec::new());
    };
    match world.host.list_dir(dir).await {
        Ok(entries) => Ok(entries
            .into_iter()
            .filter(|entry| entry.name.starts_with(name))
            .map(|entry| dir.join(entry.name))
            .collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failure::io("list", dir, &error)),
    }
}

/// `None` for a container that was not created by a kubelet.
fn link_path(world: &World, labels: &labels::Map, id: &str) -> Option<PathBuf> {
    let PodRef { namespace, name, .. } = labels::owner(labels)?;
    let container = labels.get(labels::CONTAINER_NAME)?;
    Some(world.paths.container_links_dir.join(logs::link_name(&name, &namespace, container, id)))
}
