//! Errands to the API server: what is under way for whom, and what has to be tried again.
//!
//! Owns: one errand at a time per pod, how many at once, and when to try again. Never: decides what is to be said; the
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

/// What an errand is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Errand {
    /// The status of the pod of this UID, or its deletion after its end.
    Status(PodUid),
    /// The mirror pod of this full name.
    Mirror(String),
    /// A newer look at the Node object.
    Node,
}

#[derive(Clone, Debug, Default)]
pub struct Errands {
    flights: BTreeMap<Errand, Flight>,
    failures: BTreeMap<Errand, Refusal>,
    /// Full names whose static and mirror pod are to be compared.
    pub mirrors: BTreeSet<String>,
    reconcile_at: Option<Uptime>,
}

/// How the last try ended, until one succeeds.
#[derive(Clone, Debug)]
struct Refusal {
    kind: ErrorKind,
    failure: Failure,
}

impl Errands {
    pub fn is_under_way(&self, errand: &Errand) -> bool {
        self.flights.contains_key(errand)
    }

    /// Under way, or waiting for another try.
    pub fn is_busy(&self, errand: &Errand, now: Now) -> bool {
        self.flights.contains_key(errand)
            || self.failures.get(errand).is_some_and(|refusal| refusal.failure.retry_at > now.uptime)
    }

    pub fn has_room(&self) -> bool {
        let statuses = self.flights.keys().filter(|errand| matches!(errand, Errand::Status(_)));
        statuses.count() < MAX_STATUS_FLIGHTS
    }

    pub fn sent(&mut self, errand: Errand, flight: Flight) {
        self.flights.insert(errand, flight);
    }

    /// Takes an errand that ended out of the books.
    pub fn ended(&mut self, id: EffectId) -> Option<(Errand, Flight)> {
        let errand = self.flights.iter().find(|(_, flight)| flight.id == id).map(|(errand, _)| errand.clone())?;
        let flight = self.flights.remove(&errand)?;
        Some((errand, flight))
    }

    /// Waits grow while the answer stays the same; a server that refuses is another matter than one that is away.
    pub fn failed(&mut self, errand: Errand, error: EffectError, now: Now) {
        let EffectError { kind, message } = error;
        let before = self.failures.get(&errand).filter(|refusal| refusal.kind == kind);
        let mut failure = Failure::after(before.map(|refusal| &refusal.failure), message, now);
        if matches!(kind, ErrorKind::Unavailable | ErrorKind::TimedOut) {
            failure.retry_at = failure.retry_at.min(now.uptime + AWAY_RETRY_MAX);
        }
        self.failures.insert(errand, Refusal { kind, failure });
    }

    /// It succeeded, or whom it was about is gone: nothing is left to wait for.
    pub fn forget(&mut self, errand: &Errand) {
        self.failures.remove(errand);
    }

    /// Everything that is under way or waits for another try.
    pub fn kept(&self) -> impl Iterator<Item = &Errand> {
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

    /// Errands whose answer is overdue.
    pub fn overdue(&self, now: Now) -> Vec<EffectId> {
        self.flights.values().filter(|flight| flight.give_up_at <= now.uptime).map(|flight| flight.id).collect()
    }

    pub fn wake_at(&self, now: Now) -> Option<Uptime> {
        let retries = self.failures.iter().filter(|(errand, _)| !self.flights.contains_key(*errand));
        let retries = retries.map(|(_, refusal)| refusal.failure.retry_at).filter(|moment| *moment > now.uptime);
        let answers = self.flights.values().map(|flight| flight.give_up_at);
        retries.chain(answers).chain(self.reconcile_at).min()
    }
}
