//! Effects: what the core requests from the shell.
//!
//! Owns: the closed set of effects, as plain data. Never: how they are done (`rubelet/src/effects/`).
//! An effect may be lost, late or doubled; it decides nothing, has a deadline, and reports with `Event::Done`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    eviction::usage::{NodeUsage, PodUsages, RuntimePlaces},
    id::{ContainerId, PodRef, PodUid, SandboxId},
    image_gc::{ImageListing, Space},
    node_object::NodeObject,
    observation::{Listing, PodFacts, Remains, RuntimeStatus},
    op::Op,
    probes::ProbeOutcome,
    volumes::{
        claims::{BlockPlaces, PersistentSource},
        devices::FoundDevice,
        expansion::Expanded,
        teardown::PodVolume,
    },
};

/// Ties a result to its effect. Unique within one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EffectId(pub u64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Effect {
    /// Carry out the operation within its deadline, and report with `Event::Done`.
    Do { id: EffectId, op: Op, deadline: Duration, reason: String },
    /// Stop the effect; no result is expected.
    Cancel(EffectId),
    /// Begin no further step of the effect, and report when the current step is finished. For operations that must not be
    /// interrupted: a container whose start was sent to the runtime may start even without a client.
    Recall(EffectId),
    /// Record the event. No result.
    Record(EventRecord),
}

/// The runtime's report about an image that is present.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFacts {
    /// The ID from which containers are created.
    pub id: String,
    pub size_bytes: u64,
    /// The image's default user.
    pub user: ImageUser,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageUser {
    #[default]
    Unset,
    Uid(i64),
    Name(String),
}

/// The result of an effect.
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
    /// The devices on disk.
    Devices(Vec<FoundDevice>),
    /// What a claim stands for.
    Volume(Arc<PersistentSource>),
    Expanded(Expanded),
    /// Whether a volume is not attached because the node has as many as its driver can have here.
    AttachLimit {
        is_exceeded: bool,
    },
    /// A block volume's device is shown to its pod.
    Mapped(BlockPlaces),
    Probe(ProbeOutcome),
    /// An HTTPS hook was sent over HTTP.
    HookFellBack {
        address: String,
    },
    PodDirs {
        uids: Vec<PodUid>,
        log_dirs: Vec<String>,
    },
    Images(ImageListing),
    /// With the space on the file system of images afterwards, if it is known.
    ImageDeleted {
        space: Option<Space>,
    },
    NodeUsage(NodeUsage),
    RuntimePlaces(RuntimePlaces),
    PodUsages(PodUsages),
    /// The sizes of logs; `None` where the file is missing.
    LogSizes(BTreeMap<ContainerId, Option<u64>>),
    /// The container was removed after processes of it were killed that the runtime had kept; its error until then.
    LeftoverTask {
        error: String,
    },
    /// The volumes of a terminated pod, each of which is unmounted by an operation of its own.
    MountedVolumes(BTreeSet<PodVolume>),
    /// What is left of a terminated pod after a removal step.
    Remains(Remains),
    /// Names of the cgroups below the QoS cgroups, of pods or not.
    Cgroups {
        names: Vec<String>,
    },
    Node(NodeObject),
    /// The pod in the API server after our change.
    ApiPod(Arc<Pod>),
}

/// Why an effect failed: a kind for code, a text for users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct EffectError {
    pub kind: ErrorKind,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// Retry after the usual back-off.
    Retry,
    /// As `Retry`; a CSI driver may have done it all the same, or may still do it.
    Uncertain,
    /// As `Retry`; a CSI driver's answer, after which nothing of the call goes on.
    FailedByDriver,
    /// As `Retry`; a file system does not answer. When it does, `Event::FileSystemAnswered` says so.
    FileSystemLate,
    /// The runtime or the API server cannot be reached.
    Unavailable,
    /// No response in time: the call or the server may be slow.
    TimedOut,
    /// An API object that the pod uses is missing or cannot be read.
    MissingObject,
    /// A retry fails until the pod changes; the word is upstream's reason (`CreateContainerConfigError`, …).
    Reject(Reason),
    /// The pod needs something this node does not support: a retry fails until one of them changes.
    Refused,
    /// The object does not exist any more.
    Gone,
}

/// Why a container waits after a failed start or an exit, as users grep for it.
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
    PostStartHookError,
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
            Reason::PostStartHookError => "PostStartHookError",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One line of `rubelet events`; on a cluster, a core/v1 Event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    pub about: InvolvedObject,
    pub severity: Severity,
    pub reason: String,
    pub message: String,
    /// Of the Event object.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl EventRecord {
    pub fn new(
        about: InvolvedObject,
        severity: Severity,
        reason: impl Into<String>,
        message: impl Into<String>,
    ) -> EventRecord {
        let (reason, message) = (reason.into(), message.into());
        EventRecord { about, severity, reason, message, annotations: BTreeMap::new() }
    }

    #[must_use]
    pub fn annotated(self, annotations: BTreeMap<String, String>) -> EventRecord {
        EventRecord { annotations, ..self }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum InvolvedObject {
    Node,
    Pod(PodRef),
    Container {
        pod: PodRef,
        container: String,
    },
    /// A persistent volume claim.
    Claim {
        namespace: String,
        name: String,
        uid: String,
    },
    /// A manifest that was not accepted as a pod: a file path or a URL.
    Manifest(String),
}

impl fmt::Display for InvolvedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvolvedObject::Node => f.write_str("node"),
            InvolvedObject::Pod(pod) => write!(f, "pod/{pod}"),
            InvolvedObject::Container { pod, container } => write!(f, "pod/{pod}{{{container}}}"),
            InvolvedObject::Claim { namespace, name, .. } => write!(f, "persistentvolumeclaim/{namespace}/{name}"),
            InvolvedObject::Manifest(origin) => f.write_str(origin),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Severity {
    Normal,
    Warning,
}
