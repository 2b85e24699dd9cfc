//! `cargo xtask sim`: runs the simulator.

use std::time::Duration;

use rubelet_testbed::{command::show, project};

/// An hour of virtual time is short, but many seeds may take long.
const LIMIT: Duration = Duration::from_secs(24 * 3600);

pub fn run(args: &[String]) -> anyhow::Result<()> {
    let mut cargo = project::cargo(["run", "--quiet", "--profile", "sim", "--package", "rubelet-sim", "--"]);
    show(cargo.args(args).current_dir(project::root()), LIMIT)
}
