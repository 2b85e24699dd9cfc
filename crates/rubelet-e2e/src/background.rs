//! Servers that tests put between programs.
//!
//! Owns: the thread of one, and its connections, which end when it is dropped.

use std::{
    io,
    thread::{self, JoinHandle},
};

use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::oneshot,
    task::JoinSet,
};

#[derive(Debug)]
pub struct BackgroundServer {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Where connections come from.
pub trait Listener: Send + 'static {
    type Stream;

    fn accept_next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept_next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn accept_next(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl BackgroundServer {
    /// `listen` is called inside of the server's runtime, which tokio's listeners belong to.
    pub fn start<L, F>(
        listen: impl FnOnce() -> io::Result<L>,
        connect: impl Fn(L::Stream) -> F + Send + 'static,
    ) -> anyhow::Result<Self>
    where
        L: Listener,
        F: Future<Output = ()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _inside = runtime.enter();
            listen()?
        };
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || runtime.block_on(serve(listener, connect, stopped)));
        Ok(BackgroundServer { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for BackgroundServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // If it panicked, what needed its connections has failed already.
            let _ = thread.join();
        }
    }
}

async fn serve<L, F>(listener: L, connect: impl Fn(L::Stream) -> F, mut stopped: oneshot::Receiver<()>)
where
    L: Listener,
    F: Future<Output = ()> + Send + 'static,
{
    // Connections end with the set.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // A dropped sender is the signal; it is not polled again, because the loop ends.
            _ = &mut stopped => return,
            // A connection not accepted yet stays in the kernel's queue.
            accepted = listener.accept_next() => {
                let Ok(stream) = accepted else { continue };
                connections.spawn(connect(stream));
            }
            // Cancel-safe: a connection that ended stays in the set.
            Some(_) = connections.join_next() => {}
        }
    }
}
