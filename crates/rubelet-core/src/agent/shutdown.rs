//! A shutdown of the node: ends pods group by group, and says when the machine may go down.
//!
//! Owns: which pods of a group end, and when the group is done. The groups and their times are in `shutdown.rs`.
//! Upstream: `nodeshutdown.managerImpl.processShutdownEvent`, `podManager.killPods`.

use crate::{
    agent::Agent,
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    id::PodUid,
    pod::{Lifecycle, PodRecord, TerminationCause, status::FailureReason},
    pod_manager::is_static_pod,
    shutdown::{self, Shutdown, ShutdownSignal},
    time::Now,
};

impl Agent {
    /// A repeated signal changes nothing.
    pub(super) fn handle_shutdown(&mut self, signal: ShutdownSignal, now: Now) {
        match (signal, self.node.shutdown.is_under_way()) {
            (ShutdownSignal::Begins, true) | (ShutdownSignal::Cancelled, false) => {}
            (ShutdownSignal::Begins, false) if self.settings.shutdown_groups.is_empty() => {}
            (ShutdownSignal::Begins, false) => {
                self.record_shutdown("Shutdown manager detected shutdown event");
                self.node.shutdown = Shutdown::begin(&self.settings.shutdown_groups, now);
                self.touch_waiting_pods();
            }
            (ShutdownSignal::Cancelled, true) => {
                self.record_shutdown("Shutdown manager detected shutdown cancellation");
                self.node.shutdown = Shutdown::None;
                self.restart_static_pods(now);
            }
        }
    }

    fn record_shutdown(&mut self, message: &str) {
        self.outbox.record(EventRecord::new(
            InvolvedObject::Node,
            Severity::Normal,
            event_reasons::NODE_SHUTDOWN,
            message,
        ));
    }

    /// Ends the pods whose turn it is, and moves on when they have ended or their time is up.
    pub(super) fn advance_shutdown(&mut self, now: Now) {
        if !self.node.shutdown.is_under_way() {
            return;
        }
        self.end_pods_in_turn(now);
        while let Shutdown::Ending { group, ends_at, .. } = self.node.shutdown {
            // A pod of a source that has not been read, or that waits for the first relist, may be of this group.
            let are_pods_known = self.config.sources_ready(&self.settings.sources) && self.node.listing.is_some();
            let is_done = are_pods_known && !self.has_unfinished(group);
            if !is_done && now.uptime < ends_at {
                return;
            }
            let groups = &self.settings.shutdown_groups;
            let next = (group.saturating_add(1)..groups.len()).find(|next| self.has_unfinished(*next));
            self.node.shutdown = self.node.shutdown.after_group(next, groups, now);
            self.end_pods_in_turn(now);
        }
        if let Shutdown::Reporting { began, until } = self.node.shutdown {
            // A pod that was killed at the end of its time has its end to report, too.
            let have_ended = !self.records.values().any(is_unfinished);
            let is_reported = !self.settings.is_in_cluster() || !self.statuses.has_unsent(&self.pods);
            if (have_ended && is_reported) || until <= now.uptime {
                self.node.shutdown = Shutdown::Over { began_at: began.wall, ended_at: now.wall };
            }
        }
    }

    fn end_pods_in_turn(&mut self, now: Now) {
        for uid in self.records.keys().cloned().collect::<Vec<_>>() {
            self.end_pod_in_turn(&uid, now);
        }
    }

    /// Ends the pod if it is of a group whose turn has come, with the shorter of its own grace period and the group's time.
    pub(super) fn end_pod_in_turn(&mut self, uid: &PodUid, now: Now) {
        let Some((current, ends_at)) = self.node.shutdown.ending() else { return };
        let record = &self.records[uid];
        if self.group_of(record).is_some_and(|group| group <= current) && is_to_end(record) {
            let left_secs = i64::try_from(ends_at.since(now.uptime).as_secs()).unwrap_or(i64::MAX);
            let grace_secs = record.grace_secs().min(left_secs);
            self.fail_pod(uid, shutdown::failure(), grace_secs, now);
        }
    }

    /// `None` for a pod that is only in the runtime: it is being stopped anyway.
    fn group_of(&self, record: &PodRecord) -> Option<usize> {
        let spec = record.pod.spec.as_ref()?;
        Some(shutdown::group_of(&self.settings.shutdown_groups, spec))
    }

    fn has_unfinished(&self, group: usize) -> bool {
        self.records.values().any(|record| is_unfinished(record) && self.group_of(record) == Some(group))
    }

    /// API pods that ended stay ended. Static pods have no other node to run on.
    fn restart_static_pods(&mut self, now: Now) {
        let is_of_shutdown = |record: &&PodRecord| {
            let failures = [&record.failure, &record.rejected].into_iter().flatten();
            let mut reasons = failures.map(|failure| &failure.reason);
            is_static_pod(&record.pod)
                && reasons.any(|reason| matches!(reason, FailureReason::Terminated | FailureReason::NodeShutdown))
        };
        let ended: Vec<_> = self.records.values().filter(is_of_shutdown).map(|record| record.id.uid.clone()).collect();
        for uid in ended {
            let grace_secs = self.records[&uid].grace_secs();
            self.terminate(&uid, TerminationCause::Removed, grace_secs, now);
        }
    }
}

/// Admitted, and not ended by itself or by an earlier decision of the node.
fn is_to_end(record: &PodRecord) -> bool {
    let may_run = match record.lifecycle {
        Lifecycle::Syncing => !record.has_ended_in_api(),
        Lifecycle::Terminating { cause, .. } => cause == TerminationCause::Removed,
        Lifecycle::Waiting | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => false,
    };
    may_run && record.failure.is_none() && record.rejected.is_none()
}

/// Its containers may run, or its volumes may be mounted. A waiting pod is rejected.
fn is_unfinished(record: &PodRecord) -> bool {
    match record.lifecycle {
        Lifecycle::Waiting | Lifecycle::Finished { .. } => false,
        Lifecycle::Syncing | Lifecycle::Terminating { .. } | Lifecycle::Terminated { .. } => !record.is_released(),
    }
}
