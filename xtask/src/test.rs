//! `cargo xtask test`: all checks before a change lands.
//!
//! Owns: the stages and their sum. A failed stage does not stop the others, so that one run reports everything; nothing
//! is skipped because a tool is missing.

use std::{
    io::{self, Read, Write as _},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, bail};
use rubelet_testbed::{
    clock::Stopwatch,
    command::{capture, describe},
    packages, project,
    tally::Tally,
};

use crate::{check, cost, hand_over, sim};

/// Fixed, so that a failure is caused by the change and not by chance.
const SIM_SEEDS: &str = "50";

pub fn run() -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    stage("check", &mut tally, || check::run().map(|()| Tally::PASSED));
    stage("unit tests", &mut tally, unit_tests);
    stage("simulation", &mut tally, || sim::run(&["--seeds".into(), SIM_SEEDS.into()]).map(|()| Tally::PASSED));
    stage("cost of an event", &mut tally, || cost::run(cost::MANY_PODS).map(|()| Tally::PASSED));
    stage("end to end", &mut tally, end_to_end);
    Ok(tally)
}

fn stage(name: &str, tally: &mut Tally, work: impl FnOnce() -> anyhow::Result<Tally>) {
    println!("\n== {name}");
    let watch = Stopwatch::start();
    let sum = work().unwrap_or_else(|err| {
        println!("{name} failed: {err:#}");
        Tally { passed: 0, failed: 1 }
    });
    println!("== {name}: {sum} in {:.0} s", watch.secs());
    tally.passed += sum.passed;
    tally.failed += sum.failed;
}

fn unit_tests() -> anyhow::Result<Tally> {
    // Tests that need it are left out without it.
    packages::ensure(packages::UNIT_TESTS)?;
    let mut cargo = project::cargo(["test", "--workspace", "--quiet", "--no-fail-fast"]);
    let out = capture(cargo.current_dir(project::root()), Duration::from_secs(2700))?;
    let tally = sum_of(&out.stdout);
    if !out.success {
        println!("{}{}", out.stdout, out.stderr);
        if tally.failed == 0 {
            bail!("`cargo test` failed before it ran the tests");
        }
    }
    Ok(tally)
}

/// They are run by another program, which prints its tally last.
fn end_to_end() -> anyhow::Result<Tally> {
    let mut program = hand_over::program("rubelet-e2e", ["e2e"]);
    let name = describe(&program);
    let mut child = program.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{name}`"))?;
    let said = pass_on(child.stdout.take().expect("stdout was asked for"))?;
    let status = child.wait()?;
    let tally: Option<Tally> = said.lines().last().and_then(|line| line.parse().ok());
    let tally = tally.filter(|tally| status.success() == (tally.failed == 0));
    tally.with_context(|| format!("`{name}` broke off ({status})"))
}

/// Prints output as it arrives, since a line may be incomplete for long; returns all of it.
fn pass_on(mut from: impl Read) -> anyhow::Result<String> {
    let mut said = Vec::new();
    let mut block = [0; 4096];
    loop {
        let length = from.read(&mut block)?;
        if length == 0 {
            return Ok(String::from_utf8_lossy(&said).into_owned());
        }
        said.extend(&block[..length]);
        let mut out = io::stdout();
        // Only a display: a closed terminal is no reason to stop the work.
        let _ = out.write_all(&block[..length]).and_then(|()| out.flush());
    }
}

/// Adds up cargo's lines `test result: ok. 3 passed; 0 failed; …`.
fn sum_of(output: &str) -> Tally {
    let number_before = |line: &str, word: &str| -> usize {
        let before = line.split(word).next().unwrap_or_default();
        before.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    output.lines().filter(|line| line.starts_with("test result:")).fold(Tally::default(), |sum, line| Tally {
        passed: sum.passed + number_before(line, " passed;"),
        failed: sum.failed + number_before(line, " failed;"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_taken_over_all_crates() {
        let output = "running 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored; finished\n\n\
                      test result: FAILED. 11 passed; 3 failed; 0 ignored; finished\n";
        let sum = sum_of(output);
        assert_eq!((sum.passed, sum.failed), (13, 3));
    }
}
