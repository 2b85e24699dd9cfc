//! The port over gRPC on the plugins' unix sockets.
//!
//! Owns: the calls' deadlines, what of the answers is used. Never: retries, checks capabilities before a call.
//! Upstream: `csi.csiDriverClient`, `pluginmanager/operationexecutor`.

use std::{path::Path, time::Duration};

use async_trait::async_trait;
use tonic::{Request, Response, Status, transport::Channel};

use crate::{
    CsiError, CsiResult, ExpandVolume, PublishVolume, StageVolume,
    pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus, registration_client::RegistrationClient},
    port::{CsiPlugins, DriverAddress, NodeCapabilities, NodeInfo, VolumeCondition, VolumeStats, VolumeUsage},
    request::{optional, text},
    socket::{MAX_MESSAGE_BYTES, call},
    v1::{self, node_client::NodeClient, node_service_capability, volume_usage::Unit},
};

/// Of every call of the Node service: upstream's `csiTimeout`.
pub const CALL_TIMEOUT: Duration = Duration::from_mins(2);
/// Upstream's.
const INFO_TIMEOUT: Duration = Duration::from_secs(1);
/// Upstream's.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes a connection per call.
#[derive(Clone, Debug)]
pub struct CsiClient {
    timeout: Duration,
}

impl Default for CsiClient {
    fn default() -> Self {
        CsiClient { timeout: CALL_TIMEOUT }
    }
}

#[async_trait]
impl CsiPlugins for CsiClient {
    async fn plugin_info(&self, socket: &Path) -> CsiResult<PluginInfo> {
        call(socket, INFO_TIMEOUT, InfoRequest {}, |channel, request| async move {
            registration(channel).get_info(request).await
        })
        .await
    }

    async fn notify_registration(&self, socket: &Path, outcome: Result<(), String>) -> CsiResult<()> {
        let status =
            RegistrationStatus { plugin_registered: outcome.is_ok(), error: outcome.err().unwrap_or_default() };
        call(socket, NOTIFY_TIMEOUT, status, |channel, request| async move {
            registration(channel).notify_registration_status(request).await
        })
        .await?;
        Ok(())
    }

    async fn node_info(&self, driver: &DriverAddress) -> CsiResult<NodeInfo> {
        let info =
            self.call(driver, v1::NodeGetInfoRequest {}, |mut node, request| async move {
                node.node_get_info(request).await
            })
            .await?;
        Ok(NodeInfo {
            node_id: info.node_id,
            max_volumes: Some(info.max_volumes_per_node).filter(|count| *count > 0),
            topology: info.accessible_topology.unwrap_or_default().segments,
        })
    }

    async fn capabilities(&self, driver: &DriverAddress) -> CsiResult<NodeCapabilities> {
        let answer = self
            .call(driver, v1::NodeGetCapabilitiesRequest {}, |mut node, request| async move {
                node.node_get_capabilities(request).await
            })
            .await?;
        Ok(NodeCapabilities::of(&answer))
    }

    async fn stage(&self, driver: &DriverAddress, volume: StageVolume) -> CsiResult<()> {
        let request = volume.into_message();
        self.call(driver, request, |mut node, request| async move { node.node_stage_volume(request).await }).await?;
        Ok(())
    }

    async fn unstage(&self, driver: &DriverAddress, handle: &str, staging_path: &Path) -> CsiResult<()> {
        let request =
            v1::NodeUnstageVolumeRequest { volume_id: handle.to_owned(), staging_target_path: text(staging_path) };
        self.call(driver, request, |mut node, request| async move { node.node_unstage_volume(request).await }).await?;
        Ok(())
    }

    async fn publish(&self, driver: &DriverAddress, volume: PublishVolume) -> CsiResult<()> {
        let request = volume.into_message();
        self.call(driver, request, |mut node, request| async move { node.node_publish_volume(request).await }).await?;
        Ok(())
    }

    async fn unpublish(&self, driver: &DriverAddress, handle: &str, target_path: &Path) -> CsiResult<()> {
        let request = v1::NodeUnpublishVolumeRequest { volume_id: handle.to_owned(), target_path: text(target_path) };
        self.call(driver, request, |mut node, request| async move { node.node_unpublish_volume(request).await })
            .await?;
        Ok(())
    }

    async fn stats(
        &self,
        driver: &DriverAddress,
        handle: &str,
        volume_path: &Path,
        staging_path: Option<&Path>,
    ) -> CsiResult<VolumeStats> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: handle.to_owned(),
            volume_path: text(volume_path),
            staging_target_path: optional(staging_path),
        };
        let answer = self
            .call(driver, request, |mut node, request| async move { node.node_get_volume_stats(request).await })
            .await?;
        VolumeStats::of(answer)
    }

    async fn expand(&self, driver: &DriverAddress, volume: ExpandVolume) -> CsiResult<Option<i64>> {
        let request = volume.into_message();
        let answer = self
            .call(driver, request, |mut node, request| async move { node.node_expand_volume(request).await })
            .await?;
        Ok(Some(answer.capacity_bytes).filter(|bytes| *bytes > 0))
    }
}

impl CsiClient {
    #[cfg(test)]
    pub(crate) fn with_timeout(timeout: Duration) -> Self {
        CsiClient { timeout }
    }

    async fn call<Ask, Answer, Call>(
        &self,
        driver: &DriverAddress,
        message: Ask,
        send: impl FnOnce(NodeClient<Channel>, Request<Ask>) -> Call,
    ) -> CsiResult<Answer>
    where
        Call: Future<Output = Result<Response<Answer>, Status>>,
    {
        call(&driver.socket, self.timeout, message, |channel, request| {
            send(NodeClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES), request)
        })
        .await
    }
}

fn registration(channel: Channel) -> RegistrationClient<Channel> {
    RegistrationClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

impl NodeCapabilities {
    /// Capabilities that are newer than this client are ignored.
    fn of(answer: &v1::NodeGetCapabilitiesResponse) -> Self {
        use node_service_capability::{Type, rpc};
        let mut found = NodeCapabilities::default();
        for capability in &answer.capabilities {
            let Some(Type::Rpc(call)) = &capability.r#type else { continue };
            match call.r#type() {
                rpc::Type::StageUnstageVolume => found.stage_unstage = true,
                rpc::Type::GetVolumeStats => found.volume_stats = true,
                rpc::Type::ExpandVolume => found.expand = true,
                rpc::Type::VolumeCondition => found.volume_condition = true,
                rpc::Type::SingleNodeMultiWriter => found.single_node_multi_writer = true,
                rpc::Type::VolumeMountGroup => found.volume_mount_group = true,
                rpc::Type::Unknown => {}
            }
        }
        found
    }
}

impl VolumeStats {
    fn of(answer: v1::NodeGetVolumeStatsResponse) -> CsiResult<Self> {
        if answer.usage.is_empty() && answer.volume_condition.is_none() {
            return Err(CsiError::without_call("failed to get usage from response. usage is nil"));
        }
        let condition = answer
            .volume_condition
            .map(|condition| VolumeCondition { is_abnormal: condition.abnormal, message: condition.message });
        let mut stats = VolumeStats { bytes: None, inodes: None, condition };
        for usage in &answer.usage {
            let shown = VolumeUsage { available: usage.available, total: usage.total, used: usage.used };
            match usage.unit() {
                Unit::Bytes => stats.bytes = Some(shown),
                Unit::Inodes => stats.inodes = Some(shown),
                Unit::Unknown => {}
            }
        }
        if stats.bytes.is_none() && stats.inodes.is_none() && stats.condition.is_none() {
            return Err(CsiError::without_call("unknown key UNKNOWN in usage"));
        }
        Ok(stats)
    }
}
