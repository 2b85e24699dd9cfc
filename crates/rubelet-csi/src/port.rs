//! The port to CSI plugins: registration and the Node service, one method per call in use.
//!
//! Owns: the calls and what of their answers is used. Never: retries, checks capabilities before a call.
//! Upstream: `csi.csiClient`; plugin registration's `RegistrationClient`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use async_trait::async_trait;

use crate::{CsiResult, ExpandVolume, PublishVolume, StageVolume, pluginregistration::PluginInfo};

/// Where a driver serves its Node service, and its name for metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverAddress {
    pub name: String,
    pub socket: PathBuf,
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

/// At least one of them is there.
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

/// Each call ends by a deadline of its own.
#[async_trait]
pub trait CsiPlugins: Send + Sync + 'static {
    /// GetInfo of the plugin whose registration socket this is.
    async fn plugin_info(&self, socket: &Path) -> CsiResult<PluginInfo>;
    /// NotifyRegistrationStatus. The error is shown to the plugin's owner: registrars log it and exit.
    async fn notify_registration(&self, socket: &Path, outcome: Result<(), String>) -> CsiResult<()>;

    async fn node_info(&self, driver: &DriverAddress) -> CsiResult<NodeInfo>;
    async fn capabilities(&self, driver: &DriverAddress) -> CsiResult<NodeCapabilities>;
    async fn stage(&self, driver: &DriverAddress, volume: StageVolume) -> CsiResult<()>;
    async fn unstage(&self, driver: &DriverAddress, handle: &str, staging_path: &Path) -> CsiResult<()>;
    async fn publish(&self, driver: &DriverAddress, volume: PublishVolume) -> CsiResult<()>;
    async fn unpublish(&self, driver: &DriverAddress, handle: &str, target_path: &Path) -> CsiResult<()>;
    async fn stats(
        &self,
        driver: &DriverAddress,
        handle: &str,
        volume_path: &Path,
        staging_path: Option<&Path>,
    ) -> CsiResult<VolumeStats>;
    /// The volume's size afterwards, if the driver says it.
    async fn expand(&self, driver: &DriverAddress, volume: ExpandVolume) -> CsiResult<Option<i64>>;
}
