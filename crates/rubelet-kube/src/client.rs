//! The API server's client: HTTP with JSON bodies.
//!
//! Owns: the connection of a request, its timeout, its retries, and its credentials.
//! Never: decodes or stores objects, or repeats a request that may have been executed.
//! Guarantees: a lane's requests never wait for another lane's or for a watch; no request outlives its timeout.
//! Upstream: `client-go/rest` and `client-go/transport`.

mod credentials;
pub(crate) mod errors;
mod exec;
pub(crate) mod frames;
mod observer;
mod pool;
mod rate_limit;
mod tls;
mod transport;
mod watching;

use std::{error::Error, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

pub(crate) use crate::client::{credentials::CredentialsError, transport::ServerNameError};
pub use crate::client::{
    errors::error_chain,
    observer::{Observed, Observer, Occurrence},
    rate_limit::RateLimit,
};
use crate::{
    client::{
        credentials::{Credentials, Reload},
        pool::Pool,
        rate_limit::Bucket,
        transport::{ConnectError, Connection, Lease, Lost, Server, Traffic},
    },
    clock,
    kubeconfig::{Kubeconfig, KubeconfigError},
    port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, PatchKind, Verb, Watch, WatchStream},
};

/// The longest list of a large cluster is some tens of MiB.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// An error response is a few hundred bytes.
const MAX_REFUSAL_BYTES: usize = 1 << 20;
/// The server responds to a watch at once, even without events.
const WATCH_OPENS_WITHIN: Duration = Duration::from_secs(30);
/// client-go's number of tries for a server that sends `Retry-After`.
const MAX_TRIES: u32 = 10;

/// A clone is the same client.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    server: Arc<Server>,
    credentials: Credentials,
    user_agent: HeaderValue,
    observer: Option<Observer>,
    lease: Connections,
    heartbeat: Connections,
    ordinary: Connections,
    events: Connections,
    reviews: Connections,
    watches: Connections,
}

/// A lane, or the watches.
#[derive(Debug)]
struct Connections {
    pool: Pool,
    bucket: Bucket,
    traffic: Traffic,
}

#[derive(Clone, Copy, Debug)]
pub struct RateLimits {
    /// `kubeAPIQPS` and `kubeAPIBurst`.
    pub ordinary: RateLimit,
    /// `eventRecordQPS` and `eventBurst`.
    pub events: RateLimit,
}

impl Client {
    /// Reads the files the kubeconfig names, and does not connect yet.
    pub fn new(kubeconfig: &Kubeconfig, limits: RateLimits) -> Result<Self, KubeconfigError> {
        Client::observed(kubeconfig, limits, None)
    }

    /// With an observer of its traffic.
    pub fn observed(
        kubeconfig: &Kubeconfig,
        limits: RateLimits,
        observer: Option<Observer>,
    ) -> Result<Self, KubeconfigError> {
        let credentials = Credentials::load(kubeconfig).map_err(|error| kubeconfig.wrong(error))?;
        let server = Server::new(&kubeconfig.cluster).map_err(|error| kubeconfig.wrong(error))?;
        let lane = |limit| Connections { pool: Pool::default(), bucket: Bucket::new(limit), traffic: Traffic::Calls };
        let inner = Inner {
            server: Arc::new(server),
            credentials,
            user_agent: user_agent(),
            observer,
            lease: lane(RateLimit::NONE),
            heartbeat: lane(RateLimit::NONE),
            ordinary: lane(limits.ordinary),
            events: lane(limits.events),
            reviews: lane(RateLimit::NONE),
            // As upstream: an open watch keeps the connection from being idle.
            watches: Connections { traffic: Traffic::Watches, ..lane(RateLimit::NONE) },
        };
        Ok(Client { inner: Arc::new(inner) })
    }

    /// Reloads the client certificate at once.
    pub async fn credentials_changed(&self) {
        self.inner.look_at_credentials(Reload::Now).await;
    }
}

#[async_trait]
impl ApiServer for Client {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        let began = clock::now();
        let deadline = clock::after(began, call.timeout);
        let request = Outgoing::call(&call, deadline);
        let connections = self.inner.lane(call.lane);
        let answered = timeout_at(deadline, async {
            let answer = self.inner.answer(&request, connections).await?;
            let body = timeout_at(deadline, read(answer.response, MAX_ANSWER_BYTES));
            match body.await {
                Ok(body) => body.map_err(|error| errors::unreachable(&request.operation, error)),
                Err(_elapsed) => Err(connections.gave_up(&answer.lease, &request)),
            }
        });
        let answered = answered.await.unwrap_or_else(|_elapsed| Err(request.late()));
        let received_bytes = answered.as_ref().ok().map(Bytes::len);
        let (took, sent_bytes) = (began.elapsed(), request.body.len());
        self.inner.tell(&request, Occurrence::Called { took, sent_bytes, received_bytes });
        answered
    }

    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        let deadline = clock::after(clock::now(), WATCH_OPENS_WITHIN);
        let request = Outgoing::watch(&watch, deadline);
        let opened = timeout_at(deadline, self.inner.answer(&request, &self.inner.watches)).await;
        let answer = opened.unwrap_or_else(|_elapsed| Err(request.late()))?;
        Ok(watching::stream(&watch, request.operation, answer))
    }
}

/// A request that may need several tries.
struct Outgoing {
    /// The verb and the path, for messages.
    operation: String,
    method: Method,
    target: String,
    content_type: Option<&'static str>,
    body: Bytes,
    timeout: Duration,
    deadline: Instant,
}

/// The head of a success; its body is not read yet.
struct ResponseHead {
    response: Response<Incoming>,
    lease: Lease,
}

/// How one try failed.
enum Failed {
    /// The connection turned out to be closed: nothing was sent.
    Unsent(ApiError),
    /// The connection broke during the request.
    Cut(ApiError),
    /// An error that another try will not change, and the server's message.
    Answered(ApiError),
}

impl Outgoing {
    fn call(call: &Call, deadline: Instant) -> Self {
        let (word, method, content_type) = match call.verb {
            Verb::Get => ("get", Method::GET, None),
            Verb::Create => ("create", Method::POST, Some("application/json")),
            Verb::Update => ("update", Method::PUT, Some("application/json")),
            Verb::Patch(PatchKind::Merge) => ("patch", Method::PATCH, Some("application/merge-patch+json")),
            Verb::Patch(PatchKind::StrategicMerge) => {
                ("patch", Method::PATCH, Some("application/strategic-merge-patch+json"))
            }
            Verb::Delete => ("delete", Method::DELETE, Some("application/json")),
        };
        Outgoing {
            operation: format!("{word} {}", call.path),
            method,
            target: target(&call.path.to_string(), &call.query),
            content_type: content_type.filter(|_| call.body.is_some()),
            body: call.body.clone().unwrap_or_default(),
            timeout: call.timeout,
            deadline,
        }
    }

    fn watch(watch: &Watch, deadline: Instant) -> Self {
        Outgoing {
            operation: format!("watch {}", watch.collection),
            method: Method::GET,
            target: target(&watch.collection.to_string(), &watch.query),
            content_type: None,
            body: Bytes::new(),
            timeout: WATCH_OPENS_WITHIN,
            deadline,
        }
    }

    fn late(&self) -> ApiError {
        self.failed(&format!("no answer within {:?}", self.timeout))
    }

    fn failed(&self, why: &str) -> ApiError {
        ApiError::new(ApiErrorKind::Unreachable, format!("{}: {why}", self.operation))
    }
}

impl Connections {
    /// A connection whose request timed out may be dead: the next request uses another.
    fn gave_up(&self, lease: &Lease, request: &Outgoing) -> ApiError {
        self.pool.abandon(lease);
        request.late()
    }
}

impl Inner {
    fn lane(&self, lane: Lane) -> &Connections {
        match lane {
            Lane::Lease => &self.lease,
            Lane::Heartbeat => &self.heartbeat,
            Lane::Ordinary => &self.ordinary,
            Lane::Events => &self.events,
            Lane::Reviews => &self.reviews,
        }
    }

    /// Retries until the response is final.
    async fn answer(&self, request: &Outgoing, connections: &Connections) -> Result<ResponseHead, ApiError> {
        let mut reload = Reload::IfStale;
        let mut tries = 0;
        loop {
            tries += 1;
            let error = match self.attempt(request, connections, reload).await {
                Ok(answer) => return Ok(answer),
                Err(Failed::Unsent(_)) if tries < MAX_TRIES => continue,
                // Reads are safe to repeat.
                Err(Failed::Cut(_)) if tries == 1 && request.method == Method::GET => continue,
                Err(Failed::Unsent(error) | Failed::Cut(error) | Failed::Answered(error)) => error,
            };
            match error.kind {
                ApiErrorKind::TooManyRequests { retry_after: Some(wait) }
                    if tries < MAX_TRIES && clock::after(clock::now(), wait) < request.deadline =>
                {
                    tracing::debug!(wait_secs = wait.as_secs(), "trying again when the server asked to: {error}");
                    tokio::time::sleep(wait).await;
                }
                ApiErrorKind::Unauthorized if reload == Reload::IfStale && self.credentials.can_be_refreshed() => {
                    reload = Reload::Now;
                }
                _ => return Err(error),
            }
        }
    }

    async fn attempt(
        &self,
        request: &Outgoing,
        connections: &Connections,
        reload: Reload,
    ) -> Result<ResponseHead, Failed> {
        let refused = |wait: Duration| {
            request.failed(&format!("client rate limiter wait {wait:?} exceeds timeout {:?}", request.timeout))
        };
        let asked = clock::now();
        connections.bucket.turn(request.deadline).await.map_err(|wait| Failed::Answered(refused(wait)))?;
        if connections.bucket.is_limited() {
            self.tell(request, Occurrence::Waited(asked.elapsed()));
        }
        let authorization = self.credentials.authorization(reload).await;
        let authorization =
            authorization.map_err(|error| Failed::Answered(errors::unreachable(&request.operation, error)))?;
        let message = self.message(request, authorization).map_err(Failed::Answered)?;
        self.look_at_credentials(Reload::IfStale).await;
        let connect = || self.connect(connections.traffic);
        let lease = connections.pool.lease(connect).await;
        let lease = lease.map_err(|error| Failed::Answered(errors::unreachable(&request.operation, error)))?;
        let sent = timeout_at(request.deadline, lease.send(message)).await;
        let code = sent.as_ref().ok().and_then(|sent| sent.as_ref().ok()).map(Response::status);
        self.tell(request, Occurrence::Tried(code));
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(Lost::Unsent(error))) => {
                connections.pool.abandon(&lease);
                return Err(Failed::Unsent(errors::unreachable(&request.operation, error)));
            }
            Ok(Err(Lost::Sent(error))) => return Err(Failed::Cut(errors::unreachable(&request.operation, error))),
            Err(_elapsed) => return Err(Failed::Answered(connections.gave_up(&lease, request))),
        };
        if response.status().is_success() {
            return Ok(ResponseHead { response, lease });
        }
        Err(Failed::Answered(refusal(request, response).await))
    }

    fn tell(&self, request: &Outgoing, what: Occurrence) {
        if let Some(observer) = &self.observer {
            observer.tell(&Observed { method: &request.method, host: self.server.authority(), what });
        }
    }

    async fn connect(&self, traffic: Traffic) -> Result<Connection, ConnectError> {
        let (tls, generation) = self.look_at_credentials(Reload::Now).await;
        Connection::open(Arc::clone(&self.server), tls, generation, traffic).await
    }

    /// Notices new credentials, and closes connections made with older ones.
    async fn look_at_credentials(&self, reload: Reload) -> (Option<Arc<rustls::ClientConfig>>, u64) {
        let (tls, generation) = self.credentials.tls(reload).await;
        let all = [&self.lease, &self.heartbeat, &self.ordinary, &self.events, &self.reviews, &self.watches];
        for connections in all {
            connections.pool.retire_before(generation);
        }
        (tls, generation)
    }

    fn message(
        &self,
        request: &Outgoing,
        authorization: Option<HeaderValue>,
    ) -> Result<Request<Full<Bytes>>, ApiError> {
        let mut builder = Request::builder()
            .method(request.method.clone())
            .uri(&request.target)
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, &self.user_agent);
        if let Some(content_type) = request.content_type {
            builder = builder.header(header::CONTENT_TYPE, content_type);
        }
        if let Some(authorization) = authorization {
            builder = builder.header(header::AUTHORIZATION, authorization);
        }
        builder
            .body(Full::new(request.body.clone()))
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, request.operation.as_str()).caused_by(error))
    }
}

async fn refusal(request: &Outgoing, response: Response<Incoming>) -> ApiError {
    let (status, headers) = (response.status(), response.headers().clone());
    // Without a readable body the error still has its status code.
    let body = read(response, MAX_REFUSAL_BYTES).await.unwrap_or_default();
    errors::refused(&request.operation, status, &headers, &body)
}

async fn read(response: Response<Incoming>, limit: usize) -> Result<Bytes, Arc<dyn Error + Send + Sync>> {
    debug_assert!(response.status() != StatusCode::SWITCHING_PROTOCOLS);
    let body = Limited::new(response.into_body(), limit).collect().await;
    body.map(http_body_util::Collected::to_bytes).map_err(Arc::from)
}

fn target(path: &str, query: &[(&'static str, String)]) -> String {
    let mut target = path.to_owned();
    for (index, (key, value)) in query.iter().enumerate() {
        target.push(if index == 0 { '?' } else { '&' });
        target.push_str(key);
        target.push('=');
        for byte in value.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => target.push(char::from(byte)),
                other => target.push_str(&format!("%{other:02X}")),
            }
        }
    }
    target
}

/// In the format of kubelets: `rubelet/0.1.0 (linux/amd64) kubernetes/v1.36`.
fn user_agent() -> HeaderValue {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let text = format!("rubelet/{} (linux/{architecture}) kubernetes/v1.36", env!("CARGO_PKG_VERSION"));
    HeaderValue::from_str(&text).expect("version and architecture are plain words")
}
