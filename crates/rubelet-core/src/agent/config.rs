//! Applies updates of the pod sources to the pods on the node.
//!
//! Upstream: HandlePodAdditions, HandlePodUpdates, HandlePodRemoves, HandlePodReconcile, `podWorkers.UpdatePod`.

use std::sync::Arc;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use crate::{
    agent::Agent,
    api_requests::ApiRequest,
    event::Source,
    flights::{Flight, PodSubject, Subject},
    id::{PodRef, PodUid},
    op::AtPodEnd,
    pod::{
        Cure, Desired, Grace, Lifecycle, Look, PodRecord, TerminationCause, allocation::update_pod_from_allocation,
        hooks::Hook, status::PodFailure,
    },
    pod_config::{Changes, Completeness, ConfigOp, PodUpdate},
    pod_manager::is_mirror_pod,
    time::Now,
};

/// Upstream's grace period for a pod without a known spec.
const ORPHAN_GRACE_SECS: i64 = 1;

impl Agent {
    pub(super) fn handle_config(&mut self, source: Source, pods: Vec<Arc<Pod>>, completeness: Completeness, now: Now) {
        let is_first = !self.config.has_seen(source);
        let changes = match completeness {
            Completeness::Whole => self.config.update(source, pods, now.wall),
            Completeness::Partial => self.config.update_partially(source, pods, now.wall),
        };
        self.handle_changes(changes, now);
        if self.config.sources_ready(&self.settings.sources) {
            self.node.sources_ready(now);
        }
        if is_first && source == Source::Api {
            self.compare_mirror_pods();
        }
    }

    pub(super) fn handle_config_change(&mut self, source: Source, pods: Vec<Arc<Pod>>, removed: &[PodUid], now: Now) {
        let changes = self.config.change(source, pods, removed, now.wall);
        self.handle_changes(changes, now);
    }

    fn handle_changes(&mut self, changes: Changes, now: Now) {
        for refused in changes.refused {
            self.outbox.record(refused);
        }
        for PodUpdate { op, source, pods } in changes.updates {
            for pod in pods {
                if is_mirror_pod(&pod) {
                    self.handle_mirror_pod(op, &pod, now);
                    continue;
                }
                match op {
                    ConfigOp::Add => self.handle_pod_addition(source, pod, now),
                    // Graceful deletion is an update: the pod is desired until its source removes it.
                    ConfigOp::Update | ConfigOp::Delete => self.handle_pod_update(source, pod, now),
                    ConfigOp::Remove => self.handle_pod_removal(&pod, now),
                    ConfigOp::Reconcile => self.handle_pod_reconcile(pod, now),
                }
            }
        }
    }

    /// The API server's copy of a static pod is never run.
    fn handle_mirror_pod(&mut self, op: ConfigOp, mirror: &Arc<Pod>, now: Now) {
        match op {
            ConfigOp::Add | ConfigOp::Update | ConfigOp::Delete | ConfigOp::Reconcile => {
                self.pods.update_pod(mirror.clone());
            }
            ConfigOp::Remove => {
                self.pods.remove_pod(mirror);
                self.statuses.forget_api_pod(&PodUid::of(mirror));
            }
        }
        self.mirror_pod_changed(mirror, now);
    }

    fn handle_pod_addition(&mut self, source: Source, pod: Arc<Pod>, now: Now) {
        let id = PodRef::of(&pod);
        self.pods.add_pod(pod.clone());
        if let Some(record) = self.records.get_mut(&id.uid) {
            // The same pod is still terminating; it starts again when its record is dropped.
            record.desired = Desired::By(source);
        } else {
            let arrival = self.outbox.next_arrival();
            let pod = update_pod_from_allocation(pod, None);
            let mut record = PodRecord::new(id.clone(), pod, Desired::By(source), arrival, now);
            record.look = Look::Requested;
            self.records.insert(id.uid.clone(), record);
        }
        self.pod_changed(&id.uid, now);
    }

    /// Starts the termination of a pod that its source deletes, and compares the API server's copy of its status.
    pub(super) fn pod_changed(&mut self, uid: &PodUid, now: Now) {
        let record = &self.records[uid];
        let (pod, grace_secs) = (record.pod.clone(), record.grace_secs());
        if pod.metadata.deletion_timestamp.is_some() {
            self.terminate(uid, TerminationCause::Removed, grace_secs, now);
        }
        self.api_pod_changed(&pod, now);
        self.touched.insert(uid.clone());
    }

    fn handle_pod_update(&mut self, source: Source, pod: Arc<Pod>, now: Now) {
        let id = PodRef::of(&pod);
        if !self.records.contains_key(&id.uid) {
            return self.handle_pod_addition(source, pod, now);
        }
        let pod = self.pods.update_pod(pod);
        if let Some(record) = self.records.get_mut(&id.uid) {
            record.pod = update_pod_from_allocation(pod, Some(&record.pod));
            record.request_refresh(now);
        }
        self.pod_changed(&id.uid, now);
    }

    fn handle_pod_removal(&mut self, pod: &Pod, now: Now) {
        let id = PodRef::of(pod);
        self.pods.remove_pod(pod);
        self.statuses.forget_api_pod(&id.uid);
        self.api_requests.forget(&ApiRequest::Status(id.uid.clone()));
        self.api_requests.mirrors.insert(id.full_name());
        let Some(record) = self.records.get_mut(&id.uid) else { return };
        record.desired = Desired::No;
        let grace_secs = record.grace_secs();
        self.terminate(&id.uid, TerminationCause::Removed, grace_secs, now);
    }

    /// Only the status changed at the source, not the spec.
    fn handle_pod_reconcile(&mut self, pod: Arc<Pod>, now: Now) {
        let pod = self.pods.update_pod(pod);
        let uid = PodUid::of(&pod);
        self.api_pod_changed(&pod, now);
        if let Some(record) = self.records.get_mut(&uid) {
            record.pod = update_pod_from_allocation(pod, Some(&record.pod));
        }
        self.touched.insert(uid);
    }

    /// Retries at once what failed for lack of an object; other back-offs stay.
    pub(super) fn handle_refresh(&mut self, uid: &PodUid, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.request_refresh(now);
        record.end_back_offs(Cure::ObjectChange, now);
        self.touched.insert(uid.clone());
    }

    /// Starts the termination of a pod, or shortens its grace period. Starts in flight are cancelled.
    pub(super) fn terminate(&mut self, uid: &PodUid, cause: TerminationCause, grace_secs: i64, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        self.touched.insert(uid.clone());
        let asked = Grace::starting(grace_secs, now);
        match record.lifecycle {
            Lifecycle::Waiting | Lifecycle::Syncing => {
                record.enter(Lifecycle::terminating(asked, cause), now);
                self.hasten_pre_stops(uid, asked, now);
                self.images.forget_pod(uid);
                self.outbox.cancel_of_pod(uid, |subject, flight| match subject {
                    PodSubject::Image(_) => true,
                    PodSubject::Look | PodSubject::Probe(..) => false,
                    PodSubject::Pod
                    | PodSubject::Volume(_)
                    | PodSubject::Unmount(_)
                    | PodSubject::Volumes
                    | PodSubject::Container(_)
                    | PodSubject::Removal(_) => flight.op.at_pod_end() == AtPodEnd::Abort || outlasts(flight, asked),
                });
                self.outbox.recall_of_pod(uid, |_, flight| flight.op.at_pod_end() == AtPodEnd::Recall);
            }
            Lifecycle::Terminating { grace, cause: known, containers } => {
                let shrunk = grace.shrunk_to(asked);
                // A completed pod is kept for readers until it is no longer desired.
                let cause = if known.keeps_record() { cause } else { known };
                record.enter(Lifecycle::Terminating { grace: shrunk, cause, containers }, now);
                if shrunk == grace {
                    return;
                }
                self.hasten_pre_stops(uid, shrunk, now);
                // Stops in flight were given more time than is left now: they are sent again.
                self.outbox.cancel_of_pod(uid, |_, flight| outlasts(flight, shrunk));
            }
            // A completed pod was kept for readers; now its record may be dropped.
            Lifecycle::Terminated { .. } => record.enter(Lifecycle::Terminated { cause }, now),
            Lifecycle::Finished { .. } => record.enter(Lifecycle::Finished { cause }, now),
        }
    }

    /// Terminates a pod because of its node, whatever its containers do; one that is terminating keeps its reason, with a
    /// shorter grace period. Upstream: `killPodNow`.
    pub(super) fn fail_pod(&mut self, uid: &PodUid, failure: PodFailure, grace_secs: i64, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        let may_run = match record.lifecycle {
            Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminating { .. } => true,
            Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => false,
        };
        if may_run {
            record.failure.get_or_insert(failure);
            self.terminate(uid, TerminationCause::Failed, grace_secs, now);
        }
    }

    /// A new grace period has begun; a running hook ends with it at the latest.
    fn hasten_pre_stops(&mut self, uid: &PodUid, grace: Grace, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        record.restart_pre_stop_clocks(now);
        let hooks = self.outbox.pod_flights(uid).changes().filter(|(_, flight)| flight.hook(Hook::PreStop).is_some());
        for subject in hooks.map(|(subject, _)| Subject::Pod(uid.clone(), subject.clone())).collect::<Vec<_>>() {
            self.outbox.flights.hasten(&subject, grace.ends_at);
        }
    }

    /// A pod that is only in the runtime or on disk is stopped and its remains are removed.
    pub(super) fn adopt_orphan(&mut self, id: PodRef, now: Now) {
        if self.config.unreadable.contains(&id.uid) {
            return;
        }
        let listed = self.node.listing.as_ref().and_then(|listing| listing.pods.get(&id.uid));
        let id = listed.map_or(id, |listed| listed.pod.clone());
        let pod = Arc::new(named_pod(&id));
        let arrival = self.outbox.next_arrival();
        let mut record = PodRecord::new(id.clone(), pod, Desired::No, arrival, now);
        record.look = Look::Requested;
        let grace = Grace::starting(ORPHAN_GRACE_SECS, now);
        record.enter(Lifecycle::terminating(grace, TerminationCause::Orphaned), now);
        self.touched.insert(id.uid.clone());
        self.records.entry(id.uid).or_insert(record);
    }
}

/// The pod of an orphan: only its names are known.
pub(super) fn named_pod(id: &PodRef) -> Pod {
    let metadata = ObjectMeta {
        name: Some(id.name.to_string()),
        namespace: Some(id.namespace.to_string()),
        uid: Some(id.uid.to_string()),
        ..ObjectMeta::default()
    };
    Pod { metadata, ..Pod::default() }
}

/// A stop, whatever its reason, that was given more time than is left.
fn outlasts(flight: &Flight, grace: Grace) -> bool {
    flight.stops_by().is_some_and(|end| end > grace.ends_at)
}
