//! The project's own commands: `cargo xtask up`, `down`, `test`, `check`, `sim`, `model`, `cost`, `fuzz`, `e2e`, `vm`,
//! `conformance`, `bench`, `chaos`, `churn`, `volumes`, `gen`.
//!
//! Owns: the command line. Each command is a file, or a separate program.

mod check;
mod cost;
mod fuzz;
mod hand_over;
mod model;
mod sim;
mod test;
mod up;

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use rubelet_testbed::cli::{self, runtime};

fn main() -> ExitCode {
    cli::conclude(run(&command().get_matches()))
}

fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    match matches.subcommand() {
        Some(("up", args)) if args.get_flag("runtime-only") => up::runtime_only(runtime(args)?)?,
        Some(("up", args)) if args.get_flag("control-plane-only") || args.get_flag("cluster") => {
            return hand_over::to("rubelet-e2e");
        }
        Some(("up", args)) => up::up(runtime(args)?)?,
        Some(("down", _)) => up::down()?,
        Some(("test", _)) => return Ok(test::run()?.conclude()),
        Some(("check", _)) => check::run()?,
        Some(("cost", args)) => cost::run(args.get_one("pods").copied().unwrap_or(cost::MANY_PODS))?,
        Some(("fuzz", args)) => {
            let targets: Vec<String> = args.get_many("target").into_iter().flatten().cloned().collect();
            fuzz::run(args.get_one("minutes").copied().unwrap_or(FUZZ_MINUTES), &targets)?;
        }
        Some(("model", _)) => model::run()?,
        Some(("sim", args)) => sim::run(&args.get_many("args").into_iter().flatten().cloned().collect::<Vec<_>>())?,
        Some(("e2e" | "vm" | "conformance" | "bench" | "chaos" | "churn" | "volumes", _)) => {
            return hand_over::to("rubelet-e2e");
        }
        Some(("gen", _)) => return hand_over::to("rubelet-gen"),
        Some((other, _)) => unreachable!("clap knows no command `{other}`"),
        None => unreachable!("clap requires a command"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Of each target.
const FUZZ_MINUTES: u32 = 5;

fn command() -> Command {
    Command::new("cargo xtask")
        .about("The project's own commands")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(cli::up())
        .subcommand(Command::new("down").about("End what `up` started and remove everything it made"))
        .subcommand(
            Command::new("cost")
                .about("What one event costs the core with 10 pods and with many, in instructions")
                .arg(
                    Arg::new("pods")
                        .long("pods")
                        .value_name("N")
                        .value_parser(clap::value_parser!(u32).range(1..))
                        .help(format!("How many are many [default: {}]", cost::MANY_PODS)),
                ),
        )
        .subcommand(
            Command::new("sim")
                .about("Simulate the agent in virtual time, with faults: [--seeds N] [--seed S] [--minutes M]")
                .arg(Arg::new("args").num_args(0..).allow_hyphen_values(true).trailing_var_arg(true)),
        )
        .subcommand(Command::new("model").about("Explore every order of events in a pod's life, over the core"))
        .subcommand(fuzz_command())
        .subcommand(cli::e2e())
        .subcommand(cli::vm())
        .subcommand(cli::conformance())
        .subcommand(
            Command::new("test").about("All tests: check, unit tests, simulation, cost of an event, end to end"),
        )
        .subcommand(Command::new("check").about("Formatting, lints, and the rules of the house"))
        .subcommand(cli::bench())
        .subcommand(cli::chaos())
        .subcommand(cli::churn())
        .subcommand(cli::volumes())
        .subcommand(Command::new("gen").about("Make Rust of our .proto files"))
}

fn fuzz_command() -> Command {
    let minutes = Arg::new("minutes").long("minutes").value_name("N").value_parser(clap::value_parser!(u32).range(1..));
    Command::new("fuzz")
        .about("Run the fuzz targets under libFuzzer, one after another")
        .arg(minutes.help(format!("How long each runs [default: {FUZZ_MINUTES}]")))
        .arg(Arg::new("target").num_args(0..).value_name("TARGET").help("Only these targets"))
}
