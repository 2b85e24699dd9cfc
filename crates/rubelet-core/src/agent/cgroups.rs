//! The QoS cgroups above the pods' cgroups, and cgroups of unknown pods.
//!
//! Owns: when they are set, and the events about them. Their content is in `cgroups.rs`.
//! Upstream: `UpdateQOSCgroups`, `enforceNodeAllocatableCgroups`, `cleanupOrphanedPodCgroups`.

use crate::{
    agent::Agent,
    cgroups::{CgroupTree, quoted_parts},
    effect::{EffectError, EventRecord, Facts, InvolvedObject, Severity},
    event_reasons,
    flights::Subject,
    id::{PodRef, PodUid},
    node::Routine,
    op::NodeOp,
    pod::{Lifecycle, PodRecord},
    time::Now,
};

impl Agent {
    pub(super) fn cgroups(&self) -> Option<CgroupTree<'_>> {
        CgroupTree::new(&self.settings, self.node.status.cgroup_driver)
    }

    /// At a turn's end: pods that were added or removed change the CPU shares of their QoS class.
    pub(super) fn sync_qos_cgroups(&mut self, now: Now) {
        if !self.node.may_sync_qos_cgroups(now) {
            return;
        }
        let Some(tree) = self.cgroups() else { return self.node.begin(Routine::SyncQosCgroups) };
        let cgroups = tree.qos_cgroups(self.records.values().filter(|record| is_active(record)).map(PodRecord::spec));
        self.node.qos.pods_changed = false;
        let is_due = self.node.due(now).contains(&Routine::SyncQosCgroups);
        if cgroups == self.node.qos.cgroups && !is_due {
            return;
        }
        self.node.qos.cgroups.clone_from(&cgroups);
        let op = NodeOp::SyncQosCgroups { cgroups };
        self.node.begin(Routine::SyncQosCgroups);
        let reason = "QoS cgroup sync is due".to_owned();
        self.outbox.send(Subject::Node(Routine::SyncQosCgroups), op, reason, &self.settings, now);
    }

    pub(super) fn qos_cgroups_synced(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let outcome = result.as_ref().map(drop).map_err(|error| error.message.clone());
        if self.node.qos_cgroups_synced(outcome.clone(), now) {
            let kubepods = self.node.qos.cgroups.first().map(|cgroup| quoted_parts(&cgroup.path)).unwrap_or_default();
            let (severity, reason, message) = match outcome {
                Ok(()) => (
                    Severity::Normal,
                    event_reasons::SUCCESSFUL_NODE_ALLOCATABLE_ENFORCEMENT,
                    "Updated Node Allocatable limit across pods".to_owned(),
                ),
                Err(problem) => (
                    Severity::Warning,
                    event_reasons::FAILED_NODE_ALLOCATABLE_ENFORCEMENT,
                    format!("Failed to update Node Allocatable Limits {kubepods}: {problem}"),
                ),
            };
            self.outbox.record(EventRecord::new(InvolvedObject::Node, severity, reason, message));
        }
        if let Ok(Facts::Cgroups { names }) = result {
            self.adopt_cgroups(&names, now);
        }
    }

    /// A cgroup of an unknown pod is removed like that of a terminated pod.
    fn adopt_cgroups(&mut self, names: &[String], now: Now) {
        let Some(tree) = self.cgroups() else { return };
        // A pod that was removed while the cgroups were listed is no orphan.
        let known = self.records.keys().chain(self.node.gone.keys()).chain(&self.config.unreadable);
        let known: Vec<&PodUid> = known.collect();
        let named = names.iter().filter_map(|name| tree.uid_of(name));
        let orphans: Vec<PodUid> = named.filter(|uid| !known.iter().any(|pod| tree.may_be(uid, pod))).collect();
        for uid in orphans {
            self.adopt_orphan(PodRef::unnamed(uid), now);
        }
    }
}

/// The pod's requests count.
fn is_active(record: &PodRecord) -> bool {
    match record.lifecycle {
        Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminating { .. } => true,
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => false,
    }
}
