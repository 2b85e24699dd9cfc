//! Events: the inputs of the agent.
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
    shutdown::ShutdownSignal,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A source's whole set of pods, ready to run: defaulted, validated and named. `pod_config.rs` computes what changed.
    Config { source: Source, pods: Vec<Arc<Pod>> },
    /// Pods of a source that were added or changed since its last whole set, and those removed.
    ConfigChange { source: Source, pods: Vec<Arc<Pod>>, removed: Vec<PodUid> },
    /// Pods of a source that was only partly read: they are desired, and pods missing here may be, too. Sent only before the
    /// source's first whole set.
    PartialConfig { source: Source, pods: Vec<Arc<Pod>> },
    /// Pods that the API server has in a form that cannot be read: all of them, each time they change. Sent before the set they
    /// are missing from, so that their running containers are not taken for orphans.
    Unreadable { pods: BTreeSet<PodUid> },
    /// This pod may have changed in the runtime. A hint: it only causes a look.
    Hint { pod: PodUid },
    /// These logs were written to since their sizes were looked at: paths of their files. A hint: it only causes a look.
    LogsWritten { paths: Vec<String> },
    /// The runtime's stream of container events opened or closed.
    RuntimeEvents(EventStream),
    /// An object changed that the pod's volumes or environment use.
    Refresh { pod: PodUid },
    /// The Node object, each time it changes in the API server.
    Node(NodeObject),
    /// A CSI driver registered: what failed for lack of it is tried again.
    DriverRegistered { driver: String },
    /// A file system that was late answers again: what failed for it is tried again.
    FileSystemAnswered,
    /// Whether the CSINode object of this node exists. Sent when it could not be made, and when it was after that.
    CsiNode { is_made: bool },
    /// The kernel reports that memory runs short. A hint: it only causes a look.
    MemoryShort,
    /// The machine is about to go down, or not any more.
    Shutdown(ShutdownSignal),
    /// The time of `Agent::wake_at` has come.
    Due,
    /// An effect has finished.
    Done { id: EffectId, result: Result<Facts, EffectError> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventStream {
    Up,
    Down,
}

/// The source of a pod.
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
