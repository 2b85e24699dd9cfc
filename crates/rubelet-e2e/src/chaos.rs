//! `cargo xtask chaos`: faults on a node of a real cluster, and what they cost the pods that have nothing to do with them.
//!
//! Owns: the options, and the order: pods start, a quiet time, then for each fault its begin, its end and the recovery. Each
//! fault is one row of a table; a column that fails makes the exit code 1.

mod controls;
mod exam;
mod faults;
mod interrupt;
mod monitor;
mod relay;
mod report;
mod resolver;
mod verify;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::ArgMatches;
use rubelet_testbed::{
    Programs, Runtime,
    agent::{self, Program},
    clock::Stopwatch,
    progress::step,
    sweep_orphans,
};

use self::{
    exam::Exam,
    faults::{Fault, Injected},
    report::{Report, Row},
};
use crate::control_plane::upstream_kubelet;

/// Control pods of this time before a fault show what is usual.
const QUIET: Duration = Duration::from_secs(20);
/// Everything is right again within this time after a fault.
const RECOVERY: Duration = Duration::from_secs(30);
/// A recovery that takes longer has failed, but is still measured.
const RECOVERY_MEASURED: Duration = Duration::from_secs(150);
/// How often faults act on time.
const TICK: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Options {
    is_upstream: bool,
    built: Option<PathBuf>,
    faults: Vec<&'static Fault>,
    pods: usize,
    hold: Duration,
    seed: u64,
}

impl Options {
    pub fn parse(args: &ArgMatches) -> anyhow::Result<Self> {
        let number = |name: &str| args.get_one::<u32>(name).copied().unwrap_or(1);
        let names: Vec<&String> = args.get_many("fault").into_iter().flatten().collect();
        let named = names.iter().map(|name| faults::named(name)).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Options {
            is_upstream: args.get_one::<String>("agent").is_some_and(|agent| agent == "upstream"),
            built: args.get_one::<String>("built").map(PathBuf::from),
            faults: if named.is_empty() { faults::ALL.iter().collect() } else { named },
            pods: usize::try_from(number("pods"))?,
            hold: Duration::from_secs(u64::from(number("seconds"))),
            seed: u64::from(number("seed")),
        })
    }

    fn program(&self) -> anyhow::Result<Program> {
        Ok(match &self.built {
            _ if self.is_upstream => Program::Upstream(upstream_kubelet()?),
            Some(built) => Program::Rubelet(built.canonicalize().with_context(|| built.display().to_string())?),
            None => Program::Rubelet(step("building Rubelet (release)", agent::build)?),
        })
    }
}

pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    interrupt::watch()?;
    let program = options.program()?;
    let programs = Programs::ensure(Runtime::Containerd24)?;
    sweep_orphans()?;
    let mut exam = step("starting a cluster of one node", || Exam::start(&programs, &program, options.seed))?;
    step(&format!("starting {} pods", options.pods), || exam.fill(options.pods))?;
    let mut report = Report::new(if options.is_upstream { "upstream" } else { "Rubelet" }, options.pods);
    for fault in &options.faults {
        let row = step(fault.name, || row(&mut exam, fault, options.hold));
        interrupt::check()?;
        let row = row.or_else(|err| {
            // The next fault must not find what this one left.
            exam.abandon()?;
            anyhow::Ok(Row::broken(fault, &format!("{err:#}")))
        })?;
        println!("{}", row.to_markdown());
        report.push(row);
        exam.keep_log(fault.name);
    }
    println!("\n{}", report.to_markdown());
    Ok(if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One fault, from a quiet time before it to the recovery.
fn row(exam: &mut Exam, fault: &'static Fault, hold: Duration) -> anyhow::Result<Row> {
    exam.settle(RECOVERY_MEASURED).context("before the fault")?;
    let quiet_from = exam.now();
    interrupt::sleep(QUIET)?;
    let quiet_to = exam.now();
    let mut injected = (fault.begin)(exam)?;
    exam.monitor.reset();
    let restarts = exam.restarts()?;
    let from = exam.now();
    let held = held(exam, &mut *injected, hold);
    // Ended in any case: what a fault holds would disturb the next one.
    let ended = injected.end(exam);
    let to = exam.now();
    held.and(ended)?;
    let watch = Stopwatch::start();
    let wrong = exam.recover(to, RECOVERY_MEASURED)?;
    let recovery = watch.elapsed();
    let note = injected.note();
    let row = Row {
        fault,
        peaks: exam.monitor.peaks(),
        restarts: exam.restarts()?.saturating_sub(restarts),
        wrong,
        usual: exam.controls.between(quiet_from, quiet_to),
        during: exam.controls.between(from, to),
        recovery,
        note,
    };
    injected.clean_up(exam)?;
    Ok(row)
}

fn held(exam: &mut Exam, injected: &mut dyn Injected, hold: Duration) -> anyhow::Result<()> {
    injected.strike(exam)?;
    let watch = Stopwatch::start();
    while watch.elapsed() < hold {
        injected.tick(exam, watch.elapsed(), hold)?;
        interrupt::sleep(TICK)?;
    }
    Ok(())
}
