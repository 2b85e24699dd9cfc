//! Durations of calls to CSI drivers.
//!
//! Owns: the names of the calls and of their results, which are gRPC's. A call cancelled before its response counts as cancelled.
//! Never: changes requests or responses. Calls of plugin registration are not counted, as upstream.
//! Upstream: `MetricsManager.RecordMetricsInterceptor` of `pkg/volume/csi`.

use std::{path::Path, sync::Arc};

use async_trait::async_trait;
use rubelet_core::time::Uptime;
use rubelet_csi::{
    Code, CsiPlugins, CsiResult, DriverAddress, ExpandVolume, NodeCapabilities, NodeInfo, PublishVolume, StageVolume,
    VolumeStats, pluginregistration::PluginInfo,
};

use super::Metrics;
use crate::world::Clock;

/// Plugins whose calls are counted.
pub(crate) struct InstrumentedPlugins {
    plugins: Arc<dyn CsiPlugins>,
    metrics: Arc<Metrics>,
    clock: Clock,
}

impl std::fmt::Debug for InstrumentedPlugins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InstrumentedPlugins").finish_non_exhaustive()
    }
}

impl InstrumentedPlugins {
    pub(crate) fn new(plugins: Arc<dyn CsiPlugins>, metrics: Arc<Metrics>, clock: Clock) -> Self {
        InstrumentedPlugins { plugins, metrics, clock }
    }

    async fn timed<T>(
        &self,
        driver: &DriverAddress,
        method: &'static str,
        call: impl Future<Output = CsiResult<T>>,
    ) -> CsiResult<T> {
        let began = self.clock.now().uptime;
        let mut timer = CallTimer { measured: self, driver, method, began, code: Code::Canceled.name() };
        let answer = call.await;
        timer.code = match &answer {
            Ok(_) => "OK",
            // The driver answered; the answer was of no use.
            Err(error) => error.code.map_or("OK", Code::name),
        };
        answer
    }
}

/// Records the call when dropped, with or without a response.
struct CallTimer<'a> {
    measured: &'a InstrumentedPlugins,
    driver: &'a DriverAddress,
    method: &'static str,
    began: Uptime,
    code: &'static str,
}

impl Drop for CallTimer<'_> {
    fn drop(&mut self) {
        let took = self.measured.clock.now().uptime.since(self.began);
        let labels = [self.driver.name.as_str(), self.method, self.code, "false"];
        self.measured.metrics.storage.calls.observe(labels, took.as_secs_f64());
    }
}

#[async_trait]
impl CsiPlugins for InstrumentedPlugins {
    async fn plugin_info(&self, socket: &Path) -> CsiResult<PluginInfo> {
        self.plugins.plugin_info(socket).await
    }

    async fn notify_registration(&self, socket: &Path, outcome: Result<(), String>) -> CsiResult<()> {
        self.plugins.notify_registration(socket, outcome).await
    }

    async fn node_info(&self, driver: &DriverAddress) -> CsiResult<NodeInfo> {
        self.timed(driver, "/csi.v1.Node/NodeGetInfo", self.plugins.node_info(driver)).await
    }

    async fn capabilities(&self, driver: &DriverAddress) -> CsiResult<NodeCapabilities> {
        self.timed(driver, "/csi.v1.Node/NodeGetCapabilities", self.plugins.capabilities(driver)).await
    }

    async fn stage(&self, driver: &DriverAddress, volume: StageVolume) -> CsiResult<()> {
        self.timed(driver, "/csi.v1.Node/NodeStageVolume", self.plugins.stage(driver, volume)).await
    }

    async fn unstage(&self, driver: &DriverAddress, handle: &str, staging_path: &Path) -> CsiResult<()> {
        let call = self.plugins.unstage(driver, handle, staging_path);
        self.timed(driver, "/csi.v1.Node/NodeUnstageVolume", call).await
    }

    async fn publish(&self, driver: &DriverAddress, volume: PublishVolume) -> CsiResult<()> {
        self.timed(driver, "/csi.v1.Node/NodePublishVolume", self.plugins.publish(driver, volume)).await
    }

    async fn unpublish(&self, driver: &DriverAddress, handle: &str, target_path: &Path) -> CsiResult<()> {
        let call = self.plugins.unpublish(driver, handle, target_path);
        self.timed(driver, "/csi.v1.Node/NodeUnpublishVolume", call).await
    }

    async fn stats(
        &self,
        driver: &DriverAddress,
        handle: &str,
        volume_path: &Path,
        staging_path: Option<&Path>,
    ) -> CsiResult<VolumeStats> {
        let call = self.plugins.stats(driver, handle, volume_path, staging_path);
        self.timed(driver, "/csi.v1.Node/NodeGetVolumeStats", call).await
    }

    async fn expand(&self, driver: &DriverAddress, volume: ExpandVolume) -> CsiResult<Option<i64>> {
        self.timed(driver, "/csi.v1.Node/NodeExpandVolume", self.plugins.expand(driver, volume)).await
    }
}
