//! Plugins: the sockets in `plugins_registry`.
//!
//! Owns: which sockets there are, a task for each, and the CSINode object's first version. A kernel hint only triggers a look; a
//! slow periodic look finds what hints lost. Never: calls a plugin (`registration.rs`).
//! Upstream: `pluginmanager/pluginwatcher`, `pluginmanager/reconciler`.

pub(crate) mod limits;
mod registration;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::future::select_all;
use rubelet_core::{csi_node::DriverOnNode, event::Event};
use rubelet_csi::NodeInfo;
use rubelet_host::{
    port::{FileIdentity, FileKind},
    watch::Hints,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use self::registration::Registrar;
use crate::{
    node::{csi_node::CsiNodeWriter, informer::NodeWatchState},
    world::World,
};

/// The directory below the root directory that plugins put their sockets in.
const REGISTRY: &str = "plugins_registry";
const REGISTRY_MODE: u32 = 0o750;
/// Files are local; a slower look means a hung file system.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// Finds what hints lost.
const LOOK_PERIOD: Duration = Duration::from_secs(60);
/// The retry period for a directory that cannot be watched or read.
const UNWATCHED_PERIOD: Duration = Duration::from_secs(1);
/// Changes within this time are one change: a socket that is made anew in a loop costs few looks.
const SETTLE: Duration = Duration::from_millis(50);
/// Plugins put their socket into the registry, or into a directory there.
const MAX_DEPTH: usize = 3;
const MAX_SOCKETS: usize = 256;
/// Wait after a failed try to make the CSINode object, doubled up to the maximum.
const CSI_NODE_RETRY_FIRST: Duration = Duration::from_millis(500);
const CSI_NODE_RETRY_MAX: Duration = Duration::from_secs(30);

/// Runs until it is dropped.
pub(crate) async fn run(
    world: World,
    csi_node: CsiNodeWriter,
    mut node: watch::Receiver<NodeWatchState>,
    inbox: mpsc::Sender<Event>,
) {
    let registrar = Registrar::new(world.clone(), csi_node.clone(), inbox.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        if node.wait_for(|state| matches!(state, NodeWatchState::Seen(_))).await.is_ok() {
            make_csi_node(&csi_node, &inbox).await;
        }
    });
    let mut registry = Registry { registrar, sockets: BTreeMap::new(), tasks };
    let dir = world.paths.root_dir.join(REGISTRY);
    let mut hints = BTreeMap::new();
    let mut problem = None;
    loop {
        let period = match look(&world, &dir, &mut hints).await {
            Ok(found) => {
                problem = None;
                registry.take(found);
                if hints.contains_key(&dir) { LOOK_PERIOD } else { UNWATCHED_PERIOD }
            }
            Err(error) => {
                let text = error.to_string();
                if problem.as_ref() != Some(&text) {
                    tracing::warn!(dir = %dir.display(), "cannot look for plugins: {text}");
                    problem = Some(text);
                }
                UNWATCHED_PERIOD
            }
        };
        next_hint(&mut hints, period).await;
        sleep(SETTLE).await;
    }
}

/// Until it exists; the node is not ready while it cannot be made.
async fn make_csi_node(csi_node: &CsiNodeWriter, inbox: &mpsc::Sender<Event>) {
    let mut wait = CSI_NODE_RETRY_FIRST;
    let mut is_first = true;
    while let Err(error) = csi_node.initialize().await {
        tracing::warn!("failed to make the CSINode object, will retry in {wait:?}: {error}");
        if is_first && inbox.send(Event::CsiNode { is_made: false }).await.is_err() {
            return;
        }
        is_first = false;
        sleep(wait).await;
        wait = wait.saturating_mul(2).min(CSI_NODE_RETRY_MAX);
    }
    if !is_first {
        // A closed inbox is the end of the agent.
        let _ = inbox.send(Event::CsiNode { is_made: true }).await;
    }
}

fn driver_on_node(name: &str, info: NodeInfo) -> DriverOnNode {
    let NodeInfo { node_id, max_volumes, topology } = info;
    DriverOnNode { name: name.to_owned(), node_id, max_volumes, topology }
}

/// The sockets present now.
type Found = BTreeMap<PathBuf, FileIdentity>;

/// Watches first, then reads: a change in between leaves a hint.
async fn look(world: &World, registry: &Path, hints: &mut BTreeMap<PathBuf, Hints>) -> io::Result<Found> {
    let looking = async {
        world.host.make_dir(registry, REGISTRY_MODE).await?;
        let mut found = Found::new();
        let mut dirs = vec![(registry.to_owned(), 1)];
        let mut seen = Vec::new();
        while let Some((dir, depth)) = dirs.pop() {
            if !hints.contains_key(&dir)
                && let Ok(watched) = world.host.watch_dir(&dir).await
            {
                hints.insert(dir.clone(), watched);
            }
            let entries = match world.host.list_dir(&dir).await {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for entry in entries.into_iter().filter(|entry| !entry.name.starts_with('.')) {
                let path = dir.join(&entry.name);
                match entry.kind {
                    FileKind::Directory if depth < MAX_DEPTH => dirs.push((path, depth.saturating_add(1))),
                    FileKind::Socket if found.len() < MAX_SOCKETS => {
                        let identity = world.host.file_identity(&path).await?;
                        found.extend(identity.map(|identity| (path, identity)));
                    }
                    _ => {}
                }
            }
            seen.push(dir);
        }
        hints.retain(|dir, _| seen.contains(dir));
        Ok(found)
    };
    timeout(LOOK_DEADLINE, looking).await.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

/// Waits for a hint of any directory, or for the period. A watch that ended is dropped.
async fn next_hint(hints: &mut BTreeMap<PathBuf, Hints>, period: Duration) {
    if hints.is_empty() {
        return sleep(period).await;
    }
    let ended = {
        let waits = hints.iter_mut().map(|(dir, hints)| Box::pin(async move { (dir.clone(), hints.recv().await) }));
        match timeout(period, select_all(waits)).await {
            Ok(((dir, None), _, _)) => Some(dir),
            Ok(_) | Err(_) => None,
        }
    };
    if let Some(dir) = ended {
        hints.remove(&dir);
    }
}

/// The sockets, each with the task that registers its plugin.
struct Registry {
    registrar: Registrar,
    sockets: BTreeMap<PathBuf, watch::Sender<Option<FileIdentity>>>,
    tasks: JoinSet<()>,
}

impl Registry {
    fn take(&mut self, found: Found) {
        while let Some(ended) = self.tasks.try_join_next() {
            if let Err(error) = ended
                && error.is_panic()
            {
                std::panic::resume_unwind(error.into_panic());
            }
        }
        self.sockets.retain(|_, socket| !socket.is_closed());
        for (path, socket) in &self.sockets {
            let now = found.get(path).copied();
            socket.send_if_modified(|known| std::mem::replace(known, now) != now);
        }
        for (path, identity) in found {
            // A task that has just ended is noticed by its closed channel.
            if self.sockets.get(&path).is_none_or(watch::Sender::is_closed) {
                let (sender, receiver) = watch::channel(Some(identity));
                self.tasks.spawn(self.registrar.clone().serve(path.clone(), receiver));
                self.sockets.insert(path, sender);
            }
        }
    }
}
