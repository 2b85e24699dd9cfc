//! Shared by all fakes: the state of the simulated node, the clock, and scheduled events.
//!
//! Owns: the lock around the state (one thread, never held over an await), the queue of scheduled events. Never: decides
//! what a runtime or a disk does.

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
    csi::{Csi, LateCsiCall},
    devices::Devices,
    disk::Disk,
    faults::Faults,
    invariants::Rules,
    memory::Memory,
    runtime::{
        LateCall,
        act::Act,
        store::{Ailment, Store},
    },
    trace::Trace,
};

/// The wall clock at the start of a simulation: 2026-01-01T00:00:00Z.
const START_SECS: i64 = 1_767_225_600;

/// The period of the deadline rules.
pub(crate) const PATROL: Duration = Duration::from_secs(1);

/// More turns than any burst of events takes: 100 pods at once take some hundreds.
const TURNS_PER_INSTANT: u32 = 20_000;

/// A handle on the state. The play and every fake hold one.
#[derive(Debug)]
pub(crate) struct Simulation {
    state: Mutex<SimState>,
    /// The state changed: predicates may hold, an event may be due earlier.
    pub changed: Notify,
    /// The API or its reachability changed.
    pub api_changed: Notify,
    /// A file was written to whose next write is a hint.
    pub written: Notify,
    clock: Clock,
    wall_offset_ms: Arc<AtomicI64>,
}

/// The simulated state, without the agent itself.
#[derive(Debug)]
pub(crate) struct SimState {
    /// Time since the simulation began; not affected by jumps of the wall clock.
    pub now: Duration,
    pub wall: Timestamp,
    pub rng: Rng,
    pub trace: Trace,
    pub faults: Faults,
    pub runtime: Store,
    pub api: ApiStore,
    pub csi: Csi,
    pub disk: Disk,
    pub devices: Devices,
    /// Every cgroup below the root.
    pub cgroups: BTreeSet<PathBuf>,
    pub memory: Memory,
    /// Responses of the web; connections to other pages are refused.
    pub pages: BTreeMap<String, FetchResponse>,
    pub rules: Rules,
    pub agent: AgentState,
    /// The agent's last snapshot, empty while no agent runs.
    pub snapshot: Arc<Snapshot>,
    /// What the agent still keeps of removed pods.
    pub stale_entries: Vec<String>,
    /// The length of the agent's state as text; set after the next turn if it is `None`.
    pub agent_bytes: Option<usize>,
    pub turns_in_all: u64,
    /// The agent dies at a call boundary after this many more.
    pub agent_dies_after: Option<u64>,
    /// Turns of the agent's loop within one instant: an endless loop would stop time.
    turns: (Duration, u32),
    scheduled: BTreeMap<(Duration, u64), ScheduledEvent>,
    scheduled_count: u64,
}

/// One process of the agent, counted from 1. Calls of an earlier one have no effect: that process is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Incarnation(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentState {
    Alive(Incarnation),
    /// It died; the play has yet to abort its tasks.
    Dying(Incarnation),
    Dead(Incarnation),
}

/// A scheduled event.
#[derive(Clone, Debug)]
pub(crate) enum ScheduledEvent {
    /// A container's process ends, if it still runs then.
    Exit {
        container: String,
        code: i32,
        reason: &'static str,
    },
    /// The runtime finishes a call whose client disconnected.
    Finish(Box<LateCall>),
    /// A delayed event arrives.
    Event(Box<v1::ContainerEventResponse>),
    /// The API server executes a request whose client disconnected.
    Request(Box<LateRequest>),
    RuntimeReturns,
    Heals(Ailment),
    /// The end of a stop's timeout, if its client is gone and the runtime continues.
    Kill(String),
    ApiReturns,
    ApiCatchesUp,
    DiskHasRoom,
    /// By container ID.
    MemoryFreed(String),
    ImageFsHasRoom,
    /// By mount point.
    DeviceReturns(PathBuf),
    /// A driver finishes a call whose client disconnected.
    Csi(Box<LateCsiCall>),
    /// Its name.
    DriverReturns(String),
    RegistrarReturns(String),
    /// A round of the attach/detach controller.
    AttachDetach,
    /// By name.
    ClaimBound(String),
}

impl Simulation {
    /// Needs a tokio runtime with its clock paused.
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        let wall_offset_ms = Arc::new(AtomicI64::new(0));
        let start = Timestamp::from_second(START_SECS).expect("a constant within jiff's range");
        let clock = Clock::simulated(start, wall_offset_ms.clone());
        let sim = SimState {
            now: Duration::ZERO,
            wall: start,
            rng: Rng::with_seed(seed),
            trace: Trace::default(),
            faults: Faults::default(),
            runtime: Store::default(),
            api: ApiStore::default(),
            csi: Csi::default(),
            disk: Disk::default(),
            devices: Devices::default(),
            cgroups: BTreeSet::new(),
            memory: Memory::default(),
            pages: BTreeMap::new(),
            rules: Rules::default(),
            agent: AgentState::Dead(Incarnation(0)),
            snapshot: Arc::default(),
            stale_entries: Vec::new(),
            agent_bytes: Some(0),
            turns_in_all: 0,
            agent_dies_after: None,
            turns: (Duration::ZERO, 0),
            scheduled: BTreeMap::new(),
            scheduled_count: 0,
        };
        Arc::new(Simulation {
            state: Mutex::new(sim),
            changed: Notify::new(),
            api_changed: Notify::new(),
            written: Notify::new(),
            clock,
            wall_offset_ms,
        })
    }

    /// Reads or changes the state; then wakes all waiters.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut SimState) -> T) -> T {
        let mut sim = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        sim.now = now.uptime.as_duration();
        sim.wall = now.wall;
        let answer = change(&mut sim);
        sim.tell_watchers();
        let is_api_changed = sim.api.take_changed();
        let has_writes = sim.disk.has_writes();
        drop(sim);
        if has_writes {
            self.written.notify_waiters();
        }
        self.changed.notify_waiters();
        if is_api_changed {
            self.api_changed.notify_waiters();
        }
        answer
    }

    /// Only reads, and wakes no waiter.
    pub(crate) fn look<T>(&self, view: impl FnOnce(&SimState) -> T) -> T {
        view(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A clock as a newly started process would have it.
    pub(crate) fn clock_of_a_new_process(&self) -> Clock {
        let now = self.clock.now();
        let offset = SignedDuration::from_millis(self.wall_offset_ms.load(Ordering::Relaxed));
        Clock::simulated(now.wall - offset, self.wall_offset_ms.clone())
    }

    pub(crate) fn jump_wall_clock(&self, by: SignedDuration) {
        let by_ms = i64::try_from(by.as_millis()).unwrap_or(0);
        self.wall_offset_ms.fetch_add(by_ms, Ordering::Relaxed);
        self.with(|sim| {
            sim.rules.clock_jumps(sim.now);
            sim.log("world", format!("wall clock jumps by {}s", by.as_secs()));
        });
    }

    /// Executes scheduled events. Runs until it is aborted.
    pub(crate) async fn run_scheduled_events(self: Arc<Self>) {
        let mut patrol = tokio::time::interval(PATROL);
        loop {
            // Registered before the read, so that an event scheduled in between is not missed.
            let changed = self.changed.notified();
            let next = self.look(|sim| sim.scheduled.keys().next().map(|(at, _)| *at));
            let due = next.map(|at| self.clock.instant(Uptime::new(at)));
            tokio::select! {
                // Cancel safe: every arm only triggers another read.
                biased;
                () = sleep_until(due) => self.with(SimState::run_due),
                _ = patrol.tick() => self.with(SimState::patrol),
                () = changed => {}
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

impl SimState {
    pub(crate) fn log(&mut self, actor: &str, what: impl std::fmt::Display) {
        self.trace.push(self.now, actor, what);
    }

    pub(crate) fn schedule_in(&mut self, wait: Duration, event: ScheduledEvent) {
        self.scheduled_count += 1;
        self.scheduled.insert((self.now + wait, self.scheduled_count), event);
    }

    pub(crate) fn is_alive(&self, incarnation: Incarnation) -> bool {
        self.agent == AgentState::Alive(incarnation)
    }

    /// A chance to die at a call boundary.
    pub(crate) fn may_kill_agent(&mut self, incarnation: Incarnation) {
        if !self.is_alive(incarnation) {
            return;
        }
        let counted = self.agent_dies_after.is_some_and(|left| left == 0);
        self.agent_dies_after = self.agent_dies_after.and_then(|left| left.checked_sub(1));
        if counted || self.faults.kills_agent(&mut self.rng) {
            self.log("world", "the agent is killed");
            self.agent = AgentState::Dying(incarnation);
        }
    }

    /// Counts a turn of the agent's loop, and reports a spin above the limit.
    pub(crate) fn count_turn(&mut self) {
        self.turns_in_all += 1;
        let (since, count) = self.turns;
        self.turns = if since == self.now { (since, count + 1) } else { (self.now, 1) };
        if self.turns.1 == TURNS_PER_INSTANT {
            self.rules.broken("the loop rests", self.now, format!("{TURNS_PER_INSTANT} turns within one instant"));
        }
    }

    fn run_due(&mut self) {
        while let Some(entry) = self.scheduled.first_entry() {
            if entry.key().0 > self.now {
                return;
            }
            match entry.remove() {
                ScheduledEvent::Exit { container, code, reason } => self.exit_container(&container, code, reason),
                ScheduledEvent::Finish(call) => call.finish(self),
                ScheduledEvent::Event(event) => self.runtime.deliver(&event),
                ScheduledEvent::Request(request) => request.finish(self),
                ScheduledEvent::ApiReturns => self.heal_api(),
                ScheduledEvent::ApiCatchesUp => self.catch_up(),
                ScheduledEvent::RuntimeReturns => self.bring_runtime_up(),
                ScheduledEvent::Heals(ailment) => self.heal(ailment),
                ScheduledEvent::Kill(container) => drop(self.perform(&Act::Kill(container))),
                ScheduledEvent::DiskHasRoom => {
                    self.log("world", "the disk has room again");
                    self.disk.full = false;
                }
                ScheduledEvent::MemoryFreed(container) => {
                    self.log("world", format!("{container} uses no more than usual"));
                    self.memory.hogs.remove(&container);
                }
                ScheduledEvent::ImageFsHasRoom => {
                    self.log("world", "the image file system has room again");
                    self.runtime.image_fs_others = 0;
                }
                ScheduledEvent::DeviceReturns(point) => self.bring_device_back(&point),
                ScheduledEvent::Csi(call) => call.finish(self),
                ScheduledEvent::DriverReturns(name) => self.start_driver(&name),
                ScheduledEvent::RegistrarReturns(name) => self.bring_registrar_back(&name),
                ScheduledEvent::AttachDetach => self.attach_and_detach(),
                ScheduledEvent::ClaimBound(name) => self.bind_claim(&name),
            }
        }
    }

    fn tell_watchers(&mut self) {
        for dir in self.disk.take_changed() {
            if !self.faults.loses_hint(&mut self.rng) {
                self.disk.tell(&dir);
            }
        }
    }
}
