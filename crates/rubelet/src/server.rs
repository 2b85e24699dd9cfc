//! The agent's servers: the root-only socket of the command line, the health port, the read-only port, and in `secured` the
//! kubelet's own port.
//!
//! Owns: which listener serves what, and their shutdown. Never: changes a pod; responses come from the last snapshot, from logs,
//! and from the runtime's streaming server.
//! Upstream: `pkg/kubelet/server`, and the healthz server of `cmd/kubelet/app/server.go`.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use rubelet_core::snapshot::Snapshot;
use rubelet_host::watch::Watches;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    event_log::EventLog,
    metrics::{
        Metrics,
        http::{Counting, Port},
    },
    stats::sample::Stats,
    world::{Clock, Paths},
};

mod accept;
pub(crate) mod admin;
pub(crate) mod connections;
pub(crate) mod container_logs;
pub(crate) mod health;
pub(crate) mod log_file;
pub(crate) mod metrics;
mod metrics_encoding;
pub(crate) mod read_only;
pub(crate) mod secured;
mod stats;
mod unauthenticated;
pub(crate) mod views;

use admin::AdminSocket;
use connections::Limits;
use health::LoopHealth;

/// All inputs of responses.
#[derive(Clone, Debug)]
pub(crate) struct ServerContext {
    pub snapshots: watch::Receiver<Arc<Snapshot>>,
    pub events: EventLog,
    pub metrics: Arc<Metrics>,
    pub paths: Paths,
    pub clock: Clock,
    pub health: Arc<LoopHealth>,
    pub stats: Stats,
    /// For log followers.
    pub log_watches: Watches,
}

impl ServerContext {
    /// The snapshot after the last turn.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshots.borrow().clone()
    }

    pub(crate) fn counting(&self, port: Port) -> Counting {
        Counting { metrics: self.metrics.clone(), clock: self.clock.clone(), port }
    }
}

/// The listen addresses.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    /// Usually [`admin::socket_path`] of the root directory.
    pub socket: PathBuf,
    /// `healthzBindAddress:healthzPort`; `None` when the port is 0.
    pub health: Option<SocketAddr>,
    /// `address:readOnlyPort`; `None` when the port is 0.
    pub read_only: Option<SocketAddr>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error(transparent)]
    Admin(#[from] admin::SocketError),
    #[error("listen on the read-only port {address}")]
    ReadOnly { address: SocketAddr, source: io::Error },
}

/// Bound listeners that do not accept yet.
#[derive(Debug)]
pub(crate) struct Server {
    admin: AdminSocket,
    health: Option<SocketAddr>,
    read_only: Option<TcpListener>,
}

impl Server {
    /// Binds the listeners that must exist before the agent starts. The health port is not one of them: as upstream, an agent
    /// whose health port is taken runs and retries.
    pub(crate) async fn bind(addresses: &Addresses) -> Result<Server, BindError> {
        let admin = AdminSocket::bind_when_free(&addresses.socket).await?;
        let read_only = match addresses.read_only {
            Some(address) => {
                Some(TcpListener::bind(address).await.map_err(|source| BindError::ReadOnly { address, source })?)
            }
            None => None,
        };
        Ok(Server { admin, health: addresses.health, read_only })
    }

    /// Serves until `stop`; open connections get a moment to finish, then are closed.
    pub(crate) async fn serve(self, context: ServerContext, stop: CancellationToken) {
        let admin = admin::serve(self.admin, context.clone(), &stop);
        let health = async {
            if let Some(address) = self.health {
                health::serve(address, &context.metrics, &stop).await;
            }
        };
        let read_only = async {
            if let Some(listener) = self.read_only {
                let router = read_only::router(context.clone());
                connections::serve(&listener, router, Limits::OPEN_PORT, &stop).await;
            }
        };
        // `join!` runs all three in this one task; each ends by itself at `stop`.
        tokio::join!(admin, health, read_only);
    }
}

#[cfg(test)]
pub(crate) mod tests;
