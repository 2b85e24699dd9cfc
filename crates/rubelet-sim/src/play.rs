//! Plays: simulated runs written as chains of calls.
//!
//! Owns: the main loop, which advances virtual time, cleans up a dead agent and stops at the first broken rule.
//! A play panics with its seed, the rule and the last lines of the trace.

pub(crate) mod agreement;
mod cluster;
pub(crate) mod ending;
mod memory;
pub(crate) mod predicates;
mod shutdown;
pub(crate) mod storage;

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fastrand::Rng;
use jiff::SignedDuration;
use rubelet::start::Running;
use rubelet_core::{
    event::Source,
    snapshot::{PodView, StepState},
};
use rubelet_host::port::FetchResponse;
use tokio::{task::JoinHandle, time::Instant};

use crate::{
    agent,
    faults::FaultRates,
    invariants::Violation,
    play::predicates::Predicate,
    runtime::store::{Ailment, Container, Pull},
    script::PodScript,
    simulation::{AgentState, Incarnation, ScheduledEvent, SimState, Simulation},
};

pub(crate) use self::cluster::Within;

pub(crate) const MANIFESTS: &str = "/etc/kubernetes/manifests";
/// The URL of the manifest URL source.
pub(crate) const MANIFEST_URL: &str = "http://manifests.test/pods";

/// Lines of the trace that a failure shows.
const TAIL: usize = 60;
/// `until` gives up after this.
const PATIENCE: Duration = Duration::from_secs(20 * 60);

pub(crate) fn minutes(count: u64) -> Duration {
    Duration::from_secs(count * 60)
}

pub(crate) fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// A run that broke a rule, with all that is needed to reproduce it.
#[derive(Clone, Debug)]
pub struct Failure {
    pub seed: u64,
    pub rule: String,
    pub detail: String,
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, rule, detail, trace } = self;
        let tail = trace[trace.len().saturating_sub(TAIL)..].join("\n");
        write!(f, "{tail}\n\nseed {seed} breaks the rule: {rule}\n  {detail}")
    }
}

#[derive(Debug)]
pub(crate) struct Play {
    // Declared before the runtime that runs it.
    agent: Option<Running>,
    simulation: Arc<Simulation>,
    scheduled: JoinHandle<()>,
    seed: u64,
    incarnations: u32,
    sources: Vec<Source>,
    revival: Revival,
    /// The current manifests, by pod name.
    wanted: BTreeMap<String, PodScript>,
    tokio: tokio::runtime::Runtime,
}

/// What follows an unplanned death of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Revival {
    /// It is restarted, as by systemd.
    BySupervisor { at: Option<Instant> },
    /// It stays down until the play starts it.
    ByPlay,
}

impl Play {
    /// An empty node with a running agent, without faults unless the play adds them.
    pub(crate) fn seeded(seed: u64) -> Self {
        let mut play = Self::before_start(seed);
        play.start_agent();
        play
    }

    /// The same, with the agent not started yet.
    pub(crate) fn before_start(seed: u64) -> Self {
        let tokio = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime without I/O needs nothing that could be missing");
        let _entered = tokio.enter();
        let simulation = Simulation::new(seed);
        let scheduled = tokio.spawn(simulation.clone().run_scheduled_events());
        simulation.with(|sim| {
            for dir in [MANIFESTS, "/var/lib/kubelet", "/var/log/pods", "/var/log/containers"] {
                sim.disk.make_dir(&PathBuf::from(dir), 0o755).expect("an empty disk takes directories");
            }
            let resolv = b"nameserver 10.0.0.1\n";
            sim.disk.make_dir(&PathBuf::from("/etc"), 0o755).expect("an empty disk takes directories");
            for (path, text) in [("/etc/resolv.conf", &resolv[..]), ("/etc/hosts", b"127.0.0.1 localhost\n")] {
                sim.disk.write_file(&PathBuf::from(path), text, 0o644).expect("an empty disk has room");
            }
        });
        drop(_entered);
        Play {
            agent: None,
            simulation,
            scheduled,
            seed,
            incarnations: 0,
            sources: vec![Source::File],
            revival: Revival::ByPlay,
            wanted: BTreeMap::new(),
            tokio,
        }
    }

    /// A separate generator for the plot, so that events of the simulation do not change it.
    pub(crate) fn fork_rng(&mut self) -> Rng {
        let _entered = self.tokio.enter();
        self.simulation.with(|sim| sim.rng.fork())
    }

    pub(crate) fn trace(&self) -> Vec<String> {
        self.simulation.look(|sim| sim.trace.lines().to_vec())
    }

    pub(crate) fn look<T>(&self, view: impl FnOnce(&SimState) -> T) -> T {
        self.simulation.look(view)
    }

    /// Changes the simulated state directly: for what has no method.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut SimState)) -> &mut Self {
        let _entered = self.tokio.enter();
        self.simulation.with(change);
        drop(_entered);
        self
    }

    pub(crate) fn wanted(&self) -> &BTreeMap<String, PodScript> {
        &self.wanted
    }

    // --- manifests

    /// Writes or replaces a manifest. A name alone is a default pod.
    pub(crate) fn apply(&mut self, script: impl Into<PodScript>) -> &mut Self {
        let script = script.into();
        let text = script.manifest().to_string();
        self.wanted.insert(script.name.clone(), script.clone());
        self.change(|sim| {
            sim.rules.learn(&script);
            sim.log("play", format!("apply {} v{}", script.name, script.version));
            sim.write_as_user(&manifest_path(&script.name), text.as_bytes());
        })
    }

    pub(crate) fn remove(&mut self, name: &str) -> &mut Self {
        self.wanted.remove(name);
        self.change(|sim| {
            sim.log("play", format!("remove {name}"));
            sim.disk.remove_file(&manifest_path(name)).expect("a manifest is a file");
        })
    }

    /// A file that is not, or not yet, a valid manifest.
    pub(crate) fn write_manifest(&mut self, file: &str, text: &[u8]) -> &mut Self {
        self.change(|sim| {
            sim.log("play", format!("write {file}"));
            sim.write_as_user(&PathBuf::from(MANIFESTS).join(file), text);
        })
    }

    /// Adds the URL source. Must be called before the agent starts.
    pub(crate) fn with_url_source(&mut self) -> &mut Self {
        self.sources.push(Source::Http);
        self
    }

    /// The pod is no longer desired, by a change the play made itself.
    pub(crate) fn forget(&mut self, name: &str) -> &mut Self {
        self.wanted.remove(name);
        self
    }

    /// The response of the manifest URL from now on: pods, or nothing at all.
    pub(crate) fn serve(&mut self, scripts: &[PodScript]) -> &mut Self {
        let items: Vec<_> = scripts.iter().map(PodScript::manifest).collect();
        let list = serde_json::json!({ "apiVersion": "v1", "kind": "PodList", "items": items });
        let news: Vec<&PodScript> =
            scripts.iter().filter(|script| self.wanted.get(&script.name) != Some(*script)).collect();
        for script in &news {
            self.wanted.insert(script.name.clone(), (*script).clone());
        }
        self.change(|sim| {
            news.iter().for_each(|script| sim.rules.learn(script));
            sim.log("play", format!("the URL serves {} pods", scripts.len()));
            sim.pages
                .insert(MANIFEST_URL.to_owned(), FetchResponse { status: 200, body: list.to_string().into_bytes() });
        })
    }

    // --- the agent

    pub(crate) fn start_agent(&mut self) -> &mut Self {
        assert!(self.agent.is_none(), "the agent runs already");
        if let Revival::BySupervisor { at } = &mut self.revival {
            *at = None;
        }
        self.incarnations += 1;
        let incarnation = Incarnation(self.incarnations);
        let _entered = self.tokio.enter();
        self.simulation.with(|sim| {
            sim.agent = AgentState::Alive(incarnation);
            sim.devices.agent_begins();
            sim.disk.forget_write_watches();
            sim.rules.agent_begins(sim.now);
            sim.log("play", format!("the agent starts, incarnation {}", incarnation.0));
        });
        let agent = agent::launch(&self.simulation, incarnation, &self.sources);
        drop(_entered);
        self.agent = Some(agent);
        self.announce_shutdown();
        self
    }

    /// `kill -9`.
    pub(crate) fn crash_agent(&mut self) -> &mut Self {
        self.change(|sim| {
            if let AgentState::Alive(incarnation) = sim.agent {
                sim.log("play", "kill -9");
                sim.agent = AgentState::Dying(incarnation);
            }
        });
        self.bury_agent();
        self
    }

    /// A dead agent is restarted some seconds later.
    pub(crate) fn supervised(&mut self) -> &mut Self {
        self.revival = Revival::BySupervisor { at: None };
        self
    }

    // --- the runtime, the disk, the clock

    pub(crate) fn runtime_down(&mut self) -> &mut Self {
        self.change(SimState::take_runtime_down)
    }

    pub(crate) fn runtime_up(&mut self) -> &mut Self {
        self.change(SimState::bring_runtime_up)
    }

    pub(crate) fn runtime_down_for(&mut self, time: Duration) -> &mut Self {
        self.change(|sim| {
            sim.take_runtime_down();
            sim.schedule_in(time, ScheduledEvent::RuntimeReturns);
        })
    }

    /// The runtime has this condition for a while.
    pub(crate) fn runtime_ails_for(&mut self, ailment: Ailment, time: Duration) -> &mut Self {
        self.change(|sim| {
            sim.ail(ailment);
            sim.schedule_in(time, ScheduledEvent::Heals(ailment));
        })
    }

    /// Power is lost and comes back; the agent is restarted.
    pub(crate) fn reboot(&mut self) -> &mut Self {
        self.crash_agent().change(|sim| {
            sim.rules.shutdown_ends();
            sim.reboot();
        })
    }

    pub(crate) fn disk_full_for(&mut self, time: Duration) -> &mut Self {
        self.change(|sim| {
            sim.log("play", "the disk is full");
            sim.disk.full = true;
            sim.schedule_in(time, ScheduledEvent::DiskHasRoom);
        })
    }

    /// The device mounted there does not answer for a while.
    pub(crate) fn hang_device_for(&mut self, point: &str, time: Duration) -> &mut Self {
        self.change(|sim| {
            sim.hang_device(Path::new(point));
            sim.schedule_in(time, ScheduledEvent::DeviceReturns(PathBuf::from(point)));
        })
    }

    /// The registry has the image from now on, and serves it as `pull` says.
    pub(crate) fn publish(&mut self, image: &str, pull: Pull) -> &mut Self {
        self.change(|sim| {
            sim.log("play", format!("the registry has {image}"));
            sim.runtime.registry.insert(image.to_owned(), pull);
        })
    }

    pub(crate) fn storm(&mut self, rates: FaultRates) -> &mut Self {
        self.change(|sim| sim.faults.storm = Some(rates))
    }

    pub(crate) fn calm(&mut self) -> &mut Self {
        self.change(|sim| sim.faults.storm = None)
    }

    pub(crate) fn jump_wall_clock(&mut self, by: SignedDuration) -> &mut Self {
        let _entered = self.tokio.enter();
        self.simulation.jump_wall_clock(by);
        drop(_entered);
        self
    }

    /// Ends a container's process, if it runs.
    pub(crate) fn exit_container(&mut self, pod: &str, container: &str, code: i32) -> &mut Self {
        self.change(|sim| {
            let is_meant = |it: &Container| predicates::is_called(&it.pod.name, pod) && it.name_in_pod() == container;
            let found = sim.runtime.running().find(|it| is_meant(it));
            if let Some(id) = found.map(|found| found.id.clone()) {
                sim.exit_container(&id, code, "Error");
            }
        })
    }

    // --- time

    /// Advances time until the predicate holds.
    #[track_caller]
    pub(crate) fn until(&mut self, predicate: &Predicate) -> &mut Self {
        match self.run_until(PATIENCE, predicate) {
            Ok(true) => self,
            Ok(false) => panic!("{}", self.failure("until", &format!("{} never came", predicate.name))),
            Err(failure) => panic!("{failure}"),
        }
    }

    #[track_caller]
    pub(crate) fn wait(&mut self, time: Duration) -> &mut Self {
        match self.run_for(time) {
            Ok(()) => self,
            Err(failure) => panic!("{failure}"),
        }
    }

    pub(crate) fn run_for(&mut self, time: Duration) -> Result<(), Box<Failure>> {
        self.run_until(time, &Predicate::new("never", |_| false)).map(drop)
    }

    /// Whether the predicate held within `limit`.
    pub(crate) fn run_until(&mut self, limit: Duration, predicate: &Predicate) -> Result<bool, Box<Failure>> {
        let simulation = self.simulation.clone();
        let deadline = {
            let _entered = self.tokio.enter();
            Instant::now() + limit
        };
        loop {
            self.attend()?;
            if simulation.look(|sim| predicate.holds(sim)) {
                return Ok(true);
            }
            let revival = match self.revival {
                Revival::BySupervisor { at } => at,
                Revival::ByPlay => None,
            };
            let wake = revival.map_or(deadline, |at| at.min(deadline));
            let late = self.tokio.block_on(async {
                tokio::select! {
                    // Cancel safe: both only trigger another check.
                    biased;
                    () = simulation.changed.notified() => false,
                    () = tokio::time::sleep_until(wake) => wake == deadline,
                }
            });
            if late {
                self.attend()?;
                return Ok(simulation.look(|sim| predicate.holds(sim)));
            }
        }
    }

    /// Between two steps: checks the rules, cleans up a dead agent, restarts it.
    fn attend(&mut self) -> Result<(), Box<Failure>> {
        if let Some(Violation { rule, at, detail }) = self.look(|sim| sim.rules.violations.first().cloned()) {
            return Err(Box::new(self.failure(rule, &format!("at {at:?}: {detail}"))));
        }
        if self.look(|sim| matches!(sim.agent, AgentState::Dying(_))) {
            self.bury_agent();
        }
        if self.agent.as_mut().is_some_and(Running::has_ended) {
            return Err(Box::new(self.failure("the agent never ends by itself", "its task is over")));
        }
        self.revive_agent();
        Ok(())
    }

    fn revive_agent(&mut self) {
        let Revival::BySupervisor { at } = self.revival else { return };
        if self.agent.is_some() {
            return;
        }
        let now = {
            let _entered = self.tokio.enter();
            Instant::now()
        };
        let at = match at {
            Some(at) => at,
            None => now + self.simulation.with(|sim| Duration::from_millis(sim.rng.u64(10..20_000))),
        };
        self.revival = Revival::BySupervisor { at: Some(at) };
        if at <= now {
            self.start_agent();
        }
    }

    /// Aborts the tasks of a dead agent; none of them has any effect any more.
    fn bury_agent(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.tokio.block_on(agent.kill());
        }
        self.change(|sim| {
            if let AgentState::Alive(incarnation) | AgentState::Dying(incarnation) = sim.agent {
                sim.agent = AgentState::Dead(incarnation);
            }
            sim.snapshot = Arc::default();
            sim.stale_entries.clear();
        });
    }

    pub(crate) fn failure(&self, rule: &str, detail: &str) -> Failure {
        let detail = self.look(|sim| format!("{detail}\n{}", agents_words(sim)));
        Failure { seed: self.seed, rule: rule.to_owned(), detail, trace: self.trace() }
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        self.scheduled.abort();
    }
}

/// The agent's explanation of each pod.
fn agents_words(sim: &SimState) -> String {
    let about = |view: &PodView| {
        let name = view.pod.metadata.name.as_deref().unwrap_or_default();
        let undone = view.steps.iter().filter(|step| step.state != StepState::Done);
        let undone: Vec<String> =
            undone.map(|step| format!("{} {:?}: {}", step.name, step.state, step.detail)).collect();
        format!("  the agent says: {name} {} wanted by {:?}; {}", view.lifecycle, view.source, undone.join("; "))
    };
    sim.snapshot.pods.values().map(|view| about(view)).collect::<Vec<_>>().join("\n")
}

fn manifest_path(name: &str) -> PathBuf {
    PathBuf::from(MANIFESTS).join(format!("{name}.yaml"))
}

impl SimState {
    /// Only the agent's disk is full; the play can still write manifests.
    fn write_as_user(&mut self, path: &Path, text: &[u8]) {
        let full = std::mem::take(&mut self.disk.full);
        self.disk.write_file(path, text, 0o644).expect("the manifest directory is there");
        self.disk.full = full;
    }
}
