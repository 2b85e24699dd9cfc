//! Preemption for a critical pod: ends the chosen pods, and waits until they have released their resources.
//!
//! Owns: what a critical pod waits for, and for how long. The choice is in `preemption.rs`.
//! Upstream: `CriticalPodAdmissionHandler.evictPodsToFreeRequests`, `killPodNow`.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::{
    admission::AdmitResult,
    agent::Agent,
    effect::{EventRecord, InvolvedObject, Severity},
    id::PodUid,
    pod::{Lifecycle, PodRecord, plan::WaitsFor},
    preemption::{self, Requirement},
    time::{Now, Uptime},
};

/// A critical pod waits for a terminating one for half as long again as its grace period, and for no less than this, as
/// upstream.
const MINIMUM_WAIT: Duration = Duration::from_secs(10);

impl Agent {
    /// A critical pod lacks only resources. It is admitted when the pods that hold them have ended or will not end in time;
    /// until then the result is `Preempt`. `holders` are the pods that count in its admission.
    pub(super) fn make_room(
        &mut self,
        uid: &PodUid,
        missing: Vec<Requirement>,
        holders: &[PodUid],
        now: Now,
    ) -> AdmitResult {
        let (ending, running): (Vec<&PodRecord>, Vec<&PodRecord>) = holders
            .iter()
            .filter_map(|holder| self.records.get(holder))
            .partition(|record| overdue_at(record).is_some());
        // Pods that terminate anyway make room, too: no other is preempted in their place.
        let specs: Vec<&Pod> = ending.iter().map(|record| &*record.pod).collect();
        let left = preemption::remaining(&missing, &specs);
        let candidates: Vec<&Pod> = running.iter().map(|record| &*record.pod).collect();
        let victims = match preemption::pods_to_preempt(&self.records[uid].pod, &candidates, &left) {
            Ok(victims) => victims.into_iter().map(PodUid::of).collect::<Vec<_>>(),
            Err(unmet) => return AdmitResult::Reject(preemption::rejection(&unmet)),
        };
        let ending = ending.into_iter().filter(|record| preemption::releases_some(&record.pod, &missing));
        let mut awaited: Vec<PodUid> = ending.map(|record| record.id.uid.clone()).collect();
        for victim in victims {
            self.preempt(&victim, &left, now);
            awaited.push(victim);
        }
        let awaited = awaited.iter().map(|uid| &self.records[uid]);
        let awaited: Vec<(Uptime, &PodRecord)> = awaited
            .filter_map(|record| Some((overdue_at(record)?, record)))
            .filter(|(overdue_at, _)| *overdue_at > now.uptime)
            .collect();
        let Some(wake_at) = awaited.iter().map(|(moment, _)| *moment).min() else { return AdmitResult::Admit };
        let pods = awaited.iter().map(|(_, record)| record.id.clone()).collect();
        let record = self.records.get_mut(uid).expect("it waits");
        record.waits_for = Some(WaitsFor::Preemption(pods));
        record.wake_at = Some(wake_at);
        self.timers.set(uid, record.wake_at);
        AdmitResult::Preempt(missing)
    }

    fn preempt(&mut self, uid: &PodUid, missing: &[Requirement], now: Now) {
        let record = &self.records[uid];
        let (failure, grace_secs) = (preemption::failure(missing), record.grace_secs());
        self.outbox.record(EventRecord::new(
            InvolvedObject::Pod(record.id.clone()),
            Severity::Warning,
            failure.reason.to_string(),
            failure.message.clone(),
        ));
        self.fail_pod(uid, failure, grace_secs, now);
    }
}

/// Until when a critical pod waits for this one; `None` if it does not terminate.
fn overdue_at(record: &PodRecord) -> Option<Uptime> {
    match record.lifecycle {
        Lifecycle::Terminating { grace, .. } => {
            let grace = Duration::from_secs(grace.secs.unsigned_abs());
            Some(record.since.uptime + grace.saturating_mul(3).checked_div(2).unwrap_or(grace).max(MINIMUM_WAIT))
        }
        Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => None,
    }
}
