//! The cgroups above the pods', and cgroups of pods nobody knows.
//!
//! Owns: when they are set, and what of them is told. What they should be is in `cgroups.rs`.
//! Upstream: `UpdateQOSCgroups`, `enforceNodeAllocatableCgroups`, `cleanupOrphanedPodCgroups`.

use crate::{
    agent::Agent,
    cgroups::CgroupTree,
    effect::{About, EffectError, EventRecord, Facts, Severity},
    id::{PodRef, PodUid},
    node::Routine,
    op::{NodeOp, Op},
    pod::{Lifecycle, PodRecord},
    time::Now,
};

impl Agent {
    pub(super) fn cgroups(&self) -> Option<CgroupTree<'_>> {
        CgroupTree::new(&self.settings, self.node.status.cgroup_driver)
    }

    /// At a turn's end: pods that came or went change the share of their class.
    pub(super) fn sync_qos_cgroups(&mut self, now: Now) {
        if !self.node.is_ready() || !self.node.qos.is_wanted(now) {
            return;
        }
        let Some(tree) = self.cgroups() else { return self.node.qos.never() };
        let tiers = tree.tiers(self.records.values().filter(|record| is_active(record)).map(PodRecord::spec));
        self.node.qos.pods_changed = false;
        if tiers == self.node.qos.tiers && !self.node.qos.sync.is_due(now) {
            return;
        }
        let op = Op::Node(NodeOp::SyncQosCgroups { tiers: tiers.clone() });
        let (id, give_up_at) = self.send_node(op, "the share of each class must be right", now);
        self.node.qos.tiers = tiers;
        self.node.qos.sync = Routine::UnderWay { id, give_up_at };
    }

    pub(super) fn qos_cgroups_synced(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let outcome = result.as_ref().map(drop).map_err(|error| error.message.clone());
        if self.node.qos.synced(outcome.clone(), now) {
            let (severity, reason, message) = match outcome {
                Ok(()) => (
                    Severity::Normal,
                    "NodeAllocatableEnforced",
                    "Updated Node Allocatable limit across pods".to_owned(),
                ),
                Err(problem) => (
                    Severity::Warning,
                    "FailedNodeAllocatableEnforcement",
                    format!("Failed to update Node Allocatable Limits: {problem}"),
                ),
            };
            self.outbox.record(EventRecord { about: About::Node, severity, reason: reason.to_owned(), message });
        }
        if let Ok(Facts::Cgroups { names }) = result {
            self.adopt_cgroups(&names, now);
        }
    }

    /// Cgroups of pods nobody knows go the way of every ended pod.
    fn adopt_cgroups(&mut self, names: &[String], now: Now) {
        let Some(tree) = self.cgroups() else { return };
        // A pod that went while the cgroups were listed is no news.
        let known = self.records.keys().chain(self.node.gone.keys()).chain(&self.config.unreadable);
        let known: Vec<&PodUid> = known.collect();
        let named = names.iter().filter_map(|name| tree.uid_of(name));
        let orphans: Vec<PodUid> = named.filter(|uid| !known.iter().any(|pod| tree.may_be(uid, pod))).collect();
        for uid in orphans {
            self.adopt_orphan(PodRef::unnamed(uid), now);
        }
    }
}

/// The pod may use what it asked for.
fn is_active(record: &PodRecord) -> bool {
    match record.lifecycle {
        Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminating { .. } => true,
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => false,
    }
}
