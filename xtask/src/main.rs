//! The project's own commands: `cargo xtask up`, `down`, `test`, `check`, `sim`, `e2e`, `vm`, `conformance`, `bench`,
//! `gen`.
//!
//! Owns: the command line. Each command is a file.

mod bench;
mod check;
mod cli;
mod clock;
mod command;
mod conformance;
mod debian;
mod e2e;
mod gen_protos;
mod go_tools;
mod image;
mod packages;
mod process;
mod progress;
mod project;
mod sim;
mod tally;
mod test;
mod testbed;
mod up;
mod vm;

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};

use crate::{
    cli::{filter, kubelet, runtime},
    e2e::Tested,
    testbed::Runtime,
};

fn main() -> ExitCode {
    match run(&command().get_matches()) {
        Ok(code) => code,
        Err(err) => {
            // Without a backtrace: these errors are for whoever typed the command.
            eprintln!("error: {err:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let runtimes = |args| anyhow::Ok(runtime(args)?.map_or(Runtime::ALL.to_vec(), |runtime| vec![runtime]));
    match matches.subcommand() {
        Some(("up", args)) if args.get_flag("runtime-only") => up::runtime_only(runtime(args)?)?,
        Some(("up", args)) if args.get_flag("control-plane-only") => up::cluster::control_plane_only()?,
        Some(("up", args)) if args.get_flag("cluster") => up::cluster::up(runtime(args)?, kubelet(args))?,
        Some(("up", args)) => up::up(runtime(args)?)?,
        Some(("down", _)) => up::down()?,
        Some(("test", _)) => return Ok(test::run()?.conclude()),
        Some(("check", _)) => check::run()?,
        Some(("sim", args)) => sim::run(&args.get_many("args").into_iter().flatten().cloned().collect::<Vec<_>>())?,
        Some(("e2e", args)) => {
            return Ok(e2e::run(&runtimes(args)?, filter(args), &tested(args))?.conclude());
        }
        Some(("vm", args)) => return vm::run(&runtimes(args)?, filter(args)),
        Some(("conformance", args)) => return conformance::run(&conformance::Options::parse(args)?),
        Some(("bench", args)) if args.get_flag("cluster") => {
            bench::cluster::run(runtime(args)?.unwrap_or(Runtime::Containerd24), kubelet(args))?;
        }
        Some(("bench", args)) if args.get_flag("port") => {
            bench::port::run(runtime(args)?.unwrap_or(Runtime::Containerd24), kubelet(args))?;
        }
        Some(("bench", args)) => bench::run(runtime(args)?.unwrap_or(Runtime::Containerd24), kubelet(args))?,
        Some(("gen", _)) => gen_protos::run()?,
        Some((other, _)) => unreachable!("clap knows no command `{other}`"),
        None => unreachable!("clap requires a command"),
    }
    Ok(ExitCode::SUCCESS)
}

fn command() -> Command {
    Command::new("cargo xtask")
        .about("The project's own commands")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(cli::up())
        .subcommand(Command::new("down").about("End what `up` started and remove everything it made"))
        .subcommand(
            Command::new("sim")
                .about("Simulate the agent in virtual time, with faults: [--seeds N] [--seed S] [--minutes M]")
                .arg(Arg::new("args").num_args(0..).allow_hyphen_values(true).trailing_var_arg(true)),
        )
        .subcommand(cli::e2e())
        .subcommand(cli::vm())
        .subcommand(cli::conformance())
        .subcommand(Command::new("test").about("All tests: check, unit tests, simulation, end to end"))
        .subcommand(Command::new("check").about("Formatting, lints, and the rules of the house"))
        .subcommand(cli::bench())
        .subcommand(Command::new("gen").about("Make Rust of our .proto files"))
}

fn tested(args: &ArgMatches) -> Tested {
    let is_upstream = args.get_one::<String>("agent").is_some_and(|agent| agent == "upstream");
    let built = args.get_one::<String>("built");
    match (kubelet(args), built) {
        (Some(path), _) => Tested::Kubelet(path.to_owned()),
        (None, Some(path)) => Tested::Built(path.into()),
        (None, None) if is_upstream => Tested::Upstream,
        (None, None) => Tested::Rubelet,
    }
}
