//! Requests to the API server: concurrency and retries.
//!
//! Owns: failed requests and their retry times; those in flight are in `flights.rs`. Never: decides on a request; the status
//! manager and `agent/api.rs` do.

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

/// A status that another writer changed is sent again this long after the change was seen, as upstream's reconcile every 10 s.
const RECONCILE_AFTER: Duration = Duration::from_secs(10);
/// Enough to keep the connection busy; more would only queue in the client's rate limiter, out of the order of urgency.
const MAX_STATUS_FLIGHTS: usize = 16;

/// The maximum retry interval while the API server is unreachable: after its return all statuses must arrive within seconds.
/// The load is small, since at most `MAX_STATUS_FLIGHTS` requests are sent.
const AWAY_RETRY_MAX: Duration = Duration::from_secs(3);

/// The subject of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ApiRequest {
    /// The current Node object.
    Node,
    /// The status of the pod of this UID, or its deletion after it has terminated.
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
    /// Full names whose static and mirror pods are to be compared.
    pub mirrors: BTreeSet<String>,
    reconcile_at: Option<Uptime>,
}

/// The last failure of a request, until one succeeds.
#[derive(Clone, Debug)]
struct FailedRequest {
    kind: ErrorKind,
    failure: Failure,
}

impl ApiRequests {
    /// In flight or in back-off.
    pub fn is_busy(&self, request: &ApiRequest, flights: &Flights, now: Now) -> bool {
        flights.contains(&Subject::Api(request.clone()))
            || self.failures.get(request).is_some_and(|failed| failed.failure.retry_at > now.uptime)
    }

    /// The back-off grows while the kind of failure stays the same: rejected and unreachable differ.
    pub fn failed(&mut self, request: ApiRequest, error: EffectError, now: Now) {
        let EffectError { kind, message } = error;
        let before = self.failures.get(&request).filter(|failed| failed.kind == kind);
        let mut failure = Failure::after(before.map(|failed| &failed.failure), message, now);
        if matches!(kind, ErrorKind::Unavailable | ErrorKind::TimedOut) {
            failure.retry_at = failure.retry_at.min(now.uptime + AWAY_RETRY_MAX);
        }
        self.failures.insert(request, FailedRequest { kind, failure });
    }

    /// The request succeeded, or its subject is gone.
    pub fn forget(&mut self, request: &ApiRequest) {
        self.failures.remove(request);
    }

    /// Everything that waits for a retry.
    pub fn failed_requests(&self) -> impl Iterator<Item = &ApiRequest> {
        self.failures.keys()
    }

    /// The API server's copy of some pod changed.
    pub fn reconcile_soon(&mut self, now: Now) {
        self.reconcile_at.get_or_insert(now.uptime + RECONCILE_AFTER);
    }

    /// Whether the comparison is due; true once per round.
    pub fn take_reconcile(&mut self, now: Now) -> bool {
        self.reconcile_at.take_if(|moment| *moment <= now.uptime).is_some()
    }

    pub fn next_wakeup(&self, now: Now) -> Option<Uptime> {
        let retries = self.failures.values().map(|failed| failed.failure.retry_at);
        retries.filter(|moment| *moment > now.uptime).chain(self.reconcile_at).min()
    }
}
