//! Illegal transitions of container states.
//!
//! Owns: the one transition that is always a mistake: a finally terminated container that is waiting or running again.
//! Upstream: `checkContainerStateTransition`.

use k8s_openapi::api::core::v1::{Container, ContainerStatus, PodSpec, PodStatus};

use crate::pod::restart_policy::restarts_after;

/// A finally terminated container is reported as waiting or running.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllegalTransition {
    #[error("terminated container {0} attempted illegal transition to non-terminated state")]
    Container(String),
    #[error("terminated init container {0} attempted illegal transition to non-terminated state")]
    InitContainer(String),
    #[error("found mismatch between pod spec and status, container: {0}")]
    UnknownInitContainer(String),
}

pub(super) fn illegal(old: &PodStatus, new: &PodStatus, spec: &PodSpec) -> Option<IllegalTransition> {
    if spec.restart_policy.as_deref() == Some("Always") || all_containers_could_restart(spec) {
        return None;
    }
    for before in old.container_statuses.iter().flatten() {
        let container = spec.containers.iter().find(|container| container.name == before.name);
        if comes_back(before, new.container_statuses.as_deref(), container, spec) {
            return Some(IllegalTransition::Container(before.name.clone()));
        }
    }
    for before in old.init_container_statuses.iter().flatten() {
        let container = spec.init_containers.iter().flatten().find(|container| container.name == before.name);
        let Some(container) = container else {
            return Some(IllegalTransition::UnknownInitContainer(before.name.clone()));
        };
        if comes_back(before, new.init_container_statuses.as_deref(), Some(container), spec) {
            return Some(IllegalTransition::InitContainer(before.name.clone()));
        }
    }
    None
}

fn comes_back(
    before: &ContainerStatus,
    after: Option<&[ContainerStatus]>,
    container: Option<&Container>,
    spec: &PodSpec,
) -> bool {
    let Some(end) = before.state.as_ref().and_then(|state| state.terminated.as_ref()) else {
        return false;
    };
    let pod_restarts = end.exit_code != 0 && spec.restart_policy.as_deref() == Some("OnFailure");
    if pod_restarts || container.is_some_and(|container| restarts_after(container, spec, end.exit_code)) {
        return false;
    }
    let after = after.into_iter().flatten().find(|after| after.name == before.name);
    after.is_some_and(|after| after.state.as_ref().is_none_or(|state| state.terminated.is_none()))
}

/// A rule of one container may restart all others, whatever their own policy.
fn all_containers_could_restart(spec: &PodSpec) -> bool {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut rules = containers.flat_map(|container| container.restart_policy_rules.iter().flatten());
    rules.any(|rule| rule.action == "RestartAllContainers")
}
