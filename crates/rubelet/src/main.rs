//! The rubelet program: parses its command line and runs the command.

use std::process::ExitCode;

use rubelet::{
    cli::{self, Command, Options},
    logging, run,
    world::Clock,
};
use rubelet_kube::error_chain;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match Command::parse(&words, cli::this_host()) {
        Ok(Command::Run(options)) => run_agent(&options),
        Ok(Command::ConfigCheck(sources)) => match cli::report(&sources, cli::this_host()) {
            Ok(report) => print(&report),
            Err(problems) => fail(&problems.join("\n")),
        },
        Ok(Command::Pods(args)) => cli::pods::run(args),
        Ok(Command::Node(args)) => cli::node::run(args),
        Ok(Command::Explain(args)) => cli::explain::run(args),
        Ok(Command::Logs(args)) => cli::logs::run(args),
        Ok(Command::Events(args)) => cli::events::run(args),
        Ok(Command::Version(text) | Command::Help(text)) => print(&text),
        Err(failure) => fail(&failure.to_string()),
    }
}

fn run_agent(options: &Options) -> ExitCode {
    logging::start(logging::Logging::of(&options.config.logging), Clock::system());
    // One thread for everything that does not block; blocking file calls have a small pool.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(64)
        .thread_keep_alive(std::time::Duration::from_secs(5))
        .build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(run::run(options)));
    logging::finish(result.as_ref().err().map(|error| format!("rubelet: {}\n", error_chain(error.as_ref()))));
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A closed pipe is not a failure.
fn print(text: &str) -> ExitCode {
    use std::io::Write as _;
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

fn fail(problem: &str) -> ExitCode {
    eprintln!("rubelet: {problem}");
    ExitCode::FAILURE
}
