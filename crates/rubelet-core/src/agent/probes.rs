//! Probes of a pod: sending those that are due, and what their answers mean for its status.
//!
//! Owns: the way between `probes.rs` and the loop. Never: decides when or how to probe, or what a verdict leads to.
//! Upstream: `prober.go` (probe), the probe arms of `syncLoopIteration`.

use k8s_openapi::api::core::v1::PodStatus;

use crate::{
    agent::Agent,
    effect::{EffectError, EventRecord, Facts, Severity},
    event_reasons,
    flights::{PodSubject, Subject},
    id::{ContainerId, PodUid},
    observation::PodFacts,
    op::ContainerOp,
    pod::{Lifecycle, PodRecord, sync_pod::event},
    probes::{
        Due, Health, ProbeAction, ProbeKind, ProbeOutcome, ProbeRequest, Probed, ProbedStage,
        order::{needs_pod_ip, timeout},
    },
    status_manager::{self, Readiness, Startup},
    time::Now,
};

impl Agent {
    /// To be called with the status made from these facts in place.
    pub(super) fn probe_pod(&mut self, uid: &PodUid, facts: &PodFacts, now: Now) {
        let Some(status) = self.statuses.pod_status(uid, &self.pods).cloned() else { return };
        let Some(record) = self.records.get_mut(uid) else { return };
        let pod = record.pod.clone();
        let Some(spec) = pod.spec.as_ref() else { return };
        let stage = match record.lifecycle {
            Lifecycle::Waiting | Lifecycle::Syncing => ProbedStage::Running,
            Lifecycle::Terminating { .. } | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => {
                ProbedStage::Ending
            }
        };
        let probed = Probed { spec, facts, status: &status, stage };
        for (id, kind) in record.probes.observe(&probed, now) {
            self.outbox.cancel(&Subject::Pod(uid.clone(), PodSubject::Probe(id, kind)));
        }
        for due in record.probes.due(&probed, now) {
            match order(record, &due, &status) {
                Some(Ok(order)) => {
                    record.probes.sent(&due.id, due.kind, now);
                    let subject = Subject::Pod(uid.clone(), PodSubject::Probe(due.id, due.kind));
                    let op = ContainerOp::Probe(order);
                    self.outbox.send(subject, op, "probe is due".to_owned(), &self.settings, now);
                }
                Some(Err(outcome)) => {
                    record.probes.skipped(&due.id, due.kind, now);
                    let told = tell(record, &due.container.name, due.kind, &outcome);
                    told.into_iter().for_each(|event| self.outbox.record(event));
                }
                // Its address is not known yet; the look that shows it brings us back here.
                None => {}
            }
        }
    }

    pub(super) fn probe_done(
        &mut self,
        uid: &PodUid,
        id: &ContainerId,
        kind: ProbeKind,
        result: Result<Facts, EffectError>,
        now: Now,
    ) {
        let outcome = match result {
            Ok(Facts::Probe(outcome)) => outcome,
            Ok(other) => ProbeOutcome::Unknown(format!("unexpected answer {other:?}")),
            Err(error) => ProbeOutcome::Unknown(error.message),
        };
        let Some(record) = self.records.get_mut(uid) else { return };
        let Some(done) = record.probes.done(id, kind, &outcome) else { return };
        let told = tell(record, &done.container, kind, &outcome);
        told.into_iter().for_each(|event| self.outbox.record(event));
        let Some(health) = done.changed else { return };
        let is_passing = health == Health::Passing;
        let context = status_manager::Context { pods: &self.pods, now };
        match kind {
            // What follows is planned at the end of this turn.
            ProbeKind::Liveness => {}
            ProbeKind::Readiness => {
                let readiness = if is_passing { Readiness::Ready } else { Readiness::Unready };
                self.statuses.set_container_readiness(uid, id, readiness, context);
            }
            ProbeKind::Startup => {
                let startup = if is_passing { Startup::Started } else { Startup::NotStarted };
                self.statuses.set_container_startup(uid, id, startup, context);
            }
        }
    }
}

/// `None` while the pod has no address and the probe needs it.
fn order(record: &PodRecord, due: &Due<'_>, status: &PodStatus) -> Option<Result<ProbeRequest, ProbeOutcome>> {
    let probe = due.kind.of(due.container)?;
    let known_ip = status.pod_ip.as_deref().filter(|ip| !ip.is_empty());
    let pod_ip = match known_ip {
        Some(ip) => ip,
        // The node does not know its own address, and is its own host all the same.
        None if record.uses_host_network() => "127.0.0.1",
        None if needs_pod_ip(probe) => return None,
        None => "",
    };
    let action = match ProbeAction::of(probe, due.container, pod_ip) {
        Ok(action) => action,
        Err(error) => return Some(Err(ProbeOutcome::Unknown(error.to_string()))),
    };
    Some(Ok(ProbeRequest {
        pod: record.id.clone(),
        container: due.container.name.clone(),
        id: due.id.clone(),
        kind: due.kind,
        action,
        timeout: timeout(probe),
    }))
}

/// What people are told of a probe: nothing when all is well.
fn tell(record: &PodRecord, container: &str, kind: ProbeKind, outcome: &ProbeOutcome) -> Option<EventRecord> {
    let kind = kind.as_str();
    let (reason, message) = match outcome {
        ProbeOutcome::Success => return None,
        ProbeOutcome::Warning(text) => {
            (event_reasons::CONTAINER_PROBE_WARNING, format!("{kind} probe warning: {text}"))
        }
        ProbeOutcome::Failure(text) => (event_reasons::CONTAINER_UNHEALTHY, format!("{kind} probe failed: {text}")),
        ProbeOutcome::Discarded(text) => {
            (event_reasons::CONTAINER_UNHEALTHY, format!("{kind} probe errored and resulted in failure state: {text}"))
        }
        ProbeOutcome::Unknown(text) => {
            (event_reasons::CONTAINER_UNHEALTHY, format!("{kind} probe errored and resulted in unknown state: {text}"))
        }
    };
    Some(event(record, container, Severity::Warning, reason, message))
}
