//! A collection kept up with: listed once, then watched for as long as anybody cares.
//!
//! Owns: list, watch, going on from the last known version, listing anew when the server has forgotten that version, and the
//! waits between tries. Never: keeps objects; who follows gets each change and decides what to remember.
//! Upstream: client-go's Reflector.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::{sync::mpsc, time::sleep};

use crate::port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, Verb, Watch, WatchEvent};

/// What of a collection is of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    pub collection: ObjectPath,
    /// `spec.nodeName=n`.
    pub fields: Option<String>,
}

/// Objects are JSON as the server sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This is all there is.
    Replaced(Vec<Bytes>),
    /// New, or changed.
    Applied(Bytes),
    Deleted(Bytes),
}

const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// The server ends a watch after this long, give or take; a connection that died silently is noticed then at the latest.
const WATCH_SECS: u64 = 300;
const RETRY_FIRST: Duration = Duration::from_millis(800);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follows until nobody receives any more. `seed` spreads the retries of many nodes over time.
pub async fn follow(api: &dyn ApiServer, selection: &Selection, seed: u64, changes: &mpsc::Sender<Change>) {
    let mut retry = Retry { random: fastrand::Rng::with_seed(seed), delay: RETRY_FIRST };
    loop {
        let ended = list_and_watch(api, selection, &mut retry, changes).await;
        let Err(error) = ended else { return };
        if error.kind == ApiErrorKind::Expired {
            tracing::debug!(collection = %selection.collection, "the server forgot where we were: listing anew");
            continue;
        }
        tracing::warn!(collection = %selection.collection, kind = ?error.kind, "cannot list: {error}");
        if tokio::time::timeout(retry.next(&error), changes.closed()).await.is_ok() {
            return;
        }
    }
}

/// `Ok` when nobody receives any more.
async fn list_and_watch(
    api: &dyn ApiServer,
    selection: &Selection,
    retry: &mut Retry,
    changes: &mpsc::Sender<Change>,
) -> Result<(), ApiError> {
    let (objects, mut version) = list(api, selection).await?;
    retry.reset();
    if changes.send(Change::Replaced(objects)).await.is_err() {
        return Ok(());
    }
    loop {
        let ended = tokio::select! {
            biased;
            // Cancel-safe: a watch that is dropped is closed, and nobody is left to miss what it had.
            () = changes.closed() => return Ok(()),
            ended = watch(api, selection, &mut version, retry, changes) => ended,
        };
        match ended {
            Ok(()) => {}
            Err(error) if error.kind == ApiErrorKind::Expired => return Err(error),
            Err(error) => {
                tracing::debug!(collection = %selection.collection, kind = ?error.kind, "watch ended: {error}");
                sleep(retry.next(&error)).await;
            }
        }
    }
}

async fn list(api: &dyn ApiServer, selection: &Selection) -> Result<(Vec<Bytes>, String), ApiError> {
    #[derive(Deserialize)]
    struct List<'a> {
        metadata: ListMeta,
        #[serde(borrow, default)]
        items: Vec<&'a RawValue>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct ListMeta {
        #[serde(default)]
        resource_version: String,
    }
    let call = Call {
        lane: Lane::Ordinary,
        verb: Verb::Get,
        path: selection.collection.clone(),
        // From the server's cache: as fresh as any watch, and cheap for it.
        query: query(selection, [("resourceVersion", "0".to_owned())]),
        body: None,
        timeout: LIST_TIMEOUT,
    };
    let body = api.call(call).await?;
    let list: List<'_> = serde_json::from_slice(&body).map_err(|error| unreadable(selection, &error))?;
    let items = list.items.iter().map(|item| body.slice_ref(item.get().as_bytes())).collect();
    Ok((items, list.metadata.resource_version))
}

/// One watch, from `version` on, which moves with what it brings. `Ok` when the server ended it in peace.
async fn watch(
    api: &dyn ApiServer,
    selection: &Selection,
    version: &mut String,
    retry: &mut Retry,
    changes: &mpsc::Sender<Change>,
) -> Result<(), ApiError> {
    let options = [
        ("watch", "true".to_owned()),
        ("allowWatchBookmarks", "true".to_owned()),
        ("timeoutSeconds", WATCH_SECS.to_string()),
        ("resourceVersion", version.clone()),
    ];
    let mut events =
        api.watch(Watch { collection: selection.collection.clone(), query: query(selection, options) }).await?;
    while let Some(event) = events.next().await {
        let event = event?;
        let (WatchEvent::Added(object)
        | WatchEvent::Modified(object)
        | WatchEvent::Deleted(object)
        | WatchEvent::Bookmark(object)) = &event;
        *version = version_of(object).map_err(|error| unreadable(selection, &error))?;
        retry.reset();
        let change = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Change::Applied(object),
            WatchEvent::Deleted(object) => Change::Deleted(object),
            WatchEvent::Bookmark(_) => continue,
        };
        if changes.send(change).await.is_err() {
            break;
        }
    }
    Ok(())
}

fn query<const N: usize>(selection: &Selection, options: [(&'static str, String); N]) -> Vec<(&'static str, String)> {
    let fields = selection.fields.iter().map(|fields| ("fieldSelector", fields.clone()));
    fields.chain(options).collect()
}

fn version_of(object: &[u8]) -> Result<String, serde_json::Error> {
    #[derive(Deserialize)]
    struct Object {
        metadata: Meta,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Meta {
        resource_version: String,
    }
    serde_json::from_slice::<Object>(object).map(|object| object.metadata.resource_version)
}

/// What cannot be read is no reason to go on from there: list again.
fn unreadable(selection: &Selection, error: &serde_json::Error) -> ApiError {
    ApiError { kind: ApiErrorKind::Server, message: format!("{}: unreadable answer: {error}", selection.collection) }
}

/// Waits grow to `RETRY_MAX`, each between half and all of its length, so that nodes that lost a server together do not come
/// back together.
struct Retry {
    random: fastrand::Rng,
    delay: Duration,
}

impl Retry {
    fn next(&mut self, error: &ApiError) -> Duration {
        let delay = self.delay;
        self.delay = (delay * 2).min(RETRY_MAX);
        let jittered = delay.mul_f64(0.5 + self.random.f64() / 2.0);
        match error.kind {
            ApiErrorKind::TooManyRequests { retry_after: Some(asked) } => jittered.max(asked),
            _ => jittered,
        }
    }

    fn reset(&mut self) {
        self.delay = RETRY_FIRST;
    }
}
