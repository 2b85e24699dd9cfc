//! The agent's effects and looks, one by one, on a runtime: the tests of `crates/rubelet/tests/containerd.rs`.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    command::{capture, output},
    project,
};

use crate::e2e::{Case, node::Node};

pub const CASES: &[Case] =
    &[Case { name: "effects and looks at the runtime's socket: each does what the core counts on", run: effects }];

/// In advance, so that no compiler disturbs the measurements.
pub fn build() -> anyhow::Result<()> {
    let mut cargo = project::cargo(["test", "--package", "rubelet", "--test", "containerd", "--no-run"]);
    output(cargo.current_dir(project::root()), Duration::from_secs(1800)).map(drop)
}

/// The node's agent is not needed, and does not run.
fn effects(node: &mut Node) -> anyhow::Result<()> {
    let mut cargo = project::cargo(["test", "--package", "rubelet", "--test", "containerd"]);
    cargo.args(["--", "--ignored"]).env("RUBELET_TEST_CONTAINERD", node.bed.layout.socket());
    let out = capture(cargo.current_dir(project::root()), Duration::from_secs(300))?;
    ensure!(out.success, "{}{}", out.stdout, out.stderr);
    let line = out.stdout.lines().find(|line| line.starts_with("test result: ok."));
    let line = line.context("cargo ran no tests")?;
    ensure!(!line.contains(" 0 passed"), "cargo found no tests to run: {line}");
    Ok(())
}
