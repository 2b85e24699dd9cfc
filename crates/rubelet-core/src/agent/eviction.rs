//! Eviction: its looks, what is reclaimed first, and the pods that are ended.
//!
//! Owns: the routing, which pods may be evicted, and the events. The decisions are in `eviction.rs`.
//! Upstream: `eviction_manager.go` (synchronize, evictPod), `ContainerGC.DeleteAllUnusedContainers`.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::PodSpec;

use crate::{
    agent::Agent,
    effect::{EffectError, EventRecord, Facts, InvolvedObject, Severity},
    event_reasons,
    eviction::{
        NextStep, PodToEvict, Reclaimable,
        local_storage::has_limits,
        ranking::Candidate,
        threshold::{Resource, Signal},
        usage::{PodFigures, PodToMeasure, PodUsages},
    },
    flights::Subject,
    gc,
    id::PodUid,
    node::Routine,
    op::{NodeOp, Op},
    pod::{
        Lifecycle, PodRecord,
        plan::Planned,
        status::{FailureReason, PodFailure},
    },
    qos::is_critical,
    snapshot::EvictionView,
    time::Now,
};

impl Agent {
    pub(super) fn node_measured(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let Ok(Facts::NodeUsage(usage)) = result else { return self.node.eviction.look_failed(now) };
        let was_watching = self.node.eviction.is_watching();
        let step = self.node.eviction.node_measured(usage, &self.settings.eviction, now);
        if was_watching && let NextStep::Reclaim { signal, .. } | NextStep::RankPods(signal) = step {
            self.record_threshold_met(signal.resource());
        }
        match step {
            NextStep::Nothing => {}
            NextStep::Reclaim { what, .. } => self.reclaim(what, now),
            NextStep::StopReclaiming => self.node.image_gc.stop_reclaiming(),
            NextStep::RankPods(signal) => self.look_at_pods_to_rank(signal, now),
        }
    }

    pub(super) fn image_fs_found(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let places = match result {
            Ok(Facts::RuntimePlaces(places)) => Some(places),
            Ok(_) | Err(_) => None,
        };
        self.node.eviction.places_found(places, now);
    }

    /// Once per attempt, whether or not pods must be evicted for it.
    fn record_threshold_met(&mut self, resource: Resource) {
        let message = format!("Attempting to reclaim {}", resource.name());
        let (about, reason) = (InvolvedObject::Node, event_reasons::EVICTION_THRESHOLD_MET);
        self.outbox.record(EventRecord::new(about, Severity::Warning, reason, message));
    }

    fn reclaim(&mut self, what: Reclaimable, now: Now) {
        let (containers, images) = match what {
            Reclaimable::Containers => (true, false),
            Reclaimable::Images => (false, true),
            Reclaimable::ContainersAndImages => (true, true),
        };
        if images {
            self.node.image_gc.reclaim();
        }
        if containers {
            self.remove_dead_containers(now);
        }
    }

    /// The dead containers of pods that have ended, which are otherwise kept for their logs until the pod is deleted. A pod whose
    /// end is not in the API, as a static one's, keeps them: without them the next process would run it again.
    fn remove_dead_containers(&mut self, now: Now) {
        let ended = self.records.values().filter(|record| match record.lifecycle {
            Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => true,
            Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminating { .. } => false,
        });
        let with_facts = ended
            .filter(|record| !record.is_desired() || record.has_ended_in_api())
            .filter_map(|record| Some((record, record.fresh_facts()?)));
        let removals = with_facts.flat_map(|(record, facts)| {
            gc::all_dead(record, facts).into_iter().map(|planned| (record.id.uid.clone(), planned))
        });
        for (uid, planned) in removals.collect::<Vec<(PodUid, Planned)>>() {
            self.send_planned(&uid, planned, now);
        }
    }

    /// At a turn's end: steps that do not wait for a look.
    pub(super) fn evict_pods(&mut self, now: Now) {
        if !self.node.is_ready() {
            return;
        }
        let (flights, image_gc, records) = (&self.outbox.flights, &self.node.image_gc, &self.records);
        let is_reclaiming = || image_gc.is_reclaiming() || flights.has_removals();
        let has_released = |uid: &PodUid| records.get(uid).is_none_or(PodRecord::is_released);
        if self.node.eviction.advance(is_reclaiming, has_released, now) {
            self.send_routines(now);
        }
        let watched = || self.records.values().any(|record| may_be_evicted(record).is_some_and(has_limits));
        if self.node.eviction.limits_check_due(watched, &self.settings.eviction, now) {
            let pods = self.to_measure(has_limits);
            let op = NodeOp::MeasurePods { pods, figures: PodFigures::Disks };
            let reason = "look at local storage is due".to_owned();
            self.outbox.send(Subject::Node(Routine::CheckLocalStorage), op, reason, &self.settings, now);
        }
    }

    fn look_at_pods_to_rank(&mut self, signal: Signal, now: Now) {
        let figures = match signal.resource() {
            Resource::Memory | Resource::Pids => PodFigures::Cgroups,
            Resource::EphemeralStorage | Resource::Inodes => PodFigures::Disks,
        };
        let op = NodeOp::MeasurePods { pods: self.to_measure(|_| true), figures };
        let reason = format!("the node is low on {}", signal.resource().name());
        self.outbox.send(Subject::Node(Routine::RankPods), op, reason, &self.settings, now);
    }

    fn to_measure(&self, is_meant: impl Fn(&PodSpec) -> bool) -> Vec<PodToMeasure> {
        let tree = self.cgroups();
        let pods = self.records.values().filter_map(|record| {
            let spec = may_be_evicted(record).filter(|spec| is_meant(spec))?;
            let running = record.facts.iter().flat_map(|facts| facts.running());
            Some(PodToMeasure {
                pod: record.id.clone(),
                cgroup: tree.map(|tree| tree.pod_path(spec, &record.id.uid)),
                containers: running.map(|container| (container.name.clone(), container.id.clone())).collect(),
            })
        });
        pods.collect()
    }

    pub(super) fn pods_ranked(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let Ok(Facts::PodUsages(usages)) = result else { return self.node.eviction.ranking_failed(now) };
        let candidates = candidates(&self.records, &usages);
        let is_critical = |candidate: &Candidate<'_>| is_critical(candidate.pod, candidate.spec);
        let chosen = self.node.eviction.rank(candidates, is_critical, &self.settings.eviction, now);
        if let Some(pod) = chosen {
            self.evict(pod, now);
        }
    }

    pub(super) fn local_storage_checked(&mut self, op: &Op, result: Result<Facts, EffectError>, now: Now) {
        let (Op::Node(NodeOp::MeasurePods { pods, .. }), Ok(Facts::PodUsages(usages))) = (op, result) else {
            return self.node.eviction.limits_check_failed();
        };
        let asked = |candidate: &Candidate<'_>| pods.iter().any(|it| it.pod.uid == PodUid::of(candidate.pod));
        let mut candidates = candidates(&self.records, &usages);
        candidates.retain(|candidate| asked(candidate) && !is_critical(candidate.pod, candidate.spec));
        for pod in self.node.eviction.over_limits(&candidates, now) {
            self.evict(pod, now);
        }
    }

    /// The one of the last turn, unless a look, an eviction or a collection of images changed it.
    pub(super) fn eviction_view(&mut self, now: Now) -> Arc<EvictionView> {
        let (eviction, image_gc) = (&mut self.node.eviction, &mut self.node.image_gc);
        let has_changed = [eviction.take_change(), image_gc.take_change()].contains(&true);
        if !has_changed {
            return self.snapshot.eviction.clone();
        }
        Arc::new(EvictionView {
            thresholds: eviction.view(&self.settings.eviction, now),
            record: eviction.record().clone(),
            images: image_gc.recent().clone(),
        })
    }

    fn evict(&mut self, pod: PodToEvict, now: Now) {
        let PodToEvict { uid, grace_secs, message, is_disruption, annotations } = pod;
        let Some(record) = self.records.get(&uid) else { return };
        let about = InvolvedObject::Pod(record.id.clone());
        let event = EventRecord::new(about, Severity::Warning, event_reasons::EVICTED, message.clone());
        self.outbox.record(event.annotated(annotations));
        let disruption = is_disruption.then(|| message.clone());
        let failure = PodFailure { disruption, ..PodFailure::new(FailureReason::Evicted, message) };
        self.fail_pod(&uid, failure, grace_secs, now);
    }
}

fn candidates<'a>(records: &'a BTreeMap<PodUid, PodRecord>, usages: &'a PodUsages) -> Vec<Candidate<'a>> {
    let candidates = records.values().filter_map(|record| {
        let spec = may_be_evicted(record)?;
        Some(Candidate { pod: &record.pod, spec, usage: usages.get(&record.id.uid) })
    });
    candidates.collect()
}

/// The spec of a pod that was admitted and has not ended. One that is being ended by the node already is not ended twice, and
/// one that was deleted, and is still being stopped, is nobody's any more.
fn may_be_evicted(record: &PodRecord) -> Option<&PodSpec> {
    let is_active = match record.lifecycle {
        Lifecycle::Syncing | Lifecycle::Terminating { .. } => true,
        Lifecycle::Waiting | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => false,
    };
    let is_ended = record.failure.is_some() || record.rejected.is_some() || record.has_ended_in_api();
    let is_candidate = record.is_desired() && is_active && !is_ended;
    record.pod.spec.as_ref().filter(|_| is_candidate)
}
