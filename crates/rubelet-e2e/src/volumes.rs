//! `cargo xtask volumes`: a crowd of pods with ten volumes each on a node of a real cluster.
//!
//! Owns: setting the node up; `e2e/cluster/csi/crowd.rs` is what happens on it. The same with few pods is a test of `e2e`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::ArgMatches;
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{self, Program},
    clock::Stopwatch,
    progress::step,
    sweep_orphans,
};

use crate::{
    control_plane::upstream_kubelet,
    e2e::cluster::{ClusterNode, Plane, Planes, csi},
};

#[derive(Debug)]
pub struct Options {
    is_upstream: bool,
    built: Option<PathBuf>,
    pods: u32,
}

impl Options {
    pub fn parse(args: &ArgMatches) -> Self {
        Options {
            is_upstream: args.get_one::<String>("agent").is_some_and(|agent| agent == "upstream"),
            built: args.get_one::<String>("built").map(PathBuf::from),
            pods: args.get_one::<u32>("pods").copied().unwrap_or(1),
        }
    }
}

pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let program = match &options.built {
        Some(built) => Program::Rubelet(built.canonicalize().with_context(|| built.display().to_string())?),
        None if options.is_upstream => Program::Upstream(upstream_kubelet()?),
        None => Program::Rubelet(step("building Rubelet (release)", agent::build)?),
    };
    let programs = Programs::ensure(Runtime::Containerd24)?;
    csi::build()?;
    let planes = Planes::ensure()?;
    sweep_orphans()?;
    let watch = Stopwatch::start();
    let mut cluster = ClusterNode::new(&planes, Plane::Shared, Testbed::start(&programs)?, &program)?;
    let result = csi::crowd_of(&mut cluster, usize::try_from(options.pods)?);
    match result {
        Ok(()) => println!("{} pods with ten volumes each came and went in {:.0} s", options.pods, watch.secs()),
        Err(err) => {
            println!("{}", cluster.diagnosis());
            return Err(err);
        }
    }
    Ok(ExitCode::SUCCESS)
}
