//! The probes of a pod's containers.
//!
//! Owns: when a probe is due, the thresholds, and which instance of a container a result belongs to.
//! Never: probes (`rubelet/src/effects/probe.rs`), stops or restarts what failed (`pod/containers.rs`, `pod/init.rs`).
//! Upstream: `prober/worker.go`, `prober/prober_manager.go`, `prober/results`.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, PodSpec, PodStatus, Probe};
use serde::{Deserialize, Serialize};

use crate::{
    effect::EventRecord,
    fnv::Fnv128,
    id::{ContainerId, PodRef},
    observation::{ContainerState, PodFacts},
    pod::restart_policy::is_sidecar,
    time::{Now, Uptime, scaled},
};

pub mod exec_slots;
pub mod request;
#[cfg(test)]
mod tests;

pub use request::{HttpGet, ProbeAction, ProbeOutcome, ProbeRequest};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ProbeKind {
    Startup,
    Readiness,
    Liveness,
}

impl ProbeKind {
    const ALL: [ProbeKind; 3] = [ProbeKind::Startup, ProbeKind::Readiness, ProbeKind::Liveness];

    /// As events begin with it.
    pub fn as_str(self) -> &'static str {
        match self {
            ProbeKind::Startup => "Startup",
            ProbeKind::Readiness => "Readiness",
            ProbeKind::Liveness => "Liveness",
        }
    }

    pub fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            ProbeKind::Startup => container.startup_probe.as_ref(),
            ProbeKind::Readiness => container.readiness_probe.as_ref(),
            ProbeKind::Liveness => container.liveness_probe.as_ref(),
        }
    }
}

/// The result of a probe after its thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// A container that has neither passed nor failed its startup probe.
    Unknown,
    Passing,
    Failing,
}

/// The probes of one pod, by container instance. A result is kept while the runtime has the instance: a container stopped for
/// it restarts whatever its exit code.
#[derive(Clone, Debug, Default)]
pub struct Probes {
    probers: BTreeMap<(ContainerId, ProbeKind), Prober>,
}

#[derive(Clone, Debug)]
struct Prober {
    container: String,
    period: Duration,
    success_threshold: u32,
    failure_threshold: u32,
    state: ProberState,
    health: Health,
    /// The last outcome, and how often it came in a row.
    run: (Health, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProberState {
    Waiting {
        due: Uptime,
    },
    UnderWay {
        next: Uptime,
    },
    /// The instance is not probed any more: its result is final, or it does not run.
    OnHold,
}

/// What the probes of a pod depend on.
#[derive(Clone, Copy, Debug)]
pub struct Probed<'a> {
    pub id: &'a PodRef,
    pub spec: &'a PodSpec,
    pub facts: &'a PodFacts,
    /// The status made from these facts: the results known before the agent started, and the pod's address.
    pub status: &'a PodStatus,
    pub stage: ProbedStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbedStage {
    Running,
    /// Nothing is restarted any more, so only readiness probes run.
    Ending,
}

/// A probe that is due.
#[derive(Clone, Debug, PartialEq)]
pub struct Due<'a> {
    pub container: &'a Container,
    pub id: ContainerId,
    pub kind: ProbeKind,
}

/// What the agent has to do for the probes of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProbeSteps {
    /// In flight and obsolete.
    pub cancelled: Vec<(ContainerId, ProbeKind)>,
    pub requests: Vec<ProbeRequest>,
    pub events: Vec<EventRecord>,
    /// An exec probe is due, and was not among the slots.
    pub waits_for_slot: bool,
}

/// The effect of a probe outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeDone {
    pub event: Option<EventRecord>,
    /// The result, if the outcome changed it.
    pub changed: Option<Health>,
}

impl Probes {
    /// The probes to send and to cancel now, with no more exec probes than there are slots.
    pub fn plan(&mut self, pod: &Probed<'_>, mut exec_slots: usize, now: Now) -> ProbeSteps {
        let mut steps = ProbeSteps { cancelled: self.observe(pod, now), ..ProbeSteps::default() };
        for due in self.due(pod, now) {
            match ProbeRequest::of(pod, &due) {
                Some(Ok(request)) if request.is_exec() && exec_slots == 0 => steps.waits_for_slot = true,
                Some(Ok(request)) => {
                    exec_slots -= usize::from(request.is_exec());
                    self.sent(&due.id, due.kind, now);
                    steps.requests.push(request);
                }
                Some(Err(outcome)) => {
                    self.skipped(&due.id, due.kind, now);
                    steps.events.extend(outcome.event(pod.id, &due.container.name, due.kind));
                }
                // The pod's address is not known yet; the look that finds it leads here again.
                None => {}
            }
        }
        steps
    }

    /// Applies the running containers: new instances get probers, stopped ones lose theirs. Returns the probes in flight that
    /// are obsolete.
    fn observe(&mut self, pod: &Probed<'_>, now: Now) -> Vec<(ContainerId, ProbeKind)> {
        let targets = targets(pod);
        for target in &targets {
            let key = (target.id.clone(), target.kind);
            self.probers.entry(key).or_insert_with(|| Prober::new(target, now));
        }
        self.probers.retain(|(id, _), prober| {
            prober.is_under_way() || pod.facts.containers.iter().any(|container| container.id == *id)
        });
        let mut lost = Vec::new();
        for ((id, kind), prober) in &mut self.probers {
            if targets.iter().any(|target| target.id == id && target.kind == *kind) {
                continue;
            }
            if prober.is_under_way() {
                lost.push((id.clone(), *kind));
            }
            prober.state = ProberState::OnHold;
        }
        lost
    }

    /// The probes to send now, those first that have waited longest. Those of a container that has not started wait for its startup probe.
    fn due<'a>(&self, pod: &Probed<'a>, now: Now) -> Vec<Due<'a>> {
        let due_at = |target: &ProbeTarget<'a>| match self.probers.get(&(target.id.clone(), target.kind))?.state {
            ProberState::Waiting { due } => Some(due).filter(|due| *due <= now.uptime),
            ProberState::UnderWay { .. } | ProberState::OnHold => None,
        };
        let may_run = |target: &ProbeTarget<'a>| {
            target.kind == ProbeKind::Startup || self.has_started(target.container, target.id)
        };
        let due = targets(pod).into_iter().filter(may_run).filter_map(|target| Some((due_at(&target)?, target)));
        let mut due: Vec<_> = due.collect();
        due.sort_by_key(|(due_at, _)| *due_at);
        due.into_iter().map(|(_, it)| Due { container: it.container, id: it.id.clone(), kind: it.kind }).collect()
    }

    /// The probe is in flight; the next one follows a period after this one began.
    fn sent(&mut self, container: &ContainerId, kind: ProbeKind, now: Now) {
        if let Some(prober) = self.probers.get_mut(&(container.clone(), kind)) {
            let next = now.uptime + prober.period;
            prober.state = ProberState::UnderWay { next };
        }
    }

    /// The probe's definition is invalid; it is checked again when the next one is due.
    fn skipped(&mut self, container: &ContainerId, kind: ProbeKind, now: Now) {
        if let Some(prober) = self.probers.get_mut(&(container.clone(), kind)) {
            prober.state = ProberState::Waiting { due: now.uptime + prober.period };
        }
    }

    /// `None`: this probe is not in flight. An unknown outcome does not count.
    pub fn done(
        &mut self,
        pod: &PodRef,
        id: &ContainerId,
        kind: ProbeKind,
        outcome: &ProbeOutcome,
    ) -> Option<ProbeDone> {
        let prober = self.probers.get_mut(&(id.clone(), kind))?;
        let ProberState::UnderWay { next } = prober.state else { return None };
        prober.state = ProberState::Waiting { due: next };
        let changed = match outcome {
            ProbeOutcome::Success | ProbeOutcome::Warning(_) => prober.take(Health::Passing, kind),
            ProbeOutcome::Failure(_) => prober.take(Health::Failing, kind),
            ProbeOutcome::Discarded(_) | ProbeOutcome::Unknown(_) => None,
        };
        Some(ProbeDone { event: outcome.event(pod, &prober.container, kind), changed })
    }

    /// When the next probe is due. One blocked by a startup probe does not count: the result of that probe is an event.
    pub fn next_wakeup(&self, now: Now) -> Option<Uptime> {
        let moments = self.probers.values().filter_map(|prober| match prober.state {
            ProberState::Waiting { due } => Some(due),
            ProberState::UnderWay { .. } | ProberState::OnHold => None,
        });
        moments.filter(|moment| *moment > now.uptime).min()
    }

    /// The instance has passed its startup probe, or has none.
    pub fn has_started(&self, container: &Container, id: &ContainerId) -> bool {
        container.startup_probe.is_none() || self.health(id, ProbeKind::Startup) == Some(Health::Passing)
    }

    /// The probe whose failure requires this instance to be stopped.
    pub fn failure(&self, id: &ContainerId) -> Option<ProbeKind> {
        let fatal = [ProbeKind::Liveness, ProbeKind::Startup];
        fatal.into_iter().find(|kind| self.health(id, *kind) == Some(Health::Failing))
    }

    fn health(&self, id: &ContainerId, kind: ProbeKind) -> Option<Health> {
        self.probers.get(&(id.clone(), kind)).map(|prober| prober.health)
    }
}

impl Prober {
    fn new(target: &ProbeTarget<'_>, now: Now) -> Self {
        let count = |value: Option<i32>, default: u32| {
            value.and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0).unwrap_or(default)
        };
        let Probe { period_seconds, success_threshold, failure_threshold, .. } = target.probe;
        let period = Duration::from_secs(count(*period_seconds, 10).into());
        let health = target.known_health();
        let is_judged = target.kind == ProbeKind::Startup && health == Health::Passing;
        let due = target.first_due(health, period, now);
        Prober {
            container: target.container.name.clone(),
            period,
            success_threshold: count(*success_threshold, 1),
            failure_threshold: count(*failure_threshold, 3),
            state: if is_judged { ProberState::OnHold } else { ProberState::Waiting { due } },
            health,
            run: (Health::Unknown, 0),
        }
    }

    fn is_under_way(&self) -> bool {
        matches!(self.state, ProberState::UnderWay { .. })
    }

    /// Returns the result if it changed. A result that restarts the container, or that starts it, is final.
    fn take(&mut self, outcome: Health, kind: ProbeKind) -> Option<Health> {
        let count = if self.run.0 == outcome { self.run.1.saturating_add(1) } else { 1 };
        self.run = (outcome, count);
        let threshold = if outcome == Health::Failing { self.failure_threshold } else { self.success_threshold };
        if count < threshold {
            return None;
        }
        let is_last = match kind {
            ProbeKind::Startup => true,
            ProbeKind::Liveness => outcome == Health::Failing,
            ProbeKind::Readiness => false,
        };
        if is_last {
            self.state = ProberState::OnHold;
        }
        let has_changed = self.health != outcome;
        self.health = outcome;
        has_changed.then_some(outcome)
    }
}

/// One probe of one running container.
struct ProbeTarget<'a> {
    container: &'a Container,
    probe: &'a Probe,
    kind: ProbeKind,
    id: &'a ContainerId,
    started_at: Timestamp,
    /// The status of this instance.
    known: Option<&'a ContainerStatus>,
}

impl ProbeTarget<'_> {
    /// Before the first result: a container is alive, not ready and not started, unless its status shows otherwise.
    fn known_health(&self) -> Health {
        let is_true = |of: fn(&ContainerStatus) -> bool| self.known.is_some_and(of);
        match self.kind {
            ProbeKind::Liveness => Health::Passing,
            ProbeKind::Readiness if is_true(|status| status.ready) => Health::Passing,
            ProbeKind::Readiness => Health::Failing,
            ProbeKind::Startup if is_true(|status| status.started == Some(true)) => Health::Passing,
            ProbeKind::Startup => Health::Unknown,
        }
    }

    /// After the initial delay. Of containers already running at start, those with a known result are spread over a period, by
    /// container ID.
    fn first_due(&self, health: Health, period: Duration, now: Now) -> Uptime {
        let delay = self.probe.initial_delay_seconds.and_then(|secs| u64::try_from(secs).ok()).unwrap_or(0);
        let age = now.wall_since(self.started_at);
        let due = now.uptime + Duration::from_secs(delay).saturating_sub(age);
        let ran_before_the_agent = age > now.uptime.as_duration();
        if ran_before_the_agent && health == Health::Passing { due + jitter(self.id, self.kind, period) } else { due }
    }
}

/// Always the same for one container and probe.
fn jitter(id: &ContainerId, kind: ProbeKind, period: Duration) -> Duration {
    let digits = Fnv128::of(format!("{id}{}", kind.as_str()).as_bytes()).hex();
    let sixteenth = digits.bytes().last().map_or(0, |digit| char::from(digit).to_digit(16).unwrap_or(0));
    scaled(period, f64::from(sixteenth) / 16.0)
}

/// The probes to run for the visible running containers.
fn targets<'a>(pod: &Probed<'a>) -> Vec<ProbeTarget<'a>> {
    let sidecars = pod.spec.init_containers.iter().flatten().filter(|init| is_sidecar(init));
    let containers = pod.spec.containers.iter().chain(sidecars);
    let mut targets: Vec<ProbeTarget<'a>> = Vec::new();
    for container in containers {
        let Some(newest) = pod.facts.newest_container(&container.name) else { continue };
        let ContainerState::Running { started_at } = newest.state else { continue };
        for kind in ProbeKind::ALL {
            let is_of_interest = pod.stage == ProbedStage::Running || kind == ProbeKind::Readiness;
            let Some(probe) = kind.of(container).filter(|_| is_of_interest) else { continue };
            // Of two containers with one name, which no API server accepts, the first counts.
            if targets.iter().any(|target| *target.id == newest.id && target.kind == kind) {
                continue;
            }
            let known = status_of(pod.status, &newest.id);
            targets.push(ProbeTarget { container, probe, kind, id: &newest.id, started_at, known });
        }
    }
    targets
}

/// The status of this instance, while it runs.
fn status_of<'a>(status: &'a PodStatus, id: &ContainerId) -> Option<&'a ContainerStatus> {
    let lists = [&status.container_statuses, &status.init_container_statuses];
    lists.into_iter().flatten().flatten().find(|container| {
        let known = container.container_id.as_deref().and_then(|known| known.split_once("://"));
        known.is_some_and(|(_, known)| known == id.as_str())
            && container.state.as_ref().is_some_and(|state| state.running.is_some())
    })
}
