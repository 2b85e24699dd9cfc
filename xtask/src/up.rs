//! `cargo xtask up` and `down`: Rubelet on this machine, and everything gone again.
//!
//! Owns: the `.rubelet` directory in the project, which holds all state. `up` may be run again: what runs goes on, and the
//! agent is replaced by the one just built.

pub mod cluster;

use std::{fs, path::PathBuf, time::Duration};

use anyhow::Context as _;

use crate::{
    command::{command, output, show},
    packages,
    progress::step,
    project,
    testbed::{
        Programs, Runtime, Testbed,
        agent::{Agent, AgentOptions, Program},
        sweep,
    },
};

pub fn up(runtime: Option<Runtime>) -> anyhow::Result<()> {
    packages::require_root()?;
    let binary = step("building Rubelet (release)", build)?;
    let testbed = open(runtime, Runtime::Debian16)?;
    let options = AgentOptions { manifests: Some(project::root().join("examples")), ..AgentOptions::default() };
    let mut agent = Agent::new(&testbed, &Program::Rubelet(binary.clone()), &options)?;
    step("starting Rubelet on examples/", || {
        agent.replace_running()?;
        agent.start()
    })?;
    let root_dir = agent.root_dir();
    let flag = format!("--root-dir={}", root_dir.display());
    println!("\nrubelet's log: {}", agent.log().display());
    println!("try also:      {} explain web {flag}", binary.display());
    println!("Ctrl-C leaves this table and the pods running; `cargo xtask down` ends and removes everything.\n");
    // A week: somebody may like to watch.
    let limit = Duration::from_secs(7 * 86_400);
    show(&mut command(&binary, ["pods", "--watch", &flag]), limit)
        .with_context(|| format!("the end of the agent's log:\n{}", crate::testbed::tail(&agent.log(), 20)))
}

/// Only the containerd of `up`: for running an agent by hand.
pub fn runtime_only(runtime: Option<Runtime>) -> anyhow::Result<()> {
    packages::require_root()?;
    let testbed = open(runtime, Runtime::Debian16)?;
    println!("containerd listens on {}; `cargo xtask down` removes it", testbed.layout.socket().display());
    Ok(())
}

pub fn down() -> anyhow::Result<()> {
    if !state_dir().exists() {
        println!("nothing to do: {} does not exist", state_dir().display());
        return Ok(());
    }
    packages::require_root()?;
    step("ending everything that `up` started, removing what it made", || sweep::sweep(&state_dir()))
}

/// Goes on with the runtime that is up, unless another is asked for.
fn open(asked: Option<Runtime>, default: Runtime) -> anyhow::Result<Testbed> {
    let file = state_dir().join("runtime");
    let present = fs::read_to_string(&file).ok().map(|name| Runtime::parse(&name)).transpose()?;
    let runtime = asked.or(present).unwrap_or(default);
    if let Some(present) = present.filter(|present| *present != runtime) {
        // The state of one containerd is not the other's.
        anyhow::bail!("containerd ({}) is up; run `cargo xtask down` first", present.as_str());
    }
    let programs = Programs::ensure(runtime)?;
    step(&format!("starting containerd ({})", runtime.as_str()), || {
        let testbed = Testbed::open(&state_dir(), &programs)?;
        fs::write(file, runtime.as_str())?;
        Ok(testbed)
    })
}

fn state_dir() -> PathBuf {
    project::root().join(".rubelet")
}

/// Builds what ships.
pub fn build() -> anyhow::Result<PathBuf> {
    let mut cargo = command(project::cargo(), ["build", "--release", "--package", "rubelet"]);
    output(cargo.current_dir(project::root()), Duration::from_secs(1800))?;
    Ok(project::target().join("release/rubelet"))
}
