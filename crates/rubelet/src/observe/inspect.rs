//! The look at one pod.
//!
//! Owns: facts about its sandboxes and containers, and about its log directory. Never: evaluates them.
//! Upstream: `GetPodStatus`, `getPodContainerStatuses`, `toKubeContainerStatus`, `calcRestartCountByLogDir`.

use std::{cmp::Reverse, collections::BTreeMap, path::Path};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use rubelet_core::{
    container::{
        labels::{self, Annotated},
        logs, resources,
    },
    effect::{EffectError, Facts},
    id::{ContainerId, PodRef, SandboxId},
    observation::{ContainerFacts, ContainerResources, ContainerState, ContainerUser, Exit, PodFacts, SandboxFacts},
};
use rubelet_cri::{
    port::{RpcErrorKind, RpcResult},
    v1,
};
use rubelet_host::port::FileKind;

use super::{failed, relist::sandbox_state, termination_message};
use crate::world::World;

/// Enough to hide the latency of a call, too few for one pod to crowd out the others at the runtime.
const CALLS_AT_ONCE: usize = 4;

pub async fn inspect(world: &World, pod: &PodRef) -> Result<Facts, EffectError> {
    let looked_at = world.clock.now().uptime;
    let label_selector = labels::selector(&pod.uid);
    let sandbox_filter = v1::PodSandboxFilter { label_selector: label_selector.clone(), ..Default::default() };
    let container_filter = v1::ContainerFilter { label_selector, ..Default::default() };
    let (sandboxes, containers) = tokio::try_join!(
        world.runtime.list_pod_sandbox(Some(sandbox_filter)),
        world.runtime.list_containers(Some(container_filter))
    )
    .map_err(|error| failed(&error))?;
    let sandboxes = stream::iter(sandboxes).map(|sandbox| sandbox_facts(world, sandbox)).buffered(CALLS_AT_ONCE);
    let containers =
        stream::iter(containers).map(|container| container_facts(world, container)).buffered(CALLS_AT_ONCE);
    let (sandboxes, containers) =
        tokio::try_join!(sandboxes.try_collect::<Vec<_>>(), containers.try_collect::<Vec<_>>())
            .map_err(|error| failed(&error))?;
    let mut facts = PodFacts {
        looked_at,
        sandboxes: sandboxes.into_iter().flatten().collect(),
        containers: containers.into_iter().flatten().collect(),
        logged_attempts: BTreeMap::new(),
    };
    // By attempt before time, because the wall clock can jump back; by id last, for a total order.
    facts.sandboxes.sort_by_key(|sandbox| (Reverse((sandbox.attempt, sandbox.created_at)), sandbox.id.clone()));
    facts
        .containers
        .sort_by_key(|container| (Reverse((container.attempt, container.created_at)), container.id.clone()));
    facts.logged_attempts = logged_attempts(world, pod, &facts.containers).await;
    Ok(Facts::Pod(facts))
}

/// `None` if it was removed after the list: as if it had not been listed.
async fn sandbox_facts(world: &World, sandbox: v1::PodSandbox) -> RpcResult<Option<SandboxFacts>> {
    // Only a ready sandbox has network addresses.
    if sandbox.state() != v1::PodSandboxState::SandboxReady {
        return Ok(Some(facts_of_sandbox(sandbox, None)));
    }
    match world.runtime.pod_sandbox_status(&sandbox.id).await {
        Ok(status) => Ok(Some(facts_of_sandbox(sandbox, Some(status)))),
        Err(error) if error.kind == RpcErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub fn facts_of_sandbox(sandbox: v1::PodSandbox, status: Option<v1::PodSandboxStatus>) -> SandboxFacts {
    let mut facts = SandboxFacts {
        state: sandbox_state(sandbox.state()),
        id: SandboxId::new(&sandbox.id),
        attempt: sandbox.metadata.map_or(0, |metadata| metadata.attempt),
        created_at: (sandbox.created_at > 0).then(|| timestamp(sandbox.created_at)),
        runtime_handler: sandbox.runtime_handler,
        host_network: false,
        ips: Vec::new(),
    };
    if let Some(status) = status {
        facts.state = sandbox_state(status.state());
        facts.host_network = is_host_network(&status);
        facts.ips = ips(status.network);
    }
    facts
}

fn is_host_network(status: &v1::PodSandboxStatus) -> bool {
    let options = status.linux.as_ref().and_then(|linux| linux.namespaces.as_ref()?.options.as_ref());
    options.is_some_and(|options| options.network() == v1::NamespaceMode::Node)
}

/// One invalid address discards all of them, as upstream does.
fn ips(network: Option<v1::PodSandboxNetworkStatus>) -> Vec<String> {
    let Some(network) = network else { return Vec::new() };
    let ips: Vec<String> = std::iter::once(network.ip)
        .filter(|ip| !ip.is_empty())
        .chain(network.additional_ips.into_iter().map(|additional| additional.ip))
        .collect();
    if ips.iter().all(|ip| ip.parse::<std::net::IpAddr>().is_ok()) { ips } else { Vec::new() }
}

async fn container_facts(world: &World, container: v1::Container) -> RpcResult<Option<ContainerFacts>> {
    let status = match world.runtime.container_status(&container.id).await {
        Ok(status) => status,
        Err(error) if error.kind == RpcErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let annotated = Annotated::read(&status.annotations);
    let message = match status.state() {
        v1::ContainerState::ContainerExited => termination_message::of(world, &status, &annotated).await,
        v1::ContainerState::ContainerCreated
        | v1::ContainerState::ContainerRunning
        | v1::ContainerState::ContainerUnknown => String::new(),
    };
    Ok(Some(facts_of_container(&container, status, &annotated, message)))
}

/// `message` is that of its end.
pub fn facts_of_container(
    container: &v1::Container,
    status: v1::ContainerStatus,
    annotated: &Annotated,
    message: String,
) -> ContainerFacts {
    let state = container_state(&status, message);
    let metadata = status.metadata.unwrap_or_default();
    ContainerFacts {
        id: ContainerId::new(&container.id),
        sandbox: SandboxId::new(&container.pod_sandbox_id),
        name: status.labels.get(labels::CONTAINER_NAME).cloned().unwrap_or(metadata.name),
        attempt: annotated.restart_count.unwrap_or(metadata.attempt),
        hash: annotated.hash,
        image: status.image.map(|image| image.image).unwrap_or_default(),
        image_ref: status.image_ref,
        created_at: timestamp(status.created_at),
        state,
        log_path: status.log_path,
        image_volumes: status.mounts.into_iter().filter_map(|mount| Some(mount.image?.image)).collect(),
        user: status.user.and_then(|user| user.linux).map(|user| ContainerUser {
            uid: user.uid,
            gid: user.gid,
            supplemental_groups: user.supplemental_groups,
        }),
        resources: container_resources(status.resources.and_then(|resources| resources.linux)),
    }
}

fn container_state(status: &v1::ContainerStatus, message: String) -> ContainerState {
    match status.state() {
        v1::ContainerState::ContainerCreated => ContainerState::Created,
        v1::ContainerState::ContainerRunning => ContainerState::Running { started_at: timestamp(status.started_at) },
        v1::ContainerState::ContainerUnknown => ContainerState::Unknown,
        v1::ContainerState::ContainerExited => ContainerState::Exited(Exit {
            code: status.exit_code,
            started_at: (status.started_at > 0).then(|| timestamp(status.started_at)),
            finished_at: timestamp(status.finished_at),
            reason: status.reason.clone(),
            message,
        }),
    }
}

/// Shares and quota as upstream reads them back; zero is unlimited or not reported.
fn container_resources(reported: Option<v1::LinuxContainerResources>) -> ContainerResources {
    let reported = reported.unwrap_or_default();
    let positive = |amount: i64| Some(amount).filter(|amount| *amount > 0);
    ContainerResources {
        cpu_limit_millis: resources::quota_to_millis(reported.cpu_quota, reported.cpu_period).and_then(positive),
        cpu_request_millis: resources::shares_to_millis(reported.cpu_shares),
        memory_limit_bytes: positive(reported.memory_limit_in_bytes),
    }
}

/// The highest attempt of each container that has a log and is unknown to the runtime. An unreadable directory
/// counts as empty.
async fn logged_attempts(world: &World, pod: &PodRef, known: &[ContainerFacts]) -> BTreeMap<String, u32> {
    let dir = logs::pod_dir(&world.settings.pod_logs_dir, &pod.namespace, &pod.name, &pod.uid);
    let mut attempts = BTreeMap::new();
    for entry in world.host.list_dir(&dir).await.unwrap_or_default() {
        if entry.kind != FileKind::Directory || known.iter().any(|container| container.name == entry.name) {
            continue;
        }
        if let Some(highest) = highest_attempt(world, &dir.join(&entry.name)).await {
            attempts.insert(entry.name, highest);
        }
    }
    attempts
}

async fn highest_attempt(world: &World, container_dir: &Path) -> Option<u32> {
    let files = world.host.list_dir(container_dir).await.ok()?;
    files.iter().filter(|file| file.kind != FileKind::Directory).filter_map(|file| logs::attempt_of(&file.name)).max()
}

/// CRI's nanoseconds since 1970. Times out of range count as unset.
fn timestamp(nanos: i64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::{facts_of_sandbox, v1};

    #[test]
    fn a_sandbox_that_containerd_did_not_date_has_no_creation_time() {
        // Go's zero time, which containerd puts into an integer of nanoseconds.
        for (nanos, is_dated) in [(-6_795_364_578_871_345_152, false), (0, false), (1_794_940_173_000_000_000, true)] {
            let sandbox = v1::PodSandbox { created_at: nanos, ..v1::PodSandbox::default() };
            assert_eq!(facts_of_sandbox(sandbox, None).created_at.is_some(), is_dated, "{nanos}");
        }
    }
}
