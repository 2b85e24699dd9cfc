//! `cargo xtask model`: every order of events in a pod's life, explored over the core.
//!
//! Owns: how the exploration is started. Its scenarios are tests of the core (`core/agent/tests/model.rs`): the small ones run
//! with all tests, the others only here.

use std::time::Duration;

use rubelet_testbed::{command::show, project};

/// On a busy machine; alone it takes a fraction of it.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

pub fn run() -> anyhow::Result<()> {
    let mut cargo = project::cargo(["test", "--quiet", "--profile", "sim", "--package", "rubelet-core", "--lib", "--"]);
    cargo.args(["agent::tests::model", "--include-ignored", "--nocapture"]);
    show(cargo.current_dir(project::root()), LIMIT)
}
