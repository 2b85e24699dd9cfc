//! Container logs as responses.
//!
//! Owns: finding the log file of a pod's container, and when following it ends. Reading is `log_file.rs`.

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use jiff::{SignedDuration, Timestamp};
use rubelet_core::{
    container::logs::pod_dir_name,
    id::{PodUid, name_of, namespace_of},
    snapshot::{PodView, Snapshot},
    time::moved,
};
use rubelet_kube::error_chain;

use super::{
    ServerContext,
    health::text,
    log_file::{self, Follow, LogRequest, LogRun, Stopped, Streams, Timestamps, choose_attempt},
};

/// The options of a log request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogOptions {
    pub run: LogRun,
    pub follow: bool,
    pub timestamps: Timestamps,
    pub tail: Option<u64>,
    pub since: Option<Timestamp>,
    pub limit_bytes: Option<u64>,
    pub streams: Streams,
}

pub(crate) async fn answer(
    context: &ServerContext,
    uid: &PodUid,
    view: &PodView,
    container: String,
    options: LogOptions,
) -> Response {
    let attempt = match choose_attempt(&view.status, name_of(&view.pod), &container, options.run) {
        Ok(attempt) => attempt,
        Err(reason) => return text(StatusCode::BAD_REQUEST, reason),
    };
    let run = Run { uid: uid.clone(), container, attempt };
    let follow =
        options.follow.then(|| Follow { stopped: run.clone().stopped(context), watches: context.log_watches.clone() });
    let request = LogRequest {
        logs_dir: context.paths.pod_logs_dir.clone(),
        pod_dir_name: pod_dir_name(namespace_of(&view.pod), name_of(&view.pod), uid),
        container: run.container,
        attempt,
        tail: options.tail,
        since: options.since,
        limit_bytes: options.limit_bytes,
        timestamps: options.timestamps,
        streams: options.streams,
        follow,
    };
    match log_file::read(request).await {
        Ok(stream) => ([(header::CONTENT_TYPE, "text/plain")], Body::from_stream(stream)).into_response(),
        Err(error) => text(StatusCode::BAD_REQUEST, error_chain(&error)),
    }
}

/// That long ago.
pub(crate) fn earlier(now: Timestamp, secs: i64) -> Timestamp {
    moved(now, SignedDuration::from_secs(-secs.max(0)))
}

/// One run of one container.
#[derive(Clone, Debug)]
struct Run {
    uid: PodUid,
    container: String,
    attempt: u32,
}

impl Run {
    /// Completes when this run has ended in a snapshot, or the agent stops.
    fn stopped(self, context: &ServerContext) -> Stopped {
        let mut snapshots = context.snapshots.clone();
        Box::pin(async move {
            let _ = snapshots.wait_for(|snapshot| !self.goes_on(snapshot)).await;
        })
    }

    fn goes_on(&self, snapshot: &Snapshot) -> bool {
        snapshot.pods.get(&self.uid).is_some_and(|view| self.goes_on_in(view))
    }

    fn goes_on_in(&self, view: &PodView) -> bool {
        let status = &view.status;
        let all = [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
        all.into_iter().flatten().flatten().any(|container| {
            container.name == self.container
                && u32::try_from(container.restart_count) == Ok(self.attempt)
                && container.state.as_ref().is_some_and(|state| state.running.is_some())
        })
    }
}
