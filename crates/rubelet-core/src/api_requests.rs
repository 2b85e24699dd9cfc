//! Requests to the API server: what is under way for whom, and what has to be tried again.
//!
//! Owns: one request at a time per pod, how many at once, and when to try again. Never: decides what is to be said; the
//! status manager and `agent/api.rs` do.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    effect::{EffectError, EffectId, ErrorKind},
    id::PodUid,
    pod::{Failure, Flight},
    time::{Now, Uptime},
};

/// A status that somebody else overwrote is put right this long after it was seen, as upstream's round every 10 s.
const RECONCILE_AFTER: Duration = Duration::from_secs(10);
/// Enough to keep the connection busy; more would only wait for the client's rate limit, out of the order of urgency.
const MAX_STATUS_FLIGHTS: usize = 16;

/// An API server that does not answer is tried this often at least: on its return everything is to be told within seconds.
/// It costs it little, since no more than `MAX_STATUS_FLIGHTS` ask.
const AWAY_RETRY_MAX: Duration = Duration::from_secs(3);

/// What a request is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ApiRequest {
    /// The status of the pod of this UID, or its deletion after its end.
    Status(PodUid),
    /// The mirror pod of this full name.
    Mirror(String),
    /// A newer look at the Node object.
    Node,
}

#[derive(Clone, Debug, Default)]
pub struct ApiRequests {
    flights: BTreeMap<ApiRequest, Flight>,
    failures: BTreeMap<ApiRequest, FailedRequest>,
    /// Full names whose static and mirror pod are to be compared.
    pub mirrors: BTreeSet<String>,
    reconcile_at: Option<Uptime>,
}

/// How the last try ended, until one succeeds.
#[derive(Clone, Debug)]
struct FailedRequest {
    kind: ErrorKind,
    failure: Failure,
}

impl ApiRequests {
    pub fn is_under_way(&self, request: &ApiRequest) -> bool {
        self.flights.contains_key(request)
    }

    /// Under way, or waiting for another try.
    pub fn is_busy(&self, request: &ApiRequest, now: Now) -> bool {
        self.flights.contains_key(request)
            || self.failures.get(request).is_some_and(|failed| failed.failure.retry_at > now.uptime)
    }

    pub fn has_room(&self) -> bool {
        let statuses = self.flights.keys().filter(|request| matches!(request, ApiRequest::Status(_)));
        statuses.count() < MAX_STATUS_FLIGHTS
    }

    pub fn sent(&mut self, request: ApiRequest, flight: Flight) {
        self.flights.insert(request, flight);
    }

    /// Takes a request that ended out of the books.
    pub fn ended(&mut self, id: EffectId) -> Option<(ApiRequest, Flight)> {
        let request = self.flights.iter().find(|(_, flight)| flight.id == id).map(|(request, _)| request.clone())?;
        let flight = self.flights.remove(&request)?;
        Some((request, flight))
    }

    /// Waits grow while the answer stays the same; a server that refuses is another matter than one that is away.
    pub fn failed(&mut self, request: ApiRequest, error: EffectError, now: Now) {
        let EffectError { kind, message } = error;
        let before = self.failures.get(&request).filter(|failed| failed.kind == kind);
        let mut failure = Failure::after(before.map(|failed| &failed.failure), message, now);
        if matches!(kind, ErrorKind::Unavailable | ErrorKind::TimedOut) {
            failure.retry_at = failure.retry_at.min(now.uptime + AWAY_RETRY_MAX);
        }
        self.failures.insert(request, FailedRequest { kind, failure });
    }

    /// It succeeded, or whom it was about is gone: nothing is left to wait for.
    pub fn forget(&mut self, request: &ApiRequest) {
        self.failures.remove(request);
    }

    /// Everything that is under way or waits for another try.
    pub fn kept(&self) -> impl Iterator<Item = &ApiRequest> {
        self.flights.keys().chain(self.failures.keys())
    }

    /// The API server's copy of some pod changed.
    pub fn reconcile_soon(&mut self, now: Now) {
        self.reconcile_at.get_or_insert(now.uptime + RECONCILE_AFTER);
    }

    /// It is time to compare; asked once per round.
    pub fn take_reconcile(&mut self, now: Now) -> bool {
        self.reconcile_at.take_if(|moment| *moment <= now.uptime).is_some()
    }

    /// Requests whose response is overdue.
    pub fn overdue(&self, now: Now) -> Vec<EffectId> {
        self.flights.values().filter(|flight| flight.give_up_at <= now.uptime).map(|flight| flight.id).collect()
    }

    pub fn wake_at(&self, now: Now) -> Option<Uptime> {
        let retries = self.failures.iter().filter(|(request, _)| !self.flights.contains_key(*request));
        let retries = retries.map(|(_, failed)| failed.failure.retry_at).filter(|moment| *moment > now.uptime);
        let answers = self.flights.values().map(|flight| flight.give_up_at);
        retries.chain(answers).chain(self.reconcile_at).min()
    }
}
