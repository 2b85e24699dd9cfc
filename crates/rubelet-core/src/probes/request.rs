//! The requests of probes and HTTP hooks.
//!
//! Owns: probes and HTTP hooks with their ports, hosts and headers resolved, and the outcomes of a probe.
//! Upstream: `prober.go` (runProbe), `probe/http/request.go`, `probe/util.go`.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::{
    api::core::v1::{Container, HTTPGetAction, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};
use serde::{Deserialize, Serialize};

use super::{Due, ProbeKind, Probed};
use crate::{
    container::{expansion::ExecSpace, is_host_network},
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    id::{ContainerId, PodRef},
};

/// The Kubernetes version in the probes' User-Agent.
const VERSION: &str = "1.36";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeRequest {
    pub pod: PodRef,
    pub container: String,
    pub id: ContainerId,
    pub kind: ProbeKind,
    pub action: ProbeAction,
    pub timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeAction {
    Exec { command: Vec<String> },
    Http(HttpGet),
    Tcp { host: String, port: u16 },
    Grpc { host: String, port: u16, service: String, user_agent: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpGet {
    pub url: String,
    /// A `Host` header replaces the default.
    pub headers: Vec<(String, String)>,
}

/// The text is for events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeOutcome {
    Success,
    /// Success, with a message for an event.
    Warning(String),
    Failure(String),
    /// The response broke off: upstream records a failure, and counts it neither way.
    Discarded(String),
    /// The probe could not be run.
    Unknown(String),
}

impl ProbeRequest {
    pub fn is_exec(&self) -> bool {
        matches!(self.action, ProbeAction::Exec { .. })
    }

    /// `None` while the pod has no address and the probe needs it.
    pub fn of(pod: &Probed<'_>, due: &Due<'_>) -> Option<Result<Self, ProbeOutcome>> {
        let probe = due.kind.of(due.container)?;
        let pod_ip = match pod.status.pod_ip.as_deref().filter(|ip| !ip.is_empty()) {
            Some(ip) => ip,
            // The node's address is not known; the loopback address reaches the same host.
            None if is_host_network(pod.spec) => "127.0.0.1",
            None if needs_pod_ip(probe) => return None,
            None => "",
        };
        let action = match ProbeAction::of(probe, due.container, pod_ip) {
            Ok(action) => action,
            Err(error) => return Some(Err(ProbeOutcome::Unknown(error.to_string()))),
        };
        Some(Ok(ProbeRequest {
            pod: pod.id.clone(),
            container: due.container.name.clone(),
            id: due.id.clone(),
            kind: due.kind,
            action,
            timeout: timeout(probe),
        }))
    }
}

impl ProbeOutcome {
    /// `None` for success.
    pub fn event(&self, pod: &PodRef, container: &str, kind: ProbeKind) -> Option<EventRecord> {
        let kind = kind.as_str();
        let (reason, message) = match self {
            ProbeOutcome::Success => return None,
            ProbeOutcome::Warning(text) => {
                (event_reasons::CONTAINER_PROBE_WARNING, format!("{kind} probe warning: {text}"))
            }
            ProbeOutcome::Failure(text) => (event_reasons::CONTAINER_UNHEALTHY, format!("{kind} probe failed: {text}")),
            ProbeOutcome::Discarded(text) => (
                event_reasons::CONTAINER_UNHEALTHY,
                format!("{kind} probe errored and resulted in failure state: {text}"),
            ),
            ProbeOutcome::Unknown(text) => (
                event_reasons::CONTAINER_UNHEALTHY,
                format!("{kind} probe errored and resulted in unknown state: {text}"),
            ),
        };
        let about = InvolvedObject::Container { pod: pod.clone(), container: container.to_owned() };
        Some(EventRecord::new(about, Severity::Warning, reason, message))
    }
}

/// Why the definition of a probe or a hook is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unresolvable(String);

impl ProbeAction {
    /// `pod_ip` is the default host.
    pub fn of(probe: &Probe, container: &Container, pod_ip: &str) -> Result<Self, Unresolvable> {
        if let Some(exec) = &probe.exec {
            return Ok(ProbeAction::Exec { command: expanded(exec.command.as_deref(), container)? });
        }
        if let Some(get) = &probe.http_get {
            return HttpGet::of(get, container, pod_ip, "probe").map(ProbeAction::Http);
        }
        if let Some(tcp) = &probe.tcp_socket {
            let host = tcp.host.as_deref().filter(|host| !host.is_empty()).unwrap_or(pod_ip).to_owned();
            return Ok(ProbeAction::Tcp { host, port: port(&tcp.port, container)? });
        }
        if let Some(grpc) = &probe.grpc {
            let port = port(&IntOrString::Int(grpc.port), container)?;
            let service = grpc.service.clone().unwrap_or_default();
            return Ok(ProbeAction::Grpc { host: pod_ip.to_owned(), port, service, user_agent: user_agent("probe") });
        }
        Err(Unresolvable(format!("missing probe handler for container {}", container.name)))
    }
}

/// The action goes to the pod's own address.
fn needs_pod_ip(probe: &Probe) -> bool {
    let names_host = |host: Option<&String>| host.is_some_and(|host| !host.is_empty());
    probe.grpc.is_some()
        || probe.http_get.as_ref().is_some_and(|get| !names_host(get.host.as_ref()))
        || probe.tcp_socket.as_ref().is_some_and(|tcp| !names_host(tcp.host.as_ref()))
}

fn timeout(probe: &Probe) -> Duration {
    let secs = probe.timeout_seconds.and_then(|secs| u64::try_from(secs).ok()).filter(|secs| *secs > 0);
    Duration::from_secs(secs.unwrap_or(1))
}

impl HttpGet {
    /// `purpose` is part of the User-Agent: `probe` or `lifecycle`.
    pub fn of(get: &HTTPGetAction, container: &Container, pod_ip: &str, purpose: &str) -> Result<Self, Unresolvable> {
        let scheme = get.scheme.as_deref().filter(|scheme| !scheme.is_empty()).unwrap_or("http").to_ascii_lowercase();
        let host = get.host.as_deref().filter(|host| !host.is_empty()).unwrap_or(pod_ip);
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let port = port(&get.port, container)?;
        let path = path(get.path.as_deref().unwrap_or_default());
        let given = get.http_headers.iter().flatten().map(|header| (header.name.clone(), header.value.clone()));
        let mut headers: Vec<_> = given.collect();
        for (name, value) in [("User-Agent", user_agent(purpose)), ("Accept", "*/*".to_owned())] {
            if !headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)) {
                headers.push((name.to_owned(), value));
            }
        }
        // An empty value removes these two.
        let is_optional = |name: &str| name.eq_ignore_ascii_case("Accept") || name.eq_ignore_ascii_case("User-Agent");
        headers.retain(|(name, value)| !value.is_empty() || !is_optional(name));
        Ok(HttpGet { url: format!("{scheme}://{host}:{port}{path}"), headers })
    }
}

fn user_agent(purpose: &str) -> String {
    format!("kube-{purpose}/{VERSION}")
}

/// The path begins with a slash, has no fragment, and is valid in a request line.
fn path(path: &str) -> String {
    let path = path.split('#').next().unwrap_or_default();
    let mut encoded = if path.starts_with('/') { String::new() } else { "/".to_owned() };
    for byte in path.bytes() {
        match byte {
            b'!' | b'#'..=b';' | b'=' | b'?'..=b'[' | b']' | b'_' | b'a'..=b'z' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// By number, by the name of one of the container's ports, or by a number written as text.
fn port(port: &IntOrString, container: &Container) -> Result<u16, Unresolvable> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|port| port.name.as_ref() == Some(name));
            match named {
                Some(port) => port.container_port,
                None => name.parse().map_err(|_| Unresolvable(format!("port {name} not found")))?,
            }
        }
    };
    let valid = u16::try_from(number).ok().filter(|port| *port > 0);
    valid.ok_or_else(|| Unresolvable(format!("invalid port number: {number}")))
}

/// Only variables with a literal value are expanded, as upstream. The result is bounded by what the kernel can execute.
fn expanded(command: Option<&[String]>, container: &Container) -> Result<Vec<String>, Unresolvable> {
    let variables = container.env.iter().flatten();
    let known: BTreeMap<&str, &[u8]> = variables
        .map(|variable| (variable.name.as_str(), variable.value.as_deref().unwrap_or_default().as_bytes()))
        .collect();
    let words = ExecSpace::without_string_limit()
        .words(command.unwrap_or_default(), "command", |name| known.get(name).copied());
    words.map_err(|error| Unresolvable(error.0))
}
