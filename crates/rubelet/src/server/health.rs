//! Health of the agent.
//!
//! Owns: the check of the sync loop, and the bodies of `/healthz`. Never: checks pods or the runtime: a node whose
//! runtime is down still has a healthy agent.
//! Upstream: `SyncLoopHealthCheck`, `apiserver/pkg/server/healthz`, the healthz server of `cmd/kubelet/app`.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::RawQuery,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use rubelet_core::time::Uptime;
use tokio::{net::TcpListener, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::connections::{self, Limits};
use crate::metrics::Metrics;

/// Upstream's wait before it retries the health port.
const BIND_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// The time of the last turn. The loop writes, servers read.
#[derive(Debug)]
pub struct LoopHealth {
    /// Zero: no turn yet, which is healthy, as upstream.
    last_turn_ms: AtomicU64,
    stale_after: Duration,
}

impl LoopHealth {
    /// The loop must turn at least once per `sync_frequency`, even when idle.
    pub fn new(sync_frequency: Duration) -> Self {
        LoopHealth {
            last_turn_ms: AtomicU64::new(0),
            stale_after: sync_frequency.saturating_mul(2).max(Duration::from_secs(300)),
        }
    }

    /// The loop enters a turn.
    pub fn turned(&self, now: Uptime) {
        let ms = u64::try_from(now.as_duration().as_millis()).unwrap_or(u64::MAX);
        self.last_turn_ms.store(ms.max(1), Ordering::Relaxed);
    }

    pub fn check(&self, now: Uptime) -> Result<(), &'static str> {
        let last_turn_ms = self.last_turn_ms.load(Ordering::Relaxed);
        let last_turn = Uptime::new(Duration::from_millis(last_turn_ms));
        if last_turn_ms != 0 && now.since(last_turn) > self.stale_after {
            return Err("sync Loop took longer than expected");
        }
        Ok(())
    }
}

/// One named check and its result.
pub(crate) type Check = (&'static str, Result<(), &'static str>);

/// The body of `/healthz`: `ok`, or with `?verbose` or a failure one line per check.
pub(crate) fn answer(checks: &[Check], query: Option<&str>) -> Response {
    let failed = checks.iter().any(|(_, result)| result.is_err());
    let mut lines = String::new();
    for (name, result) in checks {
        lines.push_str(&match result {
            Ok(()) => format!("[+]{name} ok\n"),
            // The reason is shown only to clients with access to this check by name, as upstream.
            Err(_) => format!("[-]{name} failed: reason withheld\n"),
        });
    }
    let verbose = query.is_some_and(|query| query.split('&').any(|pair| pair.split('=').next() == Some("verbose")));
    match (failed, verbose) {
        (true, _) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{lines}healthz check failed\n")),
        (false, true) => text(StatusCode::OK, format!("{lines}healthz check passed\n")),
        (false, false) => text(StatusCode::OK, "ok".to_owned()),
    }
}

/// The body of `/healthz/NAME`.
pub(crate) fn answer_one(check: &Check) -> Response {
    match check.1 {
        Ok(()) => text(StatusCode::OK, "ok".to_owned()),
        Err(reason) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("internal server error: {reason}\n")),
    }
}

/// Plain text with sniffing disabled.
pub(crate) fn text(status: StatusCode, body: String) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (status, headers, body).into_response()
}

/// The health port: as upstream's, it has only the check `ping`, for every method.
pub(crate) async fn serve(address: SocketAddr, metrics: &Arc<Metrics>, stop: &CancellationToken) {
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => error!(%address, error = %error, "failed to start healthz server, will retry"),
        }
        // Cancel safe: neither arm holds data.
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(BIND_AGAIN_AFTER) => {}
        }
    };
    info!(%address, "Serving health");
    connections::serve(&listener, router(metrics.clone()), Limits::OPEN_PORT, stop).await;
}

fn router(metrics: Arc<Metrics>) -> Router {
    const PING: Check = ("ping", Ok(()));
    let all = |RawQuery(query): RawQuery| async move {
        metrics.slis.observe(&[PING]);
        answer(&[PING], query.as_deref())
    };
    Router::new()
        .route("/healthz", any(all))
        .route("/healthz/ping", any(|| async { answer_one(&PING) }))
        .fallback(|| async { text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()) })
}
