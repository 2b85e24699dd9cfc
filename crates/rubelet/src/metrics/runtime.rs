//! Counts and durations of calls to the container runtime.
//!
//! Owns: the operation names, which are upstream's. A call cancelled before its response counts as an error.
//! Never: changes requests or responses.
//! Upstream: `kuberuntime/instrumented_services.go`.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use rubelet_core::time::Uptime;
use rubelet_cri::{
    port::{ContainerRuntime, RpcResult},
    v1,
};
use tokio::sync::mpsc;

use super::{
    Metrics,
    family::{Counters, DEFAULT_BOUNDS, Histograms},
    text::Text,
};
use crate::world::Clock;

const OPERATION_BOUNDS: &[f64] = &[
    0.005,
    0.0125,
    0.03125,
    0.078125,
    0.1953125,
    0.48828125,
    1.220703125,
    3.0517578125,
    7.62939453125,
    19.073486328125,
    47.6837158203125,
    119.20928955078125,
    298.0232238769531,
    745.0580596923828,
];

#[derive(Debug)]
pub struct RuntimeMetrics {
    total: Counters<1>,
    errors: Counters<1>,
    duration: Histograms<1>,
    sandbox_duration: Histograms<1>,
    sandbox_errors: Counters<1>,
}

impl RuntimeMetrics {
    pub(super) fn new() -> Self {
        RuntimeMetrics {
            total: Counters::new(
                "kubelet_runtime_operations_total",
                ["operation_type"],
                "[ALPHA] Cumulative number of runtime operations by operation type.",
            ),
            errors: Counters::new(
                "kubelet_runtime_operations_errors_total",
                ["operation_type"],
                "[ALPHA] Cumulative number of runtime operation errors by operation type.",
            ),
            duration: Histograms::new(
                "kubelet_runtime_operations_duration_seconds",
                ["operation_type"],
                OPERATION_BOUNDS,
                "[ALPHA] Duration in seconds of runtime operations. Broken down by operation type.",
            ),
            sandbox_duration: Histograms::new(
                "kubelet_run_podsandbox_duration_seconds",
                ["runtime_handler"],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds of the run_podsandbox operations. Broken down by RuntimeClass.Handler.",
            ),
            sandbox_errors: Counters::new(
                "kubelet_run_podsandbox_errors_total",
                ["runtime_handler"],
                "[ALPHA] Cumulative number of the run_podsandbox operation errors by RuntimeClass.Handler.",
            ),
        }
    }

    pub fn write(&self, text: &mut Text) {
        self.total.write(text);
        self.errors.write(text);
        self.duration.write(text);
        self.sandbox_duration.write(text);
        self.sandbox_errors.write(text);
    }
}

/// A runtime whose calls are counted.
pub(crate) struct InstrumentedRuntime {
    runtime: Arc<dyn ContainerRuntime>,
    metrics: Arc<Metrics>,
    clock: Clock,
}

impl std::fmt::Debug for InstrumentedRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InstrumentedRuntime").finish_non_exhaustive()
    }
}

impl InstrumentedRuntime {
    pub(crate) fn new(runtime: Arc<dyn ContainerRuntime>, metrics: Arc<Metrics>, clock: Clock) -> Self {
        InstrumentedRuntime { runtime, metrics, clock }
    }

    async fn timed<T>(&self, operation: &'static str, call: impl Future<Output = RpcResult<T>>) -> RpcResult<T> {
        let mut timer = CallTimer { measured: self, operation, began: self.clock.now().uptime, has_failed: true };
        let answer = call.await;
        timer.has_failed = answer.is_err();
        answer
    }
}

/// Records the call when dropped, with or without a response.
struct CallTimer<'a> {
    measured: &'a InstrumentedRuntime,
    operation: &'static str,
    began: Uptime,
    has_failed: bool,
}

impl Drop for CallTimer<'_> {
    fn drop(&mut self) {
        let (labels, calls) = ([self.operation], &self.measured.metrics.runtime);
        let took = self.measured.clock.now().uptime.since(self.began);
        calls.total.inc(labels);
        calls.duration.observe(labels, took.as_secs_f64());
        if self.has_failed {
            calls.errors.inc(labels);
        }
    }
}

#[async_trait]
impl ContainerRuntime for InstrumentedRuntime {
    async fn version(&self) -> RpcResult<v1::VersionResponse> {
        self.timed("version", self.runtime.version()).await
    }

    async fn status(&self) -> RpcResult<v1::StatusResponse> {
        self.timed("status", self.runtime.status()).await
    }

    async fn runtime_config(&self) -> RpcResult<v1::RuntimeConfigResponse> {
        self.timed("runtime_config", self.runtime.runtime_config()).await
    }

    async fn run_pod_sandbox(&self, config: &v1::PodSandboxConfig, runtime_handler: &str) -> RpcResult<String> {
        let began = self.clock.now().uptime;
        let answer = self.timed("run_podsandbox", self.runtime.run_pod_sandbox(config, runtime_handler)).await;
        let (calls, took) = (&self.metrics.runtime, self.clock.now().uptime.since(began));
        calls.sandbox_duration.observe([runtime_handler], took.as_secs_f64());
        if answer.is_err() {
            calls.sandbox_errors.inc([runtime_handler]);
        }
        answer
    }

    async fn stop_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()> {
        self.timed("stop_podsandbox", self.runtime.stop_pod_sandbox(sandbox_id)).await
    }

    async fn remove_pod_sandbox(&self, sandbox_id: &str) -> RpcResult<()> {
        self.timed("remove_podsandbox", self.runtime.remove_pod_sandbox(sandbox_id)).await
    }

    async fn pod_sandbox_status(&self, sandbox_id: &str) -> RpcResult<v1::PodSandboxStatus> {
        self.timed("podsandbox_status", self.runtime.pod_sandbox_status(sandbox_id)).await
    }

    async fn pod_sandbox_info(&self, sandbox_id: &str) -> RpcResult<String> {
        self.timed("podsandbox_status", self.runtime.pod_sandbox_info(sandbox_id)).await
    }

    async fn list_pod_sandbox(&self, filter: Option<v1::PodSandboxFilter>) -> RpcResult<Vec<v1::PodSandbox>> {
        self.timed("list_podsandbox", self.runtime.list_pod_sandbox(filter)).await
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: &v1::ContainerConfig,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        self.timed("create_container", self.runtime.create_container(sandbox_id, config, sandbox_config)).await
    }

    async fn start_container(&self, container_id: &str) -> RpcResult<()> {
        self.timed("start_container", self.runtime.start_container(container_id)).await
    }

    async fn stop_container(&self, container_id: &str, timeout_secs: i64) -> RpcResult<()> {
        self.timed("stop_container", self.runtime.stop_container(container_id, timeout_secs)).await
    }

    async fn remove_container(&self, container_id: &str) -> RpcResult<()> {
        self.timed("remove_container", self.runtime.remove_container(container_id)).await
    }

    async fn reopen_container_log(&self, container_id: &str) -> RpcResult<()> {
        self.timed("reopen_container_log", self.runtime.reopen_container_log(container_id)).await
    }

    /// Upstream has no such call, and so no name for it in the metrics.
    async fn delete_leftover_task(&self, container_id: &str) -> RpcResult<()> {
        self.runtime.delete_leftover_task(container_id).await
    }

    async fn list_containers(&self, filter: Option<v1::ContainerFilter>) -> RpcResult<Vec<v1::Container>> {
        self.timed("list_containers", self.runtime.list_containers(filter)).await
    }

    async fn container_status(&self, container_id: &str) -> RpcResult<v1::ContainerStatus> {
        self.timed("container_status", self.runtime.container_status(container_id)).await
    }

    async fn exec_sync(
        &self,
        container_id: &str,
        command: &[String],
        timeout: Duration,
        output_limit_bytes: Option<usize>,
    ) -> RpcResult<v1::ExecSyncResponse> {
        self.timed("exec_sync", self.runtime.exec_sync(container_id, command, timeout, output_limit_bytes)).await
    }

    async fn exec(&self, request: v1::ExecRequest) -> RpcResult<String> {
        self.timed("exec", self.runtime.exec(request)).await
    }

    async fn attach(&self, request: v1::AttachRequest) -> RpcResult<String> {
        self.timed("attach", self.runtime.attach(request)).await
    }

    async fn port_forward(&self, request: v1::PortForwardRequest) -> RpcResult<String> {
        self.timed("port_forward", self.runtime.port_forward(request)).await
    }

    async fn list_container_stats(&self) -> RpcResult<Vec<v1::ContainerStats>> {
        self.timed("list_container_stats", self.runtime.list_container_stats()).await
    }

    async fn image_fs_info(&self) -> RpcResult<v1::ImageFsInfoResponse> {
        self.timed("image_fs_info", self.runtime.image_fs_info()).await
    }

    async fn checkpoint_container(&self, request: v1::CheckpointContainerRequest) -> RpcResult<()> {
        self.timed("checkpoint_container", self.runtime.checkpoint_container(request)).await
    }

    async fn list_images(&self) -> RpcResult<Vec<v1::Image>> {
        self.timed("list_images", self.runtime.list_images()).await
    }

    async fn remove_image(&self, image: &v1::ImageSpec) -> RpcResult<()> {
        self.timed("remove_image", self.runtime.remove_image(image)).await
    }

    async fn image_status(&self, image: &v1::ImageSpec) -> RpcResult<Option<v1::Image>> {
        self.timed("image_status", self.runtime.image_status(image)).await
    }

    async fn pull_image(
        &self,
        image: &v1::ImageSpec,
        auth: Option<v1::AuthConfig>,
        sandbox_config: &v1::PodSandboxConfig,
    ) -> RpcResult<String> {
        self.timed("pull_image", self.runtime.pull_image(image, auth, sandbox_config)).await
    }

    async fn container_events(&self) -> RpcResult<mpsc::Receiver<v1::ContainerEventResponse>> {
        self.timed("get_container_events", self.runtime.container_events()).await
    }
}
