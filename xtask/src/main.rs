//! The project's own commands: `cargo xtask up`, `down`, `test`, `check`, `sim`, `e2e`, `vm`, `conformance`, `bench`,
//! `gen`.
//!
//! Owns: the command line. Each command is a file.

mod bench;
mod check;
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
mod test;
mod testbed;
mod up;
mod vm;

use std::{path::Path, process::ExitCode};

use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::{e2e::Tested, testbed::Runtime};

fn main() -> ExitCode {
    match run(&cli().get_matches()) {
        Ok(code) => code,
        Err(err) => {
            // Without a backtrace: these errors are for whoever typed the command.
            eprintln!("error: {err:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let runtime = |args: &ArgMatches| args.get_one::<String>("runtime").map(|name| Runtime::parse(name)).transpose();
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

fn cli() -> Command {
    let runtime = Arg::new("runtime").long("runtime").value_name("debian|2.4").help("Which containerd to use");
    let kubelet = Arg::new("kubelet").long("kubelet").value_name("PATH");
    let filter = Arg::new("filter").long("filter").value_name("WORDS").help("Only tests whose name contains this");
    Command::new("cargo xtask")
        .about("The project's own commands")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("up")
                .about("Run Rubelet on this machine, with a containerd of its own, on the manifests in examples/")
                .arg(runtime.clone())
                .arg(
                    Arg::new("runtime-only")
                        .long("runtime-only")
                        .action(ArgAction::SetTrue)
                        .help("Only start containerd, for running an agent by hand"),
                )
                .arg(
                    Arg::new("cluster")
                        .long("cluster")
                        .action(ArgAction::SetTrue)
                        .help("With a control plane, as its one node, on the objects in examples/cluster/"),
                )
                .arg(kubelet.clone().requires("cluster").help("Upstream's kubelet as the node, instead of Rubelet"))
                .arg(
                    Arg::new("control-plane-only")
                        .long("control-plane-only")
                        .action(ArgAction::SetTrue)
                        .help("Only run a control plane until Ctrl-C, for running an agent by hand"),
                ),
        )
        .subcommand(Command::new("down").about("End what `up` started and remove everything it made"))
        .subcommand(
            Command::new("sim")
                .about("Simulate the agent in virtual time, with faults: [--seeds N] [--seed S] [--minutes M]")
                .arg(Arg::new("args").num_args(0..).allow_hyphen_values(true).trailing_var_arg(true)),
        )
        .subcommand(e2e_cli(runtime.clone(), filter.clone(), kubelet.clone()))
        .subcommand(
            Command::new("vm")
                .about("End-to-end tests on an emulated machine with systemd and cgroup version 2, without clusters")
                .arg(runtime.clone())
                .arg(filter),
        )
        .subcommand(conformance::cli())
        .subcommand(Command::new("test").about("All tests: check, unit tests, simulation, end to end"))
        .subcommand(Command::new("check").about("Formatting, lints, and the rules of the house"))
        .subcommand(bench::cli(runtime, kubelet))
        .subcommand(Command::new("gen").about("Make Rust of our .proto files"))
}

fn e2e_cli(runtime: Arg, filter: Arg, kubelet: Arg) -> Command {
    Command::new("e2e")
        .about("End-to-end tests on real containerds: Debian's 1.6 and 2.4")
        .arg(runtime)
        .arg(filter)
        .arg(
            Arg::new("agent")
                .long("agent")
                .value_name("rubelet|upstream")
                .value_parser(["rubelet", "upstream"])
                .default_value("rubelet")
                .help("Whom to test; upstream's kubelet shows whether the tests are right"),
        )
        .arg(kubelet.help("Test this kubelet of upstream's, instead of building one"))
        .arg(
            Arg::new("built")
                .long("built")
                .value_name("PATH")
                .help("Test this Rubelet, with what needs no compiler and no cluster"),
        )
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

fn filter(args: &ArgMatches) -> &str {
    args.get_one::<String>("filter").map_or("", String::as_str)
}

/// Upstream's kubelet, when one is given.
fn kubelet(args: &ArgMatches) -> Option<&Path> {
    args.get_one::<String>("kubelet").map(Path::new)
}
