//! The status manager: which status to send to the API server, and when to delete a pod there.
//!
//! Owns: the last status of every pod with its version, and the versions the API server has. Never: sends anything; a
//! `StatusStep` is the next request, and a standalone node sends none.
//! Upstream: `status/status_manager.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};

use crate::{
    id::{ContainerId, PodRef, PodUid},
    pod::status::{
        conditions::{self, DISRUPTION_TARGET, READY},
        generation, is_terminal, normalize_status,
    },
    pod_manager::{PodManager, is_mirror_pod, is_static_pod},
    time::{Now, Uptime},
};

mod equality;
mod merge;
mod patch;
mod terminate;
mod transition;

pub use equality::is_pod_status_by_kubelet_equal;
pub use merge::{RunningContainers, merge_pod_status};
pub use patch::status_patch;
use patch::whole_status_patch;
pub use transition::IllegalTransition;

#[derive(Clone, Debug, Default)]
pub struct StatusManager {
    /// By the pod's own UID; for a static pod, not its mirror's.
    pod_statuses: BTreeMap<PodUid, VersionedPodStatus>,
    /// The newest version in the API server, by the API object's UID: for a static pod its mirror's.
    api_status_versions: BTreeMap<PodUid, u64>,
    /// Pods with an unsent status, or whose deletion is pending.
    changed: BTreeSet<PodUid>,
    /// Pods whose copy in the API changed since it was last compared with ours.
    to_reconcile: BTreeSet<PodUid>,
    /// Pods that the API server reported as not found, by the API object's UID: nothing is sent for them.
    gone: BTreeSet<PodUid>,
    /// Pods whose last patch may have been applied or not, by the API object's UID.
    unconfirmed: BTreeSet<PodUid>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct VersionedPodStatus {
    /// Grows by one with every change.
    pub version: u64,
    pub namespace: String,
    pub name: String,
    pub reclaimed: Reclaimed,
    pub status: Arc<PodStatus>,
    /// Time of the first change that is not in the API server.
    pub since: Uptime,
}

/// Whether all the pod's resources on the node are reclaimed. Upstream: `PodResourcesAreReclaimed`, since 1.27 the flag
/// `podIsFinished` set at the end of SyncTerminatedPod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimed {
    No,
    Yes,
}

/// The inputs of every decision about a status.
#[derive(Clone, Copy, Debug)]
pub struct StatusContext<'a> {
    pub pods: &'a PodManager,
    pub now: Now,
}

/// The outcome of setting a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatusUpdate {
    /// Equal to the last one; the version stays.
    Unchanged,
    Changed {
        version: u64,
    },
    /// It is an illegal transition; the previous status is kept.
    Refused(IllegalTransition),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// Statuses with an unsent version, and pods that may be deleted: right after a change.
    Changed,
    /// Also those that may differ in the API server: some seconds after its copy changed.
    Reconcile,
}

/// The next request for a pod. `pod` is the API object.
#[derive(Clone, Debug, PartialEq)]
pub enum StatusStep {
    Patch { pod: PodRef, version: u64, since: Uptime, patch: serde_json::Value },
    Delete { pod: PodRef },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerReadiness {
    Ready,
    Unready,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Startup {
    Started,
    NotStarted,
}

/// Why a status is set; it decides whether an equal status counts as a change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occasion {
    Ordinary,
    /// The pod is being deleted: an equal status may still be the one its deletion waits for.
    Deletion,
    /// All resources are reclaimed.
    Finish,
}

impl StatusManager {
    /// The last status of the pod; a mirror pod's is its static pod's.
    pub fn pod_status(&self, uid: &PodUid, pods: &PodManager) -> Option<&Arc<PodStatus>> {
        self.pod_statuses.get(&pods.translate_pod_uid(uid)).map(|versioned| &versioned.status)
    }

    pub fn versioned_pod_status(&self, uid: &PodUid) -> Option<&VersionedPodStatus> {
        self.pod_statuses.get(uid)
    }

    pub fn set_pod_status(&mut self, pod: &Pod, mut status: PodStatus, context: StatusContext<'_>) -> StatusUpdate {
        status.observed_generation = generation(pod);
        let deleted = pod.metadata.deletion_timestamp.is_some();
        let occasion = if deleted { Occasion::Deletion } else { Occasion::Ordinary };
        self.update_status(pod, status, occasion, context)
    }

    /// A result for an unknown pod or container is ignored.
    pub fn set_container_readiness(
        &mut self,
        uid: &PodUid,
        container: &ContainerId,
        readiness: ContainerReadiness,
        context: StatusContext<'_>,
    ) -> StatusUpdate {
        let ready = readiness == ContainerReadiness::Ready;
        let Some((pod, mut status)) = self.known(uid, context.pods) else { return StatusUpdate::Unchanged };
        match find_container_status(&mut status, container) {
            Some(found) if found.ready != ready => found.ready = ready,
            Some(_) | None => return StatusUpdate::Unchanged,
        }
        let changed =
            [conditions::pod_ready_condition(&pod, &status), conditions::containers_ready_condition(&pod, &status)];
        let list = status.conditions.get_or_insert_default();
        for condition in changed {
            conditions::replace_or_append(list, condition);
        }
        self.update_status(&pod, status, Occasion::Ordinary, context)
    }

    pub fn set_container_startup(
        &mut self,
        uid: &PodUid,
        container: &ContainerId,
        startup: Startup,
        context: StatusContext<'_>,
    ) -> StatusUpdate {
        let started = Some(startup == Startup::Started);
        let Some((pod, mut status)) = self.known(uid, context.pods) else { return StatusUpdate::Unchanged };
        match find_container_status(&mut status, container) {
            Some(found) if found.started != started => found.started = started,
            Some(_) | None => return StatusUpdate::Unchanged,
        }
        self.update_status(&pod, status, Occasion::Ordinary, context)
    }

    /// The final status: a container without a known exit has failed, and the phase becomes terminal. Called when all the pod's
    /// resources on the node are reclaimed.
    pub fn terminate_pod(&mut self, pod: &Pod, context: StatusContext<'_>) -> StatusUpdate {
        let cached = self.pod_statuses.get(&PodUid::of(pod)).map(|cached| PodStatus::clone(&cached.status));
        let status = terminate::terminated_status(pod, cached);
        self.update_status(pod, status, Occasion::Finish, context)
    }

    /// Drops every pod that is not among `known`.
    pub fn remove_orphaned_statuses(&mut self, known: &BTreeSet<PodUid>) {
        self.pod_statuses.retain(|uid, _| known.contains(uid));
        self.changed.retain(|uid| known.contains(uid));
        self.to_reconcile.retain(|uid| known.contains(uid));
    }

    /// Drops the state of a pod that the API server no longer lists, by the API object's UID.
    pub fn forget_api_pod(&mut self, api_uid: &PodUid) {
        self.api_status_versions.remove(api_uid);
        self.gone.remove(api_uid);
        self.unconfirmed.remove(api_uid);
    }

    /// Every pod with an entry, by either of its UIDs.
    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        let own = self.pod_statuses.keys().chain(&self.changed).chain(&self.to_reconcile);
        own.chain(self.api_status_versions.keys()).chain(&self.gone).chain(&self.unconfirmed)
    }

    /// The pods to send, most urgent first. A status that differs in the API server counts as not sent.
    pub fn sync_batch(&mut self, batch: Batch, pods: &PodManager) -> Vec<PodUid> {
        if batch == Batch::Reconcile {
            for uid in std::mem::take(&mut self.to_reconcile) {
                let Some(versioned) = self.pod_statuses.get(&uid) else { continue };
                if needs_reconcile(&uid, &versioned.status, pods) {
                    self.api_status_versions.remove(&api_uid(&uid, pods));
                    self.changed.insert(uid);
                }
            }
        }
        let mut uids: Vec<_> =
            self.changed.iter().filter(|uid| self.pod_statuses.contains_key(*uid)).cloned().collect();
        // Stable: equals are ordered by UID.
        uids.sort_by_key(|uid| std::cmp::Reverse(urgency(pods.api_pod(uid), &self.pod_statuses[uid].status)));
        uids
    }

    /// Whether the API server has an older status of a pod it knows.
    pub fn has_unsent(&self, pods: &PodManager) -> bool {
        self.changed.iter().any(|uid| {
            let versioned = self.pod_statuses.get(uid);
            let api_uid = pods.api_pod(uid).map(|stored| PodUid::of(stored)).filter(|uid| !self.gone.contains(uid));
            versioned.zip(api_uid).is_some_and(|(versioned, api_uid)| self.is_unsent(&api_uid, versioned))
        })
    }

    /// The next request for this pod, if any. Without one, the pod is up to date.
    pub fn next_step(
        &mut self,
        uid: &PodUid,
        running: RunningContainers,
        context: StatusContext<'_>,
    ) -> Option<StatusStep> {
        let versioned = self.pod_statuses.get(uid)?;
        // A static pod without a mirror pod has no API object.
        let stored = context.pods.api_pod(uid)?;
        let pod = PodRef::of(stored);
        if self.gone.contains(&pod.uid) {
            self.changed.remove(uid);
            return None;
        }
        if self.is_unsent(&pod.uid, versioned) {
            let merged = merge_pod_status(stored, &versioned.status, running, context.now);
            let patch = match self.unconfirmed.contains(&pod.uid) {
                true => Some(whole_status_patch(stored, &merged)),
                // Another notation of a quantity, or another order, is no difference.
                false if is_held(stored, &merged) => None,
                false => status_patch(stored, &merged),
            };
            if let Some(patch) = patch {
                let (version, since) = (versioned.version, versioned.since);
                return Some(StatusStep::Patch { pod, version, since, patch });
            }
            let version = versioned.version;
            self.api_status_versions.insert(pod.uid.clone(), version);
        }
        if can_be_deleted(stored, self.pod_statuses[uid].reclaimed) {
            return Some(StatusStep::Delete { pod });
        }
        self.changed.remove(uid);
        None
    }

    /// The API server has this version, or a newer one if that was sent meanwhile.
    pub fn note_synced(&mut self, api_uid: &PodUid, version: u64) {
        let known = self.api_status_versions.entry(api_uid.clone()).or_default();
        *known = version.max(*known);
        self.unconfirmed.remove(api_uid);
    }

    /// No response, or one that leaves the patch's effect unknown: the next patch must hold in either case.
    pub fn mark_unconfirmed(&mut self, api_uid: &PodUid) {
        self.unconfirmed.insert(api_uid.clone());
    }

    /// The pod does not exist in the API server.
    pub fn note_gone(&mut self, uid: &PodUid, api_uid: &PodUid) {
        self.gone.insert(api_uid.clone());
        self.changed.remove(uid);
    }

    /// The API server's copy of the pod changed or was added; by the pod's own UID.
    pub fn mark_for_reconcile(&mut self, uid: PodUid, pods: &PodManager) {
        let api_uid = api_uid(&uid, pods);
        self.gone.remove(&api_uid);
        let Some(versioned) = self.pod_statuses.get(&uid) else { return };
        // A recreated mirror pod has no status yet; a deleted pod may wait for us.
        let may_go = pods.api_pod(&uid).is_some_and(|stored| can_be_deleted(stored, versioned.reclaimed));
        if self.is_unsent(&api_uid, versioned) || may_go {
            self.changed.insert(uid.clone());
        }
        self.to_reconcile.insert(uid);
    }

    /// The pod may have another status in the API server now.
    pub fn send_again(&mut self, uid: &PodUid, pods: &PodManager) {
        self.api_status_versions.remove(&api_uid(uid, pods));
        self.changed.insert(uid.clone());
    }

    /// What is still to be sent of a pod whose UID is the API object's, for tests: unsent, changed, to be compared, gone,
    /// unconfirmed.
    #[cfg(test)]
    pub fn progress(&self, uid: &PodUid) -> [bool; 5] {
        let is_unsent = self.pod_statuses.get(uid).is_some_and(|versioned| self.is_unsent(uid, versioned));
        let sets = [&self.changed, &self.to_reconcile, &self.gone, &self.unconfirmed];
        let [changed, to_reconcile, gone, unconfirmed] = sets.map(|set| set.contains(uid));
        [is_unsent, changed, to_reconcile, gone, unconfirmed]
    }

    fn is_unsent(&self, api_uid: &PodUid, versioned: &VersionedPodStatus) -> bool {
        self.api_status_versions.get(api_uid).is_none_or(|sent| *sent < versioned.version)
    }

    fn known(&self, uid: &PodUid, pods: &PodManager) -> Option<(Arc<Pod>, PodStatus)> {
        let pod = pods.pod_by_uid(uid)?;
        let cached = self.pod_statuses.get(uid)?;
        Some((Arc::clone(pod), PodStatus::clone(&cached.status)))
    }

    /// The pod's status after this one is set: this status, or the previous one if the transition is illegal.
    pub fn once_set<'a>(&'a self, pod: &Pod, status: &'a PodStatus, pods: &PodManager) -> Option<&'a PodStatus> {
        match self.illegal_transition(pod, status, pods) {
            None => Some(status),
            Some(_) => self.pod_statuses.get(&PodUid::of(pod)).map(|cached| &*cached.status),
        }
    }

    fn illegal_transition(&self, pod: &Pod, status: &PodStatus, pods: &PodManager) -> Option<IllegalTransition> {
        let (spec, old) = (pod.spec.as_ref()?, self.old_status(pod, pods)?);
        // A mirror pod's status is from a previous process: a static pod is known only by the runtime, which may have lost it.
        let is_from_mirror = !self.pod_statuses.contains_key(&PodUid::of(pod)) && mirror_status(pod, pods).is_some();
        transition::illegal(old, status, spec).filter(|_| !is_from_mirror)
    }

    /// The pod's last status, or the one the API server held when this process began.
    fn old_status<'a>(&'a self, pod: &'a Pod, pods: &'a PodManager) -> Option<&'a PodStatus> {
        match self.pod_statuses.get(&PodUid::of(pod)) {
            Some(cached) => Some(&*cached.status),
            None => mirror_status(pod, pods).or(pod.status.as_ref()),
        }
    }

    fn update_status(
        &mut self,
        pod: &Pod,
        mut status: PodStatus,
        why: Occasion,
        context: StatusContext<'_>,
    ) -> StatusUpdate {
        let uid = PodUid::of(pod);
        if let Some(illegal) = self.illegal_transition(pod, &status, context.pods) {
            return StatusUpdate::Refused(illegal);
        }
        let cached = self.pod_statuses.get(&uid);
        let nothing = PodStatus::default();
        let old = self.old_status(pod, context.pods).unwrap_or(&nothing);
        carry_over(pod, old, &mut status, context.now);
        normalize_status(pod, &mut status);
        let same = cached.is_some_and(|cached| is_pod_status_by_kubelet_equal(&cached.status, &status));
        if same && why == Occasion::Ordinary {
            return StatusUpdate::Unchanged;
        }
        // Reclaimed is final, except that a static pod may come back under its UID.
        let was_reclaimed = cached.is_some_and(|cached| cached.reclaimed == Reclaimed::Yes) && !is_static_pod(pod);
        let reclaimed = if why == Occasion::Finish || was_reclaimed { Reclaimed::Yes } else { Reclaimed::No };
        // A pod that comes back continues from the API server's version, or its status would look old.
        let api_uid = api_uid(&uid, context.pods);
        let sent = self.api_status_versions.get(&api_uid).copied().unwrap_or(0);
        let unsent = cached.filter(|cached| self.is_unsent(&api_uid, cached));
        let version = cached.map_or(0, |cached| cached.version).max(sent) + 1;
        let versioned = VersionedPodStatus {
            version,
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            reclaimed,
            status: Arc::new(status),
            since: unsent.map_or(context.now.uptime, |unsent| unsent.since),
        };
        self.changed.insert(uid.clone());
        self.pod_statuses.insert(uid, versioned);
        StatusUpdate::Changed { version }
    }
}

fn mirror_status<'a>(pod: &Pod, pods: &'a PodManager) -> Option<&'a PodStatus> {
    pods.mirror_pod_by_pod(pod).and_then(|mirror| mirror.status.as_ref())
}

/// The UID of the API object.
fn api_uid(uid: &PodUid, pods: &PodManager) -> PodUid {
    pods.api_pod(uid).map_or_else(|| uid.clone(), |stored| PodUid::of(stored))
}

/// Changes that users and controllers wait for come first: a pod that terminates, runs for the first time, becomes ready or
/// gets its address.
fn urgency(stored: Option<&Arc<Pod>>, ours: &PodStatus) -> u8 {
    let nothing = PodStatus::default();
    let theirs = stored.and_then(|pod| pod.status.as_ref()).unwrap_or(&nothing);
    let is_ready = |status: &PodStatus| conditions::find(status, READY).is_some_and(|ready| ready.status == "True");
    let is_ended = |status: &PodStatus| status.phase.as_deref().is_some_and(is_terminal);
    if is_ended(ours) && !is_ended(theirs) {
        2
    } else {
        u8::from(ours.phase != theirs.phase || is_ready(ours) != is_ready(theirs) || ours.pod_ip != theirs.pod_ip)
    }
}

/// A pod may be deleted from the API when its deletion was requested, the API server has its terminal phase, and its resources
/// are reclaimed. A mirror pod is deleted with its static pod instead.
pub fn can_be_deleted(pod: &Pod, reclaimed: Reclaimed) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_some()
        && !is_mirror_pod(pod)
        && phase.is_some_and(is_terminal)
        && reclaimed == Reclaimed::Yes
}

/// The status in the API server differs from ours, which is the right one.
pub fn needs_reconcile(uid: &PodUid, status: &PodStatus, pods: &PodManager) -> bool {
    pods.api_pod(uid).is_some_and(|stored| !is_held(stored, status))
}

/// The API server's copy equals this status.
fn is_held(stored: &Pod, status: &PodStatus) -> bool {
    let mut held = stored.status.clone().unwrap_or_default();
    normalize_status(stored, &mut held);
    is_pod_status_by_kubelet_equal(&held, status)
}

/// The pod's readiness gates disagree with its Ready condition.
pub fn need_to_reconcile_pod_readiness(pod: &Pod) -> bool {
    let has_gates =
        pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
    let Some(status) = pod.status.as_ref().filter(|_| has_gates) else { return false };
    let expected = conditions::pod_ready_condition(pod, status);
    conditions::find(status, READY)
        .is_some_and(|ready| ready.status != expected.status || ready.message != expected.message)
}

/// What a new status must not change: dates of unchanged conditions, the start time, a newer generation.
fn carry_over(pod: &Pod, old: &PodStatus, status: &mut PodStatus, now: Now) {
    // A static pod's dates come from facts, which survive a restart; they replace earlier guesses.
    let dates_from_facts = is_static_pod(pod);
    for condition in status.conditions.iter_mut().flatten() {
        if !conditions::is_owned(&condition.type_) && condition.type_ != DISRUPTION_TARGET {
            continue;
        }
        let before = conditions::find(old, &condition.type_).filter(|before| before.status == condition.status);
        let kept = before.and_then(|before| before.last_transition_time.clone());
        let own = condition.last_transition_time.take();
        let date = if dates_from_facts { own.or(kept) } else { kept.or(own) };
        condition.last_transition_time = Some(date.unwrap_or(Time(now.wall)));
    }
    let own = status.start_time.take();
    let kept = old.start_time.clone();
    let start = if dates_from_facts { own.or(kept) } else { kept.or(own) };
    status.start_time = Some(start.unwrap_or(Time(now.wall)));
    status.observed_generation = status.observed_generation.max(old.observed_generation);
}

/// By the runtime's ID, which follows `containerd://` in a status.
fn find_container_status<'a>(status: &'a mut PodStatus, id: &ContainerId) -> Option<&'a mut ContainerStatus> {
    let lists = [&mut status.container_statuses, &mut status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|container| {
        let known = container.container_id.as_deref().and_then(|known| known.split_once("://"));
        known.is_some_and(|(_, known)| known == id.as_str())
    })
}

#[cfg(test)]
mod tests;
