//! The plan of a pod: its status, its next steps, what it waits for, and when it is planned again.
//!
//! Owns: the shape of a plan, and the texts for what a pod waits for. Plans are made in `agent/plan.rs`, `sync_pod.rs` and
//! `termination.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Deref,
    sync::Arc,
};

use k8s_openapi::api::core::v1::PodStatus;

use crate::{
    effect::EventRecord,
    flights::{PodFlights, PodSubject},
    id::{ContainerId, PodRef},
    images::{ImageRequest, ImageTarget},
    op::Op,
    pod::{
        Lifecycle, PodRecord,
        sandbox::SandboxNeed,
        status::{PodFailure, Waiting},
    },
    time::{Now, Uptime},
    volumes::{claims::PersistentSource, devices::DeviceOptions},
};

/// The input of a plan: the record and its flights.
#[derive(Clone, Copy, Debug)]
pub struct PodState<'a> {
    pub record: &'a PodRecord,
    pub flights: PodFlights<'a>,
}

impl Deref for PodState<'_> {
    type Target = PodRecord;

    fn deref(&self) -> &PodRecord {
        self.record
    }
}

impl PodState<'_> {
    /// An effect on the subject is in flight or in back-off.
    pub fn is_busy(&self, subject: &PodSubject, now: Now) -> bool {
        self.flights.contains(subject) || self.is_waiting_to_retry(subject, now)
    }

    /// When the next failed step may be retried.
    pub fn next_retry(&self, now: Now) -> Option<Uptime> {
        let waiting = self.failures.iter().filter(|(subject, _)| !self.flights.contains(subject));
        waiting.map(|(_, failure)| failure.retry_at).filter(|moment| *moment > now.uptime).min()
    }
}

/// A pod's status, and the steps that can be taken now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// `None` for a pod that is only in the runtime.
    pub status: Option<PodStatus>,
    pub steps: Vec<Planned>,
    /// Images that containers wait for.
    pub images: Vec<ImageRequest>,
    /// No container is about to start, so the images of its volumes are needed no longer.
    pub image_volumes_settled: bool,
    /// Volumes whose devices are to be staged.
    pub devices: Vec<(Arc<PersistentSource>, DeviceOptions)>,
    /// Containers that may not start yet, and why.
    pub waiting: BTreeMap<String, Waiting>,
    pub events: Vec<EventRecord>,
    /// Instances that are stopped to be restarted, whatever their exit code.
    pub restarting: BTreeSet<ContainerId>,
    /// The pod as a whole has failed just now.
    pub failure: Option<PodFailure>,
    pub next: Option<Lifecycle>,
    /// Nothing of the pod should run any more, although something still does.
    pub is_over: bool,
    /// Nothing of the pod is left; its record may be dropped.
    pub is_gone: bool,
    pub wake_at: Option<Uptime>,
    /// `None` when it waits for nothing.
    pub waits_for: Option<WaitsFor>,
    /// What each volume that cannot be set up waits for, by its name.
    pub volume_waits: BTreeMap<String, WaitsFor>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    pub subject: PodSubject,
    pub op: Op,
    pub reason: String,
}

impl Plan {
    pub fn step(&mut self, subject: PodSubject, op: impl Into<Op>, reason: impl Into<String>) {
        self.steps.push(Planned { subject, op: op.into(), reason: reason.into() });
    }

    /// Only the first is reported.
    pub fn wait_for(&mut self, what: WaitsFor) {
        self.waits_for.get_or_insert(what);
    }

    pub fn wait_for_volume(&mut self, volume: &str, what: WaitsFor) {
        self.wait_for(what.clone());
        self.volume_waits.insert(volume.to_owned(), what);
    }

    /// A step on the subject is planned already.
    pub fn has_step(&self, subject: &PodSubject) -> bool {
        self.steps.iter().any(|step| step.subject == *subject)
    }

    pub fn wake_by(&mut self, moment: Uptime) {
        self.wake_at = Some(self.wake_at.map_or(moment, |earlier| earlier.min(moment)));
    }
}

/// What blocks a pod's next step. In sentences it follows "waits for".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// The runtime's problem.
    Runtime(String),
    /// The network's problem.
    Network(String),
    FirstRelist,
    NodeLabels,
    /// Terminating pods whose resources it needs; some were preempted for it.
    Preemption(Vec<PodRef>),
    /// Another pod of the same name.
    Namesake(PodRef),
    PodCgroup,
    PodDirs,
    /// By name.
    Volumes(Vec<String>),
    /// The volume is not attached to the node.
    Attachment(String),
    /// The volume is mounted with another SELinux label.
    OtherLabel(String),
    /// Only the attach/detach controller can attach the volume, and the node's configuration does not let it.
    Controller(String),
    /// The device of the volume cannot be staged.
    Device {
        volume: String,
        message: String,
    },
    /// Another pod uses a volume that serves one pod.
    ExclusiveVolume(String),
    Sandbox(SandboxNeed),
    InitContainers,
    PostStartHook(String),
    /// The remains of a start of this container that was interrupted with a previous process.
    InterruptedStart(String),
    Image(ImageTarget),
    CrashLoopBackOff(String),
    Retry {
        container: String,
        message: String,
    },
    ContainersToStop,
    SandboxToStop,
    /// An effect in flight that cannot be interrupted.
    StepUnderWay,
    VolumesToTearDown,
    CgroupToRemove,
    EndInApi,
    ManifestToReturn,
    DeadContainersToRemove,
    SandboxToRemove,
    PodDirToRemove,
    LogsToRemove,
}

impl WaitsFor {
    /// The volume on which it waits alone.
    pub fn volume(&self) -> Option<&str> {
        match self {
            WaitsFor::Attachment(volume)
            | WaitsFor::Controller(volume)
            | WaitsFor::OtherLabel(volume)
            | WaitsFor::Device { volume, .. }
            | WaitsFor::ExclusiveVolume(volume) => Some(volume),
            WaitsFor::Runtime(_)
            | WaitsFor::Network(_)
            | WaitsFor::FirstRelist
            | WaitsFor::NodeLabels
            | WaitsFor::Preemption(_)
            | WaitsFor::Namesake(_)
            | WaitsFor::PodCgroup
            | WaitsFor::PodDirs
            | WaitsFor::Volumes(_)
            | WaitsFor::Sandbox(_)
            | WaitsFor::InitContainers
            | WaitsFor::PostStartHook(_)
            | WaitsFor::InterruptedStart(_)
            | WaitsFor::Image(_)
            | WaitsFor::CrashLoopBackOff(_)
            | WaitsFor::Retry { .. }
            | WaitsFor::ContainersToStop
            | WaitsFor::SandboxToStop
            | WaitsFor::StepUnderWay
            | WaitsFor::VolumesToTearDown
            | WaitsFor::CgroupToRemove
            | WaitsFor::EndInApi
            | WaitsFor::ManifestToReturn
            | WaitsFor::DeadContainersToRemove
            | WaitsFor::SandboxToRemove
            | WaitsFor::PodDirToRemove
            | WaitsFor::LogsToRemove => None,
        }
    }
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WaitsFor::Runtime(problem) => return write!(f, "the container runtime: {problem}"),
            WaitsFor::Network(problem) => return write!(f, "the network: {problem}"),
            WaitsFor::FirstRelist => "the first relist of the runtime",
            WaitsFor::NodeLabels => "the current labels of the node",
            WaitsFor::Preemption(pods) => {
                let names: Vec<String> = pods.iter().map(ToString::to_string).collect();
                return write!(f, "the resources of terminating pods: {}", names.join(", "));
            }
            WaitsFor::Namesake(pod) => return write!(f, "pod {pod} ({}) of the same name to end", pod.uid),
            WaitsFor::PodCgroup => "the pod's cgroup",
            WaitsFor::PodDirs => "the pod's directories",
            WaitsFor::Volumes(names) => return write!(f, "the pod's volumes: {}", names.join(", ")),
            WaitsFor::Attachment(volume) => return write!(f, "volume {volume} to be attached to the node"),
            WaitsFor::OtherLabel(volume) => {
                return write!(f, "volume {volume} to be unmounted, which has another SELinux label");
            }
            WaitsFor::Controller(volume) => {
                return write!(f, "volume {volume}, which only the attach/detach controller can attach");
            }
            WaitsFor::Device { volume, message } => return write!(f, "volume {volume} to be staged: {message}"),
            WaitsFor::ExclusiveVolume(volume) => return write!(f, "volume {volume}, which another pod uses"),
            WaitsFor::Sandbox(need) => return write!(f, "a sandbox: {need}"),
            WaitsFor::InitContainers => "init containers to finish",
            WaitsFor::PostStartHook(container) => return write!(f, "the postStart hook of container {container}"),
            WaitsFor::InterruptedStart(container) => {
                return write!(f, "an interrupted start of container {container} to be removed");
            }
            WaitsFor::Image(target) => return write!(f, "the image of {target}"),
            WaitsFor::CrashLoopBackOff(container) => return write!(f, "the back-off of container {container}"),
            WaitsFor::Retry { container, message } => {
                return write!(f, "another try to start container {container}: {message}");
            }
            WaitsFor::ContainersToStop => "its containers to stop",
            WaitsFor::SandboxToStop => "its sandbox to stop",
            WaitsFor::StepUnderWay => "a step under way to end",
            WaitsFor::VolumesToTearDown => "its volumes to be torn down",
            WaitsFor::CgroupToRemove => "its cgroup to be removed",
            WaitsFor::EndInApi => "the API server to have its end",
            WaitsFor::ManifestToReturn => "its manifest to come back, for a minute",
            WaitsFor::DeadContainersToRemove => "its dead containers to be removed",
            WaitsFor::SandboxToRemove => "its sandbox to be removed",
            WaitsFor::PodDirToRemove => "its directory to be removed",
            WaitsFor::LogsToRemove => "its logs to be removed",
        })
    }
}
