//! The runtime, the disk and the API server of the model.
//!
//! Owns: what each operation does to them, and the rules that a single operation may break. Never: time, the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time};

use crate::{
    agent::tests::{
        api::with_patch,
        odd_pods::{ended, started},
    },
    effect::{EffectError, EffectId, ErrorKind, Facts, ImageFacts, Reason},
    eviction::usage::NodeUsage,
    id::{ContainerId, PodRef, PodUid, SandboxId},
    image_gc::ImageListing,
    observation::{
        ContainerFacts, ContainerState, Exit, ListedPod, Listing, PodFacts, Remains, RuntimeStatus, SandboxState,
    },
    op::{ApiOp, ContainerOp, ImageOp, NodeOp, Op, PodOp, RunSandbox, StartContainer, VolumeOp},
    test_support::{ago, later, ready_sandbox},
    time::{Now, Uptime},
};

pub(super) const SIDECAR: &str = "s";

pub(super) type Answer = Result<Facts, EffectError>;

/// How far an effect has come.
#[derive(Clone, Debug)]
pub(super) enum Progress {
    Asked,
    /// Of a start: the container is created.
    Created,
    /// It took place; its result is on its way.
    Done(Answer),
}

#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub id: EffectId,
    pub op: Op,
    pub progress: Progress,
    pub is_recalled: bool,
    /// Of a status: it does not reach the API server at once.
    pub is_late: bool,
}

/// What may still happen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// Exits of processes by themselves, at most one per container.
    pub exits: u8,
    /// Failed calls, lost results, lost container events.
    pub faults: u8,
    /// How often a timer fires while an effect is in flight, or a status does not reach the API server at once.
    pub delays: u8,
    pub deaths: u8,
    pub deletions: u8,
}

/// A seeded defect that the exploration must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// It is created, and looks as if it ran.
    SidecarDoesNotRun,
    /// Not even after their deadline.
    LooksGetNoResult,
    StartsFailForEver,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Disk {
    pub volumes: bool,
    pub cgroup: bool,
    pub dir: bool,
    pub logs: bool,
}

impl Disk {
    fn remains(self) -> Remains {
        match self {
            Disk { volumes: true, .. } => Remains::Volumes,
            Disk { cgroup: true, .. } => Remains::Cgroup,
            Disk { dir: true, .. } => Remains::PodDir,
            Disk { logs: true, .. } => Remains::Logs,
            Disk { .. } => Remains::Nothing,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub runtime: PodFacts,
    pub disk: Disk,
    /// The pod in the API server.
    pub api: Option<Arc<Pod>>,
    /// The API server's copy changed, and the agent was not told.
    pub has_news: bool,
    version: u64,
    /// In the order in which they were requested.
    pub effects: Vec<InFlight>,
    pub left: Budget,
    /// Containers that have exited by themselves.
    pub exited: BTreeSet<String>,
    /// How often each attempt of a container was created: every instance has its own ID.
    created: BTreeMap<String, u32>,
    /// The last exit code of each container that ran, or `None` while it runs.
    pub last_exits: BTreeMap<String, Option<i32>>,
    sidecar_ran_in: BTreeSet<SandboxId>,
    /// The seconds of the agent's clock at which it learned of the deletion.
    pub deleted_at: Option<u64>,
    pub broken: Option<String>,
    pub defect: Option<Defect>,
}

impl World {
    pub(super) fn new(pod: Pod, left: Budget, defect: Option<Defect>) -> Self {
        World {
            runtime: PodFacts::default(),
            disk: Disk::default(),
            api: Some(Arc::new(pod)),
            has_news: false,
            version: 1,
            effects: Vec::new(),
            left,
            exited: BTreeSet::new(),
            created: BTreeMap::new(),
            last_exits: BTreeMap::new(),
            sidecar_ran_in: BTreeSet::new(),
            deleted_at: None,
            broken: None,
            defect,
        }
    }

    pub(super) fn is_running(&self, name: &str) -> bool {
        self.runtime.running().any(|container| container.name == name)
    }

    pub(super) fn phase(&self) -> &str {
        let status = self.api.as_ref().and_then(|pod| pod.status.as_ref());
        status.and_then(|status| status.phase.as_deref()).unwrap_or_default()
    }

    pub(super) fn is_deleted(&self) -> bool {
        self.deleted_at.is_some()
    }

    /// Of all containers, as long as the API server has the pod.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        [SIDECAR].into_iter().chain(self.mains())
    }

    pub(super) fn mains(&self) -> impl Iterator<Item = &str> {
        let spec = self.api.iter().filter_map(|pod| pod.spec.as_ref());
        spec.flat_map(|spec| &spec.containers).map(|main| main.name.as_str())
    }

    /// The container is not restarted after an exit with this code.
    pub(super) fn stays_down_after(&self, code: i32) -> bool {
        match self.policy() {
            "Never" => true,
            "OnFailure" => code == 0,
            _ => false,
        }
    }

    /// Where the code decides nothing, one stands for all.
    pub(super) fn exit_codes(&self, name: &str) -> &'static [i32] {
        if name == SIDECAR || self.policy() == "Always" { &[1] } else { &[0, 1] }
    }

    fn policy(&self) -> &str {
        let spec = self.api.as_ref().and_then(|pod| pod.spec.as_ref());
        spec.and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always")
    }

    /// What happened before, as far as a rule may still ask for it.
    pub(super) fn history(&self) -> impl fmt::Debug {
        let sidecar_ran: Vec<_> =
            self.runtime.sandboxes.iter().map(|sandbox| self.sidecar_ran_in.contains(&sandbox.id)).collect();
        let exited = (self.left.exits > 0).then_some(&self.exited);
        let last_exits = (self.policy() != "Always" && !self.is_deleted()).then_some(&self.last_exits);
        (sidecar_ran, exited, last_exits)
    }

    pub(super) fn breaks(&mut self, rule: impl Into<String>) {
        self.broken.get_or_insert(rule.into());
    }

    /// The user deletes the pod.
    pub(super) fn delete(&mut self, at_secs: u64) {
        let pod = Arc::make_mut(self.api.as_mut().expect("only a pod that exists is deleted"));
        pod.metadata.deletion_timestamp = Some(Time(ago(0)));
        pod.metadata.deletion_grace_period_seconds = Some(i64::from(super::GRACE_SECS));
        self.changed();
        self.deleted_at = Some(at_secs);
    }

    fn changed(&mut self) {
        self.version += 1;
        self.has_news = true;
        if let Some(pod) = &mut self.api {
            Arc::make_mut(pod).metadata.resource_version = Some(self.version.to_string());
        }
    }

    pub(super) fn exit(&mut self, name: &str, code: i32) {
        for container in self.runtime.containers.iter_mut().filter(|each| each.name == name && each.is_running()) {
            container.state = ended(code);
        }
        self.last_exits.insert(name.to_owned(), Some(code));
    }

    /// The next step of an effect takes place.
    pub(super) fn take(&mut self, op: &Op, progress: &Progress, now: Now) -> Progress {
        match (op, progress) {
            (Op::Container(ContainerOp::Start(order)), Progress::Asked) => match self.create(order) {
                Ok(()) => Progress::Created,
                Err(error) => Progress::Done(Err(error)),
            },
            (Op::Container(ContainerOp::Start(order)), Progress::Created) => {
                let id = self.id_of(order);
                Progress::Done(self.start(&id).map(|()| Facts::Container { id }))
            }
            (_, Progress::Done(_)) => progress.clone(),
            _ => Progress::Done(self.perform(op, now)),
        }
    }

    /// Everything an effect may have done by the time its client is gone.
    pub(super) fn fates(&self, effect: &InFlight, now: Now) -> Vec<World> {
        if let Progress::Done(_) = effect.progress {
            return vec![self.clone()];
        }
        let mut fates = vec![self.clone()];
        let mut world = self.clone();
        let mut progress = effect.progress.clone();
        while !matches!(progress, Progress::Done(_)) {
            progress = world.take(&effect.op, &progress, now);
            fates.push(world.clone());
        }
        let id = match &effect.op {
            Op::Container(ContainerOp::Start(order)) => Some(self.id_after(order, &effect.progress)),
            Op::Container(ContainerOp::Resume { id, .. }) => Some(id.clone()),
            _ => None,
        };
        if let Some(id) = id {
            fates.extend(world.cut_off(&id, self));
        }
        fates
    }

    fn id_after(&self, order: &StartContainer, progress: &Progress) -> ContainerId {
        let key = attempt_key(order);
        let created = self.created.get(&key).copied().unwrap_or(0);
        let number = if matches!(progress, Progress::Created) { created } else { created + 1 };
        ContainerId::new(format!("{key}.{number}"))
    }

    /// The start of this container was aborted with its client, before its process ran.
    fn cut_off(self, id: &ContainerId, before: &World) -> Option<World> {
        let container = self.runtime.containers.iter().find(|each| each.id == *id && each.is_running())?.clone();
        let mut world = before.clone();
        world.created = self.created;
        world.disk = self.disk;
        world.runtime = self.runtime;
        let exit = Exit {
            code: 128,
            started_at: None,
            finished_at: ago(0),
            reason: "StartError".to_owned(),
            message: "context canceled".to_owned(),
        };
        let cut = world.runtime.containers.iter_mut().find(|each| each.id == container.id)?;
        cut.state = ContainerState::Exited(exit);
        Some(world)
    }

    fn create(&mut self, order: &StartContainer) -> Result<(), EffectError> {
        if !self.is_ready(&order.sandbox) || self.defect == Some(Defect::StartsFailForEver) {
            return Err(failed(ErrorKind::Reject(Reason::CreateContainerError), "sandbox is not ready"));
        }
        let is_taken = |each: &ContainerFacts| each.name == order.container && each.attempt == order.attempt;
        if self.runtime.containers.iter().any(is_taken) {
            return Err(failed(ErrorKind::Reject(Reason::CreateContainerError), "name is reserved"));
        }
        *self.created.entry(attempt_key(order)).or_default() += 1;
        let container = ContainerFacts { id: self.id_of(order), state: ContainerState::Created, ..started(order) };
        self.runtime.containers.push(container);
        self.runtime.containers.sort_by_key(|each| (std::cmp::Reverse(each.attempt), each.name.clone()));
        self.disk.logs = true;
        Ok(())
    }

    fn is_ready(&self, id: &SandboxId) -> bool {
        self.runtime.sandboxes.iter().any(|sandbox| sandbox.id == *id && sandbox.state == SandboxState::Ready)
    }

    /// The ID of the instance that this request has created.
    fn id_of(&self, order: &StartContainer) -> ContainerId {
        self.id_after(order, &Progress::Created)
    }

    fn start(&mut self, id: &ContainerId) -> Result<(), EffectError> {
        let Some(container) = self.runtime.containers.iter().find(|each| each.id == *id).cloned() else {
            return Err(failed(ErrorKind::Reject(Reason::RunContainerError), "container is gone"));
        };
        if container.state != ContainerState::Created {
            return match container.is_running() {
                true => Ok(()),
                false => Err(failed(ErrorKind::Reject(Reason::RunContainerError), "container has exited")),
            };
        }
        if !self.is_ready(&container.sandbox) {
            return Err(failed(ErrorKind::Reject(Reason::RunContainerError), "sandbox is not ready"));
        }
        if container.name == SIDECAR && self.defect == Some(Defect::SidecarDoesNotRun) {
            return Ok(());
        }
        self.check_start(&container.name, &container.sandbox);
        let state = ContainerState::Running { started_at: ago(0) };
        self.runtime.containers.iter_mut().filter(|each| each.id == *id).for_each(|each| each.state = state.clone());
        self.last_exits.insert(container.name, None);
        Ok(())
    }

    /// A process of this container is about to run.
    fn check_start(&mut self, name: &str, sandbox: &SandboxId) {
        if self.is_running(name) {
            self.breaks(format!("two instances of {name} run"));
        }
        if name == SIDECAR {
            self.sidecar_ran_in.insert(sandbox.clone());
            return;
        }
        if !self.sidecar_ran_in.contains(sandbox) {
            self.breaks(format!("{name} runs before the sidecar has started"));
        }
        if let Some(Some(code)) = self.last_exits.get(name).copied()
            && self.stays_down_after(code)
        {
            self.breaks(format!("{name} runs again after its exit with {code}, with policy {}", self.policy()));
        }
    }

    fn perform(&mut self, op: &Op, now: Now) -> Answer {
        match op {
            Op::Node(op) => Ok(self.node_op(op, now.uptime)),
            Op::Pod(op) => self.pod_op(op, now),
            Op::Container(op) => self.container_op(op, now),
            Op::Volume(
                VolumeOp::Resolve { .. }
                | VolumeOp::CheckAttachLimit { .. }
                | VolumeOp::Stage { .. }
                | VolumeOp::Unstage { .. }
                | VolumeOp::Unmount { .. }
                | VolumeOp::Expand { .. },
            ) => Ok(Facts::Nothing),
            Op::Volume(VolumeOp::SetUp { .. } | VolumeOp::Refresh { .. }) => {
                (self.disk.dir, self.disk.volumes) = (true, true);
                Ok(Facts::Nothing)
            }
            Op::Volume(VolumeOp::TearDown(_)) => {
                self.disk.volumes = false;
                Ok(Facts::Remains(self.disk.remains()))
            }
            Op::Image(ImageOp::Delete { .. }) => Ok(Facts::Nothing),
            Op::Image(ImageOp::Inspect { .. } | ImageOp::Pull { .. }) => {
                Ok(Facts::Image(Some(ImageFacts { id: "sha256:1".to_owned(), ..ImageFacts::default() })))
            }
            Op::Log(_) => Ok(Facts::Nothing),
            Op::Api(op) => self.api_op(op),
        }
    }

    fn node_op(&self, op: &NodeOp, looked_at: Uptime) -> Facts {
        let uid = || PodUid::new(super::UID);
        match op {
            NodeOp::CheckRuntime => {
                Facts::Runtime(RuntimeStatus { name: "containerd".to_owned(), ..RuntimeStatus::default() })
            }
            NodeOp::Relist => {
                let PodFacts { sandboxes, containers, .. } = &self.runtime;
                let listed = ListedPod {
                    pod: PodRef { uid: uid(), namespace: "default".into(), name: "web".into() },
                    sandboxes: sandboxes.iter().map(|each| (each.id.clone(), each.state)).collect(),
                    containers: containers.iter().map(|each| (each.id.clone(), each.listed_state())).collect(),
                };
                let is_there = !sandboxes.is_empty() || !containers.is_empty();
                Facts::Listing(Listing { looked_at, pods: is_there.then(|| (uid(), listed)).into_iter().collect() })
            }
            NodeOp::ListPodDirs => Facts::PodDirs {
                uids: self.disk.dir.then(uid).into_iter().collect(),
                log_dirs: self.disk.logs.then(|| format!("default_web_{}", super::UID)).into_iter().collect(),
            },
            NodeOp::ListDevices => Facts::Devices(Vec::new()),
            NodeOp::ListImages(_) => Facts::Images(ImageListing::default()),
            NodeOp::MeasureLogs { .. } => Facts::LogSizes(BTreeMap::new()),
            NodeOp::MeasureNode { .. } => Facts::NodeUsage(NodeUsage::default()),
            NodeOp::FindImageFs => Facts::Nothing,
            NodeOp::MeasurePods { .. } => Facts::PodUsages(BTreeMap::new()),
            NodeOp::SyncQosCgroups { .. } => {
                let name = || format!("pod{}", super::UID);
                Facts::Cgroups { names: self.disk.cgroup.then(name).into_iter().collect() }
            }
        }
    }

    fn pod_op(&mut self, op: &PodOp, now: Now) -> Answer {
        match op {
            PodOp::Inspect { .. } => {
                return Ok(Facts::Pod(self.looked(now.uptime)));
            }
            PodOp::SetUpCgroup { .. } => self.disk.cgroup = true,
            PodOp::MakeDirs { .. } => self.disk.dir = true,
            PodOp::RunSandbox(order) => return self.run_sandbox(order),
            PodOp::StopSandbox { id, .. } => {
                if self.runtime.running().next().is_some() {
                    self.breaks("the sandbox is stopped while a container runs");
                }
                let sandboxes = self.runtime.sandboxes.iter_mut().filter(|each| each.id == *id);
                sandboxes.for_each(|each| each.state = SandboxState::NotReady);
            }
            PodOp::RemoveSandbox { id, .. } => {
                self.runtime.sandboxes.retain(|each| each.id != *id);
                self.runtime.containers.retain(|each| each.sandbox != *id);
            }
            PodOp::RemoveCgroup(_) => self.disk.cgroup = false,
            PodOp::RemoveDir(_) => self.disk.dir = false,
            PodOp::RemoveLogDir(_) => self.disk.logs = false,
        }
        Ok(match op {
            PodOp::RemoveCgroup(_) | PodOp::RemoveDir(_) | PodOp::RemoveLogDir(_) => {
                Facts::Remains(self.disk.remains())
            }
            _ => Facts::Nothing,
        })
    }

    fn looked(&self, looked_at: Uptime) -> PodFacts {
        let mut facts = PodFacts { looked_at, ..self.runtime.clone() };
        if self.defect == Some(Defect::SidecarDoesNotRun) {
            let created = |each: &&mut ContainerFacts| each.name == SIDECAR && each.state == ContainerState::Created;
            for container in facts.containers.iter_mut().filter(created) {
                container.state = ContainerState::Running { started_at: ago(0) };
            }
        }
        facts
    }

    fn run_sandbox(&mut self, order: &RunSandbox) -> Answer {
        if self.runtime.sandboxes.iter().any(|each| each.attempt == order.attempt) {
            return Err(failed(ErrorKind::Retry, "name is reserved"));
        }
        let sandbox = ready_sandbox(order.attempt);
        let id = sandbox.id.clone();
        self.runtime.sandboxes.insert(0, sandbox);
        self.disk.logs = true;
        Ok(Facts::Sandbox { id })
    }

    fn container_op(&mut self, op: &ContainerOp, now: Now) -> Answer {
        match op {
            ContainerOp::Start(order) => self.create(order).and_then(|()| {
                let id = self.id_of(order);
                self.start(&id).map(|()| Facts::Container { id })
            }),
            ContainerOp::Resume { id, .. } => self.start(id).map(|()| Facts::Container { id: id.clone() }),
            ContainerOp::Stop { id, name, .. } => {
                self.check_stop(name, now);
                if self.runtime.running().any(|each| each.id == *id) {
                    self.exit(name, 137);
                }
                Ok(Facts::Nothing)
            }
            ContainerOp::Remove { id, .. } => {
                if self.runtime.running().any(|each| each.id == *id) {
                    self.breaks("a running container is removed");
                }
                self.runtime.containers.retain(|each| each.id != *id);
                Ok(Facts::Nothing)
            }
            ContainerOp::Probe(_) | ContainerOp::RunHook(_) => unreachable!("the pod has no probes and no hooks"),
        }
    }

    /// The sidecar is stopped after the others, unless the grace period is over.
    fn check_stop(&mut self, name: &str, now: Now) {
        let is_late = self.deleted_at.is_some_and(|deleted| {
            now.uptime.since(later(0).uptime).as_secs() >= deleted + u64::from(super::GRACE_SECS)
        });
        let main = self.runtime.running().map(|each| each.name.clone()).find(|name| name != SIDECAR);
        if name == SIDECAR
            && !is_late
            && let Some(main) = main
        {
            self.breaks(format!("the sidecar is stopped while {main} runs"));
        }
    }

    fn api_op(&mut self, op: &ApiOp) -> Answer {
        let gone = || failed(ErrorKind::Gone, "pods \"web\" not found");
        match op {
            ApiOp::PatchStatus { patch, .. } => {
                let stored = self.api.clone().ok_or_else(gone)?;
                let patched = with_patch(&stored, &patch["status"], self.version + 1);
                self.check_counts(&stored, &patched);
                self.api = Some(Arc::new(patched));
                self.changed();
                Ok(Facts::ApiPod(self.api.clone().ok_or_else(gone)?))
            }
            ApiOp::DeletePod { .. } => {
                let Disk { volumes, cgroup, .. } = self.disk;
                if !self.is_deleted() || self.runtime.is_active() || volumes || cgroup {
                    self.breaks("the pod is deleted in the API while it holds something");
                }
                self.api.take().ok_or_else(gone)?;
                self.changed();
                Ok(Facts::Nothing)
            }
            ApiOp::GetNode | ApiOp::CreateMirrorPod { .. } | ApiOp::DeleteMirrorPod { .. } => {
                unreachable!("the pod needs no labels and is not static: {op:?}")
            }
        }
    }

    fn check_counts(&mut self, before: &Pod, after: &Pod) {
        let counts = |pod: &Pod| -> BTreeMap<String, i32> {
            let status = pod.status.iter();
            let all = status.flat_map(|status| [&status.init_container_statuses, &status.container_statuses]);
            all.flatten().flatten().map(|each| (each.name.clone(), each.restart_count)).collect()
        };
        let after = counts(after);
        for (name, count) in counts(before) {
            if after.get(&name).is_none_or(|next| *next < count) {
                self.breaks(format!("restartCount of {name} falls from {count}"));
            }
        }
    }
}

fn attempt_key(order: &StartContainer) -> String {
    format!("{}{}", order.container, order.attempt)
}

pub(super) fn failed(kind: ErrorKind, message: &str) -> EffectError {
    EffectError { kind, message: message.to_owned() }
}
