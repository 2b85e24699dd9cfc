//! Deadline rules: what must have happened by now, unless a fault prevented it.
//!
//! Owns: when the agent learned of each pod and of its termination. Checked every second of virtual time.

use std::{collections::BTreeMap, time::Duration};

use rubelet_core::{
    event::Source,
    id::PodUid,
    snapshot::{NodeReadiness, PodView, Snapshot},
};

use super::{Rules, snapshot::rank, trouble::Touched};
use crate::{
    api::store::Reach,
    play::{agreement, ending},
    script::{ContainerScript, IMAGE, Program},
    simulation::{AgentState, PATROL, SimState},
};

/// Slack of looks, stops and retries beyond a grace period.
const END_SLACK: Duration = Duration::from_secs(20);
/// An undisturbed pod has its first sandbox after this long, and its first container if no image must be pulled.
const FIRST_START: Duration = Duration::from_secs(30);
/// A pod bound to the node has a status after this long.
const FIRST_STATUS: Duration = Duration::from_secs(30);
/// A status that changed is in the API after this long.
const CHANGED_STATUS: Duration = Duration::from_secs(30);
/// The lease's duration: other nodes take this one for dead when it has passed.
const LEASE: Duration = Duration::from_secs(40);
/// Upstream's relist threshold, and the time between two checks of it.
const LAST_LIST: Duration = Duration::from_secs(3 * 60 + 60);

/// When the current agent learned what.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// By pod uid.
    pods: BTreeMap<String, Duration>,
    /// By pod uid: when its deletion was first seen, and its grace period in seconds.
    ends: BTreeMap<String, (Duration, i64)>,
    /// Pods of the API without a status, by uid.
    unwritten: BTreeMap<String, Duration>,
    /// The last response to a list of all containers.
    pub listed: Option<Duration>,
    /// The last renewal of the lease.
    pub renewed: Option<Duration>,
}

impl Known {
    pub(super) fn agent_begins(&mut self) {
        *self = Known::default();
    }
}

impl Rules {
    pub(super) fn note_known(&mut self, now: Duration, snapshot: &Snapshot) {
        for (uid, view) in &snapshot.pods {
            if view.lifecycle == "Syncing" {
                self.known.pods.entry(uid.as_str().to_owned()).or_insert(now);
            } else {
                // It may start over: a static pod that a shutdown rejected does when the shutdown is cancelled.
                self.known.pods.remove(uid.as_str());
            }
            if let Some(grace) = self.asked_grace(uid.as_str(), view) {
                let known = self.known.ends.entry(uid.as_str().to_owned()).or_insert((now, grace));
                if grace < known.1 {
                    *known = (now, grace);
                }
            } else {
                // It may have terminated and restarted.
                self.known.ends.remove(uid.as_str());
            }
        }
        let is_told = |uid: &String| snapshot.pods.contains_key(&PodUid::new(uid.as_str()));
        self.known.pods.retain(|uid, _| is_told(uid));
        self.known.ends.retain(|uid, _| is_told(uid));
    }

    /// The pod has had a sandbox, and its first container was started.
    fn has_begun(&self, uid: &str) -> bool {
        let Some((script, pod)) = self.pod(uid) else { return false };
        let first = script.init.iter().chain(&script.containers).next();
        let can_start =
            |spec: &&ContainerScript| spec.image == IMAGE && spec.pull.is_none() && spec.program != Program::Missing;
        let is_started =
            |spec: &ContainerScript| pod.containers.get(&spec.name).is_some_and(|history| history.starts > 0);
        // Containers that ended before the runtime lost its state may not start again.
        let has_started = pod.was_forgotten || first.filter(can_start).is_none_or(is_started);
        !pod.sandboxes.is_empty() && has_started
    }

    /// The pod's grace period in seconds, if it is terminating.
    fn asked_grace(&self, uid: &str, view: &PodView) -> Option<i64> {
        let metadata = &view.pod.metadata;
        if rank(&view.lifecycle) < rank("Terminating") && metadata.deletion_timestamp.is_none() {
            return None;
        }
        let of_spec = view.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
        let own = of_spec.or(self.script_of(uid).map(|script| script.grace_secs))?;
        Some(metadata.deletion_grace_period_seconds.unwrap_or(own))
    }
}

impl SimState {
    /// One check of the deadline rules.
    pub(crate) fn patrol(&mut self) {
        self.print_lines();
        self.attach_and_detach();
        let AgentState::Alive(_) = self.agent else { return self.rules.trouble.strike(Touched::Node, self.now) };
        let runtime = &self.runtime;
        if runtime.down || !runtime.ailments.is_empty() || !runtime.network_ready || self.disk.full {
            self.rules.trouble.strike(Touched::Node, self.now);
        }
        if self.api.reach != Reach::Open || self.api.is_behind() {
            self.rules.trouble.strike(Touched::Api, self.now);
        }
        self.strike_users_of_hung_devices();
        self.strike_pods_that_wait_for_volumes();
        self.check_listed_lately();
        self.check_ends();
        self.check_first_starts();
        self.check_first_statuses();
        self.check_changed_statuses();
        self.check_lease();
        self.check_relief();
    }

    /// A deadline passed. Pods that use a hung device are excused, so this is not one of them.
    pub(super) fn missed(&mut self, rule: &'static str, detail: String) {
        if self.devices.is_any_hung() {
            let detail = format!("{rule}: {detail}");
            self.rules.broken("a hung device delays only the pods that use it", self.now, detail);
        } else {
            self.rules.broken(rule, self.now, detail);
        }
    }

    fn check_listed_lately(&mut self) {
        let is_recent = self.rules.known.listed.is_some_and(|listed| self.now.saturating_sub(listed) < LAST_LIST);
        if self.snapshot.node.readiness == NodeReadiness::Ready && !is_recent {
            let detail = format!("the last list was answered at {:?}", self.rules.known.listed);
            self.missed("a ready node was listed lately", detail);
        }
    }

    fn check_ends(&mut self) {
        let late = self.runtime.running().find(|container| {
            let Some((since, grace)) = self.rules.known.ends.get(&container.pod.uid) else { return false };
            let all = [Touched::Pod(container.pod.uid.clone()), Touched::Node];
            let clear = self.rules.trouble.clear_since(&all, self.now);
            let grace = Duration::from_secs(u64::try_from(*grace).unwrap_or(0));
            container.stuck.is_none() && clear.is_some_and(|clear| self.now > clear.max(*since) + grace + END_SLACK)
        });
        if let Some(detail) = late.map(|container| format!("{container} still runs")) {
            self.missed("a pod is gone within its grace period", detail);
        }
    }

    fn check_first_starts(&mut self) {
        let is_late = |uid: &str, view: &PodView| {
            let Some(since) = self.rules.known.pods.get(uid) else { return false };
            // A pod of the API server needs the services and its own objects from there.
            let api = (view.source == Some(Source::Api)).then_some(Touched::Api);
            let all: Vec<_> = [Touched::Pod(uid.to_owned()), Touched::Node].into_iter().chain(api).collect();
            let clear = self.rules.trouble.clear_since(&all, self.now);
            let stays_down = || self.rules.pod(uid).is_some_and(|(script, _)| ending::stays_down(self, script, uid));
            view.lifecycle == "Syncing"
                && !self.rules.has_begun(uid)
                && !stays_down()
                && clear.is_some_and(|clear| self.now > clear.max(*since) + FIRST_START)
        };
        let late = self.snapshot.pods.iter().find(|(uid, view)| is_late(uid.as_str(), view));
        if let Some(detail) = late.map(|(uid, view)| format!("{:?} {uid}", view.pod.metadata.name)) {
            self.missed("a pod waits for no other pod's faults", detail);
        }
    }

    /// Every pod bound to the node has a status.
    fn check_first_statuses(&mut self) {
        let bound = self.api.of("pods").map(|(_, pod)| pod).filter(|pod| {
            pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_null()
                && pod["status"]["conditions"].as_array().is_none_or(Vec::is_empty)
                // A rejected pod has no conditions, as upstream's.
                && pod["status"]["phase"] != "Failed"
        });
        let uids: Vec<String> = bound.filter_map(|pod| Some(pod["metadata"]["uid"].as_str()?.to_owned())).collect();
        self.rules.known.unwritten.retain(|uid, _| uids.contains(uid));
        for uid in uids {
            let since = *self.rules.known.unwritten.entry(uid.clone()).or_insert(self.now);
            let all = [Touched::Pod(uid.clone()), Touched::Node, Touched::Api];
            let clear = self.rules.trouble.clear_since(&all, self.now);
            if clear.is_some_and(|clear| self.now > clear.max(since) + FIRST_STATUS) {
                let detail = format!("pod {uid} has none since {since:?}");
                self.missed("every bound pod has a status", detail);
            }
        }
    }

    /// Checked once for each status, so that it costs little. A pod's own faults excuse it, too: its end is reported when
    /// nothing of it is under way.
    fn check_changed_statuses(&mut self) {
        if self.api.of("nodes").next().is_none() {
            return;
        }
        let is_due = |uid: &str| {
            let all = [Touched::Pod(uid.to_owned()), Touched::Node, Touched::Api];
            let clear = self.rules.trouble.clear_since(&all, self.now);
            let since = self.rules.told_since(uid).unwrap_or(self.now);
            let deadline = clear.map(|clear| clear.max(since) + CHANGED_STATUS);
            deadline.is_some_and(|deadline| self.now > deadline && self.now <= deadline + PATROL)
        };
        let late = self.snapshot.pods.iter().find_map(|(uid, view)| {
            let is_checked = view.source == Some(Source::Api) && !self.rules.is_overwritten(uid.as_str());
            if !is_checked || !is_due(uid.as_str()) {
                return None;
            }
            self.api.of("pods").find(|(_, pod)| pod["metadata"]["uid"] == uid.as_str())?;
            agreement::disagreement(self, uid.as_str(), view)
        });
        if let Some(detail) = late {
            self.missed("a changed status is written", detail);
        }
    }

    fn check_lease(&mut self) {
        let clear = self.rules.trouble.clear_since(&[Touched::Api], self.now);
        let Some(clear) = clear.filter(|_| self.api.of("nodes").next().is_some()) else { return };
        let renewed = self.rules.known.renewed;
        let since = renewed.unwrap_or_default().max(clear).max(self.rules.agent_began);
        if self.now > since + LEASE {
            self.missed("the lease is renewed", format!("last at {renewed:?}"));
        }
    }
}
