//! The CSI drivers that are registered on this node.
//!
//! Owns: the list, and the port that reaches the drivers. Never: decides who may register; its one writer is the plugin watcher.
//! Upstream: `csi.DriversStore`.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::watch;

use crate::{
    CsiClient, CsiError, CsiPlugins, CsiResult, DriverAddress, ExpandVolume, NodeCapabilities, NodeInfo, PublishVolume,
    StageVolume, VolumeStats,
};

/// Cheap to clone; all clones are the same list.
#[derive(Clone)]
pub struct Drivers {
    plugins: Arc<dyn CsiPlugins>,
    by_name: Arc<watch::Sender<BTreeMap<String, Driver>>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Of its Node service.
    pub socket: PathBuf,
    /// The highest version that it supports.
    pub version: String,
    /// What the driver calls this node.
    pub node_id: String,
    /// How many volumes it can have here; `None`: no limit.
    pub max_volumes: Option<i64>,
    /// Sorted by key.
    pub topology: BTreeMap<String, String>,
}

/// No driver, and the port over gRPC.
impl Default for Drivers {
    fn default() -> Self {
        Drivers::over(Arc::new(CsiClient::default()))
    }
}

impl fmt::Debug for Drivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drivers").field("by_name", &self.by_name).finish_non_exhaustive()
    }
}

impl Drivers {
    pub fn over(plugins: Arc<dyn CsiPlugins>) -> Self {
        Drivers { plugins, by_name: Arc::new(watch::Sender::new(BTreeMap::new())) }
    }

    /// The port, for plugins that are not registered yet.
    pub fn plugins(&self) -> &dyn CsiPlugins {
        &*self.plugins
    }

    pub fn get(&self, name: &str) -> Option<Driver> {
        self.by_name.borrow().get(name).cloned()
    }

    pub fn names(&self) -> Vec<String> {
        self.by_name.borrow().keys().cloned().collect()
    }

    /// Does not connect yet.
    pub fn client(&self, name: &str) -> CsiResult<Client> {
        let unknown =
            || CsiError::without_call(format!("driver name {name} not found in the list of registered CSI drivers"));
        let socket = self.by_name.borrow().get(name).map(|driver| driver.socket.clone()).ok_or_else(unknown)?;
        Ok(Client { plugins: self.plugins.clone(), address: DriverAddress { name: name.to_owned(), socket } })
    }

    /// Changes when a driver comes, goes or is replaced.
    pub fn subscribe(&self) -> watch::Receiver<BTreeMap<String, Driver>> {
        self.by_name.subscribe()
    }

    /// Replaces a driver of the same name.
    pub fn register(&self, name: &str, driver: Driver) {
        self.by_name.send_if_modified(|drivers| {
            let is_new = drivers.get(name) != Some(&driver);
            drivers.insert(name.to_owned(), driver);
            is_new
        });
    }

    pub fn unregister(&self, name: &str) {
        self.by_name.send_if_modified(|drivers| drivers.remove(name).is_some());
    }
}

/// The Node service of one registered driver: the port with the driver's address.
#[derive(Clone)]
pub struct Client {
    plugins: Arc<dyn CsiPlugins>,
    address: DriverAddress,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Client {
    pub async fn node_info(&self) -> CsiResult<NodeInfo> {
        self.plugins.node_info(&self.address).await
    }

    pub async fn capabilities(&self) -> CsiResult<NodeCapabilities> {
        self.plugins.capabilities(&self.address).await
    }

    pub async fn stage(&self, volume: StageVolume) -> CsiResult<()> {
        self.plugins.stage(&self.address, volume).await
    }

    pub async fn unstage(&self, handle: &str, staging_path: &Path) -> CsiResult<()> {
        self.plugins.unstage(&self.address, handle, staging_path).await
    }

    pub async fn publish(&self, volume: PublishVolume) -> CsiResult<()> {
        self.plugins.publish(&self.address, volume).await
    }

    pub async fn unpublish(&self, handle: &str, target_path: &Path) -> CsiResult<()> {
        self.plugins.unpublish(&self.address, handle, target_path).await
    }

    pub async fn stats(&self, handle: &str, volume_path: &Path, staging_path: Option<&Path>) -> CsiResult<VolumeStats> {
        self.plugins.stats(&self.address, handle, volume_path, staging_path).await
    }

    pub async fn expand(&self, volume: ExpandVolume) -> CsiResult<Option<i64>> {
        self.plugins.expand(&self.address, volume).await
    }
}
