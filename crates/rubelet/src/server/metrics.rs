//! `/metrics`, `/metrics/probes` and `/metrics/slis`.
//!
//! Owns: the routes. How a page is sent is in `scrapes.rs`.
//! Upstream: `InstallAuthNotRequiredHandlers` of `pkg/kubelet/server`, `slis.SLIMetricsWithReset`.

use axum::{
    Router,
    extract::State,
    http::{Method, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::any,
};

use super::{Readers, health::text, scrapes};
use crate::metrics::text::CONTENT_TYPE;

pub(crate) fn routes() -> Router<Readers> {
    Router::new()
        .route("/metrics", any(metrics))
        .route("/metrics/probes", any(probes))
        .route("/metrics/slis", any(slis))
        .layer(middleware::from_fn(scrapes::send))
}

async fn metrics(State(readers): State<Readers>) -> Response {
    page(readers.metrics.page(&readers.snapshot(), readers.clock.now().wall))
}

async fn probes(State(readers): State<Readers>) -> Response {
    page(readers.metrics.probe_page())
}

/// Upstream begins anew for everybody who may delete.
async fn slis(State(readers): State<Readers>, method: Method) -> Response {
    if method == Method::DELETE {
        readers.metrics.slis.reset();
        return text(StatusCode::OK, "metrics reset\n".to_owned());
    }
    page(readers.metrics.sli_page())
}

fn page(page: String) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response()
}
