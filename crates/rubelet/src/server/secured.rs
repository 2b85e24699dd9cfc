//! The kubelet's API on its port: for the API server and through it kubectl, for monitoring, for administrators.
//!
//! Owns: its routes, and the auth filter in front of all of them: no response, not even 404, before the caller is
//! authenticated and authorized.
//! Upstream: `ListenAndServeKubeletServer`, `NewServer`, `InstallAuthFilter` of `pkg/kubelet/server`.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Path, Request, State},
    http::{HeaderValue, StatusCode, Version, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::any,
};
use http::Method;
use rubelet_cri::port::ContainerRuntime;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub(crate) mod authentication;
pub(crate) mod authorization;
mod certificates;
mod checkpoint;
pub(crate) mod logs;
mod pages;
mod reviews;
mod setup;
pub(crate) mod streaming;
pub(crate) mod system_logs;
mod target;
pub(crate) mod tls;
mod turns;
mod zpages;

use authentication::{Authentication, Identity};
use authorization::{Authorization, ExecVerb, subresources_of, verb_of};
use pages::Pages;
use tls::TlsListener;

use super::{
    ServerContext,
    admin::Explanation,
    connections::{self, Limits},
    health::text,
    read_only::{self, only},
    unauthenticated::{Connection, PeerAddress},
    views,
};
use crate::metrics::http::{Port, count};

/// The configuration of the port.
#[derive(Clone)]
pub(crate) struct Secured {
    pub context: ServerContext,
    pub runtime: Arc<dyn ContainerRuntime>,
    pub guard: Arc<Guard>,
    /// `KubeletConfiguration` as `/configz` shows it.
    pub configuration: Arc<Value>,
    /// `enableDebuggingHandlers`.
    pub debugging: bool,
    /// `ExtendWebSocketsToKubelet`.
    pub translates_websockets: bool,
    pub pages: Arc<Pages>,
}

impl std::fmt::Debug for Secured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secured").field("debugging", &self.debugging).finish_non_exhaustive()
    }
}

/// Serves until `stop`.
pub(crate) async fn serve(listener: TcpListener, secured: Secured, stop: CancellationToken) {
    let certificates = secured.guard.authentication.certificates.clone();
    let listener = TlsListener { listener, certificates };
    connections::serve(&listener, router(secured), Limits::SECURED_PORT, &stop).await;
}

/// Authentication and authorization.
#[derive(Debug)]
pub(crate) struct Guard {
    pub authentication: Authentication,
    pub authorization: Authorization,
    pub exec_verb: ExecVerb,
}

fn router(secured: Secured) -> Router {
    let (guard, counting) = (secured.guard.clone(), secured.context.counting(Port::Secured));
    let open = read_only::open_routes(secured.context.clone());
    let routes =
        if secured.debugging { open.merge(debugging_routes(secured)) } else { read_only::without_debugging(open) };
    routes
        .layer(middleware::from_fn_with_state(guard, auth_filter))
        .layer(middleware::from_fn_with_state(counting, count))
}

fn debugging_routes(secured: Secured) -> Router {
    let exec = || only([Method::GET, Method::POST], streaming::exec);
    let attach = || only([Method::GET, Method::POST], streaming::attach);
    let forward = || only([Method::GET, Method::POST], streaming::port_forward);
    let run = || only([Method::POST], streaming::run);
    Router::new()
        .route("/containerLogs/{namespace}/{pod}/{container}", only([Method::GET], logs::logs))
        .route("/exec/{namespace}/{pod}/{container}", exec())
        .route("/exec/{namespace}/{pod}/{container}/{last}", exec())
        .route("/attach/{namespace}/{pod}/{container}", attach())
        .route("/attach/{namespace}/{pod}/{container}/{last}", attach())
        .route("/portForward/{namespace}/{pod}", forward())
        .route("/portForward/{namespace}/{pod}/{uid}", forward())
        .route("/run/{namespace}/{pod}/{container}", run())
        .route("/run/{namespace}/{pod}/{container}/{last}", run())
        .route("/runningpods/", only([Method::GET], running_pods))
        .route("/configz", any(configz))
        .route("/explain/{namespace}/{pod}", only([Method::GET], explain))
        .merge(pages::routes(&secured.pages))
        .with_state(secured)
}

async fn running_pods(State(secured): State<Secured>) -> Response {
    read_only::json(&views::running_pods(&secured.context.snapshot()))
}

/// The data of `rubelet explain`.
async fn explain(
    State(secured): State<Secured>,
    Path((namespace, pod)): Path<(String, String)>,
) -> Result<Json<Explanation>, HttpError> {
    let snapshot = secured.context.snapshot();
    let found = target::pod_named(&snapshot, &namespace, &pod);
    let (uid, view) = found.ok_or_else(|| HttpError(StatusCode::NOT_FOUND, format!("pod {pod:?} does not exist")))?;
    Ok(Json(Explanation::new(&snapshot, uid, view)))
}

async fn configz(State(secured): State<Secured>) -> Response {
    read_only::json(&json!({ "kubeletconfig": *secured.configuration }))
}

/// Upstream's error responses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HttpError(StatusCode, String);

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        text(self.0, self.1)
    }
}

/// The auth filter.
async fn auth_filter(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let connection = head.extensions.get::<Connection>().cloned().expect("the accept loop adds it");
    let refusal = match guard.judge(&head, &connection).await {
        Ok(()) => return next.run(Request::from_parts(head, body)).await,
        Err(refusal) => refusal,
    };
    let is_last = refusal.0 == StatusCode::UNAUTHORIZED && connection.refuse();
    let mut response = refusal.into_response();
    if is_last && head.version <= Version::HTTP_11 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

impl Guard {
    async fn judge(&self, head: &Parts, connection: &Connection) -> Result<(), HttpError> {
        let unauthorized = || HttpError(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned());
        let who = match self.authentication.identify(head, connection.address()).await {
            Ok(Some(who)) => who,
            Ok(None) => return Err(unauthorized()),
            Err(error) => {
                tracing::warn!(error, "Unable to authenticate the request due to an error");
                return Err(unauthorized());
            }
        };
        // Where everything is allowed, an anonymous caller is as good as another; elsewhere it remains unauthenticated.
        if !who.is_anonymous() || matches!(self.authorization, Authorization::AlwaysAllow) {
            connection.authenticate().await;
        }
        self.authorize((&who, connection.address()), &head.method, head.uri.path()).await
    }

    async fn authorize(
        &self,
        (who, peer): (&Identity, PeerAddress),
        method: &Method,
        path: &str,
    ) -> Result<(), HttpError> {
        let (verb, subresources) = (verb_of(method, path, self.exec_verb), subresources_of(path));
        let forbidden = || {
            let (user, subresources) = (&who.user, subresources.join(" "));
            let message =
                format!("Forbidden (user={user}, verb={verb}, resource=nodes, subresource(s)=[{subresources}])\n");
            HttpError(StatusCode::FORBIDDEN, message)
        };
        let authorizer = match &self.authorization {
            Authorization::AlwaysAllow => return Ok(()),
            Authorization::NoApiServer => return Err(forbidden()),
            Authorization::Webhook(authorizer) => authorizer,
        };
        for subresource in &subresources {
            match authorizer.allow((who, peer), verb, subresource).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(user = who.user, verb, subresource, error, "Authorization error");
                    let user = &who.user;
                    let message = format!(
                        "Authorization error (user={user}, verb={verb}, resource=nodes, subresource={subresource})"
                    );
                    return Err(HttpError(StatusCode::INTERNAL_SERVER_ERROR, message));
                }
            }
        }
        tracing::debug!(user = who.user, verb, "Forbidden");
        Err(forbidden())
    }
}

#[cfg(test)]
mod tests;
