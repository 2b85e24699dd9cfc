//! Which faults affected what, and until when: deadline rules count only time without them.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    faults::{EventDelivery, Scope, WatchDelivery},
    simulation::{SimState, Simulation},
};

/// The scope of a fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Touched {
    /// One pod, by its uid.
    Pod(String),
    /// The runtime or the host, and so every pod.
    Node,
    Api,
}

impl Touched {
    /// The pod, or the whole node where there is none.
    pub(crate) fn pod(uid: Option<String>) -> Self {
        uid.map_or(Touched::Node, Touched::Pod)
    }

    /// How long the consequences of a fault last: back-offs of the pod, and checks of the node.
    fn aftermath(&self) -> Duration {
        match self {
            Touched::Pod(_) => Duration::from_secs(330),
            Touched::Node | Touched::Api => Duration::from_secs(45),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Trouble {
    until: BTreeMap<Touched, Duration>,
    /// Running calls with a fault.
    open: BTreeMap<Touched, u32>,
}

impl Trouble {
    /// A fault without duration.
    pub(crate) fn strike(&mut self, touched: Touched, now: Duration) {
        let until = now + touched.aftermath();
        let known = self.until.entry(touched).or_default();
        *known = until.max(*known);
    }

    /// A call begins that will fail, hang or be late.
    pub(crate) fn enter(&mut self, touched: Touched) {
        *self.open.entry(touched).or_default() += 1;
    }

    /// Such a call has ended.
    pub(crate) fn leave(&mut self, touched: Touched, now: Duration) {
        if let Some(count) = self.open.get_mut(&touched) {
            *count = count.saturating_sub(1);
        }
        self.strike(touched, now);
    }

    pub(super) fn forget(&mut self, is_meant: impl Fn(&Touched) -> bool) {
        self.until.retain(|touched, _| !is_meant(touched));
        self.open.retain(|touched, count| *count > 0 || !is_meant(touched));
    }

    /// Since when none of these is affected; `None` while one is.
    pub(crate) fn clear_since(&self, all: &[Touched], now: Duration) -> Option<Duration> {
        let is_open = |it: &Touched| self.open.get(it).is_some_and(|count| *count > 0);
        let since = all.iter().filter_map(|it| self.until.get(it)).max().copied().unwrap_or_default();
        (!all.iter().any(is_open) && since <= now).then_some(since)
    }
}

/// A call under way that fails, hangs or is late.
#[derive(Debug)]
pub(crate) struct Faulty {
    simulation: Arc<Simulation>,
    touched: Touched,
}

impl Faulty {
    pub(crate) fn enter(simulation: &Arc<Simulation>, touched: Touched) -> Self {
        simulation.with(|sim| Faulty::enter_in(sim, simulation, touched))
    }

    pub(crate) fn enter_in(sim: &mut SimState, simulation: &Arc<Simulation>, touched: Touched) -> Self {
        sim.rules.trouble.enter(touched.clone());
        Faulty { simulation: simulation.clone(), touched }
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.simulation.with(|sim| sim.rules.trouble.leave(self.touched.clone(), sim.now));
    }
}

impl SimState {
    /// How the next watch event is delivered.
    pub(crate) fn watch_delivery(&mut self) -> WatchDelivery {
        let delivery = self.faults.watch_delivery(&mut self.rng);
        match delivery {
            WatchDelivery::Once | WatchDelivery::Twice => {}
            WatchDelivery::Late(wait) => self.rules.trouble.strike(Touched::Api, self.now + wait),
            WatchDelivery::Cut | WatchDelivery::Gone => self.rules.trouble.strike(Touched::Api, self.now),
        }
        delivery
    }

    /// How the next event about this pod is delivered.
    pub(crate) fn delivery(&mut self, uid: &str) -> EventDelivery {
        let delivery = self.faults.delivery(&mut self.rng);
        match delivery {
            EventDelivery::Once | EventDelivery::Twice => {}
            EventDelivery::Late(_) | EventDelivery::Lost => {
                self.rules.trouble.strike(Touched::Pod(uid.to_owned()), self.now)
            }
        }
        delivery
    }

    /// How old the next list is.
    pub(crate) fn list_age(&mut self, scope: Scope) -> Duration {
        let age = self.faults.list_age(&mut self.rng, scope);
        if !age.is_zero() {
            self.rules.trouble.strike(Touched::Node, self.now);
        }
        age
    }
}
