//! Hints of the kernel that memory runs short, between two looks at the node.
//!
//! Owns: which usages are watched: those at which a threshold of memory would be crossed, as of the last look. Never: measures,
//! decides; a hint only brings the next look forward.
//! Upstream: `memory_threshold_notifier_others.go` (`kernelMemcgNotification`), off by default there and without effect on
//! cgroup version 2.

use std::{sync::Arc, time::Duration};

use rubelet_core::{
    cgroups::CgroupTree,
    event::Event,
    eviction::threshold::{Resource, Signal},
    snapshot::{EvictionView, Snapshot},
};
use rubelet_host::memory_events::{MemoryStalls, UsageCrossing};
use tokio::sync::{mpsc, watch};

use crate::world::World;

/// The shortest time between two hints: more would only repeat the first.
const PAUSE: Duration = Duration::from_millis(200);

/// Runs as long as the agent.
pub async fn watch(world: World, mut snapshots: watch::Receiver<Arc<Snapshot>>, inbox: mpsc::Sender<Event>) {
    let mut stalls =
        MemoryStalls::open().map_err(|error| tracing::info!(%error, "no stalls of memory are reported")).ok();
    let mut seen: Arc<EvictionView> = Arc::default();
    let mut crossings: Vec<UsageCrossing> = Vec::new();
    loop {
        let is_new = |snapshot: &Arc<Snapshot>| !Arc::ptr_eq(&snapshot.eviction, &seen);
        tokio::select! {
            biased;
            // Cancel-safe: a report that is not taken stays with the kernel.
            () = stall(&mut stalls) => {}
            () = crossed(&mut crossings) => tracing::debug!("the memory of a threshold is in use"),
            // Cancel-safe: waiting for a value takes nothing away.
            changed = snapshots.wait_for(is_new) => {
                let Ok(snapshot) = changed else { return };
                let snapshot = snapshot.clone();
                crossings = armed(&world, &snapshot);
                seen = snapshot.eviction.clone();
                continue;
            }
        }
        if inbox.send(Event::MemoryShort).await.is_err() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Never, if the kernel does not report it.
async fn stall(stalls: &mut Option<MemoryStalls>) {
    let failed = match stalls {
        Some(stalls) => stalls.next().await.is_err(),
        None => std::future::pending().await,
    };
    match failed {
        true => *stalls = None,
        false => tracing::debug!("tasks waited for memory"),
    }
}

/// The first of them, if there is one.
async fn crossed(crossings: &mut Vec<UsageCrossing>) {
    let place = match crossings.as_mut_slice() {
        [] => std::future::pending().await,
        [only] => only.next().await.map(|()| 0).unwrap_or(0),
        [first, second, ..] => {
            tokio::select! {
                biased;
                // Cancel-safe, both: a report that is not taken stays with the kernel.
                _ = first.next() => 0,
                _ = second.next() => 1,
            }
        }
    };
    // It is armed again with the next look.
    crossings.remove(place);
}

/// The usages at which the thresholds of memory that are not met would be crossed: the nearest for the node, and for all pods.
fn armed(world: &World, snapshot: &Snapshot) -> Vec<UsageCrossing> {
    let tree = CgroupTree::new(&world.settings, snapshot.node.cgroup_driver);
    let places = [
        (Signal::MemoryAvailable, Some("/".to_owned())),
        (Signal::AllocatableMemoryAvailable, tree.map(CgroupTree::kubepods_path)),
    ];
    let margin = |signal: Signal| {
        debug_assert_eq!(signal.resource(), Resource::Memory);
        let thresholds = snapshot.eviction.thresholds.iter().filter(|it| it.signal == signal && it.met_since.is_none());
        thresholds.filter_map(|it| it.observed?.available.checked_sub(it.amount?)).min()
    };
    let armed = places.into_iter().filter_map(|(signal, cgroup)| UsageCrossing::arm(&cgroup?, margin(signal)?).ok());
    armed.collect()
}
