//! Threads for one kind of blocking work.
//!
//! Owns: a pool that grows on demand and shrinks when idle. Work of another kind has another pool, so that neither can use
//! up the threads of the other.

use std::{io, sync::LazyLock, time::Duration};

use tokio::{runtime::Runtime, sync::oneshot};

/// Each thread of a pool may hang. There are more threads than one tenant can make hang: a device has a few calls, and a pod
/// one name look-up.
const MAX_THREADS: usize = 512;
/// Work goes to idle threads in turn, so a thread lives on while there is work for all of them within this time.
const THREAD_KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Reads files for a caller of the agent's ports: logs, figures. A panic is propagated as an error.
pub async fn for_caller<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<io::Error> + Send + 'static,
{
    static THREADS: LazyLock<Threads> = LazyLock::new(|| Threads::new("callers"));
    let read = THREADS.spawn(work);
    read.await.unwrap_or_else(|_| Err(io::Error::other("the read panicked, or the agent is shutting down").into()))
}

/// A tokio runtime that is used only for its blocking pool. `None` while it is dropped.
#[derive(Debug)]
pub(crate) struct Threads(Option<Runtime>);

impl Threads {
    pub(crate) fn new(name: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(MAX_THREADS)
            .thread_keep_alive(THREAD_KEEP_ALIVE)
            .thread_name(name)
            .build()
            .expect("a runtime without drivers needs nothing of the kernel");
        Threads(Some(runtime))
    }

    /// The result; the channel closes without one if the work panics or the agent ends.
    pub(crate) fn spawn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> oneshot::Receiver<T> {
        let (answer, answered) = oneshot::channel();
        let runtime = self.0.as_ref().expect("it is taken only when this is dropped");
        runtime.spawn_blocking(move || {
            let _ = answer.send(work());
        });
        answered
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // A thread that hangs must not keep the agent from ending.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
