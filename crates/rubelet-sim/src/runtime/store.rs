//! The state of the fake runtime: sandboxes, containers, images, and subscribers of its events.
//!
//! Owns: the data, and how CRI shows it. Never: changes it on its own (`act.rs` does).

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use rubelet_core::{event::Source, manifest::SOURCE_ANNOTATION};
use rubelet_cri::v1;
use tokio::sync::mpsc;

use crate::{
    faults::CallOutcome,
    runtime::output::Outputs,
    script::{IMAGE, Program},
};

/// The event buffer of a slow subscriber before it loses events; in the order of containerd's.
const EVENT_QUEUE: usize = 1000;

/// Where images are.
pub(crate) const IMAGE_FS: &str = "/images";
pub(crate) const IMAGE_BYTES: u64 = 1 << 20;
/// Room for five images.
pub(crate) const IMAGE_FS_BYTES: u64 = 5 * IMAGE_BYTES;
/// The node reclaims images, and then evicts pods, when less is available.
pub(crate) const IMAGE_FS_THRESHOLD_BYTES: u64 = IMAGE_BYTES;

/// The maximum age of a stale list.
const MEMORY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Store {
    pub picture: Picture,
    /// Earlier states with the time until which each was current, oldest first.
    past: VecDeque<(Duration, Picture)>,
    /// Names of sandboxes and containers being created.
    pub reserved: BTreeSet<String>,
    pub images: BTreeSet<String>,
    /// What others than images use of their file system.
    pub image_fs_others: u64,
    pub registry: BTreeMap<String, Pull>,
    pub has_events: bool,
    /// Containers that cannot be removed before the task is deleted that a cancelled start left behind.
    pub leftover_tasks: BTreeSet<String>,
    pub outputs: Outputs,
    /// It is containerd: it has a call that deletes tasks.
    pub is_containerd: bool,
    pub listeners: Vec<mpsc::Sender<v1::ContainerEventResponse>>,
    pub down: bool,
    /// Increases when the runtime goes down: earlier calls fail.
    pub epoch: u32,
    pub network_ready: bool,
    pub ailments: BTreeSet<Ailment>,
    /// The outcome of every changing call for a pod of this name, until the calm.
    pub bad_pods: BTreeMap<String, CallOutcome>,
    pub ids_given: u32,
    /// Changing calls under way: the method and what it is about.
    pub calls: BTreeMap<u64, (&'static str, String)>,
    calls_begun: u64,
}

/// Sandboxes and containers at one moment; cheap to keep.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picture {
    pub sandboxes: BTreeMap<String, Arc<Sandbox>>,
    pub containers: BTreeMap<String, Arc<Container>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    pub id: String,
    pub name: String,
    pub config: Arc<v1::PodSandboxConfig>,
    pub ready: bool,
    pub created_at: Timestamp,
    pub ip: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Container {
    pub id: String,
    pub name: String,
    pub sandbox: String,
    pub pod: PodIdentity,
    pub config: Arc<v1::ContainerConfig>,
    pub log_path: PathBuf,
    pub image: String,
    pub program: Program,
    pub created_at: Timestamp,
    pub state: State,
    /// When the first SIGTERM arrived.
    pub term_at: Option<Duration>,
    /// When its preStop hook began.
    pub pre_stop_at: Option<Duration>,
    /// Its process hangs in the kernel and cannot be killed.
    pub stuck: Option<Stuck>,
}

/// A process that ends only when the kernel releases it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stuck {
    /// How it ends then: killed, or by itself.
    pub exit: Option<(i32, &'static str)>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodIdentity {
    pub uid: String,
    pub namespace: String,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Created,
    Running {
        started_at: Timestamp,
    },
    Exited {
        started_at: Option<Timestamp>,
        finished_at: Timestamp,
        code: i32,
        reason: &'static str,
        message: &'static str,
    },
    /// The runtime lost track of it.
    Unknown {
        started_at: Timestamp,
    },
}

/// Temporary conditions of a running runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ailment {
    /// It reports itself as not ready.
    NotReady,
    /// Lists of everything fail; all other calls work.
    ListsFail,
    /// Status takes as long as a deadline allows, or longer.
    StatusLate,
}

/// What the registry does with a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pull {
    After(Duration),
    Stuck,
}

impl Default for Store {
    fn default() -> Self {
        Store {
            picture: Picture::default(),
            past: VecDeque::new(),
            reserved: BTreeSet::new(),
            images: BTreeSet::from([IMAGE.to_owned()]),
            image_fs_others: 0,
            registry: BTreeMap::new(),
            has_events: true,
            leftover_tasks: BTreeSet::new(),
            outputs: Outputs::new(),
            is_containerd: true,
            listeners: Vec::new(),
            down: false,
            epoch: 0,
            network_ready: true,
            ailments: BTreeSet::new(),
            bad_pods: BTreeMap::new(),
            ids_given: 0,
            calls: BTreeMap::new(),
            calls_begun: 0,
        }
    }
}

impl Store {
    pub(crate) fn new_id(&mut self, kind: char) -> String {
        self.ids_given += 1;
        format!("{kind}{:05}", self.ids_given)
    }

    pub(crate) fn enter_call(&mut self, method: &'static str, subject: String) -> u64 {
        self.calls_begun += 1;
        self.calls.insert(self.calls_begun, (method, subject));
        self.calls_begun
    }

    pub(crate) fn name_is_taken(&self, name: &str) -> bool {
        self.reserved.contains(name)
            || self.picture.sandboxes.values().any(|sandbox| sandbox.name == name)
            || self.picture.containers.values().any(|container| container.name == name)
    }

    /// Keeps the current state for stale lists. Called before each change.
    pub(crate) fn remember(&mut self, now: Duration) {
        self.past.push_back((now, self.picture.clone()));
        while self.past.front().is_some_and(|(until, _)| *until + MEMORY < now) {
            self.past.pop_front();
        }
    }

    /// The state at this time, as far as it is kept.
    pub(crate) fn picture_at(&self, at: Duration) -> &Picture {
        self.past.iter().find(|(until, _)| *until > at).map_or(&self.picture, |(_, picture)| picture)
    }

    pub(crate) fn listen(&mut self) -> mpsc::Receiver<v1::ContainerEventResponse> {
        let (sender, receiver) = mpsc::channel(EVENT_QUEUE);
        self.listeners.push(sender);
        receiver
    }

    pub(crate) fn deliver(&mut self, event: &v1::ContainerEventResponse) {
        self.listeners.retain(|listener| !listener.is_closed());
        for listener in &self.listeners {
            // A subscriber that is far behind loses it, as with the real one.
            drop(listener.try_send(event.clone()));
        }
    }

    pub(crate) fn image_fs_available(&self) -> u64 {
        let used = self.images.len() as u64 * IMAGE_BYTES + self.image_fs_others;
        IMAGE_FS_BYTES.saturating_sub(used)
    }

    /// By its name or by the id of `image_status`.
    pub(crate) fn find_image(&self, reference: &str) -> Option<&String> {
        self.images.iter().find(|image| *image == reference || image_id(image) == reference)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Arc<Container>> {
        self.picture.containers.values().filter(|container| container.is_running())
    }
}

impl Picture {
    pub(crate) fn list_sandboxes(&self, filter: Option<&v1::PodSandboxFilter>) -> Vec<v1::PodSandbox> {
        let wanted = |sandbox: &&Arc<Sandbox>| {
            filter.is_none_or(|filter| {
                (filter.id.is_empty() || filter.id == sandbox.id)
                    && filter.state.is_none_or(|wanted| wanted.state == sandbox.cri_state())
                    && selects(&filter.label_selector, &sandbox.config.labels)
            })
        };
        self.sandboxes.values().filter(wanted).map(|sandbox| sandbox.listed()).collect()
    }

    pub(crate) fn list_containers(&self, filter: Option<&v1::ContainerFilter>) -> Vec<v1::Container> {
        let wanted = |container: &&Arc<Container>| {
            filter.is_none_or(|filter| {
                (filter.id.is_empty() || filter.id == container.id)
                    && (filter.pod_sandbox_id.is_empty() || filter.pod_sandbox_id == container.sandbox)
                    && filter.state.is_none_or(|wanted| wanted.state == container.cri_state())
                    && selects(&filter.label_selector, &container.config.labels)
            })
        };
        self.containers.values().filter(wanted).map(|container| container.listed()).collect()
    }

    pub(crate) fn containers_of(&self, sandbox: &str) -> Vec<Arc<Container>> {
        self.containers.values().filter(|container| container.sandbox == sandbox).cloned().collect()
    }
}

impl Sandbox {
    pub(crate) fn identity(&self) -> PodIdentity {
        let metadata = self.config.metadata.clone().unwrap_or_default();
        PodIdentity { uid: metadata.uid, namespace: metadata.namespace, name: metadata.name }
    }

    pub(crate) fn attempt(&self) -> u32 {
        self.config.metadata.as_ref().map_or(0, |metadata| metadata.attempt)
    }

    /// Whether its pod came from the API server, by the agent's annotation.
    pub(crate) fn is_of_the_api(&self) -> bool {
        self.config.annotations.get(SOURCE_ANNOTATION).is_some_and(|source| source == Source::Api.as_str())
    }

    pub(crate) fn status(&self) -> v1::PodSandboxStatus {
        let options = self.config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = options.and_then(|security| security.namespace_options.clone());
        let on_host = options.as_ref().is_some_and(|options| options.network == v1::NamespaceMode::Node as i32);
        v1::PodSandboxStatus {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.cri_state(),
            created_at: nanoseconds(self.created_at),
            // containerd reports no address for the host network, nor for a sandbox that is down.
            network: (!on_host && self.ready)
                .then(|| v1::PodSandboxNetworkStatus { ip: self.ip.clone(), additional_ips: Vec::new() }),
            linux: Some(v1::LinuxPodSandboxStatus { namespaces: Some(v1::Namespace { options }) }),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            ..Default::default()
        }
    }

    fn listed(&self) -> v1::PodSandbox {
        v1::PodSandbox {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.cri_state(),
            created_at: nanoseconds(self.created_at),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            ..Default::default()
        }
    }

    fn cri_state(&self) -> i32 {
        let state = if self.ready { v1::PodSandboxState::SandboxReady } else { v1::PodSandboxState::SandboxNotready };
        state as i32
    }
}

impl Container {
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running { .. })
    }

    /// The container's name in its pod.
    pub(crate) fn name_in_pod(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |metadata| &metadata.name)
    }

    pub(crate) fn attempt(&self) -> u32 {
        self.config.metadata.as_ref().map_or(0, |metadata| metadata.attempt)
    }

    pub(crate) fn status(&self) -> v1::ContainerStatus {
        let mut status = v1::ContainerStatus {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.cri_state(),
            created_at: nanoseconds(self.created_at),
            image: Some(v1::ImageSpec { image: self.image.clone(), ..Default::default() }),
            image_ref: image_id(&self.image),
            image_id: image_id(&self.image),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            mounts: self.config.mounts.clone(),
            log_path: self.log_path.to_string_lossy().into_owned(),
            resources: self
                .config
                .linux
                .as_ref()
                .map(|linux| v1::ContainerResources { linux: linux.resources.clone() }),
            ..Default::default()
        };
        match &self.state {
            State::Created => {}
            State::Running { started_at } | State::Unknown { started_at } => {
                status.started_at = nanoseconds(*started_at)
            }
            State::Exited { started_at, finished_at, code, reason, message } => {
                status.started_at = started_at.map_or(0, nanoseconds);
                status.finished_at = nanoseconds(*finished_at);
                status.exit_code = *code;
                status.reason = (*reason).to_owned();
                status.message = (*message).to_owned();
            }
        }
        status
    }

    fn listed(&self) -> v1::Container {
        v1::Container {
            id: self.id.clone(),
            pod_sandbox_id: self.sandbox.clone(),
            metadata: self.config.metadata.clone(),
            image: self.config.image.clone(),
            image_ref: image_id(&self.image),
            image_id: image_id(&self.image),
            state: self.cri_state(),
            created_at: nanoseconds(self.created_at),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
        }
    }

    fn cri_state(&self) -> i32 {
        let state = match self.state {
            State::Created => v1::ContainerState::ContainerCreated,
            State::Running { .. } => v1::ContainerState::ContainerRunning,
            State::Exited { .. } => v1::ContainerState::ContainerExited,
            State::Unknown { .. } => v1::ContainerState::ContainerUnknown,
        };
        state as i32
    }
}

impl std::fmt::Display for Container {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}#{} ({})", self.pod.name, self.name_in_pod(), self.attempt(), self.id)
    }
}

pub(crate) fn image_id(image: &str) -> String {
    format!("sha256:{image}")
}

pub(crate) fn nanoseconds(at: Timestamp) -> i64 {
    i64::try_from(at.as_nanosecond()).unwrap_or(i64::MAX)
}

fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}
