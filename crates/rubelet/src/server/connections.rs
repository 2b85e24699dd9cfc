//! One accept loop for every listener.
//!
//! Owns: how many connections there may be, how long a peer may take, how the loop ends. A slow or silent peer costs one
//! task and one of the places, and only for a limited time.

use std::{io, time::Duration};

use axum::{Router, body::Body, extract::Request};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::{ServiceExt, service_fn};
use tracing::debug;

/// What a peer may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At most so many connections at once; more wait in the kernel's backlog.
    pub connections: usize,
    /// A request's head must be complete this long after the connection opened or fell idle.
    pub head_timeout: Duration,
    /// A request's head may be this large. Hyper's least is 8 KiB.
    pub head_bytes: usize,
    /// A connection older than this is closed, in the middle of an answer if its peer does not read.
    pub lifetime: Option<Duration>,
}

impl Limits {
    /// For a port anybody on the network may reach. A pod list is a few hundred kilobytes: five minutes is plenty, and
    /// 128 readers at once is far more than a node's scrapers.
    pub const OPEN_PORT: Limits = Limits {
        connections: 128,
        head_timeout: Duration::from_secs(30),
        head_bytes: 32 << 10,
        lifetime: Some(Duration::from_secs(300)),
    };

    /// For the socket only root may open. `--watch` and `logs -f` last as long as their reader wants.
    pub const ROOT_SOCKET: Limits =
        Limits { connections: 32, head_timeout: Duration::from_secs(30), head_bytes: 16 << 10, lifetime: None };
}

/// A listener this loop can serve: TCP, or the root socket that checks who calls.
pub trait Accept {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Must be cancel safe.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        TcpListener::accept(self).await.map(|(stream, _)| stream)
    }
}

/// Serves until `stop`, then gives open connections a second to finish what they answer.
pub async fn serve<L: Accept>(listener: &L, router: Router, limits: Limits, stop: &CancellationToken) {
    let places = std::sync::Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    loop {
        // Cancel safe: a place that was got and an accept that did not finish lose nothing when dropped.
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = next(listener, &places) => accepted,
        };
        while open.try_join_next().is_some() {}
        match accepted {
            Ok((stream, place)) => {
                let connection = converse(stream, router.clone(), limits, stop.clone());
                open.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) => {
                // Out of descriptors, mostly: trying again at once would only spin.
                debug!(error = %error, "Could not accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    let _ = timeout(Duration::from_secs(1), async { while open.join_next().await.is_some() {} }).await;
    open.shutdown().await;
}

type Place = tokio::sync::OwnedSemaphorePermit;

/// The place comes first, so that a peer without one waits in the backlog and costs us nothing.
async fn next<L: Accept>(listener: &L, places: &std::sync::Arc<Semaphore>) -> io::Result<(L::Stream, Place)> {
    let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
    Ok((listener.accept().await?, place))
}

async fn converse<S>(stream: S, router: Router, limits: Limits, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(service_fn(move |request: Request<Incoming>| {
        router.clone().oneshot(request.map(Body::new))
    }));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.head_bytes)
        .half_close(false)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let too_old = async {
        match limits.lifetime {
            Some(lifetime) => sleep(lifetime).await,
            None => std::future::pending().await,
        }
    };
    // Cancel safe: the connection is pinned outside and polled on below; the others hold no data.
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => Some(ended),
        () = stop.cancelled() => None,
        () = too_old => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            timeout(Duration::from_secs(1), connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        debug!(error = %error, "A connection ended early");
    }
}
