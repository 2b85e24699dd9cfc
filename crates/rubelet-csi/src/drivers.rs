//! The CSI drivers that are registered on this node.
//!
//! Owns: the list, and the port that reaches the drivers. Never: decides who may register; its one writer is the plugin watcher.
//! Upstream: `csi.DriversStore`.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    CsiClient, CsiError, CsiPlugins, CsiResult, DriverAddress, ExpandVolume, NodeCapabilities, NodeInfo, PublishVolume,
    StageVolume, VolumeStats,
};

/// Cheap to clone; all clones are the same list.
#[derive(Clone)]
pub struct Drivers {
    plugins: Arc<dyn CsiPlugins>,
    /// The socket of each driver's Node service.
    sockets: Arc<Mutex<BTreeMap<String, PathBuf>>>,
}

/// No driver, and the port over gRPC.
impl Default for Drivers {
    fn default() -> Self {
        Drivers::over(Arc::new(CsiClient::default()))
    }
}

impl fmt::Debug for Drivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drivers").field("sockets", &*self.sockets()).finish_non_exhaustive()
    }
}

impl Drivers {
    pub fn over(plugins: Arc<dyn CsiPlugins>) -> Self {
        Drivers { plugins, sockets: Arc::default() }
    }

    /// The port, for plugins that are not registered yet.
    pub fn plugins(&self) -> &dyn CsiPlugins {
        &*self.plugins
    }

    /// Does not connect yet.
    pub fn client(&self, name: &str) -> CsiResult<Client> {
        let unknown =
            || CsiError::without_call(format!("driver name {name} not found in the list of registered CSI drivers"));
        let socket = self.sockets().get(name).cloned().ok_or_else(unknown)?;
        Ok(Client { plugins: self.plugins.clone(), address: DriverAddress { name: name.to_owned(), socket } })
    }

    /// Replaces a driver of the same name.
    pub fn register(&self, name: &str, socket: PathBuf) {
        self.sockets().insert(name.to_owned(), socket);
    }

    pub fn unregister(&self, name: &str) {
        self.sockets().remove(name);
    }

    fn sockets(&self) -> MutexGuard<'_, BTreeMap<String, PathBuf>> {
        // Each change is complete when the lock is given back.
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
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
