//! The record of one pod, from arrival to removal.
//!
//! Owns: the record of a pod, its lifecycle, its flights, and when it must be looked at again.
//! Never: decides what to do next; `pod/sync_pod.rs` and `pod/termination.rs` do, from a record they cannot change.
//! Upstream: `pod_workers.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, LazyLock},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodSpec, Volume};
use serde::{Deserialize, Serialize};

use crate::{
    container::is_host_network,
    effect::{EffectError, ErrorKind, Reason},
    event::Source,
    flights::PodSubject,
    id::{ContainerId, PodRef, SandboxId},
    observation::{Remains, SharedFacts},
    op::{ContainerOp, Op, VolumeOp},
    pod::{
        hooks::PreStop,
        plan::WaitsFor,
        restart::CrashLoop,
        status::{FailureReason, PodFailure, Waiting, is_terminal},
    },
    probes::Probes,
    status_manager::RunningContainers,
    time::{Now, Uptime, moved},
    volumes::{
        self,
        claims::{ClaimRef, PersistentSource},
        teardown::PodVolume,
    },
};

pub mod allocation;
pub mod containers;
pub mod hooks;
pub mod init;
pub mod mount_volumes;
pub mod plan;
pub mod restart;
pub mod restart_policy;
pub mod sandbox;
pub mod status;
pub mod sync_pod;
pub mod termination;
#[cfg(test)]
mod tests;
mod volume_record;

pub use self::volume_record::VolumeRecord;

/// The lifecycle of a pod. It only moves forward; a pod that is desired again after its end starts over as a new record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lifecycle {
    /// Known, not yet allowed to start.
    Waiting,
    Syncing,
    /// Containers may still run; none is started any more.
    Terminating {
        grace: Grace,
        cause: TerminationCause,
        /// Once none runs or will run, it stays so.
        containers: RunningContainers,
    },
    /// No container runs, none will. The pod's resources are being reclaimed.
    Terminated {
        cause: TerminationCause,
    },
    /// Nothing is left to do for it. A pod that completed and is still desired stays here for readers.
    Finished {
        cause: TerminationCause,
    },
}

impl TerminationCause {
    /// The pod stays for readers until it is no longer desired.
    pub fn keeps_record(self) -> bool {
        match self {
            TerminationCause::Completed | TerminationCause::Failed => true,
            TerminationCause::Removed | TerminationCause::Orphaned => false,
        }
    }
}

impl Lifecycle {
    pub fn terminating(grace: Grace, cause: TerminationCause) -> Self {
        Lifecycle::Terminating { grace, cause, containers: RunningContainers::Possible }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Lifecycle::Waiting => "Waiting",
            Lifecycle::Syncing => "Syncing",
            Lifecycle::Terminating { .. } => "Terminating",
            Lifecycle::Terminated { .. } => "Terminated",
            Lifecycle::Finished { .. } => "Finished",
        }
    }

    /// Grows with every transition.
    fn rank(&self) -> u8 {
        match self {
            Lifecycle::Waiting => 0,
            Lifecycle::Syncing => 1,
            Lifecycle::Terminating { .. } => 2,
            Lifecycle::Terminated { .. } => 3,
            Lifecycle::Finished { .. } => 4,
        }
    }
}

/// Why a pod terminates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminationCause {
    /// Its source removed it, or requests its deletion.
    Removed,
    /// All its containers have terminated and none will restart.
    Completed,
    /// The node ends it: `PodRecord::failure` says why.
    Failed,
    /// It is in the runtime and was never desired.
    Orphaned,
}

/// A running grace period. It can be shortened, never extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grace {
    pub secs: i64,
    /// When the last container must be gone.
    pub ends_at: Uptime,
}

/// Upstream gives a container no less than this between SIGTERM and SIGKILL.
pub const MINIMUM_GRACE_SECS: i64 = 2;

impl Grace {
    pub fn starting(secs: i64, now: Now) -> Self {
        let secs = secs.max(1);
        Grace { secs, ends_at: now.uptime + Duration::from_secs(secs.unsigned_abs()) }
    }

    /// The earlier end of the two.
    #[must_use]
    pub fn shrunk_to(self, other: Grace) -> Self {
        if other.ends_at < self.ends_at { other } else { self }
    }

    /// The grace period of a container stopped now.
    pub fn remaining_secs(self, now: Now) -> i64 {
        let remaining = self.ends_at.since(now.uptime);
        let whole_secs = remaining.as_secs() + u64::from(remaining.subsec_nanos() > 0);
        i64::try_from(whole_secs).unwrap_or(i64::MAX).max(MINIMUM_GRACE_SECS)
    }
}

/// Whether a source has the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Desired {
    By(Source),
    /// Not any more, or never: then it is only in the runtime.
    No,
}

/// The last failure of effects on a subject, until one succeeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub retry_at: Uptime,
    pub count: u32,
    pub message: String,
    pub cure: Cure,
}

/// What may end a back-off before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cure {
    Nothing,
    /// A change of a config map, secret or other object the pod uses, or the registration of a CSI driver.
    ObjectChange,
    /// A file system that was late answers again.
    FileSystemAnswer,
}

impl Cure {
    /// Volumes need objects; so does a container's environment, which is complete before the runtime is called.
    pub fn of(op: &Op, error: &EffectError) -> Cure {
        match (op, &error.kind) {
            (_, ErrorKind::FileSystemLate) => Cure::FileSystemAnswer,
            (Op::Volume(VolumeOp::SetUp { .. } | VolumeOp::Refresh { .. }), _)
            | (Op::Container(ContainerOp::Start(_)), ErrorKind::Reject(Reason::CreateContainerConfigError))
            | (_, ErrorKind::MissingObject) => Cure::ObjectChange,
            (
                _,
                ErrorKind::Retry
                | ErrorKind::Uncertain
                | ErrorKind::FailedByDriver
                | ErrorKind::Unavailable
                | ErrorKind::TimedOut
                | ErrorKind::Reject(_)
                | ErrorKind::Refused
                | ErrorKind::Gone,
            ) => Cure::Nothing,
        }
    }
}

/// First wait after a failed pod step, doubled up to `RETRY_MAX` (upstream: 10 s to 15 s flat).
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(15);
/// The maximum for the removal of a dead container or sandbox that the runtime refuses: nothing waits for it but disk space.
const REMOVAL_RETRY_MAX: Duration = Duration::from_mins(5);
/// A removal that the runtime refused this often is reported in an event, and no start waits for it.
const REMOVALS_UNTIL_STUCK: u32 = 3;
/// First wait after a failed operation on a volume, doubled up to `VOLUME_RETRY_MAX`, as upstream.
const VOLUME_RETRY_FIRST: Duration = Duration::from_millis(500);
const VOLUME_RETRY_MAX: Duration = Duration::from_secs(122);
/// The maximum for a claim that cannot be used yet: no watch shows a node that it is bound. Upstream reads it ten times per second,
/// and goes on with the pod 10 s to 15 s later.
const RESOLVE_RETRY_MAX: Duration = Duration::from_secs(10);

impl Failure {
    pub fn after(previous: Option<&Failure>, message: String, now: Now) -> Self {
        Failure::doubling(RETRY_FIRST, RETRY_MAX, previous, message, now)
    }

    pub fn of_removal(previous: Option<&Failure>, message: String, now: Now) -> Self {
        Failure::doubling(RETRY_FIRST, REMOVAL_RETRY_MAX, previous, message, now)
    }

    pub fn of_volume(previous: Option<&Failure>, message: String, now: Now) -> Self {
        Failure::doubling(VOLUME_RETRY_FIRST, VOLUME_RETRY_MAX, previous, message, now)
    }

    /// Of a step on the pod, by what it does.
    pub fn of_step(op: &Op, previous: Option<&Failure>, message: String, now: Now) -> Self {
        match op {
            Op::Volume(VolumeOp::Resolve { .. }) => Failure::of_resolve(previous, message, now),
            Op::Volume(VolumeOp::Refresh { .. } | VolumeOp::TearDown(_)) => Failure::after(previous, message, now),
            Op::Volume(_) => Failure::of_volume(previous, message, now),
            Op::Container(_) | Op::Pod(_) | Op::Node(_) | Op::Image(_) | Op::Log(_) | Op::Api(_) => {
                Failure::after(previous, message, now)
            }
        }
    }

    fn of_resolve(previous: Option<&Failure>, message: String, now: Now) -> Self {
        Failure::doubling(VOLUME_RETRY_FIRST, RESOLVE_RETRY_MAX, previous, message, now)
    }

    fn doubling(first: Duration, max: Duration, previous: Option<&Failure>, message: String, now: Now) -> Self {
        let count = previous.map_or(1, |failure| failure.count.saturating_add(1));
        let wait = first.saturating_mul(1 << (count - 1).min(9)).min(max);
        Failure { retry_at: now.uptime + wait, count, message, cure: Cure::Nothing }
    }

    /// The removal just became one that the runtime does not manage.
    pub fn has_become_stuck(&self) -> bool {
        self.count == REMOVALS_UNTIL_STUCK
    }

    pub fn is_stuck(&self) -> bool {
        self.count >= REMOVALS_UNTIL_STUCK
    }
}

/// How far this process has prepared a pod on the node. Not kept over a restart: every step is safe to repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Preparation {
    /// A previous process may have left anything.
    Nothing,
    Cgroup,
    Directories,
}

/// The look at the pod in the runtime: one at a time; a request made during a look triggers another look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Idle,
    Requested,
    UnderWay { meanwhile: DuringLook },
}

/// What happened since a look began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DuringLook {
    Nothing,
    /// The pod may have changed: look once more; the facts of this look count.
    Hint,
    /// We changed the pod: this look may show the state before the change.
    Change,
}

/// State of a container over all its attempts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerRecord {
    pub crash_loop: Option<CrashLoop>,
    /// The attempt this process started last.
    pub last_attempt: Option<u32>,
    /// Its start succeeded and no look has shown it yet: until then its waiting reason is reported.
    pub has_unseen_start: bool,
    /// An instance whose start was interrupted with a previous process: it never ran, and its attempt is made again.
    pub interrupted_start: Option<ContainerId>,
    /// Why it does not run yet (upstream: the reason cache).
    pub waiting: Option<Waiting>,
}

/// State of one attempt of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceRecord {
    /// How far its preStop hook is, once it is being stopped.
    pub pre_stop: Option<PreStop>,
    /// It is being stopped and never counted as running.
    pub has_post_start_failed: bool,
    /// It was stopped to be restarted, whatever its exit code and the restart policy.
    pub is_restarting: bool,
    /// By the monotonic clock: a jump of the wall clock must not end a back-off.
    pub finished_at: Option<Uptime>,
}

/// All state about one pod.
#[derive(Clone, Debug)]
pub struct PodRecord {
    pub id: PodRef,
    /// The desired pod; for one that is only in the runtime, just its names.
    pub pod: Arc<Pod>,
    pub desired: Desired,
    /// Order of arrival: the first of two static pods with one name goes first.
    pub arrival: u64,
    pub lifecycle: Lifecycle,
    pub since: Now,
    pub facts: Option<SharedFacts>,
    pub look: Look,
    /// No mutating effect has finished since the facts were gathered.
    pub is_fresh: bool,
    pub failures: BTreeMap<PodSubject, Failure>,
    /// By name, also of containers that the spec has dropped.
    pub container_records: BTreeMap<String, ContainerRecord>,
    pub instances: BTreeMap<ContainerId, InstanceRecord>,
    pub probes: Probes,
    /// Why the pod has failed, whatever its containers do.
    pub failure: Option<PodFailure>,
    pub prepared: Preparation,
    /// By name. Not kept over a restart, either.
    pub volumes: BTreeMap<String, VolumeRecord>,
    /// When volumes with API content are due for a refresh; `None` without such volumes.
    pub refresh_at: Option<Uptime>,
    /// What the last release step found to be left of the pod; `None` before the first.
    pub remains: Option<Remains>,
    /// After its end: the volumes that are still to be unmounted, each for itself.
    pub mounted: BTreeSet<PodVolume>,
    /// Why the node rejected it; such a pod has failed and never starts.
    pub rejected: Option<PodFailure>,
    /// Sandboxes that were stopped, which released their network.
    pub stopped_sandboxes: BTreeSet<SandboxId>,
    pub wake_at: Option<Uptime>,
    /// What the last plan waits for.
    pub waits_for: Option<WaitsFor>,
}

impl PodRecord {
    pub fn new(id: PodRef, pod: Arc<Pod>, desired: Desired, arrival: u64, now: Now) -> Self {
        PodRecord {
            id,
            pod,
            desired,
            arrival,
            lifecycle: Lifecycle::Waiting,
            since: now,
            facts: None,
            look: Look::Idle,
            is_fresh: false,
            failures: BTreeMap::new(),
            container_records: BTreeMap::new(),
            instances: BTreeMap::new(),
            probes: Probes::default(),
            failure: None,
            prepared: Preparation::Nothing,
            volumes: BTreeMap::new(),
            refresh_at: None,
            remains: None,
            mounted: BTreeSet::new(),
            rejected: None,
            stopped_sandboxes: BTreeSet::new(),
            wake_at: None,
            waits_for: None,
        }
    }

    pub fn enter(&mut self, next: Lifecycle, now: Now) {
        assert!(next.rank() >= self.lifecycle.rank(), "a pod's life goes forward: {:?} to {next:?}", self.lifecycle);
        if next.rank() > self.lifecycle.rank() {
            self.since = now;
            self.failures.clear();
        }
        self.lifecycle = next;
    }

    /// Empty for an unknown container.
    pub fn container(&self, name: &str) -> &ContainerRecord {
        static UNKNOWN: LazyLock<ContainerRecord> = LazyLock::new(ContainerRecord::default);
        self.container_records.get(name).unwrap_or(&UNKNOWN)
    }

    pub fn container_mut(&mut self, name: &str) -> &mut ContainerRecord {
        self.container_records.entry(name.to_owned()).or_default()
    }

    /// A pod that starts over counts its attempts on, and so its back-offs. Upstream's are kept by UID, and outlast the pod.
    pub fn keep_back_offs(&mut self, earlier: &PodRecord) {
        for (name, known) in &earlier.container_records {
            self.container_mut(name).crash_loop.clone_from(&known.crash_loop);
        }
        for (id, known) in &earlier.instances {
            self.instance_mut(id).finished_at = known.finished_at;
        }
    }

    /// The containers whose start was interrupted with a previous process. They are not among the facts.
    pub fn interrupted_starts(&self) -> impl Iterator<Item = (&String, &ContainerId)> {
        self.container_records
            .iter()
            .filter_map(|(name, container)| Some((name, container.interrupted_start.as_ref()?)))
    }

    pub fn instance(&self, id: &ContainerId) -> InstanceRecord {
        self.instances.get(id).copied().unwrap_or_default()
    }

    pub fn instance_mut(&mut self, id: &ContainerId) -> &mut InstanceRecord {
        self.instances.entry(id.clone()).or_default()
    }

    /// Why containers do not run yet, by name.
    pub fn waiting(&self) -> BTreeMap<String, Waiting> {
        let containers = self.container_records.iter();
        containers.filter_map(|(name, container)| Some((name.clone(), container.waiting.clone()?))).collect()
    }

    /// Instances that were stopped to be restarted.
    pub fn restarting(&self) -> BTreeSet<ContainerId> {
        let instances = self.instances.iter().filter(|(_, instance)| instance.is_restarting);
        instances.map(|(id, _)| id.clone()).collect()
    }

    /// The pod has released what other pods may need: its volumes and its cgroup.
    pub fn is_released(&self) -> bool {
        self.remains.is_some_and(|remains| remains > Remains::Cgroup)
    }

    /// The API server has it as ended.
    pub fn has_ended_in_api(&self) -> bool {
        self.pod.status.as_ref().and_then(|status| status.phase.as_deref()).is_some_and(is_terminal)
    }

    /// A shutdown of the node ended it.
    pub fn has_ended_with_node(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.reason == FailureReason::Terminated)
    }

    pub fn is_desired(&self) -> bool {
        matches!(self.desired, Desired::By(_))
    }

    /// The facts, if no mutating effect finished after they were gathered.
    pub fn fresh_facts(&self) -> Option<&SharedFacts> {
        self.facts.as_ref().filter(|_| self.is_fresh)
    }

    /// Requests a look; a look in flight is followed by another.
    pub fn request_look(&mut self, why: DuringLook) {
        match &mut self.look {
            Look::Idle | Look::Requested => self.look = Look::Requested,
            Look::UnderWay { meanwhile } => *meanwhile = (*meanwhile).max(why),
        }
    }

    /// The content of the volumes may have changed.
    pub fn request_refresh(&mut self, now: Now) {
        if let Some(moment) = &mut self.refresh_at {
            *moment = now.uptime;
        }
    }

    /// Volumes that its containers mount and that this process has not set up, in the order of the manifest.
    pub fn missing_volumes(&self) -> Vec<&Volume> {
        volumes::mounted(self.spec()).filter(|volume| !self.is_set_up(&volume.name)).collect()
    }

    /// The volume of this name is a claim.
    pub fn has_claim(&self, volume: &str) -> bool {
        let mut volumes = self.spec().volumes.iter().flatten();
        volumes.any(|known| known.name == volume && ClaimRef::of(&self.pod, known).is_some())
    }

    /// What the volume is may not be known although its spec says it: its driver may be missing.
    pub fn has_flex_driver(&self, volume: &str) -> bool {
        let mut volumes = self.spec().volumes.iter().flatten();
        volumes.any(|known| known.name == volume && known.flex_volume.is_some())
    }

    /// The persistent volumes behind its claims, by the volumes' names.
    pub fn claimed_volumes(&self) -> BTreeMap<String, Arc<PersistentSource>> {
        let claimed = self.volumes.iter().filter_map(|(name, volume)| Some((name, volume.claimed.as_ref()?)));
        claimed.map(|(name, source)| (name.clone(), source.clone())).collect()
    }

    /// Groups of which the pod's processes are members because of its volumes.
    pub fn volume_groups(&self) -> Vec<i64> {
        let claimed = self.volumes.values().filter_map(|volume| volume.claimed.as_ref());
        let groups: BTreeSet<_> = claimed.filter_map(|source| source.group).collect();
        groups.into_iter().collect()
    }

    pub fn is_waiting_to_retry(&self, subject: &PodSubject, now: Now) -> bool {
        self.failures.get(subject).is_some_and(|failure| failure.retry_at > now.uptime)
    }

    /// Ends the back-offs of what this cures; whether there was any.
    pub fn end_back_offs(&mut self, cure: Cure, now: Now) -> bool {
        let expansions = self.volumes.values_mut().filter_map(|volume| volume.expansion_failure.as_mut());
        let mut is_any = false;
        for failure in self.failures.values_mut().chain(expansions).filter(|failure| failure.cure == cure) {
            failure.retry_at = failure.retry_at.min(now.uptime);
            is_any = true;
        }
        is_any
    }

    /// The pod's own grace period.
    pub fn grace_secs(&self) -> i64 {
        let spec_secs = self.spec().termination_grace_period_seconds;
        self.pod.metadata.deletion_grace_period_seconds.or(spec_secs).unwrap_or(30)
    }

    /// When a pod that started at `start` exceeds its active deadline; `None` without one, or if the pod has terminated.
    pub fn active_deadline(&self, start: Timestamp, now: Now) -> Option<Uptime> {
        let may_end = self.lifecycle == Lifecycle::Syncing && self.failure.is_none();
        let secs = self.spec().active_deadline_seconds.filter(|_| may_end)?;
        let allowed = Duration::from_secs(u64::try_from(secs).unwrap_or(0));
        Some(now.uptime + allowed.saturating_sub(now.wall_since(start)))
    }

    /// Empty for a pod that is only in the runtime.
    pub fn spec(&self) -> &PodSpec {
        static UNKNOWN: LazyLock<PodSpec> = LazyLock::new(PodSpec::default);
        self.pod.spec.as_ref().unwrap_or(&UNKNOWN)
    }

    pub fn init_containers(&self) -> &[Container] {
        self.spec().init_containers.as_deref().unwrap_or_default()
    }

    pub fn containers(&self) -> &[Container] {
        &self.spec().containers
    }

    pub fn ephemeral_containers(&self) -> &[EphemeralContainer] {
        self.spec().ephemeral_containers.as_deref().unwrap_or_default()
    }

    pub fn restart_policy(&self) -> &str {
        self.spec().restart_policy.as_deref().unwrap_or("Always")
    }

    pub fn uses_host_network(&self) -> bool {
        is_host_network(self.spec())
    }

    /// The wall-clock time of an uptime, clamped to the calendar.
    pub fn wall(moment: Uptime, now: Now) -> Timestamp {
        let signed = |span: Duration| SignedDuration::try_from(span).unwrap_or(SignedDuration::MAX);
        let (ahead, ago) = (signed(moment.since(now.uptime)), signed(now.uptime.since(moment)));
        moved(now.wall, ahead.saturating_sub(ago))
    }
}
