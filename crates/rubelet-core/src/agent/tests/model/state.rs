//! One state of the model, and every state that may follow it.
//!
//! Owns: the transitions. Never: which states are explored, or whether they are right.

use std::time::Duration;

use crate::{
    agent::{
        Agent,
        tests::model::{
            GRACE_SECS, ROUTINES_SECS, UID,
            world::{Answer, Budget, Defect, InFlight, Progress, World, failed},
        },
    },
    effect::{Effect, EffectId, ErrorKind},
    event::{Event, EventStream, Source},
    eviction::EvictionSettings,
    id::PodUid,
    op::{ApiOp, NodeOp, Op, OpKind, PodOp},
    settings::{ImageGcSettings, LogSettings, Settings},
    test_support::{later, mk_pod, now},
    time::{Now, Uptime},
};

#[derive(Clone, Debug)]
pub(super) struct State {
    pub agent: Agent,
    /// Since the agent's start.
    pub at_secs: u64,
    pub world: World,
}

/// Why a transition may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It happens in the end, if nothing else does.
    Progress,
    /// A routine of the node, when nothing else is left to do.
    Audit,
    /// It may never happen.
    Chance,
}

#[derive(Debug)]
pub(super) struct Successor {
    pub label: String,
    pub kind: Kind,
    pub state: State,
}

impl State {
    /// The agent has just started and has its pod.
    pub(super) fn initial(text: &str, budget: Budget, defect: Option<Defect>) -> Self {
        let mut pod = mk_pod(text);
        pod.metadata.resource_version = Some("1".to_owned());
        if let Some(spec) = &mut pod.spec {
            spec.termination_grace_period_seconds = Some(i64::from(GRACE_SECS));
        }
        State { agent: agent(), at_secs: 0, world: World::new(pod, budget, defect) }.booted()
    }

    pub(super) fn now(&self) -> Now {
        Now { wall: now().wall, ..later(self.at_secs) }
    }

    fn booted(mut self) -> Self {
        self.handle_once(Event::Due);
        self.handle_once(Event::RuntimeEvents(EventStream::Up));
        self.world.has_news = false;
        let pods = self.world.api.iter().cloned().collect();
        self.handle_once(Event::Config { source: Source::Api, pods });
        self
    }

    fn handle_once(&mut self, event: Event) {
        let cancelled = self.turn(event);
        assert!(cancelled.is_empty(), "a new agent cancels nothing");
    }

    /// One event, the routines whose result never depends on the pod, and the watch; branches on what cancelled effects did.
    fn handle(mut self, event: Event) -> Vec<State> {
        let cancelled = self.turn(event);
        self.concluded(cancelled)
    }

    fn concluded(mut self, mut cancelled: Vec<InFlight>) -> Vec<State> {
        if self.world.has_news {
            cancelled.extend(self.tell());
        }
        let mut states = self.resolved(&cancelled);
        for state in states.iter_mut().filter(|state| state.world.has_news) {
            let cancelled = state.tell();
            assert!(cancelled.is_empty(), "news of a status cancels nothing");
        }
        states.into_iter().flat_map(State::patched).collect()
    }

    /// A new status reaches the API server at once, or later: that is a delay.
    fn patched(mut self) -> Vec<State> {
        let is_new = |effect: &InFlight| matches!(effect.op, Op::Api(ApiOp::PatchStatus { .. })) && !effect.is_late;
        let Some(at) = self.world.effects.iter().position(is_new) else { return vec![self] };
        let mut states = Vec::new();
        if self.world.left.delays > 0 {
            let mut late = self.clone();
            late.world.left.delays -= 1;
            late.world.effects[at].is_late = true;
            states.push(late);
        }
        let InFlight { id, op, progress, .. } = self.world.effects.remove(at);
        let Progress::Done(result) = self.world.take(&op, &progress, self.now()) else {
            unreachable!("a patch has one step");
        };
        states.extend(self.handle(Event::Done { id, result }));
        states
    }

    /// Each of these effects has taken place or not.
    fn resolved(self, cancelled: &[InFlight]) -> Vec<State> {
        let worlds = cancelled.iter().fold(vec![self.world.clone()], |worlds, effect| {
            worlds.iter().flat_map(|world| world.fates(effect, self.now())).collect()
        });
        worlds.into_iter().map(|world| State { world, ..self.clone() }).collect()
    }

    /// The watch shows the pod as it is now.
    fn tell(&mut self) -> Vec<InFlight> {
        self.world.has_news = false;
        let pods: Vec<_> = self.world.api.iter().cloned().collect();
        let removed = if pods.is_empty() { vec![PodUid::new(UID)] } else { Vec::new() };
        self.turn(Event::ConfigChange { source: Source::Api, pods, removed })
    }

    /// Returns the effects that were cancelled.
    fn turn(&mut self, event: Event) -> Vec<InFlight> {
        let mut cancelled = Vec::new();
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for effect in self.agent.handle(self.now(), event) {
                match effect {
                    Effect::Do { id, op, .. } if is_inline(&op) => {
                        let Progress::Done(result) = self.world.take(&op, &Progress::Asked, self.now()) else {
                            unreachable!("a routine has one step");
                        };
                        events.push(Event::Done { id, result });
                    }
                    Effect::Do { id, op, .. } => self.started(id, op),
                    Effect::Cancel(id) => cancelled.extend(self.remove(id)),
                    Effect::Recall(id) => {
                        for effect in self.world.effects.iter_mut().filter(|effect| effect.id == id) {
                            effect.is_recalled = true;
                        }
                    }
                    Effect::Record(_) => {}
                }
            }
            let wake_at = self.agent.wake_at(self.now());
            if wake_at <= self.now().uptime {
                self.world.breaks(format!("the agent spins: it asks to be woken at {wake_at:?}"));
            }
        }
        cancelled
    }

    fn started(&mut self, id: EffectId, op: Op) {
        if op.kind() == OpKind::Start && self.world.is_deleted() {
            self.world.breaks(format!("{op} is requested after the pod was deleted"));
        }
        self.world.effects.push(InFlight { id, op, progress: Progress::Asked, is_recalled: false, is_late: false });
    }

    fn remove(&mut self, id: EffectId) -> Option<InFlight> {
        let at = self.world.effects.iter().position(|effect| effect.id == id)?;
        Some(self.world.effects.remove(at))
    }

    pub(super) fn successors(&self) -> Vec<Successor> {
        let mut found = Successors { from: self, list: Vec::new() };
        for effect in &self.world.effects {
            found.of_effect(effect);
        }
        found.of_time();
        found.of_exits();
        found.of_deletion();
        found.of_death();
        found.list
    }

    /// The next time at which the agent wants to act by itself, for the pod and not for the node.
    pub(super) fn next_timer(&self) -> Option<Uptime> {
        let agent = &self.agent;
        let now = self.now();
        let parts = [agent.timers.next_wakeup(), agent.images.next_wakeup(now), agent.api_requests.next_wakeup(now)];
        parts.into_iter().flatten().min()
    }
}

fn agent() -> Agent {
    // Logs and images touch nothing that the model has.
    let logs = LogSettings { max_bytes: None, ..LogSettings::default() };
    let image_gc = ImageGcSettings { high_percent: 100, ..ImageGcSettings::default() };
    let eviction = EvictionSettings { limits_local_storage: false, ..EvictionSettings::default() };
    let settings = Settings { sources: vec![Source::Api], logs, image_gc, eviction, ..Settings::for_node("node") };
    Agent::new(settings, later(0))
}

/// Their results depend on nothing that happens meanwhile.
fn is_inline(op: &Op) -> bool {
    matches!(
        op,
        Op::Node(NodeOp::CheckRuntime | NodeOp::SyncQosCgroups { .. } | NodeOp::ListPodDirs | NodeOp::ListDevices)
    )
}

/// Nothing else can see it take place before its result is delivered: the two are one transition.
fn is_one_step(op: &Op) -> bool {
    match op {
        Op::Volume(_) | Op::Image(_) | Op::Log(_) | Op::Api(_) => true,
        Op::Pod(op) => match op {
            PodOp::SetUpCgroup { .. }
            | PodOp::RemoveCgroup(_)
            | PodOp::MakeDirs { .. }
            | PodOp::RemoveDir(_)
            | PodOp::RemoveLogDir(_) => true,
            PodOp::Inspect { .. } | PodOp::RunSandbox(_) | PodOp::StopSandbox { .. } | PodOp::RemoveSandbox { .. } => {
                false
            }
        },
        Op::Node(_) | Op::Container(_) => false,
    }
}

struct Successors<'a> {
    from: &'a State,
    list: Vec<Successor>,
}

impl Successors<'_> {
    fn add(&mut self, label: &str, kind: Kind, states: Vec<State>) {
        let many = states.len() > 1;
        for (branch, state) in states.into_iter().enumerate() {
            let is_delayed = state.world.left.delays < self.from.world.left.delays;
            let kind = if is_delayed { Kind::Chance } else { kind };
            let label = if many { format!("{label} (outcome {branch})") } else { label.to_owned() };
            self.list.push(Successor { label, kind, state });
        }
    }

    fn of_effect(&mut self, effect: &InFlight) {
        let InFlight { id, op, progress, is_recalled, .. } = effect;
        let has_faults = self.from.world.left.faults > 0;
        if self.from.world.defect == Some(Defect::LooksGetNoResult) && matches!(op, Op::Pod(PodOp::Inspect { .. })) {
            return;
        }
        let error = |message: &str| Err(failed(ErrorKind::Retry, message));
        match progress {
            Progress::Done(result) => {
                self.answer(&format!("{op}: answered"), Kind::Progress, *id, result.clone(), self.from.clone());
                if has_faults && result.is_ok() && op.kind() != OpKind::Look {
                    let label = format!("{op}: done, answered with an error");
                    self.answer(&label, Kind::Chance, *id, error("unlucky"), self.with_fault());
                }
                return;
            }
            Progress::Asked if is_one_step(op) => self.one_step(effect),
            Progress::Asked | Progress::Created => {
                let mut state = self.from.clone();
                let next = state.world.take(op, progress, state.now());
                let step = if matches!(next, Progress::Created) { "creates" } else { "takes place" };
                for effect in state.world.effects.iter_mut().filter(|effect| effect.id == *id) {
                    effect.progress = next.clone();
                }
                self.add(&format!("{op}: {step}"), Kind::Progress, vec![state]);
            }
        }
        if *is_recalled {
            let label = format!("{op}: ends early, recalled");
            self.answer(&label, Kind::Progress, *id, error("pod is terminating"), self.from.clone());
        }
        if has_faults {
            self.answer(&format!("{op}: fails"), Kind::Chance, *id, error("unlucky"), self.with_fault());
        }
    }

    fn one_step(&mut self, effect: &InFlight) {
        let mut state = self.from.clone();
        let Progress::Done(result) = state.world.take(&effect.op, &effect.progress, state.now()) else {
            unreachable!("it has one step");
        };
        if self.from.world.left.faults > 0 && result.is_ok() && effect.op.kind() != OpKind::Look {
            let mut faulty = state.clone();
            faulty.world.left.faults -= 1;
            let label = format!("{}: done, answered with an error", effect.op);
            self.answer(&label, Kind::Chance, effect.id, Err(failed(ErrorKind::Retry, "unlucky")), faulty);
        }
        self.answer(&format!("{}: done", effect.op), Kind::Progress, effect.id, result, state);
    }

    fn answer(&mut self, label: &str, kind: Kind, id: EffectId, result: Answer, mut state: State) {
        state.remove(id);
        self.add(label, kind, state.handle(Event::Done { id, result }));
    }

    fn with_fault(&self) -> State {
        let mut state = self.from.clone();
        state.world.left.faults -= 1;
        state
    }

    fn of_exits(&mut self) {
        if self.from.world.left.exits == 0 {
            return;
        }
        for name in self.from.world.names() {
            if !self.from.world.is_running(name) || self.from.world.exited.contains(name) {
                continue;
            }
            for code in self.from.world.exit_codes(name) {
                let mut state = self.from.clone();
                state.world.left.exits -= 1;
                state.world.exited.insert(name.to_owned());
                state.world.exit(name, *code);
                if state.world.left.faults > 0 {
                    let mut untold = state.clone();
                    untold.world.left.faults -= 1;
                    self.add(&format!("{name} exits with {code}, its event is lost"), Kind::Chance, vec![untold]);
                }
                let told = state.handle(Event::Hint { pod: PodUid::new(UID) });
                self.add(&format!("{name} exits with {code}"), Kind::Chance, told);
            }
        }
    }

    fn of_deletion(&mut self) {
        let world = &self.from.world;
        if world.left.deletions == 0 || world.is_deleted() || world.api.is_none() {
            return;
        }
        let mut state = self.from.clone();
        state.world.left.deletions -= 1;
        state.world.delete(state.at_secs);
        let states = state.concluded(Vec::new());
        self.add("the pod is deleted", Kind::Chance, states);
    }

    fn of_time(&mut self) {
        let from = self.from;
        let timer = from.next_timer();
        if from.world.effects.is_empty() {
            match timer {
                Some(moment) => self.passes("a timer fires", Kind::Progress, moment, from.clone()),
                None => {
                    let moment = from.now().uptime + Duration::from_secs(ROUTINES_SECS);
                    self.passes("the node's routines run", Kind::Audit, moment, from.clone());
                }
            }
            return;
        }
        let Some(overdue) = from.agent.outbox.flights.next_wakeup() else { return };
        if let Some(moment) = timer.filter(|moment| *moment < overdue)
            && from.world.left.delays > 0
        {
            let mut state = from.clone();
            state.world.left.delays -= 1;
            self.passes("a timer fires meanwhile", Kind::Chance, moment, state);
        }
        if from.world.left.faults > 0 {
            self.passes("a result is lost", Kind::Chance, overdue, self.with_fault());
        }
    }

    fn passes(&mut self, label: &str, kind: Kind, until: Uptime, mut state: State) {
        state.at_secs = until.since(later(0).uptime).as_secs();
        let label = format!("{label} after {} s", state.at_secs - self.from.at_secs);
        self.add(&label, kind, state.handle(Event::Due));
    }

    /// The agent dies and starts again. Each effect in flight has taken place or not.
    fn of_death(&mut self) {
        if self.from.world.left.deaths == 0 {
            return;
        }
        let after = self.from.clone().resolved(&self.from.world.effects);
        let states = after.into_iter().map(|state| {
            let mut world = state.world;
            world.effects.clear();
            world.left.deaths -= 1;
            world.deleted_at = world.deleted_at.map(|_| 0);
            State { agent: agent(), at_secs: 0, world }.booted()
        });
        self.add("the agent dies", Kind::Chance, states.collect());
    }
}
