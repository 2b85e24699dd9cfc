//! Churn: pods come and go on one node for a long virtual time.
//!
//! Owns: the plot, and the figures after each round. A round ends when all its pods are gone: then neither the agent nor the
//! fakes may hold more than after the first one. The histories that the rules keep are pruned, so that the memory of the
//! process is the agent's.

use std::{
    collections::{BTreeSet, VecDeque},
    fmt, fs,
    path::Path,
    time::{Duration, Instant},
};

use crate::{
    play::{Failure, Play, Within, minutes},
    runtime::store::Pull,
    simulation::SimState,
    swarm::{IMAGES, scripts},
};

/// The longest back-off and the slowest end of a pod.
const SETTLE: Duration = Duration::from_secs(25 * 60);
/// How long a pod lives; about sixty at once at 200 per minute.
const LIFE: Duration = Duration::from_secs(18);
/// Trace lines that are kept.
const TRACE_LINES: usize = 2_000;
/// Numbers in the agent's state get longer, and maps have room to spare.
const TOLERANCE: f64 = 1.05;

#[derive(Clone, Copy, Debug)]
pub struct Churn {
    pub seed: u64,
    pub rounds: u32,
    /// Of each round.
    pub minutes: u64,
    pub per_minute: u32,
}

/// What there is when all pods of a round are gone, and what the round cost.
#[derive(Clone, Debug)]
pub struct Figures {
    pub round: u32,
    /// Virtual time since the beginning.
    pub played: Duration,
    pub pods: u32,
    /// Bytes of the agent's whole state as text: a map that grows shows whatever it is called.
    pub agent_bytes: usize,
    pub files: usize,
    pub cgroups: usize,
    pub containers: usize,
    pub images: usize,
    pub turns: u64,
    /// Real time of the round.
    pub real: Duration,
    pub resident_kib: u64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per_turn = self.real.as_micros() / u128::from(self.turns.max(1));
        let Figures { round, pods, agent_bytes, files, cgroups, containers, images, turns, .. } = self;
        write!(
            f,
            "round {round}: {:.1} h, {pods} pods, {turns} turns of {per_turn} µs with all around them, {:.0} s; agent \
             {agent_bytes} bytes, process {} MiB, {files} files, {cgroups} cgroups, {containers} containers, {images} images",
            self.played.as_secs_f64() / 3600.0,
            self.real.as_secs_f64(),
            self.resident_kib / 1024,
        )
    }
}

impl Churn {
    /// Plays all rounds; `report` gets the figures of each.
    pub fn play(self, mut report: impl FnMut(&Figures)) -> Result<Vec<Figures>, Box<Failure>> {
        let mut play = Play::before_start(self.seed);
        let mut rng = play.fork_rng();
        play.in_cluster().publish(IMAGES[0], Pull::After(Duration::from_millis(500)));
        play.publish(IMAGES[1], Pull::After(Duration::from_secs(20))).publish(IMAGES[2], Pull::After(Duration::ZERO));
        play.change(|sim| {
            sim.trace.keep(TRACE_LINES);
            sim.runtime.has_events = true;
        });
        play.start_agent();
        let pause = minutes(1) / self.per_minute;
        let alive_at_once = (LIFE.as_millis() / pause.as_millis().max(1)) as usize;
        let mut rounds: Vec<Figures> = Vec::new();
        let mut pods = 0;
        for round in 1..=self.rounds {
            let (began, turns) = (real_time(), play.look(|sim| sim.turns_in_all));
            let mut alive = VecDeque::new();
            for _ in 0..u64::from(self.per_minute) * self.minutes {
                pods += 1;
                let name = format!("pod{pods}");
                play.create(scripts::script(&mut rng, &name, 1));
                alive.push_back(name);
                if alive.len() > alive_at_once
                    && let Some(oldest) = alive.pop_front()
                {
                    play.delete(&oldest, Within::Secs(1));
                }
                play.run_for(pause)?;
                if pods % self.per_minute == 0 {
                    play.change(prune);
                }
            }
            for name in alive {
                play.delete(&name, Within::Secs(1));
            }
            play.try_settle(SETTLE)?;
            let figures = Figures::read(&mut play, (round, pods), (began.elapsed(), turns))?;
            report(&figures);
            rounds.push(figures);
        }
        match growth(&rounds) {
            None => Ok(rounds),
            Some(detail) => Err(Box::new(play.failure("nothing grows with the pods that were here", &detail))),
        }
    }
}

impl Figures {
    fn read(play: &mut Play, (round, pods): (u32, u32), (real, turns): (Duration, u64)) -> Result<Self, Box<Failure>> {
        play.change(|sim| {
            prune(sim);
            sim.agent_bytes = None;
        });
        // The next turn fills it in; some turn comes at least every ten seconds.
        play.run_for(minutes(1))?;
        Ok(play.look(|sim| Figures {
            round,
            played: sim.now,
            pods,
            agent_bytes: sim.agent_bytes.unwrap_or_default(),
            files: sim.disk.leftovers(Path::new("/")).len(),
            cgroups: sim.cgroups.len(),
            containers: sim.runtime.picture.containers.len() + sim.runtime.picture.sandboxes.len(),
            images: sim.runtime.images.len(),
            turns: sim.turns_in_all - turns,
            real,
            resident_kib: resident_kib(),
        }))
    }
}

/// What the last round has more of than the first.
fn growth(rounds: &[Figures]) -> Option<String> {
    let (first, last) = (rounds.first()?, rounds.last()?);
    let pairs = [
        ("bytes of the agent", first.agent_bytes, last.agent_bytes),
        ("files", first.files, last.files),
        ("cgroups", first.cgroups, last.cgroups),
        ("containers and sandboxes", first.containers, last.containers),
        // As many as fit under the threshold.
        ("images", first.images.max(4), last.images),
    ];
    let grown = |(_, first, last): &(&str, usize, usize)| *last as f64 > *first as f64 * TOLERANCE;
    let (what, first, last) = pairs.into_iter().find(grown)?;
    Some(format!("{first} {what} after the first round, {last} after the last"))
}

/// Forgets what the rules and the API server keep of pods that are gone.
fn prune(sim: &mut SimState) {
    let in_api: BTreeSet<String> =
        sim.api.of("pods").filter_map(|(_, pod)| pod["metadata"]["uid"].as_str()).map(str::to_owned).collect();
    let containers = sim.runtime.picture.containers.values().map(|it| it.pod.uid.clone());
    let sandboxes = sim.runtime.picture.sandboxes.values().map(|it| it.identity().uid);
    let known = sim.snapshot.pods.keys().map(|uid| uid.as_str().to_owned());
    let kept: BTreeSet<String> = in_api.into_iter().chain(containers).chain(sandboxes).chain(known).collect();
    sim.rules.forget_all_but(&kept, &sim.runtime.picture);
    sim.api.expire_events();
}

#[expect(clippy::disallowed_methods, reason = "how long the simulator itself takes decides nothing")]
fn real_time() -> Instant {
    Instant::now()
}

/// Of this process; zero where there is no `/proc`.
fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(agent_bytes: usize) -> Figures {
        Figures {
            round: 1,
            played: Duration::ZERO,
            pods: 1,
            agent_bytes,
            files: 10,
            cgroups: 3,
            containers: 0,
            images: 2,
            turns: 1,
            real: Duration::ZERO,
            resident_kib: 0,
        }
    }

    #[test]
    fn growth_is_found_beyond_the_tolerance() {
        assert_eq!(growth(&[figures(1000), figures(9000), figures(1040)]), None);
        let grown = growth(&[figures(1000), figures(1100)]);
        assert_eq!(grown.as_deref(), Some("1000 bytes of the agent after the first round, 1100 after the last"));
    }
}
