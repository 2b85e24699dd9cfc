//! Lists everything in the runtime with two calls.
//!
//! Owns: the listing. Never: requests the status of single objects; that is `inspect.rs`.
//! Upstream: `GenericPLEG.Relist`, `GetPods`.

use rubelet_core::{
    container::labels,
    effect::{EffectError, Facts},
    id::{ContainerId, SandboxId},
    observation::{ListedPod, ListedState, Listing, SandboxState},
};
use rubelet_cri::v1;

use super::failed;
use crate::world::World;

pub async fn relist(world: &World) -> Result<Facts, EffectError> {
    let mut listing = Listing { looked_at: world.clock.now().uptime, ..Listing::default() };
    let (sandboxes, containers) =
        tokio::try_join!(world.runtime.list_pod_sandbox(None), world.runtime.list_containers(None))
            .map_err(|error| failed(&error))?;
    for sandbox in sandboxes {
        if let Some(pod) = listed_pod(&mut listing, &sandbox.labels) {
            pod.sandboxes.insert(SandboxId::new(&sandbox.id), sandbox_state(sandbox.state()));
        }
    }
    for container in containers {
        if let Some(pod) = listed_pod(&mut listing, &container.labels) {
            pod.containers.insert(ContainerId::new(&container.id), listed_state(container.state()));
        }
    }
    Ok(Facts::Listing(listing))
}

pub(super) fn sandbox_state(state: v1::PodSandboxState) -> SandboxState {
    match state {
        v1::PodSandboxState::SandboxReady => SandboxState::Ready,
        v1::PodSandboxState::SandboxNotready => SandboxState::NotReady,
    }
}

fn listed_state(state: v1::ContainerState) -> ListedState {
    match state {
        v1::ContainerState::ContainerCreated => ListedState::Created,
        v1::ContainerState::ContainerRunning => ListedState::Running,
        v1::ContainerState::ContainerExited => ListedState::Exited,
        v1::ContainerState::ContainerUnknown => ListedState::Unknown,
    }
}

/// `None` for objects that were not created by a kubelet.
fn listed_pod<'a>(listing: &'a mut Listing, labels: &labels::Map) -> Option<&'a mut ListedPod> {
    let pod = labels::owner(labels)?;
    Some(listing.pods.entry(pod.uid.clone()).or_insert_with(|| ListedPod {
        pod,
        sandboxes: Default::default(),
        containers: Default::default(),
    }))
}
