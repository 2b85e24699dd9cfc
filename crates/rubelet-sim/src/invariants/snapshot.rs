//! Rules over snapshots: a lifecycle only moves forward, a count never falls, a termination is final.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};
use rubelet_core::{
    event::Source,
    id::PodUid,
    snapshot::{PodView, Snapshot},
};

use super::Rules;

/// Dates have whole seconds.
const DATE_SLACK: Duration = Duration::from_secs(2);
/// The lowest priority of critical pods.
const SYSTEM_CRITICAL: i32 = 2_000_000_000;
const AGENTS_CONDITIONS: [&str; 4] = ["PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"];

/// The last snapshot.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pods: BTreeMap<String, ReportedPod>,
    /// Per pod uid and container; outlives the agent, because restart counts do.
    restart_counts: BTreeMap<(String, String), i32>,
    /// Pods an agent found in the runtime and in no source; survives the agent, because a stop may.
    orphans: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct ReportedPod {
    lifecycle: String,
    phase: String,
    status: Arc<PodStatus>,
    /// Since when the status is this.
    since: Duration,
}

impl Seen {
    pub(super) fn agent_begins(&mut self) {
        self.pods.clear();
    }

    pub(super) fn was_orphan(&self, uid: &str) -> bool {
        self.orphans.contains(uid)
    }

    pub(super) fn forget_counts(&mut self, uid: &str) {
        self.restart_counts.retain(|(known, _), _| known != uid);
    }

    pub(super) fn forget_all_but(&mut self, kept: &BTreeSet<String>) {
        self.pods.retain(|uid, _| kept.contains(uid));
        self.restart_counts.retain(|(uid, _), _| kept.contains(uid));
        self.orphans.retain(|uid| kept.contains(uid));
    }

    pub(super) fn is_ending(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|told| rank(&told.lifecycle) >= rank("Terminating"))
    }

    /// Since when the agent reports this status of the pod.
    pub(super) fn since(&self, uid: &str) -> Option<Duration> {
        self.pods.get(uid).map(|told| told.since)
    }

    pub(super) fn lifecycle(&self, uid: &str) -> &str {
        self.pods.get(uid).map_or("unknown", |told| &told.lifecycle)
    }
}

impl Rules {
    /// Since when the agent reports this status of the pod.
    pub(crate) fn told_since(&self, uid: &str) -> Option<Duration> {
        self.seen.since(uid)
    }

    pub(crate) fn told(&mut self, now: Duration, wall: Timestamp, snapshot: &Snapshot) {
        self.note_known(now, snapshot);
        self.check_groups(now, snapshot);
        for (uid, view) in &snapshot.pods {
            self.check_dates(now, wall, uid.as_str(), view);
            self.check_preempted(now, uid.as_str(), view, snapshot);
            self.check_life(now, uid.as_str(), view);
            self.check_counts(now, uid.as_str(), view);
        }
        // A pod missing from the snapshot may come back and begin again.
        let is_told = |uid: &String| snapshot.pods.contains_key(&PodUid::new(uid.as_str()));
        for uid in self.seen.pods.extract_if(.., |uid, _| !is_told(uid)).map(|(uid, _)| uid).collect::<Vec<_>>() {
            self.seen.forget_counts(&uid);
        }
    }

    /// A changed condition has the current time, because `minReadySeconds` and others count from it.
    fn check_dates(&mut self, now: Duration, wall: Timestamp, uid: &str, view: &PodView) {
        let is_clock_steady = self.clock_jumped.is_none_or(|jumped| now.saturating_sub(jumped) > DATE_SLACK);
        // A static pod's conditions are dated by their causes if the runtime knows them, because no API server keeps their dates.
        let is_checked = is_clock_steady && view.source == Some(Source::Api);
        let Some(before) = self.seen.pods.get(uid).filter(|_| is_checked) else { return };
        let back_dated = view.status.conditions.iter().flatten().find(|condition| {
            let mut known = before.status.conditions.iter().flatten();
            let changes = known.any(|known| known.type_ == condition.type_ && known.status != condition.status);
            let date = condition.last_transition_time.as_ref().map(|date| date.0);
            let is_own = AGENTS_CONDITIONS.contains(&condition.type_.as_str());
            is_own && changes && date.is_none_or(|date| wall.duration_since(date).unsigned_abs() > DATE_SLACK)
        });
        if let Some(condition) = back_dated {
            let date = &condition.last_transition_time;
            let detail = format!("{uid}: {} is {} since {date:?}, now {wall}", condition.type_, condition.status);
            self.broken("a condition is dated when it changes", now, detail);
        }
    }

    /// A pod that is preempted in this turn makes room for a critical one that waits and outranks it.
    fn check_preempted(&mut self, now: Duration, uid: &str, view: &PodView, snapshot: &Snapshot) {
        let was_ending = self.seen.is_ending(uid);
        if view.counts.preempted_for.is_none() || was_ending {
            return;
        }
        let priority = |view: &PodView| view.pod.spec.as_ref().and_then(|spec| spec.priority);
        let is_static = |view: &PodView| view.source.is_some_and(|source| source != Source::Api);
        let is_critical = |view: &PodView| is_static(view) || priority(view) >= Some(SYSTEM_CRITICAL);
        let outranks = |other: &PodView| {
            let both = priority(other).zip(priority(view));
            !is_critical(view) || both.is_some_and(|(its, own)| its > own)
        };
        let waits = |other: &PodView| other.lifecycle == "Waiting" && is_critical(other) && outranks(other);
        if !snapshot.pods.values().any(|other| waits(other)) {
            let detail = format!("{uid} of priority {:?}, and none waits that outranks it", priority(view));
            self.broken("only a critical pod preempts, and only pods below it", now, detail);
        }
    }

    fn check_life(&mut self, now: Duration, uid: &str, view: &PodView) {
        let known = self.seen.pods.get(uid).filter(|known| known.status == view.status);
        let told = ReportedPod {
            lifecycle: view.lifecycle.clone(),
            phase: view.status.phase.clone().unwrap_or_default(),
            status: view.status.clone(),
            since: known.map_or(now, |known| known.since),
        };
        if known.is_none() {
            self.api.news(view.pod.metadata.name.as_deref().unwrap_or_default());
        }
        let Some(before) = self.seen.pods.insert(uid.to_owned(), told.clone()) else {
            if view.source.is_none() {
                self.seen.orphans.insert(uid.to_owned());
            }
            return;
        };
        // A terminated pod may only begin anew, if the same pod is added again.
        let begins_anew = rank(&before.lifecycle) >= rank("Terminated") && rank(&told.lifecycle) <= rank("Syncing");
        if begins_anew {
            self.seen.forget_counts(uid);
            return;
        }
        if rank(&told.lifecycle) < rank(&before.lifecycle) {
            let detail = format!("pod {uid} went from {} to {}", before.lifecycle, told.lifecycle);
            self.broken("a lifecycle only moves forward", now, detail);
        }
        let ended = before.phase == "Succeeded" || before.phase == "Failed";
        if ended && told.phase != before.phase {
            let detail = format!("pod {uid} went from {} to {}", before.phase, told.phase);
            self.broken("a phase never leaves its end", now, detail);
        }
    }

    fn check_counts(&mut self, now: Duration, uid: &str, view: &PodView) {
        if self.pods.get(uid).is_some_and(|pod| pod.was_forgotten) {
            return;
        }
        let statuses = view.status.container_statuses.iter().chain(&view.status.init_container_statuses).flatten();
        // A container that was created and not started may be created again.
        let is_counted = |status: &&ContainerStatus| status.state.as_ref().is_some_and(|it| it.waiting.is_none());
        for status in statuses.filter(is_counted) {
            let key = (uid.to_owned(), status.name.clone());
            let before = self.seen.restart_counts.insert(key, status.restart_count);
            if before.is_some_and(|before| status.restart_count < before) {
                let detail = format!("{}/{}: {before:?} then {}", uid, status.name, status.restart_count);
                self.broken("restartCount never falls", now, detail);
            }
        }
    }
}

pub(super) fn rank(lifecycle: &str) -> u8 {
    match lifecycle {
        "Waiting" => 0,
        "Syncing" => 1,
        "Terminating" => 2,
        "Terminated" => 3,
        "Finished" => 4,
        // An unknown value must not pass.
        _ => u8::MAX,
    }
}
