//! The read-only port: what anybody who reaches it may know, without authentication.
//!
//! Owns: its routes. Never: logs, exec or anything that changes; those paths answer as upstream's do there.
//! Upstream: `ListenAndServeKubeletReadOnlyServer`.

use axum::{
    Router,
    extract::{Path, RawQuery, State},
    http::{StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{any, get},
};
use serde_json::Value;

use super::{
    Readers, figures,
    health::{self, Check, text},
    metrics, views,
};
use crate::metrics::http::{Port, count};

pub fn router(readers: Readers) -> Router {
    let counting = readers.counting(Port::ReadOnly);
    without_debugging(open_routes(readers)).layer(middleware::from_fn_with_state(counting, count))
}

/// What this port and the secured one have in common.
pub fn open_routes(readers: Readers) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/healthz/{check}", get(one_check))
        .route("/pods", get(pods))
        .route("/pods/", get(pods))
        .merge(metrics::routes())
        .merge(figures::routes())
        .fallback(|| async { text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()) })
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(readers)
}

pub async fn method_not_allowed() -> Response {
    text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed\n".to_owned())
}

/// Where people may look for what is not served, they are told so.
pub fn without_debugging(mut router: Router) -> Router {
    for path in ["/run", "/exec", "/attach", "/portForward", "/containerLogs", "/runningpods", "/logs", "/debug/pprof"]
    {
        router = router
            .route(&format!("{path}/"), any(debugging_disabled))
            .route(&format!("{path}/{{*rest}}"), any(debugging_disabled));
    }
    router
}

async fn healthz(State(readers): State<Readers>, RawQuery(query): RawQuery) -> Response {
    let checks = checks(&readers);
    readers.metrics.slis.observe(&checks);
    health::answer(&checks, query.as_deref())
}

async fn one_check(State(readers): State<Readers>, Path(wanted): Path<String>) -> Response {
    match checks(&readers).iter().find(|(name, _)| *name == wanted) {
        Some(check) => health::answer_one(check),
        None => text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()),
    }
}

fn checks(readers: &Readers) -> [Check; 3] {
    let now = readers.clock.now().uptime;
    [("ping", Ok(())), ("log", Ok(())), ("syncloop", readers.health.check(now))]
}

async fn pods(State(readers): State<Readers>) -> Response {
    json(&views::pod_list(&readers.snapshot()))
}

async fn debugging_disabled() -> Response {
    text(StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n".to_owned())
}

pub fn json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
