//! `cargo xtask bench`: memory, CPU and latency of the agent on a real containerd.
//!
//! Owns: the measurements and the table. Every pod start is compared with the plain CRI calls for the same pod, made just
//! before on a twin of the runtime, so that both see the same load of the machine. Both ends are read from the same
//! clock, and the end is the first line in the container's log.

pub mod cluster;
pub mod port;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use jiff::Timestamp;
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{self, AgentOptions, Program},
    clock::{self, Stopwatch},
    command::{SHORT, command, output},
    image::BUSYBOX,
    progress::step,
    project, sweep_orphans,
};

use crate::e2e::{
    manifest::Pod,
    node::{Node, full_name},
};

const PODS: usize = 50;
const STARTS: usize = 10;
const IDLE: Duration = Duration::from_secs(60);
const SCRIPT: &str = "echo start; exec sleep 3600";

pub fn run(runtime: Runtime, kubelet: Option<&Path>) -> anyhow::Result<()> {
    let binary = step("building Rubelet (release)", agent::build)?;
    let bare_pods = step("building the bare CRI client (release)", build_bare_pods)?;
    let programs = Programs::ensure(runtime)?;
    sweep_orphans()?;
    let bench = Bench { programs, bare_pods };
    let ours = bench.measure("Rubelet", &Program::Rubelet(binary))?;
    let peer = kubelet.map(|path| bench.measure("upstream", &Program::Upstream(path.to_owned()))).transpose()?;
    println!("\n{}", render(&machine(runtime), &ROWS, &ours, peer.as_ref()));
    Ok(())
}

/// The inputs of measurements.
#[derive(Debug)]
struct Bench {
    programs: Programs,
    bare_pods: PathBuf,
}

/// The usage of one agent.
#[derive(Debug)]
struct Measured {
    idle_mb: f64,
    start: Start,
    restart_ms: f64,
    fifty_secs: f64,
    full: Full,
}

/// Medians of a pod's start.
#[derive(Debug)]
struct Start {
    agent_ms: f64,
    bare_ms: f64,
    /// Of the pairwise differences.
    share_ms: f64,
}

/// A node full of idle pods.
#[derive(Debug)]
struct Full {
    resident_mb: f64,
    cpu_percent: f64,
    wakeups: f64,
}

impl Bench {
    fn measure(&self, name: &str, program: &Program) -> anyhow::Result<Measured> {
        let mut node = Node::new(Testbed::start(&self.programs)?, program, &AgentOptions::default())?;
        let idle_mb = step(&format!("{name} without pods"), || {
            node.agent.start()?;
            thread::sleep(Duration::from_secs(10));
            resident_mb(&node)
        })?;
        Ok(Measured {
            idle_mb,
            start: step(&format!("{name}: starting pods, with it and without"), || self.starts(&node))?,
            restart_ms: step(&format!("{name}: restarting it"), || restart(&mut node))?,
            fifty_secs: step(&format!("{name}: starting fifty pods"), || fifty(&node))?,
            full: step(&format!("{name}: a minute with fifty pods"), || idle(&node))?,
        })
    }

    fn starts(&self, node: &Node) -> anyhow::Result<Start> {
        // An agent terminates unknown pods, so the plain calls need a separate runtime.
        let twin = Testbed::start(&self.programs)?;
        let mut pairs = Vec::new();
        for number in 0..=STARTS {
            let pair = (start(node, number)?, self.bare_start(&twin)?);
            // The first start on a fresh runtime unpacks and caches, so it is not measured.
            if number > 0 {
                pairs.push(pair);
            }
        }
        Ok(Start {
            agent_ms: median(pairs.iter().map(|(agent, _)| *agent).collect())?,
            bare_ms: median(pairs.iter().map(|(_, bare)| *bare).collect())?,
            share_ms: median(pairs.iter().map(|(agent, bare)| agent - bare).collect())?,
        })
    }

    /// From the first call to the first line of the container.
    fn bare_start(&self, twin: &Testbed) -> anyhow::Result<f64> {
        let logs = twin.layout.dir.join("bare");
        let _ = fs::remove_dir_all(&logs);
        fs::create_dir_all(&logs)?;
        let mut bare = command(&self.bare_pods, [twin.layout.socket(), logs.clone()]);
        let out = output(bare.args([BUSYBOX, "1"]), SHORT)?;
        let began = out.split(' ').next().and_then(|ms| ms.parse().ok()).context("the client's line")?;
        Ok(ms_between(Timestamp::from_millisecond(began)?, first_line_at(&logs.join("0/main.log"))?))
    }
}

/// From the manifest's writing to the first line of the container.
fn start(node: &Node, number: usize) -> anyhow::Result<f64> {
    let name = format!("one{number}");
    let began = Timestamp::try_from(clock::wall())?;
    node.apply(&Pod::new(&name, SCRIPT).grace_secs(1))?;
    // Calls to the agent or the runtime would use CPU time of the start; reading a directory does not.
    let ended = node.wait("its first line", 60, |node| first_line_of(node, &name))?;
    node.remove(&name)?;
    node.wait_gone(&name, 60)?;
    // The next measurement must not overlap the cleanup of this one.
    thread::sleep(Duration::from_secs(1));
    Ok(ms_between(began, ended))
}

fn build_bare_pods() -> anyhow::Result<PathBuf> {
    let mut cargo = project::cargo(["build", "--release", "--package", "rubelet-cri", "--example", "bare_pods"]);
    output(cargo.current_dir(project::root()), Duration::from_secs(1800))?;
    Ok(project::target().join("release/examples/bare_pods"))
}

/// From exec to a view that shows a running pod.
fn restart(node: &mut Node) -> anyhow::Result<f64> {
    node.apply(&Pod::new("kept", SCRIPT).grace_secs(1))?;
    node.wait_running("kept", 60)?;
    let mut times = Vec::new();
    for _ in 0..5 {
        node.agent.stop();
        let watch = Stopwatch::start();
        node.agent.spawn()?;
        let synced = clock::poll(Duration::from_secs(30), Duration::from_millis(2), || {
            node.agent.pod_list().ok().filter(|list| list.contains("\"phase\":\"Running\"")).map(drop)
        });
        synced.context("the pod is not synced after a restart of the agent")?;
        times.push(watch.secs() * 1000.0);
    }
    node.remove("kept")?;
    node.wait_gone("kept", 60)?;
    median(times)
}

fn fifty(node: &Node) -> anyhow::Result<f64> {
    let watch = Stopwatch::start();
    for number in 0..PODS {
        node.apply(&Pod::new(&format!("many{number}"), SCRIPT).grace_secs(1))?;
    }
    node.wait("fifty pods run", 300, |node| {
        let running = node.pods()?.iter().filter(|pod| pod.check_running().is_ok()).count();
        ensure!(running == PODS, "{running} run");
        Ok(())
    })?;
    let secs = watch.secs();
    thread::sleep(Duration::from_secs(15));
    Ok(secs)
}

fn idle(node: &Node) -> anyhow::Result<Full> {
    let before = Usage::read(node)?;
    thread::sleep(IDLE);
    let after = Usage::read(node)?;
    Ok(Full {
        resident_mb: resident_mb(node)?,
        // The CPU time of a thread that ended meanwhile is lost.
        cpu_percent: after.cpu_ns.saturating_sub(before.cpu_ns) as f64 / IDLE.as_nanos() as f64 * 100.0,
        wakeups: after.switches.saturating_sub(before.switches) as f64 / IDLE.as_secs_f64(),
    })
}

const TICK_NS: u64 = 10_000_000;

/// What the agent has used since its start, over all its threads.
pub struct Usage {
    pub cpu_ns: u64,
    switches: u64,
}

impl Usage {
    pub fn read(node: &Node) -> anyhow::Result<Usage> {
        let pid = pid(node)?;
        // Of the whole process, in hundredths of a second: it includes ended threads.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let (_, fields) = stat.rsplit_once(')').context("no name in /proc/…/stat")?;
        let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
        let ticks: u64 = ticks.sum::<Result<_, _>>().context("no times in /proc/…/stat")?;
        let mut usage = Usage { cpu_ns: ticks * TICK_NS, switches: 0 };
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            usage.switches += field(&fs::read_to_string(task?.path().join("status"))?, "voluntary_ctxt_switches:")?;
        }
        Ok(usage)
    }
}

pub fn resident_mb(node: &Node) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid(node)?))?;
    Ok(field(&status, "VmRSS:")? as f64 / 1024.0)
}

pub fn pid(node: &Node) -> anyhow::Result<i32> {
    node.agent.pid().context("the agent does not run")
}

fn field(status: &str, name: &str) -> anyhow::Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|rest| rest.split_whitespace().next()).and_then(|value| value.parse().ok());
    value.with_context(|| format!("no {name} in /proc"))
}

pub fn first_line_of(node: &Node, pod: &str) -> anyhow::Result<Timestamp> {
    let prefix = format!("default_{}_", full_name(pod));
    let mut dirs = fs::read_dir(node.agent.pod_logs_dir())?.flatten();
    let dir = dirs.find(|dir| dir.file_name().to_string_lossy().starts_with(&prefix)).context("no log directory")?;
    first_line_at(&dir.path().join("main/0.log"))
}

fn first_line_at(log: &Path) -> anyhow::Result<Timestamp> {
    let text = fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
    let time = text.split(' ').next().filter(|time| !time.is_empty()).context("the log is empty")?;
    Ok(time.parse()?)
}

pub fn ms_between(began: Timestamp, ended: Timestamp) -> f64 {
    ended.duration_since(began).as_secs_f64() * 1000.0
}

pub fn median(mut values: Vec<f64>) -> anyhow::Result<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().context("nothing was measured")
}

pub fn machine(runtime: Runtime) -> String {
    let kernel = output(&mut command("uname", ["-sr"]), SHORT).unwrap_or_default();
    let cores = thread::available_parallelism().map_or(0, usize::from);
    format!("containerd {}, {}, {cores} cores", runtime.as_str(), kernel.trim())
}

/// Name, unit, how to read it, target.
type Row<M> = (&'static str, &'static str, fn(&M) -> f64, &'static str);

const ROWS: [Row<Measured>; 9] = [
    ("resident memory, idle", "MB", |m| m.idle_mb, "under 20 MB"),
    ("resident memory, 50 pods", "MB", |m| m.full.resident_mb, "under 25 MB"),
    ("processor, 50 idle pods", "% of a core", |m| m.full.cpu_percent, "under 0.3 %"),
    ("wake-ups per second, 50 idle pods", "", |m| m.full.wakeups, ""),
    ("file written to container running, median", "ms", |m| m.start.agent_ms, ""),
    ("the bare CRI calls of the same start, median", "ms", |m| m.start.bare_ms, ""),
    ("the agent's share, median of the differences", "ms", |m| m.start.share_ms, "under 30 ms"),
    ("agent started to a running pod synced, median", "ms", |m| m.restart_ms, ""),
    ("fifty files written to all running", "s", |m| m.fifty_secs, ""),
];

fn render<M>(machine: &str, rows: &[Row<M>], ours: &M, peer: Option<&M>) -> String {
    let mut text = format!("{machine}\n\n| what | Rubelet | upstream | ratio | aim |\n|---|---|---|---|---|\n");
    for (what, unit, read, aim) in rows {
        text.push_str(&row(what, unit, (read(ours), peer.map(read)), aim));
    }
    text
}

fn row(what: &str, unit: &str, (ours, peer): (f64, Option<f64>), aim: &str) -> String {
    let number = |value: f64| match value.abs() {
        v if v < 10.0 => format!("{value:.2} {unit}"),
        v if v < 100.0 => format!("{value:.1} {unit}"),
        _ => format!("{value:.0} {unit}"),
    };
    let upstream = peer.map(number).unwrap_or_default();
    let ratio = peer.filter(|peer| *peer > 0.0).map(|peer| format!("{:.2}", ours / peer)).unwrap_or_default();
    format!("| {what} | {} | {} | {ratio} | {aim} |\n", number(ours).trim(), upstream.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_and_of_nothing_there_is_none() {
        assert!((median(vec![9.0, 1.0, 5.0]).unwrap() - 5.0).abs() < f64::EPSILON);
        assert!(median(Vec::new()).is_err());
    }

    #[test]
    fn a_row_shows_the_ratio_only_beside_a_peer() {
        assert_eq!(row("memory", "MB", (12.345, Some(49.38)), "low"), "| memory | 12.3 MB | 49.4 MB | 0.25 | low |\n");
        assert_eq!(row("memory", "MB", (12.345, None), ""), "| memory | 12.3 MB |  |  |  |\n");
    }

    #[test]
    fn a_field_of_proc_is_found_by_its_whole_name() {
        let status = "nonvoluntary_ctxt_switches:\t7\nvoluntary_ctxt_switches:\t42\nVmRSS:\t  2048 kB\n";
        assert_eq!(field(status, "voluntary_ctxt_switches:").unwrap(), 42);
        assert_eq!(field(status, "VmRSS:").unwrap(), 2048);
    }
}
