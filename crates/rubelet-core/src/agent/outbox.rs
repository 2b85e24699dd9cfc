//! The effects of this turn, and those in flight.
//!
//! Owns: the effects of the turn; `flights.rs` keeps those with a pending result. Never: decides on an effect.

use crate::{
    effect::{Effect, EffectId, EventRecord},
    flights::{Flight, Flights, PodFlights, PodSubject, Subject},
    id::PodUid,
    op::Op,
    settings::Settings,
    time::Now,
};

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Outbox {
    effects: Vec<Effect>,
    pub flights: Flights,
    /// How many pods have arrived so far.
    arrivals: u64,
}

impl Outbox {
    pub(super) fn send(&mut self, subject: Subject, op: impl Into<Op>, reason: String, settings: &Settings, now: Now) {
        let op = op.into();
        let deadline = op.deadline(settings.runtime_request_timeout);
        let id = self.flights.begin(subject, op.clone(), deadline, now);
        self.effects.push(Effect::Do { id, op, deadline, reason });
    }

    /// Drops the flight on this subject and stops its effect.
    pub(super) fn cancel(&mut self, subject: &Subject) {
        if let Some(id) = self.flights.get(subject).map(|flight| flight.id) {
            self.flights.end(id);
            self.stop(id);
        }
    }

    /// Cancels the matching effects on a pod.
    pub(super) fn cancel_of_pod(&mut self, uid: &PodUid, is_meant: impl Fn(&PodSubject, &Flight) -> bool) {
        for (subject, _) in self.of_pod(uid, is_meant) {
            self.cancel(&subject);
        }
    }

    /// Stops an effect whose result was already taken as a failure.
    pub(super) fn stop(&mut self, id: EffectId) {
        self.effects.push(Effect::Cancel(id));
    }

    /// The matching effects on the pod begin no further call.
    pub(super) fn recall_of_pod(&mut self, uid: &PodUid, is_meant: impl Fn(&PodSubject, &Flight) -> bool) {
        for (_, id) in self.of_pod(uid, is_meant) {
            self.effects.push(Effect::Recall(id));
        }
    }

    fn of_pod(&self, uid: &PodUid, is_meant: impl Fn(&PodSubject, &Flight) -> bool) -> Vec<(Subject, EffectId)> {
        let meant = self.pod_flights(uid).all().filter(|(subject, flight)| is_meant(subject, flight));
        meant.map(|(subject, flight)| (Subject::Pod(uid.clone(), subject.clone()), flight.id)).collect()
    }

    pub(super) fn pod_flights<'a>(&'a self, uid: &'a PodUid) -> PodFlights<'a> {
        self.flights.of_pod(uid)
    }

    pub(super) fn record(&mut self, event: EventRecord) {
        self.effects.push(Effect::Record(event));
    }

    pub(super) fn next_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    pub(super) fn drain(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }
}
