//! The agent over its ports: its tasks, and their start order.
//!
//! Owns: those tasks, from start to end. Never: creates a port, reads an option, binds a socket; `run.rs` does that for
//! the real agent, `rubelet-sim` for the simulated one.
//! Upstream: `startKubelet`, `Kubelet.Run`.

use std::{path::PathBuf, sync::Arc, time::Duration};

use rubelet_core::{
    effect::{EventRecord, InvolvedObject, Severity},
    event::Event,
    event_reasons,
};
use rubelet_host::port::Host;
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    node::{self, NodeInputs, informer::NodeWatchState},
    observe, plugins, recorder,
    sources::{self, http::Endpoint},
    sync_loop::{Handles, SyncLoop, TurnObserver},
    world::{Cluster, World},
};

/// What the agent is started with, besides its world.
pub struct Inputs {
    pub manifest_dir: Option<ManifestDir>,
    /// Reads the manifests and the plugins' registry: no pod's file delays them.
    pub own_files: Arc<dyn Host>,
    pub manifest_url: Option<ManifestUrl>,
    /// Used only on a node of a cluster.
    pub reporting: Arc<node::NodeReporting>,
    /// The thread that renews the lease.
    pub lease_thread: Handle,
    pub observer: Option<TurnObserver>,
}

impl std::fmt::Debug for Inputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inputs").field("manifest_dir", &self.manifest_dir).finish_non_exhaustive()
    }
}

/// `staticPodPath` and `fileCheckFrequency`.
#[derive(Debug)]
pub struct ManifestDir {
    pub path: PathBuf,
    pub check_every: Duration,
}

/// `staticPodURL`, `staticPodURLHeader` and `httpCheckFrequency`.
#[derive(Debug)]
pub struct ManifestUrl {
    pub endpoint: Endpoint,
    pub check_every: Duration,
}

/// A started agent. Dropping it aborts its tasks.
#[derive(Debug)]
pub struct Running {
    pub handles: Handles,
    /// Each runs as long as the agent.
    inputs: JoinSet<()>,
    /// One task. It ends when `stop` is cancelled.
    sync_loop: JoinSet<()>,
    stop: CancellationToken,
}

/// Must be called inside of a tokio runtime.
pub fn start(world: &World, inputs: Inputs) -> Running {
    let (sync_loop, handles) = SyncLoop::new(world.clone(), inputs.observer);
    let stop = CancellationToken::new();
    let mut running = Running { handles, inputs: JoinSet::new(), sync_loop: JoinSet::new(), stop: stop.clone() };
    running.sync_loop.spawn(sync_loop.run(stop));
    let inbox = || running.handles.inbox.clone();
    let tasks = &mut running.inputs;
    tasks.spawn(follow_events(world.clone(), inbox()));
    tasks.spawn(observe::late_file_systems::run(world.clone(), inbox()));
    if world.settings.logs.max_bytes.is_some() {
        tasks.spawn(observe::log_writes::run(world.clone(), inbox()));
    }
    let own_files = World { host: inputs.own_files, ..world.clone() };
    if let Some(ManifestDir { path, check_every }) = inputs.manifest_dir {
        tasks.spawn(sources::file::run(own_files.clone(), path, check_every, inbox()));
    }
    if let Some(ManifestUrl { endpoint, check_every }) = inputs.manifest_url {
        tasks.spawn(sources::http::run(world.clone(), endpoint, check_every, inbox()));
    }
    if let Some(cluster) = &world.cluster {
        join_cluster((world, own_files), cluster, (inputs.reporting, inputs.lease_thread), &running.handles, tasks);
    }
    record_start(world);
    running
}

/// The tasks that only a node of a cluster has.
fn join_cluster(
    (world, own_files): (&World, World),
    cluster: &Cluster,
    (reporting, lease_thread): (Arc<node::NodeReporting>, Handle),
    handles: &Handles,
    tasks: &mut JoinSet<()>,
) {
    let Handles { inbox, snapshots, health } = handles;
    let (api, node_name, seed) = (&cluster.api, &world.settings.node_name, reporting.seed());
    let (node_states, seen) = watch::channel(NodeWatchState::Unseen);
    tasks.spawn(node::informer::run(api.clone(), node_name.clone(), seed, node_states, inbox.clone()));
    tasks.spawn(sources::api::run(api.clone(), world.clone(), seed, seen.clone(), inbox.clone()));
    tasks.spawn(recorder::run(api.clone(), world.events.clone(), node_name.clone(), snapshots.clone()));
    tasks.spawn(plugins::run(own_files, (*cluster.csi_node).clone(), seen.clone(), inbox.clone()));
    let (inbox, health) = (inbox.clone(), health.clone());
    let inputs = NodeInputs { reporting, node_states: seen, inbox, health, lease_thread };
    tasks.spawn(node::run(world.clone(), api.clone(), inputs, snapshots.clone()));
}

/// Runs as long as the agent, even if the runtime has no events.
async fn follow_events(world: World, inbox: mpsc::Sender<Event>) {
    if observe::events::follow(&world, &inbox).await == observe::events::Ended::Unsupported {
        tracing::info!("the runtime has no GetContainerEvents, relisting every second");
    }
    std::future::pending().await
}

fn record_start(world: &World) {
    let message = "Starting kubelet.".to_owned();
    let record = EventRecord::new(InvolvedObject::Node, Severity::Normal, event_reasons::STARTING_KUBELET, message);
    world.events.record(record, world.clock.now().wall);
}

impl Running {
    /// Stops the inputs of the loop, then the loop. Pods keep running.
    pub async fn stop(mut self) {
        self.inputs.shutdown().await;
        self.stop.cancel();
        while self.sync_loop.join_next().await.is_some() {}
    }

    /// Aborts every task at any await point, as `kill -9` does.
    pub async fn kill(mut self) {
        self.inputs.abort_all();
        self.sync_loop.shutdown().await;
        self.inputs.shutdown().await;
    }

    /// Whether a task has ended although each should run as long as the agent. Its panic is propagated.
    pub fn has_ended(&mut self) -> bool {
        match self.sync_loop.try_join_next().or_else(|| self.inputs.try_join_next()) {
            None => false,
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Some(_) => true,
        }
    }
}
