//! Requests to the API server.
//!
//! Owns: the metric families of the API client. Watches are counted, not timed.
//! Upstream: `component-base/metrics/prometheus/restclient`.

use std::sync::Arc;

use rubelet_kube::client::{Observed, Observer, Occurrence};

use super::{
    Metrics,
    family::{Counters, Histograms},
    text::Text,
};

const LATENCY_BOUNDS: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
const SIZE_BOUNDS: &[f64] =
    &[64.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0];

#[derive(Debug)]
pub struct ApiCalls {
    total: Counters<3>,
    duration: Histograms<2>,
    rate_limiter: Histograms<2>,
    sent: Histograms<2>,
    received: Histograms<2>,
}

impl ApiCalls {
    pub(super) fn new() -> Self {
        ApiCalls {
            total: Counters::new(
                "rest_client_requests_total",
                ["code", "method", "host"],
                "[ALPHA] Number of HTTP requests, partitioned by status code, method, and host.",
            ),
            duration: Histograms::new(
                "rest_client_request_duration_seconds",
                ["verb", "host"],
                LATENCY_BOUNDS,
                "[ALPHA] Request latency in seconds. Broken down by verb, and host.",
            ),
            rate_limiter: Histograms::new(
                "rest_client_rate_limiter_duration_seconds",
                ["verb", "host"],
                LATENCY_BOUNDS,
                "[ALPHA] Client side rate limiter latency in seconds. Broken down by verb, and host.",
            ),
            sent: Histograms::new(
                "rest_client_request_size_bytes",
                ["verb", "host"],
                SIZE_BOUNDS,
                "[ALPHA] Request size in bytes. Broken down by verb and host.",
            ),
            received: Histograms::new(
                "rest_client_response_size_bytes",
                ["verb", "host"],
                SIZE_BOUNDS,
                "[ALPHA] Response size in bytes. Broken down by verb and host.",
            ),
        }
    }

    pub(super) fn observe(&self, observed: &Observed<'_>) {
        let (method, host) = (observed.method.as_str(), observed.host);
        match observed.what {
            Occurrence::Waited(wait) => self.rate_limiter.observe([method, host], wait.as_secs_f64()),
            Occurrence::Tried(Some(code)) => self.total.inc([code.as_str(), method, host]),
            Occurrence::Tried(None) => self.total.inc(["<error>", method, host]),
            Occurrence::Called { took, sent_bytes, received_bytes } => {
                self.duration.observe([method, host], took.as_secs_f64());
                self.sent.observe([method, host], float(sent_bytes));
                if let Some(bytes) = received_bytes {
                    self.received.observe([method, host], float(bytes));
                }
            }
        }
    }

    pub fn write(&self, text: &mut Text) {
        self.total.write(text);
        self.duration.write(text);
        self.rate_limiter.write(text);
        self.sent.write(text);
        self.received.write(text);
    }
}

/// The observer of the client.
pub(crate) fn observer(metrics: &Arc<Metrics>) -> Observer {
    let metrics = metrics.clone();
    Observer::new(move |observed| metrics.api.observe(observed))
}

#[expect(clippy::cast_precision_loss, reason = "answers have a limit far below what a float can count")]
fn float(bytes: usize) -> f64 {
    bytes as f64
}
