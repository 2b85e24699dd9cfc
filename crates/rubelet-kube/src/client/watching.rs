//! An open watch.
//!
//! Owns: reading events off the response, and when the watch ends. Never: opens another.

use std::time::Duration;

use futures_util::stream;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::{sync::watch, time::Instant};

use crate::{
    client::{ResponseHead, errors, frames::Frames, transport::Lease},
    clock,
    port::{ApiError, Watch, WatchEvent, WatchStream},
};

/// The server ends a watch at `timeoutSeconds`; one that is this late is on a dead connection.
const END_GRACE: Duration = Duration::from_secs(30);

struct Watching {
    operation: String,
    body: Incoming,
    frames: Frames,
    /// When the connection's watches end, once that is known.
    retirement: watch::Receiver<Option<Instant>>,
    ends_at: Option<Instant>,
    has_failed: bool,
    /// Keeps the connection open.
    _lease: Lease,
}

pub(super) fn stream(watch: &Watch, operation: String, answer: ResponseHead) -> WatchStream {
    let limit = watch.query.iter().find(|(key, _)| *key == "timeoutSeconds");
    let limit_secs: Option<u64> = limit.and_then(|(_, seconds)| seconds.parse().ok());
    let watching = Watching {
        frames: Frames::new(operation.clone()),
        operation,
        body: answer.response.into_body(),
        retirement: answer.lease.retirement(),
        ends_at: limit_secs.map(|secs| clock::after(clock::now(), Duration::from_secs(secs).saturating_add(END_GRACE))),
        has_failed: false,
        _lease: answer.lease,
    };
    Box::pin(stream::unfold(watching, |mut watching| async {
        if watching.has_failed {
            return None;
        }
        let event = watching.next().await.transpose()?;
        watching.has_failed = event.is_err();
        Some((event, watching))
    }))
}

impl Watching {
    async fn next(&mut self) -> Result<Option<WatchEvent>, ApiError> {
        loop {
            if let Some(event) = self.frames.next()? {
                return Ok(Some(event));
            }
            let chunk = tokio::select! {
                biased;
                // Both cancel-safe: a wait holds nothing, a chunk not taken stays in the body.
                () = over(&mut self.retirement, self.ends_at) => return Ok(None),
                chunk = self.body.frame() => chunk,
            };
            match chunk {
                None => return Ok(None),
                Some(Ok(chunk)) => {
                    if let Some(data) = chunk.data_ref() {
                        self.frames.push(data)?;
                    }
                }
                Some(Err(error)) => return Err(errors::unreachable(&self.operation, error)),
            }
        }
    }
}

async fn over(retirement: &mut watch::Receiver<Option<Instant>>, ends_at: Option<Instant>) {
    let retired = async {
        // A dropped sender retires no connection.
        let Ok(ends) = retirement.wait_for(Option::is_some).await.map(|ends| *ends) else {
            return std::future::pending().await;
        };
        sleep_until(ends).await;
    };
    tokio::select! {
        biased;
        // Both are waits.
        () = retired => {}
        () = sleep_until(ends_at) => {}
    }
}

async fn sleep_until(end: Option<Instant>) {
    match end {
        Some(end) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
}
