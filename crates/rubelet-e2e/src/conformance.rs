//! `cargo xtask conformance`: upstream's own suite on a Rubelet node.
//!
//! Owns: the cluster of the suite, and the order of steps. The output is kept under
//! `target/conformance/`, with the logs of the agent and of containerd.

mod images;
mod leftovers;
mod report;
mod suite;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::ArgMatches;
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{Agent, AgentOptions, Membership, NODE, Program},
    cli::PROCESSES,
    clock, go_tools,
    progress::step,
    project, sweep_orphans, tail,
};
use serde_json::Value;

use self::{leftovers::Leftovers, report::Report, suite::Suite};
use crate::{
    control_plane::{ClusterPrograms, ControlPlane, ControlPlaneOptions, ServiceAddress, upstream_kubelet},
    e2e,
};

#[derive(Debug)]
pub struct Options {
    focus: String,
    skip: String,
    processes: u16,
    agent: Subject,
}

/// The agent under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Rubelet,
    /// Upstream's own kubelet: what it fails here, this testbed does not support.
    Upstream,
}

impl Subject {
    fn as_str(self) -> &'static str {
        match self {
            Subject::Rubelet => "rubelet",
            Subject::Upstream => "upstream",
        }
    }
}

impl Options {
    pub fn parse(args: &ArgMatches) -> anyhow::Result<Self> {
        let text = |name: &str| args.get_one::<String>(name).cloned().unwrap_or_default();
        Ok(Options {
            focus: text("focus"),
            skip: text("skip"),
            processes: args.get_one("procs").copied().unwrap_or(PROCESSES),
            agent: match text("agent").as_str() {
                "upstream" => Subject::Upstream,
                "rubelet" => Subject::Rubelet,
                other => bail!("no agent is called `{other}`"),
            },
        })
    }
}

pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let programs = Programs::ensure(Runtime::Containerd24)?;
    let cluster_programs = ClusterPrograms::ensure()?;
    let bin = go_tools::ensure(&[go_tools::E2E_TOOLS, go_tools::E2E_SUITE])?;
    let images = images::ensure(&bin)?;
    let out = project::target().join("conformance").join(options.agent.as_str());
    fs::create_dir_all(&out)?;
    let program = match options.agent {
        Subject::Upstream => Program::Upstream(upstream_kubelet()?),
        Subject::Rubelet => Program::Rubelet(step("building Rubelet (dev)", || build(&out))?),
    };
    sweep_orphans()?;
    // Dropped after the testbed: what drivers have mounted is gone by then.
    let _leftovers = Leftovers::of_this_run();
    let plane =
        step("starting a control plane", || ControlPlane::start(&cluster_programs, &ControlPlaneOptions::default()))?;
    let testbed = step("starting containerd and importing the images", || {
        let testbed = Testbed::start(&programs)?;
        for archive in &images {
            testbed.import(archive)?;
        }
        Ok(testbed)
    })?;
    let _service = ServiceAddress::serve(&plane, &testbed)?;
    let membership = Membership {
        node: NODE.to_owned(),
        kubeconfig: plane.node_kubeconfig(NODE)?,
        bootstrap_kubeconfig: None,
        client_authority: plane.client_authority(),
    };
    // A short name: the sockets of the suite's CSI drivers have long ones, and a socket's path has at most 107 bytes.
    let root_dir = Some(testbed.layout.dir.join("k"));
    let agent_options = AgentOptions { cluster: Some(membership), root_dir, ..AgentOptions::default() };
    let mut agent = Agent::new(&testbed, &program, &agent_options)?;
    step("starting the agent and waiting until the node is ready", || {
        agent.spawn()?;
        wait_ready(&plane).with_context(|| format!("the end of the agent's log:\n{}", tail(&agent.log(), 20)))
    })?;
    let suite = Suite {
        bin: &bin,
        out: &out,
        kubeconfig: &plane.admin_kubeconfig(),
        kubectl: plane.kubectl_program(),
        root_dir: &agent.root_dir(),
    };
    let ran = suite.run(options);
    // The testbed is removed with its directory; logs that explain failures are kept.
    keep(&agent.log(), &out.join("agent.log"));
    keep(&testbed.layout.containerd_log(), &out.join("containerd.log"));
    agent.stop();
    let report = Report::read(&ran?)?;
    let text = report.to_markdown(options.agent.as_str());
    fs::write(out.join("report.md"), &text)?;
    println!("\n{text}\nthe report, the suite's output and the logs are in {}", out.display());
    Ok(if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn wait_ready(plane: &ControlPlane) -> anyhow::Result<()> {
    let is_ready = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    };
    let ready = clock::poll(Duration::from_secs(120), Duration::from_millis(200), || {
        plane.api().get(&format!("/api/v1/nodes/{NODE}")).ok().filter(is_ready)
    });
    ready.map(drop).context("the node does not become ready")
}

/// A copy of the program, so that a concurrent build does not change the run.
fn build(out: &Path) -> anyhow::Result<PathBuf> {
    let copy = out.join("rubelet");
    e2e::build(&copy)?;
    Ok(copy)
}

/// A warning, not a failure.
fn keep(log: &Path, to: &Path) {
    if let Err(err) = fs::copy(log, to) {
        eprintln!("{} is not kept: {err}", log.display());
    }
}
