//! `POST /checkpoint/…`: the runtime writes a container's state to an archive.
//!
//! Owns: the path of the archive, and upstream's error texts. Never: removes an archive; administrators do.
//! Upstream: `checkpoint` of `pkg/kubelet/server`, `CheckpointContainer` of the kubelet.

use std::path::PathBuf;

use axum::{
    extract::{Path, RawQuery, State},
    http::StatusCode,
    response::Response,
};
use rubelet_cri::v1::CheckpointContainerRequest;
use rubelet_host::{fs::make_dir, linux::blocking};
use serde_json::json;

use super::{
    HttpError, Secured,
    target::{has_container, pod_named},
};
use crate::server::read_only;

pub(super) async fn checkpoint(
    State(secured): State<Secured>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpError> {
    let missing = |what: String| HttpError(StatusCode::NOT_FOUND, what);
    let failed = |why: String| {
        let message = format!("checkpointing of {namespace}/{pod}/{container} failed ({why})");
        HttpError(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let snapshot = secured.context.snapshot();
    let (_, view) = pod_named(&snapshot, &namespace, &pod).ok_or_else(|| missing("pod does not exist".to_owned()))?;
    if !has_container(view, &container) {
        return Err(missing(format!("container {container} does not exist")));
    }
    let timeout = timeout_secs(query.as_deref().unwrap_or_default())
        .map_err(|()| missing("cannot parse value of timeout parameter".to_owned()))?;
    let id = view.running.get(&container).ok_or_else(|| failed(format!("container {container} not found")))?;
    if timeout < 0 {
        return Err(failed("CheckpointContainer requires the timeout value to be > 0".to_owned()));
    }
    let now = secured.context.clock.now().wall.strftime("%Y-%m-%dT%H:%M:%SZ");
    let dir = secured.context.paths.root_dir.join("checkpoints");
    let location = dir.join(format!("checkpoint-{pod}_{namespace}-{container}-{now}.tar"));
    make_private(dir).await.map_err(|error| failed(error.to_string()))?;
    let location = location.display().to_string();
    let request = CheckpointContainerRequest { container_id: id.clone(), location: location.clone(), timeout };
    secured.runtime.checkpoint_container(request).await.map_err(|error| failed(error.grpc_text()))?;
    Ok(read_only::json(&json!({ "items": [location] })))
}

/// The last value is used.
fn timeout_secs(query: &str) -> Result<i64, ()> {
    let asked = form_urlencoded::parse(query.as_bytes()).filter(|(name, _)| name == "timeout").last();
    asked.map_or(Ok(0), |(_, value)| value.parse().map_err(drop))
}

/// A container's memory must be readable by root only.
async fn make_private(dir: PathBuf) -> std::io::Result<()> {
    blocking(move || make_dir(&dir, 0o700)).await
}
