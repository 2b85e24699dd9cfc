//! Rules of a shutdown: groups end in order, and nothing new starts.

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::api::core::v1::PodSpec;
use rubelet_core::{
    shutdown::{ShutdownGroup, group_of},
    snapshot::{PodView, Snapshot},
};

use super::{MINIMUM_GRACE_SECS, Rules};
use crate::{runtime::store::Picture, script::PodScript};

/// Of every simulated node.
pub(crate) fn shutdown_groups() -> Vec<ShutdownGroup> {
    [(0, 20), (1000, 10), (2000, 5)]
        .map(|(priority, secs)| ShutdownGroup { priority, period: Duration::from_secs(secs) })
        .to_vec()
}

#[derive(Debug, Default)]
pub(super) struct ShutdownSeen {
    /// When it began; `None` without one.
    began: Option<Duration>,
    /// The pods of then, by uid.
    pods: BTreeSet<String>,
    /// There was one in this play: a stop that was sent then may still be under way.
    has_been: bool,
}

impl Rules {
    pub(crate) fn shutdown_begins(&mut self, now: Duration, snapshot: &Snapshot, picture: &Picture) {
        let admitted = snapshot.pods.iter().filter(|(_, view)| view.lifecycle != "Waiting");
        let admitted = admitted.map(|(uid, _)| uid.as_str().to_owned());
        let in_runtime = picture.sandboxes.values().map(|sandbox| sandbox.identity().uid);
        let pods = admitted.chain(in_runtime).collect();
        self.shutdown = ShutdownSeen { began: Some(now), pods, has_been: true };
    }

    /// It is cancelled, or the machine has booted again.
    pub(crate) fn shutdown_ends(&mut self) {
        self.shutdown.began = None;
    }

    pub(crate) fn is_shutting_down(&self) -> bool {
        self.shutdown.began.is_some()
    }

    pub(super) fn check_start_in_shutdown(&mut self, now: Duration, uid: &str, what: &str) {
        if self.is_shutting_down() && !self.shutdown.pods.contains(uid) {
            self.broken("no new pod starts in a shutdown", now, format!("{what} for pod {uid}"));
        }
    }

    /// A pod of a higher group ends when those of the lower groups have ended, or had their time.
    pub(super) fn check_groups(&mut self, now: Duration, snapshot: &Snapshot) {
        let Some(began) = self.shutdown.began else { return };
        let groups = shutdown_groups();
        let group = |view: &PodView| group_of(&groups, view.pod.spec.as_ref().unwrap_or(&PodSpec::default()));
        let views = || snapshot.pods.values().filter(|view| view.source.is_some());
        let ended = views().filter(|view| view.status.reason.as_deref() == Some("Terminated"));
        let Some(highest) = ended.map(|view| group(view)).max() else { return };
        let lower = views().filter(|view| group(view) < highest && !view.running.is_empty());
        // A new process gives each group its time again.
        let began = began.max(self.agent_began);
        let early = lower.filter(|view| now < began + groups[group(view)].period);
        let names = |view: &PodView| view.pod.metadata.name.clone().unwrap_or_default();
        let early: Vec<_> = early.map(|view| names(view)).collect();
        if !early.is_empty() {
            let detail = format!("group {highest} ends while {} run", early.join(", "));
            self.broken("a shutdown ends groups in order", now, detail);
        }
    }

    /// The grace period that a shutdown leaves a pod at the least.
    pub(super) fn left_by_shutdown(&self, script: &PodScript) -> Option<i64> {
        if !self.shutdown.has_been {
            return None;
        }
        let groups = shutdown_groups();
        let spec = PodSpec { priority: Some(script.priority), ..PodSpec::default() };
        let period = groups.get(group_of(&groups, &spec))?.period;
        // A pod that is found during a shutdown has the rest of the current group's time.
        let is_found_late = self.shutdown.began.is_none_or(|began| self.agent_began >= began);
        let secs = i64::try_from(period.as_secs()).unwrap_or(i64::MAX);
        Some(if is_found_late { secs.min(MINIMUM_GRACE_SECS) } else { secs })
    }
}
