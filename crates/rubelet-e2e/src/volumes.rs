//! `cargo xtask volumes`: a crowd of pods with ten volumes each on a node of a real cluster, on Rubelet and on upstream's kubelet.
//!
//! Owns: setting the nodes up, and the table; `e2e/cluster/csi/crowd.rs` is what happens on them. The same with few pods is a test
//! of `e2e`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::ArgMatches;
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{self, Program},
    progress::step,
    sweep_orphans,
};

use crate::{
    control_plane::upstream_kubelet,
    e2e::cluster::{ClusterNode, Plane, Planes, csi, ownership},
};

#[derive(Debug)]
pub struct Options {
    /// `None`: both, one after the other.
    agent: Option<String>,
    built: Option<PathBuf>,
    pods: u32,
    files: u32,
}

impl Options {
    pub fn parse(args: &ArgMatches) -> Self {
        Options {
            agent: args.get_one::<String>("agent").cloned(),
            built: args.get_one::<String>("built").map(PathBuf::from),
            pods: args.get_one::<u32>("pods").copied().unwrap_or(1),
            files: args.get_one::<u32>("files").copied().unwrap_or(1),
        }
    }

    fn has(&self, agent: &str) -> bool {
        self.agent.as_deref().is_none_or(|only| only == agent)
    }

    fn rubelet(&self) -> anyhow::Result<PathBuf> {
        match &self.built {
            Some(built) => built.canonicalize().with_context(|| built.display().to_string()),
            None => step("building Rubelet (release)", agent::build),
        }
    }
}

pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let mut agents = Vec::new();
    if options.has("rubelet") {
        agents.push(("Rubelet", Program::Rubelet(options.rubelet()?)));
    }
    if options.has("upstream") {
        agents.push(("upstream", Program::Upstream(upstream_kubelet()?)));
    }
    let programs = Programs::ensure(Runtime::Containerd24)?;
    csi::build()?;
    let planes = Planes::ensure()?;
    sweep_orphans()?;
    let mut costs = Vec::new();
    for (name, program) in &agents {
        println!("{} pods with ten volumes each on {name} …", options.pods);
        let pods = usize::try_from(options.pods)?;
        let crowd = on_a_node(&planes, &programs, program, |cluster| csi::crowd_of(cluster, pods))?;
        println!("a volume of {} files on {name} …", options.files);
        let files = usize::try_from(options.files)?;
        let files = on_a_node(&planes, &programs, program, |cluster| ownership::group_of(cluster, files))?;
        costs.push(Cost { crowd, files });
    }
    show(&agents, &costs);
    Ok(ExitCode::SUCCESS)
}

fn on_a_node<T>(
    planes: &Planes,
    programs: &Programs,
    program: &Program,
    run: impl FnOnce(&mut ClusterNode) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut cluster = ClusterNode::new(planes, Plane::Shared, Testbed::start(programs)?, program)?;
    run(&mut cluster).inspect_err(|_| println!("{}", cluster.diagnosis()))
}

struct Cost {
    crowd: csi::Cost,
    files: ownership::Cost,
}

type Row = (&'static str, &'static str, fn(&Cost) -> f64);

const ROWS: &[Row] = &[
    ("pods run, the agent killed meanwhile", "s", |cost| cost.crowd.start_secs),
    ("containers of them started again", "", |cost| cost.crowd.restarts as f64),
    ("pods deleted, nothing of them left", "s", |cost| cost.crowd.end_secs),
    ("the agent's processor for them", "s", |cost| cost.crowd.cpu_secs),
    ("files get the group of their pod", "s", |cost| cost.files.start_secs),
    ("a pod that looks at their root first", "s", |cost| cost.files.again_secs),
    ("the agent's memory after that", "MB", |cost| cost.files.resident_mb),
];

fn show(agents: &[(&str, Program)], costs: &[Cost]) {
    for (what, unit, of) in ROWS {
        let figure = |name: &str, cost| format!("{name} {:.1} {unit}", of(cost)).trim_end().to_owned();
        let figures: Vec<_> = agents.iter().zip(costs).map(|((name, _), cost)| figure(name, cost)).collect();
        let ratio = match costs {
            [ours, theirs] if of(theirs) > 0.0 => format!(" ({:.2} times)", of(ours) / of(theirs)),
            _ => String::new(),
        };
        println!("{what}: {}{ratio}", figures.join(", "));
    }
}
