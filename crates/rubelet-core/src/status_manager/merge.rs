//! Merging our status with the one in the API server.
//!
//! Owns: which side wins in each field. Never: the patch itself.
//! Upstream: `mergePodStatus`.

use k8s_openapi::{
    api::core::v1::{Pod, PodCondition, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde::{Deserialize, Serialize};

use crate::{
    pod::status::{
        conditions::{
            CONTAINERS_READY, DISRUPTION_TARGET, READY, condition_of_ended_pod, find, is_owned, replace_or_append,
        },
        is_terminal,
    },
    pod_manager::is_mirror_pod,
    time::Now,
};

/// Whether some container of the pod may still run, and so hold resources another pod waits for. Upstream:
/// `CouldHaveRunningContainers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunningContainers {
    None,
    Possible,
}

/// `stored` is the API object. Conditions of other owners are kept; the phase is not terminal while something may run; a
/// terminated pod is never ready.
pub fn merge_pod_status(stored: &Pod, ours: &PodStatus, running: RunningContainers, now: Now) -> PodStatus {
    let nothing = PodStatus::default();
    let old = stored.status.as_ref().unwrap_or(&nothing);
    // A static pod that a shutdown ended runs again under its mirror pod.
    let runs_again = is_mirror_pod(stored) && !has_ended(ours);
    let is_kept = |it: &&PodCondition| !is_owned(&it.type_) && (!runs_again || it.type_ != DISRUPTION_TARGET);
    let theirs = old.conditions.iter().flatten().filter(is_kept);
    let owned = ours.conditions.iter().flatten().filter(|condition| is_owned(&condition.type_));
    let owned = owned.map(|condition| dated_as_stored(condition, old));
    let mut merged = PodStatus {
        conditions: Some(theirs.cloned().chain(owned).collect()),
        resource_claim_statuses: old.resource_claim_statuses.clone(),
        extended_resource_claim_status: old.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: old.node_allocatable_resource_claim_statuses.clone(),
        ..ours.clone()
    };
    let ends = has_ended(ours) && !has_ended(old);
    match running {
        RunningContainers::None if ends => add_disruption(old, ours, &mut merged, now),
        RunningContainers::Possible if ends => {
            merged.phase.clone_from(&old.phase);
            merged.reason.clone_from(&old.reason);
            merged.message.clone_from(&old.message);
        }
        RunningContainers::None | RunningContainers::Possible => {}
    }
    withdraw_readiness_of_ended_pod(stored, &mut merged, now);
    merged
}

/// A date changes only with its condition: after a restart ours may be a guess, and no reason to write.
fn dated_as_stored(condition: &PodCondition, old: &PodStatus) -> PodCondition {
    let known = find(old, &condition.type_).filter(|known| known.status == condition.status);
    let kept = known.and_then(|known| known.last_transition_time.clone());
    let date = kept.or_else(|| condition.last_transition_time.clone());
    PodCondition { last_transition_time: date, ..condition.clone() }
}

fn has_ended(status: &PodStatus) -> bool {
    status.phase.as_deref().is_some_and(is_terminal)
}

/// Sent only with the terminal phase, so it is dated by that, not by when it was decided.
fn add_disruption(old: &PodStatus, ours: &PodStatus, merged: &mut PodStatus, now: Now) {
    let Some(disruption) = find(ours, DISRUPTION_TARGET) else { return };
    let known = find(old, DISRUPTION_TARGET).filter(|known| known.status == disruption.status);
    let date = known.and_then(|known| known.last_transition_time.clone()).unwrap_or(Time(now.wall));
    let disruption = PodCondition { last_transition_time: Some(date), ..disruption.clone() };
    replace_or_append(merged.conditions.get_or_insert_default(), disruption);
}

fn withdraw_readiness_of_ended_pod(pod: &Pod, status: &mut PodStatus, now: Now) {
    let is_true = |condition_type| find(status, condition_type).is_some_and(|condition| condition.status == "True");
    let Some(phase) = status.phase.clone().filter(|phase| is_terminal(phase)) else { return };
    if !is_true(READY) && !is_true(CONTAINERS_READY) {
        return;
    }
    for condition_type in [CONTAINERS_READY, READY] {
        let before = find(status, condition_type).filter(|before| before.status == "False");
        let date = before.and_then(|before| before.last_transition_time.clone()).unwrap_or(Time(now.wall));
        let condition = condition_of_ended_pod(condition_type, pod, &phase);
        let condition = PodCondition { last_transition_time: Some(date), ..condition };
        replace_or_append(status.conditions.get_or_insert_default(), condition);
    }
}
