//! How many exec probes run at once.
//!
//! Owns: the bounds, and whose turn it is when a slot is free. Never: sends a probe. A probe without a slot stays due: it has neither run nor failed.
//! Upstream has no bound.

use std::collections::{BTreeSet, VecDeque};

use crate::id::PodUid;

/// Each exec probe is a process that the runtime starts in a container, and a stream that is open until it ends. With the default
/// period and timeout, a node of 110 pods with two exec probes each has 22 under way when every one of them takes as long as it may.
pub const MAX_EXEC_PROBES: usize = 64;
/// An eighth: probes of one pod that hang until their timeout leave slots to others.
pub const MAX_EXEC_PROBES_OF_POD: usize = 8;

#[derive(Clone, Debug, Default)]
pub struct ExecSlots {
    taken: usize,
    /// Pods with a probe that is due, each once, the longest waiting first.
    waiting: VecDeque<PodUid>,
    /// Pods that have a slot reserved until they are planned in this turn.
    invited: BTreeSet<PodUid>,
}

impl ExecSlots {
    pub fn take(&mut self) {
        self.taken += 1;
    }

    pub fn release(&mut self) {
        self.taken = self.taken.saturating_sub(1);
    }

    /// How many more probes a pod may begin that has `own` under way. One pod after the other gets a slot while any waits.
    pub fn available(&mut self, pod: &PodUid, own: usize) -> usize {
        let is_invited = self.invited.remove(pod);
        let own_left = MAX_EXEC_PROBES_OF_POD.saturating_sub(own);
        match (is_invited, self.waiting.is_empty()) {
            (true, _) => own_left.min(self.free()).min(1),
            (false, true) => own_left.min(self.free()),
            (false, false) => 0,
        }
    }

    /// The pod has a probe due that got no slot. One whose own probes are in the way is planned again when one of them ends.
    pub fn wait(&mut self, pod: &PodUid, own: usize) {
        if own < MAX_EXEC_PROBES_OF_POD && !self.waiting.contains(pod) {
            self.waiting.push_back(pod.clone());
        }
    }

    /// The pods to plan, as many as slots are free.
    pub fn invite(&mut self) -> Vec<PodUid> {
        let count = self.free().min(self.waiting.len());
        let invited: Vec<_> = self.waiting.drain(..count).collect();
        self.invited.extend(invited.iter().cloned());
        invited
    }

    /// At the end of a turn. A pod that could not be planned asks again when it is.
    pub fn end_turn(&mut self) {
        self.invited.clear();
    }

    fn free(&self) -> usize {
        MAX_EXEC_PROBES.saturating_sub(self.taken).saturating_sub(self.invited.len())
    }
}
