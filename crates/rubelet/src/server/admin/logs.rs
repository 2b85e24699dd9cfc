//! `/logs`: what a container wrote, over the root-only socket.
//!
//! Owns: from the words of a request to the log file that is meant, and when following it is over. Reading is `log_file.rs`.

use axum::{
    body::Body,
    extract::{Path, Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use jiff::{SignedDuration, Timestamp};
use rubelet_core::{
    container::logs::pod_dir_name,
    id::{PodUid, name_of, namespace_of},
    snapshot::{PodView, Snapshot},
};
use serde::Deserialize;

use super::not_found;
use crate::{
    logging::chain,
    server::{
        Readers,
        health::text,
        log_file::{self, LogRequest, Stopped, Timestamps, Which, choose_attempt},
        views::find::{Wanted, find},
    },
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
    State(readers): State<Readers>,
    Path((pod, container)): Path<(String, String)>,
    Query(query): Query<LogsQuery>,
) -> Response {
    let snapshot = readers.snapshot();
    let (uid, view) = match find(&snapshot, Wanted { name: &pod, namespace: query.namespace.as_deref() }) {
        Ok(found) => found,
        Err(error) => return not_found(error),
    };
    let which = if query.previous == 0 { Which::Current } else { Which::Previous };
    let attempt = match choose_attempt(&view.status, name_of(&view.pod), &container, which) {
        Ok(attempt) => attempt,
        Err(reason) => return text(StatusCode::BAD_REQUEST, reason),
    };
    let run = Run { uid: uid.clone(), container, attempt };
    let follow = (query.follow != 0).then(|| run.clone().stopped(&readers));
    let request = LogRequest {
        logs_dir: readers.paths.pod_logs_dir.clone(),
        pod_dir_name: pod_dir_name(namespace_of(&view.pod), name_of(&view.pod), uid),
        container: run.container,
        attempt,
        tail: query.tail,
        since: query.since_secs.map(|secs| earlier(readers.clock.now().wall, secs)),
        timestamps: if query.timestamps == 0 { Timestamps::Hidden } else { Timestamps::Shown },
        follow,
    };
    match log_file::read(request).await {
        Ok(stream) => ([(header::CONTENT_TYPE, "text/plain")], Body::from_stream(stream)).into_response(),
        Err(error) => text(StatusCode::BAD_REQUEST, chain(&error)),
    }
}

fn earlier(now: Timestamp, secs: i64) -> Timestamp {
    now.checked_sub(SignedDuration::from_secs(secs.max(0))).unwrap_or(Timestamp::MIN)
}

/// One run of one container.
#[derive(Clone, Debug)]
struct Run {
    uid: PodUid,
    container: String,
    attempt: u32,
}

impl Run {
    /// Completes when this run is over, as the agent sees it, or the agent is.
    fn stopped(self, readers: &Readers) -> Stopped {
        let mut snapshots = readers.snapshots.clone();
        Box::pin(async move {
            let _ = snapshots.wait_for(|snapshot| !self.goes_on(snapshot)).await;
        })
    }

    fn goes_on(&self, snapshot: &Snapshot) -> bool {
        snapshot.pods.get(&self.uid).is_some_and(|view| self.goes_on_in(view))
    }

    fn goes_on_in(&self, view: &PodView) -> bool {
        let status = &view.status;
        let mut all = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
        all.any(|container| {
            container.name == self.container
                && u32::try_from(container.restart_count) == Ok(self.attempt)
                && container.state.as_ref().is_some_and(|state| state.running.is_some())
        })
    }
}
