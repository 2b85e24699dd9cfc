//! `cargo xtask check`: formatting, lints, and the project's own rules.
//!
//! Owns: what is run, in which order. The rules are in `check/`.

mod limits;
mod references;
mod samples;
mod source;
mod tidy;

use std::time::Duration;

use anyhow::bail;
use rubelet_testbed::{command::capture, progress::step, project};

/// The cheapest first.
pub fn run() -> anyhow::Result<()> {
    let root = project::root();
    step("tidy rules", || tidy::run(&root))?;
    step("formatting", || cargo(&["fmt", "--all", "--check"]))?;
    step("lints", || cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"]))
}

fn cargo(args: &[&str]) -> anyhow::Result<()> {
    let mut cargo = project::cargo(args);
    let out = capture(cargo.current_dir(project::root()), Duration::from_secs(1800))?;
    if !out.success {
        bail!("`cargo {}` failed:\n{}{}", args.join(" "), out.stdout, out.stderr);
    }
    Ok(())
}
