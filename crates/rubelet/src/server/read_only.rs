//! The read-only port, without authentication.
//!
//! Owns: its routes. Never: logs, exec or anything that changes state; those paths respond as upstream's do there.
//! Upstream: `ListenAndServeKubeletReadOnlyServer`.

use axum::{
    Router,
    extract::{Path, RawQuery, State},
    handler::Handler,
    http::{Method, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodFilter, MethodRouter, any, on},
};
use serde_json::Value;

use super::{
    ServerContext,
    health::{self, Check, text},
    metrics, stats, views,
};
use crate::metrics::http::{Port, count};

pub(crate) fn router(context: ServerContext) -> Router {
    let counting = context.counting(Port::ReadOnly);
    without_debugging(open_routes(context)).layer(middleware::from_fn_with_state(counting, count))
}

/// The routes that this port and the secured one share.
pub(crate) fn open_routes(context: ServerContext) -> Router {
    Router::new()
        .route("/healthz", any(healthz))
        .route("/healthz/{check}", any(one_check))
        .route("/pods", only([Method::GET], pods))
        .route("/pods/", only([Method::GET], pods))
        .merge(metrics::routes())
        .merge(stats::routes())
        .fallback(|| async { text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()) })
        .with_state(context)
}

/// A route of go-restful: for these methods only, without an implicit HEAD.
pub(crate) fn only<H, T, S, const N: usize>(methods: [Method; N], handler: H) -> MethodRouter<S>
where
    H: Handler<T, S>,
    T: 'static,
    S: Clone + Send + Sync + 'static,
{
    let allowed = methods.each_ref().map(Method::as_str).join(", ");
    let refuse = move || {
        let headers = [(header::ALLOW, allowed.clone())];
        async { (headers, text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed".to_owned())) }
    };
    let filters = methods.map(|method| MethodFilter::try_from(method).expect("a method that can be routed"));
    let taken = filters.into_iter().reduce(MethodFilter::or).expect("a route takes a method");
    on(taken, handler).head(refuse.clone()).fallback(refuse)
}

/// Paths that are not implemented return an explanation.
pub(crate) fn without_debugging(mut router: Router) -> Router {
    for path in ["/run", "/exec", "/attach", "/portForward", "/containerLogs", "/runningpods", "/logs", "/debug/pprof"]
    {
        router = router
            .route(&format!("{path}/"), any(debugging_disabled))
            .route(&format!("{path}/{{*rest}}"), any(debugging_disabled));
    }
    router
}

async fn healthz(State(context): State<ServerContext>, RawQuery(query): RawQuery) -> Response {
    let checks = checks(&context);
    context.metrics.slis.observe(&checks);
    health::answer(&checks, query.as_deref())
}

async fn one_check(State(context): State<ServerContext>, Path(wanted): Path<String>) -> Response {
    match checks(&context).iter().find(|(name, _)| *name == wanted) {
        Some(check) => health::answer_one(check),
        None => text(StatusCode::NOT_FOUND, "404 page not found\n".to_owned()),
    }
}

fn checks(context: &ServerContext) -> [Check; 3] {
    let now = context.clock.now().uptime;
    [("ping", Ok(())), ("log", Ok(())), ("syncloop", context.health.check(now))]
}

async fn pods(State(context): State<ServerContext>) -> Response {
    json(&views::pod_list(&context.snapshot()))
}

async fn debugging_disabled() -> Response {
    text(StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n".to_owned())
}

pub(crate) fn json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
