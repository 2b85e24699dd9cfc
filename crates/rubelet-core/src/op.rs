//! Operations, and the properties of each.
//!
//! Owns: the closed set of operations, grouped by their object, and their properties: name, kind, what must be looked at
//! afterwards, what happens to them when their pod terminates, deadline. Never: how they are done (`rubelet/src/effects/`).
//! A mutating operation is safe to repeat.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

pub use self::{
    log::{LogOp, LogPlace},
    node::NodeOp,
    volume::VolumeOp,
};
use crate::{
    cgroups::Cgroup,
    effect::ImageFacts,
    id::{ContainerId, PodRef, PodUid, SandboxId},
    image_gc::DeletionReason,
    pod::hooks::{Hook, HookRequest},
    probes::ProbeRequest,
    time::Uptime,
    volumes::claims::PersistentSource,
};

mod log;
mod node;
mod volume;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    Node(NodeOp),
    Pod(PodOp),
    Container(ContainerOp),
    Volume(VolumeOp),
    Image(ImageOp),
    Log(LogOp),
    /// A request to the API server.
    Api(ApiOp),
}

/// A pod's place on the node: its cgroup, directories and sandboxes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PodOp {
    Inspect {
        pod: PodRef,
    },
    SetUpCgroup {
        pod: PodRef,
        cgroup: Cgroup,
    },
    /// Kills what is left in the pod's cgroup and removes it, wherever it is. The operations that release a pod's resources
    /// return what remains of it (`Facts::Remains`).
    RemoveCgroup(PodPlace),
    MakeDirs {
        pod: PodRef,
    },
    /// Removes the pod's directory under the root directory; fails while something is mounted below it.
    RemoveDir(PodPlace),
    /// Removes the pod's log directory, and the links into it.
    RemoveLogDir(PodPlace),
    RunSandbox(RunSandbox),
    StopSandbox {
        pod: PodRef,
        id: SandboxId,
    },
    RemoveSandbox {
        pod: PodRef,
        id: SandboxId,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ContainerOp {
    /// Creates and starts.
    Start(StartContainer),
    /// Starts a container whose creation succeeded in an interrupted attempt.
    Resume {
        pod: PodRef,
        name: String,
        id: ContainerId,
    },
    /// SIGTERM, then SIGKILL after the grace period.
    Stop {
        pod: PodRef,
        name: String,
        id: ContainerId,
        grace_secs: i64,
    },
    Remove {
        pod: PodRef,
        name: String,
        id: ContainerId,
    },
    /// Runs one probe.
    Probe(ProbeRequest),
    /// Runs a postStart or preStop hook.
    RunHook(HookRequest),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ImageOp {
    Inspect {
        pod: PodRef,
        image: String,
    },
    Pull {
        pod: PodRef,
        image: String,
        /// Names of secrets in the pod's namespace that may hold credentials for it.
        secrets: Vec<String>,
    },
    /// Deletes an image that nothing uses.
    Delete {
        id: String,
        reason: DeletionReason,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ApiOp {
    /// Fetches the Node object; the watch may be behind.
    GetNode,
    /// `pod` is the API object: for a static pod, its mirror pod.
    PatchStatus {
        pod: PodRef,
        /// Of the status that the patch sends.
        version: u64,
        /// Time of the first change in it.
        since: Uptime,
        patch: serde_json::Value,
    },
    /// With grace period 0 and the UID as precondition.
    DeletePod {
        pod: PodRef,
    },
    /// Creates the mirror pod of a static pod.
    CreateMirrorPod {
        pod: Arc<Pod>,
    },
    DeleteMirrorPod {
        pod: PodRef,
    },
}

/// Where a pod may have left something on the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodPlace {
    pub pod: PodRef,
    /// Its cgroup is at one of these, if it has one.
    pub cgroup_paths: Vec<String>,
}

impl PodPlace {
    /// The name of its log directory.
    pub fn log_dir_name(&self) -> String {
        let PodRef { uid, namespace, name } = &self.pod;
        format!("{namespace}_{name}_{uid}")
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSandbox {
    pub uid: PodUid,
    pub pod: Arc<Pod>,
    pub attempt: u32,
    /// The pod's cgroup; empty leaves it to the runtime.
    pub cgroup_parent: String,
    /// Supplemental groups because of its volumes.
    pub volume_groups: Vec<i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartContainer {
    pub uid: PodUid,
    pub pod: Arc<Pod>,
    /// Name of a container, init container or ephemeral container of the pod.
    pub container: String,
    /// The restart count the new container carries.
    pub attempt: u32,
    pub sandbox: SandboxId,
    pub sandbox_attempt: u32,
    /// The same as the sandbox's.
    pub cgroup_parent: String,
    /// Primary first; empty for host network.
    pub pod_ips: Vec<String>,
    /// The node's, primary first.
    pub host_ips: Vec<String>,
    /// The instance whose processes an ephemeral container sees, if it was found.
    pub target: Option<ContainerId>,
    /// The sandbox's runtime handler supports them.
    pub recursive_read_only_mounts: bool,
    /// The persistent volumes behind the claims among its volumes, by the volumes' names.
    pub claimed: BTreeMap<String, Arc<PersistentSource>>,
    pub image: ImageFacts,
    /// The IDs of the images that its image volumes are, by the volumes' names.
    pub image_volumes: BTreeMap<String, String>,
}

impl StartContainer {
    /// Supplemental groups because of its volumes.
    pub fn volume_groups(&self) -> Vec<i64> {
        let groups: BTreeSet<_> = self.claimed.values().filter_map(|source| source.group).collect();
        groups.into_iter().collect()
    }
}

/// Properties of an operation, independent of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Properties {
    name: &'static str,
    kind: OpKind,
    dirties: Dirties,
    at_pod_end: AtPodEnd,
    deadline: Deadline,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Read-only.
    Look,
    /// Periodic; follows from what was decided elsewhere.
    Upkeep,
    /// It may start something.
    Start,
    /// Stops or removes something. If that is already gone, the operation has succeeded.
    End,
    /// Any other change.
    Change,
}

/// What an operation may have changed, so that the facts about it are out of date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dirties {
    Nothing,
    /// The pod's containers and sandboxes in the runtime.
    Runtime,
}

/// What happens to an operation in flight when its pod starts to terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtPodEnd {
    /// Aborting it leaves nothing half-done that a later look would not show.
    Abort,
    /// It begins no further call, and its result is awaited.
    Recall,
    LetRun,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deadline {
    /// Bounds a look.
    Look,
    /// File operations of one pod.
    Disk,
    /// Calls to a CSI driver, each of which has a timeout of its own.
    Driver,
    /// As `Driver`, and files whose owner changes, of which there may be millions.
    Ownership,
    Pull,
    /// Of rotated logs.
    Compression,
    /// One request to the API server, including the wait for the client's rate limiter.
    Api,
    /// So many calls to the runtime, each with its own timeout, plus `extra` time.
    Runtime {
        calls: u32,
        extra: Duration,
    },
}

const LOOK_DEADLINE: Duration = Duration::from_secs(30);
const DISK_DEADLINE: Duration = Duration::from_secs(123);
/// Two calls to a driver of two minutes each, as upstream's timeout is, and what is gathered for them.
const DRIVER_DEADLINE: Duration = Duration::from_secs(300);
const OWNERSHIP_DEADLINE: Duration = Duration::from_secs(3600);
/// Bounds a hung pull; upstream has no limit.
const PULL_DEADLINE: Duration = Duration::from_secs(2 * 3600);
const API_DEADLINE: Duration = Duration::from_secs(30);
/// For gigabytes of logs on a slow disk.
const COMPRESSION_DEADLINE: Duration = Duration::from_secs(3600);

impl Properties {
    const fn new(name: &'static str, kind: OpKind, deadline: Deadline) -> Self {
        Properties { name, kind, dirties: Dirties::Nothing, at_pod_end: AtPodEnd::LetRun, deadline }
    }

    const fn look(name: &'static str) -> Self {
        Properties::new(name, OpKind::Look, Deadline::Look)
    }

    const fn disk(name: &'static str) -> Self {
        Properties::new(name, OpKind::Change, Deadline::Disk)
    }

    const fn api(name: &'static str) -> Self {
        Properties::new(name, OpKind::Change, Deadline::Api)
    }

    const fn runtime(name: &'static str, kind: OpKind) -> Self {
        let deadline = Deadline::Runtime { calls: 1, extra: Duration::ZERO };
        let at_pod_end = if matches!(kind, OpKind::Start) { AtPodEnd::Recall } else { AtPodEnd::LetRun };
        Properties { name, kind, dirties: Dirties::Runtime, at_pod_end, deadline }
    }

    const fn aborted(self) -> Self {
        Properties { at_pod_end: AtPodEnd::Abort, ..self }
    }

    const fn lasting(self, deadline: Deadline) -> Self {
        Properties { deadline, ..self }
    }

    /// One call to the runtime that may take this much longer.
    const fn with_extra(self, extra: Duration) -> Self {
        self.lasting(Deadline::Runtime { calls: 1, extra })
    }

    const fn upkeep(self) -> Self {
        Properties { kind: OpKind::Upkeep, ..self }
    }
}

impl Op {
    /// In logs, metrics and traces.
    pub fn name(&self) -> &'static str {
        self.properties().name
    }

    pub fn kind(&self) -> OpKind {
        self.properties().kind
    }

    /// What must be looked at when it finishes, whatever the result.
    pub fn dirties(&self) -> Dirties {
        self.properties().dirties
    }

    pub fn at_pod_end(&self) -> AtPodEnd {
        self.properties().at_pod_end
    }

    /// How long it may take, where one call to the runtime may take `request`.
    pub fn deadline(&self, request: Duration) -> Duration {
        match self.properties().deadline {
            Deadline::Look => LOOK_DEADLINE,
            Deadline::Disk => DISK_DEADLINE,
            Deadline::Driver => DRIVER_DEADLINE,
            Deadline::Ownership => OWNERSHIP_DEADLINE,
            Deadline::Pull => PULL_DEADLINE,
            Deadline::Compression => COMPRESSION_DEADLINE,
            Deadline::Api => API_DEADLINE,
            Deadline::Runtime { calls, extra } => request.saturating_mul(calls).saturating_add(extra),
        }
    }

    /// Its object: `namespace/pod`, `namespace/pod/container`; empty for the node.
    pub fn about(&self) -> String {
        match self {
            Op::Node(_) => String::new(),
            Op::Pod(op) => op.about(),
            Op::Container(op) => op.about(),
            Op::Volume(op) => op.about(),
            Op::Image(op) => op.about(),
            Op::Log(op) => op.about(),
            Op::Api(op) => op.about(),
        }
    }

    fn properties(&self) -> Properties {
        match self {
            Op::Node(op) => op.properties(),
            Op::Pod(op) => op.properties(),
            Op::Container(op) => op.properties(),
            Op::Volume(op) => op.properties(),
            Op::Image(op) => op.properties(),
            Op::Log(op) => op.properties(),
            Op::Api(op) => op.properties(),
        }
    }
}

impl From<NodeOp> for Op {
    fn from(op: NodeOp) -> Self {
        Op::Node(op)
    }
}

impl From<PodOp> for Op {
    fn from(op: PodOp) -> Self {
        Op::Pod(op)
    }
}

impl From<ContainerOp> for Op {
    fn from(op: ContainerOp) -> Self {
        Op::Container(op)
    }
}

impl From<VolumeOp> for Op {
    fn from(op: VolumeOp) -> Self {
        Op::Volume(op)
    }
}

impl From<ImageOp> for Op {
    fn from(op: ImageOp) -> Self {
        Op::Image(op)
    }
}

impl From<LogOp> for Op {
    fn from(op: LogOp) -> Self {
        Op::Log(op)
    }
}

impl From<ApiOp> for Op {
    fn from(op: ApiOp) -> Self {
        Op::Api(op)
    }
}

/// For traces: with attempts, ids and grace periods.
impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        let about = self.about();
        if !about.is_empty() {
            write!(f, " {about}")?;
        }
        match self {
            Op::Pod(PodOp::RunSandbox(order)) => write!(f, " attempt {}", order.attempt),
            Op::Pod(PodOp::StopSandbox { id, .. } | PodOp::RemoveSandbox { id, .. }) => write!(f, " {id}"),
            Op::Container(ContainerOp::Start(order)) => write!(f, "#{}", order.attempt),
            Op::Container(ContainerOp::Resume { id, .. } | ContainerOp::Remove { id, .. }) => write!(f, " {id}"),
            Op::Container(ContainerOp::Stop { id, grace_secs, .. }) => write!(f, " {id} {grace_secs}s"),
            Op::Container(ContainerOp::RunHook(order)) => write!(f, " {:?}", order.hook),
            Op::Container(ContainerOp::Probe(order)) => write!(f, " {:?}", order.kind),
            Op::Api(ApiOp::PatchStatus { version, .. }) => write!(f, " v{version}"),
            Op::Node(_) | Op::Pod(_) | Op::Volume(_) | Op::Image(_) | Op::Log(_) | Op::Api(_) => Ok(()),
        }
    }
}

impl PodOp {
    fn properties(&self) -> Properties {
        match self {
            PodOp::Inspect { .. } => Properties::look("InspectPod"),
            PodOp::SetUpCgroup { .. } => Properties::disk("SetUpPodCgroup").aborted(),
            PodOp::RemoveCgroup(_) => Properties::disk("RemovePodCgroup"),
            PodOp::MakeDirs { .. } => Properties::disk("MakePodDirs").aborted(),
            PodOp::RemoveDir(_) => Properties::disk("RemovePodDir"),
            PodOp::RemoveLogDir(_) => Properties::disk("RemoveLogDir"),
            // As upstream: a sandbox may need its image and a network first.
            PodOp::RunSandbox(_) => Properties::runtime("RunSandbox", OpKind::Start).lasting(TWO_CALLS),
            PodOp::StopSandbox { .. } => Properties::runtime("StopSandbox", OpKind::End),
            PodOp::RemoveSandbox { .. } => Properties::runtime("RemoveSandbox", OpKind::End),
        }
    }

    fn about(&self) -> String {
        match self {
            PodOp::Inspect { pod }
            | PodOp::SetUpCgroup { pod, .. }
            | PodOp::MakeDirs { pod }
            | PodOp::StopSandbox { pod, .. }
            | PodOp::RemoveSandbox { pod, .. } => pod.to_string(),
            PodOp::RemoveCgroup(place) | PodOp::RemoveDir(place) | PodOp::RemoveLogDir(place) => place.pod.to_string(),
            PodOp::RunSandbox(order) => PodRef::of(&order.pod).to_string(),
        }
    }
}

const ONE_CALL: Deadline = Deadline::Runtime { calls: 1, extra: Duration::ZERO };
const TWO_CALLS: Deadline = Deadline::Runtime { calls: 2, extra: Duration::ZERO };

impl ContainerOp {
    fn properties(&self) -> Properties {
        match self {
            ContainerOp::Start(_) => Properties::runtime("StartContainer", OpKind::Start).lasting(TWO_CALLS),
            ContainerOp::Resume { .. } => Properties::runtime("ResumeContainer", OpKind::Start),
            ContainerOp::Stop { grace_secs, .. } => {
                let grace = Duration::from_secs(grace_secs.unsigned_abs());
                Properties::runtime("StopContainer", OpKind::End).with_extra(grace)
            }
            ContainerOp::Remove { .. } => Properties::runtime("RemoveContainer", OpKind::End),
            // The probe's own timeout ends it; killing its command may take the runtime longer.
            ContainerOp::Probe(order) => Properties::look("Probe").with_extra(order.timeout),
            ContainerOp::RunHook(order) => {
                let hook = Properties::runtime("RunHook", OpKind::Change).with_extra(order.limit);
                match order.hook {
                    Hook::PostStart => hook.aborted(),
                    Hook::PreStop => hook,
                }
            }
        }
    }

    fn about(&self) -> String {
        match self {
            ContainerOp::Start(order) => format!("{}/{}", PodRef::of(&order.pod), order.container),
            ContainerOp::Resume { pod, name, .. }
            | ContainerOp::Stop { pod, name, .. }
            | ContainerOp::Remove { pod, name, .. } => format!("{pod}/{name}"),
            ContainerOp::Probe(order) => format!("{}/{}", order.pod, order.container),
            ContainerOp::RunHook(order) => format!("{}/{}", order.pod, order.container),
        }
    }
}

impl ImageOp {
    fn properties(&self) -> Properties {
        match self {
            ImageOp::Inspect { .. } => Properties::look("InspectImage").aborted(),
            ImageOp::Pull { .. } => Properties::new("PullImage", OpKind::Change, Deadline::Pull).aborted(),
            ImageOp::Delete { .. } => Properties::new("DeleteImage", OpKind::End, TWO_CALLS),
        }
    }

    fn about(&self) -> String {
        match self {
            ImageOp::Inspect { pod, image } | ImageOp::Pull { pod, image, .. } => format!("{pod} {image}"),
            ImageOp::Delete { id, .. } => id.clone(),
        }
    }
}

impl ApiOp {
    fn properties(&self) -> Properties {
        match self {
            ApiOp::GetNode => Properties::look("GetNode").lasting(Deadline::Api),
            ApiOp::PatchStatus { .. } => Properties::api("PatchStatus").upkeep(),
            ApiOp::DeletePod { .. } => Properties::api("DeletePod"),
            ApiOp::CreateMirrorPod { .. } => Properties::api("CreateMirrorPod"),
            ApiOp::DeleteMirrorPod { .. } => Properties::api("DeleteMirrorPod"),
        }
    }

    fn about(&self) -> String {
        match self {
            ApiOp::GetNode => String::new(),
            ApiOp::PatchStatus { pod, .. } | ApiOp::DeletePod { pod } | ApiOp::DeleteMirrorPod { pod } => {
                pod.to_string()
            }
            ApiOp::CreateMirrorPod { pod } => PodRef::of(pod).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{mk_pod, start_order};

    #[test]
    fn deadline_of_an_effect_covers_its_calls() {
        let request = Duration::from_secs(100);
        let pod = std::sync::Arc::new(mk_pod("always | main a"));
        let (uid, id) = (PodUid::of(&pod), PodRef::of(&pod));
        let container = start_order(&pod);
        let sandbox = RunSandbox { uid, pod, attempt: 0, cgroup_parent: String::new(), volume_groups: Vec::new() };
        let stop =
            Op::Container(ContainerOp::Stop { pod: id.clone(), name: "a".to_owned(), id: "a0".into(), grace_secs: 30 });
        for (op, secs) in [
            (Op::Node(NodeOp::CheckRuntime), 100),
            (Op::Pod(PodOp::Inspect { pod: id.clone() }), 30),
            (Op::Pod(PodOp::RunSandbox(sandbox)), 200),
            (Op::Container(ContainerOp::Start(container)), 200),
            (stop, 130),
            (Op::Pod(PodOp::StopSandbox { pod: id, id: "sb0".into() }), 100),
        ] {
            assert_eq!(op.deadline(request), Duration::from_secs(secs), "{op:?}");
        }
    }
}
