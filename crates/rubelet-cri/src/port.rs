//! The container runtime port: CRI v1, one method per RPC in use.

use std::{error::Error, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::v1;

/// Why a call failed: kind for decisions, text for users.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{method}: {message}")]
pub struct RpcError {
    pub method: &'static str,
    pub kind: RpcErrorKind,
    message: String,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcErrorKind {
    /// The socket refuses connections.
    Unavailable,
    /// No response in time. The request may have been executed.
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    /// The runtime does not have this call.
    Unimplemented,
    InvalidArgument,
    /// The object is in a state in which the call cannot be done.
    FailedPrecondition,
    Other,
}

impl RpcError {
    pub fn new(method: &'static str, kind: RpcErrorKind, message: impl Into<String>) -> Self {
        RpcError { method, kind, message: message.into(), source: None }
    }

    #[must_use]
    pub fn caused_by(self, source: impl Error + Send + Sync + 'static) -> Self {
        RpcError { source: Some(Arc::new(source)), ..self }
    }

    /// The error as Go's gRPC prints it: what users see and grep for in upstream's events.
    pub fn grpc_text(&self) -> String {
        format!("rpc error: code = {} desc = {}", self.kind.code_name(), self.description())
    }

    /// What gRPC calls `desc`: the runtime's message or, of a failed connection, the transport's with its cause.
    pub fn description(&self) -> String {
        match &self.source {
            Some(cause) => format!("{}: {cause}", self.message),
            None => self.message.clone(),
        }
    }
}

impl RpcErrorKind {
    fn code_name(self) -> &'static str {
        match self {
            RpcErrorKind::Unavailable => "Unavailable",
            RpcErrorKind::DeadlineExceeded => "DeadlineExceeded",
            RpcErrorKind::NotFound => "NotFound",
            RpcErrorKind::AlreadyExists => "AlreadyExists",
            RpcErrorKind::Unimplemented => "Unimplemented",
            RpcErrorKind::InvalidArgument => "InvalidArgument",
            RpcErrorKind::FailedPrecondition => "FailedPrecondition",
            RpcErrorKind::Other => "Unknown",
        }
    }
}

pub type RpcResult<T> = Result<T, RpcError>;

#[async_trait]
pub trait ContainerRuntime: Send + Sync + 'static {
    async fn version(&self) -> RpcResult<v1::VersionResponse>;
    async fn status(&self) -> RpcResult<v1::StatusResponse>;
    /// `Unimplemented` if the runtime is older than the call.
    async fn runtime_config(&self) -> RpcResult<v1::RuntimeConfigResponse>;

    async fn run_pod_sandbox(&self, config: &v1::PodSandboxConfig, runtime_handler: &str) -> RpcResult<String>;
    async fn stop_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()>;
    async fn remove_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()>;
    async fn pod_sandbox_status(&self, sandbox_id: &str) -> RpcResult<v1::PodSandboxStatus>;
    /// The verbose part of `PodSandboxStatus`: runtime-specific JSON; empty if there is none.
    async fn pod_sandbox_info(&self, sandbox_id: &str) -> RpcResult<String>;
    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> RpcResult<Vec<v1::PodSandbox>>;

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: &v1::ContainerConfig,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String>;
    async fn start_container(&self, container_id: &str) -> RpcResult<()>;
    /// SIGTERM, and SIGKILL after `timeout_secs`. The call lasts as long.
    async fn stop_container(&self, container_id: &str, timeout_secs: i64) -> RpcResult<()>;
    async fn remove_container(&self, container_id: &str) -> RpcResult<()>;
    /// Kills and removes the processes that the runtime kept of a container although it lists it as ended, which blocks the
    /// container's removal. `Unimplemented` by runtimes other than containerd.
    async fn delete_leftover_task(&self, container_id: &str) -> RpcResult<()>;
    /// After a rotation: the container's output goes to a new file at its log path.
    async fn reopen_container_log(&self, container_id: &str) -> RpcResult<()>;
    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> RpcResult<Vec<v1::Container>>;
    async fn container_status(&self, container_id: &str) -> RpcResult<v1::ContainerStatus>;
    /// Of all running containers.
    async fn list_container_stats(&self) -> RpcResult<Vec<v1::ContainerStats>>;
    /// Runs a command in a container and waits for its end. `DeadlineExceeded` when it was killed for taking longer than
    /// `timeout`, which is counted in whole seconds. Of each output stream, no more than the limit is received; without one, as much
    /// as a message holds.
    async fn exec_sync(
        &self,
        container_id: &str,
        command: &[String],
        timeout: Duration,
        output_limit_bytes: Option<usize>,
    ) -> RpcResult<v1::ExecSyncResponse>;
    /// Prepares a command in a container. Like the next two, it returns a URL of the runtime's streaming server
    /// that is valid for one connection.
    async fn exec(&self, request: v1::ExecRequest) -> RpcResult<String>;
    async fn attach(&self, request: v1::AttachRequest) -> RpcResult<String>;
    async fn port_forward(&self, request: v1::PortForwardRequest) -> RpcResult<String>;
    /// Within the request's timeout, or the usual one if that is longer.
    async fn checkpoint_container(&self, request: v1::CheckpointContainerRequest) -> RpcResult<()>;

    async fn list_images(&self) -> RpcResult<Vec<v1::Image>>;
    /// `None`: the image is not present.
    async fn image_status(&self, image: &v1::ImageSpec) -> RpcResult<Option<v1::Image>>;
    /// Returns the reference of the pulled image.
    async fn remove_image(&self, image: &v1::ImageSpec) -> RpcResult<()>;
    async fn pull_image(
        &self,
        image: &v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String>;

    /// Disk usage of images, and their location.
    async fn image_fs_info(&self) -> RpcResult<v1::ImageFsInfoResponse>;

    /// Container events; the channel closes when the stream ends. `Unimplemented` if the runtime has none.
    async fn container_events(&self) -> RpcResult<mpsc::Receiver<v1::ContainerEventResponse>>;
}
