//! The paths of resource usage: `/stats/summary`, `/metrics/resource`, `/metrics/cadvisor`.
//!
//! Owns: which detail a request samples, and the response without data.
//! Upstream: `pkg/kubelet/server/stats/handler.go`, `InstallAuthNotRequiredHandlers`.

use axum::{
    Json, Router,
    extract::{RawQuery, State},
    http::{Method, StatusCode},
    middleware,
    response::{IntoResponse, Response},
    routing::any,
};

use super::{ServerContext, health::text, metrics_encoding, read_only::only};
use crate::stats::{
    cadvisor, resource_metrics,
    sample::{Extent, Rate},
    summary,
};

pub(super) fn routes() -> Router<ServerContext> {
    Router::new()
        .route("/metrics/resource", any(resource))
        .route("/metrics/cadvisor", any(cadvisor))
        .layer(middleware::from_fn(metrics_encoding::send))
        .route("/stats/summary", only([Method::GET, Method::POST], stats_summary))
}

async fn stats_summary(State(context): State<ServerContext>, RawQuery(query): RawQuery) -> Response {
    let only_usage = only_cpu_and_memory(query.as_deref().unwrap_or_default());
    let extent = if only_usage { Extent::Usage } else { Extent::Summary };
    let sample = match context.stats.sample(extent, Rate::Wanted).await {
        Ok(sample) => sample,
        Err(error) => {
            tracing::warn!(%error, "failed to sample /stats/summary");
            return text(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {error}"));
        }
    };
    if only_usage {
        return Json(summary::usage(&sample)).into_response();
    }
    let disks = context.stats.disks(&sample).await;
    Json(summary::summary(&sample, &disks)).into_response()
}

/// Written once, with this exact name.
fn only_cpu_and_memory(query: &str) -> bool {
    let mut said = form_urlencoded::parse(query.as_bytes()).filter(|(name, _)| name == "only_cpu_and_memory");
    said.next().is_some_and(|(_, value)| value == "true") && said.next().is_none()
}

async fn cadvisor(State(context): State<ServerContext>) -> Response {
    let sample = context.stats.sample(Extent::Everything, Rate::Unneeded).await;
    if let Err(error) = &sample {
        tracing::warn!(%error, "failed to sample /metrics/cadvisor");
    }
    cadvisor::exposition(sample.as_deref()).into_response()
}

async fn resource(State(context): State<ServerContext>) -> Response {
    let sample = context.stats.sample(Extent::Usage, Rate::Unneeded).await;
    if let Err(error) = &sample {
        tracing::warn!(%error, "failed to sample /metrics/resource");
    }
    resource_metrics::exposition(sample.as_deref()).into_response()
}
