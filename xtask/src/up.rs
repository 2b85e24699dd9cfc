//! `cargo xtask up` and `down`: starts and removes Rubelet on this machine.
//!
//! `up` may be run again: running parts are kept, and the agent is replaced by the one just built.

use std::time::Duration;

use anyhow::Context as _;
use rubelet_testbed::{
    Runtime,
    agent::{self, Agent, AgentOptions, Program},
    command::{command, show},
    kept, packages,
    progress::step,
    project, sweep, tail,
};

pub fn up(runtime: Option<Runtime>) -> anyhow::Result<()> {
    packages::require_root()?;
    let binary = step("building Rubelet (release)", agent::build)?;
    let testbed = kept::open(runtime, Runtime::Debian16)?;
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
    // A week: longer than anyone watches the table.
    let limit = Duration::from_secs(7 * 86_400);
    show(&mut command(&binary, ["pods", "--watch", &flag]), limit)
        .with_context(|| format!("the end of the agent's log:\n{}", tail(&agent.log(), 20)))
}

/// Only the containerd of `up`: for running an agent by hand.
pub fn runtime_only(runtime: Option<Runtime>) -> anyhow::Result<()> {
    packages::require_root()?;
    let testbed = kept::open(runtime, Runtime::Debian16)?;
    println!("containerd listens on {}; `cargo xtask down` removes it", testbed.layout.socket().display());
    Ok(())
}

pub fn down() -> anyhow::Result<()> {
    if !kept::dir().exists() {
        println!("nothing to do: {} does not exist", kept::dir().display());
        return Ok(());
    }
    packages::require_root()?;
    step("ending everything that `up` started, removing what it made", || sweep::sweep(&kept::dir()))
}
