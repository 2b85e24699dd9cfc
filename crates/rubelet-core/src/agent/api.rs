//! Requests to the API server: statuses, pod deletion, mirror pods.
//!
//! Owns: turning the needs of the status manager and the pod manager into requests, and applying the responses.
//! Never: decides the content of a status.
//! Upstream: `statusManager.syncBatch` and `syncPod`, `tryReconcileMirrorPods`, `deleteOrphanedMirrorPods`.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use crate::{
    agent::Agent,
    api_requests::{ApiRequest, has_room},
    effect::{EffectError, ErrorKind, Facts},
    event::Source,
    flights::Subject,
    id::{PodRef, PodUid, full_name_of},
    observation::{ContainerFacts, SharedFacts},
    op::{ApiOp, Op},
    pod::{Lifecycle, PodRecord, TerminationCause},
    pod_manager::{is_mirror_pod, is_mirror_pod_of, is_static_pod},
    status_manager::{Batch, RunningContainers, StatusContext, StatusStep},
    time::Now,
};

impl Agent {
    /// At the end of a turn: sends every pending request that may be sent now.
    pub(super) fn handle_api_requests(&mut self, now: Now) {
        if !self.settings.is_in_cluster() {
            self.api_requests.mirrors.clear();
            return;
        }
        let batch = if self.api_requests.take_reconcile(now) { Batch::Reconcile } else { Batch::Changed };
        // Ordering all unsent statuses by urgency is worth it only when one of them can be sent.
        if batch == Batch::Reconcile || has_room(&self.outbox.flights) {
            for uid in self.statuses.sync_batch(batch, &self.pods) {
                self.sync_status(&uid, now);
            }
        }
        for name in std::mem::take(&mut self.api_requests.mirrors) {
            self.sync_mirror_pod(name, now);
        }
    }

    fn sync_status(&mut self, uid: &PodUid, now: Now) {
        let request = ApiRequest::Status(uid.clone());
        let flights = &self.outbox.flights;
        if self.api_requests.is_busy(&request, flights, now) || !has_room(flights) {
            return;
        }
        if self.records.get(uid).is_some_and(is_about_to_end) {
            return;
        }
        let running = self.records.get(uid).map_or(RunningContainers::None, running_containers);
        let context = StatusContext { pods: &self.pods, now };
        match self.statuses.next_step(uid, running, context) {
            None => {}
            Some(StatusStep::Patch { pod, version, since, patch }) => {
                self.send_api_request(
                    request,
                    ApiOp::PatchStatus { pod, version, since, patch },
                    "the API server has an older status",
                    now,
                );
            }
            Some(StatusStep::Delete { pod }) => {
                self.send_api_request(request, ApiOp::DeletePod { pod }, "pod terminated, resources reclaimed", now);
            }
        }
    }

    /// A static pod has a mirror pod as long as it is desired, made from its current manifest.
    fn sync_mirror_pod(&mut self, name: String, now: Now) {
        let request = ApiRequest::Mirror(name.clone());
        // Checked again when it finishes: the watch can show the change before the response.
        if self.api_requests.is_busy(&request, &self.outbox.flights, now) {
            self.api_requests.mirrors.insert(name);
            return;
        }
        let pod = self.pods.pod_by_full_name(&name).filter(|pod| is_static_pod(pod));
        let mirror = self.pods.mirror_pod_by_full_name(&name);
        let step = match (pod, mirror) {
            (None, None) => None,
            // Checked again when all sources are ready.
            (None, Some(_)) if !self.config.sources_ready(&self.settings.sources) => {
                self.api_requests.mirrors.insert(name);
                return;
            }
            (None, Some(mirror)) => {
                let may_go = !self.is_ending(&name);
                may_go.then(|| (ApiOp::DeleteMirrorPod { pod: PodRef::of(mirror) }, "its static pod is gone"))
            }
            // Until an older pod of the name has terminated, its mirror pod stays as it is.
            (Some(pod), _) if self.waits_for_namesake(pod) => None,
            (Some(pod), None) => {
                let is_listed = self.config.has_seen(Source::Api);
                // A terminated pod keeps its mirror pod, which shows the final status.
                let is_here = self.records.contains_key(&PodUid::of(pod));
                (is_listed && is_here).then(|| {
                    (ApiOp::CreateMirrorPod { pod: pod.clone() }, "the API server does not know the static pod")
                })
            }
            (Some(pod), Some(mirror)) => {
                let is_current = mirror.metadata.deletion_timestamp.is_none() && is_mirror_pod_of(mirror, pod);
                (!is_current)
                    .then(|| (ApiOp::DeleteMirrorPod { pod: PodRef::of(mirror) }, "it shows an older manifest"))
            }
        };
        match step {
            Some((op, reason)) => self.send_api_request(request, op, reason, now),
            // The failed request is obsolete.
            None => self.api_requests.forget(&request),
        }
    }

    fn waits_for_namesake(&self, pod: &Pod) -> bool {
        let record = self.records.get(&PodUid::of(pod));
        record.is_some_and(|record| record.lifecycle == Lifecycle::Waiting && self.name_holder(record).is_some())
    }

    fn is_ending(&self, full_name: &str) -> bool {
        self.records.values().any(|record| {
            record.id.full_name() == full_name && matches!(record.lifecycle, Lifecycle::Terminating { .. })
        })
    }

    pub(super) fn send_api_request(&mut self, request: ApiRequest, op: ApiOp, reason: &str, now: Now) {
        self.outbox.send(Subject::Api(request), op, reason.to_owned(), &self.settings, now);
    }

    pub(super) fn api_request_done(
        &mut self,
        request: ApiRequest,
        op: &Op,
        result: Result<Facts, EffectError>,
        now: Now,
    ) {
        match &request {
            // The watch was faster than the response: the pod is deleted, nothing is kept for it.
            ApiRequest::Status(uid) if !self.is_api_pod_of(uid, op) => {
                return self.api_requests.forget(&request);
            }
            ApiRequest::Status(uid) => self.status_answered(uid, op, &result),
            ApiRequest::Mirror(_) => {}
            // Waiting pods are decided now, whatever the result.
            ApiRequest::Node => return self.node_fetched(result),
        }
        match result {
            Err(error) if error.kind != ErrorKind::Gone => {
                if let ApiRequest::Mirror(name) = &request {
                    self.api_requests.mirrors.insert(name.clone());
                }
                self.api_requests.failed(request, error, now);
            }
            Ok(_) | Err(_) => self.api_requests.forget(&request),
        }
    }

    /// The API server's copy of the pod is still the one of the request.
    fn is_api_pod_of(&self, uid: &PodUid, op: &Op) -> bool {
        let Op::Api(ApiOp::PatchStatus { pod, .. } | ApiOp::DeletePod { pod }) = op else { return false };
        self.pods.api_pod(uid).is_some_and(|stored| PodUid::of(stored) == pod.uid)
    }

    fn status_answered(&mut self, uid: &PodUid, op: &Op, result: &Result<Facts, EffectError>) {
        match (op, result) {
            (Op::Api(ApiOp::PatchStatus { pod, version, .. }), Ok(Facts::ApiPod(stored))) => {
                self.pods.note_stored(stored);
                self.statuses.note_synced(&pod.uid, *version);
            }
            (Op::Api(ApiOp::DeletePod { pod }), Ok(_)) => self.statuses.note_gone(uid, &pod.uid),
            (Op::Api(ApiOp::PatchStatus { pod, .. } | ApiOp::DeletePod { pod }), Err(error))
                if error.kind == ErrorKind::Gone =>
            {
                self.statuses.note_gone(uid, &pod.uid);
            }
            (Op::Api(ApiOp::PatchStatus { pod, .. }), Err(_)) => self.statuses.mark_unconfirmed(&pod.uid),
            _ => {}
        }
    }

    /// The API server's copy of a pod changed: compares its status with ours.
    pub(super) fn api_pod_changed(&mut self, pod: &Pod, now: Now) {
        if !self.settings.is_in_cluster() {
            return;
        }
        let own = self.pods.translate_pod_uid(&PodUid::of(pod));
        self.statuses.mark_for_reconcile(own, &self.pods);
        self.api_requests.reconcile_soon(now);
        if is_mirror_pod(pod) || is_static_pod(pod) {
            self.api_requests.mirrors.insert(full_name_of(pod));
        }
    }

    /// Compares every static pod with its mirror pod, in case the watch missed a change.
    pub(super) fn compare_mirror_pods(&mut self) {
        let names = self.pods.pods().filter(|pod| is_static_pod(pod)).map(|pod| full_name_of(pod));
        self.api_requests.mirrors.extend(names);
    }

    /// A mirror pod was added, changed or removed. It runs nothing, but its static pod's status or mirror may need a request.
    pub(super) fn mirror_pod_changed(&mut self, mirror: &Arc<Pod>, now: Now) {
        self.api_pod_changed(mirror, now);
        if let Some(pod) = self.pods.pod_by_mirror_pod(mirror) {
            self.touched.insert(PodUid::of(pod));
        }
    }
}

/// The final status of a completed pod does not wait for its sandbox: a look after its last change shows that nothing runs,
/// nothing is being started, and nothing will be (docs/adr/0011).
fn running_containers(record: &PodRecord) -> RunningContainers {
    match record.lifecycle {
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => RunningContainers::None,
        Lifecycle::Terminating { cause, containers, .. } if cause.keeps_record() => containers,
        Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminating { .. } => RunningContainers::Possible,
    }
}

/// The containers of a deleted pod have terminated and its sandbox is being stopped: one status reports both, as upstream's
/// does.
fn is_about_to_end(record: &PodRecord) -> bool {
    let Lifecycle::Terminating { cause: TerminationCause::Removed, .. } = record.lifecycle else { return false };
    let is_last_step = |facts: &SharedFacts| facts.is_active() && !facts.containers.iter().any(ContainerFacts::may_run);
    record.facts.as_ref().is_some_and(is_last_step) && record.failures.is_empty()
}
