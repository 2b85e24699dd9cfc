//! The CSI drivers that are registered on this node.
//!
//! Owns: the list. Never: decides who may register; its one writer is the plugin watcher.
//! Upstream: `csi.DriversStore`.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use tokio::sync::watch;

use crate::{Client, CsiError, CsiResult};

/// Cheap to clone; all clones are the same list.
#[derive(Clone, Debug)]
pub struct Drivers {
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

impl Default for Drivers {
    fn default() -> Self {
        Drivers { by_name: Arc::new(watch::Sender::new(BTreeMap::new())) }
    }
}

impl Drivers {
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
        self.by_name.borrow().get(name).map(|driver| Client::new(&driver.socket)).ok_or_else(unknown)
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
