//! The phase of a pod.
//!
//! Owns: the phase that follows from the container statuses. Terminal phases are kept by `pod/status.rs`.
//! Upstream: `getPhase`.

use k8s_openapi::api::core::v1::{Container, ContainerState, ContainerStatus, PodSpec, PodStatus};

use super::{PodWorkerState, StatusInput};
use crate::{
    observation::SandboxState,
    pod::restart_policy::{is_sidecar, restarts_after},
    pod_manager::is_static_pod,
};

pub(super) const PENDING: &str = "Pending";
pub(super) const RUNNING: &str = "Running";
pub(super) const SUCCEEDED: &str = "Succeeded";
pub(super) const FAILED: &str = "Failed";

/// Succeeded or Failed: no container of the pod will run again.
pub fn is_terminal(phase: &str) -> bool {
    phase == SUCCEEDED || phase == FAILED
}

pub(super) fn phase(input: &StatusInput<'_>, status: &PodStatus) -> &'static str {
    let Some(spec) = input.pod.spec.as_ref() else {
        return PENDING;
    };
    let init = InitTally::of(spec, status);
    let tally = Tally::of(spec, status);
    let initialized = any_active_regular_container(input, spec);
    if init.failed_for_good > 0 {
        return FAILED;
    }
    if init.pending > 0 || (tally.starting_sidecars > 0 && !initialized) || tally.waiting > 0 {
        return PENDING;
    }
    match tally {
        Tally { running: 1.., .. } => RUNNING,
        Tally { stopped: 0, .. } => PENDING,
        // Static pods get no forced terminal phase, as upstream: their manifest may bring them back.
        _ if input.worker_state == PodWorkerState::Terminated && !is_static_pod(input.pod) => tally.outcome(),
        _ if tally.stopped != tally.stopped_for_good => RUNNING,
        _ => tally.outcome(),
    }
}

/// Progress of the init containers that must complete.
#[derive(Default)]
struct InitTally {
    pending: u32,
    failed_for_good: u32,
}

impl InitTally {
    fn of(spec: &PodSpec, status: &PodStatus) -> InitTally {
        let mut tally = InitTally::default();
        for container in spec.init_containers.iter().flatten().filter(|container| !is_sidecar(container)) {
            match ContainerProgress::of(&container.name, status.init_container_statuses.as_deref()) {
                ContainerProgress::Exited { code, .. } => {
                    tally.failed_for_good += u32::from(code != 0 && !restarts_after(container, spec, code));
                }
                ContainerProgress::Waiting | ContainerProgress::Running { .. } => tally.pending += 1,
            }
        }
        tally
    }
}

/// State of the sidecars and the regular containers.
#[derive(Default)]
struct Tally {
    running: u32,
    waiting: u32,
    stopped: u32,
    stopped_for_good: u32,
    succeeded: u32,
    /// Running, startup probe not passed.
    starting_sidecars: u32,
}

impl Tally {
    fn of(spec: &PodSpec, status: &PodStatus) -> Tally {
        let mut tally = Tally::default();
        for container in spec.init_containers.iter().flatten().filter(|container| is_sidecar(container)) {
            tally.count_sidecar(&ContainerProgress::of(&container.name, status.init_container_statuses.as_deref()));
        }
        for container in &spec.containers {
            tally.count(container, spec, &ContainerProgress::of(&container.name, status.container_statuses.as_deref()));
        }
        tally
    }

    /// A stopped sidecar does not count: it never decides the pod's phase.
    fn count_sidecar(&mut self, step: &ContainerProgress) {
        match step {
            ContainerProgress::Waiting => self.waiting += 1,
            ContainerProgress::Running { started } => {
                self.starting_sidecars += u32::from(!started);
                self.running += 1;
            }
            ContainerProgress::Exited { .. } => {}
        }
    }

    fn count(&mut self, container: &Container, spec: &PodSpec, step: &ContainerProgress) {
        match *step {
            ContainerProgress::Waiting => self.waiting += 1,
            ContainerProgress::Running { .. } => self.running += 1,
            ContainerProgress::Exited { code, starts_again } => {
                self.stopped += 1;
                self.stopped_for_good += u32::from(!starts_again && !restarts_after(container, spec, code));
                // A container that waits to restart has not succeeded, whatever its last exit code.
                self.succeeded += u32::from(code == 0 && !starts_again);
            }
        }
    }

    fn outcome(&self) -> &'static str {
        if self.stopped == self.succeeded { SUCCEEDED } else { FAILED }
    }
}

/// A container status, reduced to what the phase depends on.
enum ContainerProgress {
    /// Has never run.
    Waiting,
    Running {
        started: bool,
    },
    /// Has run and exited; `starts_again` when its next start is decided, whatever its exit code.
    Exited {
        code: i32,
        starts_again: bool,
    },
}

impl ContainerProgress {
    /// A container without a status has never run.
    fn of(name: &str, statuses: Option<&[ContainerStatus]>) -> ContainerProgress {
        let Some(status) = statuses.into_iter().flatten().find(|status| status.name == name) else {
            return ContainerProgress::Waiting;
        };
        if status.state.as_ref().is_some_and(|state| state.running.is_some()) {
            return ContainerProgress::Running { started: status.started == Some(true) };
        }
        let exit_of = |state: &Option<ContainerState>| Some(state.as_ref()?.terminated.as_ref()?.exit_code);
        match (exit_of(&status.state), exit_of(&status.last_state)) {
            (Some(code), _) => ContainerProgress::Exited { code, starts_again: false },
            (None, Some(code)) => ContainerProgress::Exited { code, starts_again: true },
            (None, None) => ContainerProgress::Waiting,
        }
    }
}

/// Some regular container exists in the current sandbox: the pod has been initialized, even if a sidecar is restarting.
fn any_active_regular_container(input: &StatusInput<'_>, spec: &PodSpec) -> bool {
    let active = input.facts.newest_sandbox().filter(|sandbox| sandbox.state == SandboxState::Ready);
    active.is_some_and(|sandbox| {
        let mut inside = input.facts.containers.iter().filter(|container| container.sandbox == sandbox.id);
        inside.any(|container| spec.containers.iter().any(|wanted| wanted.name == container.name))
    })
}
