//! What leaves the core this turn, and who waits for which answer.
//!
//! Owns: effect ids and deadlines. Never: decides that something be done.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    effect::{Effect, EffectId, EventRecord},
    id::PodUid,
    op::Op,
    settings::Settings,
    time::{Now, Uptime},
};

/// How long after its deadline an effect that never answered is given up.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// Whose effect it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    Node,
    /// A look, or an effect in the pod's `flights`.
    Pod(PodUid),
    Image,
    /// To the API server.
    ApiRequest,
}

#[derive(Debug, Default)]
pub struct Outbox {
    effects: Vec<Effect>,
    last_id: u64,
    owners: BTreeMap<EffectId, Owner>,
    /// How many pods have arrived so far.
    pub arrivals: u64,
    /// When the next queued pull may start, if it waits for the registry's rate.
    pub pulls_at: Option<Uptime>,
}

impl Outbox {
    /// Sends an effect; returns its id and when to give up on its answer.
    pub fn send(&mut self, owner: Owner, op: Op, reason: String, settings: &Settings, now: Now) -> (EffectId, Uptime) {
        self.last_id += 1;
        let id = EffectId(self.last_id);
        let deadline = op.deadline(settings.runtime_request_timeout);
        self.owners.insert(id, owner);
        self.effects.push(Effect::Do { id, op, deadline, reason });
        (id, now.uptime + deadline + LOST_AFTER)
    }

    pub fn cancel(&mut self, id: EffectId) {
        if self.owners.contains_key(&id) {
            self.abandon(id);
        }
    }

    /// Nobody waits for this any more, and whatever still does it is to stop.
    pub fn abandon(&mut self, id: EffectId) {
        self.owners.remove(&id);
        self.effects.push(Effect::Cancel(id));
    }

    pub fn recall(&mut self, id: EffectId) {
        self.effects.push(Effect::Recall(id));
    }

    pub fn record(&mut self, event: EventRecord) {
        self.effects.push(Effect::Record(event));
    }

    /// Who waits for this answer; `None` when nobody does any more.
    pub fn answered(&mut self, id: EffectId) -> Option<Owner> {
        self.owners.remove(&id)
    }

    /// The pods for which an answer is awaited.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.owners.values().filter_map(|owner| match owner {
            Owner::Pod(uid) => Some(uid),
            Owner::Node | Owner::Image | Owner::ApiRequest => None,
        })
    }

    pub fn next_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    pub fn drain(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }
}
