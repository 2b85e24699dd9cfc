//! The snapshot: an immutable view of the agent after a turn, for readers.
//!
//! Owns: the view types behind `rubelet pods`, `rubelet node`, `rubelet explain`, `/pods`. Never: decides; the agent does not read them back.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde::{Deserialize, Serialize};

use crate::{
    cgroups::CgroupDriver,
    event::Source,
    eviction::{EvictionRecord, ThresholdView, threshold::Pressure},
    id::PodUid,
    image_gc::ImageCollection,
    needs::Needs,
    observation::{ListedState, RuntimeHandler, SharedFacts},
    pod::VolumeRecord,
    shutdown::ShutdownView,
};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub node: NodeView,
    #[serde(default)]
    pub eviction: Arc<EvictionView>,
    pub pods: PodViews,
    /// The pods that differ from the previous snapshot, or are gone.
    #[serde(skip)]
    pub changed: BTreeSet<PodUid>,
}

/// What eviction and the collection of images know and did. Apart from the node's view, because it changes with every look.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvictionView {
    pub thresholds: Vec<ThresholdView>,
    pub record: EvictionRecord,
    /// The last collections of images, the newest last.
    #[serde(default)]
    pub images: VecDeque<ImageCollection>,
}

/// Two snapshots share equal parts: a new one costs what changed, not the number of pods.
pub type PodViews = rpds::RedBlackTreeMapSync<PodUid, Arc<PodView>>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    pub name: String,
    /// `containerd 2.4.2`; empty before the first response of the runtime.
    pub runtime: String,
    pub runtime_problem: Option<NodeProblem>,
    pub network_problem: Option<NodeProblem>,
    pub readiness: NodeReadiness,
    /// Each is a condition of the node; `None` before the first look.
    #[serde(default)]
    pub pressures: Option<BTreeSet<Pressure>>,
    /// As a node reports it: `containerd://2.4.2`.
    pub runtime_version: String,
    pub runtime_handlers: Vec<RuntimeHandler>,
    pub supplemental_groups_policy: Option<bool>,
    /// As the runtime reports it.
    pub cgroup_driver: Option<CgroupDriver>,
    /// `None` without the gate MemoryQoS, or cgroup v2.
    #[serde(default)]
    pub protected_memory: Option<ProtectedMemory>,
    /// Cleanup is deferred until these sources are ready.
    pub sources_not_ready: Vec<Source>,
    /// `None` before the first look at the devices: what the Node object has stays.
    #[serde(default)]
    pub volumes_in_use: Option<Vec<String>>,
    /// The machine is about to go down.
    #[serde(default)]
    pub shutdown: Option<ShutdownView>,
}

/// The memory of pods that the kernel protects from reclaim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectedMemory {
    /// Of guaranteed pods, in any case.
    pub min_bytes: u64,
    /// Of burstable pods, as long as there is other memory.
    pub low_bytes: u64,
}

/// Whether the node is ready for pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeReadiness {
    /// The first check has not finished.
    #[default]
    Unchecked,
    /// No response of the runtime yet, shortly after the start: the earlier condition counts.
    Unknown,
    Ready,
    /// All reasons.
    NotReady(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProblem {
    pub message: String,
    pub since: Timestamp,
}

/// A pod: desired, and as found in the runtime.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodView {
    /// `None` for a pod that is only in the runtime.
    pub source: Option<Source>,
    /// The UID of a static pod's mirror pod.
    #[serde(default)]
    pub mirror_uid: Option<PodUid>,
    /// The desired pod; for a pod that is only in the runtime, just its names. Without status.
    pub pod: Arc<Pod>,
    pub status: Arc<PodStatus>,
    /// `Waiting`, `Syncing`, `Terminating`, `Terminated`, `Finished`.
    pub lifecycle: String,
    pub lifecycle_since: Timestamp,
    /// The running containers: name and runtime ID.
    pub running: BTreeMap<String, String>,
    pub counts: PodCounts,
    /// The last look at it; only for readers in this process.
    #[serde(skip)]
    pub facts: Option<SharedFacts>,
    /// The objects and tokens to keep for it.
    #[serde(skip)]
    pub needs: Arc<Needs>,
    /// What this process knows of its volumes, by name, until they are torn down.
    #[serde(skip)]
    pub volumes: BTreeMap<String, VolumeRecord>,
    /// desired → admitted → volumes → sandbox → images → containers → status, in this order.
    pub steps: Vec<Step>,
}

/// What metrics count a pod as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodCounts {
    pub stage: LifecycleStage,
    /// The reason for which the node rejected it.
    pub rejected: Option<String>,
    /// The resource that a critical pod lacked, for which this one was preempted.
    #[serde(default)]
    pub preempted_for: Option<String>,
    /// An effect is in flight for it, or a look is due.
    #[serde(default)]
    pub is_working: bool,
    pub has_ready_sandbox: bool,
    /// How many containers the runtime has of it, by state.
    pub containers: BTreeMap<ListedState, u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LifecycleStage {
    #[default]
    Waiting,
    Syncing,
    Terminating,
    Terminated,
}

/// One step of a pod, with what it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub name: String,
    pub state: StepState,
    /// A sentence: what was done, what is in progress, or what it waits for.
    pub detail: String,
    pub since: Option<Timestamp>,
    pub next_retry: Option<Timestamp>,
    pub last_error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StepState {
    Done,
    Working,
    Waiting,
    Failed,
    /// Not reached yet.
    Pending,
}
