//! What the core asks the shell to do.
//!
//! Owns: the closed set of effects, as plain data. Never: how they are done (`rubelet/src/effects/`).
//! An effect may be lost, late or doubled; it decides nothing, has a deadline, and answers with `Event::Done`.

use std::{fmt, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    cgroups::Cgroup,
    id::{ContainerId, PodRef, PodUid, SandboxId},
    node_object::NodeObject,
    observation::{Listing, PodFacts, RuntimeStatus},
    pod::hooks::HookOrder,
    probes::{ProbeOrder, ProbeOutcome},
    time::Uptime,
};

/// Ties an answer to the effect that asked. Never used twice in one run of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EffectId(pub u64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// Do this, within its deadline, and answer with `Event::Done`.
    Do { id: EffectId, op: Op, deadline: Duration, reason: String },
    /// Stop doing this; no answer is expected any more.
    Cancel(EffectId),
    /// Begin no further step of this, and answer as soon as the step under way is over. For what must not be cut off in the
    /// middle: a container whose start was asked for may start whether or not anybody listens.
    Recall(EffectId),
    /// Tell whoever watches. No answer.
    Record(EventRecord),
}

/// One operation on the world. Those above the line only look; the others change something and are safe to repeat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    CheckRuntime,
    Relist,
    InspectPod {
        pod: PodRef,
    },
    InspectImage {
        pod: PodRef,
        image: String,
    },
    /// Which pods have a directory under the root directory, or a log directory?
    ListPodDirs,
    /// The Node object as the API server has it now; the watch may be behind.
    LookAtNode,
    /// Asks a container how it is. What its program does about it is its own affair.
    Probe(ProbeOrder),
    // ---
    /// Sets the cgroups above the pods' right, and says which there are below them.
    SyncQosCgroups {
        tiers: Vec<Cgroup>,
    },
    SetUpPodCgroup {
        pod: PodRef,
        cgroup: Cgroup,
    },
    /// Kills what is left in the pod's cgroup and removes it, wherever it is of these.
    RemovePodCgroup {
        pod: PodRef,
        paths: Vec<String>,
    },
    MakePodDirs {
        pod: PodRef,
    },
    SetUpVolumes {
        pod: Arc<Pod>,
        uid: PodUid,
    },
    /// Brings the volumes that change with time up to date; leaves the others alone.
    RefreshVolumes {
        pod: Arc<Pod>,
        uid: PodUid,
    },
    /// Unmounts and removes the pod's volumes.
    TearDownVolumes {
        pod: PodRef,
    },
    /// Removes the pod's directory under the root directory; refuses while something is mounted below it.
    RemovePodDir {
        uid: PodUid,
    },
    /// Removes `<namespace>_<name>_<uid>` under the pod log directory, and links to it that lead nowhere.
    RemoveLogDir {
        dir_name: String,
    },
    PullImage {
        pod: PodRef,
        image: String,
        /// Names of secrets in the pod's namespace that may hold credentials for it.
        secrets: Vec<String>,
    },
    RunSandbox(RunSandbox),
    StopSandbox {
        pod: PodRef,
        id: SandboxId,
    },
    RemoveSandbox {
        pod: PodRef,
        id: SandboxId,
    },
    /// Creates and starts.
    StartContainer(StartContainer),
    /// Starts a container that was created by an attempt that was cut off.
    ResumeContainer {
        pod: PodRef,
        name: String,
        id: ContainerId,
    },
    /// SIGTERM, then SIGKILL when the grace period is over.
    StopContainer {
        pod: PodRef,
        name: String,
        id: ContainerId,
        grace_secs: i64,
    },
    RemoveContainer {
        pod: PodRef,
        name: String,
        id: ContainerId,
    },
    /// Tells a container that it has started, or that it is about to be stopped.
    RunHook(HookOrder),
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

impl Op {
    /// At its end something may run that did not run before.
    pub fn starts_something(&self) -> bool {
        matches!(self, Op::RunSandbox(_) | Op::StartContainer(_) | Op::ResumeContainer { .. })
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

/// What the runtime says of an image that is present.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFacts {
    /// What to create containers from.
    pub id: String,
    pub size_bytes: u64,
    /// The user the image wants to run as.
    pub user: ImageUser,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageUser {
    #[default]
    Unset,
    Uid(i64),
    Name(String),
}

/// What an effect found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Facts {
    Nothing,
    Runtime(RuntimeStatus),
    Listing(Listing),
    Pod(PodFacts),
    /// `None`: the image is not there.
    Image(Option<ImageFacts>),
    Sandbox {
        id: SandboxId,
    },
    Container {
        id: ContainerId,
    },
    Probe(ProbeOutcome),
    /// The hook was to be told over TLS, and was told without.
    HookFellBack {
        address: String,
    },
    PodDirs {
        uids: Vec<PodUid>,
        log_dirs: Vec<String>,
    },
    /// Names of the cgroups below the tiers, pods' or not.
    Cgroups {
        names: Vec<String>,
    },
    Node(NodeObject),
    /// The pod as the API server holds it after a change of ours.
    ApiPod(Arc<Pod>),
}

/// Why an effect failed: kind for the machine, text for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct EffectError {
    pub kind: ErrorKind,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// Try again after the usual back-off.
    Retry,
    /// The runtime or the API server cannot be reached.
    Unavailable,
    /// It was asked and did not answer in time: the call may be slow, or the one asked.
    TimedOut,
    /// An object of the API that the pod uses is missing or cannot be read.
    MissingObject,
    /// Trying again will not help until the pod changes; the word is upstream's reason (`CreateContainerConfigError`, …).
    Reject(Reason),
    /// The object is not there any more.
    Gone,
}

/// The reasons under which a container can fail to start, as users grep for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    ErrImagePull,
    ErrImageNeverPull,
    ImagePullBackOff,
    ImageInspectError,
    InvalidImageName,
    RegistryUnavailable,
    SignatureValidationFailed,
    CreateContainerConfigError,
    CreateContainerError,
    RunContainerError,
    CrashLoopBackOff,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::ErrImagePull => "ErrImagePull",
            Reason::ErrImageNeverPull => "ErrImageNeverPull",
            Reason::ImagePullBackOff => "ImagePullBackOff",
            Reason::ImageInspectError => "ImageInspectError",
            Reason::InvalidImageName => "InvalidImageName",
            Reason::RegistryUnavailable => "RegistryUnavailable",
            Reason::SignatureValidationFailed => "SignatureValidationFailed",
            Reason::CreateContainerConfigError => "CreateContainerConfigError",
            Reason::CreateContainerError => "CreateContainerError",
            Reason::RunContainerError => "RunContainerError",
            Reason::CrashLoopBackOff => "CrashLoopBackOff",
        }
    }
}

/// One line of `rubelet events`; on a cluster, a core/v1 Event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    pub about: About,
    pub severity: Severity,
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum About {
    Node,
    Pod(PodRef),
    Container {
        pod: PodRef,
        container: String,
    },
    /// A manifest that did not become a pod: a file path or a URL.
    Manifest(String),
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            About::Node => f.write_str("node"),
            About::Pod(pod) => write!(f, "pod/{pod}"),
            About::Container { pod, container } => write!(f, "pod/{pod}{{{container}}}"),
            About::Manifest(origin) => f.write_str(origin),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Severity {
    Normal,
    Warning,
}
