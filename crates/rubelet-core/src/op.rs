//! One operation on the world, and what holds of it whatever its details are.
//!
//! Owns: the closed set of operations, grouped by what they are about, and their properties: name, kind, what has to be looked
//! at afterwards, what becomes of them when their pod ends, deadline. Never: how they are done (`rubelet/src/effects/`).
//! An operation that changes something is safe to repeat.

use std::{fmt, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    cgroups::Cgroup,
    effect::ImageFacts,
    id::{ContainerId, PodRef, PodUid, SandboxId},
    pod::hooks::{Hook, HookRequest},
    probes::ProbeRequest,
    time::Uptime,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    Node(NodeOp),
    Pod(PodOp),
    Container(ContainerOp),
    Volume(VolumeOp),
    Image(ImageOp),
    /// A request to the API server.
    Api(ApiOp),
}

/// The node as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum NodeOp {
    CheckRuntime,
    Relist,
    /// Which pods have a directory under the root directory, or a log directory?
    ListPodDirs,
    /// Sets the cgroups above the pods' right, and says which there are below them.
    SyncQosCgroups {
        cgroups: Vec<Cgroup>,
    },
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
    /// Kills what is left in the pod's cgroup and removes it, wherever it is. The operations that release what a pod held
    /// answer with what remains of it (`Facts::Remains`).
    RemoveCgroup(PodPlace),
    MakeDirs {
        pod: PodRef,
    },
    /// Removes the pod's directory under the root directory; refuses while something is mounted below it.
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
    /// Starts a container that was created by an attempt that was cut off.
    Resume {
        pod: PodRef,
        name: String,
        id: ContainerId,
    },
    /// SIGTERM, then SIGKILL when the grace period is over.
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
    /// Asks a container how it is. What its program does about it is its own affair.
    Probe(ProbeRequest),
    /// Tells a container that it has started, or that it is about to be stopped.
    RunHook(HookRequest),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum VolumeOp {
    SetUp {
        pod: Arc<Pod>,
        uid: PodUid,
    },
    /// Brings the volumes that change with time up to date; leaves the others alone.
    Refresh {
        pod: Arc<Pod>,
        uid: PodUid,
    },
    /// Unmounts and removes the pod's volumes.
    TearDown(PodPlace),
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
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ApiOp {
    /// The Node object as the API server has it now; the watch may be behind.
    GetNode,
    /// `pod` is as the API server knows it: a static pod's mirror.
    PatchStatus {
        pod: PodRef,
        /// Of the status the patch brings about.
        version: u64,
        /// Of the first change that is in it.
        since: Uptime,
        patch: serde_json::Value,
    },
    /// Without grace, and only this very pod.
    DeletePod {
        pod: PodRef,
    },
    /// Makes the API server's copy of a static pod.
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
    /// As the sandbox was made with.
    pub cgroup_parent: String,
    /// Primary first; empty for host network.
    pub pod_ips: Vec<String>,
    /// The node's, primary first.
    pub host_ips: Vec<String>,
    /// The instance whose processes an ephemeral container is to see, if it was found.
    pub target: Option<ContainerId>,
    /// The sandbox's runtime handler supports them.
    pub recursive_read_only_mounts: bool,
    pub image: ImageFacts,
}

/// What holds of an operation whatever its details are.
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
    /// Changes nothing.
    Look,
    /// Follows from what was decided and told elsewhere, and comes again and again.
    Upkeep,
    /// At its end something may run that did not run before.
    Start,
    /// Stops or removes something. If that is not there, the operation has succeeded.
    End,
    /// Any other change.
    Change,
}

/// What an operation may have changed, so that what is known of it is out of date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dirties {
    Nothing,
    /// The pod's containers and sandboxes in the runtime.
    Runtime,
}

/// What becomes of an operation under way when its pod begins to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtPodEnd {
    /// Cutting it off leaves nothing half-done that a later look would not show.
    Abort,
    /// It begins no further call and is waited for.
    Recall,
    LetRun,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deadline {
    /// A look that lasts longer than this is as bad as none.
    Look,
    /// File operations of one pod.
    Disk,
    Pull,
    /// One request to the API server, waiting for the client's rate limit included.
    Api,
    /// So many calls to the runtime, each with its own timeout, and what they are given beyond it.
    Runtime {
        calls: u32,
        extra: Duration,
    },
}

const LOOK_DEADLINE: Duration = Duration::from_secs(30);
const DISK_DEADLINE: Duration = Duration::from_secs(123);
/// Upstream lets a pull last for ever; this is for ever with an end.
const PULL_DEADLINE: Duration = Duration::from_secs(2 * 3600);
const API_DEADLINE: Duration = Duration::from_secs(30);

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

    /// What has to be looked at when it is over, however it ended.
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
            Deadline::Pull => PULL_DEADLINE,
            Deadline::Api => API_DEADLINE,
            Deadline::Runtime { calls, extra } => (request * calls).saturating_add(extra),
        }
    }

    /// Whom it is about: `namespace/pod`, `namespace/pod/container`; empty is the node.
    pub fn about(&self) -> String {
        match self {
            Op::Node(_) => String::new(),
            Op::Pod(op) => op.about(),
            Op::Container(op) => op.about(),
            Op::Volume(op) => op.about(),
            Op::Image(op) => op.about(),
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
            Op::Node(_) | Op::Pod(_) | Op::Volume(_) | Op::Image(_) | Op::Api(_) => Ok(()),
        }
    }
}

impl NodeOp {
    fn properties(&self) -> Properties {
        const ONE_CALL: Deadline = Deadline::Runtime { calls: 1, extra: Duration::ZERO };
        match self {
            NodeOp::CheckRuntime => Properties::look("CheckRuntime").lasting(ONE_CALL),
            NodeOp::Relist => Properties::look("Relist"),
            NodeOp::ListPodDirs => Properties::look("ListPodDirs").lasting(Deadline::Disk),
            NodeOp::SyncQosCgroups { .. } => Properties::disk("SyncQosCgroups"),
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
            // It ends by the probe's own timeout; a command may have to be killed first, as slow as the runtime does it.
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

impl VolumeOp {
    fn properties(&self) -> Properties {
        match self {
            VolumeOp::SetUp { .. } => Properties::disk("SetUpVolumes").aborted(),
            VolumeOp::Refresh { .. } => Properties::disk("RefreshVolumes").aborted().upkeep(),
            VolumeOp::TearDown(_) => Properties::disk("TearDownVolumes"),
        }
    }

    fn about(&self) -> String {
        match self {
            VolumeOp::SetUp { pod, .. } | VolumeOp::Refresh { pod, .. } => PodRef::of(pod).to_string(),
            VolumeOp::TearDown(place) => place.pod.to_string(),
        }
    }
}

impl ImageOp {
    fn properties(&self) -> Properties {
        match self {
            ImageOp::Inspect { .. } => Properties::look("InspectImage").aborted(),
            ImageOp::Pull { .. } => Properties::new("PullImage", OpKind::Change, Deadline::Pull).aborted(),
        }
    }

    fn about(&self) -> String {
        let (ImageOp::Inspect { pod, image } | ImageOp::Pull { pod, image, .. }) = self;
        format!("{pod} {image}")
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
    fn an_effect_has_as_long_as_its_calls_may_take() {
        let request = Duration::from_secs(100);
        let pod = std::sync::Arc::new(mk_pod("always | main a"));
        let (uid, id) = (PodUid::of(&pod), PodRef::of(&pod));
        let container = start_order(&pod);
        let sandbox = RunSandbox { uid, pod, attempt: 0, cgroup_parent: String::new() };
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
