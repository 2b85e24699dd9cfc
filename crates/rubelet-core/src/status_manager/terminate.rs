//! The final status of a pod.
//!
//! Owns: the last status of a pod. Never: decides that the pod has terminated.
//! Upstream: `TerminatePod`, `hasPodInitialized`, `initializedContainers`.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodCondition, PodStatus};

use crate::{
    pod::{
        restart_policy::is_sidecar,
        status::{LOST_WHEN_TERMINATED, conditions, is_terminal, lost},
    },
    pod_manager::is_static_pod,
};

/// A container whose exit was not observed has failed: success would be a guess. Containers that could not start, because the
/// pod was not initialized, stay waiting.
pub(super) fn terminated_status(pod: &Pod, cached: Option<PodStatus>) -> PodStatus {
    let api = pod.status.clone().unwrap_or_default();
    let mut status = cached.unwrap_or_else(|| api.clone());
    if has_pod_initialized(pod, &status) || has_pod_initialized(pod, &api) {
        close(status.container_statuses.iter_mut().flatten());
    }
    if let Some(init) = &mut status.init_container_statuses {
        let attempted = initialized_containers(init);
        close(init.iter_mut().take(attempted));
    }
    // Static pods get no forced terminal phase, as upstream: their manifest may bring them back.
    if !is_static_pod(pod) && !status.phase.as_deref().is_some_and(is_terminal) {
        status.phase = Some("Failed".to_owned());
    }
    withdraw_readiness(pod, &mut status);
    status
}

/// A container that does not run is not ready; upstream sets this only in the patch.
fn withdraw_readiness(pod: &Pod, status: &mut PodStatus) {
    let current = [conditions::pod_ready_condition(pod, status), conditions::containers_ready_condition(pod, status)];
    for condition in status.conditions.iter_mut().flatten() {
        if let Some(current) = current.iter().find(|current| current.type_ == condition.type_) {
            let changed = current.status != condition.status;
            let date = condition.last_transition_time.take().filter(|_| !changed);
            *condition = PodCondition { last_transition_time: date, ..current.clone() };
        }
    }
}

fn close<'a>(containers: impl Iterator<Item = &'a mut ContainerStatus>) {
    for container in containers {
        if exit_code(container.state.as_ref()).is_none() {
            container.state = Some(lost(LOST_WHEN_TERMINATED));
            container.ready = false;
            container.started = Some(false);
        }
    }
}

/// Whether regular containers may have started.
fn has_pod_initialized(pod: &Pod, status: &PodStatus) -> bool {
    let init_specs = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    if init_specs.is_empty() || status.container_statuses.iter().flatten().any(has_run) {
        return true;
    }
    let Some(last) = status.init_container_statuses.iter().flatten().last() else { return false };
    let Some(spec) = init_specs.iter().find(|spec| spec.name == last.name) else { return false };
    if is_sidecar(spec) {
        let running = last.state.as_ref().is_some_and(|state| state.running.is_some());
        return running && last.started == Some(true);
    }
    exit_code(last.last_state.as_ref()) == Some(0) || exit_code(last.state.as_ref()) == Some(0)
}

/// How many init containers were started, counted from the first; at least one.
fn initialized_containers(containers: &[ContainerStatus]) -> usize {
    containers.iter().rposition(has_run).map_or(1, |last| last + 1)
}

fn has_run(container: &ContainerStatus) -> bool {
    let waiting = container.state.as_ref().is_some_and(|state| state.waiting.is_some());
    !waiting || exit_code(container.last_state.as_ref()).is_some()
}

fn exit_code(state: Option<&ContainerState>) -> Option<i32> {
    Some(state?.terminated.as_ref()?.exit_code)
}
