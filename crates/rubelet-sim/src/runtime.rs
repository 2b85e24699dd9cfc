//! The ContainerRuntime port over the scene: calls take time, can fail in every way, and outlive their client or not.
//!
//! Owns: the course of a call. Never: what the call does (`act.rs`), what there is (`store.rs`).

pub mod act;
pub mod store;
#[cfg(test)]
mod tests;

use std::{future::pending, sync::Arc, time::Duration};

use async_trait::async_trait;
use rubelet_cri::{
    port::{ContainerRuntime, RpcError, RpcErrorKind, RpcResult},
    v1,
};
use tokio::{sync::mpsc, time::sleep};

use crate::{
    faults::{Course, Fate, Scope},
    runtime::{act::Act, store::image_id},
    script::Command,
    stage::{Cue, Life, Scene, Stage},
};

const LOOK_MS: u64 = 4;
const CHANGE_MS: u64 = 40;
const SANDBOX_MS: u64 = 200;
const FOREVER: Duration = Duration::from_secs(30 * 86_400);
/// containerd gives up a pull that makes no progress for this long.
const PULL_PROGRESS_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// The runtime as one life of the agent reaches it.
#[derive(Debug)]
pub struct FakeRuntime {
    stage: Arc<Stage>,
    life: Life,
}

impl FakeRuntime {
    pub fn new(stage: Arc<Stage>, life: Life) -> Self {
        FakeRuntime { stage, life }
    }

    /// A call that only looks.
    async fn look<T>(&self, method: &'static str, view: impl FnOnce(&mut Scene) -> RpcResult<T>) -> RpcResult<T> {
        let (course, epoch) = self.stage.with(|scene| {
            let course = scene.faults.course(&mut scene.rng, Duration::from_millis(LOOK_MS));
            (course, scene.runtime.epoch)
        });
        self.pass(method, epoch, course.before).await?;
        if course.fate == Fate::ErrorBefore {
            return Err(injected(method));
        }
        if matches!(course.fate, Fate::HangBefore | Fate::HangAfter) {
            return pending().await;
        }
        let answer = self.stage.with(view);
        self.pass(method, epoch, course.after).await?;
        if course.fate == Fate::DoneButError { Err(injected(method)) } else { answer }
    }

    /// A call that changes something.
    async fn change(&self, act: Act, usual: Duration) -> RpcResult<String> {
        let method = act.method();
        if !self.stage.look(|scene| scene.is_alive(self.life)) {
            return pending().await;
        }
        let mut call = self.begin(act, usual)?;
        let Course { fate, before, after, .. } = call.course;
        self.pass(method, call.epoch, before).await?;
        match fate {
            Fate::ErrorBefore => return Err(injected(method)),
            Fate::HangBefore => return pending().await,
            Fate::HangAfter | Fate::DoneButError | Fate::Answered => {}
        }
        let answer = call.perform();
        if fate == Fate::HangAfter {
            return pending().await;
        }
        self.pass(method, call.epoch, after).await?;
        if fate == Fate::DoneButError { Err(injected(method)) } else { answer }
    }

    /// Takes the name that the call needs.
    fn begin(&self, act: Act, usual: Duration) -> RpcResult<Call> {
        self.stage.with(|scene| {
            if scene.runtime.down {
                return Err(unreachable_runtime(act.method()));
            }
            let name = act.reserves(scene);
            if let Some(name) = &name {
                if scene.runtime.name_is_taken(name) {
                    let message = format!("failed to reserve name {name:?}: name {name:?} is reserved");
                    scene.log("cri", format!("{} {}", act.method(), message));
                    return Err(act.error(RpcErrorKind::Other, message));
                }
                scene.runtime.reserved.insert(name.clone());
            }
            let busy = scene.rules.called(scene.now, &act, &scene.runtime.picture);
            let course = scene.faults.course(&mut scene.rng, usual);
            let epoch = scene.runtime.epoch;
            let subject = act.subject(scene);
            let id = scene.runtime.enter_call(act.method(), subject);
            Ok(Call { stage: self.stage.clone(), id, act, name, busy, course, epoch, performed: false })
        })
    }

    /// Waits; then the call is cut if the runtime went down, and reaches nobody if the caller is dead.
    async fn pass(&self, method: &'static str, epoch: u32, wait: Duration) -> RpcResult<()> {
        self.stage.with(|scene| scene.may_kill_agent(self.life));
        sleep(wait).await;
        let (alive, cut) =
            self.stage.look(|scene| (scene.is_alive(self.life), scene.runtime.down || scene.runtime.epoch != epoch));
        if !alive {
            return pending().await;
        }
        if cut {
            return Err(unreachable_runtime(method));
        }
        Ok(())
    }
}

/// A call that the server finishes although its client went away.
#[derive(Clone, Debug)]
pub struct LateCall {
    act: Act,
    name: Option<String>,
    epoch: u32,
}

impl LateCall {
    pub fn finish(&self, scene: &mut Scene) {
        // A server that was restarted meanwhile knows nothing of it.
        if self.epoch != scene.runtime.epoch {
            return;
        }
        if let Some(name) = &self.name {
            scene.runtime.reserved.remove(name);
        }
        scene.log("cri", "a call without a client goes on");
        drop(scene.perform(&self.act));
    }
}

/// A changing call under way. When its client goes away the server drops it, or goes on with it alone.
struct Call {
    stage: Arc<Stage>,
    id: u64,
    act: Act,
    name: Option<String>,
    /// What the rules call the thing it changes.
    busy: Option<String>,
    course: Course,
    epoch: u32,
    performed: bool,
}

impl Call {
    fn perform(&mut self) -> RpcResult<String> {
        self.performed = true;
        self.stage.with(|scene| {
            if let Some(name) = &self.name {
                scene.runtime.reserved.remove(name);
            }
            scene.perform(&self.act)
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.stage.with(|scene| {
            scene.rules.returned(self.busy.as_deref());
            scene.runtime.calls.remove(&self.id);
            if self.performed || scene.runtime.epoch != self.epoch {
                return;
            }
            if self.course.goes_on_without_client && self.course.fate == Fate::Answered {
                let wait = Duration::from_millis(scene.rng.u64(1..3_000));
                let late = LateCall { act: self.act.clone(), name: self.name.clone(), epoch: self.epoch };
                scene.cue_in(wait, Cue::Finish(Box::new(late)));
            } else if let Some(name) = &self.name {
                scene.runtime.reserved.remove(name);
            }
        });
    }
}

fn unreachable_runtime(method: &'static str) -> RpcError {
    let message = "connection error: dial unix containerd.sock: connect: connection refused".to_owned();
    RpcError { method, kind: RpcErrorKind::Unavailable, message }
}

fn injected(method: &'static str) -> RpcError {
    RpcError { method, kind: RpcErrorKind::Other, message: "injected: the runtime failed".to_owned() }
}

/// Streams are tested on a real runtime.
fn no_streams(method: &'static str) -> RpcError {
    RpcError { method, kind: RpcErrorKind::Unimplemented, message: "there are no streams here".to_owned() }
}

fn not_found(method: &'static str, id: &str) -> RpcError {
    RpcError {
        method,
        kind: RpcErrorKind::NotFound,
        message: format!("an error occurred when try to find {id:?}: not found"),
    }
}

#[async_trait]
impl ContainerRuntime for FakeRuntime {
    async fn version(&self) -> RpcResult<v1::VersionResponse> {
        self.look("Version", |_| {
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
        self.look("Status", |scene| {
            let condition = |kind: &str, status: bool| v1::RuntimeCondition {
                r#type: kind.to_owned(),
                status,
                reason: if status { String::new() } else { "NetworkPluginNotReady".to_owned() },
                message: if status { String::new() } else { "cni plugin not initialized".to_owned() },
            };
            let network = condition("NetworkReady", scene.runtime.network_ready);
            let conditions = vec![condition("RuntimeReady", true), network];
            Ok(v1::StatusResponse { status: Some(v1::RuntimeStatus { conditions }), ..Default::default() })
        })
        .await
    }

    /// As an old runtime: the agent's own configuration counts.
    async fn runtime_config(&self) -> RpcResult<v1::RuntimeConfigResponse> {
        self.look("RuntimeConfig", |_| {
            let message = "unknown method RuntimeConfig".to_owned();
            Err(RpcError { method: "RuntimeConfig", kind: RpcErrorKind::Unimplemented, message })
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
        self.look("PodSandboxStatus", |scene| {
            let sandbox = scene.runtime.picture.sandboxes.get(sandbox_id);
            sandbox.map(|sandbox| sandbox.status()).ok_or_else(|| not_found("PodSandboxStatus", sandbox_id))
        })
        .await
    }

    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> RpcResult<Vec<v1::PodSandbox>> {
        self.look("ListPodSandbox", |scene| {
            let age = scene.faults.list_age(&mut scene.rng, Scope::of(filter.as_ref()));
            Ok(scene.runtime.picture_at(scene.now.saturating_sub(age)).list_sandboxes(filter.as_ref()))
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
        // The signal goes out, and the call waits with its client: without the client nobody sends SIGKILL.
        let timeout = Duration::from_secs(u64::try_from(timeout_secs).unwrap_or(0));
        let id = container_id.to_owned();
        if !timeout.is_zero() {
            self.change(Act::Term(id.clone()), Duration::from_millis(CHANGE_MS / 4)).await?;
            let epoch = self.stage.look(|scene| scene.runtime.epoch);
            if tokio::time::timeout(timeout, self.exit_of(&id, epoch)).await.is_ok() {
                return self.pass("StopContainer", epoch, Duration::ZERO).await;
            }
        }
        self.change(Act::Kill(id), Duration::from_millis(CHANGE_MS / 4)).await.map(drop)
    }

    async fn remove_container(&self, container_id: &str) -> RpcResult<()> {
        self.change(Act::RemoveContainer(container_id.to_owned()), Duration::from_millis(CHANGE_MS)).await.map(drop)
    }

    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> RpcResult<Vec<v1::Container>> {
        self.look("ListContainers", |scene| {
            let age = scene.faults.list_age(&mut scene.rng, Scope::of(filter.as_ref()));
            Ok(scene.runtime.picture_at(scene.now.saturating_sub(age)).list_containers(filter.as_ref()))
        })
        .await
    }

    async fn container_status(&self, container_id: &str) -> RpcResult<v1::ContainerStatus> {
        self.look("ContainerStatus", |scene| {
            let container = scene.runtime.picture.containers.get(container_id);
            container.map(|container| container.status()).ok_or_else(|| not_found("ContainerStatus", container_id))
        })
        .await
    }

    async fn list_container_stats(&self) -> RpcResult<Vec<v1::ContainerStats>> {
        self.look("ListContainerStats", |_| Ok(Vec::new())).await
    }

    async fn image_fs_info(&self) -> RpcResult<v1::ImageFsInfoResponse> {
        self.look("ImageFsInfo", |_| Ok(v1::ImageFsInfoResponse::default())).await
    }

    async fn list_images(&self) -> RpcResult<Vec<v1::Image>> {
        self.look("ListImages", |scene| Ok(scene.runtime.images.iter().map(|name| image_called(name)).collect())).await
    }

    async fn exec_sync(
        &self,
        container_id: &str,
        command: &[String],
        timeout: Duration,
    ) -> RpcResult<v1::ExecSyncResponse> {
        let command: Command = command.join(" ").parse().expect("a script is written in the words of Command");
        let epoch = self.stage.look(|scene| scene.runtime.epoch);
        if let Command::Sleep { secs } = command {
            let takes = Duration::from_secs(secs);
            let limit = if timeout.is_zero() { takes } else { timeout };
            self.pass("ExecSync", epoch, takes.min(limit)).await?;
            if takes > limit {
                let message = format!("timeout {limit:?} exceeded");
                return Err(RpcError { method: "ExecSync", kind: RpcErrorKind::DeadlineExceeded, message });
            }
        }
        self.look("ExecSync", |scene| {
            let container = scene.runtime.picture.containers.get(container_id);
            let running = container.filter(|container| container.is_running());
            let attempt = running.ok_or_else(|| not_found("ExecSync", container_id))?.attempt();
            scene.log("cri", format!("ExecSync {container_id} {command}"));
            let exit_code = i32::from(command.fails(attempt));
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
        let found = |scene: &mut Scene| scene.runtime.find_image(&image.image).map(|name| image_called(name));
        self.look("ImageStatus", |scene| Ok(found(scene))).await
    }

    async fn pull_image(
        &self,
        image: &v1::ImageSpec,
        _auth: Option<v1::AuthConfig>,
        _sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        let takes = self.stage.with(|scene| {
            scene.log("cri", format!("pulling {}", image.image));
            scene.pull_takes(&image.image)
        });
        // For ever is as good as longer than any deadline.
        let pull = self.change(Act::Pull(image.image.clone()), takes.unwrap_or(FOREVER));
        let given_up = |_| {
            let message = "failed to pull and unpack image: no progress".to_owned();
            Err(RpcError { method: "PullImage", kind: RpcErrorKind::Other, message })
        };
        tokio::time::timeout(PULL_PROGRESS_TIMEOUT, pull).await.unwrap_or_else(given_up)
    }

    async fn container_events(&self) -> RpcResult<mpsc::Receiver<v1::ContainerEventResponse>> {
        self.look("GetContainerEvents", |scene| {
            if scene.runtime.has_events {
                return Ok(scene.runtime.listen());
            }
            let message = "unknown method GetContainerEvents".to_owned();
            Err(RpcError { method: "GetContainerEvents", kind: RpcErrorKind::Unimplemented, message })
        })
        .await
    }
}

fn image_called(name: &str) -> v1::Image {
    v1::Image { id: image_id(name), repo_tags: vec![name.to_owned()], size: 1 << 20, ..Default::default() }
}

impl FakeRuntime {
    /// Returns when the container does not run, or when the runtime was cut off from its clients.
    async fn exit_of(&self, container_id: &str, epoch: u32) {
        loop {
            let stirred = self.stage.stirred.notified();
            let waits = self.stage.look(|scene| {
                let container = scene.runtime.picture.containers.get(container_id);
                container.is_some_and(|container| container.is_running()) && scene.runtime.epoch == epoch
            });
            if !waits {
                return;
            }
            stirred.await;
        }
    }
}
