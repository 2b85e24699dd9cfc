//! Processes that may be killed: identified by number and start time, so that a reused number is never mistaken for ours.
//!
//! Owns: pid files, reading `/proc`, signals.

use std::{
    fmt, fs,
    path::Path,
    process::{Child, Command, Stdio},
    str::FromStr,
    time::Duration,
};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};

use crate::clock;

/// A process that cannot be confused with a later one of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    pub pid: i32,
    /// In clock ticks since boot, as the kernel says.
    start_ticks: u64,
}

impl ProcessId {
    /// The process that has this number now.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(ProcessId { pid, start_ticks: Stat::parse(&stat)?.start_ticks })
    }

    pub fn is_alive(self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok();
        let stat = stat.as_deref().and_then(Stat::parse);
        stat.is_some_and(|stat| stat.start_ticks == self.start_ticks && stat.state != 'Z')
    }

    /// A missing process is no error.
    pub fn signal(self, signal: Signal) {
        if !self.is_alive() {
            return;
        }
        if let Some(pid) = Pid::from_raw(self.pid) {
            // It may have ended meanwhile, which is fine.
            let _ = kill_process(pid, signal);
        }
    }

    pub fn wait_gone(self, limit: Duration) -> bool {
        clock::poll(limit, Duration::from_millis(10), || (!self.is_alive()).then_some(())).is_some()
    }

    /// SIGTERM, then SIGKILL when it does not end in time.
    pub fn end(self, grace: Duration) {
        self.signal(Signal::TERM);
        if !self.wait_gone(grace) {
            self.signal(Signal::KILL);
            self.wait_gone(Duration::from_secs(10));
        }
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pid, self.start_ticks)
    }
}

impl FromStr for ProcessId {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (pid, ticks) = text.trim().split_once(' ').context("a pid file holds a number and a start time")?;
        Ok(ProcessId { pid: pid.parse()?, start_ticks: ticks.parse()? })
    }
}

/// Starts a program that outlives this one, in its own process group so that Ctrl-C does not reach it.
pub fn start_daemon(command: &mut Command, log: &Path, pid_file: &Path) -> anyhow::Result<Daemon> {
    use std::os::unix::process::CommandExt as _;
    let out = fs::OpenOptions::new().create(true).append(true).open(log)?;
    let child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run `{}`", crate::command::describe(command)))?;
    let pid = i32::try_from(child.id()).context("a pid is small")?;
    // A child keeps its entry in /proc until it is reaped.
    let id = ProcessId::of(pid).context("the child vanished from /proc")?;
    fs::write(pid_file, id.to_string())?;
    Ok(Daemon { child, id })
}

#[derive(Debug)]
pub struct Daemon {
    child: Child,
    pub id: ProcessId,
}

impl Daemon {
    /// Whether it still runs; reaps it if it has ended.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn signal(&mut self, signal: Signal) {
        if self.is_alive() {
            self.id.signal(signal);
        }
    }

    /// Kills and reaps it.
    pub fn end(&mut self, grace: Duration) {
        if !self.is_alive() {
            return;
        }
        self.id.end(grace);
        let _ = self.child.wait();
    }

    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// The process a pid file names, if it still runs.
pub fn from_pid_file(path: &Path) -> Option<ProcessId> {
    let id: ProcessId = fs::read_to_string(path).ok()?.parse().ok()?;
    id.is_alive().then_some(id)
}

/// All processes of the machine.
pub fn all() -> Vec<ProcessId> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(ProcessId::of).collect()
}

/// The words of a process's command line; empty for a kernel thread or a zombie.
pub fn command_line(id: ProcessId) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{}/cmdline", id.pid)).unwrap_or_default();
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

struct Stat {
    state: char,
    start_ticks: u64,
}

impl Stat {
    /// The program's name is in brackets and may contain anything, brackets too.
    fn parse(stat: &str) -> Option<Stat> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        Some(Stat { state: fields.first()?.chars().next()?, start_ticks: fields.get(19)?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_named_like_a_stat_line_does_not_fool_us() {
        let stat = Stat::parse("7 (a) S 1) R 1 7 7 0 -1 4 1 0 0 0 2 3 0 0 20 0 1 0 4711 1 1").unwrap();
        assert_eq!((stat.state, stat.start_ticks), ('R', 4711));
    }

    #[test]
    fn a_number_used_again_is_not_our_process() {
        let own = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(own.is_alive());
        assert!(!ProcessId { start_ticks: own.start_ticks + 1, ..own }.is_alive());
        assert_eq!(own.to_string().parse::<ProcessId>().unwrap(), own);
    }
}
