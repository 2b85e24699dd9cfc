//! A thread that has nothing to do but to renew the lease.
//!
//! Owns: the thread and its runtime. A turn of the loop that takes long, or a caller that keeps the main thread busy, cannot
//! make the node look dead. Never: decides when to renew; see `lease`.

use std::thread;

use anyhow::Context as _;
use tokio::{runtime::Handle, sync::oneshot};

/// For the client's name look-ups and its credentials.
const MAX_BLOCKING_THREADS: usize = 4;

/// Ends when it is dropped.
#[derive(Debug)]
pub(crate) struct LeaseThread {
    pub handle: Handle,
    _stop: oneshot::Sender<()>,
}

impl LeaseThread {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(MAX_BLOCKING_THREADS)
            .build()
            .context("start the thread of the lease")?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            // An error: the sender was dropped.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        thread::Builder::new().name("lease".to_owned()).spawn(run).context("start the thread of the lease")?;
        Ok(LeaseThread { handle, _stop: stop })
    }
}
