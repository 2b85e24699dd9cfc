//! The client of a driver's Node service.
//!
//! Owns: the calls, their deadline, what of the answers is used. Never: retries, checks capabilities before a call.
//! Upstream: `csi.csiDriverClient`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use tonic::{Request, Response, Status, transport::Channel};

use crate::{
    CsiError, CsiResult, ExpandVolume, PublishVolume, StageVolume,
    request::{optional, text},
    socket::{MAX_MESSAGE_BYTES, call},
    v1::{self, node_client::NodeClient, node_service_capability, volume_usage::Unit},
};

/// Of every call: upstream's `csiTimeout`.
pub const CALL_TIMEOUT: Duration = Duration::from_mins(2);

/// Makes a connection per call.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

/// What a driver says of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    pub node_id: String,
    /// `None`: no limit.
    pub max_volumes: Option<i64>,
    pub topology: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCapabilities {
    pub stage_unstage: bool,
    pub volume_stats: bool,
    pub expand: bool,
    pub volume_condition: bool,
    pub single_node_multi_writer: bool,
    pub volume_mount_group: bool,
}

/// At least one of `bytes` and `inodes` is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStats {
    pub bytes: Option<VolumeUsage>,
    pub inodes: Option<VolumeUsage>,
    pub condition: Option<VolumeCondition>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeUsage {
    pub available: i64,
    pub total: i64,
    pub used: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeCondition {
    pub is_abnormal: bool,
    pub message: String,
}

impl Client {
    /// Does not connect yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Client { socket: socket.into(), timeout: CALL_TIMEOUT }
    }

    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Client { timeout, ..self }
    }

    pub async fn node_info(&self) -> CsiResult<NodeInfo> {
        let info = self
            .call(v1::NodeGetInfoRequest {}, |mut node, request| async move { node.node_get_info(request).await })
            .await?;
        Ok(NodeInfo {
            node_id: info.node_id,
            max_volumes: Some(info.max_volumes_per_node).filter(|count| *count > 0),
            topology: info.accessible_topology.unwrap_or_default().segments,
        })
    }

    pub async fn capabilities(&self) -> CsiResult<NodeCapabilities> {
        let answer = self
            .call(v1::NodeGetCapabilitiesRequest {}, |mut node, request| async move {
                node.node_get_capabilities(request).await
            })
            .await?;
        Ok(NodeCapabilities::of(&answer))
    }

    pub async fn stage(&self, volume: StageVolume) -> CsiResult<()> {
        self.call(volume.into_message(), |mut node, request| async move { node.node_stage_volume(request).await })
            .await?;
        Ok(())
    }

    pub async fn unstage(&self, handle: &str, staging_path: &Path) -> CsiResult<()> {
        let request =
            v1::NodeUnstageVolumeRequest { volume_id: handle.to_owned(), staging_target_path: text(staging_path) };
        self.call(request, |mut node, request| async move { node.node_unstage_volume(request).await }).await?;
        Ok(())
    }

    pub async fn publish(&self, volume: PublishVolume) -> CsiResult<()> {
        self.call(volume.into_message(), |mut node, request| async move { node.node_publish_volume(request).await })
            .await?;
        Ok(())
    }

    pub async fn unpublish(&self, handle: &str, target_path: &Path) -> CsiResult<()> {
        let request = v1::NodeUnpublishVolumeRequest { volume_id: handle.to_owned(), target_path: text(target_path) };
        self.call(request, |mut node, request| async move { node.node_unpublish_volume(request).await }).await?;
        Ok(())
    }

    pub async fn stats(&self, handle: &str, volume_path: &Path, staging_path: Option<&Path>) -> CsiResult<VolumeStats> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: handle.to_owned(),
            volume_path: text(volume_path),
            staging_target_path: optional(staging_path),
        };
        let answer =
            self.call(request, |mut node, request| async move { node.node_get_volume_stats(request).await }).await?;
        VolumeStats::of(answer)
    }

    /// The volume's size afterwards, if the driver says it.
    pub async fn expand(&self, volume: ExpandVolume) -> CsiResult<Option<i64>> {
        let answer = self
            .call(volume.into_message(), |mut node, request| async move { node.node_expand_volume(request).await })
            .await?;
        Ok(Some(answer.capacity_bytes).filter(|bytes| *bytes > 0))
    }

    async fn call<Ask, Answer, Call>(
        &self,
        message: Ask,
        send: impl FnOnce(NodeClient<Channel>, Request<Ask>) -> Call,
    ) -> CsiResult<Answer>
    where
        Call: Future<Output = Result<Response<Answer>, Status>>,
    {
        call(&self.socket, self.timeout, message, |channel, request| {
            send(NodeClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES), request)
        })
        .await
    }
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
        if answer.usage.is_empty() {
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
        if stats.bytes.is_none() && stats.inodes.is_none() {
            return Err(CsiError::without_call("unknown key UNKNOWN in usage"));
        }
        Ok(stats)
    }
}
