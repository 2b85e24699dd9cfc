//! Which regular containers start, stop or stay.
//!
//! Owns: the action for each regular container once the pod is initialized. A container whose definition changed, or whose
//! state is unknown, is restarted whatever its restart policy.
//! Upstream: the second half of `computePodActions`, `ShouldContainerBeRestarted`.

use k8s_openapi::api::core::v1::{Container, PodStatus};

use crate::{
    observation::{ContainerFacts, ContainerState, PodFacts},
    pod::{
        PodRecord,
        restart_policy::{restarts_after, restarts_after_probe},
        status::has_ended_for_good,
    },
    probes::ProbeKind,
};

#[derive(Clone, Debug, PartialEq)]
pub enum ContainerAction<'a> {
    Keep,
    Start,
    Stop(ContainerToKill<'a>),
    /// It exited, and its restart policy does not restart it.
    Done,
}

/// An instance to be stopped while its pod keeps running.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerToKill<'a> {
    pub running: &'a ContainerFacts,
    pub why: String,
    pub grace_secs: i64,
    pub then: AfterStop,
}

/// What follows the stop of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterStop {
    /// It is restarted, whatever its exit code.
    Restart,
    /// Its exit code and restart policy decide.
    ExitCode,
    /// The pod has no use for it any more.
    Nothing,
}

impl ContainerAction<'_> {
    /// The container runs or will run, so its pod keeps running. Upstream: `keepCount` and `ContainersToStart`.
    pub fn keeps_pod(&self) -> bool {
        match self {
            ContainerAction::Keep | ContainerAction::Start => true,
            ContainerAction::Stop(stop) => stop.then != AfterStop::Nothing,
            ContainerAction::Done => false,
        }
    }
}

pub fn container_action<'a>(
    record: &PodRecord,
    container: &Container,
    facts: &'a PodFacts,
    reported: Option<&PodStatus>,
) -> ContainerAction<'a> {
    let Some(known) = facts.newest_container(&container.name) else {
        return if is_reported_done(record, container, reported) {
            ContainerAction::Done
        } else {
            ContainerAction::Start
        };
    };
    let grace_secs = record.grace_secs();
    match &known.state {
        ContainerState::Running { .. } => {
            let changed = known.hash.is_some_and(|hash| hash != crate::container::hash(container));
            if changed {
                let why = format!("Container {} definition changed, will be restarted", container.name);
                return ContainerAction::Stop(ContainerToKill {
                    running: known,
                    why,
                    grace_secs,
                    then: AfterStop::Restart,
                });
            }
            if record.instance(&known.id).has_post_start_failed {
                let why = "FailedPostStartHook".to_owned();
                return ContainerAction::Stop(ContainerToKill {
                    running: known,
                    why,
                    grace_secs,
                    then: AfterStop::ExitCode,
                });
            }
            let Some(probe) = record.probes.failure(&known.id) else { return ContainerAction::Keep };
            let has_rules = container.restart_policy_rules.as_ref().is_some_and(|rules| !rules.is_empty());
            let (then, what_follows) = if restarts_after_probe(container, record.spec()) {
                (AfterStop::Restart, ", will be restarted")
            } else if has_rules {
                (AfterStop::ExitCode, "")
            } else {
                (AfterStop::Nothing, "")
            };
            let name = probe.as_str().to_lowercase();
            let why = format!("Container {} failed {name} probe{what_follows}", container.name);
            ContainerAction::Stop(ContainerToKill {
                running: known,
                why,
                grace_secs: grace_after_probe(record, container, probe),
                then,
            })
        }
        ContainerState::Unknown => {
            let why = "Container is in \"unknown\" state, try killing it before restart".to_owned();
            ContainerAction::Stop(ContainerToKill { running: known, why, grace_secs, then: AfterStop::Restart })
        }
        ContainerState::Created => ContainerAction::Start,
        ContainerState::Exited(exit) if restarts_after(container, record.spec(), exit.code) => ContainerAction::Start,
        ContainerState::Exited(_) if record.instance(&known.id).is_restarting => ContainerAction::Start,
        ContainerState::Exited(_) => ContainerAction::Done,
    }
}

/// The container was removed from the runtime after its final state was reported. Upstream starts it once more and cannot
/// detect this, because no status keeps its end.
fn is_reported_done(record: &PodRecord, container: &Container, reported: Option<&PodStatus>) -> bool {
    let mut statuses = reported.into_iter().flat_map(|reported| reported.container_statuses.iter().flatten());
    let status = statuses.find(|status| status.name == container.name);
    status.is_some_and(|status| has_ended_for_good(status, container, record.spec()))
}

/// A probe may set a grace period other than the pod's.
pub fn grace_after_probe(record: &PodRecord, container: &Container, probe: ProbeKind) -> i64 {
    if record.pod.metadata.deletion_grace_period_seconds.is_some() {
        return record.grace_secs();
    }
    let own = probe.of(container).and_then(|probe| probe.termination_grace_period_seconds);
    own.unwrap_or_else(|| record.grace_secs())
}
