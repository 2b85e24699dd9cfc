//! The plan for one pod: its next steps and its status.
//!
//! Owns: the order (status, deadline, termination, steps, waiting) and the gathering of the inputs.
//! Never: changes anything; `agent/sync.rs` carries plans out.
//! Upstream: the beginning of `Kubelet.SyncPod`, `active_deadline.go`.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::PodStatus;

use crate::{
    agent::Agent,
    effect::{EventRecord, InvolvedObject, Severity},
    images::ImageTarget,
    observation::PodFacts,
    pod::{
        Lifecycle, PodRecord,
        allocation::is_resize_pending,
        plan::{Plan, PodState, WaitsFor},
        status::{self, FailureReason, PodFailure, PodWorkerState, StatusInput, Waiting},
        sync_pod::{self, SyncContext},
        termination,
    },
    status_manager::RunningContainers,
    time::Now,
};

const OVER_DEADLINE: &str = "Pod was active on the node longer than the specified deadline";

impl Agent {
    /// `shown` are the facts as a status shows them.
    pub(super) fn plan_pod(&self, state: PodState<'_>, shown: &PodFacts, now: Now) -> Plan {
        let known = self.waiting_of(&state);
        let mut status = self.status_of(&state, shown, &known, None, now);
        let failure = status.as_ref().and_then(|status| exceeded_deadline(&state, status, now));
        if failure.is_some() {
            status = self.status_of(&state, shown, &known, failure.as_ref(), now);
        }
        let is_terminal = status.as_ref().and_then(|status| status.phase.as_deref()).is_some_and(status::is_terminal);
        let mut plan = if is_terminal && state.lifecycle == Lifecycle::Syncing && state.fresh_facts().is_some() {
            Plan { is_over: true, ..Plan::default() }
        } else {
            self.steps_of(state, status.as_ref(), now)
        };
        if plan.waiting.iter().any(|(name, waiting)| known.get(name) != Some(waiting)) {
            let waiting = known.into_iter().chain(plan.waiting.clone()).collect();
            status = self.status_of(&state, shown, &waiting, failure.as_ref(), now);
        }
        if let Some(failure) = &failure {
            let (about, reason) = (InvolvedObject::Pod(state.id.clone()), failure.reason.to_string());
            let message = failure.message.clone();
            plan.events.insert(0, EventRecord::new(about, Severity::Normal, reason, message));
        }
        if let Lifecycle::Terminating { grace, cause, containers: RunningContainers::Possible } = state.lifecycle {
            let containers = state.running_containers();
            plan.next.get_or_insert(Lifecycle::Terminating { grace, cause, containers });
        }
        let start_time = status.as_ref().and_then(|status| status.start_time.as_ref());
        let deadline = start_time.and_then(|start| state.active_deadline(start.0, now));
        let moments = [plan.wake_at, state.next_retry(now), deadline];
        plan.wake_at = moments.into_iter().flatten().filter(|moment| *moment > now.uptime).min();
        Plan { status, failure, ..plan }
    }

    /// The steps, if the runtime is up and the facts are fresh.
    fn steps_of(&self, state: PodState<'_>, status: Option<&PodStatus>, now: Now) -> Plan {
        if let Some(problem) = &self.node.runtime_problem {
            return Plan { waits_for: Some(WaitsFor::Runtime(problem.message.clone())), ..Plan::default() };
        }
        let Some(facts) = state.fresh_facts() else { return Plan::default() };
        match state.lifecycle {
            Lifecycle::Waiting => Plan::default(),
            Lifecycle::Syncing => {
                let network_problem = self.node.network_problem.as_ref().map(|problem| problem.message.as_str());
                let settings = &self.settings;
                let (images, host_ips) = (&self.images, self.node.host_ips(settings));
                let (runtime, cgroups) = (&self.node.status, self.cgroups());
                let reported = status.and_then(|status| self.statuses.once_set(&state.pod, status, &self.pods));
                let (devices, node) = (&self.node.devices, self.node.object.as_ref());
                let context = SyncContext {
                    images,
                    network_problem,
                    host_ips,
                    runtime,
                    cgroups,
                    settings,
                    devices,
                    node,
                    reported,
                };
                sync_pod::plan(state, facts, context, now)
            }
            Lifecycle::Terminating { grace, cause, .. } => termination::terminating(state, facts, grace, cause, now),
            Lifecycle::Terminated { cause } | Lifecycle::Finished { cause } => {
                termination::ended(state, facts, cause, self.cgroups(), now)
            }
        }
    }

    /// Why containers do not run yet, by name.
    fn waiting_of(&self, record: &PodRecord) -> BTreeMap<String, Waiting> {
        let mut waiting = record.waiting();
        let names = record.init_containers().iter().chain(record.containers()).map(|container| &container.name);
        for name in names.chain(record.ephemeral_containers().iter().map(|container| &container.name)) {
            if let Some(for_image) = self.images.waiting(&record.id.uid, &ImageTarget::Container(name.clone())) {
                waiting.insert(name.clone(), for_image.clone());
            }
        }
        waiting
    }

    /// `None` for a pod that only the runtime has.
    fn status_of(
        &self,
        record: &PodRecord,
        facts: &PodFacts,
        waiting: &BTreeMap<String, Waiting>,
        new_failure: Option<&PodFailure>,
        now: Now,
    ) -> Option<PodStatus> {
        record.pod.spec.as_ref()?;
        if let Some(failure) = &record.rejected {
            return Some(status::rejected(&record.pod, failure));
        }
        let uid = &record.id.uid;
        let previous = self.statuses.pod_status(uid, &self.pods).map(Arc::as_ref);
        if record.has_ended_in_api()
            && let Some(last) = previous.or(record.pod.status.as_ref())
            && status::never_ran(last, facts)
        {
            return Some(last.clone());
        }
        Some(status::pod_status(&StatusInput {
            pod: &record.pod,
            facts,
            previous,
            stored: self.pods.api_pod(uid).and_then(|stored| stored.status.as_ref()),
            waiting,
            restarting: &record.restarting(),
            is_resize_pending: self.pods.pod_by_uid(uid).is_some_and(|desired| is_resize_pending(desired, &record.pod)),
            worker_state: worker_state(&record.lifecycle),
            host_ips: self.node.host_ips(&self.settings),
            runtime: &self.node.status,
            failed: record.failure.as_ref().or(new_failure),
            now,
        }))
    }
}

/// A pod that exceeds its active deadline has failed.
fn exceeded_deadline(record: &PodRecord, status: &PodStatus, now: Now) -> Option<PodFailure> {
    let is_terminal = status.phase.as_deref().is_some_and(status::is_terminal);
    let start = status.start_time.as_ref().filter(|_| !is_terminal)?;
    let is_over = record.active_deadline(start.0, now)? <= now.uptime;
    is_over.then(|| PodFailure::new(FailureReason::DeadlineExceeded, OVER_DEADLINE))
}

fn worker_state(lifecycle: &Lifecycle) -> PodWorkerState {
    match lifecycle {
        Lifecycle::Waiting | Lifecycle::Syncing => PodWorkerState::Syncing,
        Lifecycle::Terminating { .. } => PodWorkerState::Terminating,
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => PodWorkerState::Terminated,
    }
}
