//! Bytes of peers on the network: frames, responses of the API server, requests.
//!
//! Owns: that it does not matter in which parts bytes arrive, and that little is held back.

use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use rubelet::fuzzing::{self, Received};
use rubelet_core::time::{Now, Uptime};
use rubelet_kube::{
    error_chain,
    fuzzing::{api_error, watch_events},
    port::WatchEvent,
};

use crate::choice;

/// A frame's head with its control data.
const WEBSOCKET_HELD: usize = 14 + 125;
const SPDY_HELD: usize = 12;
/// What an error may add to a text that is no `Status`.
const ERROR_OVERHEAD: usize = 100;

pub(crate) fn websocket(data: &[u8]) -> Option<()> {
    framed(data, WEBSOCKET_HELD, fuzzing::websocket)
}

pub(crate) fn spdy(data: &[u8]) -> Option<()> {
    framed(data, SPDY_HELD, fuzzing::spdy)
}

fn framed(data: &[u8], most_held: usize, receive: fn(&[u8], usize) -> Received) -> Option<()> {
    let (part, bytes) = choice(data);
    let in_parts = receive(bytes, usize::from(part));
    let at_once = receive(bytes, usize::MAX);
    assert!(in_parts.most_held < most_held && at_once.most_held < most_held);
    assert_eq!(Received { most_held: 0, ..in_parts }, Received { most_held: 0, ..at_once.clone() });
    let decoded: usize = at_once.messages.iter().map(|(_, message)| message.len()).sum();
    assert!(decoded <= bytes.len());
    (decoded > 0 && !at_once.is_mistaken).then_some(())
}

/// An error response, and the same bytes as the body of a watch.
pub(crate) fn api_response(data: &[u8]) -> Option<()> {
    let (first, body) = choice(data);
    let code = StatusCode::from_u16(400 + u16::from(first)).expect("three digits");
    let error = api_error(code, &HeaderMap::new(), body).to_string();
    assert!(error.starts_with("get /: "));
    // A character that is not UTF-8 is replaced by one of three bytes.
    assert!(error.len() <= body.len() * 3 + ERROR_OVERHEAD);
    let received = |part| -> Vec<Result<WatchEvent, String>> {
        watch_events(body, part).into_iter().map(|event| event.map_err(|error| error_chain(&error))).collect()
    };
    let at_once = received(usize::MAX);
    assert_eq!(received(usize::from(first)), at_once);
    assert!(at_once.len() <= body.iter().filter(|byte| **byte == b'\n').count());
    at_once.first()?.as_ref().ok().map(drop)
}

/// A query of both kinds of log, and the same text as a `Range`.
pub(crate) fn http_query(data: &[u8]) -> Option<()> {
    let (length, bytes) = choice(data);
    let query = String::from_utf8_lossy(bytes);
    let wall = Timestamp::UNIX_EPOCH;
    if let Some((tail, limit_bytes)) = fuzzing::log_options(&query, Now { uptime: Uptime::ZERO, wall }) {
        assert!(limit_bytes != Some(0));
        assert!(tail.is_none_or(|lines| i64::try_from(lines).is_ok()));
    }
    fuzzing::system_log_query(&query);
    let value = HeaderValue::from_bytes(bytes).ok()?;
    let headers = [header::RANGE, header::IF_MODIFIED_SINCE].map(|name| HeaderMap::from_iter([(name, value.clone())]));
    for headers in headers {
        if let Some(part) = fuzzing::requested_part(&headers, length.into(), wall) {
            assert!(part.start < part.end && part.end <= length.into(), "{part:?} of {length}");
        }
    }
    Some(())
}
