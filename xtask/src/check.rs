//! `cargo xtask check`: formatting, lints, and the project's own rules.
//!
//! Owns: what is run, in which order. The rules are in `check/`.

mod licences;
mod limits;
mod references;
mod samples;
mod source;
mod tidy;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::bail;
use rubelet_testbed::{command::capture, progress::step, project};

/// The cheapest first.
pub fn run() -> anyhow::Result<()> {
    let root = project::root();
    step("tidy rules", || tidy::run(&root))?;
    step("licences", || licences::run(&root))?;
    advisories(&root)?;
    step("formatting", || cargo(&["fmt", "--all", "--check"]))?;
    step("lints", || cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"]))
}

/// Needs the program and a copy of its database, which is fetched elsewhere: the check itself works offline.
fn advisories(root: &Path) -> anyhow::Result<()> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let has_database = home.is_some_and(|home| home.join("advisory-dbs").is_dir());
    let version = capture(project::cargo(["deny", "--version"]).current_dir(root), Duration::from_secs(60));
    if !version.is_ok_and(|out| out.success) {
        println!("advisories … skipped: cargo-deny is not installed");
    } else if !has_database {
        println!("advisories … skipped: no database; `cargo deny fetch` gets one");
    } else {
        step("advisories", || cargo(&["deny", "--offline", "check", "advisories", "bans", "licenses", "sources"]))?;
    }
    Ok(())
}

fn cargo(args: &[&str]) -> anyhow::Result<()> {
    let mut cargo = project::cargo(args);
    let out = capture(cargo.current_dir(project::root()), Duration::from_secs(1800))?;
    if !out.success {
        bail!("`cargo {}` failed:\n{}{}", args.join(" "), out.stdout, out.stderr);
    }
    Ok(())
}
