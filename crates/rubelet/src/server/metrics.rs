//! `/metrics`, `/metrics/probes` and `/metrics/slis`.
//!
//! Owns: the routes. Encoding is `metrics_encoding.rs`.
//! Upstream: `InstallAuthNotRequiredHandlers` of `pkg/kubelet/server`, `slis.SLIMetricsWithReset`.

use axum::{
    Router,
    extract::State,
    http::{Method, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::any,
};

use super::{ServerContext, health::text, metrics_encoding};
use crate::metrics::{
    claims,
    text::{CONTENT_TYPE, Text},
};

pub(crate) fn routes() -> Router<ServerContext> {
    Router::new()
        .route("/metrics", any(metrics))
        .route("/metrics/probes", any(probes))
        .route("/metrics/slis", any(slis))
        .layer(middleware::from_fn(metrics_encoding::send))
}

async fn metrics(State(context): State<ServerContext>) -> Response {
    let mut own = Text::default();
    claims::write(context.stats.persistent(), &mut own);
    page(context.metrics.page(&context.snapshot(), context.clock.now().wall) + &own.into_string())
}

async fn probes(State(context): State<ServerContext>) -> Response {
    page(context.metrics.probe_page())
}

/// Upstream resets for every caller with the permission to delete.
async fn slis(State(context): State<ServerContext>, method: Method) -> Response {
    if method == Method::DELETE {
        context.metrics.slis.reset();
        return text(StatusCode::OK, "metrics reset\n".to_owned());
    }
    page(context.metrics.sli_page())
}

fn page(page: String) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response()
}
