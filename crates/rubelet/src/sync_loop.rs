//! The sync loop: the only code that changes the agent, and the only `select!` over its inputs.
//!
//! Owns: the agent, the inbox, the timer. It awaits only the next event, so no pod can slow another.
//! Config updates, runtime hints, probe results and effect results all arrive in the inbox; the sync timer and
//! housekeeping are the agent's own deadlines.
//! Upstream: `syncLoop`, `syncLoopIteration`.

use std::sync::Arc;

use rubelet_core::{agent::Agent, effect::Effect, event::Event, snapshot::Snapshot, time::Now};
use tokio::{
    sync::{mpsc, watch},
    time::sleep_until,
};
use tokio_util::sync::CancellationToken;

use crate::{effects::Effects, server::health::LoopHealth, world::World};

/// Enough for every pod of a large node to report at once; senders wait while it is full, and the loop drains it in microseconds.
pub const INBOX_CAPACITY: usize = 1024;

/// Sees every turn: the simulator's trace and checkers.
pub type TurnObserver = Box<dyn FnMut(Now, &Event, &[Effect], &Agent) + Send>;

pub struct SyncLoop {
    agent: Agent,
    world: World,
    inbox: mpsc::Receiver<Event>,
    effects: Effects,
    snapshots: watch::Sender<Arc<Snapshot>>,
    health: Arc<LoopHealth>,
    observer: Option<TurnObserver>,
}

impl std::fmt::Debug for SyncLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SyncLoop").field("agent", &self.agent).finish_non_exhaustive()
    }
}

/// The channel ends that other tasks hold.
#[derive(Debug)]
pub struct Handles {
    pub inbox: mpsc::Sender<Event>,
    pub snapshots: watch::Receiver<Arc<Snapshot>>,
    pub health: Arc<LoopHealth>,
}

impl SyncLoop {
    pub fn new(world: World, observer: Option<TurnObserver>) -> (SyncLoop, Handles) {
        let (sender, inbox) = mpsc::channel(INBOX_CAPACITY);
        let agent = Agent::new(world.settings.as_ref().clone(), world.clock.now());
        let (snapshots, receiver) = watch::channel(agent.snapshot());
        let health = Arc::new(LoopHealth::new(world.settings.sync_frequency));
        if let Some(cluster) = &world.cluster {
            if world.settings.node.pod_certificates_enabled {
                cluster.objects.enable_pod_certificates(world.events.clone(), world.metrics.clone());
            }
            cluster.objects.connect(sender.clone());
        }
        let effects = Effects::new(world.clone(), sender.clone());
        let handles = Handles { inbox: sender, snapshots: receiver, health: health.clone() };
        (SyncLoop { agent, world, inbox, effects, snapshots, health, observer }, handles)
    }

    /// Runs until stopped. Pods keep running without the agent.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let wake_at = self.world.clock.instant(self.agent.wake_at(self.world.clock.now()));
            let event = tokio::select! {
                // Priority: stop, then events, then deadlines.
                biased;
                // Cancel-safe: a token keeps its state.
                () = stop.cancelled() => break,
                // Cancel-safe: an event that was not received stays in the channel.
                Some(event) = self.inbox.recv() => event,
                // Cancel-safe: the deadline is computed anew each turn.
                () = sleep_until(wake_at) => Event::Due,
            };
            self.turn(event);
        }
    }

    fn turn(&mut self, event: Event) {
        let now = self.world.clock.now();
        if let Event::Done { id, .. } = &event {
            self.effects.ended(*id);
        }
        let effects = match &mut self.observer {
            None => self.agent.handle(now, event),
            Some(observer) => {
                let effects = self.agent.handle(now, event.clone());
                observer(now, &event, &effects, &self.agent);
                effects
            }
        };
        // Before the effects: they read objects that the newest snapshot lists as needed.
        self.publish(now);
        for effect in effects {
            self.effects.start(effect);
        }
        self.health.turned(now.uptime);
    }

    /// Readers are woken only if something changed.
    fn publish(&self, now: Now) {
        let newest = self.agent.snapshot();
        self.snapshots.send_if_modified(|known| {
            let is_new = !Arc::ptr_eq(known, &newest);
            if is_new {
                self.world.metrics.turned(known, &newest, now);
                if let Some(cluster) = &self.world.cluster {
                    cluster.objects.update_needs(known, &newest);
                }
                *known = newest;
            }
            is_new
        });
    }
}
