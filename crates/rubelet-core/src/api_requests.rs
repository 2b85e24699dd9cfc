//! Requests to the API server: how many at once, and what has to be tried again.
//!
//! Owns: the failures of requests and when they are tried again; what is under way is in `flights.rs`. Never: decides what is to be said; the
//! status manager and `agent/api.rs` do.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    effect::{EffectError, ErrorKind},
    flights::{Flights, Subject},
    id::PodUid,
    pod::Failure,
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
    /// A newer look at the Node object.
    Node,
    /// The status of the pod of this UID, or its deletion after its end.
    Status(PodUid),
    /// The mirror pod of this full name.
    Mirror(String),
}

impl ApiRequest {
    /// No request comes before it in order.
    pub const FIRST: Self = ApiRequest::Node;
}

/// Whether one more status may be sent.
pub fn has_room(flights: &Flights) -> bool {
    let statuses = flights.api_requests().filter(|request| matches!(request, ApiRequest::Status(_)));
    statuses.count() < MAX_STATUS_FLIGHTS
}

#[derive(Clone, Debug, Default)]
pub struct ApiRequests {
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
    /// Under way, or waiting for another try.
    pub fn is_busy(&self, request: &ApiRequest, flights: &Flights, now: Now) -> bool {
        flights.contains(&Subject::Api(request.clone()))
            || self.failures.get(request).is_some_and(|failed| failed.failure.retry_at > now.uptime)
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

    /// Everything that waits for another try.
    pub fn failed_requests(&self) -> impl Iterator<Item = &ApiRequest> {
        self.failures.keys()
    }

    /// The API server's copy of some pod changed.
    pub fn reconcile_soon(&mut self, now: Now) {
        self.reconcile_at.get_or_insert(now.uptime + RECONCILE_AFTER);
    }

    /// It is time to compare; asked once per round.
    pub fn take_reconcile(&mut self, now: Now) -> bool {
        self.reconcile_at.take_if(|moment| *moment <= now.uptime).is_some()
    }

    pub fn next_wakeup(&self, now: Now) -> Option<Uptime> {
        let retries = self.failures.values().map(|failed| failed.failure.retry_at);
        retries.filter(|moment| *moment > now.uptime).chain(self.reconcile_at).min()
    }
}
