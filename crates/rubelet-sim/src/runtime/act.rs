//! The actions of the fake runtime, with containerd's semantics.
//!
//! Owns: every change of a sandbox, a container or an image; each happens completely or not at all.
//! Names are reserved while their object exists, so a second create of the same attempt fails. Removing a running object kills
//! it first; stopping or removing a missing one is no error.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rubelet_cri::{
    port::{RpcError, RpcErrorKind, RpcResult},
    v1,
};

use crate::{
    faults::EventDelivery,
    runtime::store::{Container, Picture, PodIdentity, Pull, Sandbox, State},
    script::Program,
    simulation::{ScheduledEvent, SimState},
};

/// How soon a well-behaved program ends after SIGTERM.
const PROMPT_MS: std::ops::Range<u64> = 5..120;

#[derive(Clone, Debug)]
pub(crate) enum Act {
    RunSandbox(Arc<v1::PodSandboxConfig>),
    /// RunPodSandbox that fails after the sandbox was created, and cannot remove it.
    LeaveSandbox(Arc<v1::PodSandboxConfig>),
    StopSandbox(String),
    RemoveSandbox(String),
    Create {
        sandbox: String,
        config: Arc<v1::ContainerConfig>,
    },
    Start(String),
    Term(String),
    /// SIGKILL at the end of a stop's timeout.
    Kill(String),
    RemoveContainer(String),
    DeleteTask(String),
    ReopenLog(String),
    Pull(String),
    RemoveImage(String),
}

/// The sender of a SIGKILL, for the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KilledBy {
    StopContainer,
    StopSandbox,
    RemoveContainer,
}

impl Act {
    pub(crate) fn method(&self) -> &'static str {
        match self {
            Act::RunSandbox(_) | Act::LeaveSandbox(_) => "RunPodSandbox",
            Act::StopSandbox(_) => "StopPodSandbox",
            Act::RemoveSandbox(_) => "RemovePodSandbox",
            Act::Create { .. } => "CreateContainer",
            Act::Start(_) => "StartContainer",
            Act::Term(_) | Act::Kill(_) => "StopContainer",
            Act::RemoveContainer(_) => "RemoveContainer",
            Act::DeleteTask(_) => "DeleteTask",
            Act::ReopenLog(_) => "ReopenContainerLog",
            Act::Pull(_) => "PullImage",
            Act::RemoveImage(_) => "RemoveImage",
        }
    }

    /// The name that must be free, and is reserved during the call.
    pub(crate) fn reserves(&self, sim: &SimState) -> Option<String> {
        match self {
            Act::RunSandbox(config) | Act::LeaveSandbox(config) => Some(sandbox_name(config)),
            Act::Create { sandbox, config } => {
                let sandbox = sim.runtime.picture.sandboxes.get(sandbox)?;
                Some(container_name(sandbox, config))
            }
            Act::StopSandbox(_)
            | Act::RemoveSandbox(_)
            | Act::Start(_)
            | Act::Term(_)
            | Act::Kill(_)
            | Act::RemoveContainer(_)
            | Act::DeleteTask(_)
            | Act::ReopenLog(_)
            | Act::Pull(_)
            | Act::RemoveImage(_) => None,
        }
    }

    /// The pod of the call; an image has none.
    pub(crate) fn pod(&self, picture: &Picture) -> Option<PodIdentity> {
        let of_sandbox = |id: &String| picture.sandboxes.get(id).map(|sandbox| sandbox.identity());
        match self {
            Act::RunSandbox(config) | Act::LeaveSandbox(config) => {
                let metadata = config.metadata.clone().unwrap_or_default();
                Some(PodIdentity { uid: metadata.uid, namespace: metadata.namespace, name: metadata.name })
            }
            Act::StopSandbox(id) | Act::RemoveSandbox(id) | Act::Create { sandbox: id, .. } => of_sandbox(id),
            Act::Start(id)
            | Act::Term(id)
            | Act::Kill(id)
            | Act::RemoveContainer(id)
            | Act::DeleteTask(id)
            | Act::ReopenLog(id) => picture.containers.get(id).map(|container| container.pod.clone()),
            Act::Pull(_) | Act::RemoveImage(_) => None,
        }
    }

    pub(crate) fn error(&self, kind: RpcErrorKind, message: impl Into<String>) -> RpcError {
        RpcError::new(self.method(), kind, message)
    }

    /// Its name in a trace line.
    pub(crate) fn subject(&self, sim: &SimState) -> String {
        let container = |id: &String| {
            sim.runtime.picture.containers.get(id).map_or_else(|| id.clone(), |container| container.to_string())
        };
        let sandbox = |id: &String| match sim.runtime.picture.sandboxes.get(id) {
            Some(sandbox) => format!("{} ({id})", sandbox.identity().name),
            None => id.clone(),
        };
        match self {
            Act::RunSandbox(config) | Act::LeaveSandbox(config) => sandbox_name(config),
            Act::StopSandbox(id) | Act::RemoveSandbox(id) => sandbox(id),
            Act::Create { sandbox: id, config } => {
                let metadata = config.metadata.clone().unwrap_or_default();
                format!("{} {}#{}", sandbox(id), metadata.name, metadata.attempt)
            }
            Act::Start(id)
            | Act::Term(id)
            | Act::Kill(id)
            | Act::RemoveContainer(id)
            | Act::DeleteTask(id)
            | Act::ReopenLog(id) => container(id),
            Act::Pull(image) | Act::RemoveImage(image) => image.clone(),
        }
    }
}

impl SimState {
    /// Executes it. Returns the id of the new object, or nothing.
    pub(crate) fn perform(&mut self, act: &Act) -> RpcResult<String> {
        self.runtime.remember(self.now);
        let subject = act.subject(self);
        let answer = match act {
            Act::RunSandbox(config) => Ok(self.run_sandbox(config.clone())),
            Act::LeaveSandbox(config) => self.leave_sandbox(act, config.clone()),
            Act::StopSandbox(id) => self.stop_sandbox(id),
            Act::RemoveSandbox(id) => self.remove_sandbox(act, id),
            Act::Create { sandbox, config } => self.create(act, sandbox, config.clone()),
            Act::Start(id) => self.start(act, id),
            Act::Term(id) => self.terminate(id),
            Act::Kill(id) => self.kill(id, KilledBy::StopContainer),
            Act::RemoveContainer(id) => self.remove_container(act, id),
            Act::DeleteTask(id) => self.delete_task(act, id),
            Act::ReopenLog(id) => self.reopen_log(act, id),
            Act::Pull(image) => self.pull(act, image),
            Act::RemoveImage(id) => Ok(self.remove_image(id)),
        };
        let outcome = match &answer {
            Ok(id) if id.is_empty() => "ok".to_owned(),
            Ok(id) => id.clone(),
            Err(error) => error.description(),
        };
        let verb = if matches!(act, Act::Kill(_)) { "SIGKILL" } else { act.method() };
        self.log("cri", format!("{verb} {subject} -> {outcome}"));
        answer
    }

    /// A process ends by itself, or by the play. A container that does not run is unchanged.
    pub(crate) fn exit_container(&mut self, id: &str, code: i32, reason: &'static str) {
        self.runtime.remember(self.now);
        let wall = self.wall;
        let Some(container) = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut) else { return };
        let State::Running { started_at } = container.state else { return };
        if let Some(stuck) = &mut container.stuck {
            stuck.exit.get_or_insert((code, reason));
            return;
        }
        container.state = State::Exited { started_at: Some(started_at), finished_at: wall, code, reason, message: "" };
        let container = container.clone();
        self.log("world", format!("{container} exits {code} {reason}"));
        self.rules.exited(self.now, &container, code);
        self.announce(&container, v1::ContainerEventType::ContainerStoppedEvent);
    }

    fn run_sandbox(&mut self, config: Arc<v1::PodSandboxConfig>) -> String {
        let id = self.runtime.new_id('s');
        let ip = format!("10.88.{}.{}", self.runtime.ids_given / 250, self.runtime.ids_given % 250 + 2);
        let name = sandbox_name(&config);
        let sandbox = Sandbox { id: id.clone(), name, config, ready: true, created_at: self.wall, ip };
        self.rules.sandbox_made(self.now, &sandbox);
        // As runc does, whether or not the pod's cgroup exists.
        let parent = sandbox.config.linux.as_ref().map(|linux| PathBuf::from(&linux.cgroup_parent)).unwrap_or_default();
        self.cgroups.extend(parent.ancestors().map(Path::to_path_buf));
        self.runtime.picture.sandboxes.insert(id.clone(), Arc::new(sandbox));
        id
    }

    fn leave_sandbox(&mut self, act: &Act, config: Arc<v1::PodSandboxConfig>) -> RpcResult<String> {
        let id = self.run_sandbox(config);
        if let Some(sandbox) = self.runtime.picture.sandboxes.get_mut(&id).map(Arc::make_mut) {
            sandbox.ready = false;
        }
        Err(act.error(RpcErrorKind::Other, format!("failed to setup network for sandbox {id:?}: injected")))
    }

    fn stop_sandbox(&mut self, id: &str) -> RpcResult<String> {
        for container in self.runtime.picture.containers_of(id) {
            self.kill(&container.id, KilledBy::StopSandbox)?;
        }
        if let Some(sandbox) = self.runtime.picture.sandboxes.get_mut(id).map(Arc::make_mut) {
            sandbox.ready = false;
        }
        Ok(String::new())
    }

    fn remove_sandbox(&mut self, act: &Act, id: &str) -> RpcResult<String> {
        self.stop_sandbox(id)?;
        for container in self.runtime.picture.containers_of(id) {
            self.remove_container(act, &container.id)?;
        }
        self.runtime.picture.sandboxes.remove(id);
        Ok(String::new())
    }

    fn create(&mut self, act: &Act, sandbox: &str, config: Arc<v1::ContainerConfig>) -> RpcResult<String> {
        let Some(sandbox) = self.runtime.picture.sandboxes.get(sandbox).cloned() else {
            return Err(act.error(RpcErrorKind::NotFound, format!("failed to find sandbox id {sandbox:?}: not found")));
        };
        if !sandbox.ready {
            let message = format!("sandbox container {:?} is not running", sandbox.id);
            return Err(act.error(RpcErrorKind::Other, message));
        }
        let wanted = config.image.clone().unwrap_or_default().image;
        let Some(image) = self.runtime.find_image(&wanted).cloned() else {
            let message = format!("failed to resolve image {wanted:?}: not found");
            return Err(act.error(RpcErrorKind::NotFound, message));
        };
        let words = config.command.iter().chain(&config.args).skip(1).cloned().collect::<Vec<_>>().join(" ");
        let id = self.runtime.new_id('c');
        let container = Container {
            id: id.clone(),
            name: container_name(&sandbox, &config),
            sandbox: sandbox.id.clone(),
            pod: sandbox.identity(),
            image,
            // An unknown command is a missing executable.
            program: words.parse().unwrap_or(Program::Missing),
            log_path: Path::new(&sandbox.config.log_directory).join(&config.log_path),
            config,
            created_at: self.wall,
            state: State::Created,
            term_at: None,
            pre_stop_at: None,
            stuck: None,
        };
        self.announce(&container, v1::ContainerEventType::ContainerCreatedEvent);
        self.runtime.picture.containers.insert(id.clone(), Arc::new(container));
        Ok(id)
    }

    /// The client of the start disconnected before it was done.
    pub(super) fn cancel_start(&mut self, id: &str) {
        let messages = [
            "failed to create containerd task: context canceled",
            "failed to create containerd task: failed to start shim: start failed: : signal: killed: unknown",
        ];
        let message = messages[self.rng.usize(..messages.len())];
        let container = self.runtime.picture.containers.get(id).filter(|container| container.state == State::Created);
        if let Some(container) = container.cloned() {
            self.fail_start(&container, message);
            if self.rng.u8(..4) == 0 {
                self.runtime.leftover_tasks.insert(id.to_owned());
            }
        }
    }

    fn delete_task(&mut self, act: &Act, id: &str) -> RpcResult<String> {
        if !self.runtime.is_containerd {
            return Err(act.error(RpcErrorKind::Unimplemented, "unknown service containerd.services.tasks.v1.Tasks"));
        }
        self.runtime.leftover_tasks.remove(id);
        Ok(String::new())
    }

    /// Its process never ran.
    fn fail_start(&mut self, container: &Container, message: &'static str) {
        let finished_at = self.wall;
        let state = State::Exited { started_at: None, finished_at, code: 128, reason: "StartError", message };
        let failed = Container { state, ..container.clone() };
        self.log("world", format!("{failed}: {message}"));
        self.rules.started(self.now, &failed, &self.runtime.picture);
        self.rules.exited(self.now, &failed, 128);
        self.announce(&failed, v1::ContainerEventType::ContainerStoppedEvent);
        self.runtime.picture.containers.insert(failed.id.clone(), Arc::new(failed));
    }

    fn start(&mut self, act: &Act, id: &str) -> RpcResult<String> {
        let wall = self.wall;
        let Some(container) = self.runtime.picture.containers.get(id).cloned() else {
            let message = format!("an error occurred when try to find container {id:?}: not found");
            return Err(act.error(RpcErrorKind::NotFound, message));
        };
        if container.state != State::Created {
            return Err(act.error(RpcErrorKind::Other, format!("container {id:?} is not in CREATED state")));
        }
        let sandbox = self.runtime.picture.sandboxes.get(&container.sandbox).cloned();
        let Some(sandbox) = sandbox.filter(|sandbox| sandbox.ready) else {
            let message = format!("sandbox container {:?} is not running", container.sandbox);
            return Err(act.error(RpcErrorKind::Other, message));
        };
        self.write_log(&sandbox, &container);
        if container.program == Program::Missing {
            let message = "failed to create containerd task: exec: \"sim\": executable file not found in $PATH";
            self.fail_start(&container, message);
            return Err(act.error(RpcErrorKind::Other, message));
        }
        let changed = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut);
        let changed = changed.expect("the container was found above");
        changed.state = State::Running { started_at: wall };
        let container = changed.clone();
        self.check_csi_mounts(&container);
        self.rules.started(self.now, &container, &self.runtime.picture);
        self.announce(&container, v1::ContainerEventType::ContainerStartedEvent);
        self.begin_program(&container);
        Ok(String::new())
    }

    fn begin_program(&mut self, container: &Container) {
        let (after, code, reason) = match container.program {
            Program::Exit { code, after } => (after, code, if code == 0 { "Completed" } else { "Error" }),
            Program::Flaky { times } if container.attempt() < times => (Duration::from_secs(1), 1, "Error"),
            Program::Oom { after } => (after, 137, "OOMKilled"),
            Program::Flaky { .. } | Program::Run | Program::Slow { .. } | Program::Stubborn | Program::Missing => {
                return;
            }
        };
        let jitter = Duration::from_millis(self.rng.u64(1..50));
        self.schedule_in(after + jitter, ScheduledEvent::Exit { container: container.id.clone(), code, reason });
    }

    fn terminate(&mut self, id: &str) -> RpcResult<String> {
        let now = self.now;
        self.resolve_unknown(id);
        let Some(container) = self.runtime.picture.containers.get_mut(id).map(Arc::make_mut) else {
            return Ok(String::new());
        };
        if !container.is_running() || container.term_at.is_some() {
            return Ok(String::new());
        }
        container.term_at = Some(now);
        let container = container.clone();
        let wait = match container.program {
            Program::Stubborn => return Ok(String::new()),
            Program::Slow { stop } => stop,
            Program::Run | Program::Exit { .. } | Program::Flaky { .. } | Program::Oom { .. } | Program::Missing => {
                Duration::from_millis(self.rng.u64(PROMPT_MS))
            }
        };
        self.schedule_in(wait, ScheduledEvent::Exit { container: container.id, code: 0, reason: "Completed" });
        Ok(String::new())
    }

    fn kill(&mut self, id: &str, by: KilledBy) -> RpcResult<String> {
        let Some(container) = self.runtime.picture.containers.get(id).cloned() else { return Ok(String::new()) };
        if container.is_running() {
            self.rules.killed(self.now, &container, by);
            self.exit_container(id, 137, "Error");
        }
        self.resolve_unknown(id);
        match self.runtime.picture.containers.get(id) {
            // The process cannot be killed, so the runtime waits.
            Some(container) if container.is_running() => Err(never_ends(&container.id)),
            _ => Ok(String::new()),
        }
    }

    fn remove_container(&mut self, act: &Act, id: &str) -> RpcResult<String> {
        if self.runtime.leftover_tasks.contains(id) {
            let message = format!("failed to delete containerd container {id:?}: cannot delete running task {id}");
            return Err(act.error(RpcErrorKind::FailedPrecondition, message));
        }
        self.kill(id, KilledBy::RemoveContainer)?;
        if let Some(container) = self.runtime.picture.containers.remove(id) {
            self.announce(&container, v1::ContainerEventType::ContainerDeletedEvent);
        }
        Ok(String::new())
    }

    fn pull(&mut self, act: &Act, image: &str) -> RpcResult<String> {
        if !self.runtime.registry.contains_key(image) {
            let message = format!(
                "failed to pull and unpack image {image:?}: failed to resolve reference {image:?}: {image}: not found"
            );
            return Err(act.error(RpcErrorKind::NotFound, message));
        }
        self.runtime.images.insert(image.to_owned());
        Ok(super::store::image_id(image))
    }

    fn remove_image(&mut self, id: &str) -> String {
        let named = self.runtime.images.iter().find(|name| super::store::image_id(name) == id).cloned();
        if let Some(name) = named {
            self.rules.image_removed(self.now, &name, &self.runtime.picture);
            self.runtime.images.remove(&name);
        }
        String::new()
    }

    /// How long the registry takes; `None` is for ever.
    pub(crate) fn pull_takes(&self, image: &str) -> Option<Duration> {
        match self.runtime.registry.get(image) {
            Some(Pull::After(time)) => Some(*time),
            Some(Pull::Stuck) => None,
            None => Some(Duration::from_millis(200)),
        }
    }

    /// containerd creates the log file and its directories.
    fn write_log(&mut self, sandbox: &Sandbox, container: &Container) {
        if container.config.log_path.is_empty() || sandbox.config.log_directory.is_empty() {
            return;
        }
        let path = &container.log_path;
        let written = path
            .parent()
            .map_or(Ok(()), |dir| self.disk.make_dir(dir, 0o755))
            .and_then(|()| self.disk.write_file(path, b"", 0o640));
        match written {
            Ok(()) => self.open_log(&container.id, path),
            Err(error) => self.log("world", format!("no log for {container}: {error}")),
        }
    }

    fn reopen_log(&mut self, act: &Act, id: &str) -> RpcResult<String> {
        let container = self.runtime.picture.containers.get(id).filter(|container| container.is_running()).cloned();
        let Some(container) = container else {
            return Err(act.error(RpcErrorKind::Other, format!("container {id:?} is not running")));
        };
        self.print_lines();
        let exists = matches!(self.disk.node(&container.log_path), Ok(Some(_)));
        let made = if exists { Ok(()) } else { self.disk.write_file(&container.log_path, b"", 0o640) };
        made.map_err(|error| act.error(RpcErrorKind::Other, format!("failed to open log: {error}")))?;
        self.open_log(id, &container.log_path);
        self.check_log(&container.log_path);
        Ok(String::new())
    }

    fn announce(&mut self, container: &Container, kind: v1::ContainerEventType) {
        let sandbox = self.runtime.picture.sandboxes.get(&container.sandbox);
        let event = v1::ContainerEventResponse {
            container_id: container.id.clone(),
            container_event_type: kind as i32,
            created_at: super::store::nanoseconds(self.wall),
            pod_sandbox_status: sandbox.map(|sandbox| sandbox.status()),
            containers_statuses: Vec::new(),
        };
        match self.delivery(&container.pod.uid) {
            EventDelivery::Once => self.runtime.deliver(&event),
            EventDelivery::Twice => {
                self.runtime.deliver(&event);
                self.runtime.deliver(&event);
            }
            EventDelivery::Lost => self.log("world", format!("an event about {container} is lost")),
            EventDelivery::Late(wait) => self.schedule_in(wait, ScheduledEvent::Event(Box::new(event))),
        }
    }
}

/// For as long as its client waits.
fn never_ends(id: &str) -> RpcError {
    let message = format!(
        "an error occurs during waiting for container {id:?} to be killed: wait container: context deadline exceeded"
    );
    RpcError::new("StopContainer", RpcErrorKind::DeadlineExceeded, message)
}

fn sandbox_name(config: &v1::PodSandboxConfig) -> String {
    let metadata = config.metadata.clone().unwrap_or_default();
    format!("{}_{}_{}_{}", metadata.name, metadata.namespace, metadata.uid, metadata.attempt)
}

fn container_name(sandbox: &Sandbox, config: &v1::ContainerConfig) -> String {
    let metadata = config.metadata.clone().unwrap_or_default();
    let pod = sandbox.identity();
    format!("{}_{}_{}_{}_{}", metadata.name, pod.name, pod.namespace, pod.uid, metadata.attempt)
}
