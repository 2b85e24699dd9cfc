//! A status as the API server will hold it.
//!
//! Owns: whole seconds, order of lists, length of messages, so that the computed status can be compared with the stored one.
//! Upstream: `normalizeStatus`.

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{ContainerState, ContainerStatus, Pod, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};

/// All termination messages of a pod together, in bytes.
const MAX_POD_TERMINATION_MESSAGE_BYTES: usize = 12 * 1024;
/// A pod's message and a waiting container's. Upstream has no limit for them, and no status beyond that of etcd (1.5 MiB) is ever
/// stored: an error of a runtime or a long list of names must not keep a pod's status from the API server.
const MAX_MESSAGE_BYTES: usize = 4 * 1024;
/// All waiting messages of a pod together: 64 containers have the whole length each.
const MAX_POD_WAITING_MESSAGE_BYTES: usize = 256 * 1024;

/// The longest messages of one container.
#[derive(Clone, Copy)]
struct MessageLimits {
    terminated_bytes: usize,
    waiting_bytes: usize,
}

pub fn normalize_status(pod: &Pod, status: &mut PodStatus) {
    let containers = container_count(pod).max(1);
    let limits = MessageLimits {
        terminated_bytes: MAX_POD_TERMINATION_MESSAGE_BYTES / containers,
        waiting_bytes: MAX_MESSAGE_BYTES.min(MAX_POD_WAITING_MESSAGE_BYTES / containers),
    };
    cut(&mut status.message, MAX_MESSAGE_BYTES);
    whole_seconds(&mut status.start_time);
    for condition in status.conditions.iter_mut().flatten() {
        whole_seconds(&mut condition.last_probe_time);
        whole_seconds(&mut condition.last_transition_time);
    }
    let lists =
        [&mut status.init_container_statuses, &mut status.container_statuses, &mut status.ephemeral_container_statuses];
    for container in lists.into_iter().flatten().flatten() {
        normalize_state(&mut container.state, limits);
        normalize_state(&mut container.last_state, limits);
    }
    for list in [&mut status.container_statuses, &mut status.ephemeral_container_statuses].into_iter().flatten() {
        // In upstream's order.
        list.sort_by(|one, other| one.name.cmp(&other.name));
    }
    if let Some(list) = &mut status.init_container_statuses {
        list.sort_by_key(|status| place(pod, status));
    }
}

fn container_count(pod: &Pod) -> usize {
    let Some(spec) = &pod.spec else { return 0 };
    spec.containers.len()
        + spec.init_containers.as_ref().map_or(0, Vec::len)
        + spec.ephemeral_containers.as_ref().map_or(0, Vec::len)
}

fn place(pod: &Pod, status: &ContainerStatus) -> usize {
    let mut names = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten()).map(|spec| &spec.name);
    names.position(|name| *name == status.name).unwrap_or(usize::MAX)
}

fn normalize_state(state: &mut Option<ContainerState>, limits: MessageLimits) {
    let Some(state) = state else { return };
    if let Some(waiting) = &mut state.waiting {
        cut(&mut waiting.message, limits.waiting_bytes);
    }
    if let Some(running) = &mut state.running {
        whole_seconds(&mut running.started_at);
    }
    if let Some(terminated) = &mut state.terminated {
        whole_seconds(&mut terminated.started_at);
        whole_seconds(&mut terminated.finished_at);
        cut(&mut terminated.message, limits.terminated_bytes);
    }
}

/// Without a mark at the end, as upstream does it.
fn cut(message: &mut Option<String>, limit_bytes: usize) {
    if let Some(message) = message {
        message.truncate(message.floor_char_boundary(limit_bytes));
    }
}

/// The API has no fractions of a second.
fn whole_seconds(time: &mut Option<Time>) {
    if let Some(time) = time {
        time.0 = Timestamp::from_second(time.0.as_second()).expect("the seconds of a timestamp are a timestamp");
    }
}
