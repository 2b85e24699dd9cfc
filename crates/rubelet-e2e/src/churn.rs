//! `cargo xtask churn`: pods come and go on a real containerd for a long time.
//!
//! Owns: the pods, the figures of each minute, and the verdict: nothing that the agent keeps may grow, starts may not become
//! slower, and when the last pod is gone nothing of any pod is left.

mod figures;

use std::{collections::VecDeque, path::PathBuf, process::ExitCode, thread, time::Duration};

use anyhow::Context as _;
use clap::ArgMatches;
use jiff::Timestamp;
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{self, AgentOptions, Program},
    cli,
    clock::{self, Stopwatch},
    progress::step,
    sweep_orphans,
};
use serde_json::{Value, json};

use self::figures::{Figures, Verdict};
use crate::{
    bench::{Usage, first_line_of, machine, ms_between},
    e2e::{manifest::Pod, node::Node},
};

const MINUTE: Duration = Duration::from_secs(60);
/// A removed static pod keeps its traces for a minute, and the scan for orphaned directories is every five.
const CLEAN_UP: Duration = Duration::from_secs(420);

#[derive(Debug)]
pub struct Options {
    runtime: Runtime,
    built: Option<PathBuf>,
    minutes: u32,
    per_minute: u32,
}

impl Options {
    pub fn parse(args: &ArgMatches) -> Self {
        let number = |name: &str| args.get_one::<u32>(name).copied().unwrap_or(1);
        Options {
            runtime: cli::runtime(args).ok().flatten().unwrap_or(Runtime::Containerd24),
            built: args.get_one::<String>("built").map(PathBuf::from),
            minutes: number("minutes"),
            per_minute: number("per-minute"),
        }
    }
}

pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let binary = match &options.built {
        Some(built) => built.canonicalize().with_context(|| built.display().to_string())?,
        None => step("building Rubelet (release)", agent::build)?,
    };
    let programs = Programs::ensure(options.runtime)?;
    sweep_orphans()?;
    // The agent's log at its usual level: it would be most of what grows.
    let quiet = AgentOptions { verbosity: Some(2), ..AgentOptions::default() };
    let mut node = Node::new(Testbed::start(&programs)?, &Program::Rubelet(binary), &quiet)?;
    node.agent.start()?;
    println!("{}, {} pods per minute\n\n{}", machine(options.runtime), options.per_minute, Figures::HEAD);
    let rows = come_and_go(&node, options)?;
    let left = step("removing the last pods", || left_over(&node))?;
    let verdict = Verdict::of(&rows, &left);
    println!("\n{verdict}");
    Ok(if verdict.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A row per minute.
fn come_and_go(node: &Node, options: &Options) -> anyhow::Result<Vec<Figures>> {
    let pause = MINUTE / options.per_minute;
    // Each pod lives for half a minute.
    let alive_at_once = usize::try_from(options.per_minute.div_ceil(2))?;
    let mut alive: VecDeque<(u32, String, Timestamp)> = VecDeque::new();
    let mut rows = Vec::new();
    let watch = Stopwatch::start();
    let mut count = 0;
    for minute in 1..=options.minutes {
        let mut starts = Vec::new();
        let before = Usage::read(node)?;
        for _ in 0..options.per_minute {
            let name = format!("p{count}");
            alive.push_back((count, name.clone(), Timestamp::try_from(clock::wall())?));
            node.drop_file(&format!("{name}.json"), manifest(&name, count).to_string().as_bytes())?;
            if alive.len() > alive_at_once
                && let Some((number, oldest, applied)) = alive.pop_front()
            {
                // The first log of a container that was restarted twice is gone.
                if kind(number) != Kind::Ends {
                    starts.push(first_line_of(node, &oldest).ok().map(|line| ms_between(applied, line)));
                }
                node.remove(&oldest)?;
            }
            count += 1;
            thread::sleep((pause * count).saturating_sub(watch.elapsed()));
        }
        let cpu_secs = Usage::read(node)?.cpu_ns.saturating_sub(before.cpu_ns) as f64 / 1e9;
        let row = Figures::read(node, minute, (starts, cpu_secs))?;
        println!("{row}");
        rows.push(row);
    }
    for (_, name, _) in alive {
        node.remove(&name)?;
    }
    Ok(rows)
}

/// What is left of pods when all are removed.
fn left_over(node: &Node) -> anyhow::Result<Vec<String>> {
    let watch = Stopwatch::start();
    loop {
        let left = figures::traces(node)?;
        if left.is_empty() || watch.elapsed() > CLEAN_UP {
            return Ok(left);
        }
        thread::sleep(Duration::from_secs(1));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Idle,
    HasVolumes,
    Prints,
    /// And is restarted.
    Ends,
}

/// All in turn.
fn kind(number: u32) -> Kind {
    [Kind::Idle, Kind::HasVolumes, Kind::Prints, Kind::Ends][number as usize % 4]
}

fn manifest(name: &str, number: u32) -> Value {
    let script = match kind(number) {
        Kind::Idle | Kind::HasVolumes => "echo start; exec sleep 3600",
        Kind::Prints => "echo start; while :; do seq 1 5000; sleep 1; done",
        Kind::Ends => "echo start; sleep 3; exit 1",
    };
    let mut manifest = Pod::new(name, script).grace_secs(1).manifest();
    if kind(number) == Kind::HasVolumes {
        manifest["spec"]["volumes"] = json!([
            { "name": "disk", "emptyDir": {} },
            { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        ]);
        let mounts = ["disk", "memory"].map(|volume| json!({ "name": volume, "mountPath": format!("/{volume}") }));
        manifest["spec"]["containers"][0]["volumeMounts"] = json!(mounts);
    }
    manifest
}
