//! `exec`, `attach`, `portForward` and `run`: into a pod and out of it.
//!
//! Owns: from a path to the runtime's streaming server, and the passing on of bytes once both sides have agreed on a protocol.
//! Never: looks into the stream, follows or passes on a redirect, hands the caller's credentials to the runtime.
//! Upstream: `getExec`, `getAttach`, `getPortForward`, `getRun`, `UpgradeAwareHandler`.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    body::Body,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use rubelet_core::container::labels;
use rubelet_cri::{
    port::{RpcError, RpcErrorKind},
    v1,
};
use tokio::{
    io::{AsyncWriteExt as _, copy_buf, split},
    net::TcpStream,
    time::timeout,
};

use super::{Refusal, Secured, target::pod_named};
use crate::server::{connections::AfterUpgrade, health::text};

/// The runtime's server is on this machine and answers at once, or the command cannot be started.
const AGREE: Duration = Duration::from_secs(30);
const ERROR_MAX_BYTES: usize = 64 << 10;
/// As much as is read at a time and held for a peer that is slow.
const BUFFER_BYTES: usize = 64 << 10;

type Answer = Result<Response, Refusal>;
type Names = Path<BTreeMap<String, String>>;

/// `/…/{namespace}/{pod}/{container}`, or with the UID before the container.
struct Target<'a> {
    namespace: &'a str,
    pod: &'a str,
    uid: Option<&'a str>,
    container: &'a str,
}

impl<'a> Target<'a> {
    fn of(names: &'a BTreeMap<String, String>) -> Self {
        let name = |key: &str| names.get(key).map_or("", String::as_str);
        let (uid, container) = match names.get("last") {
            Some(last) => (Some(name("container")), last.as_str()),
            None => (names.get("uid").map(String::as_str), name("container")),
        };
        Target { namespace: name("namespace"), pod: name("pod"), uid, container }
    }
}

pub(super) async fn exec(State(secured): State<Secured>, names: Names, request: Request) -> Answer {
    let query = Query::of(&request);
    let Streams { stdin, stdout, stderr, tty } = query.streams()?;
    let container_id = container_id(&secured, &Target::of(&names.0))?;
    let asked = v1::ExecRequest { container_id, cmd: query.all("command"), tty, stdin, stdout, stderr };
    pass_on(secured.runtime.exec(asked).await, request).await
}

pub(super) async fn attach(State(secured): State<Secured>, names: Names, request: Request) -> Answer {
    let Streams { stdin, stdout, stderr, tty } = Query::of(&request).streams()?;
    let container_id = container_id(&secured, &Target::of(&names.0))?;
    let asked = v1::AttachRequest { container_id, stdin, tty, stdout, stderr };
    pass_on(secured.runtime.attach(asked).await, request).await
}

pub(super) async fn port_forward(State(secured): State<Secured>, names: Names, request: Request) -> Answer {
    let target = Target::of(&names.0);
    let ports = Query::of(&request).ports(request.headers());
    let port = ports.map_err(|reason| Refusal(StatusCode::BAD_REQUEST, reason))?;
    let snapshot = secured.readers.snapshot();
    let (uid, _) = pod_named(&snapshot, target.namespace, target.pod).ok_or_else(no_pod)?;
    if target.uid.is_some_and(|wanted| wanted != uid.as_str()) {
        return Err(Refusal(StatusCode::NOT_FOUND, "pod not found".to_owned()));
    }
    let filter = v1::PodSandboxFilter {
        state: Some(v1::PodSandboxStateValue { state: v1::PodSandboxState::SandboxReady.into() }),
        label_selector: [(labels::POD_UID.to_owned(), uid.as_str().to_owned())].into(),
        ..v1::PodSandboxFilter::default()
    };
    let found = secured.runtime.list_pod_sandbox(Some(filter)).await.map_err(|error| refused(&error))?;
    let newest = found.into_iter().max_by_key(|sandbox| sandbox.created_at);
    let missing = || failed(format!("failed to find sandbox for pod {}/{}", target.namespace, target.pod));
    let pod_sandbox_id = newest.ok_or_else(missing)?.id;
    pass_on(secured.runtime.port_forward(v1::PortForwardRequest { pod_sandbox_id, port }).await, request).await
}

/// A command without streams: its output is the answer.
pub(super) async fn run(State(secured): State<Secured>, names: Names, RawQuery(query): RawQuery) -> Answer {
    let container_id = container_id(&secured, &Target::of(&names.0))?;
    let query = Query::parse(query.as_deref().unwrap_or_default());
    let words = query.first("cmd").unwrap_or_default().split(' ').map(str::to_owned).collect::<Vec<_>>();
    let done = secured.runtime.exec_sync(&container_id, &words, Duration::ZERO).await;
    let done = done.map_err(|error| failed(error.grpc_text()))?;
    if done.exit_code != 0 {
        let (words, output) = (words.join(" "), String::from_utf8_lossy(&done.stderr));
        return Err(failed(format!("command '{words}' exited with {}: {output}", done.exit_code)));
    }
    let output = [done.stdout, done.stderr].concat();
    Ok(([(header::CONTENT_TYPE, "application/json")], output).into_response())
}

fn no_pod() -> Refusal {
    Refusal(StatusCode::NOT_FOUND, "pod does not exist".to_owned())
}

fn failed(message: String) -> Refusal {
    Refusal(StatusCode::INTERNAL_SERVER_ERROR, message)
}

fn refused(error: &RpcError) -> Refusal {
    let status = match error.kind {
        RpcErrorKind::NotFound => StatusCode::NOT_FOUND,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    Refusal(status, error.grpc_text())
}

fn container_id(secured: &Secured, target: &Target<'_>) -> Result<String, Refusal> {
    let snapshot = secured.readers.snapshot();
    let (uid, view) = pod_named(&snapshot, target.namespace, target.pod).ok_or_else(no_pod)?;
    let is_meant = target.uid.is_none_or(|wanted| wanted == uid.as_str());
    let id = view.running.get(target.container).filter(|_| is_meant);
    id.cloned().ok_or_else(|| failed(format!("container not found ({:?})", target.container)))
}

struct Query(Vec<(String, String)>);

struct Streams {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    tty: bool,
}

impl Query {
    fn of(request: &Request) -> Self {
        Self::parse(request.uri().query().unwrap_or_default())
    }

    fn parse(query: &str) -> Self {
        Query(form_urlencoded::parse(query.as_bytes()).into_owned().collect())
    }

    fn first(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(key, _)| key == name).map(|(_, value)| value.clone()).collect()
    }

    fn streams(&self) -> Result<Streams, Refusal> {
        let is_on = |name: &str| self.first(name) == Some("1");
        let tty = is_on("tty");
        // A terminal has one output.
        let streams = Streams { stdin: is_on("input"), stdout: is_on("output"), stderr: is_on("error") && !tty, tty };
        if streams.stdin || streams.stdout || streams.stderr {
            return Ok(streams);
        }
        Err(Refusal(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr".to_owned()))
    }

    /// Only a WebSocket says them beforehand; SPDY says a port with each of its streams.
    fn ports(&self, headers: &HeaderMap) -> Result<Vec<i32>, String> {
        let is_websocket =
            headers.get(header::UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"));
        let told: Vec<_> = self.0.iter().filter(|(key, _)| key == "port" || key == "ports").collect();
        if !is_websocket {
            return Ok(Vec::new());
        }
        if told.is_empty() {
            return Err("query parameter \"port\" is required".to_owned());
        }
        let ports = told.iter().flat_map(|(_, value)| value.split(','));
        let port = |text: &str| {
            let parsed = text.parse::<u16>().map_err(|_| format!("unable to parse {text:?} as a port"))?;
            if parsed == 0 { Err("port must be > 0".to_owned()) } else { Ok(i32::from(parsed)) }
        };
        ports.map(port).collect()
    }
}

/// The caller's request goes to the runtime's server, its answer to the caller; if both agree to change the protocol, bytes go
/// both ways from then on until one side ends it.
async fn pass_on(url: Result<String, RpcError>, request: Request) -> Answer {
    let url = url.map_err(|error| refused(&error))?;
    if !is_upgrade(request.headers()) {
        return Err(Refusal(StatusCode::BAD_REQUEST, "Upgrade request required".to_owned()));
    }
    match timeout(AGREE, agree(&url, request)).await {
        Ok(agreed) => agreed.map_err(|error| failed(format!("{error:#}"))),
        Err(_) => Err(failed("the runtime's streaming server does not answer".to_owned())),
    }
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    let connection = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    connection.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case("upgrade"))
}

async fn agree(url: &str, mut request: Request) -> anyhow::Result<Response> {
    let uri: Uri = url.parse()?;
    let authority = match (uri.scheme_str(), uri.authority()) {
        (Some("http"), Some(authority)) => authority.clone(),
        _ => anyhow::bail!("the runtime streams over something else than plain HTTP"),
    };
    let backend = TcpStream::connect(authority.as_str()).await?;
    backend.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(backend)).await?;
    let mut asked = hyper::Request::builder()
        .method(request.method().clone())
        .uri(path_of(&uri))
        .body(Empty::<bytes::Bytes>::new())?;
    *asked.headers_mut() = std::mem::take(request.headers_mut());
    // Our caller's secret is not the runtime's to know.
    asked.headers_mut().remove(header::AUTHORIZATION);
    asked.headers_mut().insert(header::HOST, authority.as_str().parse()?);
    let connection = connection.with_upgrades();
    let answer = {
        let (mut connection, mut sent) = (std::pin::pin!(connection), std::pin::pin!(sender.send_request(asked)));
        // Cancel safe: what did not end here is polled on below.
        let (answer, is_over) = tokio::select! {
            biased;
            answer = sent.as_mut() => (answer?, false),
            ended = connection.as_mut() => {
                ended?;
                (sent.await?, true)
            }
        };
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return refusal(answer, async { if is_over { Ok(()) } else { connection.await } }).await;
        }
        if !is_over {
            connection.await?;
        }
        answer
    };
    let after = request.extensions().get::<AfterUpgrade>().cloned();
    let after = after.ok_or_else(|| anyhow::anyhow!("this connection cannot change its protocol"))?;
    let mut response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS).body(Body::empty())?;
    *response.headers_mut() = answer.headers().clone();
    let (caller, runtime) = (hyper::upgrade::on(&mut request), hyper::upgrade::on(answer));
    after.set(async move {
        if let Err(error) = relay(caller, runtime).await {
            tracing::debug!(error = %error, "A stream ended early");
        }
    });
    Ok(response)
}

fn path_of(uri: &Uri) -> String {
    uri.path_and_query().map_or("/".to_owned(), ToString::to_string)
}

/// The runtime does not want to: what it says is said to the caller, but for a redirect, which nobody shall follow.
async fn refusal(
    answer: hyper::Response<Incoming>,
    connection: impl Future<Output = hyper::Result<()>>,
) -> anyhow::Result<Response> {
    if answer.status().is_redirection() || answer.status().is_informational() {
        anyhow::bail!("the runtime's streaming server answered {}", answer.status());
    }
    let status = answer.status();
    let read = Limited::new(answer.into_body(), ERROR_MAX_BYTES).collect();
    let (body, _) = tokio::join!(read, connection);
    let body = body.map_err(anyhow::Error::from_boxed)?.to_bytes();
    Ok(text(status, String::from_utf8_lossy(&body).into_owned()))
}

/// Until either side is done: all it sent has then reached the other.
async fn relay(caller: OnUpgrade, runtime: OnUpgrade) -> anyhow::Result<()> {
    let (caller, runtime) = tokio::try_join!(caller, runtime)?;
    let (from_caller, mut to_caller) = split(TokioIo::new(caller));
    let (from_runtime, mut to_runtime) = split(TokioIo::new(runtime));
    let mut from_caller = tokio::io::BufReader::with_capacity(BUFFER_BYTES, from_caller);
    let mut from_runtime = tokio::io::BufReader::with_capacity(BUFFER_BYTES, from_runtime);
    // Not cancel safe, and needs not be: the stream is over with the first of them.
    tokio::select! {
        biased;
        copied = copy_buf(&mut from_runtime, &mut to_caller) => copied?,
        copied = copy_buf(&mut from_caller, &mut to_runtime) => copied?,
    };
    let _ = tokio::join!(to_caller.shutdown(), to_runtime.shutdown());
    Ok(())
}
