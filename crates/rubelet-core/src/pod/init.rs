//! The progress of a pod's initialization.
//!
//! Owns: the order of init containers, and the restarts of sidecars (init containers that keep running).
//! Only containers of the current sandbox count: a new sandbox is initialized again.
//! Upstream: `computeInitContainerActions`.

use k8s_openapi::api::core::v1::Container;

use crate::{
    observation::{ContainerFacts, ContainerState, PodFacts, SandboxFacts},
    pod::{
        PodRecord,
        containers::{AfterStop, ContainerToKill, grace_after_probe},
        plan::PodState,
        restart_policy::{is_sidecar, restarts_after},
    },
};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct InitPlan<'a> {
    /// Regular containers may run.
    pub initialized: bool,
    /// An init container failed and will not be restarted: the pod has failed.
    pub failed: bool,
    /// To be started, in this order.
    pub start: Vec<&'a Container>,
    /// To be stopped and restarted.
    pub stop: Vec<ContainerToKill<'a>>,
}

pub fn init_plan<'a>(record: PodState<'a>, facts: &'a PodFacts, sandbox: &SandboxFacts) -> InitPlan<'a> {
    let init_containers = record.record.init_containers();
    let in_sandbox =
        |name: &str| facts.containers.iter().find(|known| known.name == name && known.sandbox == sandbox.id);
    let main_was_created = record.containers().iter().any(|main| in_sandbox(&main.name).is_some());
    let reached = init_containers.iter().rposition(|init| in_sandbox(&init.name).is_some());

    let mut plan = InitPlan::default();
    let next = match reached {
        _ if main_was_created => Next::Initialized,
        None => Next::StartAt(0),
        Some(index) => next_after(record, index, in_sandbox(&init_containers[index].name), &mut plan),
    };
    // Sidecars before the current init container keep running meanwhile.
    let settled = match next {
        Next::Initialized => init_containers.len(),
        Next::StartAt(index) => index,
        Next::Wait => reached.unwrap_or(0),
        Next::Failed => return InitPlan { failed: true, ..InitPlan::default() },
    };
    for sidecar in init_containers[..settled.min(init_containers.len())].iter().filter(|init| is_sidecar(init)) {
        keep_running(&record, sidecar, in_sandbox(&sidecar.name), &mut plan);
    }
    match next {
        Next::Initialized => plan.initialized = true,
        Next::StartAt(index) if index >= init_containers.len() => plan.initialized = true,
        Next::StartAt(index) => plan.start.push(&init_containers[index]),
        Next::Wait | Next::Failed => {}
    }
    plan
}

enum Next {
    Initialized,
    /// May be one past the last: then the pod is initialized.
    StartAt(usize),
    Wait,
    Failed,
}

/// What follows from the state of the last init container that exists.
fn next_after<'a>(
    record: PodState<'a>,
    index: usize,
    known: Option<&'a ContainerFacts>,
    plan: &mut InitPlan<'a>,
) -> Next {
    let container = &record.init_containers()[index];
    let Some(known) = known else { return Next::StartAt(index) };
    match &known.state {
        ContainerState::Created => Next::StartAt(index),
        ContainerState::Running { .. } if is_sidecar(container) => {
            let is_held = record.is_post_starting(container) || record.instance(&known.id).has_post_start_failed;
            if !is_held && record.probes.has_started(container, &known.id) {
                return Next::StartAt(index + 1);
            }
            plan.stop.extend(unhealthy(&record, container, known));
            Next::Wait
        }
        ContainerState::Running { .. } => Next::Wait,
        ContainerState::Exited(_) if is_sidecar(container) => Next::StartAt(index),
        ContainerState::Exited(exit) if exit.code == 0 => Next::StartAt(index + 1),
        ContainerState::Exited(exit) => {
            if restarts_after(container, record.spec(), exit.code) {
                Next::StartAt(index)
            } else {
                Next::Failed
            }
        }
        ContainerState::Unknown => {
            plan.stop.push(unknown(&record, known));
            Next::Wait
        }
    }
}

fn keep_running<'a>(
    record: &PodRecord,
    sidecar: &'a Container,
    known: Option<&'a ContainerFacts>,
    plan: &mut InitPlan<'a>,
) {
    let Some(known) = known else { return plan.start.push(sidecar) };
    match &known.state {
        ContainerState::Running { .. } => {
            let changed = known.hash.is_some_and(|hash| hash != crate::container::hash(sidecar));
            if changed {
                let why = format!("Init container {} definition changed", sidecar.name);
                plan.stop.push(ContainerToKill {
                    running: known,
                    why,
                    grace_secs: record.grace_secs(),
                    then: AfterStop::Restart,
                });
            } else {
                plan.stop.extend(unhealthy(record, sidecar, known));
            }
        }
        ContainerState::Unknown => plan.stop.push(unknown(record, known)),
        ContainerState::Created | ContainerState::Exited(_) => plan.start.push(sidecar),
    }
}

fn unhealthy<'a>(record: &PodRecord, sidecar: &Container, known: &'a ContainerFacts) -> Option<ContainerToKill<'a>> {
    if record.instance(&known.id).has_post_start_failed {
        let why = "FailedPostStartHook".to_owned();
        return Some(ContainerToKill {
            running: known,
            why,
            grace_secs: record.grace_secs(),
            then: AfterStop::Restart,
        });
    }
    let probe = record.probes.failure(&known.id)?;
    let why = format!("Init container {} failed {} probe", sidecar.name, probe.as_str().to_lowercase());
    Some(ContainerToKill {
        running: known,
        why,
        grace_secs: grace_after_probe(record, sidecar, probe),
        then: AfterStop::Restart,
    })
}

fn unknown<'a>(record: &PodRecord, known: &'a ContainerFacts) -> ContainerToKill<'a> {
    let why = "Init container is in \"unknown\" state, try killing it before restart".to_owned();
    ContainerToKill { running: known, why, grace_secs: record.grace_secs(), then: AfterStop::Restart }
}
