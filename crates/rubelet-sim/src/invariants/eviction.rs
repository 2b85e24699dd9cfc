//! Rules about evictions: only under pressure, only the first by rank, soon, and for good.
//!
//! Owns: the figures that the host gave to the agent, and the agent's evictions. Never: uses the agent's own ranking.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Container, PodStatus};
use rubelet_core::{
    effect::{Effect, InvolvedObject},
    event::Source,
    event_reasons,
    eviction::usage::PodFigures,
    op::{NodeOp, Op},
    pod::status::is_terminal,
    snapshot::PodView,
};

use super::{Rules, trouble::Touched};
use crate::{
    agent::PRESSURE_TRANSITION, memory::THRESHOLD_BYTES, play::ending::bytes, runtime::store::IMAGE_FS_THRESHOLD_BYTES,
    simulation::SimState,
};

/// The look at the node that an eviction follows from is not older; only a look at the pods comes between.
const LOOK_AGE: Duration = Duration::from_secs(5);
/// With a fault under way: as long as a look may take.
const SLOW_LOOK_AGE: Duration = Duration::from_secs(35);
/// Memory is low for no longer than this before a pod is evicted.
const RELIEF: Duration = Duration::from_secs(12);
/// How long an evicted pod may hold its memory before another one is evicted: its grace period and upstream's timeout.
const RELEASE: Duration = Duration::from_secs(31);
/// What a hard eviction leaves of a grace period.
const GRACE_SECS: i64 = 1;
/// A condition is dropped by a look, and looks may fail for a while.
const CONDITION_SLACK: Duration = Duration::from_secs(300);
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// An amount that the host reported.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Duration,
    available: u64,
}

#[derive(Debug, Default)]
pub(super) struct Evictions {
    /// The last looks since the last eviction.
    memory: Option<Look>,
    image_fs: Option<Look>,
    /// Working sets of the last look for a ranking, by uid.
    pods: BTreeMap<String, u64>,
    /// What the emptyDir volume of each pod held at the last look.
    volumes: BTreeMap<String, u64>,
    /// When some threshold was last seen crossed.
    low_at: Option<Duration>,
    /// Pods that the current agent evicted.
    evicted: BTreeSet<String>,
    last: Option<Duration>,
    /// Since when memory is low and a pod could be evicted.
    low_since: Option<Duration>,
    /// Evicted for good: the API has it.
    ended: BTreeSet<String>,
}

impl Evictions {
    pub(super) fn agent_begins(&mut self) {
        let ended = std::mem::take(&mut self.ended);
        *self = Evictions { ended, ..Evictions::default() };
    }

    pub(super) fn status_written(&mut self, uid: &str, status: &PodStatus) {
        if status.phase.as_deref() == Some("Failed") && status.reason.as_deref() == Some("Evicted") {
            self.ended.insert(uid.to_owned());
        }
    }

    /// Somebody else wrote the pod; its end may not be in the API any more.
    pub(super) fn status_overwritten(&mut self, uid: &str) {
        self.ended.remove(uid);
    }
}

impl Rules {
    pub(crate) fn memory_measured(&mut self, at: Duration, available: u64) {
        self.evictions.memory = Some(Look { at, available });
        if available < THRESHOLD_BYTES {
            self.evictions.low_at = Some(at);
        }
    }

    pub(crate) fn image_fs_measured(&mut self, at: Duration, available: u64) {
        // The garbage collection of images looks, too: its looks count only if they find little.
        if available < IMAGE_FS_THRESHOLD_BYTES {
            self.evictions.image_fs = Some(Look { at, available });
            self.evictions.low_at = Some(at);
        }
    }

    pub(crate) fn pod_measured(&mut self, uid: &str, working_set_bytes: u64) {
        self.evictions.pods.insert(uid.to_owned(), working_set_bytes);
    }

    pub(crate) fn volume_measured(&mut self, uid: &str, bytes: u64) {
        self.evictions.volumes.insert(uid.to_owned(), bytes);
    }

    pub(super) fn check_start_after_eviction(&mut self, now: Duration, uid: &str, what: &str) {
        if self.evictions.ended.contains(uid) {
            self.broken("an evicted pod never runs again", now, format!("{what} for pod {uid}"));
        }
    }

    fn pod_evicted(&mut self, now: Duration, uid: &str) {
        let is_second = !self.evictions.evicted.insert(uid.to_owned()) || self.evictions.ended.contains(uid);
        if is_second {
            self.broken("a pod is evicted once", now, uid.to_owned());
        }
        self.evictions.last = Some(now);
        self.end_asked(uid, GRACE_SECS);
    }

    /// The look that the eviction followed from counts for one eviction.
    fn check_crossed(&mut self, now: Duration, look: Option<Look>, threshold: u64, max_age: Duration) {
        let is_low = |look: &Look| look.available < threshold && now.saturating_sub(look.at) <= max_age;
        if !look.as_ref().is_some_and(is_low) {
            let detail = format!("the last look since the last eviction was {look:?}, the threshold is {threshold}");
            self.broken("no eviction without a crossed threshold", now, detail);
        }
    }

    fn check_limit(&mut self, now: Duration, uid: &str) {
        let limit = self.script_of(uid).and_then(|script| script.size_limit?.strip_suffix("Ki")?.parse::<u64>().ok());
        let held = self.evictions.volumes.get(uid).copied().unwrap_or(0);
        if limit.is_none_or(|limit| held <= limit << 10) {
            let detail = format!("the volume of pod {uid} holds {held} bytes of {limit:?} KiB");
            self.broken("no eviction without an exceeded limit", now, detail);
        }
    }

    fn check_condition(&mut self, now: Duration, uid: &str) {
        let is_recent = |at: Duration| now.saturating_sub(at) < PRESSURE_TRANSITION + CONDITION_SLACK;
        if !self.evictions.low_at.is_some_and(is_recent) {
            let detail = format!("pod {uid}; low at {:?}", self.evictions.low_at);
            self.broken("no pod is rejected without pressure", now, detail);
        }
    }
}

impl SimState {
    /// An effect of the agent; the snapshot is that of the turn before.
    pub(crate) fn check_eviction(&mut self, effect: &Effect) {
        match effect {
            Effect::Do { op: Op::Node(NodeOp::MeasurePods { figures: PodFigures::Cgroups, .. }), .. } => {
                self.rules.evictions.pods.clear();
            }
            Effect::Record(record) if record.reason == event_reasons::EVICTED => {
                if let InvolvedObject::Pod(pod) = &record.about {
                    self.check_evicted(pod.uid.as_str(), &record.message);
                }
            }
            Effect::Do { .. } | Effect::Record(_) | Effect::Cancel(_) | Effect::Recall(_) => {}
        }
    }

    fn check_evicted(&mut self, uid: &str, message: &str) {
        let (now, max_age) = (self.now, self.look_age());
        if message.starts_with("The node had condition: ") {
            return self.rules.check_condition(now, uid);
        }
        if message.starts_with("Usage of EmptyDir volume ") {
            self.rules.check_limit(now, uid);
        } else if message.starts_with("The node was low on resource: memory. ") {
            let look = self.rules.evictions.memory.take();
            self.rules.check_crossed(now, look, THRESHOLD_BYTES, max_age);
            self.check_rank(uid);
        } else if message.starts_with("The node was low on resource: ephemeral-storage. ") {
            let look = self.rules.evictions.image_fs.take();
            self.rules.check_crossed(now, look, IMAGE_FS_THRESHOLD_BYTES, max_age);
        } else {
            self.rules.broken("no eviction without a crossed threshold", now, format!("{uid}: {message}"));
        }
        if self.snapshot.pods.iter().any(|(known, view)| known.as_str() == uid && !is_evictable(view)) {
            self.rules.broken("no critical or deleted pod is evicted", now, format!("{uid}: {message}"));
        }
        self.rules.pod_evicted(now, uid);
    }

    fn look_age(&self) -> Duration {
        if self.eviction_is_clear_since().is_some() { LOOK_AGE } else { SLOW_LOOK_AGE }
    }

    /// Since when no fault delays an eviction: each pod is looked at.
    fn eviction_is_clear_since(&self) -> Option<Duration> {
        let pods = self.snapshot.pods.keys().map(|uid| Touched::Pod(uid.as_str().to_owned()));
        let all: Vec<Touched> = pods.chain([Touched::Node]).collect();
        self.rules.trouble.clear_since(&all, self.now)
    }

    /// Of pods that end already, any may be chosen.
    fn check_rank(&mut self, uid: &str) {
        let used = |uid: &str| self.rules.evictions.pods.get(uid).copied();
        let candidates = self.snapshot.pods.iter().filter(|(_, view)| may_be_ranked(view));
        let ranked = candidates.map(|(uid, view)| (rank(view, used(uid.as_str())), uid.as_str()));
        let first = ranked.min();
        let own = self.snapshot.pods.iter().find(|(known, _)| known.as_str() == uid);
        let own = own.map(|(_, view)| rank(view, used(uid)));
        let is_wrong = match (first, own) {
            (Some((first, _)), Some(own)) => first < own,
            (None, Some(_)) => false,
            (_, None) => true,
        };
        if is_wrong {
            let detail = format!("pod {uid} is evicted with rank {own:?}, the first is {first:?}");
            self.rules.broken("the first by rank is evicted", self.now, detail);
        }
    }

    /// Memory does not stay low while a pod can be evicted.
    pub(super) fn check_relief(&mut self) {
        let is_low = self.memory.available(&self.runtime.picture) < THRESHOLD_BYTES;
        let could_end = |uid: &str| {
            let view = self.snapshot.pods.iter().find(|(known, _)| known.as_str() == uid).map(|(_, view)| view);
            view.is_some_and(|view| may_be_ranked(view)) && !self.rules.evictions.evicted.contains(uid)
        };
        if !is_low || !self.runtime.running().any(|found| could_end(&found.pod.uid)) {
            self.rules.evictions.low_since = None;
            return;
        }
        let since = *self.rules.evictions.low_since.get_or_insert(self.now);
        let Some(clear) = self.eviction_is_clear_since() else { return };
        let released = self.rules.evictions.last.map_or(Duration::ZERO, |last| last + RELEASE);
        if self.now > since.max(clear).max(released) + RELIEF {
            let detail =
                format!("memory is low since {since:?}, the last eviction was at {:?}", self.rules.evictions.last);
            self.missed("pressure is relieved", detail);
        }
    }
}

fn is_evictable(view: &PodView) -> bool {
    let priority = view.pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    view.source == Some(Source::Api) && priority < CRITICAL_PRIORITY
}

fn may_be_ranked(view: &PodView) -> bool {
    let has_ended = |status: &PodStatus| status.phase.as_deref().is_some_and(is_terminal);
    let has_ended = has_ended(&view.status) || view.pod.status.as_ref().is_some_and(has_ended);
    is_evictable(view) && view.lifecycle == "Syncing" && view.counts.rejected.is_none() && !has_ended
}

/// Upstream's `rankMemoryPressure`, the lowest first: not measured, over its requests, priority, how far over.
fn rank(view: &PodView, used: Option<u64>) -> (bool, bool, i32, Reverse<i64>) {
    let spec = view.pod.spec.clone().unwrap_or_default();
    let requested: i64 = spec.containers.iter().map(memory_request).sum();
    let over = used.map_or(0, |used| i64::try_from(used).unwrap_or(i64::MAX)).saturating_sub(requested);
    (used.is_some(), over <= 0, spec.priority.unwrap_or(0), Reverse(over))
}

/// Init containers of scripts have none.
fn memory_request(container: &Container) -> i64 {
    let resources = container.resources.clone().unwrap_or_default();
    let of = |list: Option<BTreeMap<String, _>>| list.and_then(|mut list| list.remove("memory"));
    let quantity = of(resources.requests).or_else(|| of(resources.limits));
    quantity.and_then(|quantity| bytes(&quantity.0)).unwrap_or(0)
}
