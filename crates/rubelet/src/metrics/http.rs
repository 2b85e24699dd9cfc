//! Requests to the agent's ports.
//!
//! Owns: the labels of a request, each from a fixed set, and when a request ends: with the last byte of
//! its response, or of the stream it was upgraded to.
//! Upstream: `ServeHTTP`, `getMetricBucket` and `server/metrics` of `pkg/kubelet/server`.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::{Method, StatusCode, header},
    middleware::Next,
    response::Response,
};
use hyper::body::{Frame, SizeHint};
use rubelet_core::time::Uptime;

use super::{
    Metrics,
    family::{Counters, DEFAULT_BOUNDS, Gauges, Histograms},
    text::Text,
};
use crate::{server::connections::AfterUpgrade, world::Clock};

/// The request path as upstream groups it; the rest is `other`.
const PATHS: &[&str] = &[
    "attach",
    "checkpoint",
    "configz",
    "containerLogs",
    "debug",
    "exec",
    "flagz",
    "healthz",
    "logs",
    "metrics",
    "metrics/cadvisor",
    "metrics/probes",
    "metrics/resource",
    "pods",
    "portForward",
    "run",
    "runningpods",
    "stats",
    "statusz",
];
/// Upstream matches `portforward`, which no path is called, so port forwards are not counted.
const LONG_RUNNING_PATHS: &[&str] = &["attach", "debug", "exec"];
const METHODS: &[Method] = &[
    Method::OPTIONS,
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::DELETE,
    Method::TRACE,
    Method::CONNECT,
];
const LABELS: [&str; 4] = ["method", "path", "server_type", "long_running"];

#[derive(Debug)]
pub struct HttpMetrics {
    total: Counters<4>,
    duration: Histograms<4>,
    in_flight: Gauges<4>,
    web_sockets: Counters<1>,
}

impl HttpMetrics {
    pub(super) fn new() -> Self {
        HttpMetrics {
            total: Counters::new(
                "kubelet_http_requests_total",
                LABELS,
                "[ALPHA] Number of the http requests received since the server started",
            ),
            duration: Histograms::new(
                "kubelet_http_requests_duration_seconds",
                LABELS,
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds to serve http requests",
            ),
            in_flight: Gauges::new(
                "kubelet_http_inflight_requests",
                LABELS,
                "[ALPHA] Number of the inflight http requests",
            ),
            web_sockets: Counters::new(
                "kubelet_websocket_streaming_requests_total",
                ["subresource"],
                "[ALPHA] Total number of WebSocket streaming requests (exec/attach/portforward) received by the kubelet.",
            ),
        }
    }

    pub fn write(&self, text: &mut Text) {
        self.total.write(text);
        self.duration.write(text);
        self.in_flight.write(text);
        self.web_sockets.write(text);
    }
}

/// The port of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    ReadOnly,
    Secured,
}

/// The request metrics of one port.
#[derive(Clone, Debug)]
pub(crate) struct Counting {
    pub metrics: Arc<Metrics>,
    pub clock: Clock,
    pub port: Port,
}

/// The layer around a port's router, outside of its authentication: rejected requests are counted, too.
pub(crate) async fn count(State(counting): State<Counting>, request: Request, next: Next) -> Response {
    let upgrade = request.extensions().get::<AfterUpgrade>().cloned();
    let web_socket = web_socket_of(&request);
    let in_flight = InFlight::begin(counting, request.method(), request.uri().path());
    if let Some(subresource) = web_socket {
        in_flight.counting.metrics.http.web_sockets.inc([subresource]);
    }
    let response = next.run(request).await;
    if let Some(upgrade) = upgrade.filter(|_| response.status() == StatusCode::SWITCHING_PROTOCOLS) {
        upgrade.hold(in_flight);
        return response;
    }
    response.map(|body| Body::new(Held { body, _in_flight: in_flight }))
}

/// A running request.
#[derive(Debug)]
struct InFlight {
    counting: Counting,
    labels: [&'static str; 4],
    began: Uptime,
}

impl InFlight {
    fn begin(counting: Counting, method: &Method, path: &str) -> Self {
        let labels = labels(method, path, counting.port);
        let requests = &counting.metrics.http;
        requests.total.inc(labels);
        requests.in_flight.add(labels, 1.0);
        InFlight { began: counting.clock.now().uptime, labels, counting }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let requests = &self.counting.metrics.http;
        let took = self.counting.clock.now().uptime.since(self.began);
        requests.in_flight.add(self.labels, -1.0);
        requests.duration.observe(self.labels, took.as_secs_f64());
    }
}

fn labels(method: &Method, path: &str, port: Port) -> [&'static str; 4] {
    let method = METHODS.iter().find(|known| *known == method).map_or("other", Method::as_str);
    let path = known_path(path);
    let port = match port {
        Port::ReadOnly => "readonly",
        Port::Secured => "readwrite",
    };
    [method, path, port, if LONG_RUNNING_PATHS.contains(&path) { "true" } else { "false" }]
}

/// The first segment of the path, or two below `/metrics`.
fn known_path(path: &str) -> &'static str {
    let path = path.strip_prefix('/').unwrap_or(path);
    let mut words = path.split('/');
    let first = words.next().unwrap_or_default();
    let root = match words.next() {
        Some(second) if first == "metrics" => &path[..first.len() + 1 + second.len()],
        _ => first,
    };
    PATHS.iter().find(|known| **known == root).copied().unwrap_or("other")
}

fn web_socket_of(request: &Request) -> Option<&'static str> {
    let upgrade = request.headers().get(header::UPGRADE)?;
    if !upgrade.as_bytes().eq_ignore_ascii_case(b"websocket") {
        return None;
    }
    match known_path(request.uri().path()) {
        "exec" => Some("exec"),
        "attach" => Some("attach"),
        "portForward" => Some("portforward"),
        _ => None,
    }
}

/// A response body; the request ends when it is dropped.
struct Held {
    body: Body,
    _in_flight: InFlight,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_by_its_first_word_and_otherwise_other() {
        let paths = [
            "/pods/",
            "/pods",
            "/exec/default/web/a",
            "/metrics",
            "/metrics/",
            "/metrics/cadvisor",
            "/metrics/probes/x",
            "/metrics/slis",
            "/metrics/9",
            "/",
            "",
            "//pods",
            "/Pods",
            "/stats/summary",
            "/portForward/a/b",
        ];
        let shown: Vec<_> = paths.iter().map(|path| format!("{path} {}", known_path(path))).collect();
        insta::assert_snapshot!(shown.join("\n"), @"
        /pods/ pods
        /pods pods
        /exec/default/web/a exec
        /metrics metrics
        /metrics/ other
        /metrics/cadvisor metrics/cadvisor
        /metrics/probes/x metrics/probes
        /metrics/slis other
        /metrics/9 other
        / other
         other
        //pods other
        /Pods other
        /stats/summary stats
        /portForward/a/b portForward
        ");
        assert_eq!(labels(&Method::GET, "/exec/a/b/c", Port::Secured), ["GET", "exec", "readwrite", "true"]);
        let odd = Method::from_bytes(b"BREW").unwrap();
        assert_eq!(labels(&odd, "/x", Port::ReadOnly), ["other", "other", "readonly", "false"]);
    }
}
