//! A watch as one life of the agent has it open.
//!
//! Owns: where it got to, bookmarks, its end in peace or not. Events come in the server's order, some of them late or twice.

use std::{future::pending, sync::Arc, time::Duration};

use futures_util::stream;
use rubelet_kube::port::{ApiError, ApiErrorKind, Verb, Watch, WatchEvent, WatchStream};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::{
    api::{
        FakeApi,
        act::Request,
        store::{Reach, Selection},
    },
    faults::{ApiFate, Telling},
    stage::{Life, Stage},
};

const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// A connection that gives no sign of life is given up, as the real client does.
const OPENING: Duration = Duration::from_secs(30);

struct Watcher {
    stage: Arc<Stage>,
    life: Life,
    epoch: u32,
    request: Request,
    selection: Selection,
    position: u64,
    ends_at: Instant,
    bookmark_at: Instant,
    /// To be told next: the second of two.
    again: Option<WatchEvent>,
    is_over: bool,
}

/// What a look at the server shows a watcher.
enum Sight {
    Nothing,
    Event(WatchEvent, Telling),
    Cut,
    Gone,
    /// Whoever watched is dead.
    Dead,
}

impl FakeApi {
    pub(super) async fn open_watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        let Watch { collection, query } = watch;
        let option = |name: &str| query.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let number = |name: &str| option(name).and_then(|text| text.parse::<u64>().ok());
        let position = number("resourceVersion");
        let lasts = Duration::from_secs(number("timeoutSeconds").unwrap_or(300));
        let selection = Selection::new(&collection, &query);
        let request = Request { verb: Verb::Get, path: collection, query, body: Value::Null };
        let late = request.error(ApiErrorKind::Unreachable, "no answer in time");
        let epoch = timeout(OPENING, self.opened(&request)).await.unwrap_or(Err(late))?;
        let (position, is_known) = self.stage.look(|scene| {
            let position = position.unwrap_or(scene.api.version());
            (position, scene.api.remembers(position))
        });
        if !is_known {
            return Err(request.error(ApiErrorKind::Expired, "too old resource version"));
        }
        let watcher = Watcher {
            stage: self.stage.clone(),
            life: self.life,
            epoch,
            request,
            selection,
            position,
            ends_at: Instant::now() + lasts,
            bookmark_at: Instant::now() + BOOKMARK_EVERY,
            again: None,
            is_over: false,
        };
        Ok(Box::pin(stream::unfold(watcher, Watcher::next)))
    }

    /// The epoch of its connection.
    async fn opened(&self, request: &Request) -> Result<u32, ApiError> {
        let flight = self.begin(request.clone())?;
        self.pass(&flight, flight.course.before).await?;
        match flight.course.fate {
            ApiFate::Answered => Ok(flight.epoch),
            ApiFate::ErrorBefore(kind) | ApiFate::DoneButError(kind) => Err(request.error(kind, "injected")),
            ApiFate::HangBefore | ApiFate::HangAfter => pending().await,
        }
    }
}

impl Watcher {
    async fn next(mut self) -> Option<(Result<WatchEvent, ApiError>, Self)> {
        if self.is_over {
            return None;
        }
        if let Some(event) = self.again.take() {
            return Some((Ok(event), self));
        }
        let stage = self.stage.clone();
        loop {
            // Registered before the look, so that a change made meanwhile is not missed.
            let stirred = stage.api_stirred.notified();
            match self.look() {
                Sight::Dead => return pending().await,
                Sight::Cut => return Some(self.ended(ApiErrorKind::Unreachable, "connection reset")),
                Sight::Gone => return Some(self.ended(ApiErrorKind::Expired, "too old resource version")),
                Sight::Event(_, Telling::Cut) => return Some(self.ended(ApiErrorKind::Unreachable, "watch cut")),
                Sight::Event(_, Telling::Gone) => return Some(self.ended(ApiErrorKind::Expired, "injected")),
                Sight::Event(event, Telling::Once) => return Some((Ok(event), self)),
                Sight::Event(event, Telling::Twice) => {
                    self.again = Some(event.clone());
                    return Some((Ok(event), self));
                }
                Sight::Event(event, Telling::Late(wait)) => {
                    sleep(wait).await;
                    return Some((Ok(event), self));
                }
                Sight::Nothing => {}
            }
            tokio::select! {
                // Cancel safe: all are only reasons to look again.
                biased;
                () = stirred => {}
                () = sleep_until(self.ends_at) => return None,
                () = sleep_until(self.bookmark_at) => {
                    self.bookmark_at = Instant::now() + BOOKMARK_EVERY;
                    if stage.look(|scene| scene.api.reach == Reach::Open) {
                        return Some((Ok(self.bookmark()), self));
                    }
                }
            }
        }
    }

    fn look(&mut self) -> Sight {
        let stage = self.stage.clone();
        let sight = stage.look(|scene| {
            if !scene.is_alive(self.life) {
                return Sight::Dead;
            }
            if scene.api.epoch != self.epoch {
                return Sight::Cut;
            }
            if scene.api.reach != Reach::Open {
                return Sight::Nothing;
            }
            match scene.api.next_change(&self.selection, &mut self.position) {
                Ok(None) => Sight::Nothing,
                Ok(Some(event)) => Sight::Event(event, Telling::Once),
                Err(_forgotten) => Sight::Gone,
            }
        });
        match sight {
            Sight::Event(event, _) => Sight::Event(event, stage.with(|scene| scene.faults.telling(&mut scene.rng))),
            other => other,
        }
    }

    fn ended(mut self, kind: ApiErrorKind, what: &str) -> (Result<WatchEvent, ApiError>, Self) {
        self.is_over = true;
        (Err(self.request.error(kind, what)), self)
    }

    /// Everything up to its version was told.
    fn bookmark(&self) -> WatchEvent {
        let body = json!({ "kind": "Pod", "metadata": { "resourceVersion": self.position.to_string() } });
        WatchEvent::Bookmark(body.to_string().into())
    }
}
