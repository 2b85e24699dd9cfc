//! Entry points of the fuzz targets (`rubelet-fuzz`) to parsers that are private.
//!
//! Owns: nothing else. Never: used by the agent.

use std::path::Path;

use http::{HeaderMap, StatusCode};

use crate::{
    client::{errors::refused, frames::Frames},
    kubeconfig::Kubeconfig,
    port::{ApiError, WatchEvent},
};

/// The text of the file at `path`.
pub fn kubeconfig(text: &[u8], path: &Path) -> Result<Kubeconfig, String> {
    Kubeconfig::parse(text, path).map_err(|problem| problem.to_string())
}

/// The error of a response.
pub fn api_error(code: StatusCode, headers: &HeaderMap, body: &[u8]) -> ApiError {
    refused("get /", code, headers, body)
}

/// The events of a watch whose body arrives in parts of this size, up to the first error.
pub fn watch_events(body: &[u8], part: usize) -> Vec<Result<WatchEvent, ApiError>> {
    let mut frames = Frames::new("watch /".to_owned());
    let mut events = Vec::new();
    for chunk in body.chunks(part.max(1)) {
        if let Err(error) = frames.push(chunk) {
            events.push(Err(error));
            return events;
        }
        while let Some(event) = frames.next().transpose() {
            let is_error = event.is_err();
            events.push(event);
            if is_error {
                return events;
            }
        }
    }
    events
}
