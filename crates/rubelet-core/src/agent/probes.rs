//! Probes of a pod: sends what `probes.rs` plans and applies the results to the status.
//!
//! Never: decides when or how to probe, or what a result leads to.
//! Upstream: `prober.go` (probe), the probe arms of `syncLoopIteration`.

use crate::{
    agent::Agent,
    effect::{EffectError, Facts},
    flights::{PodSubject, Subject},
    id::{ContainerId, PodUid},
    observation::PodFacts,
    op::ContainerOp,
    pod::Lifecycle,
    probes::{Health, ProbeKind, ProbeOutcome, Probed, ProbedStage},
    status_manager::{ContainerReadiness, Startup, StatusContext},
    time::Now,
};

impl Agent {
    /// Called after the status made from these facts is set.
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
        let own = self.outbox.pod_flights(uid).exec_probes();
        let slots = self.outbox.flights.exec_slots.available(uid, own);
        let steps = record.probes.plan(&Probed { id: &record.id, spec, facts, status: &status, stage }, slots, now);
        let subject = |id: ContainerId, kind: ProbeKind| Subject::Pod(uid.clone(), PodSubject::Probe(id, kind));
        for (id, kind) in steps.cancelled {
            self.outbox.cancel(&subject(id, kind));
        }
        for request in steps.requests {
            let subject = subject(request.id.clone(), request.kind);
            let op = ContainerOp::Probe(request);
            self.outbox.send(subject, op, "probe is due".to_owned(), &self.settings, now);
        }
        for event in steps.events {
            self.outbox.record(event);
        }
        if steps.waits_for_slot {
            let own = self.outbox.pod_flights(uid).exec_probes();
            self.outbox.flights.exec_slots.wait(uid, own);
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
        let Some(done) = record.probes.done(&record.id, id, kind, &outcome) else { return };
        if let Some(event) = done.event {
            self.outbox.record(event);
        }
        let Some(health) = done.changed else { return };
        let is_passing = health == Health::Passing;
        let context = StatusContext { pods: &self.pods, now };
        match kind {
            // The restart is planned at the end of this turn.
            ProbeKind::Liveness => {}
            ProbeKind::Readiness => {
                let readiness = if is_passing { ContainerReadiness::Ready } else { ContainerReadiness::Unready };
                self.statuses.set_container_readiness(uid, id, readiness, context);
            }
            ProbeKind::Startup => {
                let startup = if is_passing { Startup::Started } else { Startup::NotStarted };
                self.statuses.set_container_startup(uid, id, startup, context);
            }
        }
    }
}
