//! What readers may see: an immutable picture of the agent after a turn.
//!
//! Owns: the view types behind `rubelet pods`, `rubelet explain`, `/pods`. Never: decides; nothing reads them back.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde::{Deserialize, Serialize};

use crate::{
    cgroups::CgroupDriver,
    event::Source,
    id::PodUid,
    needs::Needs,
    observation::{ListedState, RuntimeHandler, SharedFacts},
};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub node: NodeView,
    pub pods: PodViews,
    /// The pods that are not what they were in the snapshot before this one, or are gone.
    #[serde(skip)]
    pub changed: BTreeSet<PodUid>,
}

/// Two snapshots share what is the same in both: a new one costs what changed, not what there is.
pub type PodViews = rpds::RedBlackTreeMapSync<PodUid, Arc<PodView>>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    pub name: String,
    /// `containerd 2.4.2`; empty until the runtime answered once.
    pub runtime: String,
    pub runtime_problem: Option<NodeProblem>,
    pub network_problem: Option<NodeProblem>,
    pub readiness: NodeReadiness,
    /// As a node reports it: `containerd://2.4.2`.
    pub runtime_version: String,
    pub runtime_handlers: Vec<RuntimeHandler>,
    pub supplemental_groups_policy: Option<bool>,
    /// Who makes cgroups, by the runtime's word.
    pub cgroup_driver: Option<CgroupDriver>,
    /// Sources that have not spoken yet; nothing is cleaned up before they have.
    pub sources_not_ready: Vec<Source>,
}

/// May pods be sent here?
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeReadiness {
    /// The first check is not over yet.
    #[default]
    Unchecked,
    /// The runtime did not answer since the agent started, which was only just now: what was known before still counts.
    Unknown,
    Ready,
    /// All the reasons.
    NotReady(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProblem {
    pub message: String,
    pub since: Timestamp,
}

/// A pod as it is: wanted, and as found in the runtime.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodView {
    /// `None` for a pod that only the runtime knows.
    pub source: Option<Source>,
    /// Under which UID the API server knows a static pod.
    #[serde(default)]
    pub mirror_uid: Option<PodUid>,
    /// The pod as asked for; for a pod only the runtime knows, just its names. Without status.
    pub pod: Arc<Pod>,
    pub status: Arc<PodStatus>,
    /// `Waiting`, `Syncing`, `Terminating`, `Terminated`, `Finished`.
    pub lifecycle: String,
    pub lifecycle_since: Timestamp,
    /// The names of running containers with their ids, as the runtime has them.
    pub running: BTreeMap<String, String>,
    pub counts: PodCounts,
    /// The last look at it; for readers in this process alone.
    #[serde(skip)]
    pub facts: Option<SharedFacts>,
    /// The objects and tokens to be kept for it.
    #[serde(skip)]
    pub needs: Arc<Needs>,
    /// desired → admitted → volumes → sandbox → images → containers → status, in this order.
    pub steps: Vec<Step>,
}

/// What a pod counts as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodCounts {
    pub stage: LifecycleStage,
    /// The reason under which the node refused it.
    pub rejected: Option<String>,
    /// Something is being done for it, or a look at it is due.
    #[serde(default)]
    pub is_working: bool,
    pub has_ready_sandbox: bool,
    /// How many containers the runtime remembers of it, by their state.
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

/// One station on a pod's way, with what it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub name: String,
    pub state: StepState,
    /// A sentence: what was done, what is being done, or what it waits for.
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
