//! The CRI client: gRPC over a unix socket.
//!
//! Owns: the connection, a deadline per call, the mapping of gRPC codes. Never: retries, decides, keeps state of pods.
//! The channel connects on first use and reconnects after it broke, so a restarted runtime needs nothing done here.
//! Upstream: `k8s.io/cri-client`.

use std::{error::Error, fmt, time::Duration};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};
use tonic::{
    Code, Request, Response, Status,
    transport::{Channel, Endpoint},
};

use crate::{
    client::output::CutOutput,
    port::{ContainerRuntime, RpcError, RpcErrorKind, RpcResult},
    v1::{self, image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient},
};

mod containerd;
mod output;

/// A relist of a node full of dead containers exceeds gRPC's default of 4 MiB; this is upstream's limit.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// The version of the kubelet's runtime API, from before CRI had its own versions; runtimes still return it.
const KUBE_RUNTIME_API_VERSION: &str = "0.1.0";
/// A socket that does not accept at once belongs to a runtime that is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pulls are bounded by the caller's deadline. gRPC needs a timeout, so that a lost caller leaves no call behind.
const PULL_TIMEOUT: Duration = Duration::from_secs(86_400);
/// A hundred years. A pod may have a longer grace period, but neither gRPC nor a runtime can represent it.
const FOREVER_SECS: i64 = 100 * 365 * 86_400;
/// Events are hints that coalesce into looks; a reader further behind than this blocks the runtime's stream.
const EVENT_BACKLOG: usize = 64;

#[derive(Clone, Debug)]
pub struct CriClient {
    channel: Channel,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{endpoint}` is not a unix socket: expected unix:///path or an absolute path")]
pub struct EndpointError {
    endpoint: String,
}

impl CriClient {
    /// Does not connect yet. An empty `image_endpoint` means the runtime's endpoint. Must be called in a tokio runtime.
    pub fn new(runtime_endpoint: &str, image_endpoint: &str, timeout: Duration) -> Result<Self, EndpointError> {
        let runtime = channel(runtime_endpoint)?;
        let images = match image_endpoint {
            "" => runtime.clone(),
            endpoint if endpoint == runtime_endpoint => runtime.clone(),
            endpoint => channel(endpoint)?,
        };
        Ok(CriClient {
            channel: runtime.clone(),
            runtime: RuntimeServiceClient::new(runtime).max_decoding_message_size(MAX_MESSAGE_BYTES),
            images: ImageServiceClient::new(images).max_decoding_message_size(MAX_MESSAGE_BYTES),
            timeout,
        })
    }
}

/// The socket path of an endpoint.
pub fn socket_path(endpoint: &str) -> Result<&str, EndpointError> {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    if path.starts_with('/') { Ok(path) } else { Err(EndpointError { endpoint: endpoint.to_owned() }) }
}

fn channel(endpoint: &str) -> Result<Channel, EndpointError> {
    let path = socket_path(endpoint)?;
    let endpoint =
        Endpoint::from_shared(format!("unix://{path}")).map_err(|_| EndpointError { endpoint: endpoint.to_owned() })?;
    // containerd rejects requests whose authority is a path; upstream uses localhost as well.
    let origin = tonic::codegen::http::Uri::from_static("http://localhost");
    Ok(endpoint.origin(origin).connect_timeout(CONNECT_TIMEOUT).connect_lazy())
}

#[async_trait]
impl ContainerRuntime for CriClient {
    async fn version(&self) -> RpcResult<v1::VersionResponse> {
        let request = v1::VersionRequest { version: KUBE_RUNTIME_API_VERSION.to_owned() };
        let mut client = self.runtime.clone();
        let version = call("Version", self.timeout, request, |request| client.version(request)).await?;
        check_version(&version)?;
        Ok(version)
    }

    async fn status(&self) -> RpcResult<v1::StatusResponse> {
        let request = v1::StatusRequest { verbose: false };
        let mut client = self.runtime.clone();
        call("Status", self.timeout, request, |request| client.status(request)).await
    }

    async fn runtime_config(&self) -> RpcResult<v1::RuntimeConfigResponse> {
        let request = v1::RuntimeConfigRequest {};
        let mut client = self.runtime.clone();
        call("RuntimeConfig", self.timeout, request, |request| client.runtime_config(request)).await
    }

    async fn run_pod_sandbox(&self, config: &v1::PodSandboxConfig, runtime_handler: &str) -> RpcResult<String> {
        let request =
            v1::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: runtime_handler.to_owned() };
        let mut client = self.runtime.clone();
        // Network setup takes time: upstream doubles the limit for this call.
        let answer =
            call("RunPodSandbox", self.timeout.saturating_mul(2), request, |request| client.run_pod_sandbox(request))
                .await?;
        non_empty("RunPodSandbox", answer.pod_sandbox_id)
    }

    async fn stop_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()> {
        let request = v1::StopPodSandboxRequest { pod_sandbox_id: sandbox_id.to_owned() };
        let mut client = self.runtime.clone();
        call("StopPodSandbox", self.timeout, request, |request| client.stop_pod_sandbox(request)).await?;
        Ok(())
    }

    async fn remove_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()> {
        let request = v1::RemovePodSandboxRequest { pod_sandbox_id: sandbox_id.to_owned() };
        let mut client = self.runtime.clone();
        call("RemovePodSandbox", self.timeout, request, |request| client.remove_pod_sandbox(request)).await?;
        Ok(())
    }

    async fn pod_sandbox_status(&self, sandbox_id: &str) -> RpcResult<v1::PodSandboxStatus> {
        let request = v1::PodSandboxStatusRequest { pod_sandbox_id: sandbox_id.to_owned(), verbose: false };
        let mut client = self.runtime.clone();
        let answer =
            call("PodSandboxStatus", self.timeout, request, |request| client.pod_sandbox_status(request)).await?;
        answer.status.ok_or_else(|| incomplete("PodSandboxStatus"))
    }

    async fn pod_sandbox_info(&self, sandbox_id: &str) -> RpcResult<String> {
        let request = v1::PodSandboxStatusRequest { pod_sandbox_id: sandbox_id.to_owned(), verbose: true };
        let mut client = self.runtime.clone();
        let mut answer =
            call("PodSandboxStatus", self.timeout, request, |request| client.pod_sandbox_status(request)).await?;
        Ok(answer.info.remove("info").unwrap_or_default())
    }

    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> RpcResult<Vec<v1::PodSandbox>> {
        let request = v1::ListPodSandboxRequest { filter };
        let mut client = self.runtime.clone();
        let answer = call("ListPodSandbox", self.timeout, request, |request| client.list_pod_sandbox(request)).await?;
        Ok(answer.items)
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: &v1::ContainerConfig,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            config: Some(config.clone()),
            sandbox_config: Some(sandbox_config.clone()),
        };
        let mut client = self.runtime.clone();
        let answer = call("CreateContainer", self.timeout, request, |request| client.create_container(request)).await?;
        non_empty("CreateContainer", answer.container_id)
    }

    async fn start_container(&self, container_id: &str) -> RpcResult<()> {
        let request = v1::StartContainerRequest { container_id: container_id.to_owned() };
        let mut client = self.runtime.clone();
        call("StartContainer", self.timeout, request, |request| client.start_container(request)).await?;
        Ok(())
    }

    async fn stop_container(&self, container_id: &str, timeout_secs: i64) -> RpcResult<()> {
        let timeout_secs = timeout_secs.min(FOREVER_SECS);
        let request = v1::StopContainerRequest { container_id: container_id.to_owned(), timeout: timeout_secs };
        let grace = Duration::from_secs(u64::try_from(timeout_secs).unwrap_or(0));
        let mut client = self.runtime.clone();
        let deadline = self.timeout.saturating_add(grace);
        call("StopContainer", deadline, request, |request| client.stop_container(request)).await?;
        Ok(())
    }

    async fn remove_container(&self, container_id: &str) -> RpcResult<()> {
        let request = v1::RemoveContainerRequest { container_id: container_id.to_owned() };
        let mut client = self.runtime.clone();
        call("RemoveContainer", self.timeout, request, |request| client.remove_container(request)).await?;
        Ok(())
    }

    async fn reopen_container_log(&self, container_id: &str) -> RpcResult<()> {
        let request = v1::ReopenContainerLogRequest { container_id: container_id.to_owned() };
        let mut client = self.runtime.clone();
        call("ReopenContainerLog", self.timeout, request, |request| client.reopen_container_log(request)).await?;
        Ok(())
    }

    async fn delete_leftover_task(&self, container_id: &str) -> RpcResult<()> {
        containerd::delete_task(self.channel.clone(), container_id, self.timeout).await
    }

    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> RpcResult<Vec<v1::Container>> {
        let request = v1::ListContainersRequest { filter };
        let mut client = self.runtime.clone();
        let answer = call("ListContainers", self.timeout, request, |request| client.list_containers(request)).await?;
        Ok(answer.containers)
    }

    async fn container_status(&self, container_id: &str) -> RpcResult<v1::ContainerStatus> {
        let request = v1::ContainerStatusRequest { container_id: container_id.to_owned(), verbose: false };
        let mut client = self.runtime.clone();
        let answer = call("ContainerStatus", self.timeout, request, |request| client.container_status(request)).await?;
        answer.status.ok_or_else(|| incomplete("ContainerStatus"))
    }

    async fn list_container_stats(&self) -> RpcResult<Vec<v1::ContainerStats>> {
        let request = v1::ListContainerStatsRequest {};
        let mut client = self.runtime.clone();
        let answer =
            call("ListContainerStats", self.timeout, request, |request| client.list_container_stats(request)).await?;
        Ok(answer.stats)
    }

    async fn image_fs_info(&self) -> RpcResult<v1::ImageFsInfoResponse> {
        let request = v1::ImageFsInfoRequest {};
        let mut client = self.images.clone();
        call("ImageFsInfo", self.timeout, request, |request| client.image_fs_info(request)).await
    }

    async fn list_images(&self) -> RpcResult<Vec<v1::Image>> {
        let request = v1::ListImagesRequest { filter: None };
        let mut client = self.images.clone();
        let answer = call("ListImages", self.timeout, request, |request| client.list_images(request)).await?;
        Ok(answer.images)
    }

    async fn exec_sync(
        &self,
        container_id: &str,
        command: &[String],
        timeout: Duration,
        output_limit_bytes: Option<usize>,
    ) -> RpcResult<v1::ExecSyncResponse> {
        let timeout = timeout.min(Duration::from_secs(FOREVER_SECS.unsigned_abs()));
        let request = v1::ExecSyncRequest {
            container_id: container_id.to_owned(),
            cmd: command.to_vec(),
            timeout: i64::try_from(timeout.as_secs()).unwrap_or(FOREVER_SECS),
        };
        // The runtime enforces the command's timeout; ours is for a runtime that does not.
        let deadline = self.timeout.saturating_add(timeout);
        let Some(limit_bytes) = output_limit_bytes else {
            let mut client = self.runtime.clone();
            return call("ExecSync", deadline, request, |request| client.exec_sync(request)).await;
        };
        let mut client = RuntimeServiceClient::new(CutOutput { channel: self.channel.clone(), limit_bytes });
        call("ExecSync", deadline, request, |request| client.exec_sync(request)).await
    }

    async fn exec(&self, request: v1::ExecRequest) -> RpcResult<String> {
        let mut client = self.runtime.clone();
        let answer = call("Exec", self.timeout, request, |request| client.exec(request)).await?;
        non_empty("Exec", answer.url)
    }

    async fn attach(&self, request: v1::AttachRequest) -> RpcResult<String> {
        let mut client = self.runtime.clone();
        let answer = call("Attach", self.timeout, request, |request| client.attach(request)).await?;
        non_empty("Attach", answer.url)
    }

    async fn port_forward(&self, request: v1::PortForwardRequest) -> RpcResult<String> {
        let mut client = self.runtime.clone();
        let answer = call("PortForward", self.timeout, request, |request| client.port_forward(request)).await?;
        non_empty("PortForward", answer.url)
    }

    async fn checkpoint_container(&self, mut request: v1::CheckpointContainerRequest) -> RpcResult<()> {
        let asked = Duration::from_secs(request.timeout.clamp(0, FOREVER_SECS).unsigned_abs());
        let deadline = asked.max(self.timeout);
        request.timeout = i64::try_from(deadline.as_secs()).unwrap_or(FOREVER_SECS);
        let mut client = self.runtime.clone();
        call("CheckpointContainer", deadline, request, |request| client.checkpoint_container(request)).await.map(drop)
    }

    async fn image_status(&self, image: &v1::ImageSpec) -> RpcResult<Option<v1::Image>> {
        let request = v1::ImageStatusRequest { image: Some(image.clone()), verbose: false };
        let mut client = self.images.clone();
        let answer = call("ImageStatus", self.timeout, request, |request| client.image_status(request)).await?;
        match answer.image {
            Some(image) if image.id.is_empty() => Err(incomplete("ImageStatus")),
            image => Ok(image),
        }
    }

    async fn remove_image(&self, image: &v1::ImageSpec) -> RpcResult<()> {
        let request = v1::RemoveImageRequest { image: Some(image.clone()) };
        let mut client = self.images.clone();
        call("RemoveImage", self.timeout, request, |request| client.remove_image(request)).await.map(drop)
    }

    async fn pull_image(
        &self,
        image: &v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        let request =
            v1::PullImageRequest { image: Some(image.clone()), auth, sandbox_config: Some(sandbox_config.clone()) };
        let mut client = self.images.clone();
        let answer = call("PullImage", PULL_TIMEOUT, request, |request| client.pull_image(request)).await?;
        non_empty("PullImage", answer.image_ref)
    }

    async fn container_events(&self) -> RpcResult<mpsc::Receiver<v1::ContainerEventResponse>> {
        let (sender, receiver) = mpsc::channel(EVENT_BACKLOG);
        let (verdict_sender, verdict) = oneshot::channel();
        // The task ends when the receiver is dropped: by a caller that stops waiting here, or later by the reader.
        tokio::spawn(follow_events(self.runtime.clone(), sender, verdict_sender));
        match tokio::time::timeout(OPENING_VERDICT, verdict).await {
            Ok(Ok(Err(error))) => Err(error),
            // Open, or no error yet: a runtime sends the response head with the first event, perhaps hours later.
            Ok(Ok(Ok(()))) | Err(_) => Ok(receiver),
            Ok(Err(_gone)) => Err(incomplete(EVENTS)),
        }
    }
}

const EVENTS: &str = "GetContainerEvents";
/// A runtime without the call returns the error at once.
const OPENING_VERDICT: Duration = Duration::from_secs(1);

/// Ends with the stream, or when the receiver is gone; either way the channel and the stream close together.
async fn follow_events(
    mut client: RuntimeServiceClient<Channel>,
    sender: mpsc::Sender<v1::ContainerEventResponse>,
    verdict: oneshot::Sender<RpcResult<()>>,
) {
    // Cancel-safe: a call that is dropped with a closed channel has no reader.
    let opened = tokio::select! {
        biased;
        () = sender.closed() => return,
        opened = client.get_container_events(Request::new(v1::GetEventsRequest {})) => opened,
    };
    let mut stream = match opened {
        Ok(response) => response.into_inner(),
        Err(status) => {
            // A late result has no receiver; then the closed channel reports it.
            let _ = verdict.send(Err(error(EVENTS, status)));
            return;
        }
    };
    let _ = verdict.send(Ok(()));
    loop {
        // Cancel-safe: an event that is dropped with a closed channel has no reader.
        let event = tokio::select! {
            biased;
            () = sender.closed() => return,
            event = stream.message() => event,
        };
        let Ok(Some(event)) = event else { return };
        if sender.send(event).await.is_err() {
            return;
        }
    }
}

/// One unary call with a deadline that is sent to the runtime, and enforced here too.
async fn call<Ask, Answer, Call>(
    method: &'static str,
    timeout: Duration,
    message: Ask,
    send: impl FnOnce(Request<Ask>) -> Call,
) -> RpcResult<Answer>
where
    Call: Future<Output = Result<Response<Answer>, Status>>,
{
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    match tokio::time::timeout(timeout, send(request)).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(error(method, status)),
        Err(_elapsed) => {
            let message = format!("no answer within {} s", timeout.as_secs());
            Err(RpcError::new(method, RpcErrorKind::DeadlineExceeded, message))
        }
    }
}

fn error(method: &'static str, status: Status) -> RpcError {
    let kind = match status.code() {
        Code::Unavailable => RpcErrorKind::Unavailable,
        // tonic reports its own timeout as cancelled.
        Code::DeadlineExceeded | Code::Cancelled => RpcErrorKind::DeadlineExceeded,
        Code::NotFound => RpcErrorKind::NotFound,
        Code::AlreadyExists => RpcErrorKind::AlreadyExists,
        Code::Unimplemented => RpcErrorKind::Unimplemented,
        Code::InvalidArgument => RpcErrorKind::InvalidArgument,
        Code::FailedPrecondition => RpcErrorKind::FailedPrecondition,
        Code::Ok
        | Code::Unknown
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::OutOfRange
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => RpcErrorKind::Other,
    };
    let error = RpcError::new(method, kind, status.message());
    if status.source().is_some() { error.caused_by(TransportError(status)) } else { error }
}

/// A call that did not reach the runtime. Shown by its innermost cause: the layers between repeat the status's message.
#[derive(Debug)]
struct TransportError(Status);

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut innermost: &dyn Error = &self.0;
        while let Some(cause) = innermost.source() {
            innermost = cause;
        }
        fmt::Display::fmt(innermost, f)
    }
}

impl Error for TransportError {}

fn check_version(version: &v1::VersionResponse) -> RpcResult<()> {
    let message = if version.runtime_name.is_empty()
        || version.runtime_version.is_empty()
        || version.runtime_api_version.is_empty()
    {
        format!("not all fields are set in VersionResponse ({version:?})")
    } else if version.version != KUBE_RUNTIME_API_VERSION {
        "runtime api version is not supported".to_owned()
    } else {
        return Ok(());
    };
    Err(RpcError::new("Version", RpcErrorKind::Other, message))
}

fn non_empty(method: &'static str, id: String) -> RpcResult<String> {
    if id.is_empty() { Err(incomplete(method)) } else { Ok(id) }
}

fn incomplete(method: &'static str) -> RpcError {
    RpcError::new(method, RpcErrorKind::Other, "the runtime's answer lacks what was asked for")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_unix_sockets() {
        assert_eq!(socket_path("unix:///run/containerd/containerd.sock"), Ok("/run/containerd/containerd.sock"));
        assert_eq!(socket_path("/run/crio.sock"), Ok("/run/crio.sock"));
        for endpoint in ["", "tcp://127.0.0.1:1", "unix://run/x", "containerd.sock", "npipe:////./pipe/x"] {
            assert!(socket_path(endpoint).is_err(), "{endpoint}");
        }
    }

    #[test]
    fn other_cri_versions_are_rejected() {
        let version = v1::VersionResponse {
            version: "0.1.0".into(),
            runtime_name: "containerd".into(),
            runtime_version: "1".into(),
            runtime_api_version: "v1".into(),
        };
        assert!(check_version(&version).is_ok());
        assert!(check_version(&v1::VersionResponse { version: "0.2.0".into(), ..version.clone() }).is_err());
        assert!(check_version(&v1::VersionResponse { runtime_name: String::new(), ..version }).is_err());
    }

    #[tokio::test]
    async fn unbound_socket_is_unavailable() {
        let client = CriClient::new("/nonexistent/cri.sock", "", Duration::from_secs(2)).unwrap();
        let error = client.status().await.unwrap_err();
        assert_eq!((error.method, error.kind), ("Status", RpcErrorKind::Unavailable), "{error}");
        assert!(error.grpc_text().contains("No such file"), "{error}");
    }

    #[tokio::test]
    async fn more_time_than_can_be_counted_is_a_very_long_time() {
        let client = CriClient::new("/nonexistent/cri.sock", "", Duration::from_secs(2)).unwrap();
        let stopped = client.stop_container("c", i64::MAX).await;
        assert_eq!(stopped.unwrap_err().kind, RpcErrorKind::Unavailable);
        let ran = client.exec_sync("c", &["true".to_owned()], Duration::MAX, None).await;
        assert_eq!(ran.unwrap_err().kind, RpcErrorKind::Unavailable);
    }
}
