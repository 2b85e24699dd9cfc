//! The root-only socket behind `rubelet pods`, `node`, `explain`, `logs` and `events`.
//!
//! Owns: its routes and responses, all of them read-only. Access control is `socket.rs`.
//! Upstream has no counterpart; kubectl needs a cluster for the same information.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use futures_util::stream;
use rubelet_core::{
    eviction::EvictedPod,
    id::PodUid,
    snapshot::{NodeView, PodView, Snapshot},
};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{
    ServerContext,
    connections::{self, Limits},
    health,
    views::{
        self,
        find::{NotFound, PodQuery, find},
    },
};

mod logs;
pub(crate) mod socket;

pub(crate) use socket::{AdminSocket, SocketError, socket_path};

/// A watcher gets at most one table per this time, so that a burst of turns causes one redraw.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

/// The response to `explain`: the pod, and the problems of its node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Explanation {
    pub node: NodeView,
    pub uid: PodUid,
    pub view: Arc<PodView>,
    /// Its eviction, if this process evicted it.
    pub evicted: Option<EvictedPod>,
}

impl Explanation {
    pub(crate) fn new(snapshot: &Snapshot, uid: &PodUid, view: &Arc<PodView>) -> Explanation {
        let evicted = snapshot.eviction.record.recent.iter().rev().find(|evicted| evicted.pod.uid == *uid).cloned();
        Explanation { node: snapshot.node.clone(), uid: uid.clone(), view: view.clone(), evicted }
    }
}

pub(super) async fn serve(socket: AdminSocket, context: ServerContext, stop: &CancellationToken) {
    connections::serve(&socket, router(context), Limits::ROOT_SOCKET, stop).await;
}

pub(super) fn router(context: ServerContext) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/node", get(node))
        .route("/pods", get(pods))
        .route("/podlist", get(pod_list))
        .route("/explain/{pod}", get(explain))
        .route("/events", get(events))
        .route("/logs/{pod}/{container}", get(logs::logs))
        .with_state(context)
}

async fn healthz(State(context): State<ServerContext>) -> Response {
    health::answer(&[("syncloop", context.health.check(context.clock.now().uptime))], Some("verbose"))
}

async fn node(State(context): State<ServerContext>) -> Response {
    Json(views::node_report(&context.snapshot())).into_response()
}

async fn pod_list(State(context): State<ServerContext>) -> Response {
    Json(views::pod_list(&context.snapshot())).into_response()
}

#[derive(Debug, Deserialize)]
struct PodsQuery {
    #[serde(default)]
    watch: u8,
}

async fn pods(State(context): State<ServerContext>, Query(query): Query<PodsQuery>) -> Response {
    if query.watch == 0 {
        return Json(views::pod_table(&context.snapshot())).into_response();
    }
    let mut snapshots = context.snapshots;
    snapshots.mark_changed();
    let tables = stream::unfold((snapshots, None), |(mut snapshots, last)| async move {
        loop {
            // The loop has ended.
            snapshots.changed().await.ok()?;
            if last.is_some() {
                sleep(WATCH_PAUSE).await;
            }
            let table = views::pod_table(&snapshots.borrow_and_update().clone());
            if Some(&table) != last.as_ref() {
                return Some((line(&table), (snapshots, Some(table))));
            }
        }
    });
    ndjson(Body::from_stream(tables))
}

#[derive(Debug, Deserialize)]
struct ExplainQuery {
    namespace: Option<String>,
}

async fn explain(
    State(context): State<ServerContext>,
    Path(pod): Path<String>,
    Query(query): Query<ExplainQuery>,
) -> Response {
    let snapshot = context.snapshot();
    match find(&snapshot, PodQuery { name: &pod, namespace: query.namespace.as_deref() }) {
        Ok((uid, view)) => Json(Explanation::new(&snapshot, uid, view)).into_response(),
        Err(error) => not_found(error),
    }
}

/// The body is the [`NotFound`] itself; the client formats it.
fn not_found(error: NotFound) -> Response {
    let status = match &error {
        NotFound::Unknown { .. } => StatusCode::NOT_FOUND,
        NotFound::Ambiguous { .. } => StatusCode::CONFLICT,
    };
    (status, Json(error)).into_response()
}

#[derive(Debug, Deserialize)]
struct EventsQuery {
    #[serde(default)]
    since: u64,
    #[serde(default)]
    follow: u8,
}

async fn events(State(context): State<ServerContext>, Query(query): Query<EventsQuery>) -> Response {
    let log = context.events;
    let mut newest = log.subscribe();
    newest.mark_changed();
    if query.follow == 0 {
        let lines: Vec<_> = log.since(query.since).iter().map(line).collect();
        return ndjson(Body::from_stream(stream::iter(lines)));
    }
    // A slow reader misses what the ring overwrites; it never blocks the ring.
    let events = stream::unfold((log, newest, query.since), |(log, mut newest, mut since)| async move {
        loop {
            newest.changed().await.ok()?;
            let fresh = log.since(since);
            since = fresh.last().map_or(since, |event| event.sequence);
            if !fresh.is_empty() {
                let lines = fresh.iter().flat_map(|event| line(event).expect("infallible")).collect::<Vec<u8>>();
                return Some((Ok::<_, Infallible>(lines), (log, newest, since)));
            }
        }
    });
    ndjson(Body::from_stream(events))
}

fn line(value: &impl Serialize) -> Result<Vec<u8>, Infallible> {
    let mut line = serde_json::to_vec(value).expect("our views have string keys only");
    line.push(b'\n');
    Ok(line)
}

fn ndjson(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}
