//! The rules that every state must keep, and when a state is settled.

use crate::{
    agent::tests::model::{
        state::State,
        world::{Disk, SIDECAR, World},
    },
    observation::SandboxState,
    pod::status::is_terminal,
};

/// The first rule that the state breaks.
pub(super) fn broken(state: &State) -> Option<String> {
    let world = &state.world;
    if world.broken.is_some() {
        return world.broken.clone();
    }
    let running: Vec<_> = world.runtime.running().map(|container| container.name.as_str()).collect();
    if is_terminal(world.phase()) && !running.is_empty() {
        return Some(format!("the API has phase {} while {running:?} run", world.phase()));
    }
    None
}

/// Nothing is under way, and the node is as the pod asks for it. Otherwise what is wrong.
pub(super) fn unsettled(state: &State) -> Option<String> {
    if !state.world.effects.is_empty() {
        return Some("effects are in flight".to_owned());
    }
    if state.next_timer().is_some() {
        return Some("a timer is set".to_owned());
    }
    if state.world.api.is_none() {
        return not_gone(state);
    }
    if state.world.is_deleted() {
        return Some("the pod is deleted, and still in the API".to_owned());
    }
    let world = &state.world;
    if world.mains().all(|name| is_done(world, name)) { not_completed(world) } else { not_running(world) }
}

/// It ended and is not restarted.
fn is_done(world: &World, name: &str) -> bool {
    let exit = world.runtime.newest_container(name).and_then(|newest| newest.exit());
    exit.is_some_and(|exit| world.stays_down_after(exit.code))
}

fn not_gone(state: &State) -> Option<String> {
    let World { runtime, disk, .. } = &state.world;
    if !runtime.sandboxes.is_empty() || !runtime.containers.is_empty() {
        return Some("the pod is gone from the API, and not from the runtime".to_owned());
    }
    if *disk != Disk::default() {
        return Some(format!("the pod is gone and leaves {disk:?}"));
    }
    (!state.agent.records.is_empty()).then(|| "the pod is gone, and its record stays".to_owned())
}

fn not_completed(world: &World) -> Option<String> {
    if world.runtime.running().next().is_some() {
        return Some("the pod is over, and a container runs".to_owned());
    }
    let codes = world.mains().filter_map(|name| world.runtime.newest_container(name)?.exit()).map(|exit| exit.code);
    let expected = if codes.into_iter().all(|code| code == 0) { "Succeeded" } else { "Failed" };
    if world.phase() != expected {
        return Some(format!("the pod has {expected}, and the API has phase {:?}", world.phase()));
    }
    if world.runtime.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready) {
        return Some("the pod is over, and its sandbox is ready".to_owned());
    }
    let Disk { volumes, cgroup, .. } = world.disk;
    (volumes || cgroup).then(|| "the pod is over, and holds its volumes or its cgroup".to_owned())
}

fn not_running(world: &World) -> Option<String> {
    for name in world.names() {
        let may_be_down = name != SIDECAR && is_done(world, name);
        if !world.is_running(name) && !may_be_down {
            return Some(format!("{name} does not run"));
        }
    }
    if world.phase() != "Running" {
        return Some(format!("the API has phase {:?} of a running pod", world.phase()));
    }
    let status = world.api.as_ref().and_then(|pod| pod.status.clone()).unwrap_or_default();
    let reported = status.init_container_statuses.into_iter().chain(status.container_statuses).flatten();
    for container in reported {
        let is_reported = container.state.is_some_and(|state| state.running.is_some());
        if is_reported != world.is_running(&container.name) {
            return Some(format!("the API has another state of {}", container.name));
        }
    }
    None
}
