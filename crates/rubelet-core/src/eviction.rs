//! Eviction: what happens when the node runs low on memory, disk space, inodes or processes.
//!
//! Owns: when the node's figures are looked at, which thresholds are met since when, the node's pressure conditions, and the
//! steps of an eviction: reclaim what nobody uses, look at the pods, evict the first, wait until it has released its resources.
//! A look comes before a threshold can be crossed by much: often while little is left, rarely while much is.
//! Never: measures, stops a pod.
//! Upstream: `eviction/eviction_manager.go`, which looks at everything every 10 s.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use self::{
    places::Places,
    ranking::Candidate,
    threshold::{Observation, Pressure, Reclaim, Resource, Signal, Threshold},
    usage::{DiskLayout, NodeUsage, RuntimePlaces},
};
use crate::{
    id::{PodRef, PodUid},
    time::{Now, Uptime},
};

pub mod local_storage;
mod message;
mod places;
pub mod ranking;
pub mod threshold;
pub mod usage;
mod view;

pub use self::view::{ThresholdState, ThresholdView};

/// The longest time between two looks at the node, as upstream's only one.
const MAX_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of looks at pods with limits on local storage, as upstream.
const LIMITS_INTERVAL: Duration = Duration::from_secs(10);
/// How long an evicted pod may take to release its resources before another one is evicted, as upstream.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long dead containers and unused images are removed before pods are evicted all the same.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(60);
/// A pod evicted for a hard threshold or a limit, as upstream.
const HARD_GRACE_SECS: i64 = 1;
/// Evictions kept for `rubelet node` and `rubelet explain`.
const MAX_RECENT: usize = 50;
/// Pods named as ranked before the evicted one.
const MAX_PASSED_OVER: usize = 10;

/// `eviction…` of KubeletConfiguration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvictionSettings {
    pub thresholds: Vec<Threshold>,
    /// How long a pressure condition outlasts the pressure.
    pub pressure_transition: Duration,
    /// `evictionMaxPodGracePeriod`.
    pub max_pod_grace_secs: i64,
    /// `localStorageCapacityIsolation`.
    pub limits_local_storage: bool,
}

impl Default for EvictionSettings {
    fn default() -> Self {
        EvictionSettings {
            thresholds: Vec::new(),
            pressure_transition: Duration::from_secs(300),
            max_pod_grace_secs: 0,
            limits_local_storage: true,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Eviction {
    stage: Stage,
    /// When the node is looked at next.
    look_at: Uptime,
    /// A look is in flight.
    is_looking: bool,
    observed: BTreeMap<Signal, Seen>,
    layout: DiskLayout,
    places: Places,
    /// Thresholds by their place in the settings, and since when each is met.
    met_since: BTreeMap<usize, Uptime>,
    /// Those that were met for their grace period at the last look.
    driving: BTreeSet<usize>,
    last_seen: BTreeMap<Pressure, Uptime>,
    pressures: BTreeSet<Pressure>,
    limits_at: Uptime,
    is_checking_limits: bool,
    record: EvictionRecord,
    /// Readers have not seen the last look or eviction.
    has_changed: bool,
}

/// What was evicted by this process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvictionRecord {
    /// As the metric counts them, by signal.
    pub counts: BTreeMap<String, u64>,
    /// The newest last.
    pub recent: VecDeque<EvictedPod>,
    pub last_ranking: Option<Ranking>,
}

/// Pods were ranked, for the metric of how old the node's figures were then.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// How many rankings there were before it.
    pub number: u64,
    /// By the signals that drive it.
    pub stats_age: BTreeMap<String, Duration>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvictedPod {
    pub pod: PodRef,
    pub at: Timestamp,
    pub signal: String,
    /// What it used of the resource, or of what is limited, as text.
    pub used: String,
    pub message: String,
    /// Pods that were ranked before it and are critical.
    pub passed_over: Vec<PodRef>,
    /// How many pods were ranked.
    pub ranked: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Nothing is being evicted.
    #[default]
    Watching,
    /// Dead containers and unused images are removed first.
    Reclaiming { threshold: usize, until: Uptime, is_over: bool },
    /// The figures of pods are looked at.
    Ranking { threshold: usize },
    /// Pods that were evicted release their resources.
    Evicting { pods: BTreeSet<PodUid>, until: Uptime },
}

/// A signal at the last look.
#[derive(Clone, Copy, Debug)]
struct Seen {
    observed: Observation,
    at: Uptime,
    falling_per_sec: u64,
}

/// What follows from a look at the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    Nothing,
    /// Remove what nobody uses.
    Reclaim {
        signal: Signal,
        what: Reclaimable,
    },
    /// What was reclaimed is enough: stop.
    StopReclaiming,
    /// Look at the figures of all pods.
    RankPods(Signal),
}

/// What may be removed before pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimable {
    Containers,
    Images,
    ContainersAndImages,
}

/// A pod to end.
#[derive(Clone, Debug, PartialEq)]
pub struct PodToEvict {
    pub uid: PodUid,
    pub grace_secs: i64,
    pub message: String,
    /// Condition DisruptionTarget is set, with the same message.
    pub is_disruption: bool,
    pub annotations: BTreeMap<String, String>,
}

impl Eviction {
    /// The look at the node that is to begin now, with what is known of the runtime's places; it counts as in flight.
    pub fn due(&mut self, settings: &EvictionSettings, now: Now) -> Option<Option<RuntimePlaces>> {
        if self.next_look(settings)? > now.uptime {
            return None;
        }
        self.is_looking = true;
        Some(self.places.known().cloned())
    }

    /// Whether the runtime is to be asked now where it keeps images and containers; the call counts as in flight.
    pub fn places_due(&mut self, settings: &EvictionSettings, now: Now) -> bool {
        !settings.thresholds.is_empty() && self.places.due(now)
    }

    /// The runtime's answer; `None` if there is none.
    pub fn places_found(&mut self, places: Option<RuntimePlaces>, now: Now) {
        if self.places.found(places, now) {
            self.look_at = self.look_at.min(now.uptime);
        }
    }

    pub fn next_wakeup(&self, settings: &EvictionSettings) -> Option<Uptime> {
        let reclaimed_by = match &self.stage {
            Stage::Reclaiming { until, is_over: false, .. } | Stage::Evicting { until, .. } => Some(*until),
            Stage::Watching | Stage::Reclaiming { .. } | Stage::Ranking { .. } => None,
        };
        let places_at = self.places.next_wakeup().filter(|_| !settings.thresholds.is_empty());
        [self.next_look(settings), self.next_limits_check(settings), reclaimed_by, places_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn next_look(&self, settings: &EvictionSettings) -> Option<Uptime> {
        let may_look = match &self.stage {
            Stage::Watching | Stage::Reclaiming { .. } => true,
            Stage::Ranking { .. } | Stage::Evicting { .. } => false,
        };
        (may_look && !self.is_looking && !settings.thresholds.is_empty()).then_some(self.look_at)
    }

    /// Nothing is being evicted or reclaimed.
    pub fn is_watching(&self) -> bool {
        self.stage == Stage::Watching
    }

    /// The kernel says that memory runs short.
    pub fn hasten(&mut self, now: Now) {
        self.look_at = self.look_at.min(now.uptime);
    }

    pub fn look_failed(&mut self, now: Now) {
        self.is_looking = false;
        self.look_at = now.uptime + MAX_INTERVAL;
    }

    /// Takes in a look at the node.
    pub fn node_measured(&mut self, usage: NodeUsage, settings: &EvictionSettings, now: Now) -> NextStep {
        (self.is_looking, self.has_changed) = (false, true);
        self.observe(usage, now);
        self.update_thresholds(settings, now);
        self.look_at = now.uptime + self.interval(settings, now);
        match self.stage {
            Stage::Watching => self.begin_reclaim(settings, now),
            Stage::Reclaiming { .. } if !self.is_any_met(&settings.thresholds) => {
                self.stage = Stage::Watching;
                NextStep::StopReclaiming
            }
            Stage::Reclaiming { threshold, is_over, .. } if is_over || self.is_low_on_memory(settings) => {
                self.end_reclaim(threshold, settings, now)
            }
            Stage::Reclaiming { .. } | Stage::Ranking { .. } | Stage::Evicting { .. } => NextStep::Nothing,
        }
    }

    fn observe(&mut self, usage: NodeUsage, now: Now) {
        let NodeUsage { mut signals, layout } = usage;
        self.layout = layout.unwrap_or(self.layout);
        // Without the layout of the disks the wrong things would be removed.
        signals.retain(|signal, _| signal.pressure() != Pressure::Disk || self.places.was_asked());
        let before = std::mem::take(&mut self.observed);
        let seen = |(signal, observed): (Signal, Observation)| {
            let falling_per_sec = before.get(&signal).map_or(0, |known| {
                let fallen = known.observed.available.saturating_sub(observed.available);
                let millis = u64::try_from(now.uptime.since(known.at).as_millis()).unwrap_or(u64::MAX).max(1);
                fallen.saturating_mul(1000).checked_div(millis).unwrap_or(0)
            });
            (signal, Seen { observed, at: now.uptime, falling_per_sec })
        };
        self.observed = signals.into_iter().map(seen).collect();
    }

    fn update_thresholds(&mut self, settings: &EvictionSettings, now: Now) {
        let is_met = |threshold: &Threshold, reclaim| {
            self.observed.get(&threshold.signal).is_some_and(|seen| threshold.is_met(seen.observed, reclaim))
        };
        let all = settings.thresholds.iter().enumerate();
        let met = all.filter(|(place, threshold)| {
            is_met(threshold, Reclaim::Ignored)
                || (self.driving.contains(place) && is_met(threshold, Reclaim::Enforced))
        });
        let met: Vec<(usize, &Threshold)> = met.collect();
        self.met_since.retain(|place, _| met.iter().any(|(known, _)| known == place));
        self.driving.clear();
        for (place, threshold) in met {
            let since = *self.met_since.entry(place).or_insert(now.uptime);
            // A condition does not wait for the grace period.
            self.last_seen.insert(threshold.signal.pressure(), now.uptime);
            if now.uptime.since(since) >= threshold.grace {
                self.driving.insert(place);
            }
        }
        self.last_seen.retain(|_, seen_at| now.uptime.since(*seen_at) < settings.pressure_transition);
        self.pressures = self.last_seen.keys().copied().collect();
    }

    /// Until the first threshold could be crossed, or a grace period is over.
    fn interval(&self, settings: &EvictionSettings, now: Now) -> Duration {
        let until_crossed = settings.thresholds.iter().enumerate().filter_map(|(place, threshold)| {
            if let Some(since) = self.met_since.get(&place) {
                let left = threshold.grace.saturating_sub(now.uptime.since(*since));
                return (!left.is_zero()).then_some(left);
            }
            let seen = self.observed.get(&threshold.signal)?;
            let value = threshold.value.amount(seen.observed.capacity);
            let left = seen.observed.available.saturating_sub(value).saturating_mul(1000);
            let per_sec = threshold.signal.fastest_per_sec().max(seen.falling_per_sec.saturating_mul(2));
            Some(Duration::from_millis(left.checked_div(per_sec).unwrap_or(u64::MAX)))
        });
        until_crossed.min().unwrap_or(MAX_INTERVAL).clamp(MIN_INTERVAL, MAX_INTERVAL)
    }

    fn is_any_met(&self, thresholds: &[Threshold]) -> bool {
        thresholds.iter().any(|threshold| {
            let seen = self.observed.get(&threshold.signal);
            seen.is_some_and(|seen| threshold.is_met(seen.observed, Reclaim::Enforced))
        })
    }

    /// Memory comes first: nothing else is as urgent.
    fn begin_reclaim(&mut self, settings: &EvictionSettings, now: Now) -> NextStep {
        let signal_of = |place: &usize| settings.thresholds[*place].signal;
        let first = self.driving.iter().min_by_key(|place| (signal_of(place).resource() != Resource::Memory, **place));
        let Some(threshold) = first.copied() else { return NextStep::Nothing };
        let signal = settings.thresholds[threshold].signal;
        let Some(what) = reclaimable(signal, self.layout) else { return self.begin_ranking(threshold, settings) };
        self.stage = Stage::Reclaiming { threshold, until: now.uptime + RECLAIM_TIMEOUT, is_over: false };
        NextStep::Reclaim { signal, what }
    }

    fn is_low_on_memory(&self, settings: &EvictionSettings) -> bool {
        self.driving.iter().any(|place| settings.thresholds[*place].signal.resource() == Resource::Memory)
    }

    /// What could be removed is gone, or memory cannot wait for it. Upstream evicts a pod for the threshold that it began
    /// with, even if that is no longer met and another one is.
    fn end_reclaim(&mut self, threshold: usize, settings: &EvictionSettings, now: Now) -> NextStep {
        if self.driving.contains(&threshold) && !self.is_low_on_memory(settings) {
            return self.begin_ranking(threshold, settings);
        }
        self.stage = Stage::Watching;
        self.begin_reclaim(settings, now)
    }

    fn begin_ranking(&mut self, threshold: usize, settings: &EvictionSettings) -> NextStep {
        self.stage = Stage::Ranking { threshold };
        NextStep::RankPods(settings.thresholds[threshold].signal)
    }

    /// At a turn's end: `is_reclaiming` says whether something is still being removed, `has_released` whether a pod has given
    /// back what it held. Returns whether the node is to be looked at now.
    pub fn advance(
        &mut self,
        is_reclaiming: impl FnOnce() -> bool,
        has_released: impl Fn(&PodUid) -> bool,
        now: Now,
    ) -> bool {
        match &mut self.stage {
            Stage::Reclaiming { until, is_over, .. } if !*is_over && (now.uptime >= *until || !is_reclaiming()) => {
                *is_over = true;
                self.look_at = now.uptime;
                true
            }
            Stage::Evicting { pods, until } => {
                pods.retain(|uid| !has_released(uid));
                let is_over = pods.is_empty() || now.uptime >= *until;
                if is_over {
                    self.stage = Stage::Watching;
                    self.look_at = now.uptime;
                }
                is_over
            }
            Stage::Watching | Stage::Reclaiming { .. } | Stage::Ranking { .. } => false,
        }
    }

    /// The pods' figures are known: the first of them that may be evicted. `None`: none may.
    pub fn rank(
        &mut self,
        mut candidates: Vec<Candidate<'_>>,
        is_critical: impl Fn(&Candidate<'_>) -> bool,
        settings: &EvictionSettings,
        now: Now,
    ) -> Option<PodToEvict> {
        let Stage::Ranking { threshold } = self.stage else { return None };
        self.stage = Stage::Watching;
        self.look_at = now.uptime + MAX_INTERVAL;
        let threshold = &settings.thresholds[threshold];
        self.note_ranking(settings, now);
        ranking::rank(&mut candidates, threshold.signal, self.layout);
        let place = candidates.iter().position(|candidate| !is_critical(candidate))?;
        let chosen = &candidates[place];
        let resource = threshold.signal.resource();
        let mut message = message::low_on(resource, &self.met(settings));
        let annotations = message::blame(resource, chosen, &mut message);
        let own_grace_secs = chosen.spec.termination_grace_period_seconds;
        let grace_secs = if threshold.is_hard() {
            HARD_GRACE_SECS
        } else {
            own_grace_secs.map_or(settings.max_pod_grace_secs, |own| own.min(settings.max_pod_grace_secs))
        };
        let pod = PodRef::of(chosen.pod);
        let uid = pod.uid.clone();
        self.note(EvictedPod {
            pod,
            at: now.wall,
            signal: threshold.signal.name().to_owned(),
            used: resource.text(chosen.used(threshold.signal, self.layout)),
            message: message.clone(),
            passed_over: candidates[..place].iter().take(MAX_PASSED_OVER).map(|it| PodRef::of(it.pod)).collect(),
            ranked: candidates.len(),
        });
        self.await_release(BTreeSet::from([uid.clone()]), now);
        Some(PodToEvict { uid, grace_secs, message, is_disruption: true, annotations })
    }

    /// The thresholds that drive the eviction, with what was observed.
    fn met<'a>(&self, settings: &'a EvictionSettings) -> Vec<(&'a Threshold, Observation)> {
        let driving = self.driving.iter().map(|place| &settings.thresholds[*place]);
        driving.filter_map(|threshold| Some((threshold, self.observed.get(&threshold.signal)?.observed))).collect()
    }

    fn note_ranking(&mut self, settings: &EvictionSettings, now: Now) {
        self.has_changed = true;
        let driving = self.driving.iter().map(|place| settings.thresholds[*place].signal);
        let age = |signal: Signal| {
            self.observed.get(&signal).map(|seen| (signal.name().to_owned(), now.uptime.since(seen.at)))
        };
        let number = self.record.last_ranking.as_ref().map_or(0, |last| last.number.saturating_add(1));
        self.record.last_ranking = Some(Ranking { number, stats_age: driving.filter_map(age).collect() });
    }

    /// The look at the pods failed.
    pub fn ranking_failed(&mut self, now: Now) {
        if let Stage::Ranking { .. } = self.stage {
            self.stage = Stage::Watching;
            self.look_at = now.uptime + MIN_INTERVAL;
        }
    }

    fn await_release(&mut self, pods: BTreeSet<PodUid>, now: Now) {
        self.stage = Stage::Evicting { pods, until: now.uptime + CLEANUP_TIMEOUT };
    }

    fn note(&mut self, evicted: EvictedPod) {
        self.has_changed = true;
        let count = self.record.counts.entry(evicted.signal.clone()).or_default();
        *count = count.saturating_add(1);
        self.record.recent.push_back(evicted);
        if self.record.recent.len() > MAX_RECENT {
            self.record.recent.pop_front();
        }
    }

    fn next_limits_check(&self, settings: &EvictionSettings) -> Option<Uptime> {
        (settings.limits_local_storage && !self.is_checking_limits).then_some(self.limits_at)
    }

    /// Whether pods with limits on local storage are to be looked at now; the look counts as in flight if there are any.
    pub fn limits_check_due(&mut self, has_pods: impl FnOnce() -> bool, settings: &EvictionSettings, now: Now) -> bool {
        if self.next_limits_check(settings).is_none_or(|moment| moment > now.uptime) {
            return false;
        }
        self.limits_at = now.uptime + LIMITS_INTERVAL;
        self.is_checking_limits = has_pods();
        self.is_checking_limits
    }

    /// The pods that exceed a limit on local storage. Those that were not measured exceed none.
    pub fn over_limits(&mut self, pods: &[Candidate<'_>], now: Now) -> Vec<PodToEvict> {
        self.is_checking_limits = false;
        self.limits_at = now.uptime + LIMITS_INTERVAL;
        let mut evicted = Vec::new();
        for candidate in pods {
            let Some(usage) = candidate.usage else { continue };
            let Some(excess) = local_storage::excess(candidate.spec, usage, self.layout) else { continue };
            let pod = PodRef::of(candidate.pod);
            let local_storage::Excess { signal, message, used_bytes } = excess;
            evicted.push(PodToEvict {
                uid: pod.uid.clone(),
                grace_secs: HARD_GRACE_SECS,
                message: message.clone(),
                is_disruption: false,
                annotations: BTreeMap::new(),
            });
            let (signal, used) = (signal.to_owned(), Resource::EphemeralStorage.text(used_bytes));
            let (passed_over, ranked) = (Vec::new(), 0);
            self.note(EvictedPod { pod, at: now.wall, signal, used, message, passed_over, ranked });
        }
        evicted
    }

    pub fn limits_check_failed(&mut self) {
        self.is_checking_limits = false;
    }

    /// Whether something changed for readers since the last call.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// The node's conditions as of the last look.
    pub fn pressures(&self) -> &BTreeSet<Pressure> {
        &self.pressures
    }

    /// `None` before the first look of this process.
    pub fn known_pressures(&self, settings: &EvictionSettings) -> Option<&BTreeSet<Pressure>> {
        let is_known = settings.thresholds.is_empty() || !self.observed.is_empty();
        is_known.then_some(&self.pressures)
    }

    pub fn record(&self) -> &EvictionRecord {
        &self.record
    }
}

/// What may be removed without evicting pods, when this signal is low.
fn reclaimable(signal: Signal, layout: DiskLayout) -> Option<Reclaimable> {
    let is_of_images = match signal {
        Signal::ImageFsAvailable | Signal::ImageFsInodesFree => true,
        Signal::NodeFsAvailable | Signal::NodeFsInodesFree => false,
        Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable | Signal::PidAvailable => return None,
    };
    match (layout, is_of_images) {
        (DiskLayout::Shared, _) | (DiskLayout::DedicatedImages, true) => Some(Reclaimable::ContainersAndImages),
        (DiskLayout::DedicatedImages, false) => None,
        (DiskLayout::Split, true) => Some(Reclaimable::Images),
        (DiskLayout::Split, false) => Some(Reclaimable::Containers),
    }
}

#[cfg(test)]
mod tests;
