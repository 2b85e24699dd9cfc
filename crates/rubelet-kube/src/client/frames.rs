//! A watch's body: one JSON document per line.
//!
//! Owns: splitting chunks into lines, and lines into events. Never: decodes an object.

use std::error::Error;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    client::errors,
    port::{ApiError, ApiErrorKind, WatchEvent},
};

/// The largest object is 1.5 MiB in etcd, and larger as JSON; a longer line is not an event.
const MAX_FRAME_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(crate) struct Frames {
    /// `watch` and the path, for messages.
    operation: String,
    unread: BytesMut,
    /// How much of `unread` is known to hold no line end.
    searched: usize,
}

#[derive(Debug, thiserror::Error)]
enum FrameError {
    #[error("an event of more than {MAX_FRAME_BYTES} bytes")]
    TooLong,
    #[error("unknown type of event {0:?}")]
    UnknownType(String),
}

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

impl Frames {
    pub(crate) fn new(operation: String) -> Self {
        Frames { operation, unread: BytesMut::new(), searched: 0 }
    }

    pub(crate) fn push(&mut self, chunk: &[u8]) -> Result<(), ApiError> {
        if self.unread.len() + chunk.len() > MAX_FRAME_BYTES {
            return Err(self.unreadable(FrameError::TooLong));
        }
        self.unread.extend_from_slice(chunk);
        Ok(())
    }

    /// The next complete event.
    pub(crate) fn next(&mut self) -> Result<Option<WatchEvent>, ApiError> {
        loop {
            let Some(end) = self.unread[self.searched..].iter().position(|byte| *byte == b'\n') else {
                self.searched = self.unread.len();
                return Ok(None);
            };
            let line = self.unread.split_to(self.searched + end + 1);
            self.searched = 0;
            if !line.trim_ascii().is_empty() {
                return self.event(&line).map(Some);
            }
        }
    }

    fn event(&self, line: &[u8]) -> Result<WatchEvent, ApiError> {
        let frame: Frame<'_> = serde_json::from_slice(line).map_err(|error| self.unreadable(error))?;
        // A copy: a kept object must not keep the whole buffer alive.
        let object = Bytes::copy_from_slice(frame.object.get().as_bytes());
        match frame.kind {
            "ADDED" => Ok(WatchEvent::Added(object)),
            "MODIFIED" => Ok(WatchEvent::Modified(object)),
            "DELETED" => Ok(WatchEvent::Deleted(object)),
            "BOOKMARK" => Ok(WatchEvent::Bookmark(object)),
            "ERROR" => {
                let status = serde_json::from_slice(&object).map_err(|error| self.unreadable(error))?;
                Err(errors::watch_failed(&self.operation, &status))
            }
            other => Err(self.unreadable(FrameError::UnknownType(other.to_owned()))),
        }
    }

    fn unreadable(&self, cause: impl Error + Send + Sync + 'static) -> ApiError {
        ApiError::new(ApiErrorKind::Unreadable, format!("{}: unreadable answer", self.operation)).caused_by(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(chunks: &[&str]) -> Vec<Result<WatchEvent, ApiError>> {
        let mut frames = Frames::new("watch /api/v1/pods".to_owned());
        let mut events = Vec::new();
        for chunk in chunks {
            frames.push(chunk.as_bytes()).unwrap();
            while let Some(event) = frames.next().transpose() {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_are_lines_however_they_are_cut() {
        let text = "{\"type\":\"ADDED\",\"object\":{\"a\": 1}}\n\n{\"type\":\"BOOKMARK\",\"object\":{\"b\":\"x\\ny\"}}\n{\"type\":";
        let expected = [
            WatchEvent::Added(Bytes::from_static(b"{\"a\": 1}")),
            WatchEvent::Bookmark(Bytes::from_static(b"{\"b\":\"x\\ny\"}")),
        ];
        let read = |chunks: &[&str]| frames(chunks).into_iter().map(Result::unwrap).collect::<Vec<_>>();
        assert_eq!(read(&[text]), expected);
        for cut in 1..text.len() {
            let (head, tail) = text.split_at(cut);
            assert_eq!(read(&[head, tail]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn an_error_in_the_stream_has_a_kind() {
        let gone = r#"{"type":"ERROR","object":{"kind":"Status","message":"too old resource version","reason":"Expired","code":410}}"#;
        let events = frames(&[gone, "\n", "{\"type\":\"ODD\",\"object\":{}}\n", "nonsense\n"]);
        let shown: Vec<_> = events.into_iter().map(|event| event.unwrap_err()).collect();
        assert_eq!(
            shown.iter().map(|error| error.kind).collect::<Vec<_>>(),
            [ApiErrorKind::Expired, ApiErrorKind::Unreadable, ApiErrorKind::Unreadable]
        );
        assert_eq!(shown[0].to_string(), "watch /api/v1/pods: 410 Gone: too old resource version");
    }

    #[test]
    fn an_event_without_end_is_given_up() {
        let mut frames = Frames::new("watch /api/v1/pods".to_owned());
        let chunk = vec![b' '; 1 << 20];
        let refused = (0..17).find_map(|_| frames.push(&chunk).err());
        assert_eq!(refused.unwrap().kind, ApiErrorKind::Unreadable);
    }
}
