//! Commands that are programs of their own: what they are made of takes a minute to build, and the others need none of it.
//!
//! Owns: how cargo builds and runs them.

use std::{
    ffi::OsStr,
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode, Stdio},
};

use anyhow::Context as _;
use rubelet_testbed::{command::describe, project};

/// The program takes our place, with our arguments and our terminal: it gets the signals, and its exit code is ours.
pub fn to(package: &str) -> anyhow::Result<ExitCode> {
    let mut program = program(package, std::env::args_os().skip(1));
    let err = program.stdin(Stdio::inherit()).exec();
    Err(err).with_context(|| format!("cannot run `{}`", describe(&program)))
}

/// Where we were called, because paths among the arguments begin there.
pub fn program<S: AsRef<OsStr>>(package: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut cargo = project::cargo(["run", "--package", package, "--manifest-path"]);
    cargo.arg(project::root().join("Cargo.toml")).arg("--").args(args);
    cargo
}
