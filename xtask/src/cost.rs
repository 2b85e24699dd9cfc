//! `cargo xtask cost`: the cost of one event in the core, on a small node and on a large one.
//!
//! Owns: the sizes, and the maximum ratio. Instructions are counted by callgrind, so
//! that the load of the machine does not matter.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    command::{capture, command, output},
    packages,
    progress::step,
    project,
};

const FEW_PODS: u32 = 10;
/// A server for 500 pods, twice.
pub const MANY_PODS: u32 = 1000;
/// The aim: with 10,000 pods an event costs at most twice what it costs with ten. Costs that depend on the number of pods grow
/// linearly, so that fewer pods, which start sooner, show them as well.
const PODS_THAT_MAY_DOUBLE_IT: f64 = 10_000.0;
/// Under callgrind the program is about fifty times slower, and first lists all its pods.
const LIMIT: Duration = Duration::from_secs(1800);

/// Fails when an event on a node of `many_pods` costs too much more than on one of ten.
pub fn run(many_pods: u32) -> anyhow::Result<()> {
    packages::ensure(&[packages::program("valgrind", "valgrind")])?;
    let program = step("building the core", build)?;
    let few = step(&format!("one event on a node of {FEW_PODS} pods"), || instructions(&program, FEW_PODS))?;
    let many = step(&format!("one event on a node of {many_pods} pods"), || instructions(&program, many_pods))?;
    let ratio = many as f64 / few as f64;
    println!("an event costs {few} instructions with {FEW_PODS} pods, {many} with {many_pods}: {ratio:.3} times");
    let most = 1.0 + f64::from(many_pods) / PODS_THAT_MAY_DOUBLE_IT;
    ensure!(
        ratio <= most,
        "an event costs {ratio:.3} times as much with {many_pods} pods, and may cost {most:.3} times"
    );
    Ok(())
}

fn build() -> anyhow::Result<std::path::PathBuf> {
    let mut cargo = project::cargo([
        "build",
        "--quiet",
        "--profile",
        "sim",
        "--package",
        "rubelet-core",
        "--example",
        "event_cost",
    ]);
    output(cargo.current_dir(project::root()), LIMIT)?;
    Ok(project::target().join("sim/examples/event_cost"))
}

fn instructions(program: &Path, pods: u32) -> anyhow::Result<u64> {
    let mut callgrind = command("valgrind", ["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    // Only the measured function is counted.
    callgrind.arg("--toggle-collect=*event_cost*rounds*").arg(program).arg(pods.to_string());
    let out = capture(&mut callgrind, LIMIT)?;
    ensure!(out.success, "{}{}", out.stdout, out.stderr);
    per_round(&out.stdout, &out.stderr)
}

fn per_round(stdout: &str, stderr: &str) -> anyhow::Result<u64> {
    let rounds = stdout.lines().find_map(|line| line.strip_suffix(" rounds")?.parse::<u64>().ok());
    let collected = stderr.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse::<u64>().ok());
    let (rounds, collected) = rounds.zip(collected).with_context(|| format!("no figures in: {stdout}{stderr}"))?;
    ensure!(rounds > 0 && collected > 0, "nothing was counted: the measured function has another name");
    Ok(collected / rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted_per_round_and_zero_is_an_error() {
        let stderr = "==1== Events    : Ir\n==1== Collected : 17705693\n";
        assert_eq!(per_round("20 rounds\n", stderr).unwrap(), 885_284);
        assert!(per_round("20 rounds\n", "==1== Collected : 0\n").is_err());
        assert!(per_round("", stderr).is_err());
    }
}
