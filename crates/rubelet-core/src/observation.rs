//! Facts about the runtime, from the latest looks.
//!
//! Owns: the facts about sandboxes, containers and the runtime itself, as our own types (CRI messages are parsed before they
//! get here), and the difference between two relists. One writer: the agent, from its looks.
//! Upstream: PLEG (`pkg/kubelet/pleg/generic.go`) and the pod cache.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    cgroups::CgroupDriver,
    id::{ContainerId, PodRef, PodUid, SandboxId},
    time::Uptime,
};

/// The facts of one look at a pod. Empty lists for a pod that is not in the runtime.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodFacts {
    /// When the look began: later changes may not be in it.
    pub looked_at: Uptime,
    /// Newest first, by creation time.
    pub sandboxes: Vec<SandboxFacts>,
    /// Newest first, by attempt and then by creation time; every attempt that is still in the runtime.
    pub containers: Vec<ContainerFacts>,
    /// Highest attempt found in the pod's log directory, by name, of containers that are not in the runtime: restart counts
    /// survive a runtime that lost its state.
    pub logged_attempts: BTreeMap<String, u32>,
}

/// What is left on the node of a terminated pod, beside its containers and sandboxes: the first part of it, in the order of
/// removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Remains {
    Volumes,
    Cgroup,
    PodDir,
    Logs,
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SandboxFacts {
    pub id: SandboxId,
    pub attempt: u32,
    pub state: SandboxState,
    /// `None` if its creation was interrupted before the runtime dated it.
    pub created_at: Option<Timestamp>,
    /// The handler it was created with; empty is the runtime's default.
    pub runtime_handler: String,
    /// The pod shares the node's network namespace.
    pub host_network: bool,
    /// Primary first.
    pub ips: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxState {
    Ready,
    NotReady,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerFacts {
    pub id: ContainerId,
    pub sandbox: SandboxId,
    pub name: String,
    /// The restart count this container was created with.
    pub attempt: u32,
    /// Label `io.kubernetes.container.hash`; `None` when absent or unreadable.
    pub hash: Option<u64>,
    /// The image name in the pod.
    pub image: String,
    /// The runtime's reference to the image that was used (`imageID` in the API).
    pub image_ref: String,
    pub created_at: Timestamp,
    pub state: ContainerState,
    pub log_path: String,
    /// The images that are mounted into it, as they are named in its mounts.
    #[serde(default)]
    pub image_volumes: Vec<String>,
    /// The user of its first process; `None` where the runtime does not report it.
    pub user: Option<ContainerUser>,
    pub resources: ContainerResources,
}

/// A container's limits as the runtime reports them; `None` where it reports none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerResources {
    pub cpu_limit_millis: Option<i64>,
    pub cpu_request_millis: Option<i64>,
    pub memory_limit_bytes: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerUser {
    pub uid: i64,
    pub gid: i64,
    pub supplemental_groups: Vec<i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ContainerState {
    /// Created, not yet started: an interrupted start resumes here.
    Created,
    Running {
        started_at: Timestamp,
    },
    Exited(Exit),
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exit {
    pub code: i32,
    /// `None` when the container never started.
    pub started_at: Option<Timestamp>,
    pub finished_at: Timestamp,
    /// The runtime's reason: `Completed`, `Error`, `OOMKilled`, `StartError`, …
    pub reason: String,
    /// The runtime's message, or the container's termination message.
    pub message: String,
}

impl Exit {
    /// Its start was cancelled because the client went away. The runtime reports this in gRPC's words, or in those of the
    /// command that it killed.
    pub fn was_cut_off(&self) -> bool {
        let is_cancelled = |message: &str| message.contains("context canceled") || message.contains("signal: killed");
        self.started_at.is_none() && is_cancelled(&self.message)
    }
}

/// A relist: every sandbox and container, with only the data of a list call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Listing {
    pub looked_at: Uptime,
    pub pods: BTreeMap<PodUid, ListedPod>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListedPod {
    pub pod: PodRef,
    pub sandboxes: BTreeMap<SandboxId, SandboxState>,
    pub containers: BTreeMap<ContainerId, ListedState>,
}

/// `ContainerState` without the details of an inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ListedState {
    Created,
    Running,
    Exited,
    Unknown,
}

/// The runtime's report about itself (CRI `Status`, `Version` and `RuntimeConfig`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeStatus {
    pub name: String,
    pub version: String,
    /// `None` is ready; otherwise the runtime's reason.
    pub runtime_problem: Option<String>,
    /// `None` is ready; otherwise the reason.
    pub network_problem: Option<String>,
    /// `None` where the runtime does not report it.
    pub cgroup_driver: Option<CgroupDriver>,
    /// Ordered by name.
    pub handlers: Vec<RuntimeHandler>,
    /// Whether `supplementalGroupsPolicy` is supported; `None` when the runtime does not report its features.
    pub supplemental_groups_policy: Option<bool>,
}

/// One runtime handler (a RuntimeClass names it) and its features.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeHandler {
    pub name: String,
    pub recursive_read_only_mounts: bool,
    pub user_namespaces: bool,
}

impl PodFacts {
    pub fn newest_sandbox(&self) -> Option<&SandboxFacts> {
        self.sandboxes.first()
    }

    pub fn ready_sandbox(&self) -> Option<&SandboxFacts> {
        self.sandboxes.iter().find(|sandbox| sandbox.state == SandboxState::Ready)
    }

    /// The newest container of this name, in any state.
    pub fn newest_container(&self, name: &str) -> Option<&ContainerFacts> {
        self.containers.iter().find(|container| container.name == name)
    }

    pub fn running(&self) -> impl Iterator<Item = &ContainerFacts> {
        self.containers.iter().filter(|container| container.is_running())
    }

    /// Some container runs or may run, or some sandbox is ready.
    pub fn is_active(&self) -> bool {
        self.containers.iter().any(ContainerFacts::may_run) || self.ready_sandbox().is_some()
    }
}

impl ContainerFacts {
    pub fn is_running(&self) -> bool {
        matches!(self.state, ContainerState::Running { .. })
    }

    /// Running, or in unknown state.
    pub fn may_run(&self) -> bool {
        match self.state {
            ContainerState::Running { .. } | ContainerState::Unknown => true,
            ContainerState::Created | ContainerState::Exited(_) => false,
        }
    }

    pub fn exit(&self) -> Option<&Exit> {
        match &self.state {
            ContainerState::Exited(exit) => Some(exit),
            ContainerState::Created | ContainerState::Running { .. } | ContainerState::Unknown => None,
        }
    }

    pub fn listed_state(&self) -> ListedState {
        match self.state {
            ContainerState::Created => ListedState::Created,
            ContainerState::Running { .. } => ListedState::Running,
            ContainerState::Exited(_) => ListedState::Exited,
            ContainerState::Unknown => ListedState::Unknown,
        }
    }
}

impl ListedPod {
    /// The same sandboxes and containers in the same states: no inspection is needed.
    pub fn agrees_with(&self, facts: &PodFacts) -> bool {
        self.sandboxes.len() == facts.sandboxes.len()
            && self.containers.len() == facts.containers.len()
            && facts.sandboxes.iter().all(|sandbox| self.sandboxes.get(&sandbox.id) == Some(&sandbox.state))
            && facts
                .containers
                .iter()
                .all(|container| self.containers.get(&container.id) == Some(&container.listed_state()))
    }
}

/// Shared, so that the loop, the snapshot and the effects hold one look without copying it.
pub type SharedFacts = Arc<PodFacts>;
