//! Admission of waiting pods, one after the other.
//!
//! Owns: the order, the rejection of a pod, and what a fetched Node object changes. The decision is in `admission.rs`.
//! Upstream: `HandlePodAdditions`, `canAdmitPod`, `rejectPod`.

use k8s_openapi::api::core::v1::Pod;

use crate::{
    admission::{self, AdmitContext, AdmitResult},
    agent::Agent,
    api_requests::ApiRequest,
    effect::{EffectError, EventRecord, Facts, InvolvedObject, Severity},
    flights::Subject,
    id::PodUid,
    node_object::NodeObject,
    op::ApiOp,
    pod::{Lifecycle, PodRecord, plan::WaitsFor, status::PodFailure},
    time::Now,
};

impl Agent {
    /// Whether this pod is admitted now. Pods that came before it are decided first, whichever pod is checked.
    pub(super) fn admit_waiting_pods(&mut self, uid: &PodUid, now: Now) -> bool {
        if self.node.listing.is_none() {
            let record = self.records.get_mut(uid).expect("it waits");
            record.waits_for = Some(WaitsFor::FirstRelist);
            return false;
        }
        // Pods that wait for preempted ones: what those release is theirs, also while it is not yet released.
        let mut preempting = Vec::new();
        for waiting in self.waiting_in_order() {
            // A pod of higher priority may have preempted it just now.
            if self.records[&waiting].lifecycle != Lifecycle::Waiting || !self.has_free_name(&waiting, now) {
                continue;
            }
            let result = match self.admit_result(&waiting, &preempting) {
                AdmitResult::Preempt(missing) => self.make_room(&waiting, missing, &self.holders(&preempting), now),
                decided => decided,
            };
            match result {
                AdmitResult::Preempt(_) => {
                    preempting.push(waiting);
                    continue;
                }
                AdmitResult::RecheckNode(_) if self.awaits_node(&waiting, now) => continue,
                AdmitResult::Admit => self.leave_waiting(&waiting, None, now),
                AdmitResult::Reject(failure) | AdmitResult::RecheckNode(failure) => {
                    self.leave_waiting(&waiting, Some(failure), now);
                }
            }
            // A pod that a previous process admitted starts nothing in a shutdown.
            self.end_pod_in_turn(&waiting, now);
        }
        self.records.get(uid).is_some_and(|record| record.lifecycle != Lifecycle::Waiting)
    }

    fn leave_waiting(&mut self, uid: &PodUid, rejected: Option<PodFailure>, now: Now) {
        let record = self.records.get_mut(uid).expect("it waits");
        record.wake_at = None;
        record.enter(Lifecycle::Syncing, now);
        self.api_requests.mirrors.insert(record.id.full_name());
        match rejected {
            None => {
                self.node.qos.pods_changed = true;
                self.warn_of_unsupported(uid);
            }
            Some(failure) => {
                self.outbox.record(EventRecord::new(
                    InvolvedObject::Pod(record.id.clone()),
                    Severity::Warning,
                    failure.reason.to_string(),
                    failure.message.clone(),
                ));
                record.rejected = Some(failure);
            }
        }
        self.touched.insert(uid.clone());
    }

    /// Pods that a previous process admitted come first, then those for which others were preempted, then the oldest.
    fn waiting_in_order(&self) -> Vec<PodUid> {
        let mut waiting: Vec<&PodRecord> =
            self.records.values().filter(|record| record.lifecycle == Lifecycle::Waiting).collect();
        waiting.sort_by_key(|record| {
            let created = record.pod.metadata.creation_timestamp.as_ref().map(|created| created.0);
            let is_preempting = matches!(record.waits_for, Some(WaitsFor::Preemption(_)));
            (!self.is_known_to_runtime(record), !is_preempting, created, record.arrival)
        });
        waiting.into_iter().map(|record| record.id.uid.clone()).collect()
    }

    fn admit_result(&self, uid: &PodUid, preempting: &[PodUid]) -> AdmitResult {
        let record = &self.records[uid];
        if record.has_ended_in_api() || self.is_known_to_runtime(record) {
            return AdmitResult::Admit;
        }
        let others = self.holders(preempting);
        let others: Vec<&Pod> = others.iter().map(|other| &*self.records[other].pod).collect();
        let context = AdmitContext {
            settings: &self.settings,
            others: &others,
            node: self.node.object.as_ref().unwrap_or(&self.settings.own_node),
            has_strict_groups: self.node.status.supplemental_groups_policy == Some(true),
            pressures: self.node.eviction.pressures(),
            is_shutting_down: self.node.shutdown.is_under_way(),
        };
        admission::admit(&record.pod, context)
    }

    /// The pods that hold resources, and these.
    fn holders(&self, preempting: &[PodUid]) -> Vec<PodUid> {
        let holding = self.records.values().filter(|record| holds_resources(record)).map(|record| &record.id.uid);
        holding.chain(preempting).cloned().collect()
    }

    /// A label that the watch has not shown yet may have sent the pod here. True while a Node request that began after the pod
    /// came is pending.
    fn awaits_node(&mut self, uid: &PodUid, now: Now) -> bool {
        let record = self.records.get_mut(uid).expect("it waits");
        let was_asked = self.node.object_asked_at.is_some_and(|asked_at| asked_at >= record.since.uptime);
        let is_under_way = self.outbox.flights.contains(&Subject::Api(ApiRequest::Node));
        if !self.settings.is_in_cluster() || (was_asked && !is_under_way) {
            return false;
        }
        record.waits_for = Some(WaitsFor::NodeLabels);
        if !is_under_way {
            self.node.object_asked_at = Some(now.uptime);
            self.send_api_request(ApiRequest::Node, ApiOp::GetNode, "a pod does not match the labels of the node", now);
        }
        true
    }

    pub(super) fn handle_node(&mut self, object: NodeObject) {
        let (ips, before) = (self.node.host_ips(&self.settings).to_vec(), self.node.object.clone());
        self.node.take_object(object);
        self.touched.extend(self.node.devices.attachment_changed(before.as_ref(), self.node.object.as_ref()));
        if self.node.host_ips(&self.settings) != ips {
            self.touched.extend(self.records.keys().cloned());
        }
    }

    /// After a failed request the pods are decided with the known Node object, as upstream.
    pub(super) fn node_fetched(&mut self, result: Result<Facts, EffectError>) {
        if let Ok(Facts::Node(object)) = result {
            self.handle_node(object);
        }
        let waiting = self.records.values().filter(|record| record.lifecycle == Lifecycle::Waiting);
        self.touched.extend(waiting.map(|record| record.id.uid.clone()));
    }

    /// A pod in the runtime was admitted before; it is not rejected later for a new reason.
    fn is_known_to_runtime(&self, record: &PodRecord) -> bool {
        self.node.listing.as_ref().is_some_and(|listing| listing.pods.contains_key(&record.id.uid))
    }
}

/// Admitted and not terminated.
fn holds_resources(record: &PodRecord) -> bool {
    let is_active = match record.lifecycle {
        Lifecycle::Syncing | Lifecycle::Terminating { .. } => true,
        Lifecycle::Waiting | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => false,
    };
    is_active && record.rejected.is_none() && !record.has_ended_in_api()
}
