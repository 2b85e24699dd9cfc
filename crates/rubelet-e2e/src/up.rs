//! `cargo xtask up --cluster`: a cluster of one node on this machine, with something running on it; `--control-plane-only`.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    Runtime,
    agent::{self, Agent, AgentOptions, Membership, NODE, Program},
    clock,
    command::show,
    kept, packages,
    progress::step,
    project, sweep_orphans, tail,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::control_plane::{ClusterPrograms, ControlPlane, ControlPlaneOptions};

/// The node is Rubelet, or `kubelet`, upstream's.
pub fn up(runtime: Option<Runtime>, kubelet: Option<&Path>) -> anyhow::Result<()> {
    packages::require_root()?;
    let program = match kubelet {
        Some(path) => Program::Upstream(path.to_owned()),
        None => Program::Rubelet(step("building Rubelet (release)", agent::build)?),
    };
    let programs = ClusterPrograms::ensure()?;
    let testbed = kept::open(runtime, Runtime::Containerd24)?;
    let plane = step("starting the control plane", || ControlPlane::open(&testbed.layout.dir, &programs))?;
    let membership = Membership {
        node: NODE.to_owned(),
        kubeconfig: plane.node_kubeconfig(NODE)?,
        bootstrap_kubeconfig: None,
        client_authority: plane.client_authority(),
    };
    let options = AgentOptions { cluster: Some(membership), ..AgentOptions::default() };
    let mut agent = Agent::new(&testbed, &program, &options)?;
    step("starting the node", || {
        agent.replace_running()?;
        agent.start()?;
        wait_ready(&plane).with_context(|| format!("the end of the agent's log:\n{}", tail(&agent.log(), 20)))
    })?;
    step("applying examples/cluster/", || {
        plane.kubectl(&["apply", "-f", &project::root().join("examples/cluster").display().to_string()])
    })?;
    step("waiting for the web servers", || {
        plane.kubectl(&["rollout", "status", "deployment/web", "daemonset/clock", "--timeout=50s"])
    })?;
    println!("\nexport KUBECONFIG={}", plane.admin_kubeconfig().display());
    println!("kubectl:       {}", plane.kubectl_program().display());
    println!("agent's log:   {}", agent.log().display());
    println!("Ctrl-C leaves this list and the cluster running; `cargo xtask down` ends and removes everything.\n");
    // A week.
    show(&mut plane.kubectl_command(&["get", "pods", "-o", "wide", "--watch"]), Duration::from_secs(7 * 86_400))
}

/// Only a control plane, until Ctrl-C: for running an agent by hand as the node `node`.
pub fn control_plane_only() -> anyhow::Result<()> {
    let programs = ClusterPrograms::ensure()?;
    sweep_orphans()?;
    let plane = step("starting a control plane", || ControlPlane::start(&programs, &ControlPlaneOptions::default()))?;
    println!("\nexport KUBECONFIG={}", plane.admin_kubeconfig().display());
    println!("kubectl:              {}", plane.kubectl_program().display());
    println!("node's kubeconfig:    {}  (the node is called `{NODE}`)", plane.node_kubeconfig(NODE)?.display());
    println!("bootstrap kubeconfig: {}", plane.bootstrap_kubeconfig().display());
    println!("client CA:            {}", plane.client_authority().display());
    println!("audit log:            {}", plane.audit_log().display());
    println!("Ctrl-C ends it and removes everything.");
    wait_for_interrupt()
}

fn wait_ready(plane: &ControlPlane) -> anyhow::Result<()> {
    let mut last = anyhow::anyhow!("never asked");
    let ready = clock::poll(Duration::from_secs(60), Duration::from_millis(200), || {
        let asked = plane.node_condition(NODE, "Ready").and_then(|ready| {
            ensure!(ready["status"] == "True", "the node's condition is {ready}");
            Ok(())
        });
        asked.map_err(|err| last = err).ok()
    });
    ready.ok_or(last).context("the node does not become ready")
}

/// Returns at SIGINT or SIGTERM.
fn wait_for_interrupt() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            biased;
            // Both are cancel safe: a lost signal is only another request to end.
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}
