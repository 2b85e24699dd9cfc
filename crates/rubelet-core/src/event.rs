//! What can happen to the agent.
//!
//! Owns: the closed set of inputs of the sync loop, as plain data, so that a run can be recorded and replayed.
//! Upstream: the channels of `syncLoopIteration`.

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    effect::{EffectError, EffectId, Facts},
    id::PodUid,
    node_object::NodeObject,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A source's whole set of pods, in a state fit for running: defaulted, validated and named. `pod_config.rs` finds what changed.
    Config { source: Source, pods: Vec<Arc<Pod>> },
    /// Pods of a source that came or changed since its last whole set, and those that went.
    ConfigChange { source: Source, pods: Vec<Arc<Pod>>, removed: Vec<PodUid> },
    /// Pods of a source that was not read to its end: they are wanted, and what is not among them may be, too. Said only before
    /// the source's first whole set.
    PartialConfig { source: Source, pods: Vec<Arc<Pod>> },
    /// Pods the API server has in a form that cannot be read: all of them, each time they change. Said before the pods they are
    /// missing from, so that nobody takes what runs of them for unwanted.
    Unreadable { pods: BTreeSet<PodUid> },
    /// Something says this pod changed in the runtime. A hint: it only causes a look.
    Hint { pod: PodUid },
    /// The runtime's stream of container events came up or went down.
    RuntimeEvents(EventStream),
    /// An object changed that the pod's volumes or environment are made of.
    Refresh { pod: PodUid },
    /// The Node object, each time the API server shows another one.
    Node(NodeObject),
    /// The moment `Agent::wake_at` named has come.
    Due,
    /// An effect is over.
    Done { id: EffectId, result: Result<Facts, EffectError> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventStream {
    Up,
    Down,
}

/// Where a pod was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    File,
    Http,
    Api,
}

impl Source {
    /// The value of annotation `kubernetes.io/config.source`.
    pub fn as_str(self) -> &'static str {
        match self {
            Source::File => "file",
            Source::Http => "http",
            Source::Api => "api",
        }
    }
}
