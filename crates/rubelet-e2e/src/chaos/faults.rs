//! The faults: what each does to the node, and what it may cost.
//!
//! Owns: the list, and faults of processes. Pods that a fault is about are its own; all others must not be affected.

mod callers;
mod floods;
mod mixed;
mod network;
mod storage;

use std::{fmt, fs, time::Duration};

use anyhow::Context as _;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

use super::exam::Exam;

pub struct Fault {
    pub name: &'static str,
    pub starts: StartTimes,
    /// The highest age of the node's lease.
    pub lease_secs: f64,
    pub begin: fn(&mut Exam) -> anyhow::Result<Box<dyn Injected>>,
}

/// What a fault may do to the start of pods that have nothing to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartTimes {
    Usual,
    /// The fault stops a part that every start needs.
    Delayed,
}

/// A fault on its way. What it holds, it also releases when it is dropped.
pub trait Injected: fmt::Debug {
    /// The fault begins; what it needs is prepared.
    fn strike(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        Ok(())
    }

    /// Called often while the fault lasts.
    fn tick(&mut self, _exam: &mut Exam, _since: Duration, _hold: Duration) -> anyhow::Result<()> {
        Ok(())
    }

    /// The fault is over.
    fn end(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        Ok(())
    }

    /// After the recovery: removes what the fault created.
    fn clean_up(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        Ok(())
    }

    /// For the last column.
    fn note(&self) -> String {
        String::new()
    }
}

/// A renewal every ten seconds, and half of that for a bad moment.
const RENEWED: f64 = 15.0;
/// The lease's duration: the control plane may count the node as lost after that.
const NOT_LOST: f64 = 40.0;

type Begin = fn(&mut Exam) -> anyhow::Result<Box<dyn Injected>>;

const fn unaffected(name: &'static str, begin: Begin) -> Fault {
    Fault { name, starts: StartTimes::Usual, lease_secs: RENEWED, begin }
}

const fn delaying(name: &'static str, lease_secs: f64, begin: Begin) -> Fault {
    Fault { name, starts: StartTimes::Delayed, lease_secs, begin }
}

pub const ALL: &[Fault] = &[
    unaffected("hung-mount", storage::hung_mount),
    unaffected("dead-resolver", network::dead_resolver),
    delaying("disk-full", RENEWED, storage::disk_full),
    delaying("descriptors", NOT_LOST, |_| Ok(Box::new(Descriptors::default()))),
    unaffected("kill-agent", |_| Ok(Box::new(KillAgent::default()))),
    delaying("runtime-stopped", RENEWED, |_| Ok(Box::new(RuntimeStopped))),
    delaying("runtime-killed", RENEWED, |_| Ok(Box::new(RuntimeKilled::default()))),
    delaying("api-slow", NOT_LOST, network::api_slow),
    delaying("api-resets", NOT_LOST, network::api_resets),
    delaying("api-500s", NOT_LOST, network::api_errors),
    unaffected("callers", callers::begin),
    unaffected("log-flood", floods::log_flood),
    unaffected("exec-flood", floods::exec_flood),
    delaying("mixed", NOT_LOST, mixed::begin),
];

pub fn named(name: &str) -> anyhow::Result<&'static Fault> {
    let names = || ALL.iter().map(|fault| fault.name).collect::<Vec<_>>().join(", ");
    ALL.iter().find(|fault| fault.name == name).with_context(|| format!("no fault is called `{name}`: {}", names()))
}

/// SIGKILL at random moments, and a restart at once.
#[derive(Debug, Default)]
struct KillAgent {
    /// Since the begin of the fault.
    moments: Vec<Duration>,
    kills: usize,
}

const KILLS: u32 = 20;

impl Injected for KillAgent {
    fn tick(&mut self, exam: &mut Exam, since: Duration, hold: Duration) -> anyhow::Result<()> {
        if self.moments.is_empty() {
            let share = hold / KILLS;
            let mut later = || share * u32::try_from(exam.dice.below(1000)).unwrap_or_default() / 1000;
            self.moments = (0..KILLS).map(|number| share * number + later()).collect();
        }
        if self.moments.get(self.kills).is_some_and(|moment| since >= *moment) {
            exam.cluster.node.agent.kill();
            exam.cluster.node.agent.spawn()?;
            self.kills += 1;
        }
        Ok(())
    }

    fn note(&self) -> String {
        format!("{} kills", self.kills)
    }
}

/// SIGKILL of containerd and a restart, several times.
#[derive(Debug, Default)]
struct RuntimeKilled {
    kills: u32,
}

const RUNTIME_KILLS: u32 = 3;

impl Injected for RuntimeKilled {
    fn tick(&mut self, exam: &mut Exam, since: Duration, hold: Duration) -> anyhow::Result<()> {
        if self.kills < RUNTIME_KILLS && since >= hold / RUNTIME_KILLS * self.kills {
            exam.cluster.node.bed.kill_containerd();
            exam.cluster.node.bed.start_containerd()?;
            self.kills += 1;
        }
        Ok(())
    }

    fn note(&self) -> String {
        format!("{} kills", self.kills)
    }
}

/// SIGSTOP of containerd.
#[derive(Debug)]
struct RuntimeStopped;

impl Injected for RuntimeStopped {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.cluster.node.bed.signal_containerd(Signal::STOP);
        Ok(())
    }

    fn end(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.cluster.node.bed.signal_containerd(Signal::CONT);
        Ok(())
    }
}

/// The agent may open no descriptor more than it has.
#[derive(Debug, Default)]
struct Descriptors {
    /// The process, and its limit before.
    lowered: Option<(Pid, Rlimit)>,
    open: usize,
}

impl Injected for Descriptors {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        let pid = exam.agent_pid()?;
        self.open = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        let pid = Pid::from_raw(pid).context("the agent's process id")?;
        // Only the soft limit: without privileges, a lower hard limit could not be raised again.
        let lower = Rlimit { current: u64::try_from(self.open).ok(), maximum: hard_limit(pid)? };
        let before = prlimit(Some(pid), Resource::Nofile, lower).context("lower the agent's limit of descriptors")?;
        self.lowered = Some((pid, before));
        Ok(())
    }

    fn end(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        if let Some((pid, before)) = self.lowered.take() {
            prlimit(Some(pid), Resource::Nofile, before).context("raise the agent's limit of descriptors")?;
        }
        Ok(())
    }

    fn note(&self) -> String {
        format!("{} descriptors", self.open)
    }
}

fn hard_limit(pid: Pid) -> anyhow::Result<Option<u64>> {
    let limits = fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero()))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).context("no limit of open files")?;
    Ok(line.split_whitespace().nth(1).context("no hard limit")?.parse().ok())
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
