//! Tests with a scripted server.

use std::{collections::VecDeque, sync::Mutex};

use async_trait::async_trait;
use futures_util::stream;
use insta::assert_snapshot;
use tokio::time::Instant;

use super::*;
use crate::port::WatchStream;

/// The server's next action. After the last step it never responds again.
enum Step {
    List(&'static str),
    /// These events, and then the end of the stream after so many seconds.
    Watch(Vec<Result<WatchEvent, ApiError>>, u64),
    /// Nothing, until the connection breaks after so many seconds.
    Cut(u64),
    Refuse(ApiErrorKind),
}

struct Scripted {
    steps: Mutex<VecDeque<Step>>,
    /// The requests and their times.
    heard: Mutex<Vec<String>>,
    started: Instant,
}

impl Scripted {
    fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        let steps = Mutex::new(steps.into_iter().collect());
        Scripted { steps, heard: Mutex::default(), started: clock::now() }
    }

    fn next(&self, what: &str, query: &[(&'static str, String)]) -> Option<Step> {
        let option = |name: &str| query.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        let what = if option("sendInitialEvents") == Some("true") { "stream" } else { what };
        let version = match (option("resourceVersion"), option("resourceVersionMatch")) {
            (None, _) => "newest".to_owned(),
            (Some(version), Some("NotOlderThan")) => format!(">={version}"),
            (Some(version), _) => version.to_owned(),
        };
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
            Some(Step::Watch(..) | Step::Cut(_)) => panic!("the script expects a watch"),
            None => std::future::pending().await,
        }
    }

    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        match self.next("watch", &watch.query) {
            Some(Step::Watch(events, seconds)) => {
                let end = stream::once(sleep(Duration::from_secs(seconds))).filter_map(|()| async { None });
                Ok(Box::pin(stream::iter(events).chain(end)))
            }
            Some(Step::Cut(seconds)) => {
                let end = sleep(Duration::from_secs(seconds));
                Ok(Box::pin(stream::once(end).map(|()| Err(refusal(ApiErrorKind::Unreachable)))))
            }
            Some(Step::Refuse(kind)) => Err(refusal(kind)),
            Some(Step::List(_)) => panic!("the script expects a list"),
            None => std::future::pending().await,
        }
    }
}

fn refusal(kind: ApiErrorKind) -> ApiError {
    ApiError::new(kind, format!("{kind:?}"))
}

fn object(name: &str, version: u32) -> Bytes {
    Bytes::from(format!(r#"{{"metadata":{{"name":"{name}","resourceVersion":"{version}"}}}}"#))
}

const LIST: Step = Step::List(r#"{"metadata":{"resourceVersion":"10"},"items":[{"a":1},{"b":2}]}"#);
const EMPTY: Step = Step::List(r#"{"metadata":{"resourceVersion":"50"},"items":null}"#);

fn end_of_objects(version: u32) -> WatchEvent {
    let metadata = format!(r#"{{"resourceVersion":"{version}","annotations":{{"{INITIAL_EVENTS_END}":"true"}}}}"#);
    WatchEvent::Bookmark(Bytes::from(format!(r#"{{"metadata":{metadata}}}"#)))
}

/// A list of one object, streamed, that goes on as a watch.
fn streamed(then: Vec<Result<WatchEvent, ApiError>>, seconds: u64) -> Step {
    let list = [Ok(WatchEvent::Added(object("a", 7))), Ok(end_of_objects(10))];
    Step::Watch(list.into_iter().chain(then).collect(), seconds)
}

fn told(change: &Delta) -> String {
    let text = |object: &Bytes| String::from_utf8_lossy(object).into_owned();
    match change {
        Delta::Replaced(objects) => {
            objects.iter().fold("=".to_owned(), |all, object| format!("{all} {}", text(object)))
        }
        Delta::Applied(object) => format!("+ {}", text(object)),
        Delta::Deleted(object) => format!("- {}", text(object)),
    }
}

/// Runs the script to its end, and a day longer: returns the requests and the changes sent.
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
async fn watch_resumes_from_last_version_including_bookmarks() {
    let first = vec![Ok(WatchEvent::Added(object("c", 11))), Ok(WatchEvent::Deleted(object("c", 12)))];
    let second = vec![Ok(WatchEvent::Bookmark(object("", 20)))];
    let cut = vec![Ok(WatchEvent::Modified(object("d", 21))), Err(refusal(ApiErrorKind::Unreachable))];
    let steps = [streamed(first, 300), Step::Watch(second, 300), Step::Watch(cut, 0)];
    let (asked, told) = follow_script(steps).await;
    assert_snapshot!(asked, @"
    0s stream newest
    300s watch 12
    600s watch 20
    600s watch 21
    ");
    assert_snapshot!(told, @r#"
    = {"metadata":{"name":"a","resourceVersion":"7"}}
    + {"metadata":{"name":"c","resourceVersion":"11"}}
    - {"metadata":{"name":"c","resourceVersion":"12"}}
    + {"metadata":{"name":"d","resourceVersion":"21"}}
    "#);
}

#[tokio::test(start_paused = true)]
async fn streamed_list_is_the_state_at_its_end() {
    let list = vec![
        Ok(WatchEvent::Added(object("a", 7))),
        Ok(WatchEvent::Added(object("b", 3))),
        Ok(WatchEvent::Bookmark(object("", 8))),
        Ok(WatchEvent::Modified(object("a", 9))),
        Ok(WatchEvent::Deleted(object("b", 10))),
        Ok(end_of_objects(10)),
        Ok(WatchEvent::Added(object("c", 11))),
    ];
    let (asked, told) = follow_script([Step::Watch(list, 300)]).await;
    assert_snapshot!(asked, @"
    0s stream newest
    300s watch 11
    ");
    assert_snapshot!(told, @r#"
    = {"metadata":{"name":"a","resourceVersion":"9"}}
    + {"metadata":{"name":"c","resourceVersion":"11"}}
    "#);
}

#[tokio::test(start_paused = true)]
async fn a_server_without_streamed_lists_is_listed_consistently() {
    for refused in [ApiErrorKind::Invalid, ApiErrorKind::Forbidden, ApiErrorKind::Server, ApiErrorKind::Expired] {
        let gone = vec![Err(refusal(ApiErrorKind::Unreachable))];
        let (asked, told) = follow_script([Step::Refuse(refused), LIST, Step::Watch(gone, 0)]).await;
        assert_eq!(asked, "0s stream newest\n0s list newest\n0s watch 10\n0s watch 10", "{refused:?}");
        assert_eq!(told, r#"= {"a":1} {"b":2}"#, "{refused:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn watch_list_falls_back_to_list_once_if_ignored() {
    let endless = Step::Watch(vec![Ok(WatchEvent::Added(object("a", 7)))], 300);
    let gone = Step::Watch(vec![Err(refusal(ApiErrorKind::Expired))], 0);
    let (asked, told) = follow_script([endless, LIST, gone, EMPTY]).await;
    assert_snapshot!(asked, @"
    0s stream newest
    10s list newest
    10s watch 10
    10s list >=10
    10s watch 50
    ");
    assert_snapshot!(told, @r#"
    = {"a":1} {"b":2}
    =
    "#);
}

#[tokio::test(start_paused = true)]
async fn interrupted_streamed_list_sends_nothing() {
    let half = || vec![Ok(WatchEvent::Added(object("a", 7)))];
    let cut = half().into_iter().chain([Err(refusal(ApiErrorKind::Unreachable))]).collect();
    let odd = half().into_iter().chain([Ok(WatchEvent::Added(Bytes::from_static(b"{}")))]).collect();
    for broken in [Step::Watch(half(), 2), Step::Watch(cut, 0), Step::Watch(odd, 300)] {
        let (asked, told) =
            follow_script([broken, Step::Refuse(ApiErrorKind::Unreachable), streamed(Vec::new(), 300)]).await;
        let asked: Vec<_> = asked.lines().filter_map(|line| line.split_once(' ')).map(|(_, asked)| asked).collect();
        assert_eq!(asked, ["stream newest", "list newest", "stream newest", "watch 10"]);
        assert_eq!(told, format!("= {}", String::from_utf8_lossy(&object("a", 7))));
    }
}

#[tokio::test(start_paused = true)]
async fn expired_version_causes_a_list_no_older_than_it() {
    let gone = vec![Ok(WatchEvent::Added(object("c", 11))), Err(refusal(ApiErrorKind::Expired))];
    let (asked, told) = follow_script([streamed(gone, 0), streamed(Vec::new(), 300)]).await;
    assert_snapshot!(asked, @"
    0s stream newest
    0s stream >=11
    300s watch 10
    ");
    assert_snapshot!(told, @r#"
    = {"metadata":{"name":"a","resourceVersion":"7"}}
    + {"metadata":{"name":"c","resourceVersion":"11"}}
    = {"metadata":{"name":"a","resourceVersion":"7"}}
    "#);
}

#[tokio::test(start_paused = true)]
async fn missing_resource_version_is_not_requested_twice() {
    let gone = || streamed(vec![Err(refusal(ApiErrorKind::Expired))], 0);
    let unknown = || Step::Refuse(ApiErrorKind::Expired);
    let (asked, _) = follow_script([gone(), unknown(), EMPTY]).await;
    assert_snapshot!(asked, @"
    0s stream newest
    0s stream >=10
    0s list newest
    0s watch 50
    ");
    // The same without streamed lists.
    let refused = Step::Refuse(ApiErrorKind::Invalid);
    let ended = Step::Watch(vec![Err(refusal(ApiErrorKind::Expired))], 0);
    let (asked, _) = follow_script([refused, LIST, ended, unknown(), EMPTY]).await;
    assert_snapshot!(asked, @"
    0s stream newest
    0s list newest
    0s watch 10
    0s list >=10
    0s list newest
    0s watch 50
    ");
}

#[tokio::test(start_paused = true)]
async fn refused_watch_resumes_and_relists_only_without_progress() {
    let refused = || Step::Refuse(ApiErrorKind::Server);
    let moved = Step::Watch(vec![Ok(WatchEvent::Added(object("c", 11))), Err(refusal(ApiErrorKind::Forbidden))], 0);
    let steps = [streamed(Vec::new(), 300), refused(), refused(), moved];
    let stuck = (1..REFUSALS_AT_ONE_VERSION).map(|_| refused());
    let (asked, _) = follow_script(steps.into_iter().chain(stuck).chain([streamed(Vec::new(), 300)])).await;
    assert_snapshot!(asked, @"
    0s stream newest
    300s watch 10
    300s watch 10
    301s watch 10
    302s watch 11
    303s watch 11
    305s watch 11
    309s watch 11
    320s stream >=11
    620s watch 10
    ");
}

#[tokio::test(start_paused = true)]
async fn first_list_is_retried_with_backoff_before_any_delta() {
    let refusals = (0..9).map(|_| Step::Refuse(ApiErrorKind::TooManyRequests { retry_after: None }));
    let unreadable = [Step::Refuse(ApiErrorKind::Invalid), Step::List("{")];
    let (asked, told) = follow_script(refusals.chain(unreadable).chain([LIST])).await;
    assert_snapshot!(asked, @"
    0s stream newest
    0s stream newest
    1s stream newest
    4s stream newest
    9s stream newest
    16s stream newest
    31s stream newest
    58s stream newest
    74s stream newest
    91s stream newest
    91s list newest
    113s list newest
    113s watch 10
    ");
    assert_snapshot!(told, @r#"= {"a":1} {"b":2}"#);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_every_watch_at_once_is_not_hammered() {
    let watches = (0..6).map(|_| Step::Watch(Vec::new(), 0));
    let lively = Step::Watch(vec![Ok(WatchEvent::Added(object("c", 11)))], 300);
    let busy = Step::Refuse(ApiErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(120)) });
    let (asked, _) = follow_script([streamed(Vec::new(), 300)].into_iter().chain(watches).chain([lively, busy])).await;
    assert_snapshot!(asked, @"
    0s stream newest
    300s watch 10
    300s watch 10
    301s watch 10
    304s watch 10
    309s watch 10
    316s watch 10
    331s watch 10
    631s watch 11
    751s watch 11
    ");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_was_served_and_then_cut_is_resumed_at_once() {
    let refusals = std::iter::repeat_with(|| Step::Refuse(ApiErrorKind::Unreachable)).take(5);
    let (heard, _) =
        follow_script([streamed(Vec::new(), 60)].into_iter().chain(refusals).chain([Step::Cut(100), Step::Cut(0)]))
            .await;
    assert_snapshot!(heard, @"
    0s stream newest
    60s watch 10
    60s watch 10
    61s watch 10
    64s watch 10
    69s watch 10
    76s watch 10
    176s watch 10
    178s watch 10
    ");
}

#[tokio::test(start_paused = true)]
async fn expired_version_after_outage_is_relisted_soon() {
    let refusals = std::iter::repeat_with(|| Step::Refuse(ApiErrorKind::Unreachable)).take(6);
    let back = [Step::Refuse(ApiErrorKind::Expired), streamed(Vec::new(), 60)];
    let (heard, _) = follow_script([streamed(Vec::new(), 60)].into_iter().chain(refusals).chain(back)).await;
    assert_snapshot!(heard, @"
    0s stream newest
    60s watch 10
    60s watch 10
    61s watch 10
    64s watch 10
    69s watch 10
    76s watch 10
    91s watch 10
    91s stream >=10
    151s watch 10
    ");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_cannot_be_read_means_a_new_list() {
    let odd = vec![Ok(WatchEvent::Added(Bytes::from_static(b"{}")))];
    let (asked, told) = follow_script([streamed(odd, 300), streamed(Vec::new(), 300)]).await;
    assert_snapshot!(asked, @"
    0s stream newest
    0s stream >=10
    300s watch 10
    ");
    assert_snapshot!(told, @r#"
    = {"metadata":{"name":"a","resourceVersion":"7"}}
    = {"metadata":{"name":"a","resourceVersion":"7"}}
    "#);
}

#[tokio::test(start_paused = true)]
async fn reflector_ends_with_its_receiver() {
    let scripts: [Vec<Step>; 4] = [
        vec![],
        vec![Step::Refuse(ApiErrorKind::Invalid), LIST],
        vec![streamed(Vec::new(), 300)],
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
