//! `exec`, `attach`, `portForward` and `run`.
//!
//! Owns: from path and query to the runtime's request, and the choice of the proxy mode. The rest is
//! `proxy.rs`.
//! Upstream: `getExec`, `getAttach`, `getPortForward`, `getRun`.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use rubelet_core::container::labels;
use rubelet_cri::{
    port::{RpcError, RpcErrorKind},
    v1,
};

mod proxy;
pub(crate) mod spdy;
mod translation;
mod tunnel;
pub(crate) mod websocket;

use proxy::{ProxyMode, pass_on};

use super::{
    HttpError, Secured,
    target::{has_uid, pod_named},
};

type Answer = Result<Response, HttpError>;
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
    let streams = query.streams()?;
    let Streams { stdin, stdout, stderr, tty } = streams;
    let container_id = container_id(&secured, &Target::of(&names.0))?;
    let asked = v1::ExecRequest { container_id, cmd: query.all("command"), tty, stdin, stdout, stderr };
    let url = secured.runtime.exec(asked).await.map_err(|error| refused(&error))?;
    pass_on(&url, mode_into_container(&secured, streams, &request)?, request).await
}

pub(super) async fn attach(State(secured): State<Secured>, names: Names, request: Request) -> Answer {
    let streams = Query::of(&request).streams()?;
    let Streams { stdin, stdout, stderr, tty } = streams;
    let container_id = container_id(&secured, &Target::of(&names.0))?;
    let asked = v1::AttachRequest { container_id, stdin, tty, stdout, stderr };
    let url = secured.runtime.attach(asked).await.map_err(|error| refused(&error))?;
    pass_on(&url, mode_into_container(&secured, streams, &request)?, request).await
}

pub(super) async fn port_forward(State(secured): State<Secured>, names: Names, request: Request) -> Answer {
    let target = Target::of(&names.0);
    let mode = if secured.translates_websockets { ProxyMode::to_ports(&request)? } else { ProxyMode::Relay };
    let port = match &mode {
        // Each stream in the tunnel names its port.
        ProxyMode::Tunnel { .. } => Ok(Vec::new()),
        ProxyMode::Relay | ProxyMode::Translate { .. } => Query::of(&request).ports(request.headers()),
    };
    let port = port.map_err(|reason| HttpError(StatusCode::BAD_REQUEST, reason))?;
    let snapshot = secured.context.snapshot();
    let (uid, view) = pod_named(&snapshot, target.namespace, target.pod).ok_or_else(no_pod)?;
    if target.uid.is_some_and(|wanted| !has_uid(uid, view, wanted)) {
        return Err(HttpError(StatusCode::NOT_FOUND, "pod not found".to_owned()));
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
    let asked = v1::PortForwardRequest { pod_sandbox_id, port };
    let url = secured.runtime.port_forward(asked).await.map_err(|error| refused(&error))?;
    pass_on(&url, mode, request).await
}

/// A command without streams: its output is the response.
pub(super) async fn run(State(secured): State<Secured>, names: Names, RawQuery(query): RawQuery) -> Answer {
    let container_id = container_id(&secured, &Target::of(&names.0))?;
    let query = Query::parse(query.as_deref().unwrap_or_default());
    let words = query.first("cmd").unwrap_or_default().split(' ').map(str::to_owned).collect::<Vec<_>>();
    let done = secured.runtime.exec_sync(&container_id, &words, Duration::ZERO, None).await;
    let done = done.map_err(|error| failed(error.grpc_text()))?;
    if done.exit_code != 0 {
        let (words, output) = (words.join(" "), String::from_utf8_lossy(&done.stderr));
        return Err(failed(format!("command '{words}' exited with {}: {output}", done.exit_code)));
    }
    let output = [done.stdout, done.stderr].concat();
    Ok(([(header::CONTENT_TYPE, "application/json")], output).into_response())
}

fn mode_into_container(secured: &Secured, streams: Streams, request: &Request) -> Result<ProxyMode, HttpError> {
    if secured.translates_websockets { ProxyMode::into_container(streams, request) } else { Ok(ProxyMode::Relay) }
}

fn no_pod() -> HttpError {
    HttpError(StatusCode::NOT_FOUND, "pod does not exist".to_owned())
}

fn failed(message: String) -> HttpError {
    HttpError(StatusCode::INTERNAL_SERVER_ERROR, message)
}

fn refused(error: &RpcError) -> HttpError {
    let status = match error.kind {
        RpcErrorKind::NotFound => StatusCode::NOT_FOUND,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    HttpError(status, error.grpc_text())
}

fn container_id(secured: &Secured, target: &Target<'_>) -> Result<String, HttpError> {
    let snapshot = secured.context.snapshot();
    let (uid, view) = pod_named(&snapshot, target.namespace, target.pod).ok_or_else(no_pod)?;
    let is_meant = target.uid.is_none_or(|wanted| has_uid(uid, view, wanted));
    let id = view.running.get(target.container).filter(|_| is_meant);
    id.cloned().ok_or_else(|| failed(format!("container not found ({:?})", target.container)))
}

struct Query(Vec<(String, String)>);

/// The requested streams of a command.
#[derive(Clone, Copy, Debug)]
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

    fn streams(&self) -> Result<Streams, HttpError> {
        let is_on = |name: &str| self.first(name) == Some("1");
        let tty = is_on("tty");
        // A terminal has one output.
        let streams = Streams { stdin: is_on("input"), stdout: is_on("output"), stderr: is_on("error") && !tty, tty };
        if streams.stdin || streams.stdout || streams.stderr {
            return Ok(streams);
        }
        Err(HttpError(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr".to_owned()))
    }

    /// Only a WebSocket names them in advance; SPDY names a port with each of its streams.
    fn ports(&self, headers: &HeaderMap) -> Result<Vec<i32>, String> {
        let told: Vec<_> = self.0.iter().filter(|(key, _)| key == "port" || key == "ports").collect();
        if !websocket::is_websocket(headers) {
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

#[cfg(test)]
mod tests;
