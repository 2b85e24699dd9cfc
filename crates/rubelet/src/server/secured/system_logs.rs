//! `/logs/`: the files of `/var/log`, and the logs of the node's services.
//!
//! Owns: whether a request is for a file or a query. Never: reads outside the directory.
//! Upstream: `ServeLogs` and `Run` of `pkg/kubelet/kubelet.go`, `kubelet_server_journal.go`.

use std::path::PathBuf;

use axum::{
    Router,
    extract::{Path, RawQuery, State},
    http::{HeaderMap, Method, StatusCode},
    response::Response,
    routing::any,
};

mod chunks;
pub(crate) mod condition;
mod files;
mod journal;
pub(crate) mod query;

use files::Asked;
use query::Query;

use super::{Secured, pages::disabled};
use crate::server::{health::text, read_only::only};

/// What callers may read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum SystemLogs {
    /// `enableSystemLogHandler: false`.
    #[default]
    Off,
    Files {
        dir: PathBuf,
    },
    /// `enableSystemLogQuery: true`.
    FilesAndQueries {
        dir: PathBuf,
    },
}

pub(super) fn routes(logs: &SystemLogs) -> Router<Secured> {
    let answer = match logs {
        SystemLogs::Off => any(|| disabled("logs")),
        SystemLogs::Files { .. } | SystemLogs::FilesAndQueries { .. } => only([Method::GET], logs_of_node),
    };
    Router::new().route("/logs/", answer.clone()).route("/logs/{*path}", answer)
}

async fn logs_of_node(
    State(secured): State<Secured>,
    path: Option<Path<String>>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Response {
    let asked_for = Asked { headers, query };
    let path = path.map(|Path(path)| path).unwrap_or_default();
    let dir = match &secured.pages.system_logs {
        SystemLogs::Off => return disabled("logs").await,
        SystemLogs::Files { dir } => return files::serve(dir, &path, &asked_for).await,
        SystemLogs::FilesAndQueries { dir } => dir,
    };
    let refuse = |status, problems: Vec<String>| text(status, query::joined(&problems) + "\n");
    let asked = match Query::parse(asked_for.query.as_deref().unwrap_or_default()) {
        Ok(None) => return files::serve(dir, &path, &asked_for).await,
        Ok(Some(asked)) => asked,
        Err(problems) => return refuse(StatusCode::BAD_REQUEST, problems),
    };
    if !path.is_empty() && path != "/" {
        return text(StatusCode::NOT_ACCEPTABLE, "path not allowed in query mode\n".to_owned());
    }
    let mut problems = asked.problems();
    if let ([], Some(file)) = (problems.as_slice(), asked.file()) {
        problems.extend(files::problem(dir, file).await.map(|why| query::invalid_file(file, &why)));
    }
    if !problems.is_empty() {
        return refuse(StatusCode::NOT_ACCEPTABLE, problems);
    }
    match asked.file() {
        Some(file) => files::serve(dir, file, &asked_for).await,
        None => journal::answer(dir, &asked).await,
    }
}

#[cfg(test)]
mod tests;
