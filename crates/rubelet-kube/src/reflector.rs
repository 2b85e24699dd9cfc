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

use crate::{
    clock,
    port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, Verb, Watch, WatchEvent},
};

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
/// A watch that ends in peace after less than this is no peace, but a server that cannot serve it.
const SHORT_WATCH: Duration = Duration::from_secs(1);
const RETRY_FIRST: Duration = Duration::from_millis(800);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follows until nobody receives any more. `seed` spreads the retries of many nodes over time.
///
/// Guarantees: the first change is `Replaced`; after it, every change between two lists is told in the server's order, or a new
/// `Replaced` stands for it.
pub async fn follow(api: &dyn ApiServer, selection: &Selection, seed: u64, changes: &mpsc::Sender<Change>) {
    let follower = Follower { api, selection, changes };
    let retry = Retry { random: fastrand::Rng::with_seed(seed), delay: RETRY_FIRST };
    tokio::select! {
        biased;
        // Cancel-safe: a request or a watch that is dropped is closed, and nobody is left to miss what it had.
        () = changes.closed() => {}
        () = follower.keep_up(retry) => {}
    }
}

struct Follower<'a> {
    api: &'a dyn ApiServer,
    selection: &'a Selection,
    changes: &'a mpsc::Sender<Change>,
}

/// How new a list must be.
#[derive(Clone, Copy)]
enum Freshness {
    /// From the server's cache: as new as any watch, and cheap for it.
    Cached,
    /// Nothing older than what was already heard; a cache that lags behind would undo it.
    Newest,
}

impl Follower<'_> {
    /// Ends with its receiver.
    async fn keep_up(&self, mut retry: Retry) {
        let mut freshness = Freshness::Cached;
        loop {
            let error = match self.list(freshness).await {
                Ok((objects, version)) => {
                    freshness = Freshness::Newest;
                    if self.changes.send(Change::Replaced(objects)).await.is_err() {
                        return;
                    }
                    self.watch_on(version, &mut retry).await
                }
                Err(error) => {
                    tracing::warn!(collection = %self.selection.collection, kind = ?error.kind, "cannot list: {error}");
                    error
                }
            };
            sleep(retry.next(&error)).await;
        }
    }

    /// One watch after another, each from where the last one got. The error is why only a list helps.
    async fn watch_on(&self, mut version: String, retry: &mut Retry) -> ApiError {
        loop {
            let opened = clock::now();
            let error = match self.watch(&mut version, retry).await {
                Ok(()) if opened.elapsed() >= SHORT_WATCH => {
                    retry.reset();
                    continue;
                }
                Ok(()) => self.failed("the server ended the watch as soon as it was open"),
                Err(error) => error,
            };
            tracing::debug!(collection = %self.selection.collection, kind = ?error.kind, "watch ended: {error}");
            match error.kind {
                ApiErrorKind::Unreachable | ApiErrorKind::TooManyRequests { .. } => sleep(retry.next(&error)).await,
                // The version is forgotten, or the server does not like the question or we its answer: start over.
                _ => return error,
            }
        }
    }

    async fn list(&self, freshness: Freshness) -> Result<(Vec<Bytes>, String), ApiError> {
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
        let query = match freshness {
            Freshness::Cached => self.query(&[("resourceVersion", "0")]),
            Freshness::Newest => self.query(&[]),
        };
        let path = self.selection.collection.clone();
        let call = Call { lane: Lane::Ordinary, verb: Verb::Get, path, query, body: None, timeout: LIST_TIMEOUT };
        let body = self.api.call(call).await?;
        let list: List<'_> = serde_json::from_slice(&body).map_err(|error| self.unreadable(&error))?;
        let items = list.items.iter().flatten().map(|item| body.slice_ref(item.get().as_bytes())).collect();
        Ok((items, list.metadata.resource_version))
    }

    /// One watch, from `version` on, which moves with what it brings. `Ok` when the server ended it in peace.
    async fn watch(&self, version: &mut String, retry: &mut Retry) -> Result<(), ApiError> {
        let query = self.query(&[
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", &WATCH_SECS.to_string()),
            ("resourceVersion", version),
        ]);
        let mut events = self.api.watch(Watch { collection: self.selection.collection.clone(), query }).await?;
        while let Some(event) = events.next().await {
            let event = event?;
            let (WatchEvent::Added(object)
            | WatchEvent::Modified(object)
            | WatchEvent::Deleted(object)
            | WatchEvent::Bookmark(object)) = &event;
            *version = version_of(object).map_err(|error| self.unreadable(&error))?;
            retry.reset();
            let change = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => Change::Applied(object),
                WatchEvent::Deleted(object) => Change::Deleted(object),
                WatchEvent::Bookmark(_) => continue,
            };
            // Nobody there to hear it: `follow` ends.
            let _ = self.changes.send(change).await;
        }
        Ok(())
    }

    fn query(&self, options: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
        let fields = self.selection.fields.iter().map(|fields| ("fieldSelector", fields.clone()));
        fields.chain(options.iter().map(|(key, value)| (*key, (*value).to_owned()))).collect()
    }

    fn unreadable(&self, error: &serde_json::Error) -> ApiError {
        let message = format!("{}: unreadable answer: {error}", self.selection.collection);
        ApiError { kind: ApiErrorKind::Server, message }
    }

    /// Worth another try from the same version.
    fn failed(&self, what: &str) -> ApiError {
        ApiError { kind: ApiErrorKind::Unreachable, message: format!("{}: {what}", self.selection.collection) }
    }
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

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Mutex};

    use async_trait::async_trait;
    use futures_util::stream;
    use insta::assert_snapshot;
    use tokio::time::Instant;

    use super::*;
    use crate::port::WatchStream;

    /// What the server does next. After the last step it never answers again.
    enum Step {
        List(&'static str),
        /// These events, and then the end of the stream after so many seconds.
        Watch(Vec<Result<WatchEvent, ApiError>>, u64),
        Refuse(ApiErrorKind),
    }

    struct Scripted {
        steps: Mutex<VecDeque<Step>>,
        /// What it was asked, and when.
        heard: Mutex<Vec<String>>,
        started: Instant,
    }

    impl Scripted {
        fn new(steps: impl IntoIterator<Item = Step>) -> Self {
            let steps = Mutex::new(steps.into_iter().collect());
            Scripted { steps, heard: Mutex::default(), started: clock::now() }
        }

        fn next(&self, what: &str, query: &[(&'static str, String)]) -> Option<Step> {
            let version = query.iter().find(|(key, _)| *key == "resourceVersion");
            let version = version.map_or("newest", |(_, version)| version.as_str());
            let seconds = self.started.elapsed().as_secs();
            self.heard.lock().unwrap().push(format!("{seconds}s {what} {version}"));
            self.steps.lock().unwrap().pop_front()
        }

        fn heard(&self) -> String {
            self.heard.lock().unwrap().join("\n")
        }
    }

    #[async_trait]
    impl ApiServer for Scripted {
        async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
            match self.next("list", &call.query) {
                Some(Step::List(body)) => Ok(Bytes::from_static(body.as_bytes())),
                Some(Step::Refuse(kind)) => Err(refusal(kind)),
                Some(Step::Watch(..)) => panic!("the script expects a watch"),
                None => std::future::pending().await,
            }
        }

        async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
            match self.next("watch", &watch.query) {
                Some(Step::Watch(events, seconds)) => {
                    let end = stream::once(sleep(Duration::from_secs(seconds))).filter_map(|()| async { None });
                    Ok(Box::pin(stream::iter(events).chain(end)))
                }
                Some(Step::Refuse(kind)) => Err(refusal(kind)),
                Some(Step::List(_)) => panic!("the script expects a list"),
                None => std::future::pending().await,
            }
        }
    }

    fn refusal(kind: ApiErrorKind) -> ApiError {
        ApiError { kind, message: format!("{kind:?}") }
    }

    fn object(name: &str, version: u32) -> Bytes {
        Bytes::from(format!(r#"{{"metadata":{{"name":"{name}","resourceVersion":"{version}"}}}}"#))
    }

    const LIST: Step = Step::List(r#"{"metadata":{"resourceVersion":"10"},"items":[{"a":1},{"b":2}]}"#);
    const EMPTY: Step = Step::List(r#"{"metadata":{"resourceVersion":"50"},"items":null}"#);

    fn told(change: &Change) -> String {
        let text = |object: &Bytes| String::from_utf8_lossy(object).into_owned();
        match change {
            Change::Replaced(objects) => {
                objects.iter().fold("=".to_owned(), |all, object| format!("{all} {}", text(object)))
            }
            Change::Applied(object) => format!("+ {}", text(object)),
            Change::Deleted(object) => format!("- {}", text(object)),
        }
    }

    /// Follows the script to its end, and a day longer: what was asked, and what was told.
    async fn follow_script(steps: impl IntoIterator<Item = Step>) -> (String, String) {
        let api = Scripted::new(steps);
        let (sender, mut changes) = mpsc::channel(64);
        let selection = Selection { collection: ObjectPath::all("v1", "pods"), fields: None };
        let day = Duration::from_secs(86_400);
        let _ = tokio::time::timeout(day, follow(&api, &selection, 7, &sender)).await;
        drop(sender);
        let mut heard = Vec::new();
        while let Some(change) = changes.recv().await {
            heard.push(told(&change));
        }
        (api.heard(), heard.join("\n"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_goes_on_from_the_last_version_it_brought_bookmarks_included() {
        let first = vec![Ok(WatchEvent::Added(object("c", 11))), Ok(WatchEvent::Deleted(object("c", 12)))];
        let second = vec![Ok(WatchEvent::Bookmark(object("", 20)))];
        let cut = vec![Ok(WatchEvent::Modified(object("d", 21))), Err(refusal(ApiErrorKind::Unreachable))];
        let steps = [LIST, Step::Watch(first, 300), Step::Watch(second, 300), Step::Watch(cut, 0)];
        let (asked, told) = follow_script(steps).await;
        assert_snapshot!(asked, @"
        0s list 0
        0s watch 10
        300s watch 12
        600s watch 20
        600s watch 21
        ");
        assert_snapshot!(told, @r#"
        = {"a":1} {"b":2}
        + {"metadata":{"name":"c","resourceVersion":"11"}}
        - {"metadata":{"name":"c","resourceVersion":"12"}}
        + {"metadata":{"name":"d","resourceVersion":"21"}}
        "#);
    }

    #[tokio::test(start_paused = true)]
    async fn a_forgotten_version_means_a_new_list_that_is_not_from_a_cache() {
        let gone = vec![Ok(WatchEvent::Added(object("c", 11))), Err(refusal(ApiErrorKind::Expired))];
        let (asked, told) = follow_script([LIST, Step::Watch(gone, 0), EMPTY]).await;
        assert_snapshot!(asked, @"
        0s list 0
        0s watch 10
        0s list newest
        0s watch 50
        ");
        assert_snapshot!(told, @r#"
        = {"a":1} {"b":2}
        + {"metadata":{"name":"c","resourceVersion":"11"}}
        =
        "#);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_told_before_the_first_list_and_the_waits_for_it_grow() {
        let refusals = [ApiErrorKind::Unreachable, ApiErrorKind::Forbidden].into_iter().cycle().take(9);
        let unreadable = Step::List("{");
        let steps = refusals.map(Step::Refuse).chain([unreadable, LIST]);
        let (asked, told) = follow_script(steps).await;
        assert_snapshot!(asked, @"
        0s list 0
        0s list 0
        1s list 0
        4s list 0
        9s list 0
        16s list 0
        31s list 0
        58s list 0
        74s list 0
        91s list 0
        113s list 0
        113s watch 10
        ");
        assert_snapshot!(told, @r#"= {"a":1} {"b":2}"#);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_ends_every_watch_at_once_is_not_hammered() {
        let watches = (0..6).map(|_| Step::Watch(Vec::new(), 0));
        let lively = Step::Watch(vec![Ok(WatchEvent::Added(object("c", 11)))], 300);
        let busy = Step::Refuse(ApiErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(120)) });
        let (asked, _) = follow_script([LIST].into_iter().chain(watches).chain([lively, busy])).await;
        assert_snapshot!(asked, @"
        0s list 0
        0s watch 10
        0s watch 10
        1s watch 10
        4s watch 10
        9s watch 10
        16s watch 10
        31s watch 10
        331s watch 11
        451s watch 11
        ");
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_cannot_be_read_means_a_new_list() {
        let odd = vec![Ok(WatchEvent::Added(Bytes::from_static(b"{}")))];
        let (asked, told) = follow_script([LIST, Step::Watch(odd, 300), EMPTY]).await;
        assert_snapshot!(asked, @"
        0s list 0
        0s watch 10
        0s list newest
        0s watch 50
        ");
        assert_snapshot!(told, @r#"
        = {"a":1} {"b":2}
        =
        "#);
    }

    #[tokio::test(start_paused = true)]
    async fn following_ends_with_the_follower_whatever_it_waits_for() {
        let scripts: [Vec<Step>; 4] = [
            vec![],
            vec![LIST],
            vec![LIST, Step::Watch(Vec::new(), 300)],
            vec![Step::Refuse(ApiErrorKind::Unreachable)],
        ];
        for script in scripts {
            let api = Scripted::new(script);
            let (sender, changes) = mpsc::channel(1);
            let selection = Selection { collection: ObjectPath::all("v1", "pods"), fields: None };
            let (gone_at, ended_at) = tokio::join!(
                async {
                    sleep(Duration::from_millis(100)).await;
                    drop(changes);
                    api.started.elapsed()
                },
                async {
                    follow(&api, &selection, 7, &sender).await;
                    api.started.elapsed()
                },
            );
            assert_eq!(ended_at, gone_at);
        }
    }
}
