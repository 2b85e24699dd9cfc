//! Events of the runtime and of the node: crashes, reboots, lost state.
//!
//! Owns: changes without a request. Never: serves calls.

use std::{sync::Arc, time::Duration};

use crate::{
    csi::driver::DriverEnd,
    runtime::store::{Ailment, Picture, State, Stuck},
    script::Hook,
    simulation::{ScheduledEvent, SimState},
};

impl SimState {
    /// The sandbox's own process dies, and with its namespaces everything in it.
    pub(crate) fn kill_sandbox(&mut self, id: &str) {
        self.runtime.remember(self.now);
        for container in self.runtime.picture.containers_of(id) {
            self.exit_container(&container.id, 137, "Error");
        }
        if let Some(sandbox) = self.runtime.picture.sandboxes.get_mut(id).map(Arc::make_mut) {
            sandbox.ready = false;
            self.log("world", format!("sandbox {id} dies"));
        }
    }

    pub(crate) fn take_runtime_down(&mut self) {
        self.log("world", "the runtime goes down");
        self.runtime.down = true;
        self.runtime.epoch += 1;
        self.runtime.reserved.clear();
        self.runtime.listeners.clear();
    }

    pub(crate) fn bring_runtime_up(&mut self) {
        self.log("world", "the runtime is back");
        self.runtime.down = false;
    }

    pub(crate) fn ail(&mut self, ailment: Ailment) {
        self.log("world", format!("the runtime has {ailment:?}"));
        self.runtime.ailments.insert(ailment);
    }

    pub(crate) fn heal(&mut self, ailment: Ailment) {
        if self.runtime.ailments.remove(&ailment) {
            self.log("world", format!("the runtime has no {ailment:?} any more"));
        }
    }

    /// From now on no signal ends the container.
    pub(crate) fn make_unkillable(&mut self, id: &str) {
        let Some(container) = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut) else { return };
        if container.is_running() && container.stuck.is_none() {
            container.stuck = Some(Stuck::default());
            let text = format!("{container} cannot be killed");
            self.log("world", text);
        }
    }

    /// Ends every process that hung in the kernel.
    pub(crate) fn free_stuck(&mut self) {
        let stuck = self.runtime.picture.containers.values().filter_map(|it| Some((it.id.clone(), it.stuck?)));
        for (id, Stuck { exit }) in stuck.collect::<Vec<_>>() {
            if let Some(container) = self.runtime.picture.containers.get_mut(&id).map(Arc::make_mut) {
                container.stuck = None;
            }
            if let Some((code, reason)) = exit {
                self.exit_container(&id, code, reason);
            }
        }
    }

    /// The runtime loses track of a running container; its process is gone.
    pub(crate) fn lose_track_of(&mut self, id: &str) {
        self.runtime.remember(self.now);
        let Some(container) = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut) else { return };
        let State::Running { started_at } = container.state else { return };
        if container.stuck.is_some() {
            return;
        }
        container.state = State::Unknown { started_at };
        let container = container.clone();
        self.log("world", format!("the runtime lost track of {container}"));
        self.rules.exited(self.now, &container, UNKNOWN_EXIT);
    }

    /// Stopping or removing a container that the runtime lost track of finds it terminated.
    pub(super) fn resolve_unknown(&mut self, id: &str) {
        let wall = self.wall;
        let Some(container) = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut) else { return };
        if let State::Unknown { started_at } = container.state {
            let started_at = Some(started_at);
            let (code, reason, message) = (UNKNOWN_EXIT, "Unknown", "");
            container.state = State::Exited { started_at, finished_at: wall, code, reason, message };
        }
    }

    /// Its state directory was wiped: every process is dead, and all state is lost.
    pub(crate) fn lose_runtime_state(&mut self) {
        self.log("world", "the runtime lost its state");
        self.runtime.remember(self.now);
        let lost = std::mem::take(&mut self.runtime.picture);
        self.rules.runtime_forgot(self.now, &lost);
        self.runtime.epoch += 1;
        self.runtime.reserved.clear();
        self.runtime.listeners.clear();
    }

    /// A hook's command reaches the container.
    pub(super) fn hook_begins(&mut self, id: &str, hook: Hook) {
        let now = self.now;
        let Some(container) = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut) else { return };
        if hook == Hook::PreStop {
            container.pre_stop_at.get_or_insert(now);
        }
        let container = container.clone();
        self.rules.hook_runs(now, &container, hook);
    }

    /// What a reboot leaves: disks. The agent must be dead by then.
    pub(crate) fn reboot(&mut self) {
        self.log("world", "the node reboots");
        self.runtime.epoch += 1;
        self.runtime.reserved.clear();
        self.runtime.listeners.clear();
        self.free_stuck();
        let Picture { sandboxes, containers } = self.runtime.picture.clone();
        for id in containers.keys() {
            // As containerd finds them at start.
            self.exit_container(id, UNKNOWN_EXIT, "Unknown");
        }
        for id in sandboxes.keys() {
            self.kill_sandbox(id);
        }
        self.cgroups.clear();
        self.disk.forget_mounts();
        self.rules.mounts_forgotten();
        for name in self.csi.drivers.keys().cloned().collect::<Vec<_>>() {
            self.end_driver(&name, DriverEnd::Dies);
            let wait = Duration::from_millis(self.rng.u64(100..30_000));
            self.schedule_in(wait, ScheduledEvent::DriverReturns(name));
        }
    }
}

/// containerd's exit code of a process whose exit it missed.
const UNKNOWN_EXIT: i32 = 255;
