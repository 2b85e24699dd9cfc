//! What the agent knows of one volume of a pod.
//!
//! Owns: what its claim stands for, how far it is, and when it is resolved, published or expanded again. Never: decides the next
//! step (`pod/mount_volumes.rs`).
//! Upstream: `ActualStateOfWorld`'s `mountedPod`.

use std::sync::Arc;

use crate::{
    pod::{Failure, plan::WaitsFor},
    time::{Now, Uptime},
    volumes::{claims::PersistentSource, selinux::LabelReport},
};

/// Facts of this process alone; after a restart the volume is resolved and set up again, which is safe to repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeRecord {
    /// What its claim stands for, once that is known.
    pub claimed: Option<Arc<PersistentSource>>,
    /// When that was asked last.
    pub resolved_at: Option<Uptime>,
    /// Staging it or setting it up failed since: it is asked again before the next try.
    pub is_resolve_due: bool,
    pub is_set_up: bool,
    /// Its CSIDriver sets requiresRepublish, and it was resolved since the last publication.
    pub is_republish_due: bool,
    /// The size up to which this process knows it to be expanded.
    pub expanded_bytes: Option<i64>,
    /// Its claim did not let it be expanded yet when it was last read.
    pub expansion_waits: bool,
    /// The last expansion failed. The volume's other operations do not wait for the next one.
    pub expansion_failure: Option<Failure>,
    /// Why the volume cannot be set up yet, as the last plan found it.
    pub waits_for: Option<WaitsFor>,
    /// What became of the SELinux label that the pod wants for it.
    pub label: LabelReport,
    /// When it was last asked why the volume is not attached.
    pub limit_checked_at: Option<Uptime>,
}

impl VolumeRecord {
    /// Takes in what the claim stands for now.
    pub fn resolved(&mut self, source: &Arc<PersistentSource>, now: Now) {
        (self.resolved_at, self.is_resolve_due) = (Some(now.uptime), false);
        let size = source.size.as_ref();
        self.expanded_bytes = self.expanded_bytes.or(size.map(|size| size.claim_bytes));
        self.expansion_waits = false;
        self.is_republish_due = self.is_set_up && source.is_republished();
        self.claimed = Some(source.clone());
    }

    /// The persistent volume has grown beyond what this node has of it.
    pub fn is_expansion_due(&self) -> bool {
        let Some(source) = self.claimed.as_ref().filter(|source| source.is_expandable()) else { return false };
        let has_grown = |known: i64| source.size.as_ref().is_some_and(|size| size.volume_bytes > known);
        !self.expansion_waits && self.expanded_bytes.is_some_and(has_grown)
    }

    /// When it may be expanded.
    pub fn expand_at(&self) -> Uptime {
        self.expansion_failure.as_ref().map_or(Uptime::ZERO, |failure| failure.retry_at)
    }
}
