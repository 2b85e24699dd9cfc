//! What the core asks the shell to do.
//!
//! Owns: the closed set of effects, as plain data. Never: how they are done (`rubelet/src/effects/`).
//! An effect may be lost, late or doubled; it decides nothing, has a deadline, and answers with `Event::Done`.

use std::{fmt, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    id::{ContainerId, PodRef, PodUid, SandboxId},
    node_object::NodeObject,
    observation::{Listing, PodFacts, Remains, RuntimeStatus},
    op::Op,
    probes::ProbeOutcome,
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
    /// What is left of an ended pod after something of it was removed.
    Remains(Remains),
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
    /// The pod asks for what this node does not do: trying again will not help until one of them changes.
    Refused,
    /// The object is not there any more.
    Gone,
}

/// Why a container waits after it failed to start or ended, as users grep for it.
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
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum InvolvedObject {
    Node,
    Pod(PodRef),
    Container {
        pod: PodRef,
        container: String,
    },
    /// A manifest that did not become a pod: a file path or a URL.
    Manifest(String),
}

impl fmt::Display for InvolvedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvolvedObject::Node => f.write_str("node"),
            InvolvedObject::Pod(pod) => write!(f, "pod/{pod}"),
            InvolvedObject::Container { pod, container } => write!(f, "pod/{pod}{{{container}}}"),
            InvolvedObject::Manifest(origin) => f.write_str(origin),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Severity {
    Normal,
    Warning,
}
