//! `/logs`: container logs over the root-only socket.
//!
//! Owns: the query parameters. The rest is `container_logs.rs`.

use axum::{
    extract::{Path, Query, State},
    response::Response,
};
use serde::Deserialize;

use super::not_found;
use crate::server::{
    ServerContext,
    container_logs::{self, LogOptions},
    log_file::{LogRun, Streams, Timestamps},
    views::find::{PodQuery, find},
};

#[derive(Debug, Default, Deserialize)]
pub(super) struct LogsQuery {
    namespace: Option<String>,
    #[serde(default)]
    follow: u8,
    #[serde(default)]
    previous: u8,
    #[serde(default)]
    timestamps: u8,
    tail: Option<u64>,
    since_secs: Option<i64>,
}

pub(super) async fn logs(
    State(context): State<ServerContext>,
    Path((pod, container)): Path<(String, String)>,
    Query(query): Query<LogsQuery>,
) -> Response {
    let snapshot = context.snapshot();
    let (uid, view) = match find(&snapshot, PodQuery { name: &pod, namespace: query.namespace.as_deref() }) {
        Ok(found) => found,
        Err(error) => return not_found(error),
    };
    let options = LogOptions {
        run: if query.previous == 0 { LogRun::Current } else { LogRun::Previous },
        follow: query.follow != 0,
        timestamps: if query.timestamps == 0 { Timestamps::Hidden } else { Timestamps::Shown },
        tail: query.tail,
        since: query.since_secs.map(|secs| container_logs::earlier(context.clock.now().wall, secs)),
        limit_bytes: None,
        streams: Streams::All,
    };
    container_logs::answer(&context, uid, view, container, options).await
}
