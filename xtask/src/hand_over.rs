//! Commands that are separate programs: their dependencies take a minute to build, and the other commands need none of them.
//!
//! Owns: how cargo builds and runs them.

use std::{
    ffi::OsStr,
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode, Stdio},
};

use anyhow::Context as _;
use rubelet_testbed::{command::describe, project};

/// Replaces this process, with its arguments and terminal: the program gets the signals, and its exit code is ours.
pub fn to(package: &str) -> anyhow::Result<ExitCode> {
    let mut program = program(package, std::env::args_os().skip(1));
    let err = program.stdin(Stdio::inherit()).exec();
    Err(err).with_context(|| format!("cannot run `{}`", describe(&program)))
}

/// The caller's directory, because paths in arguments are relative to it.
pub fn program<S: AsRef<OsStr>>(package: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut cargo = project::cargo(["run", "--package", package, "--manifest-path"]);
    cargo.arg(project::root().join("Cargo.toml")).arg("--").args(args);
    cargo
}
