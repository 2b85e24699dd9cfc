//! How many volumes a driver can have on this node, as long as it is registered.
//!
//! Owns: the watch of the driver's CSIDriver object, the ticker that the object asks for, and the update of CSINode. A driver
//! whose object names no period is never asked again. Never: decides the content of CSINode (`rubelet_core::csi_node`).
//! Upstream: `csi_node_updater.go`, `updateCSIDriver`.

use std::time::Duration;

use k8s_openapi::api::storage::v1::CSIDriver;
use rubelet_core::{csi_node, fnv::fnv32a, time::Uptime};
use rubelet_kube::{
    port::ObjectPath,
    reflector::{self, Delta, Selection},
};
use tokio::{sync::mpsc, time::timeout};

use super::driver_on_node;
use crate::{node::csi_node::CsiNodeWriter, world::World};

/// Changes of one object are rare, and each is applied at once.
const BACKLOG: usize = 1;

/// Runs until it is dropped.
pub(super) async fn keep_updated(world: &World, csi_node: &CsiNodeWriter, driver: &str) {
    let collection = ObjectPath::all("storage.k8s.io/v1", "csidrivers");
    let selection = Selection { collection, fields: Some(format!("metadata.name={driver}")) };
    let seed = fnv32a(format!("{}/limit/{driver}", world.settings.node_name).as_bytes());
    let (sender, changes) = mpsc::channel(BACKLOG);
    tokio::select! {
        biased;
        // Neither ends while the other runs.
        () = update_when_due(world, csi_node, driver, changes) => {}
        () = reflector::follow(csi_node.api(), &selection, seed.into(), &sender) => {}
    }
}

async fn update_when_due(world: &World, csi_node: &CsiNodeWriter, driver: &str, mut changes: mpsc::Receiver<Delta>) {
    let clock = &world.clock;
    let mut ticker: Option<(Duration, Uptime)> = None;
    loop {
        let change = match ticker {
            None => changes.recv().await,
            // Cancel-safe: a change that was not received stays in the channel.
            Some((period, at)) => match timeout(at.since(clock.now().uptime), changes.recv()).await {
                Ok(change) => change,
                Err(_elapsed) => {
                    update(world, csi_node, driver).await;
                    ticker = Some((period, clock.now().uptime + period));
                    continue;
                }
            },
        };
        let Some(change) = change else { return };
        let period = period_after(driver, change);
        if period != ticker.map(|(period, _)| period) {
            ticker = period.map(|period| (period, clock.now().uptime + period));
        }
    }
}

fn period_after(driver: &str, change: Delta) -> Option<Duration> {
    let body = match change {
        Delta::Replaced(objects) => objects.into_iter().next(),
        Delta::Applied(object) => Some(object),
        Delta::Deleted(_) => None,
    }?;
    match serde_json::from_slice::<CSIDriver>(&body) {
        Ok(object) => csi_node::update_period(&object),
        Err(error) => {
            tracing::warn!(driver, "failed to decode CSIDriver: {error}");
            None
        }
    }
}

/// Asks the driver about this node, and writes the answer. A failure is repeated when the next update is due.
pub(crate) async fn update(world: &World, csi_node: &CsiNodeWriter, driver: &str) {
    if let Err(why) = try_update(world, csi_node, driver).await {
        tracing::warn!(driver, "failed to update CSINode: {why}");
    }
}

async fn try_update(world: &World, csi_node: &CsiNodeWriter, driver: &str) -> Result<(), String> {
    let client = world.csi.client(driver).map_err(|error| error.to_string())?;
    let info = client.node_info().await.map_err(|error| error.to_string())?;
    csi_node.update(&driver_on_node(driver, info)).await.map_err(|error| error.to_string())
}
