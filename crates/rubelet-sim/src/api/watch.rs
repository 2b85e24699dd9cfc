//! An open watch of one process of the agent.
//!
//! Owns: its position, bookmarks, its end with or without an error. Events arrive in the server's order, some of them late or twice.

use std::{collections::VecDeque, future::pending, sync::Arc, time::Duration};

use futures_util::stream;
use rubelet_kube::port::{ApiError, ApiErrorKind, WatchEvent, WatchStream};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::{
    api::{
        FakeApi,
        act::Request,
        store::{Reach, Selection, Streaming},
    },
    faults::{ApiCallOutcome, WatchDelivery},
    simulation::{Incarnation, SimState, Simulation},
};

const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// A silent connection is closed, as the real client does.
const OPENING: Duration = Duration::from_secs(30);
/// How long a server waits for its cache to reach the requested version.
const FRESHNESS_WAIT: Duration = Duration::from_secs(3);

struct Watcher {
    simulation: Arc<Simulation>,
    incarnation: Incarnation,
    epoch: u32,
    request: Request,
    selection: Selection,
    position: u64,
    ends_at: Instant,
    bookmark_at: Instant,
    /// Events to send next: the initial objects, and the second copy of a doubled event.
    first: VecDeque<WatchEvent>,
    /// It is still sending the initial objects.
    is_listing: bool,
    is_over: bool,
}

/// The state of the server for a watcher.
enum Sight {
    Nothing,
    Event(WatchEvent, WatchDelivery),
    Cut,
    Gone,
    /// The watcher's process is dead.
    Dead,
}

impl FakeApi {
    pub(super) async fn open_watch(&self, request: Request) -> Result<WatchStream, ApiError> {
        let selection = Selection::new(&request.path, &request.query);
        let late = request.error(ApiErrorKind::Unreachable, "no answer in time");
        let epoch = timeout(OPENING, self.opened(&request)).await.unwrap_or(Err(late))?;
        let begun = self.simulation.look(|sim| sim.begin_watch(&request));
        if let Err(ApiError { kind: ApiErrorKind::Expired, .. }) = &begun
            && request.is_streamed_list()
        {
            sleep(FRESHNESS_WAIT).await;
        }
        let (position, first) = begun?;
        let collection = &request.path;
        self.simulation.with(|sim| sim.log("api", format!("WATCH {collection} from {position}")));
        let lasts = request.option("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(300);
        let watcher = Watcher {
            simulation: self.simulation.clone(),
            incarnation: self.incarnation,
            epoch,
            is_listing: request.is_streamed_list(),
            request,
            selection,
            position,
            ends_at: Instant::now() + Duration::from_secs(lasts),
            bookmark_at: Instant::now() + BOOKMARK_EVERY,
            first,
            is_over: false,
        };
        Ok(Box::pin(stream::unfold(watcher, Watcher::next)))
    }

    /// The epoch of its connection.
    async fn opened(&self, request: &Request) -> Result<u32, ApiError> {
        let flight = self.begin(request.clone())?;
        self.pass(&flight, flight.course.before).await?;
        match flight.course.outcome {
            ApiCallOutcome::Answered => Ok(flight.epoch),
            ApiCallOutcome::ErrorBefore(kind) | ApiCallOutcome::DoneButError(kind) => {
                Err(request.error(kind, "injected"))
            }
            ApiCallOutcome::HangBefore | ApiCallOutcome::HangAfter => pending().await,
        }
    }
}

impl SimState {
    /// The start of a watch, and its initial events.
    fn begin_watch(&self, request: &Request) -> Result<(u64, VecDeque<WatchEvent>), ApiError> {
        if !request.is_streamed_list() {
            let position = request.version().unwrap_or(self.api.cached_version());
            if !self.api.remembers(position) {
                return Err(request.error(ApiErrorKind::Expired, "too old resource version"));
            }
            return Ok((position, VecDeque::new()));
        }
        let known = self.api.cached_version();
        match self.api.streaming {
            Streaming::Refused => {
                return Err(request.error(ApiErrorKind::Invalid, "sendInitialEvents is forbidden"));
            }
            Streaming::Served if request.version().unwrap_or(self.api.version()) > known => {
                return Err(request.error(ApiErrorKind::Expired, "too large resource version"));
            }
            Streaming::Served | Streaming::Ignored => {}
        }
        let list = self.api.cached_list(&Selection::new(&request.path, &request.query));
        let items = list["items"].as_array().into_iter().flatten();
        let mut first: VecDeque<_> = items.map(|item| WatchEvent::Added(item.to_string().into())).collect();
        if self.api.streaming == Streaming::Served {
            let annotations = json!({ INITIAL_EVENTS_END: "true" });
            let metadata = json!({ "resourceVersion": known.to_string(), "annotations": annotations });
            first.push_back(WatchEvent::Bookmark(json!({ "metadata": metadata }).to_string().into()));
        }
        Ok((known, first))
    }
}

/// A watch that ends before the end of the initial objects is no list.
impl Drop for Watcher {
    fn drop(&mut self) {
        if self.is_listing && !self.is_over {
            let request = &self.request;
            self.simulation.with(|sim| sim.rules.read_failed(request, true, ApiErrorKind::Unreachable));
        }
    }
}

impl Watcher {
    /// Initial objects are delayed or cut like any other event; their end is the response to a list.
    async fn tell_first(mut self, event: WatchEvent) -> (Result<WatchEvent, ApiError>, Self) {
        match self.simulation.with(|sim| sim.faults.watch_delivery(&mut sim.rng)) {
            WatchDelivery::Cut => return self.ended(ApiErrorKind::Unreachable, "watch cut"),
            WatchDelivery::Late(wait) => sleep(wait).await,
            WatchDelivery::Once | WatchDelivery::Twice | WatchDelivery::Gone => {}
        }
        match self.look_at_connection() {
            Some(Sight::Dead) => return pending().await,
            Some(_) => return self.ended(ApiErrorKind::Unreachable, "connection reset"),
            None => {}
        }
        if matches!(event, WatchEvent::Bookmark(_)) {
            self.simulation.with(|sim| sim.rules.api_answered(sim.now, &self.request));
            self.is_listing = false;
        }
        (Ok(event), self)
    }

    /// Why the watch sends nothing any more.
    fn look_at_connection(&self) -> Option<Sight> {
        self.simulation.look(|sim| {
            if !sim.is_alive(self.incarnation) {
                Some(Sight::Dead)
            } else if sim.api.epoch != self.epoch {
                Some(Sight::Cut)
            } else {
                None
            }
        })
    }

    async fn next(mut self) -> Option<(Result<WatchEvent, ApiError>, Self)> {
        if self.is_over {
            return None;
        }
        if let Some(event) = self.first.pop_front() {
            return Some(self.tell_first(event).await);
        }
        let simulation = self.simulation.clone();
        loop {
            // Registered before the read, so that a change in between is not missed.
            let changed = simulation.api_changed.notified();
            match self.look() {
                Sight::Dead => return pending().await,
                Sight::Cut => return Some(self.ended(ApiErrorKind::Unreachable, "connection reset")),
                Sight::Gone => return Some(self.ended(ApiErrorKind::Expired, "too old resource version")),
                Sight::Event(_, WatchDelivery::Cut) => return Some(self.ended(ApiErrorKind::Unreachable, "watch cut")),
                Sight::Event(_, WatchDelivery::Gone) => return Some(self.ended(ApiErrorKind::Expired, "injected")),
                Sight::Event(event, WatchDelivery::Once) => return Some((Ok(event), self)),
                Sight::Event(event, WatchDelivery::Twice) => {
                    self.first.push_back(event.clone());
                    return Some((Ok(event), self));
                }
                Sight::Event(event, WatchDelivery::Late(wait)) => {
                    sleep(wait).await;
                    return Some((Ok(event), self));
                }
                Sight::Nothing => {}
            }
            tokio::select! {
                // Cancel safe: every arm only triggers another read.
                biased;
                () = changed => {}
                () = sleep_until(self.ends_at) => return None,
                () = sleep_until(self.bookmark_at) => {
                    self.bookmark_at = Instant::now() + BOOKMARK_EVERY;
                    if simulation.look(|sim| sim.api.reach == Reach::Open) {
                        return Some((Ok(self.bookmark()), self));
                    }
                }
            }
        }
    }

    fn look(&mut self) -> Sight {
        let simulation = self.simulation.clone();
        if let Some(sight) = self.look_at_connection() {
            return sight;
        }
        let sight = simulation.look(|sim| {
            match sim.api.reach {
                Reach::Refused | Reach::Silent => return Sight::Nothing,
                Reach::Open | Reach::Unauthorized => {}
            }
            match sim.api.next_change(&self.selection, &mut self.position) {
                Ok(None) => Sight::Nothing,
                Ok(Some(event)) => Sight::Event(event, WatchDelivery::Once),
                Err(_forgotten) => Sight::Gone,
            }
        });
        match sight {
            Sight::Event(event, _) => Sight::Event(event, simulation.with(SimState::watch_delivery)),
            other => other,
        }
    }

    fn ended(mut self, kind: ApiErrorKind, what: &str) -> (Result<WatchEvent, ApiError>, Self) {
        self.is_over = true;
        let is_list = self.is_listing;
        self.simulation.with(|sim| sim.rules.read_failed(&self.request, is_list, kind));
        (Err(self.request.error(kind, what)), self)
    }

    /// Everything up to its version was sent.
    fn bookmark(&self) -> WatchEvent {
        let body = json!({ "kind": "Pod", "metadata": { "resourceVersion": self.position.to_string() } });
        WatchEvent::Bookmark(body.to_string().into())
    }
}
