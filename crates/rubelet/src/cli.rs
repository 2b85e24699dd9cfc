//! The command line: what to do, and with which settings.
//!
//! Owns: the commands and their arguments. Never: does any of it; `main.rs` does.
//! Upstream: `cmd/kubelet/app/server.go` (NewKubeletCommand).

pub mod acted_on;
mod arguments;
mod client;
pub mod events;
pub mod explain;
pub mod flags;
mod help;
mod load;
pub mod logs;
mod options;
pub mod pods;
mod print;
mod values;

use std::fmt;

use rubelet_core::config::Host;
use serde_json::Value;

pub use self::{
    load::Sources,
    options::{Flags, Options, host_name, report, this_host},
};

/// The Kubernetes version whose behaviour this is, as `kubeadm` and others want to read it.
pub const KUBERNETES_VERSION: &str = concat!("v1.36.3+rubelet.", env!("CARGO_PKG_VERSION"));

#[derive(Debug)]
pub enum Command {
    Run(Box<Options>),
    ConfigCheck(Sources),
    /// These four read their own arguments.
    Pods(Vec<String>),
    Explain(Vec<String>),
    Logs(Vec<String>),
    Events(Vec<String>),
    /// To be printed, then nothing else.
    Version(String),
    Help(String),
}

/// Why nothing is done: everything that is wrong, each naming what it is about and what is allowed.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    pub during: &'static str,
    pub problems: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [only] => write!(f, "{}: {only}", self.during),
            problems => {
                write!(f, "{}, {} problems:", self.during, problems.len())?;
                problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for Failure {}

impl Command {
    /// `words` without the program's name. Reads the configuration files that are named and touches nothing.
    pub fn parse(words: &[String], host: Host) -> Result<Command, Failure> {
        if let Some((first, rest)) = words.split_first() {
            match first.as_str() {
                "pods" => return Ok(Command::Pods(rest.to_vec())),
                "explain" => return Ok(Command::Explain(rest.to_vec())),
                "logs" => return Ok(Command::Logs(rest.to_vec())),
                "events" => return Ok(Command::Events(rest.to_vec())),
                "config" => return config_check(rest),
                _ => {}
            }
        }
        let arguments = arguments::parse(words).map_err(flag_failure)?;
        if let Some(word) = arguments.positional.first() {
            return Err(Failure { during: "command line", problems: vec![format!("unknown command {word}")] });
        }
        if arguments.help {
            return Ok(Command::Help(help::text()));
        }
        match &arguments.version {
            None => {}
            Some(Value::String(raw)) if raw == "raw" => return Ok(Command::Version(raw_version())),
            // `--version=v1.2.3` makes upstream claim another version; we print what we are.
            Some(_) => return Ok(Command::Version(format!("Kubernetes {KUBERNETES_VERSION}\n"))),
        }
        let options = Options::load(arguments, host)
            .map_err(|problems| Failure { during: "failed to load the configuration", problems })?;
        Ok(Command::Run(Box::new(options)))
    }
}

fn config_check(words: &[String]) -> Result<Command, Failure> {
    let usage =
        || Failure { during: "usage", problems: vec!["rubelet config check FILE [--config-dir DIR]".to_owned()] };
    let (check, rest) = words.split_first().ok_or_else(usage)?;
    let arguments = arguments::parse(rest).map_err(flag_failure)?;
    let only_dir = arguments.fields.is_empty() && arguments.own.keys().all(|name| name == "config-dir");
    let [file] = arguments.positional.as_slice() else { return Err(usage()) };
    if check != "check" || !only_dir {
        return Err(usage());
    }
    let drop_in_dir = arguments.own.get("config-dir").and_then(Value::as_str).map(Into::into);
    Ok(Command::ConfigCheck(Sources { file: Some(file.into()), drop_in_dir }))
}

fn flag_failure(problems: Vec<String>) -> Failure {
    Failure { during: "failed to parse kubelet flag", problems }
}

fn raw_version() -> String {
    let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
    format!(
        "version.Info{{Major:\"1\", Minor:\"36\", GitVersion:{KUBERNETES_VERSION:?}, Compiler:\"rustc\", Platform:\"{os}/{arch}\"}}\n"
    )
}
