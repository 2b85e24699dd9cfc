//! The proxy between the caller and the runtime's streaming server.
//!
//! Owns: the request to the runtime, its response, the response to the caller, and copying bytes if both use the same protocol.
//! Never: follows or forwards a redirect, sends the caller's credentials to the runtime, buffers more than one block per
//! direction.
//! Upstream: `UpgradeAwareHandler`, `IsWebSocketRequestWithStreamCloseProtocol`, `NewTunnelingHandler`.

use std::time::Duration;

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, Method, StatusCode, Uri, header, uri::Authority},
    response::Response,
};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, copy_buf, split},
    net::TcpStream,
    time::timeout,
};

use super::{
    Answer, HttpError, Streams, failed,
    translation::{self, V4, V5},
    tunnel,
    websocket::{Handshake, is_websocket, protocols},
};
use crate::server::{connections::AfterUpgrade, health::text};

/// The runtime's server is local and responds at once, or the command cannot be started.
const AGREE: Duration = Duration::from_secs(30);
const ERROR_MAX_BYTES: usize = 64 << 10;
/// Bytes read at a time and buffered for a slow peer.
pub(super) const BUFFER_BYTES: usize = 64 << 10;
/// Timeout of the closing handshake with a peer that no longer reads.
const FAREWELL: Duration = Duration::from_secs(10);
const SPDY: &str = "SPDY/3.1";
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");

/// The mapping from the caller's protocol to the runtime's.
#[derive(Debug)]
pub(super) enum ProxyMode {
    /// Both use the same protocol.
    Relay,
    /// Channels of the caller's WebSocket are SPDY streams to the runtime.
    Translate { handshake: Handshake, streams: Streams },
    /// SPDY inside WebSocket messages.
    Tunnel { handshake: Handshake, protocols: Vec<String> },
}

impl ProxyMode {
    /// Runtimes support all WebSocket protocols except v5, in which an input can be closed.
    pub(super) fn into_container(streams: Streams, request: &Request) -> Result<Self, HttpError> {
        let headers = request.headers();
        let is_v5 = is_websocket(headers) && protocols(headers).any(|protocol| protocol == V5);
        if !is_v5 {
            return Ok(ProxyMode::Relay);
        }
        Ok(ProxyMode::Translate { handshake: Handshake::of(request.method(), headers)?, streams })
    }

    pub(super) fn to_ports(request: &Request) -> Result<Self, HttpError> {
        let headers = request.headers();
        let tunnelled = protocols(headers).filter_map(tunnel::inner).map(str::to_owned);
        let protocols: Vec<String> = tunnelled.filter(|_| is_websocket(headers)).collect();
        if protocols.is_empty() {
            return Ok(ProxyMode::Relay);
        }
        Ok(ProxyMode::Tunnel { handshake: Handshake::of(request.method(), headers)?, protocols })
    }

    /// The request to the runtime: the caller's, or our own.
    fn request(&self, uri: &Uri, authority: &Authority, caller: &mut Request) -> http::Result<RuntimeRequest> {
        let path = uri.path_and_query().map_or("/".to_owned(), ToString::to_string);
        let mut asked = hyper::Request::builder().uri(path).body(Empty::new())?;
        let upgrade = |headers: &mut HeaderMap| -> http::Result<()> {
            headers.insert(header::CONNECTION, "Upgrade".parse()?);
            headers.insert(header::UPGRADE, SPDY.parse()?);
            Ok(())
        };
        match self {
            ProxyMode::Relay => {
                *asked.method_mut() = caller.method().clone();
                *asked.headers_mut() = std::mem::take(caller.headers_mut());
                // The caller's credentials are not sent to the runtime.
                asked.headers_mut().remove(header::AUTHORIZATION);
            }
            ProxyMode::Translate { .. } => {
                *asked.method_mut() = Method::POST;
                upgrade(asked.headers_mut())?;
                asked.headers_mut().insert(STREAM_PROTOCOL, V4.parse()?);
            }
            ProxyMode::Tunnel { protocols, .. } => {
                *asked.method_mut() = Method::POST;
                upgrade(asked.headers_mut())?;
                for protocol in protocols {
                    asked.headers_mut().append(STREAM_PROTOCOL, protocol.parse()?);
                }
            }
        }
        asked.headers_mut().insert(header::HOST, authority.as_str().parse()?);
        Ok(asked)
    }

    /// The response to the caller after the runtime's upgrade response.
    fn answer(&self, agreed: &HeaderMap) -> anyhow::Result<Response> {
        let told = |name: HeaderName| agreed.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let speaks_spdy = || {
            let upgrade = told(header::UPGRADE);
            anyhow::ensure!(upgrade.eq_ignore_ascii_case(SPDY), "the runtime speaks {upgrade:?} instead of {SPDY}");
            Ok(told(STREAM_PROTOCOL))
        };
        match self {
            ProxyMode::Relay => {
                let mut answer = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS).body(Body::empty())?;
                *answer.headers_mut() = agreed.clone();
                Ok(answer)
            }
            ProxyMode::Translate { handshake, .. } => {
                let protocol = speaks_spdy()?;
                anyhow::ensure!(protocol == V4, "the runtime streams by {protocol:?} instead of {V4}");
                Ok(handshake.agreed(V5)?.body(Body::empty())?)
            }
            ProxyMode::Tunnel { handshake, .. } => {
                Ok(handshake.agreed(&tunnel::outer(speaks_spdy()?))?.body(Body::empty())?)
            }
        }
    }
}

type RuntimeRequest = hyper::Request<Empty<bytes::Bytes>>;

/// Sends the caller's request to the runtime's server and its response to the caller; after an upgrade, bytes are copied
/// both ways until one side ends.
pub(super) async fn pass_on(url: &str, mode: ProxyMode, request: Request) -> Answer {
    if !is_upgrade(request.headers()) {
        return Err(HttpError(StatusCode::BAD_REQUEST, "Upgrade request required".to_owned()));
    }
    match timeout(AGREE, agree(url, mode, request)).await {
        Ok(agreed) => agreed.map_err(|error| failed(format!("{error:#}"))),
        Err(_) => Err(failed("the runtime's streaming server does not answer".to_owned())),
    }
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    let connection = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    connection.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case("upgrade"))
}

async fn agree(url: &str, mode: ProxyMode, mut request: Request) -> anyhow::Result<Response> {
    let uri: Uri = url.parse()?;
    let authority = match (uri.scheme_str(), uri.authority()) {
        (Some("http"), Some(authority)) => authority.clone(),
        _ => anyhow::bail!("the runtime streams over something else than plain HTTP"),
    };
    let after = request.extensions().get::<AfterUpgrade>().cloned();
    let after = after.ok_or_else(|| anyhow::anyhow!("this connection cannot change its protocol"))?;
    let asked = mode.request(&uri, &authority, &mut request)?;
    let agreed = match ask(&authority, asked).await? {
        Said::Yes(agreed) => agreed,
        Said::No(refusal) => return Ok(refusal),
    };
    let answer = mode.answer(agreed.headers())?;
    let (caller, runtime) = (hyper::upgrade::on(&mut request), hyper::upgrade::on(agreed));
    after.set(async move {
        if let Err(error) = converse(mode, caller, runtime).await {
            tracing::debug!(error = %error, "stream ended early");
        }
    });
    Ok(answer)
}

enum Said {
    Yes(hyper::Response<Incoming>),
    No(Response),
}

async fn ask(authority: &Authority, asked: RuntimeRequest) -> anyhow::Result<Said> {
    let backend = TcpStream::connect(authority.as_str()).await?;
    backend.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(backend)).await?;
    let connection = connection.with_upgrades();
    let (mut connection, mut sent) = (std::pin::pin!(connection), std::pin::pin!(sender.send_request(asked)));
    // Cancel safe: the rest is polled below.
    let (answer, is_over) = tokio::select! {
        biased;
        answer = sent.as_mut() => (answer?, false),
        ended = connection.as_mut() => {
            ended?;
            (sent.await?, true)
        }
    };
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let rest = async { if is_over { Ok(()) } else { connection.await } };
        return Ok(Said::No(refusal(answer, rest).await?));
    }
    if !is_over {
        connection.await?;
    }
    Ok(Said::Yes(answer))
}

/// The runtime's error is forwarded, except for a redirect. Its connection ends with the answer, though a runtime may keep it
/// open for another request.
async fn refusal(
    answer: hyper::Response<Incoming>,
    connection: impl Future<Output = hyper::Result<()>>,
) -> anyhow::Result<Response> {
    if answer.status().is_redirection() || answer.status().is_informational() {
        anyhow::bail!("the runtime's streaming server answered {}", answer.status());
    }
    let status = answer.status();
    let mut read = std::pin::pin!(Limited::new(answer.into_body(), ERROR_MAX_BYTES).collect());
    // Cancel safe: the rest is polled below.
    let body = tokio::select! {
        biased;
        body = read.as_mut() => body,
        _ended = connection => read.await,
    };
    let body = body.map_err(anyhow::Error::from_boxed)?.to_bytes();
    Ok(text(status, String::from_utf8_lossy(&body).into_owned()))
}

async fn converse(mode: ProxyMode, caller: OnUpgrade, runtime: OnUpgrade) -> anyhow::Result<()> {
    let (caller, runtime) = tokio::try_join!(caller, runtime)?;
    let (caller, runtime) = (TokioIo::new(caller), TokioIo::new(runtime));
    match mode {
        ProxyMode::Relay => relay(caller, runtime).await?,
        ProxyMode::Translate { streams, .. } => translation::translate(caller, runtime, streams).await?,
        ProxyMode::Tunnel { .. } => tunnel::unwrap(caller, runtime).await?,
    }
    Ok(())
}

pub(super) type Stream = TokioIo<hyper::upgrade::Upgraded>;

/// Until either side has ended and all its bytes have reached the other.
async fn relay(caller: Stream, runtime: Stream) -> std::io::Result<()> {
    let (from_caller, mut to_caller) = split(caller);
    let (from_runtime, mut to_runtime) = split(runtime);
    let mut from_caller = tokio::io::BufReader::with_capacity(BUFFER_BYTES, from_caller);
    let mut from_runtime = tokio::io::BufReader::with_capacity(BUFFER_BYTES, from_runtime);
    // Not cancel safe, which is fine: the stream ends with the first of them.
    tokio::select! {
        biased;
        copied = copy_buf(&mut from_runtime, &mut to_caller) => copied?,
        copied = copy_buf(&mut from_caller, &mut to_runtime) => copied?,
    };
    let last = async { tokio::join!(to_caller.shutdown(), to_runtime.shutdown()) };
    part(last, from_caller).await;
    Ok(())
}

/// Sends the last bytes to the caller, then discards its input: closing a connection with unread input resets it, and the
/// last bytes could be lost.
pub(super) async fn part<T>(last_words: impl Future<Output = T>, mut from_caller: impl AsyncRead + Unpin) {
    let unheard = async {
        let mut buffer = vec![0; BUFFER_BYTES];
        while let Ok(1..) = from_caller.read(&mut buffer).await {}
    };
    // A caller that does not close in time gets the reset.
    let _ = timeout(FAREWELL, async { tokio::join!(last_words, unheard) }).await;
}
