//! One pod's history in the runtime; it keeps what the agent garbage-collects.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::runtime::store::{Container, State};

#[derive(Clone, Debug, Default)]
pub(crate) struct PodHistory {
    /// Name and version of the script it was made from.
    pub script: (String, u32),
    pub sandboxes: Vec<String>,
    /// Removed and added again since it began.
    pub may_begin_anew: bool,
    /// The runtime lost its state: its reported status may change.
    pub was_forgotten: bool,
    /// By container name.
    pub containers: BTreeMap<String, ContainerHistory>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ContainerHistory {
    pub starts: u32,
    pub highest_attempt: Option<u32>,
    pub last_start: Duration,
    pub last_sandbox: String,
    pub last_exit: Option<LastExit>,
    /// Its last start failed before its process ran.
    never_ran: bool,
    /// Some start of it succeeded.
    pub has_run: bool,
    /// Starts after an exit, by the current agent.
    pub restarts_since_agent_start: u32,
    /// The new image it has not started with yet.
    pub edited_image: Option<String>,
    /// Sandboxes in which it ended with code 0.
    succeeded: BTreeSet<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct LastExit {
    pub at: Duration,
    pub code: i32,
    /// The runtime lost track of it: its exit is unknown.
    pub is_unknown: bool,
}

impl PodHistory {
    pub(crate) fn begin_anew(&mut self) {
        for history in self.containers.values_mut() {
            // An edit that the agent has not seen is still to come.
            *history = ContainerHistory { edited_image: history.edited_image.take(), ..ContainerHistory::default() };
        }
        self.sandboxes.clear();
        self.may_begin_anew = false;
    }
}

impl ContainerHistory {
    pub(crate) fn succeeded_in(&self, sandbox: &str) -> bool {
        self.succeeded.contains(sandbox)
    }

    /// A repeated start of the same attempt after the agent's death is no restart.
    pub(super) fn is_made_again(&self, container: &Container) -> bool {
        self.never_ran && self.highest_attempt == Some(container.attempt())
    }

    /// The image changed: such a restart needs neither a policy nor a back-off.
    pub(super) fn is_for_new_image(&self, container: &Container) -> bool {
        self.edited_image.as_ref() == Some(&container.image)
    }

    pub(super) fn start(&mut self, now: Duration, container: &Container) {
        let is_made_again = self.is_made_again(container);
        self.starts += 1;
        self.highest_attempt = self.highest_attempt.max(Some(container.attempt()));
        self.never_ran = matches!(container.state, State::Exited { started_at: None, .. });
        self.has_run |= !self.never_ran;
        if let Some(exit) = self.last_exit.as_ref().filter(|_| !is_made_again) {
            // A long healthy run resets the back-off.
            let forgiven = exit.at.saturating_sub(self.last_start) > 2 * super::MAX_BACKOFF;
            self.restarts_since_agent_start = if forgiven { 1 } else { self.restarts_since_agent_start + 1 };
        }
        if self.is_for_new_image(container) {
            self.edited_image = None;
            self.restarts_since_agent_start = 0;
        }
        self.last_start = now;
        self.last_sandbox.clone_from(&container.sandbox);
    }

    pub(super) fn exit(&mut self, now: Duration, container: &Container, code: i32) {
        self.last_exit = Some(LastExit { at: now, code, is_unknown: matches!(container.state, State::Unknown { .. }) });
        if code == 0 {
            self.succeeded.insert(container.sandbox.clone());
        }
    }
}
