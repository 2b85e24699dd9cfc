//! What all fakes share: the scene as it is now, the clock, and what will happen by itself.
//!
//! Owns: the lock around the scene (one thread, never held over an await), the queue of cues. Never: decides what a
//! runtime or a disk does.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use fastrand::Rng;
use jiff::{SignedDuration, Timestamp};
use rubelet::world::Clock;
use rubelet_core::{snapshot::Snapshot, time::Uptime};
use rubelet_cri::v1;
use rubelet_host::port::FetchResponse;
use tokio::sync::Notify;

use crate::{
    api::{LateRequest, store::Store as ApiStore},
    disk::Disk,
    faults::Faults,
    invariants::Rules,
    runtime::{
        LateCall,
        act::Act,
        store::{Ailment, Store},
    },
    trace::Trace,
};

/// The wall clock's time when the curtain rises: 2026-01-01T00:00:00Z.
const OPENING_SECS: i64 = 1_767_225_600;

/// Between two rounds of the rules about time.
const PATROL: Duration = Duration::from_secs(1);

/// No burst of events takes the agent so many turns: 100 pods at once take some hundreds.
const TURNS_PER_INSTANT: u32 = 20_000;

/// A handle on the scene. The play and every fake hold one.
#[derive(Debug)]
pub struct Stage {
    scene: Mutex<Scene>,
    /// Something changed: conditions may hold, cues may be due.
    pub stirred: Notify,
    /// Something changed in the API, or in who can reach it.
    pub api_stirred: Notify,
    clock: Clock,
    wall_offset_ms: Arc<AtomicI64>,
}

/// Everything that is, apart from the agent itself.
#[derive(Debug)]
pub struct Scene {
    /// Time since the curtain rose; no jump of the wall clock touches it.
    pub now: Duration,
    pub wall: Timestamp,
    pub rng: Rng,
    pub trace: Trace,
    pub faults: Faults,
    pub runtime: Store,
    pub api: ApiStore,
    pub disk: Disk,
    /// Every cgroup there is below the root.
    pub cgroups: BTreeSet<PathBuf>,
    /// What the web answers; nothing listens where there is no page.
    pub pages: BTreeMap<String, FetchResponse>,
    pub rules: Rules,
    pub agent: AgentState,
    /// The agent's last word, empty between its lives.
    pub snapshot: Arc<Snapshot>,
    /// What the agent still keeps of pods that are gone.
    pub stale_entries: Vec<String>,
    /// The agent dies at the border of a call when so many more have passed.
    pub agent_dies_after: Option<u64>,
    /// Turns of the agent's loop within one instant: one that never rests would stop time itself.
    turns: (Duration, u32),
    cues: BTreeMap<(Duration, u64), Cue>,
    cues_given: u64,
}

/// Calls of an earlier life reach nothing: the process that made them is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentState {
    Alive(Life),
    /// It died by itself; the play has yet to clear away its tasks.
    Dying(Life),
    Dead(Life),
}

/// Something that happens by itself at its time.
#[derive(Clone, Debug)]
pub enum Cue {
    /// A container's process ends, if it still runs then.
    Exit {
        container: String,
        code: i32,
        reason: &'static str,
    },
    /// The runtime finishes a call whose client went away.
    Finish(Box<LateCall>),
    /// An event arrives at last.
    Event(Box<v1::ContainerEventResponse>),
    /// The API server carries out a request whose client went away.
    Request(Box<LateRequest>),
    RuntimeReturns,
    Heals(Ailment),
    /// The end of a stop's time, when its client is gone and the runtime goes on.
    Kill(String),
    ApiReturns,
    ApiCatchesUp,
    DiskHasRoom,
}

impl Stage {
    /// Needs a tokio runtime with its clock paused.
    pub fn new(seed: u64) -> Arc<Self> {
        let wall_offset_ms = Arc::new(AtomicI64::new(0));
        let opening = Timestamp::from_second(OPENING_SECS).expect("a constant within jiff's range");
        let clock = Clock::simulated(opening, wall_offset_ms.clone());
        let scene = Scene {
            now: Duration::ZERO,
            wall: opening,
            rng: Rng::with_seed(seed),
            trace: Trace::default(),
            faults: Faults::default(),
            runtime: Store::default(),
            api: ApiStore::default(),
            disk: Disk::default(),
            cgroups: BTreeSet::new(),
            pages: BTreeMap::new(),
            rules: Rules::default(),
            agent: AgentState::Dead(Life(0)),
            snapshot: Arc::default(),
            stale_entries: Vec::new(),
            agent_dies_after: None,
            turns: (Duration::ZERO, 0),
            cues: BTreeMap::new(),
            cues_given: 0,
        };
        Arc::new(Stage {
            scene: Mutex::new(scene),
            stirred: Notify::new(),
            api_stirred: Notify::new(),
            clock,
            wall_offset_ms,
        })
    }

    /// Looks at the scene or changes it; then tells whoever waits for a change.
    pub fn with<T>(&self, change: impl FnOnce(&mut Scene) -> T) -> T {
        let mut scene = self.scene.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        scene.now = now.uptime.as_duration();
        scene.wall = now.wall;
        let answer = change(&mut scene);
        scene.tell_watchers();
        let is_api_stirred = scene.api.take_stirred();
        drop(scene);
        self.stirred.notify_waiters();
        if is_api_stirred {
            self.api_stirred.notify_waiters();
        }
        answer
    }

    /// Only looks, and wakes nobody.
    pub fn look<T>(&self, view: impl FnOnce(&Scene) -> T) -> T {
        view(&self.scene.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A clock as a process that starts now would have it.
    pub fn clock_of_a_new_process(&self) -> Clock {
        let now = self.clock.now();
        let offset = SignedDuration::from_millis(self.wall_offset_ms.load(Ordering::Relaxed));
        Clock::simulated(now.wall - offset, self.wall_offset_ms.clone())
    }

    pub fn jump_wall_clock(&self, by: SignedDuration) {
        let by_ms = i64::try_from(by.as_millis()).unwrap_or(0);
        self.wall_offset_ms.fetch_add(by_ms, Ordering::Relaxed);
        self.with(|scene| {
            scene.rules.clock_jumps(scene.now);
            scene.log("world", format!("wall clock jumps by {}s", by.as_secs()));
        });
    }

    /// Lets happen what happens by itself. Runs until it is aborted.
    pub async fn play_cues(self: Arc<Self>) {
        let mut patrol = tokio::time::interval(PATROL);
        loop {
            // Registered before the look, so that a cue given meanwhile is not missed.
            let stirred = self.stirred.notified();
            let next = self.look(|scene| scene.cues.keys().next().map(|(at, _)| *at));
            let due = next.map(|at| self.clock.instant(Uptime::new(at)));
            tokio::select! {
                // Cancel safe: no arm holds anything but a wish to look again.
                biased;
                () = sleep_until(due) => self.with(Scene::play_due),
                _ = patrol.tick() => self.with(Scene::patrol),
                () = stirred => {}
            }
        }
    }
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Scene {
    pub fn log(&mut self, actor: &str, what: impl std::fmt::Display) {
        self.trace.push(self.now, actor, what);
    }

    pub fn cue_in(&mut self, wait: Duration, cue: Cue) {
        self.cues_given += 1;
        self.cues.insert((self.now + wait, self.cues_given), cue);
    }

    pub fn is_alive(&self, life: Life) -> bool {
        self.agent == AgentState::Alive(life)
    }

    /// An opportunity to die, at the border of a call.
    pub fn may_kill_agent(&mut self, life: Life) {
        if !self.is_alive(life) {
            return;
        }
        let counted = self.agent_dies_after.is_some_and(|left| left == 0);
        self.agent_dies_after = self.agent_dies_after.and_then(|left| left.checked_sub(1));
        if counted || self.faults.kills_agent(&mut self.rng) {
            self.log("world", "the agent is killed");
            self.agent = AgentState::Dying(life);
        }
    }

    /// Counts a turn of the agent's loop, and calls it a spin when there is no end to them.
    pub fn count_turn(&mut self) {
        let (since, count) = self.turns;
        self.turns = if since == self.now { (since, count + 1) } else { (self.now, 1) };
        if self.turns.1 == TURNS_PER_INSTANT {
            self.rules.broken("the loop rests", self.now, format!("{TURNS_PER_INSTANT} turns within one instant"));
        }
    }

    fn play_due(&mut self) {
        while let Some(entry) = self.cues.first_entry() {
            if entry.key().0 > self.now {
                return;
            }
            match entry.remove() {
                Cue::Exit { container, code, reason } => self.exit_container(&container, code, reason),
                Cue::Finish(call) => call.finish(self),
                Cue::Event(event) => self.runtime.deliver(&event),
                Cue::Request(request) => request.finish(self),
                Cue::ApiReturns => self.heal_api(),
                Cue::ApiCatchesUp => self.catch_up(),
                Cue::RuntimeReturns => self.bring_runtime_up(),
                Cue::Heals(ailment) => self.heal(ailment),
                Cue::Kill(container) => drop(self.perform(&Act::Kill(container))),
                Cue::DiskHasRoom => {
                    self.log("world", "the disk has room again");
                    self.disk.full = false;
                }
            }
        }
    }

    fn tell_watchers(&mut self) {
        for dir in self.disk.take_stirred() {
            if !self.faults.loses_hint(&mut self.rng) {
                self.disk.tell(&dir);
            }
        }
    }
}
