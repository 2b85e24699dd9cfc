//! The ContainerRuntime port over the simulated state: calls take time, can fail in every way, and outlive their client or not.
//!
//! Owns: the course of a call. Never: what the call does (`act.rs`), what is stored (`store.rs`).

pub(crate) mod act;
mod course;
mod mishaps;
pub(crate) mod output;
pub(crate) mod store;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use rubelet_cri::{
    port::{ContainerRuntime, RpcError, RpcErrorKind, RpcResult},
    v1,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use crate::{
    faults::{CallOutcome, Course, Scope},
    invariants::trouble::{Faulty, Touched},
    runtime::{
        act::Act,
        store::{Ailment, IMAGE_BYTES, IMAGE_FS, image_id},
    },
    script::{Command, Exec, IMAGE},
    simulation::{Incarnation, ScheduledEvent, SimState, Simulation},
};

const CHANGE_MS: u64 = 40;
const SANDBOX_MS: u64 = 200;
const FOREVER: Duration = Duration::from_secs(30 * 86_400);
/// The client's timeout for read-only calls.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2 * 60);
/// containerd cancels a pull without progress after this long.
const PULL_PROGRESS_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// The runtime as one process of the agent reaches it.
#[derive(Debug)]
pub(crate) struct FakeRuntime {
    simulation: Arc<Simulation>,
    incarnation: Incarnation,
}

impl FakeRuntime {
    pub(crate) fn new(simulation: Arc<Simulation>, incarnation: Incarnation) -> Self {
        FakeRuntime { simulation, incarnation }
    }

    /// A read-only call, about a pod or everything.
    async fn look<T>(
        &self,
        method: &'static str,
        touched: Touched,
        view: impl FnOnce(&mut SimState) -> RpcResult<T>,
    ) -> RpcResult<T> {
        let (course, epoch) = self.simulation.with(|sim| {
            let course = sim.look_course(method, &touched);
            (course, sim.runtime.epoch)
        });
        let _trouble = course.is_faulty().then(|| Faulty::enter(&self.simulation, touched));
        self.pass(method, epoch, course.before).await?;
        match course.outcome {
            CallOutcome::ErrorBefore => return Err(injected(method)),
            CallOutcome::HangBefore | CallOutcome::HangAfter => {
                self.pass(method, epoch, REQUEST_TIMEOUT).await?;
                let message = "context deadline exceeded".to_owned();
                return Err(RpcError::new(method, RpcErrorKind::DeadlineExceeded, message));
            }
            CallOutcome::DoneButError | CallOutcome::HalfDone | CallOutcome::Answered => {}
        }
        let answer = self.simulation.with(view);
        self.pass(method, epoch, course.after).await?;
        match course.outcome {
            CallOutcome::DoneButError | CallOutcome::HalfDone => Err(injected(method)),
            CallOutcome::ErrorBefore | CallOutcome::HangBefore | CallOutcome::HangAfter | CallOutcome::Answered => {
                answer
            }
        }
    }

    /// A call that changes something.
    async fn change(&self, act: Act, usual: Duration) -> RpcResult<String> {
        let method = act.method();
        if !self.simulation.look(|sim| sim.is_alive(self.incarnation)) {
            return pending().await;
        }
        let mut call = self.begin(act, usual)?;
        let Course { outcome, before, after, .. } = call.course;
        self.pass(method, call.epoch, before).await?;
        self.wait_for_device(&call).await?;
        match outcome {
            CallOutcome::ErrorBefore => return Err(injected(method)),
            CallOutcome::HangBefore => return pending().await,
            CallOutcome::HangAfter | CallOutcome::DoneButError | CallOutcome::HalfDone | CallOutcome::Answered => {}
        }
        let answer = call.perform();
        // A runtime that waits for an unkillable process waits as long as its client.
        let waits = answer.as_ref().is_err_and(|error| error.kind == RpcErrorKind::DeadlineExceeded);
        if outcome == CallOutcome::HangAfter || waits {
            call.trouble();
            return pending().await;
        }
        self.pass(method, call.epoch, after).await?;
        if outcome == CallOutcome::DoneButError { Err(injected(method)) } else { answer }
    }

    async fn wait_for_device(&self, call: &Call) -> RpcResult<()> {
        // Registered before the check, so that a device that returns in between is not missed.
        let mut changed = self.simulation.changed.notified();
        let waits = |sim: &SimState| sim.runtime.epoch == call.epoch && sim.waits_for_device(&call.act);
        while self.simulation.look(waits) {
            changed.await;
            changed = self.simulation.changed.notified();
        }
        self.pass(call.act.method(), call.epoch, Duration::ZERO).await
    }

    /// Reserves the name that the call needs.
    fn begin(&self, act: Act, usual: Duration) -> RpcResult<Call> {
        self.simulation.with(|sim| {
            if sim.runtime.down {
                return Err(unreachable_runtime(act.method()));
            }
            let name = act.reserves(sim);
            if let Some(name) = &name {
                if sim.runtime.name_is_taken(name) {
                    let message = format!("failed to reserve name {name:?}: name {name:?} is reserved");
                    sim.log("cri", format!("{} {}", act.method(), message));
                    return Err(act.error(RpcErrorKind::Other, message));
                }
                sim.runtime.reserved.insert(name.clone());
            }
            let busy = sim.rules.called(sim.now, &act, &sim.runtime.picture);
            let (act, course, touched) = sim.change_course(act, usual);
            let epoch = sim.runtime.epoch;
            let subject = act.subject(sim);
            let id = sim.runtime.enter_call(act.method(), subject);
            let trouble = course.is_faulty().then(|| Faulty::enter_in(sim, &self.simulation, touched.clone()));
            Ok(Call {
                simulation: self.simulation.clone(),
                id,
                act,
                name,
                busy,
                course,
                epoch,
                touched,
                trouble,
                performed: false,
            })
        })
    }

    /// Waits; then the call fails if the runtime went down, and is lost if the caller is dead.
    async fn pass(&self, method: &'static str, epoch: u32, wait: Duration) -> RpcResult<()> {
        self.simulation.with(|sim| sim.may_kill_agent(self.incarnation));
        sleep(wait).await;
        let (alive, cut) = self
            .simulation
            .look(|sim| (sim.is_alive(self.incarnation), sim.runtime.down || sim.runtime.epoch != epoch));
        if !alive {
            return pending().await;
        }
        if cut {
            return Err(unreachable_runtime(method));
        }
        Ok(())
    }
}

/// A call that the server finishes after its client disconnected.
#[derive(Clone, Debug)]
pub(crate) struct LateCall {
    act: Act,
    name: Option<String>,
    epoch: u32,
    /// The containers that there were when its client left: it is meant for no other.
    known: BTreeSet<String>,
}

impl LateCall {
    pub(crate) fn finish(&self, sim: &mut SimState) {
        // A restarted server does not know it.
        if self.epoch != sim.runtime.epoch {
            return;
        }
        if sim.waits_for_device(&self.act) {
            return sim.schedule_in(Duration::from_secs(1), ScheduledEvent::Finish(Box::new(self.clone())));
        }
        if let Some(name) = &self.name {
            sim.runtime.reserved.remove(name);
        }
        sim.log("cri", "a call without a client goes on");
        let all = sim.runtime.picture.containers.keys();
        sim.rules.started_since = all.filter(|id| !self.known.contains(*id)).cloned().collect();
        drop(sim.perform(&self.act));
        sim.rules.started_since.clear();
    }
}

/// A running changing call. When its client disconnects the server drops it, or continues it alone.
struct Call {
    simulation: Arc<Simulation>,
    id: u64,
    act: Act,
    name: Option<String>,
    /// The subject of the change in the rules.
    busy: Option<String>,
    course: Course,
    epoch: u32,
    touched: Touched,
    trouble: Option<Faulty>,
    performed: bool,
}

impl Call {
    /// The call will hang.
    fn trouble(&mut self) {
        self.trouble.get_or_insert_with(|| Faulty::enter(&self.simulation, self.touched.clone()));
    }

    fn perform(&mut self) -> RpcResult<String> {
        self.performed = true;
        self.simulation.with(|sim| {
            if let Some(name) = &self.name {
                sim.runtime.reserved.remove(name);
            }
            sim.perform(&self.act)
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.simulation.with(|sim| {
            sim.rules.returned(self.busy.as_deref());
            sim.runtime.calls.remove(&self.id);
            if self.performed || sim.runtime.epoch != self.epoch {
                return;
            }
            if self.course.goes_on_without_client && self.course.outcome == CallOutcome::Answered {
                let wait = Duration::from_millis(sim.rng.u64(1..3_000));
                let known = sim.runtime.picture.containers.keys().cloned().collect();
                let late = LateCall { act: self.act.clone(), name: self.name.clone(), epoch: self.epoch, known };
                sim.schedule_in(wait, ScheduledEvent::Finish(Box::new(late)));
            } else if let Some(name) = &self.name {
                sim.runtime.reserved.remove(name);
            } else if let (Act::Start(id), CallOutcome::Answered) = (&self.act, self.course.outcome) {
                sim.cancel_start(id);
            }
        });
    }
}

fn unreachable_runtime(method: &'static str) -> RpcError {
    let message = "connection error: dial unix containerd.sock: connect: connection refused".to_owned();
    RpcError::new(method, RpcErrorKind::Unavailable, message)
}

fn injected(method: &'static str) -> RpcError {
    RpcError::new(method, RpcErrorKind::Other, "injected: the runtime failed")
}

/// Streams are tested on a real runtime.
fn no_streams(method: &'static str) -> RpcError {
    RpcError::new(method, RpcErrorKind::Unimplemented, "there are no streams here")
}

fn not_found(method: &'static str, id: &str) -> RpcError {
    RpcError::new(method, RpcErrorKind::NotFound, format!("an error occurred when try to find {id:?}: not found"))
}

#[async_trait]
impl ContainerRuntime for FakeRuntime {
    async fn version(&self) -> RpcResult<v1::VersionResponse> {
        self.look("Version", Touched::Node, |_| {
            Ok(v1::VersionResponse {
                version: "0.1.0".to_owned(),
                runtime_name: "containerd".to_owned(),
                runtime_version: "v2.4.2-sim".to_owned(),
                runtime_api_version: "v1".to_owned(),
            })
        })
        .await
    }

    async fn status(&self) -> RpcResult<v1::StatusResponse> {
        self.look("Status", Touched::Node, |sim| {
            let condition = |kind: &str, status: bool, reason: &str, message: &str| v1::RuntimeCondition {
                r#type: kind.to_owned(),
                status,
                reason: if status { String::new() } else { reason.to_owned() },
                message: if status { String::new() } else { message.to_owned() },
            };
            let is_ready = !sim.runtime.ailments.contains(&Ailment::NotReady);
            let runtime = condition("RuntimeReady", is_ready, "Injected", "the runtime is not ready");
            let (reason, message) = ("NetworkPluginNotReady", "cni plugin not initialized");
            let network = condition("NetworkReady", sim.runtime.network_ready, reason, message);
            let conditions = vec![runtime, network];
            Ok(v1::StatusResponse { status: Some(v1::RuntimeStatus { conditions }), ..Default::default() })
        })
        .await
    }

    /// As an old runtime: the agent's own configuration is used.
    async fn runtime_config(&self) -> RpcResult<v1::RuntimeConfigResponse> {
        self.look("RuntimeConfig", Touched::Node, |_| {
            let message = "unknown method RuntimeConfig".to_owned();
            Err(RpcError::new("RuntimeConfig", RpcErrorKind::Unimplemented, message))
        })
        .await
    }

    async fn run_pod_sandbox(&self, config: &v1::PodSandboxConfig, _runtime_handler: &str) -> RpcResult<String> {
        self.change(Act::RunSandbox(Arc::new(config.clone())), Duration::from_millis(SANDBOX_MS)).await
    }

    async fn stop_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()> {
        self.change(Act::StopSandbox(sandbox_id.to_owned()), Duration::from_millis(SANDBOX_MS)).await.map(drop)
    }

    async fn remove_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()> {
        self.change(Act::RemoveSandbox(sandbox_id.to_owned()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn pod_sandbox_status(&self, sandbox_id: &str) -> RpcResult<v1::PodSandboxStatus> {
        let touched = self.touched_by(sandbox_id);
        self.look("PodSandboxStatus", touched, |sim| {
            let sandbox = sim.runtime.picture.sandboxes.get(sandbox_id);
            sandbox.map(|sandbox| sandbox.status()).ok_or_else(|| not_found("PodSandboxStatus", sandbox_id))
        })
        .await
    }

    async fn pod_sandbox_info(&self, sandbox_id: &str) -> RpcResult<String> {
        self.pod_sandbox_status(sandbox_id).await.map(|_| String::new())
    }

    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> RpcResult<Vec<v1::PodSandbox>> {
        let touched = Touched::pod(filter.as_ref().and_then(|filter| pod_named_in(&filter.label_selector)));
        self.look("ListPodSandbox", touched, |sim| {
            let age = sim.list_age(Scope::of(filter.as_ref()));
            Ok(sim.runtime.picture_at(sim.now.saturating_sub(age)).list_sandboxes(filter.as_ref()))
        })
        .await
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: &v1::ContainerConfig,
        _sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        let act = Act::Create { sandbox: sandbox_id.to_owned(), config: Arc::new(config.clone()) };
        self.change(act, Duration::from_millis(CHANGE_MS)).await
    }

    async fn start_container(&self, container_id: &str) -> RpcResult<()> {
        self.change(Act::Start(container_id.to_owned()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn stop_container(&self, container_id: &str, timeout_secs: i64) -> RpcResult<()> {
        // The signal is sent, and the call waits with its client: without the client no SIGKILL follows.
        let timeout = Duration::from_secs(u64::try_from(timeout_secs).unwrap_or(0));
        let id = container_id.to_owned();
        if !timeout.is_zero() {
            self.change(Act::Term(id.clone()), Duration::from_millis(CHANGE_MS / 4)).await?;
            let epoch = self.simulation.look(|sim| sim.runtime.epoch);
            let _kill = self.kill_without_client(&id, timeout);
            if tokio::time::timeout(timeout, self.exit_of(&id, epoch)).await.is_ok() {
                return self.pass("StopContainer", epoch, Duration::ZERO).await;
            }
        }
        self.change(Act::Kill(id), Duration::from_millis(CHANGE_MS / 4)).await.map(drop)
    }

    async fn remove_container(&self, container_id: &str) -> RpcResult<()> {
        self.change(Act::RemoveContainer(container_id.to_owned()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn reopen_container_log(&self, container_id: &str) -> RpcResult<()> {
        self.change(Act::ReopenLog(container_id.to_owned()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn delete_leftover_task(&self, container_id: &str) -> RpcResult<()> {
        self.change(Act::DeleteTask(container_id.to_owned()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> RpcResult<Vec<v1::Container>> {
        let touched = Touched::pod(filter.as_ref().and_then(|filter| pod_named_in(&filter.label_selector)));
        let answer = self.look("ListContainers", touched, |sim| {
            let age = sim.list_age(Scope::of(filter.as_ref()));
            Ok(sim.runtime.picture_at(sim.now.saturating_sub(age)).list_containers(filter.as_ref()))
        });
        let answer = answer.await?;
        if filter.is_none() {
            self.simulation.with(|sim| sim.rules.listed(sim.now));
        }
        Ok(answer)
    }

    async fn container_status(&self, container_id: &str) -> RpcResult<v1::ContainerStatus> {
        let touched = self.touched_by(container_id);
        self.look("ContainerStatus", touched, |sim| {
            let container = sim.runtime.picture.containers.get(container_id);
            container.map(|container| container.status()).ok_or_else(|| not_found("ContainerStatus", container_id))
        })
        .await
    }

    async fn list_container_stats(&self) -> RpcResult<Vec<v1::ContainerStats>> {
        self.look("ListContainerStats", Touched::Node, |_| Ok(Vec::new())).await
    }

    async fn image_fs_info(&self) -> RpcResult<v1::ImageFsInfoResponse> {
        let fs_id = Some(v1::FilesystemIdentifier { mountpoint: IMAGE_FS.to_owned() });
        let usage = v1::FilesystemUsage { fs_id, ..v1::FilesystemUsage::default() };
        let info = v1::ImageFsInfoResponse { image_filesystems: vec![usage], ..v1::ImageFsInfoResponse::default() };
        self.look("ImageFsInfo", Touched::Node, |_| Ok(info)).await
    }

    async fn remove_image(&self, image: &v1::ImageSpec) -> RpcResult<()> {
        self.change(Act::RemoveImage(image.image.clone()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn list_images(&self) -> RpcResult<Vec<v1::Image>> {
        self.look("ListImages", Touched::Node, |sim| {
            Ok(sim.runtime.images.iter().map(|name| image_called(name)).collect())
        })
        .await
    }

    async fn exec_sync(
        &self,
        container_id: &str,
        command: &[String],
        timeout: Duration,
        _output_limit_bytes: Option<usize>,
    ) -> RpcResult<v1::ExecSyncResponse> {
        let Exec { hook, command } = command.join(" ").parse().expect("a script is written in the words of Exec");
        let epoch = self.simulation.with(|sim| {
            if let Some(hook) = hook {
                sim.hook_begins(container_id, hook);
            }
            sim.runtime.epoch
        });
        if let Command::Sleep { secs } = command {
            let takes = Duration::from_secs(secs);
            let limit = if timeout.is_zero() { takes } else { timeout };
            self.pass("ExecSync", epoch, takes.min(limit)).await?;
            if takes > limit {
                let message = format!("timeout {limit:?} exceeded");
                return Err(RpcError::new("ExecSync", RpcErrorKind::DeadlineExceeded, message));
            }
        }
        let touched = self.touched_by(container_id);
        self.look("ExecSync", touched, |sim| {
            let container = sim.runtime.picture.containers.get(container_id);
            let running = container.filter(|container| container.is_running());
            let attempt = running.ok_or_else(|| not_found("ExecSync", container_id))?.attempt();
            sim.log("cri", format!("ExecSync {container_id} {command}"));
            let exit_code = i32::from(command.fails(attempt));
            if hook.is_none() {
                sim.rules.probed(container_id, exit_code == 0);
            }
            let stdout = if exit_code == 0 { Vec::new() } else { b"it does not work".to_vec() };
            Ok(v1::ExecSyncResponse { stdout, exit_code, ..Default::default() })
        })
        .await
    }

    async fn exec(&self, _request: v1::ExecRequest) -> RpcResult<String> {
        Err(no_streams("Exec"))
    }

    async fn attach(&self, _request: v1::AttachRequest) -> RpcResult<String> {
        Err(no_streams("Attach"))
    }

    async fn port_forward(&self, _request: v1::PortForwardRequest) -> RpcResult<String> {
        Err(no_streams("PortForward"))
    }

    async fn checkpoint_container(&self, _request: v1::CheckpointContainerRequest) -> RpcResult<()> {
        Err(no_streams("CheckpointContainer"))
    }

    async fn image_status(&self, image: &v1::ImageSpec) -> RpcResult<Option<v1::Image>> {
        let found = |sim: &mut SimState| sim.runtime.find_image(&image.image).map(|name| image_called(name));
        self.look("ImageStatus", Touched::Node, |sim| Ok(found(sim))).await
    }

    async fn pull_image(
        &self,
        image: &v1::ImageSpec,
        _auth: Option<v1::AuthConfig>,
        _sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        let takes = self.simulation.with(|sim| {
            sim.log("cri", format!("pulling {}", image.image));
            sim.pull_takes(&image.image)
        });
        // Longer than any deadline.
        let pull = self.change(Act::Pull(image.image.clone()), takes.unwrap_or(FOREVER));
        let given_up = |_| {
            let message = "failed to pull and unpack image: no progress".to_owned();
            Err(RpcError::new("PullImage", RpcErrorKind::Other, message))
        };
        tokio::time::timeout(PULL_PROGRESS_TIMEOUT, pull).await.unwrap_or_else(given_up)
    }

    async fn container_events(&self) -> RpcResult<mpsc::Receiver<v1::ContainerEventResponse>> {
        self.look("GetContainerEvents", Touched::Node, |sim| {
            if sim.runtime.has_events {
                return Ok(sim.runtime.listen());
            }
            let message = "unknown method GetContainerEvents".to_owned();
            Err(RpcError::new("GetContainerEvents", RpcErrorKind::Unimplemented, message))
        })
        .await
    }
}

/// The uid of a list of one pod's objects.
fn pod_named_in(selector: &BTreeMap<String, String>) -> Option<String> {
    selector.get("io.kubernetes.pod.uid").cloned()
}

fn image_called(name: &str) -> v1::Image {
    // The one that every node has is never removed.
    let pinned = name == IMAGE;
    v1::Image { id: image_id(name), repo_tags: vec![name.to_owned()], size: IMAGE_BYTES, pinned, ..Default::default() }
}

/// A stop whose client disconnects sends no SIGKILL, or is finished by the runtime alone.
struct Stop {
    simulation: Arc<Simulation>,
    container: String,
    kill_at: Instant,
    goes_on: bool,
}

impl Drop for Stop {
    fn drop(&mut self) {
        let left = self.kill_at.saturating_duration_since(Instant::now());
        if self.goes_on && !left.is_zero() {
            self.simulation.with(|sim| sim.schedule_in(left, ScheduledEvent::Kill(self.container.clone())));
        }
    }
}

impl FakeRuntime {
    fn kill_without_client(&self, container: &str, timeout: Duration) -> Stop {
        let goes_on = self.simulation.with(|sim| sim.faults.stop_goes_on(&mut sim.rng));
        let kill_at = Instant::now() + timeout;
        Stop { simulation: self.simulation.clone(), container: container.to_owned(), kill_at, goes_on }
    }

    /// The pod of this sandbox or container.
    fn touched_by(&self, id: &str) -> Touched {
        self.simulation.look(|sim| {
            let picture = &sim.runtime.picture;
            let container = picture.containers.get(id).map(|container| container.pod.uid.clone());
            Touched::pod(container.or_else(|| picture.sandboxes.get(id).map(|sandbox| sandbox.identity().uid)))
        })
    }

    /// Returns when the container does not run, or when the runtime was cut off from its clients.
    async fn exit_of(&self, container_id: &str, epoch: u32) {
        loop {
            let changed = self.simulation.changed.notified();
            let waits = self.simulation.look(|sim| {
                let container = sim.runtime.picture.containers.get(container_id);
                container.is_some_and(|container| container.is_running()) && sim.runtime.epoch == epoch
            });
            if !waits {
                return;
            }
            changed.await;
        }
    }
}
