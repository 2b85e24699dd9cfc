//! The node in its cluster: registration, status reports and the lease.
//!
//! Owns: these tasks, and what they share. Never: decides what is reported (`rubelet_core::node_status`), or
//! whether the node is ready (the sync loop, whose snapshots are read).
//! Upstream: `syncNodeStatus`, `fastStatusUpdateOnce`, the node lease controller.

pub mod addresses;
pub mod csi_node;
pub mod informer;
pub mod kernel;
pub mod lease;
pub(crate) mod lease_thread;
pub mod registration;
pub mod reserved;
pub mod setup;
pub mod status;

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Node;
use rubelet_core::{
    event::Event,
    fnv::fnv32a,
    node_status::{Machine, NodeSetup},
    snapshot::Snapshot,
};
use rubelet_kube::port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, Verb};
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    task::JoinSet,
};

use self::informer::NodeWatchState;
use crate::{server::health::LoopHealth, world::World};

/// What the node reports to its API server, and how often.
#[derive(Clone, Debug)]
pub struct NodeReporting {
    pub setup: NodeSetup,
    pub machine: Machine,
    /// `--node-ip`, as given.
    pub node_ip: String,
    /// `registerNode`; without it the agent waits until the Node object is created by another client.
    pub registers: bool,
    /// `nodeStatusUpdateFrequency`.
    pub check_every: Duration,
    /// `nodeStatusReportFrequency`.
    pub report_every: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_secs: i32,
}

impl NodeReporting {
    /// A call that takes longer has missed its period.
    fn timeout(&self) -> Duration {
        self.check_every.min(self.lease_duration())
    }

    fn lease_duration(&self) -> Duration {
        Duration::from_secs(u64::try_from(self.lease_secs).unwrap_or(0))
    }

    /// Constant per node and different between nodes: spreads the requests of a cluster's nodes over time.
    pub(crate) fn seed(&self) -> u64 {
        fnv32a(self.setup.name.as_bytes()).into()
    }

    fn path(&self) -> ObjectPath {
        ObjectPath::all("v1", "nodes").named(self.setup.name.clone())
    }
}

/// What the node's reports are made of, besides the snapshots.
#[derive(Debug)]
pub struct NodeInputs {
    pub reporting: Arc<NodeReporting>,
    pub node_states: watch::Receiver<NodeWatchState>,
    pub inbox: mpsc::Sender<Event>,
    pub health: Arc<LoopHealth>,
    /// The thread that renews the lease.
    pub lease_thread: Handle,
}

/// Runs until it is dropped. The lease has its own task: a delayed report does not delay the lease.
pub async fn run(world: World, api: Arc<dyn ApiServer>, inputs: NodeInputs, snapshots: watch::Receiver<Arc<Snapshot>>) {
    let NodeInputs { reporting, node_states, inbox, health, lease_thread } = inputs;
    let (uid, known_uid) = watch::channel(None);
    let mut tasks = JoinSet::new();
    let renewing = lease::run(api.clone(), world.clock.clone(), reporting.clone(), (known_uid, health));
    tasks.spawn_on(renewing, &lease_thread);
    tasks.spawn(status::run(world, api, reporting, status::Inputs { snapshots, node_states, inbox }, uid));
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

/// Which version of an object to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResourceVersion {
    /// From the server's watch cache, which may be slightly stale and is cheap.
    Cached,
    Newest,
}

async fn get_node(api: &dyn ApiServer, reporting: &NodeReporting, version: ResourceVersion) -> Result<Node, ApiError> {
    let query = match version {
        ResourceVersion::Cached => vec![("resourceVersion", "0".to_owned())],
        ResourceVersion::Newest => Vec::new(),
    };
    let path = reporting.path();
    let call = Call {
        lane: Lane::Heartbeat,
        verb: Verb::Get,
        path: path.clone(),
        query,
        body: None,
        timeout: reporting.timeout(),
    };
    let answer = api.call(call).await?;
    serde_json::from_slice(&answer).map(without_managed_fields).map_err(|error| {
        ApiError::new(ApiErrorKind::Unreadable, format!("{path}: the answer cannot be read")).caused_by(error)
    })
}

/// `managedFields` are about half of a Node and are not used.
fn without_managed_fields(mut node: Node) -> Node {
    node.metadata.managed_fields = None;
    node
}

#[cfg(test)]
mod testing;
