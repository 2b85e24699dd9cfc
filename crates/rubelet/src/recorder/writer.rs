//! Writes events, each with its own retries: a rejected event delays no other.
//!
//! Owns: queued and failed events, the running calls, when an event is dropped. Never: decides what is
//! worth writing.
//! Upstream: `recordToSink` of `client-go/tools/record/event.go`, which blocks all events while it retries one.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use k8s_openapi::api::core::v1::Event;
use rubelet_kube::{
    error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, PatchKind, Verb},
};
use serde_json::json;
use tokio::time::sleep;

use super::correlator::CorrelateResult;

pub(super) const TRIES: u32 = 12;
const BETWEEN_TRIES: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Concurrent calls: calls without a response leave room for others.
const MAX_CALLS: usize = 4;
/// Events queued here; all others stay in the log, which counts repeats.
const MAX_WAITING: usize = 16;

pub(super) struct Writer {
    api: Arc<dyn ApiServer>,
    /// By event name: one call at a time per event.
    waiting: BTreeMap<String, Waiting>,
    calls: FuturesUnordered<BoxFuture<'static, (String, Result<(), ApiError>)>>,
    /// The names of failed events, each until its retry.
    pauses: FuturesUnordered<BoxFuture<'static, String>>,
    arrivals: u64,
}

struct Waiting {
    written: CorrelateResult,
    tries: u32,
    arrival: u64,
    turn: Turn,
}

enum Turn {
    Ready,
    /// It failed, and is retried later.
    Pausing,
    /// Updated by later occurrences.
    UnderWay(Option<Box<CorrelateResult>>),
}

impl Writer {
    pub(super) fn new(api: Arc<dyn ApiServer>) -> Self {
        let (calls, pauses) = (FuturesUnordered::new(), FuturesUnordered::new());
        Writer { api, waiting: BTreeMap::new(), calls, pauses, arrivals: 0 }
    }

    pub(super) fn has_room(&self) -> bool {
        self.waiting.len() < MAX_WAITING
    }

    pub(super) fn take(&mut self, written: CorrelateResult) {
        let name = written.event.metadata.name.clone().unwrap_or_default();
        let Some(waiting) = self.waiting.get_mut(&name) else {
            self.arrivals += 1;
            self.waiting.insert(name, Waiting { written, tries: 0, arrival: self.arrivals, turn: Turn::Ready });
            return;
        };
        match &mut waiting.turn {
            // The newest count replaces the older one. A pending creation stays one.
            Turn::Ready | Turn::Pausing => waiting.written.event = written.event,
            Turn::UnderWay(newer) => *newer = Some(Box::new(written)),
        }
    }

    /// Starts calls while there is room, and waits for the end of a call or a pause.
    pub(super) async fn turn(&mut self) {
        self.start_calls();
        tokio::select! {
            biased;
            // Both cancel-safe: an item not taken stays in its set.
            Some((name, answer)) = self.calls.next() => self.answered(&name, answer),
            Some(name) = self.pauses.next() => {
                if let Some(waiting) = self.waiting.get_mut(&name) {
                    waiting.turn = Turn::Ready;
                }
            }
            else => std::future::pending().await,
        }
    }

    /// New events before failed ones.
    fn start_calls(&mut self) {
        while self.calls.len() < MAX_CALLS {
            let ready = self.waiting.iter_mut().filter(|(_, waiting)| matches!(waiting.turn, Turn::Ready));
            let first = ready.min_by_key(|(_, waiting)| (waiting.tries, waiting.arrival));
            let Some((name, waiting)) = first else { return };
            waiting.turn = Turn::UnderWay(None);
            waiting.tries += 1;
            let (api, name, written) = (self.api.clone(), name.clone(), waiting.written.clone());
            self.calls.push(Box::pin(async move {
                let answer = write(api.as_ref(), &written).await;
                (name, answer)
            }));
        }
    }

    fn answered(&mut self, name: &str, answer: Result<(), ApiError>) {
        let Some(Waiting { written, tries, arrival, turn }) = self.waiting.remove(name) else { return };
        let newer = match turn {
            Turn::UnderWay(newer) => newer,
            Turn::Ready | Turn::Pausing => None,
        };
        let Err(error) = answer else {
            newer.into_iter().for_each(|newer| self.take(*newer));
            return;
        };
        let reason = written.event.reason.clone();
        if !may_succeed_later(error.kind) {
            tracing::warn!(error = error_chain(&error), reason, "event rejected by the API server");
        } else if tries < TRIES {
            tracing::warn!(error = error_chain(&error), tries, "failed to write event, will retry");
            let event = newer.map_or(written.event, |newer| newer.event);
            let written = CorrelateResult { event, is_update: written.is_update };
            let name = name.to_owned();
            self.waiting.insert(name.clone(), Waiting { written, tries, arrival, turn: Turn::Pausing });
            self.pauses.push(Box::pin(async move {
                sleep(BETWEEN_TRIES).await;
                name
            }));
        } else {
            let message = written.event.message;
            tracing::error!(reason, message, "event dropped after {TRIES} tries");
        }
    }
}

fn may_succeed_later(kind: ApiErrorKind) -> bool {
    match kind {
        ApiErrorKind::Unreachable | ApiErrorKind::Server | ApiErrorKind::TooManyRequests { .. } => true,
        ApiErrorKind::NotFound
        | ApiErrorKind::AlreadyExists
        | ApiErrorKind::Conflict
        | ApiErrorKind::Expired
        | ApiErrorKind::Unauthorized
        | ApiErrorKind::Forbidden
        | ApiErrorKind::Unreadable
        | ApiErrorKind::Invalid => false,
    }
}

async fn write(api: &dyn ApiServer, written: &CorrelateResult) -> Result<(), ApiError> {
    if written.is_update {
        match api.call(update(&written.event)).await {
            // Events expire after an hour; a later occurrence is created again.
            Err(error) if error.kind == ApiErrorKind::NotFound => {}
            answer => return answer.map(drop),
        }
    }
    match api.call(creation(&written.event)).await {
        // An earlier try succeeded without a response.
        Err(error) if error.kind == ApiErrorKind::AlreadyExists => Ok(()),
        answer => answer.map(drop),
    }
}

fn update(event: &Event) -> Call {
    let patch = json!({ "count": event.count, "lastTimestamp": event.last_timestamp, "message": event.message });
    Call {
        verb: Verb::Patch(PatchKind::StrategicMerge),
        path: events_of(event).named(event.metadata.name.as_deref().unwrap_or_default()),
        ..call(event, &patch)
    }
}

fn creation(event: &Event) -> Call {
    call(event, &json!(event))
}

fn call(event: &Event, body: &serde_json::Value) -> Call {
    Call {
        lane: Lane::Events,
        verb: Verb::Create,
        path: events_of(event),
        query: Vec::new(),
        body: Some(body.to_string().into()),
        timeout: CALL_TIMEOUT,
    }
}

fn events_of(event: &Event) -> ObjectPath {
    ObjectPath::all("v1", "events").within(event.metadata.namespace.as_deref().unwrap_or("default"))
}
