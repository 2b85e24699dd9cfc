//! Start latency of pods, and ends of pods and containers, from one snapshot to the next.
//!
//! Owns: the state of a pod between first seen and started, while the pod is known. A pod that ran
//! before this process started has no start latency.
//! Upstream: `util/pod_startup_latency_tracker.go`, `podWorkerLoop` of `pod_workers.go`, `SyncPod` of `kubelet.go`,
//! `recordAdmissionRejection`, the end of `updateStatusInternal` of `status/status_manager.go`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodStatus, Volume};
use rubelet_core::{
    event::Source,
    id::PodUid,
    snapshot::{LifecycleStage, PodView, Snapshot},
    time::{Now, Uptime},
};

use super::{
    family::{Counters, DEFAULT_BOUNDS, Gauges, Histograms},
    text::Text,
};

const START_BOUNDS: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0,
    600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
/// The rejection reasons counted by name; upstream's other reasons cannot occur here.
const REJECTIONS: &[&str] = &[
    "AppArmor",
    "InvalidNodeInfo",
    "OutOfcpu",
    "OutOfephemeral-storage",
    "OutOfmemory",
    "OutOfpods",
    "PodFeatureUnsupported",
    "PodLevelResourcesNotSupported",
    "PodOSNotSupported",
    "PodOSSelectorNodeLabelDoesNotMatch",
    "SupplementalGroupsPolicyNotSupported",
    "SysctlForbidden",
    "UnexpectedAdmissionError",
    "UnexpectedPredicateFailureType",
    "UnknownReason",
    "VolumeAttachmentLimitExceeded",
];

#[derive(Debug)]
pub(crate) struct PodLifecycleMetrics {
    known: Mutex<BTreeMap<PodUid, Life>>,
    start: Histograms<0>,
    start_sli: Histograms<0>,
    start_total: Histograms<0>,
    first_network_start: Gauges<0>,
    has_network_pod_started: AtomicBool,
    worker_start: Histograms<0>,
    worker: Histograms<1>,
    containers: Histograms<0>,
    terminated: Counters<3>,
    rejected: Counters<1>,
    preempted: Counters<1>,
    orphans: Counters<0>,
}

/// The state kept per pod.
#[derive(Debug)]
struct Life {
    seen: Uptime,
    /// Its start is not yet reported to the API server.
    is_awaited: bool,
    /// When images were pulled for it.
    pulls: Vec<(Uptime, Uptime)>,
    round: Option<Round>,
}

/// The work on a pod, from the change that requires it until the plan is empty; waiting for a deadline is not work.
#[derive(Clone, Copy, Debug)]
struct Round {
    operation: &'static str,
    began: Uptime,
}

impl PodLifecycleMetrics {
    pub(super) fn new() -> Self {
        PodLifecycleMetrics {
            known: Mutex::default(),
            start: Histograms::new(
                "kubelet_pod_start_duration_seconds",
                [],
                START_BOUNDS,
                "[ALPHA] Duration in seconds from kubelet seeing a pod for the first time to the pod starting to run",
            ),
            start_sli: Histograms::new(
                "kubelet_pod_start_sli_duration_seconds",
                [],
                START_BOUNDS,
                "[ALPHA] Duration in seconds to start a pod, excluding time to pull images and run init containers, measured \
                 from pod creation timestamp to when all its containers are reported as started and observed via watch",
            ),
            start_total: Histograms::new(
                "kubelet_pod_start_total_duration_seconds",
                [],
                START_BOUNDS,
                "[ALPHA] Duration in seconds to start a pod since creation, including time to pull images and run init \
                 containers, measured from pod creation timestamp to when all its containers are reported as started and \
                 observed via watch",
            ),
            first_network_start: Gauges::new(
                "kubelet_first_network_pod_start_sli_duration_seconds",
                [],
                "[INTERNAL] Duration in seconds to start the first network pod, excluding time to pull images and run init \
                 containers, measured from pod creation timestamp to when all its containers are reported as started and \
                 observed via watch",
            ),
            has_network_pod_started: AtomicBool::new(false),
            worker_start: Histograms::new(
                "kubelet_pod_worker_start_duration_seconds",
                [],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds from kubelet seeing a pod to starting a worker.",
            ),
            worker: Histograms::new(
                "kubelet_pod_worker_duration_seconds",
                ["operation_type"],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds to sync a single pod. Broken down by operation type: create, update, or sync",
            ),
            containers: Histograms::new(
                "kubelet_containers_per_pod_count",
                [],
                &[1.0, 2.0, 4.0, 8.0, 16.0],
                "[ALPHA] The number of containers per pod.",
            ),
            terminated: Counters::new(
                "kubelet_terminated_containers_total",
                ["container_type", "exit_code", "reason"],
                "[ALPHA] Cumulative number of container terminations.",
            ),
            rejected: Counters::new(
                "kubelet_admission_rejections_total",
                ["reason"],
                "[ALPHA] Cumulative number pod admission rejections by the Kubelet.",
            ),
            preempted: Counters::new(
                "kubelet_preemptions",
                ["preemption_signal"],
                "[ALPHA] Cumulative number of pod preemptions by preemption resource",
            ),
            orphans: orphans(),
        }
    }

    /// Compares the snapshots before and after a turn. Returns the pods that are gone.
    pub(crate) fn turned(&self, before: &Snapshot, after: &Snapshot, now: Now) -> Vec<(PodUid, Arc<PodView>)> {
        let mut gone = Vec::new();
        for uid in &after.changed {
            match (before.pods.get(uid), after.pods.get(uid)) {
                (old, Some(new)) => self.changed(uid, old.map(AsRef::as_ref), new, now),
                (Some(old), None) => {
                    let life = self.lock().remove(uid);
                    self.round_ended(life.and_then(|life| life.round), now);
                    gone.push((uid.clone(), old.clone()));
                }
                (None, None) => {}
            }
        }
        gone
    }

    fn changed(&self, uid: &PodUid, old: Option<&PodView>, new: &PodView, now: Now) {
        let seen = match old {
            Some(_) => self.lock().get(uid).map_or(now.uptime, |life| life.seen),
            None => {
                let is_awaited = new.source == Some(Source::Api) && new.status.start_time.is_none();
                self.lock().insert(uid.clone(), Life { seen: now.uptime, is_awaited, pulls: Vec::new(), round: None });
                if new.source.is_none() {
                    self.orphans.inc([]);
                }
                now.uptime
            }
        };
        if let Some(reason) = &new.counts.rejected {
            if old.is_none_or(|old| old.counts.rejected.is_none()) {
                self.rejected.inc([rejection(reason)]);
            }
            // A rejected pod has no work.
            if let Some(life) = self.lock().get_mut(uid) {
                life.round = None;
            }
            return;
        }
        if let Some(resource) = &new.counts.preempted_for
            && old.is_none_or(|old| old.counts.preempted_for.is_none())
        {
            self.preempted.inc([resource.as_str()]);
        }
        self.work(uid, old, new, now);
        let since_seen = now.uptime.since(seen).as_secs_f64();
        let began = old.is_none_or(|old| old.counts.stage == LifecycleStage::Waiting)
            && new.counts.stage == LifecycleStage::Syncing;
        if began {
            self.worker_start.observe([], since_seen);
            let count = new.pod.spec.as_ref().map_or(0, |spec| spec.containers.len());
            self.containers.observe([], f64::from(u32::try_from(count).unwrap_or(u32::MAX)));
        }
        let Some(old) = old else { return };
        if old.status.phase.as_deref() == Some("Pending") && new.status.phase.as_deref() == Some("Running") {
            self.start.observe([], since_seen);
        }
        if !Arc::ptr_eq(&old.status, &new.status) {
            self.count_ends(&old.status, &new.status);
        }
    }

    /// Ends the current period of work, begins one, or both.
    fn work(&self, uid: &PodUid, old: Option<&PodView>, new: &PodView, now: Now) {
        let mut known = self.lock();
        let Some(life) = known.get_mut(uid) else { return };
        let stage = new.counts.stage;
        if old.is_some_and(|old| old.counts.stage != stage)
            && matches!(stage, LifecycleStage::Terminating | LifecycleStage::Terminated)
        {
            self.round_ended(life.round.take(), now);
        }
        let operation = operation(old, new);
        let round = life.round.unwrap_or(Round { operation, began: now.uptime });
        if new.counts.is_working || stage == LifecycleStage::Waiting {
            life.round = Some(round);
        } else if life.round.is_some() || operation != "sync" {
            life.round = None;
            self.round_ended(Some(round), now);
        }
    }

    fn round_ended(&self, round: Option<Round>, now: Now) {
        if let Some(Round { operation, began }) = round {
            self.worker.observe([operation], now.uptime.since(began).as_secs_f64());
        }
    }

    fn count_ends(&self, old: &PodStatus, new: &PodStatus) {
        let lists = [
            ("container", &old.container_statuses, &new.container_statuses),
            ("init_container", &old.init_container_statuses, &new.init_container_statuses),
            ("ephemeral_container", &old.ephemeral_container_statuses, &new.ephemeral_container_statuses),
        ];
        for (kind, old, new) in lists {
            for status in new.iter().flatten() {
                let known = old.iter().flatten().find(|known| known.name == status.name);
                if let Some(end) = known.and_then(|known| new_end(known, status)) {
                    let reason = end.reason.as_deref().unwrap_or_default();
                    self.terminated.inc([kind, &end.exit_code.to_string(), reason]);
                }
            }
        }
    }

    /// An image was pulled for a pod.
    pub(crate) fn pulled(&self, uid: &PodUid, began: Uptime, ended: Uptime) {
        if let Some(life) = self.lock().get_mut(uid).filter(|life| life.is_awaited) {
            life.pulls.push((began, ended));
        }
    }

    /// A pod's status was written to the API server.
    pub(crate) fn told(&self, pod: &Pod, now: Now) {
        let (uid, mut known) = (PodUid::of(pod), self.lock());
        let Some(life) = known.get_mut(&uid).filter(|life| life.is_awaited) else { return };
        let Some(status) = pod.status.as_ref().filter(|status| has_started(status)) else { return };
        let Some(created) = &pod.metadata.creation_timestamp else { return };
        life.is_awaited = false;
        let total = now.wall_since(created.0);
        let own = total.saturating_sub(covered(&mut life.pulls)).saturating_sub(init_time(status));
        self.start_total.observe([], total.as_secs_f64());
        let Some(spec) = pod.spec.as_ref().filter(|spec| !spec.volumes.iter().flatten().any(is_stateful)) else {
            return;
        };
        self.start_sli.observe([], own.as_secs_f64());
        let has_network = spec.host_network != Some(true);
        if has_network && !self.has_network_pod_started.swap(true, Ordering::Relaxed) {
            self.first_network_start.set([], own.as_secs_f64());
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PodUid, Life>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self, text: &mut Text) {
        self.start.write(text);
        self.start_sli.write(text);
        self.start_total.write(text);
        self.first_network_start.write(text);
        self.worker_start.write(text);
        self.worker.write(text);
        self.containers.write(text);
        self.terminated.write(text);
        self.rejected.write(text);
        self.preempted.write(text);
        self.orphans.write(text);
    }
}

/// The operation type, as upstream names it.
fn operation(old: Option<&PodView>, new: &PodView) -> &'static str {
    let Some(old) = old else { return if new.source.is_some() { "create" } else { "kill" } };
    if old.source.is_some() && new.source.is_none() {
        "kill"
    } else if is_updated(&old.pod, &new.pod) {
        "update"
    } else if old.counts.stage != LifecycleStage::Terminated && new.counts.stage == LifecycleStage::Terminated {
        "terminated"
    } else {
        "sync"
    }
}

/// The pod changed at its source beyond its status.
fn is_updated(old: &Arc<Pod>, new: &Arc<Pod>) -> bool {
    let (was, is) = (&old.metadata, &new.metadata);
    !Arc::ptr_eq(old, new)
        && (old.spec != new.spec
            || was.labels != is.labels
            || was.annotations != is.annotations
            || was.deletion_timestamp != is.deletion_timestamp)
}

/// Upstream's label: vendor resources are grouped under one name, since users can invent them.
fn rejection(reason: &str) -> &str {
    match REJECTIONS.iter().find(|known| **known == reason) {
        Some(known) => known,
        None if reason.starts_with("OutOf") => "OutOfExtendedResources",
        None => "Other",
    }
}

/// The end of a container that was not terminated in the last status; a restarted one has it as its last state.
fn orphans() -> Counters<0> {
    Counters::new(
        "kubelet_orphaned_runtime_pods_total",
        [],
        "[ALPHA] Number of pods that have been detected in the container runtime without being already known to the pod \
         worker. This typically indicates the kubelet was restarted while a pod was force deleted in the API or in the local \
         configuration, which is unusual.",
    )
}

fn new_end<'a>(old: &ContainerStatus, new: &'a ContainerStatus) -> Option<&'a ContainerStateTerminated> {
    let ended = |status: &'a ContainerStatus| status.state.as_ref()?.terminated.as_ref();
    if old.state.as_ref().is_some_and(|state| state.terminated.is_some()) {
        return None;
    }
    let last = |status: &'a ContainerStatus| status.last_state.as_ref()?.terminated.as_ref();
    let previous = old.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let is_news = |end: &&ContainerStateTerminated| {
        previous.and_then(|previous| previous.container_id.as_deref()) != end.container_id.as_deref()
    };
    ended(new).or_else(|| last(new).filter(is_news))
}

fn has_started(status: &PodStatus) -> bool {
    let statuses = status.container_statuses.as_deref().unwrap_or_default();
    let runs = |status: &ContainerStatus| {
        status.state.as_ref().is_some_and(|state| state.running.as_ref().is_some_and(|run| run.started_at.is_some()))
    };
    !statuses.is_empty() && statuses.iter().all(runs)
}

/// The union of the spans.
fn covered(spans: &mut [(Uptime, Uptime)]) -> Duration {
    spans.sort();
    let (mut total, mut until) = (Duration::ZERO, Uptime::ZERO);
    for (began, ended) in spans {
        total = total.saturating_add(ended.since((*began).max(until)));
        until = until.max(*ended);
    }
    total
}

fn init_time(status: &PodStatus) -> Duration {
    let ends = status.init_container_statuses.iter().flatten().filter_map(|it| it.state.as_ref()?.terminated.as_ref());
    let took = |began: Timestamp, ended: Timestamp| Duration::try_from(ended.duration_since(began)).unwrap_or_default();
    ends.filter_map(|end| Some(took(end.started_at.as_ref()?.0, end.finished_at.as_ref()?.0)))
        .fold(Duration::ZERO, Duration::saturating_add)
}

/// The SLI covers pods whose volumes come from the API or have no external storage.
fn is_stateful(volume: &Volume) -> bool {
    volume.secret.is_none()
        && volume.config_map.is_none()
        && volume.downward_api.is_none()
        && volume.empty_dir.is_none()
        && volume.projected.is_none()
}

#[cfg(test)]
mod tests;
