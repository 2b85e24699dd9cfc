//! The connections of one lane.
//!
//! Owns: the connection of a request, when another is opened, and when one is closed. Never: retries.
//! HTTP/2 connections carry many requests at once up to the server's limit, HTTP/1.1 connections one.

use std::{
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Semaphore;

use crate::client::transport::{ConnectError, Connection, Lease};

/// Name look-up, TCP, TLS and HTTP together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// More idle connections than this are closed; HTTP/2 rarely needs a second.
const MAX_IDLE: usize = 2;

#[derive(Debug)]
pub(super) struct Pool {
    state: Mutex<State>,
    /// One request connects, the others wait for its result.
    connecting: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<Arc<Connection>>,
    /// How many attempts to connect failed, and the last error, which all who waited for it get.
    failures: u64,
    last_failure: Option<Arc<ConnectError>>,
}

impl Default for Pool {
    fn default() -> Self {
        Pool { state: Mutex::default(), connecting: Semaphore::new(1) }
    }
}

impl Pool {
    /// A slot on a connection, on a new one if necessary.
    pub(super) async fn lease<Connecting>(
        &self,
        connect: impl FnOnce() -> Connecting,
    ) -> Result<Lease, Arc<ConnectError>>
    where
        Connecting: Future<Output = Result<Connection, ConnectError>>,
    {
        if let Some(lease) = self.free() {
            return Ok(lease);
        }
        let failures_before = self.state().failures;
        let _turn = self.connecting.acquire().await.expect("the semaphore is never closed");
        if let Some(lease) = self.free() {
            return Ok(lease);
        }
        {
            let state = self.state();
            if let Some(failure) = &state.last_failure
                && state.failures > failures_before
            {
                return Err(Arc::clone(failure));
            }
        }
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect()).await;
        let connected = connected.unwrap_or_else(|_| Err(ConnectError::Late(CONNECT_TIMEOUT)));
        let mut state = self.state();
        match connected {
            Ok(connection) => {
                let connection = Arc::new(connection);
                let lease = Lease::of(&connection).ok_or_else(|| Arc::new(ConnectError::Closed))?;
                state.connections.push(connection);
                Ok(lease)
            }
            Err(error) => {
                state.failures += 1;
                let error = Arc::new(error);
                state.last_failure = Some(Arc::clone(&error));
                Err(error)
            }
        }
    }

    /// The connection gets no further requests; running ones continue.
    pub(super) fn abandon(&self, lease: &Lease) {
        self.state().connections.retain(|connection| !lease.is_of(connection));
    }

    /// Closes connections made with credentials older than `generation`.
    pub(super) fn retire_before(&self, generation: u64) {
        self.state().connections.retain(|connection| {
            let is_current = connection.generation >= generation;
            if !is_current {
                connection.retire();
            }
            is_current
        });
    }

    /// The first connections are filled first, so that the last ones become idle.
    fn free(&self) -> Option<Lease> {
        let mut state = self.state();
        state.connections.retain(|connection| !connection.is_closed());
        let lease = state.connections.iter().find_map(Lease::of);
        let mut idle = 0;
        state.connections.retain(|connection| {
            idle += usize::from(connection.is_idle());
            !connection.is_idle() || idle <= MAX_IDLE
        });
        lease
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
