//! Lists and watches a collection.
//!
//! Owns: lists (streamed if the server supports it), watches, resuming from the last known version, relisting when the
//! version has expired, and the back-off. Never: stores objects; the receiver gets each change and decides what to
//! keep.
//! Upstream: client-go's Reflector.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::{
    clock, error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, Verb, Watch, WatchEvent, WatchStream},
};

/// The selected part of a collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    pub collection: ObjectPath,
    /// `spec.nodeName=n`.
    pub fields: Option<String>,
}

/// Objects are JSON as the server sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// The complete set.
    Replaced(Vec<Bytes>),
    /// New, or changed.
    Applied(Bytes),
    Deleted(Bytes),
}

const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// A streamed list without progress for this long comes from a server that ignores the option.
const STREAM_PAUSE: Duration = Duration::from_secs(10);
/// The server ends a watch after about this long; a dead connection is noticed then at the latest.
const WATCH_SECS: u64 = 300;
/// A watch that ends without an error sooner than this comes from a server that cannot serve it.
const SHORT_WATCH: Duration = Duration::from_secs(1);
/// After this many failed watches from one version, the collection is listed: the watch may never get past the next event.
const REFUSALS_AT_ONE_VERSION: u32 = 5;
const RETRY_FIRST: Duration = Duration::from_millis(800);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// On the bookmark that ends a streamed list.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Runs until the receiver is gone. `seed` spreads the retries of many nodes over time.
///
/// Guarantees: the first change is `Replaced`, and is consistent: it contains everything in the collection at the time of the request.
/// After it, every change between two lists is sent in the server's order, or a new `Replaced` stands for it, which is never
/// older than what was sent before.
pub async fn follow(api: &dyn ApiServer, selection: &Selection, seed: u64, changes: &mpsc::Sender<Delta>) {
    let retry = Retry { random: fastrand::Rng::with_seed(seed), delay: RETRY_FIRST, was_unreachable: false };
    let mut follower = Follower { api, selection, changes, version: None, may_stream: true, retry };
    tokio::select! {
        biased;
        // Cancel-safe: a dropped request or watch is closed, and nothing waits for it.
        () = changes.closed() => {}
        () = follower.list_and_watch() => {}
    }
}

struct Follower<'a> {
    api: &'a dyn ApiServer,
    selection: &'a Selection,
    changes: &'a mpsc::Sender<Delta>,
    /// The last received version: the next watch resumes from it, and no list may be older. Without it a list is consistent.
    version: Option<String>,
    /// The server has not shown that it lacks streamed lists.
    may_stream: bool,
    retry: Retry,
}

struct Listed {
    objects: Vec<Bytes>,
    version: String,
    /// A streamed list continues as a watch.
    watch: Option<WatchStream>,
}

impl Follower<'_> {
    /// Ends with its receiver.
    async fn list_and_watch(&mut self) {
        loop {
            let error = match self.list().await {
                Ok(Listed { objects, version, watch }) => {
                    self.version = Some(version);
                    if self.changes.send(Delta::Replaced(objects)).await.is_err() {
                        return;
                    }
                    self.watch_on(watch).await
                }
                Err(error) => {
                    tracing::warn!(collection = %self.selection.collection, kind = ?error.kind, "cannot list: {}", error_chain(&error));
                    error
                }
            };
            sleep(self.retry.next(&error)).await;
        }
    }

    /// Watches repeatedly, each from the last version. The error is why a relist is needed.
    async fn watch_on(&mut self, mut watch: Option<WatchStream>) -> ApiError {
        let mut refusals = 0;
        loop {
            let (opened, before) = (clock::now(), self.version.clone());
            let error = match self.watch(watch.take()).await {
                Ok(()) if opened.elapsed() >= SHORT_WATCH => {
                    self.retry.reset();
                    refusals = 0;
                    continue;
                }
                Ok(()) => self.failed("the server ended the watch as soon as it was open"),
                Err(error) => error,
            };
            tracing::debug!(collection = %self.selection.collection, kind = ?error.kind, "watch ended: {}", error_chain(&error));
            if self.version != before {
                refusals = 0;
            }
            match error.kind {
                ApiErrorKind::Unreachable | ApiErrorKind::TooManyRequests { .. } => {}
                // The version has expired, or request or response were invalid: relist.
                ApiErrorKind::Expired | ApiErrorKind::Invalid | ApiErrorKind::NotFound | ApiErrorKind::Unreadable => {
                    return error;
                }
                ApiErrorKind::Server
                | ApiErrorKind::Unauthorized
                | ApiErrorKind::Forbidden
                | ApiErrorKind::AlreadyExists
                | ApiErrorKind::Conflict => {
                    refusals += 1;
                    if refusals == REFUSALS_AT_ONE_VERSION {
                        return error;
                    }
                }
            }
            sleep(self.retry.next(&error)).await;
        }
    }

    /// Streamed if the server supports it, otherwise as one response.
    async fn list(&mut self) -> Result<Listed, ApiError> {
        if self.may_stream {
            let streamed = timeout(LIST_TIMEOUT, self.stream_list()).await;
            let error = match streamed.unwrap_or_else(|_elapsed| Err(self.failed("the objects did not end in time"))) {
                Ok(listed) => return Ok(listed),
                Err(error) => error,
            };
            tracing::debug!(collection = %self.selection.collection, kind = ?error.kind, "cannot stream a list: {}", error_chain(&error));
            match error.kind {
                ApiErrorKind::TooManyRequests { .. } => return Err(error),
                // Its WatchList gate is off, or it is older than the option.
                ApiErrorKind::Invalid => self.may_stream = false,
                ApiErrorKind::Expired => self.version = None,
                _ => {}
            }
        }
        match self.list_at_once().await {
            // This server no longer has the version, or does not have it yet.
            Err(error) if error.kind == ApiErrorKind::Expired && self.version.take().is_some() => {
                self.list_at_once().await
            }
            answer => answer,
        }
    }

    async fn list_at_once(&self) -> Result<Listed, ApiError> {
        #[derive(Deserialize)]
        struct List<'a> {
            metadata: ListMeta,
            /// An empty list may be written as null.
            #[serde(borrow, default)]
            items: Option<Vec<&'a RawValue>>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct ListMeta {
            #[serde(default)]
            resource_version: String,
        }
        let query = match &self.version {
            Some(version) => self.query(&[("resourceVersion", version), ("resourceVersionMatch", "NotOlderThan")]),
            None => self.query(&[]),
        };
        let path = self.selection.collection.clone();
        let call = Call { lane: Lane::Ordinary, verb: Verb::Get, path, query, body: None, timeout: LIST_TIMEOUT };
        let body = self.api.call(call).await?;
        let list: List<'_> = serde_json::from_slice(&body).map_err(|error| self.unreadable(error))?;
        let objects = list.items.iter().flatten().map(|item| body.slice_ref(item.get().as_bytes())).collect();
        Ok(Listed { objects, version: list.metadata.resource_version, watch: None })
    }

    /// A watch that begins with all objects, and marks their end.
    async fn stream_list(&mut self) -> Result<Listed, ApiError> {
        let mut options = vec![("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")];
        options.extend(self.version.as_deref().map(|version| ("resourceVersion", version)));
        let mut events = self.open(&options).await?;
        let mut objects = BTreeMap::new();
        loop {
            let Ok(event) = timeout(STREAM_PAUSE, events.next()).await else {
                self.may_stream = false;
                return Err(self.failed("the objects do not end"));
            };
            let event = event.unwrap_or_else(|| Err(self.failed("the watch ended before all objects had come")))?;
            let (object, meta) = self.read(&event)?;
            match event {
                WatchEvent::Added(_) | WatchEvent::Modified(_) => {
                    objects.insert((meta.namespace, meta.name), object);
                }
                WatchEvent::Deleted(_) => {
                    objects.remove(&(meta.namespace, meta.name));
                }
                WatchEvent::Bookmark(_) if meta.annotations.contains_key(INITIAL_EVENTS_END) => {
                    let objects = objects.into_values().collect();
                    return Ok(Listed { objects, version: meta.resource_version, watch: Some(events) });
                }
                WatchEvent::Bookmark(_) => {}
            }
        }
    }

    /// One watch from the last version, which advances with its events. `Ok` if the server ended it without an error.
    async fn watch(&mut self, open: Option<WatchStream>) -> Result<(), ApiError> {
        let mut events = match open {
            Some(events) => events,
            None => self.open(&[("resourceVersion", self.version.as_deref().unwrap_or_default())]).await?,
        };
        let opened = clock::now();
        while let Some(event) = events.next().await {
            let event = event.inspect_err(|_| {
                // The watch was served until its connection broke: earlier failures are forgotten.
                if opened.elapsed() >= SHORT_WATCH {
                    self.retry.reset();
                }
            })?;
            let (object, meta) = self.read(&event)?;
            self.version = Some(meta.resource_version);
            self.retry.reset();
            let change = match event {
                WatchEvent::Added(_) | WatchEvent::Modified(_) => Delta::Applied(object),
                WatchEvent::Deleted(_) => Delta::Deleted(object),
                WatchEvent::Bookmark(_) => continue,
            };
            // The receiver is gone: `follow` ends.
            let _ = self.changes.send(change).await;
        }
        Ok(())
    }

    async fn open(&self, options: &[(&'static str, &str)]) -> Result<WatchStream, ApiError> {
        let seconds = WATCH_SECS.to_string();
        let common = [("watch", "true"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", seconds.as_str())];
        let query = self.query(&[&common, options].concat());
        self.api.watch(Watch { collection: self.selection.collection.clone(), query }).await
    }

    fn query(&self, options: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
        let fields = self.selection.fields.iter().map(|fields| ("fieldSelector", fields.clone()));
        fields.chain(options.iter().map(|(key, value)| (*key, (*value).to_owned()))).collect()
    }

    fn read(&self, event: &WatchEvent) -> Result<(Bytes, Meta), ApiError> {
        #[derive(Deserialize)]
        struct Object {
            metadata: Meta,
        }
        let (WatchEvent::Added(object)
        | WatchEvent::Modified(object)
        | WatchEvent::Deleted(object)
        | WatchEvent::Bookmark(object)) = event;
        let read: Object = serde_json::from_slice(object).map_err(|error| self.unreadable(error))?;
        Ok((object.clone(), read.metadata))
    }

    fn unreadable(&self, error: serde_json::Error) -> ApiError {
        let message = format!("{}: unreadable answer", self.selection.collection);
        ApiError::new(ApiErrorKind::Unreadable, message).caused_by(error)
    }

    /// Retryable from the same version.
    fn failed(&self, what: &str) -> ApiError {
        ApiError::new(ApiErrorKind::Unreachable, format!("{}: {what}", self.selection.collection))
    }
}

/// The identity of an object. A bookmark has no name.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta {
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    resource_version: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// Waits grow to `RETRY_MAX`, each with jitter between 0.5 and 1, so that nodes that lost a server together do not
/// reconnect together. An error response after a network failure means the server is back: waits start over.
struct Retry {
    random: fastrand::Rng,
    delay: Duration,
    was_unreachable: bool,
}

impl Retry {
    fn next(&mut self, error: &ApiError) -> Duration {
        let is_unreachable = error.kind == ApiErrorKind::Unreachable;
        if self.was_unreachable && !is_unreachable {
            self.reset();
        }
        self.was_unreachable = is_unreachable;
        let delay = self.delay;
        self.delay = delay.saturating_mul(2).min(RETRY_MAX);
        let jittered = scaled(delay, 0.5 + self.random.f64() / 2.0);
        match error.kind {
            ApiErrorKind::TooManyRequests { retry_after: Some(asked) } => jittered.max(asked),
            _ => jittered,
        }
    }

    fn reset(&mut self) {
        self.delay = RETRY_FIRST;
    }
}

fn scaled(delay: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(delay.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
