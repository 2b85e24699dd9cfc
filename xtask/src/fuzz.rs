//! `cargo xtask fuzz`: runs the targets of `crates/rubelet-fuzz` under libFuzzer, one after another.
//!
//! Owns: how they are built on the pinned toolchain, and the figures of a run. What libFuzzer learns is kept in `fuzz/found`, so that
//! the next run continues; inputs that fail are in `fuzz/artifacts`.

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rubelet_testbed::{
    command::{capture, command, output},
    progress::step,
    project,
};

/// What cargo-fuzz passes to rustc, without a sanitizer: that would need a nightly toolchain, and finds little in safe code.
const RUSTFLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
const BUILD_LIMIT: Duration = Duration::from_secs(3600);
/// What libFuzzer needs to stop after its time.
const STOP_LIMIT: Duration = Duration::from_secs(120);

/// All targets, or only these.
pub fn run(minutes: u32, only: &[String]) -> anyhow::Result<()> {
    let dir = project::root().join("fuzz");
    let targets = targets(&dir.join("corpus"), only)?;
    step("building the targets", || build(&dir, &targets))?;
    let mut failed = Vec::new();
    for target in &targets {
        let found = run_target(&dir, target, Duration::from_secs(u64::from(minutes) * 60))?;
        println!("{target:15} {}", found.figures);
        if let Some(finding) = found.finding {
            println!("{finding}");
            failed.push(target.as_str());
        }
    }
    ensure!(failed.is_empty(), "inputs that fail were found: {}", failed.join(", "));
    Ok(())
}

/// Every target has a corpus of its name.
fn targets(corpus: &Path, only: &[String]) -> anyhow::Result<Vec<String>> {
    let mut known = Vec::new();
    for entry in fs::read_dir(corpus).with_context(|| format!("read {}", corpus.display()))? {
        known.push(entry?.file_name().to_string_lossy().into_owned());
    }
    known.sort();
    if let Some(unknown) = only.iter().find(|name| !known.contains(name)) {
        bail!("no target is called `{unknown}`; there are {}", known.join(", "));
    }
    known.retain(|name| only.is_empty() || only.contains(name));
    Ok(known)
}

fn triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

fn build(dir: &Path, targets: &[String]) -> anyhow::Result<()> {
    // The versions of the main build; libFuzzer is added to them.
    fs::copy(project::root().join("Cargo.lock"), dir.join("Cargo.lock")).context("copy Cargo.lock")?;
    // With `--target` the flags do not reach build scripts, which could not be linked.
    let mut cargo = project::cargo(["build", "--quiet", "--target", &triple()]);
    cargo.args(targets.iter().flat_map(|target| ["--bin", target])).env("RUSTFLAGS", RUSTFLAGS);
    output(cargo.current_dir(dir).env_remove("CARGO_TARGET_DIR"), BUILD_LIMIT).map(drop)
}

struct Found {
    figures: String,
    finding: Option<String>,
}

fn run_target(dir: &Path, target: &str, time: Duration) -> anyhow::Result<Found> {
    let (found, artifacts) = (dir.join("found").join(target), dir.join("artifacts").join(target));
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&artifacts)?;
    let program = dir.join("target").join(triple()).join("debug").join(target);
    let mut fuzzer: Command = command("nice", ["-n", "19"]);
    fuzzer.arg(program).arg(found).arg(dir.join("corpus").join(target));
    fuzzer.arg(format!("-max_total_time={}", time.as_secs()));
    fuzzer.arg(format!("-artifact_prefix={}/", artifacts.display()));
    // A minute for one input is a finding, too. Less is not: time passes while other programs run.
    fuzzer
        .args(["-max_len=4096", "-timeout=60", "-rss_limit_mb=2048", "-print_final_stats=1"])
        .env("RUST_BACKTRACE", "0");
    let out = capture(&mut fuzzer, time + STOP_LIMIT)?;
    let finding = (!out.success).then(|| finding(&out.stderr));
    Ok(Found { figures: figures(&out.stderr), finding })
}

/// `12000 runs, 3000 per second, coverage 250, 40 inputs kept`.
fn figures(log: &str) -> String {
    let stat = |name: &str| log.lines().find_map(|line| Some(line.strip_prefix(name)?.trim())).unwrap_or("?");
    let after = |word: &str| {
        let last = log.lines().rfind(|line| line.contains(" cov: "))?;
        last.split_whitespace().skip_while(|it| *it != word).nth(1)
    };
    let (runs, per_second) = (stat("stat::number_of_executed_units:"), stat("stat::average_exec_per_sec:"));
    let (coverage, kept) = (after("cov:").unwrap_or("?"), after("corp:").unwrap_or("?"));
    let kept = kept.split('/').next().unwrap_or(kept);
    format!("{runs} runs, {per_second} per second, coverage {coverage}, {kept} inputs kept")
}

/// The panic, and where the input is.
fn finding(log: &str) -> String {
    let words = ["panicked at", "ERROR: libFuzzer", "SUMMARY:", "Test unit written to"];
    let lines: Vec<&str> = log.lines().collect();
    let mut shown = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if words.iter().any(|word| line.contains(word)) {
            shown.push(*line);
            shown.extend(lines.get(at + 1).filter(|_| line.contains("panicked at")));
        }
    }
    shown.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "#2\tINITED cov: 10 ft: 11 corp: 1/1b exec/s: 0 rss: 40Mb\n\
        #900\tNEW    cov: 266 ft: 587 corp: 196/2169b lim: 65 exec/s: 0 rss: 41Mb L: 3/49 MS: 1 EraseBytes-\n\
        thread '<unnamed>' (1) panicked at a.rs:23:5:\nleft is not right\nnote: run with\n\
        artifact_prefix='x/'; Test unit written to x/crash-1\n\
        stat::number_of_executed_units: 1000\nstat::average_exec_per_sec:     500\n";

    #[test]
    fn figures_are_those_of_the_end_of_a_run() {
        assert_eq!(figures(LOG), "1000 runs, 500 per second, coverage 266, 196 inputs kept");
        assert_eq!(figures(""), "? runs, ? per second, coverage ?, ? inputs kept");
    }

    #[test]
    fn a_finding_has_its_cause_and_its_input() {
        let expected = "thread '<unnamed>' (1) panicked at a.rs:23:5:\nleft is not right\n\
            artifact_prefix='x/'; Test unit written to x/crash-1";
        assert_eq!(finding(LOG), expected);
    }
}
