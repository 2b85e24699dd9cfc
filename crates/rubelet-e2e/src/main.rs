//! The commands of `cargo xtask` that test or measure the built program: `e2e`, `vm`, `conformance`, `bench`, `chaos`,
//! `churn`, `volumes`, and `up` with a control plane.
//!
//! Owns: which command is which file. Their options are in `rubelet_testbed::cli`, because `xtask` documents them, too.

mod background;
mod bench;
mod chaos;
mod churn;
mod conformance;
mod control_plane;
mod debian;
mod dice;
mod e2e;
mod fuse;
mod up;
mod vm;
mod volumes;

use std::process::ExitCode;

use clap::{ArgMatches, Command};
use rubelet_testbed::{
    Runtime,
    cli::{self, filter, kubelet, runtime},
};

use crate::e2e::Tested;

fn main() -> ExitCode {
    let commands = [
        cli::up(),
        cli::e2e(),
        cli::vm(),
        cli::conformance(),
        cli::bench(),
        cli::chaos(),
        cli::churn(),
        cli::volumes(),
    ];
    let command = Command::new("cargo xtask").subcommand_required(true).subcommands(commands);
    cli::conclude(run(&command.get_matches()))
}

fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let runtimes = |args| anyhow::Ok(runtime(args)?.map_or(Runtime::ALL.to_vec(), |runtime| vec![runtime]));
    match matches.subcommand() {
        Some(("up", args)) if args.get_flag("control-plane-only") => up::control_plane_only()?,
        // Without a control plane, `xtask` itself runs `up`.
        Some(("up", args)) => up::up(runtime(args)?, kubelet(args))?,
        Some(("e2e", args)) => {
            return Ok(e2e::run(&runtimes(args)?, filter(args), &tested(args))?.conclude());
        }
        Some(("vm", args)) => {
            let (runtimes, filter) = (runtimes(args)?, filter(args).to_owned());
            return vm::run(&vm::Options { runtimes, filter, has_clusters: args.get_flag("cluster") });
        }
        Some(("conformance", args)) => return conformance::run(&conformance::Options::parse(args)?),
        Some(("chaos", args)) => return chaos::run(&chaos::Options::parse(args)?),
        Some(("churn", args)) => return churn::run(&churn::Options::parse(args)),
        Some(("volumes", args)) => return volumes::run(&volumes::Options::parse(args)),
        Some(("bench", args)) if args.get_flag("cluster") => {
            bench::cluster::run(runtime(args)?.unwrap_or(Runtime::Containerd24), kubelet(args))?;
        }
        Some(("bench", args)) if args.get_flag("port") => {
            bench::port::run(runtime(args)?.unwrap_or(Runtime::Containerd24), kubelet(args))?;
        }
        Some(("bench", args)) => bench::run(runtime(args)?.unwrap_or(Runtime::Containerd24), kubelet(args))?,
        Some((other, _)) => unreachable!("clap knows no command `{other}`"),
        None => unreachable!("clap requires a command"),
    }
    Ok(ExitCode::SUCCESS)
}

fn tested(args: &ArgMatches) -> Tested {
    let is_upstream = args.get_one::<String>("agent").is_some_and(|agent| agent == "upstream");
    let built = args.get_one::<String>("built");
    match (kubelet(args), built) {
        (Some(path), _) => Tested::Kubelet(path.to_owned()),
        (None, Some(path)) => Tested::Built { rubelet: path.into(), has_clusters: args.get_flag("built-cluster") },
        (None, None) if is_upstream => Tested::Upstream,
        (None, None) => Tested::Rubelet,
    }
}
