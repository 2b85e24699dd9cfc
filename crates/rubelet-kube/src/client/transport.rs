//! One connection to the server: TCP, TLS, HTTP.
//!
//! Owns: how a connection is made, its tasks, and its maximum of requests. Never: retries, interprets a request.

use std::{
    future::Future,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http1, http2},
    rt,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, sync::watch, task::JoinSet, time::Instant};
use tokio_rustls::TlsConnector;

use crate::{clock, kubeconfig::Cluster};

/// As client-go: a ping after 30 s of silence, and the connection is closed 15 s later without a reply.
const PING_AFTER: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// kube-apiserver allows 100 streams per connection; the rest is slack for streams it has not yet closed.
const MAX_STREAMS: usize = 80;
/// The window of a watch, so that unread watches together stay below the connection's window.
const WATCH_WINDOW_BYTES: u32 = 64 << 10;
const WATCH_CONNECTION_WINDOW_BYTES: u32 = WATCH_WINDOW_BYTES * 100;
/// Watches of a retired connection have this long to drain.
const WATCHES_END_AFTER: Duration = Duration::from_secs(1);

/// The server's address.
#[derive(Clone, Debug)]
pub(super) struct Server {
    host: String,
    port: u16,
    authority: String,
    /// The prefix of every path, without a trailing slash.
    prefix: String,
    /// The name in its certificate; `None` for plain HTTP.
    tls_name: Option<ServerName<'static>>,
}

/// Without a cause: the library's says less.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither a host name nor an IP address")]
pub(crate) struct ServerNameError(String);

impl Server {
    pub(super) fn new(cluster: &Cluster) -> Result<Self, ServerNameError> {
        let uri = &cluster.server;
        let is_tls = uri.scheme_str() == Some("https");
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let tls_name = if is_tls {
            let name = cluster.tls_server_name.clone().unwrap_or_else(|| host.clone());
            Some(ServerName::try_from(name.clone()).map_err(|_| ServerNameError(name))?)
        } else {
            None
        };
        Ok(Server {
            host,
            port: uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            authority: uri.authority().map(ToString::to_string).unwrap_or_default(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            tls_name,
        })
    }

    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// The use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    Calls,
    Watches,
}

/// Open while it is in use or in the pool.
#[derive(Debug)]
pub(super) struct Connection {
    server: Arc<Server>,
    sender: Sender,
    tasks: Tasks,
    leases: AtomicUsize,
    /// When its watches end.
    retirement: watch::Sender<Option<Instant>>,
    /// The generation of its credentials.
    pub(super) generation: u64,
}

#[derive(Debug)]
enum Sender {
    Http1(Mutex<http1::SendRequest<Full<Bytes>>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("connect to {address}")]
    Io { address: String, source: io::Error },
    #[error("connect to {address}")]
    Http { address: String, source: hyper::Error },
    #[error("not connected within {0:?}")]
    Late(Duration),
    #[error("closed as soon as it was open")]
    Closed,
}

/// Why a request got no response.
#[derive(Debug)]
pub(super) enum Lost {
    /// Nothing was sent.
    Unsent(SendError),
    /// The server may have executed it.
    Sent(SendError),
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) enum SendError {
    Address(#[from] http::Error),
    Connection(#[from] hyper::Error),
}

impl Connection {
    pub(super) async fn open(
        server: Arc<Server>,
        tls: Option<Arc<ClientConfig>>,
        generation: u64,
        traffic: Traffic,
    ) -> Result<Self, ConnectError> {
        let failed = |source| ConnectError::Io { address: server.address(), source };
        // A host that is an IP address needs no lookup.
        let stream = TcpStream::connect((server.host.as_str(), server.port)).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let tasks = Tasks::default();
        let sender = match (&server.tls_name, tls) {
            (Some(name), Some(config)) => {
                let stream = TlsConnector::from(config).connect(name.clone(), stream).await.map_err(failed)?;
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let stream = TokioIo::new(stream);
                if is_http2 { http2(stream, traffic, &tasks).await } else { http1(stream, &tasks).await }
            }
            _ => http1(TokioIo::new(stream), &tasks).await,
        };
        let sender = sender.map_err(|source| ConnectError::Http { address: server.address(), source })?;
        let retirement = watch::Sender::new(None);
        Ok(Connection { server, sender, tasks, leases: AtomicUsize::new(0), retirement, generation })
    }

    pub(super) fn is_closed(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => lock(sender).is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.leases.load(Ordering::Relaxed) == 0
    }

    /// Its requests finish, its watches end soon.
    pub(super) fn retire(&self) {
        self.retirement.send_if_modified(|ends| {
            let is_first = ends.is_none();
            ends.get_or_insert(clock::after(clock::now(), WATCHES_END_AFTER));
            is_first
        });
    }

    fn has_room(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => self.is_idle() && lock(sender).is_ready(),
            Sender::Http2(_) => self.leases.load(Ordering::Relaxed) < MAX_STREAMS,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.tasks.abort();
    }
}

/// A slot for one request. Held until its response was read.
#[derive(Debug)]
pub(super) struct Lease {
    connection: Arc<Connection>,
}

impl Lease {
    pub(super) fn of(connection: &Arc<Connection>) -> Option<Self> {
        if !connection.has_room() {
            return None;
        }
        connection.leases.fetch_add(1, Ordering::Relaxed);
        Some(Lease { connection: Arc::clone(connection) })
    }

    pub(super) fn is_of(&self, connection: &Arc<Connection>) -> bool {
        Arc::ptr_eq(&self.connection, connection)
    }

    pub(super) fn retirement(&self) -> watch::Receiver<Option<Instant>> {
        self.connection.retirement.subscribe()
    }

    /// `request` has a path as its URI.
    pub(super) async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Lost> {
        let server = &self.connection.server;
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let path = format!("{}{path}", server.prefix);
        let (head, body) = match &self.connection.sender {
            Sender::Http1(_) => (path.parse::<Uri>().map_err(http::Error::from), Some(server.authority.as_str())),
            Sender::Http2(_) => {
                let uri = Uri::builder().scheme("https").authority(server.authority.as_str()).path_and_query(path);
                (uri.build(), None)
            }
        };
        *request.uri_mut() = head.map_err(|error| Lost::Unsent(error.into()))?;
        if let Some(host) = body {
            let host = HeaderValue::from_str(host).map_err(|error| Lost::Unsent(http::Error::from(error).into()))?;
            request.headers_mut().insert(header::HOST, host);
        }
        match &self.connection.sender {
            Sender::Http1(sender) => {
                let answer = lock(sender).try_send_request(request);
                answer.await.map_err(lost)
            }
            Sender::Http2(sender) => sender.clone().try_send_request(request).await.map_err(lost),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.connection.leases.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lost(mut error: TrySendError<Request<Full<Bytes>>>) -> Lost {
    let was_kept = error.take_message().is_some();
    let error = SendError::from(error.into_error());
    if was_kept { Lost::Unsent(error) } else { Lost::Sent(error) }
}

async fn http1<I>(stream: I, tasks: &Tasks) -> hyper::Result<Sender>
where
    I: rt::Read + rt::Write + Unpin + Send + 'static,
{
    let (mut sender, driver) = http1::handshake(stream).await?;
    // The requests on the connection get its error.
    tasks.start(async { drop(driver.await) });
    sender.ready().await?;
    Ok(Sender::Http1(Mutex::new(sender)))
}

async fn http2<I>(stream: I, traffic: Traffic, tasks: &Tasks) -> hyper::Result<Sender>
where
    I: rt::Read + rt::Write + Unpin + Send + 'static,
{
    let mut builder = http2::Builder::new(tasks.clone());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true);
    if traffic == Traffic::Watches {
        builder
            .initial_stream_window_size(WATCH_WINDOW_BYTES)
            .initial_connection_window_size(WATCH_CONNECTION_WINDOW_BYTES);
    }
    let (sender, driver) = builder.handshake(stream).await?;
    tasks.start(async { drop(driver.await) });
    Ok(Sender::Http2(sender))
}

/// The task that drives a connection. It ends with the connection, or is aborted with it.
#[derive(Clone, Debug, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn start(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.0);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    fn abort(&self) {
        lock(&self.0).abort_all();
    }
}

impl<F> rt::Executor<F> for Tasks
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.start(task);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
