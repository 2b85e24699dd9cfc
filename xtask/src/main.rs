//! The project's own commands: `cargo xtask up`, `down`, `test`, `check`, `sim`, `e2e`, `bench`, `gen`.
//!
//! Owns: the command line. Each command is a file.

mod clock;
mod command;
mod e2e;
mod gen_protos;
mod go_tools;
mod image;
mod packages;
mod process;
mod progress;
mod project;
mod testbed;
mod up;

use clap::{Arg, ArgMatches, Command};

use crate::testbed::Runtime;

fn main() -> anyhow::Result<()> {
    let matches = cli().get_matches();
    match matches.subcommand() {
        Some(("up", args)) => up::up(runtimes(args)?.first().copied().unwrap_or(Runtime::Debian16)),
        Some(("down", _)) => up::down(),
        Some(("e2e", args)) => {
            let runtimes = runtimes(args)?;
            let runtimes = if runtimes.is_empty() { Runtime::ALL.to_vec() } else { runtimes };
            let filter = args.get_one::<String>("filter").map_or("", String::as_str);
            e2e::run(&runtimes, filter)?.into_result()
        }
        Some(("gen", _)) => gen_protos::run(),
        Some((other, _)) => unreachable!("clap knows no command `{other}`"),
        None => unreachable!("clap requires a command"),
    }
}

fn cli() -> Command {
    let runtime = Arg::new("runtime").long("runtime").value_name("debian|2.4").help("Which containerd to use");
    Command::new("cargo xtask")
        .about("The project's own commands")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("up")
                .about("Run Rubelet on this machine, with a containerd of its own, on the manifests in examples/")
                .arg(runtime.clone()),
        )
        .subcommand(Command::new("down").about("End what `up` started and remove everything it made"))
        .subcommand(
            Command::new("e2e")
                .about("End-to-end tests on real containerds: Debian's 1.6 and 2.4")
                .arg(runtime)
                .arg(Arg::new("filter").long("filter").value_name("WORDS").help("Only tests whose name contains this")),
        )
        .subcommand(Command::new("gen").about("Make Rust of our .proto files"))
}

fn runtimes(args: &ArgMatches) -> anyhow::Result<Vec<Runtime>> {
    args.get_one::<String>("runtime").map(|name| Runtime::parse(name)).into_iter().collect()
}
