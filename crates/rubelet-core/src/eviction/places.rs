//! Where the runtime keeps images and containers, as it last said.
//!
//! Owns: when the runtime is asked, and what is known until it answers. The look at the node does not wait for it: a runtime
//! that hangs must not delay the look at memory.
//! Upstream: `ImageFsInfo` of the stats provider, as `HasDedicatedImageFs` and every summary ask for it.

use std::time::Duration;

use super::usage::RuntimePlaces;
use crate::time::{Now, Uptime};

/// Where the runtime keeps its images hardly ever changes.
const PLACES_LAST: Duration = Duration::from_secs(300);
/// Until a runtime that failed to say it is asked again.
const PLACES_RETRY: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    known: Option<RuntimePlaces>,
    ask_at: Uptime,
    /// The call is in flight.
    is_asking: bool,
    /// The runtime has answered, or failed to.
    was_asked: bool,
}

impl Places {
    pub(super) fn next_wakeup(&self) -> Option<Uptime> {
        (!self.is_asking).then_some(self.ask_at)
    }

    /// Whether the runtime is to be asked now; the call counts as in flight.
    pub(super) fn due(&mut self, now: Now) -> bool {
        let is_due = self.next_wakeup().is_some_and(|moment| moment <= now.uptime);
        self.is_asking |= is_due;
        is_due
    }

    /// Takes in the answer; `None` if there is none. Returns whether it is the first one, good or not.
    pub(super) fn found(&mut self, places: Option<RuntimePlaces>, now: Now) -> bool {
        self.is_asking = false;
        let next = if places.is_some() { PLACES_LAST } else { PLACES_RETRY };
        self.ask_at = now.uptime + next;
        // What was known before is better than nothing.
        self.known = places.or(self.known.take());
        !std::mem::replace(&mut self.was_asked, true)
    }

    pub(super) fn known(&self) -> Option<&RuntimePlaces> {
        self.known.as_ref()
    }

    /// Before the first answer nobody knows which file systems there are.
    pub(super) fn was_asked(&self) -> bool {
        self.was_asked
    }
}
