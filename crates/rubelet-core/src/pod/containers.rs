//! Which regular containers are to start, to stop, or to stay as they are?
//!
//! Owns: the verdict per regular container once the pod is initialized.
//! Upstream: the second half of `computePodActions`, `ShouldContainerBeRestarted`.

use k8s_openapi::api::core::v1::Container;

use crate::{
    observation::{ContainerFacts, ContainerState, PodFacts},
    pod::{
        PodRecord,
        restart_policy::{restarts_after, restarts_after_probe},
    },
    probes::ProbeKind,
};

#[derive(Clone, Debug, PartialEq)]
pub enum Verdict<'a> {
    Keep,
    Start,
    /// It is started again when it is gone, if its restart policy says so.
    Stop(Stop<'a>),
    /// It ended, and its restart policy says that this was it.
    Done,
}

/// An instance to be stopped while its pod goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Stop<'a> {
    pub running: &'a ContainerFacts,
    pub why: String,
    pub grace_secs: i64,
}

pub fn verdict<'a>(record: &PodRecord, container: &Container, facts: &'a PodFacts) -> Verdict<'a> {
    let Some(known) = facts.newest_container(&container.name) else { return Verdict::Start };
    match &known.state {
        ContainerState::Running { .. } => {
            let changed = known.hash.is_some_and(|hash| hash != crate::container::hash(container));
            if changed {
                let why = format!("Container {} definition changed, will be restarted", container.name);
                return Verdict::Stop(Stop { running: known, why, grace_secs: record.grace_secs() });
            }
            if record.post_start_failed.contains(&known.id) {
                let why = "FailedPostStartHook".to_owned();
                return Verdict::Stop(Stop { running: known, why, grace_secs: record.grace_secs() });
            }
            let Some(probe) = record.probes.failure(&known.id) else { return Verdict::Keep };
            let what_follows = if restarts_after_probe(container, record.spec()) { ", will be restarted" } else { "" };
            let name = probe.as_str().to_lowercase();
            let why = format!("Container {} failed {name} probe{what_follows}", container.name);
            Verdict::Stop(Stop { running: known, why, grace_secs: grace_after_probe(record, container, probe) })
        }
        ContainerState::Unknown => {
            let why = "Container is in \"unknown\" state, try killing it before restart".to_owned();
            Verdict::Stop(Stop { running: known, why, grace_secs: record.grace_secs() })
        }
        ContainerState::Created => Verdict::Start,
        ContainerState::Exited(exit) if restarts_after(container, record.spec(), exit.code) => Verdict::Start,
        ContainerState::Exited(_) if record.is_restarting(container, known) => Verdict::Start,
        ContainerState::Exited(_) => Verdict::Done,
    }
}

/// The probe may grant its container another grace period than the pod's.
pub fn grace_after_probe(record: &PodRecord, container: &Container, probe: ProbeKind) -> i64 {
    if record.pod.metadata.deletion_grace_period_seconds.is_some() {
        return record.grace_secs();
    }
    let own = probe.of(container).and_then(|probe| probe.termination_grace_period_seconds);
    own.unwrap_or_else(|| record.grace_secs())
}

impl PodRecord {
    /// The container was stopped for a failed probe and is to run again, whatever it exited with.
    pub fn is_restarting(&self, container: &Container, ended: &ContainerFacts) -> bool {
        self.probes.failure(&ended.id).is_some() && restarts_after_probe(container, self.spec())
    }
}
