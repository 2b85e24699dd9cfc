//! The testbed of `cargo xtask up`, which outlives the command.
//!
//! Owns: the `.rubelet` directory in the project, which holds all its state.

use std::{fs, path::PathBuf};

use crate::{Programs, Runtime, Testbed, progress::step, project};

/// Keeps the running runtime, unless another is requested.
pub fn open(asked: Option<Runtime>, default: Runtime) -> anyhow::Result<Testbed> {
    let file = dir().join("runtime");
    let present = fs::read_to_string(&file).ok().map(|name| Runtime::parse(&name)).transpose()?;
    let runtime = asked.or(present).unwrap_or(default);
    if let Some(present) = present.filter(|present| *present != runtime) {
        // Two containerd versions do not share state.
        anyhow::bail!("containerd ({}) is up; run `cargo xtask down` first", present.as_str());
    }
    let programs = Programs::ensure(runtime)?;
    step(&format!("starting containerd ({})", runtime.as_str()), || {
        let testbed = Testbed::open(&dir(), &programs)?;
        fs::write(file, runtime.as_str())?;
        Ok(testbed)
    })
}

pub fn dir() -> PathBuf {
    project::root().join(".rubelet")
}
