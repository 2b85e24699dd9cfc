//! `cargo xtask sim`: plays random seeds and reports those that break a rule.

use std::{
    fs::OpenOptions,
    io::Write as _,
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rubelet_sim::{Churn, Failure, play_out};

const USAGE: &str = "\
Usage: cargo xtask sim [--seeds N | --forever] [--seed S] [--minutes M]
       cargo xtask sim --churn HOURS [--per-minute N] [--seed S]

Plays random seeds in virtual time: the real agent over a fake runtime and host, with injected faults.
  --seeds N     how many seeds to play (default 200)
  --forever     play until it is stopped, print a rate every minute, and keep failing seeds in target/failing-seeds
  --seed S      the first seed (default 1); alone, it plays only this one and prints its whole trace
  --minutes M   virtual minutes of faults before the calm (default 20)
  --churn HOURS pods come and go, without faults: nothing may grow; figures after every 4,000 pods
  --per-minute N how many pods of the churn come in a minute (default 200)
";

/// Failing seeds after which to stop: enough to see whether they have one cause.
const ENOUGH_BROKEN: usize = 10;

/// Pods of the churn after which figures are taken.
const ROUND_PODS: u64 = 4_000;

struct Arguments {
    first: u64,
    count: u64,
    minutes: u64,
    /// Examines one seed.
    whole_trace: bool,
    is_forever: bool,
    churn_hours: Option<u64>,
    per_minute: u64,
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprint!("{problem}{USAGE}");
            return ExitCode::from(2);
        }
    };
    if let Some(hours) = arguments.churn_hours {
        return churn(arguments.first, hours, arguments.per_minute);
    }
    let failures = play_all(&arguments);
    match failures.first() {
        None => {
            println!("{} seeds, no rule broken", arguments.count);
            ExitCode::SUCCESS
        }
        Some(failure) => {
            println!("{failure}");
            println!("\nagain: cargo xtask sim --seed {} --minutes {}", failure.seed, arguments.minutes);
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let (mut seed, mut seeds, mut minutes, mut is_forever) = (None, None, 20, false);
    let (mut churn_hours, mut per_minute) = (None, 200);
    while let Some(word) = words.next() {
        if word == "--help" || word == "-h" {
            return Err(String::new());
        }
        if word == "--forever" {
            is_forever = true;
            continue;
        }
        let value = words.next().and_then(|value| value.parse::<u64>().ok());
        let value = value.ok_or_else(|| format!("{word} wants a number\n"))?;
        match word.as_str() {
            "--seed" => seed = Some(value),
            "--seeds" => seeds = Some(value),
            "--minutes" => minutes = value,
            "--churn" => churn_hours = Some(value),
            "--per-minute" => per_minute = value.max(1),
            unknown => return Err(format!("unknown option {unknown}\n")),
        }
    }
    let first = seed.unwrap_or(1);
    let count = seeds.unwrap_or(match seed {
        _ if is_forever => u64::MAX - first,
        Some(_) => 1,
        None => 200,
    });
    Ok(Arguments {
        first,
        count,
        minutes,
        whole_trace: seed.is_some() && count == 1,
        is_forever,
        churn_hours,
        per_minute,
    })
}

/// Three rounds per hour.
/// In rounds of the same number of pods.
fn churn(seed: u64, hours: u64, per_minute: u64) -> ExitCode {
    let minutes = (ROUND_PODS / per_minute).max(1);
    let rounds = u32::try_from(hours.saturating_mul(60).div_ceil(minutes)).unwrap_or(u32::MAX);
    let churn = Churn { seed, rounds, minutes, per_minute: u32::try_from(per_minute).unwrap_or(u32::MAX) };
    match churn.play(|figures| println!("{figures}")) {
        Ok(_) => {
            println!("nothing grows");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// The failures, the lowest seed first.
fn play_all(arguments: &Arguments) -> Vec<Failure> {
    let next = AtomicU64::new(arguments.first);
    let failures: Mutex<Vec<Failure>> = Mutex::default();
    let broken = || failures.lock().unwrap_or_else(PoisonError::into_inner);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        if arguments.is_forever {
            scope.spawn(|| report(&next, arguments.first));
        }
        for _ in 0..threads {
            scope.spawn(|| {
                while arguments.is_forever || broken().len() < ENOUGH_BROKEN {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= arguments.first + arguments.count {
                        break;
                    }
                    if let Err(failure) = play_one(seed, arguments) {
                        println!("seed {seed}: {}", failure.rule);
                        if arguments.is_forever {
                            keep(seed);
                        }
                        broken().push(*failure);
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    failures.sort_by_key(|failure| failure.seed);
    failures
}

/// Seeds per minute, once a minute.
fn report(next: &AtomicU64, first: u64) {
    let mut before = first;
    loop {
        std::thread::sleep(Duration::from_secs(60));
        let now = next.load(Ordering::Relaxed);
        eprintln!("{} seeds, {} in the last minute", now - first, now - before);
        before = now;
    }
}

fn keep(seed: u64) {
    let file = OpenOptions::new().create(true).append(true).open("target/failing-seeds");
    if let Err(error) = file.and_then(|mut file| writeln!(file, "{seed}")) {
        eprintln!("cannot keep seed {seed} in target/failing-seeds: {error}");
    }
}

fn play_one(seed: u64, arguments: &Arguments) -> Result<(), Box<Failure>> {
    let result = match play_out(seed, arguments.minutes) {
        Ok(result) => result,
        Err(failure) => {
            if arguments.whole_trace {
                println!("{}", failure.trace.join("\n"));
            }
            return Err(failure);
        }
    };
    if arguments.whole_trace {
        println!("{}", result.trace.join("\n"));
    } else if !arguments.is_forever {
        println!("seed {seed}: {} starts, {} lines", result.starts, result.trace.len());
    }
    Ok(())
}
