//! Entry points of the fuzz targets (`rubelet-fuzz`) to parsers that are private.
//!
//! Owns: nothing else. Never: used by the agent.

use std::{io, ops::Range, path::Path, sync::Arc};

use axum::http::HeaderMap;
use bytes::BytesMut;
use futures_util::TryStreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{manifest::Origin, time::Now};
use rustls::pki_types::CertificateDer;
use serde_json::Value;
use tokio_util::codec::Decoder;

use crate::{
    certs::leaf::{Leaf, first_end},
    server::{
        log_file::{self, Filter, Lines, LogRequest, Streams, Timestamps},
        secured::{
            logs,
            streaming::{spdy, websocket},
            system_logs::{
                condition::{Precondition, check_preconditions},
                query::Query,
            },
        },
    },
    sources::read_manifest,
    yaml::{self, DuplicateKeys},
};

/// The first document of a text.
pub fn yaml(text: &[u8]) -> Option<Value> {
    yaml::parse(text, DuplicateKeys::LastWins).ok().map(|document| document.value)
}

/// The pods of a manifest, or why it is rejected.
pub fn manifest(text: &[u8], origin: &Origin, node_name: &str) -> Result<Vec<Arc<Pod>>, String> {
    read_manifest(text, origin, node_name).pods
}

/// What a peer sent, up to its first mistake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Each data message with its stream; for WebSockets that is 0.
    pub messages: Vec<(u32, Vec<u8>)>,
    /// Pings, ends and closes, with the number of messages before them.
    pub controls: Vec<(usize, String)>,
    pub is_mistaken: bool,
    /// The most bytes that stayed undecoded.
    pub most_held: usize,
}

/// What a WebSocket client sent in parts of this size.
pub fn websocket(bytes: &[u8], part: usize) -> Received {
    receive(websocket::Decoder::default(), bytes, part, |piece, received| match piece {
        websocket::Piece::Data { bytes, begins } => received.add(0, &bytes, begins),
        websocket::Piece::Ping(bytes) => received.control(format!("ping {bytes:?}")),
        websocket::Piece::Close => received.control("close".to_owned()),
    })
}

/// What a runtime's streaming server sent in parts of this size. Data of one stream without another frame between are one
/// message.
pub fn spdy(bytes: &[u8], part: usize) -> Received {
    receive(spdy::Decoder::default(), bytes, part, |frame, received| match frame {
        spdy::Frame::Data { stream, bytes } => {
            let after_control = received.controls.last().is_some_and(|(before, _)| *before == received.messages.len());
            let begins = after_control || received.messages.last().is_none_or(|(last, _)| *last != stream);
            received.add(stream, &bytes, begins);
        }
        spdy::Frame::End { stream } => received.control(format!("end {stream}")),
        spdy::Frame::Ping(id) => received.control(format!("ping {id}")),
    })
}

fn receive<D: Decoder>(
    mut decoder: D,
    bytes: &[u8],
    part: usize,
    mut take: impl FnMut(D::Item, &mut Received),
) -> Received {
    let (mut buffer, mut received) = (BytesMut::new(), Received::default());
    for part in bytes.chunks(part.max(1)) {
        buffer.extend_from_slice(part);
        loop {
            match decoder.decode(&mut buffer) {
                Ok(Some(item)) => take(item, &mut received),
                Ok(None) => break,
                Err(_) => {
                    received.is_mistaken = true;
                    return received;
                }
            }
        }
        received.most_held = received.most_held.max(buffer.len());
    }
    received
}

impl Received {
    fn add(&mut self, stream: u32, bytes: &[u8], begins: bool) {
        assert!(!bytes.is_empty(), "a piece is never empty");
        if begins {
            self.messages.push((stream, Vec::new()));
        }
        self.messages.last_mut().expect("the first piece begins a message").1.extend_from_slice(bytes);
    }

    fn control(&mut self, what: String) {
        self.controls.push((self.messages.len(), what));
    }
}

/// A container's log in blocks, as it is shown with or without times.
pub fn log_lines<'a>(blocks: impl IntoIterator<Item = &'a [u8]>, has_times: bool) -> Vec<u8> {
    let timestamps = if has_times { Timestamps::Shown } else { Timestamps::Hidden };
    let mut lines = Lines::new(Filter { timestamps, ..Filter::default() });
    let mut shown: Vec<u8> = blocks.into_iter().flat_map(|block| lines.take(block)).collect();
    shown.extend(lines.take_rest());
    shown
}

/// The log of container `app`, run 0, of pod `ns_pod_uid`, read from the disk.
pub async fn log_files(logs_dir: &Path, tail: Option<u64>) -> io::Result<Vec<u8>> {
    let request = LogRequest {
        logs_dir: logs_dir.to_owned(),
        pod_dir_name: "ns_pod_uid".to_owned(),
        container: "app".to_owned(),
        attempt: 0,
        tail,
        since: None,
        limit_bytes: None,
        timestamps: Timestamps::Hidden,
        streams: Streams::All,
        follow: None,
    };
    let stream = log_file::read(request).await.map_err(io::Error::other)?;
    let blocks: Vec<_> = stream.try_collect().await?;
    Ok(blocks.concat())
}

/// The end of a certificate's validity.
pub fn certificate_end(der: &[u8]) -> Result<Timestamp, String> {
    Leaf::parse(&CertificateDer::from(der)).map(|leaf| leaf.not_after).map_err(|error| error.to_string())
}

/// A chain with its key, and the first end of all its certificates.
pub fn certificate_pair(pem: &[u8]) -> (Result<(), String>, Result<Timestamp, String>) {
    (Leaf::of_pair(pem).map(drop).map_err(|error| error.to_string()), first_end(pem).map_err(|error| error.to_string()))
}

/// The tail and the byte limit of a query of `/containerLogs`.
pub fn log_options(query: &str, now: Now) -> Option<(Option<u64>, Option<u64>)> {
    logs::options(query, now).ok().map(|options| (options.tail, options.limit_bytes))
}

/// The number of mistakes in a query of `/logs/`.
pub fn system_log_query(query: &str) -> usize {
    match Query::parse(query) {
        Ok(query) => query.map_or(0, |query| query.problems().len()),
        Err(problems) => problems.len(),
    }
}

/// The part of a file that a request is for, if it is for a part.
pub fn requested_part(headers: &HeaderMap, length: u64, modified: Timestamp) -> Option<Range<u64>> {
    match check_preconditions(headers, length, modified) {
        Precondition::Part(part) => Some(part),
        Precondition::Whole | Precondition::NotModified | Precondition::Failed | Precondition::BadRange(_) => None,
    }
}
