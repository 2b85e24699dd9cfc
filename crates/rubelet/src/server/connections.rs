//! One accept loop for every listener.
//!
//! Owns: the maximum number of connections, the timeouts of a peer, how the loop ends. A slow or silent peer costs one
//! task and one slot, and only for a limited time. Limits before authentication are in `unauthenticated.rs`.

use std::{
    convert::Infallible,
    fmt,
    future::ready,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request};
use http::Extensions;
use http_body_util::BodyExt as _;
use hyper::{
    body::Incoming,
    rt::Executor,
    server::conn::{http1, http2},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tower::{ServiceExt, service_fn};
use tracing::debug;

use super::unauthenticated::{
    Connection, Counted, PeerAddress, UNAUTHENTICATED, Unauthenticated, UnauthenticatedLimits,
};

/// Concurrent streams of one HTTP/2 connection, as Go's server.
const HTTP2_STREAMS: u32 = 250;
/// A peer that resets so many streams, or causes us to, is disconnected (CVE-2023-44487).
const HTTP2_RESETS: usize = 20;
/// A head may be buffered per stream before authentication, so it is smaller than over HTTP/1. Long commands use
/// upgrades, which HTTP/2 does not have. It also bounds CONTINUATION frames.
const HTTP2_HEAD_BYTES: u32 = 64 << 10;
/// The receive windows per stream and in total, and the send buffer per stream: no route here takes a large body.
const HTTP2_WINDOW_BYTES: u32 = 64 << 10;

/// How long an authenticated caller waits for a place.
const PLACE_TIMEOUT: Duration = Duration::from_secs(300);

/// Limits per listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of connections; more wait in the kernel's backlog. With `unauthenticated`, of authenticated ones;
    /// more wait for their first response.
    pub connections: usize,
    /// A request's head must be complete this long after the connection opened or became idle.
    pub head_timeout: Duration,
    /// Maximum size of a request's head. Hyper's minimum is 8 KiB.
    pub head_bytes: usize,
    /// A response ends this long after its request, whether the client reads it or not. A stream after an upgrade does not count.
    pub answer: Duration,
    /// A connection older than this is closed, even during a response.
    pub lifetime: Option<Duration>,
    /// For a port with authentication.
    pub unauthenticated: Option<UnauthenticatedLimits>,
}

impl Limits {
    /// For a port that the whole network may reach. A pod list is a few hundred kilobytes: five minutes is plenty, and
    /// 128 connections are far more than a node's scrapers.
    pub(crate) const OPEN_PORT: Limits = Limits {
        connections: 128,
        head_timeout: Duration::from_secs(30),
        head_bytes: 32 << 10,
        answer: Duration::from_secs(300),
        lifetime: Some(Duration::from_secs(300)),
        unauthenticated: None,
    };

    /// For the authenticated port. A command may be as long as a request's head, streams last as long as
    /// their peers keep them, and responses as long as upstream's: that also ends a followed log. The head is Go's 1 MiB and slack.
    pub(crate) const SECURED_PORT: Limits = Limits {
        connections: 2048,
        head_timeout: Duration::from_secs(90),
        head_bytes: (1 << 20) + 4096,
        answer: Duration::from_secs(4 * 3600),
        lifetime: None,
        unauthenticated: Some(UNAUTHENTICATED),
    };

    /// For the root-only socket. `--watch` and `logs -f` last as long as their reader stays.
    pub(crate) const ROOT_SOCKET: Limits = Limits {
        connections: 32,
        head_timeout: Duration::from_secs(30),
        head_bytes: 16 << 10,
        answer: Duration::MAX,
        lifetime: None,
        unauthenticated: None,
    };
}

/// A listener this loop can serve: TCP, TLS, or the root socket that checks the peer.
pub(crate) trait Accept {
    type Raw: Send + 'static;
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Must be cancel safe.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Raw>> + Send;

    /// The peer's address, for limits before authentication.
    fn address(&self, _raw: &Self::Raw) -> Option<IpAddr> {
        None
    }

    /// The handshake before the first request, in the connection's own task: a slow peer delays no other.
    fn open(&self, raw: Self::Raw) -> impl Future<Output = io::Result<Opened<Self::Stream>>> + Send + 'static;
}

/// A connection that is ready for requests.
#[derive(Debug)]
pub(crate) struct Opened<S> {
    pub stream: S,
    pub protocol: Protocol,
    /// The handshake has authenticated the peer.
    pub is_authenticated: bool,
    /// For every request.
    pub extensions: Extensions,
}

impl<S> Opened<S> {
    pub(crate) fn plain(stream: S) -> Self {
        Opened { stream, protocol: Protocol::Http1, is_authenticated: false, extensions: Extensions::new() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

/// The work after a response `101 Switching Protocols`, in the connection's own task: so it keeps
/// its slot and ends at `stop`. In every request's extensions.
#[derive(Clone, Default)]
pub(crate) struct AfterUpgrade(Arc<Mutex<Option<Work>>>);

impl fmt::Debug for AfterUpgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AfterUpgrade")
    }
}

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

impl AfterUpgrade {
    pub(crate) fn set(&self, work: impl Future<Output = ()> + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(work));
    }

    /// Keeps `what` until the work is done.
    pub(crate) fn hold(&self, what: impl Send + 'static) {
        if let Some(work) = self.take() {
            self.set(async move {
                work.await;
                drop(what);
            });
        }
    }

    fn take(&self) -> Option<Work> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Accept for TcpListener {
    type Raw = TcpStream;
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        TcpListener::accept(self).await.map(|(stream, _)| stream)
    }

    fn open(&self, raw: TcpStream) -> impl Future<Output = io::Result<Opened<TcpStream>>> + Send + 'static {
        ready(Ok(Opened::plain(raw)))
    }
}

/// Serves until `stop`, then gives open connections a second to finish their responses.
pub(crate) async fn serve<L: Accept>(listener: &L, router: Router, limits: Limits, stop: &CancellationToken) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let unauthenticated = limits.unauthenticated.map(Unauthenticated::new);
    let mut open = JoinSet::new();
    loop {
        // Cancel safe: dropping an acquired slot or an unfinished accept loses nothing.
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = next(listener, &places, unauthenticated.as_ref()) => accepted,
        };
        while open.try_join_next().is_some() {}
        match accepted {
            Ok((raw, connection)) => {
                let (opening, router, stop) = (listener.open(raw), router.clone(), stop.clone());
                open.spawn(async move {
                    let served = async {
                        match opening.await {
                            Ok(opened) => converse(opened, router, limits, connection.clone(), stop).await,
                            Err(error) => debug!(error = %error, "connection setup failed"),
                        }
                    };
                    // Cancel safe: a connection that has to go loses its response.
                    tokio::select! {
                        biased;
                        () = connection.closed() => debug!("unauthenticated connection closed for another one"),
                        () = served => {}
                    }
                });
            }
            Err(error) => {
                // Mostly out of descriptors: an immediate retry would only spin.
                debug!(error = %error, "failed to accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    let _ = timeout(Duration::from_secs(1), async { while open.join_next().await.is_some() {} }).await;
    open.shutdown().await;
}

/// Without authentication the slot comes first, so that a peer without one waits in the backlog at no cost. With it every
/// connection is accepted: the one that is closed for it is known only then.
async fn next<L: Accept>(
    listener: &L,
    places: &Arc<Semaphore>,
    unauthenticated: Option<&Arc<Unauthenticated>>,
) -> io::Result<(L::Raw, Connection)> {
    let Some(unauthenticated) = unauthenticated else {
        let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
        return Ok((listener.accept().await?, Connection::open(places, place)));
    };
    // A burst of connections must not be accepted before those in their handshake make progress.
    tokio::task::yield_now().await;
    unauthenticated.room().await;
    let raw = listener.accept().await?;
    let address = listener.address(&raw).map_or(PeerAddress::UNKNOWN, PeerAddress::from);
    Ok((raw, unauthenticated.admit(address, places)))
}

async fn converse<S>(opened: Opened<S>, router: Router, limits: Limits, connection: Connection, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Opened { stream, protocol, is_authenticated, mut extensions } = opened;
    let after = AfterUpgrade::default();
    // More connections than places wait here.
    if is_authenticated && timeout(PLACE_TIMEOUT, connection.authenticate()).await.is_err() {
        return;
    }
    extensions.insert(after.clone());
    extensions.insert(connection.clone());
    let (busy, requests) = watch::channel(0);
    let served = connection.clone();
    let service = TowerToHyperService::new(service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().extend(extensions.clone());
        served.add_bytes(head_bytes(&request));
        let (router, serving) = (router.clone(), Serving::start(&busy, &served));
        async move {
            let answer = router.oneshot(request.map(Body::new)).await?;
            // Until the last byte of the response is written.
            Ok::<_, Infallible>(answer.map(|body| {
                body.map_frame(move |frame| {
                    let _ = &serving;
                    frame
                })
            }))
        }
    }));
    let io = TokioIo::new(Counted { stream, connection: connection.clone() });
    // A connection that a token authenticates later keeps them: hyper cannot change them.
    let stricter = limits.unauthenticated.filter(|_| !connection.is_authenticated());
    let expired = unauthenticated_too_long(stricter, requests.clone(), &connection);
    let ended = match protocol {
        Protocol::Http1 => {
            let head_bytes = stricter.map_or(limits.head_bytes, |stricter| stricter.head_bytes);
            let http1 = http1_builder(limits, head_bytes).serve_connection(io, service).with_upgrades();
            // Hyper itself closes connections without a head. There is one request at a time.
            let overdue = stays(|requests| requests > 0, limits.answer, requests);
            let ending = ending(limits, (overdue, expired), &stop);
            until_over(http1, |http1| http1.graceful_shutdown(), ending, connection.refused()).await
        }
        Protocol::Http2 => {
            let streams = stricter.map_or(HTTP2_STREAMS, |stricter| stricter.http2_streams);
            let http2 = http2_builder(limits, streams).serve_connection(io, service);
            // A peer could keep its slot by answering pings alone.
            let quiet = stays(|requests| requests == 0, limits.head_timeout, requests);
            let ending = ending(limits, (quiet, expired), &stop);
            until_over(http2, |http2| http2.graceful_shutdown(), ending, connection.refused()).await
        }
    };
    if let Err(error) = ended {
        debug!(error = %error, "connection ended early");
        return;
    }
    if let Some(work) = after.take() {
        // Cancel safe: `stop` ends every stream.
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = work => {}
        }
    }
}

fn http1_builder(limits: Limits, head_bytes: usize) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(head_bytes)
        .half_close(false);
    builder
}

fn http2_builder(limits: Limits, streams: u32) -> http2::Builder<Streams> {
    let mut builder = http2::Builder::new(Streams { answer: limits.answer });
    builder
        .timer(TokioTimer::new())
        .max_header_list_size(HTTP2_HEAD_BYTES)
        .initial_connection_window_size(HTTP2_WINDOW_BYTES)
        .initial_stream_window_size(HTTP2_WINDOW_BYTES)
        .max_send_buf_size(HTTP2_WINDOW_BYTES as usize)
        .max_concurrent_streams(streams)
        .max_pending_accept_reset_streams(HTTP2_RESETS)
        .max_local_error_reset_streams(HTTP2_RESETS)
        .keep_alive_interval(limits.head_timeout)
        .keep_alive_timeout(limits.head_timeout);
    builder
}

/// The size of a decoded head: HTTP/2 may send a large one in a few bytes.
fn head_bytes(request: &Request<Incoming>) -> usize {
    let (uri, headers) = (request.uri(), request.headers());
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    target + headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>()
}

/// One running request.
struct Serving {
    busy: watch::Sender<usize>,
    connection: Connection,
}

impl Serving {
    fn start(busy: &watch::Sender<usize>, connection: &Connection) -> Self {
        busy.send_modify(|requests| *requests += 1);
        Serving { busy: busy.clone(), connection: connection.clone() }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.busy.send_modify(|requests| {
            *requests -= 1;
            if *requests == 0 {
                self.connection.release_bytes();
            }
        });
    }
}

/// The streams of an HTTP/2 connection: tasks of their own, which end with it.
#[derive(Clone, Copy)]
struct Streams {
    answer: Duration,
}

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, stream: F) {
        // Dropping it resets the stream; the others continue.
        tokio::spawn(timeout(self.answer, stream));
    }
}

/// Completes when so many requests were running for this long, and none began or ended.
async fn stays(is_so: fn(usize) -> bool, limit: Duration, mut requests: watch::Receiver<usize>) {
    loop {
        let was_so = is_so(*requests.borrow_and_update());
        match timeout(limit, requests.changed()).await {
            Err(_) if was_so => return,
            Err(_) | Ok(Ok(())) => {}
            // The service is gone, and so is its connection.
            Ok(Err(_)) => return,
        }
    }
}

/// Completes when a caller took too long to authenticate.
async fn unauthenticated_too_long(
    limits: Option<UnauthenticatedLimits>,
    requests: watch::Receiver<usize>,
    connection: &Connection,
) {
    let Some(limits) = limits else { return std::future::pending().await };
    // Cancel safe: none of them holds data.
    tokio::select! {
        biased;
        () = connection.authenticated() => std::future::pending().await,
        () = sleep(limits.lifetime) => {}
        () = stays(|requests| requests == 0, limits.head_timeout, requests) => {}
    }
}

/// Completes when a connection has to end.
async fn ending(
    limits: Limits,
    (over, expired): (impl Future<Output = ()>, impl Future<Output = ()>),
    stop: &CancellationToken,
) {
    let too_old = async {
        match limits.lifetime {
            Some(lifetime) => sleep(lifetime).await,
            None => std::future::pending().await,
        }
    };
    // Cancel safe: none of them holds data.
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = too_old => {}
        () = over => {}
        () = expired => {}
    }
}

/// Serves until the connection ends. `ending` ends it at once, `refused` when its running responses are complete.
async fn until_over<C: Future<Output = hyper::Result<()>>>(
    connection: C,
    shut_down: impl Fn(Pin<&mut C>),
    ending: impl Future<Output = ()>,
    refused: impl Future<Output = ()>,
) -> hyper::Result<()> {
    let (mut connection, mut ending) = (std::pin::pin!(connection), std::pin::pin!(ending));
    // Cancel safe: both are pinned outside and polled on below; the third holds no data.
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => Some(ended),
        () = ending.as_mut() => None,
        () = refused => {
            shut_down(connection.as_mut());
            tokio::select! {
                biased;
                ended = connection.as_mut() => Some(ended),
                () = ending => None,
            }
        }
    };
    match ended {
        Some(ended) => ended,
        None => {
            shut_down(connection.as_mut());
            timeout(Duration::from_secs(1), connection).await.unwrap_or(Ok(()))
        }
    }
}
