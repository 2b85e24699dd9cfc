//! The command lines that need a testbed: `xtask` documents them, and `rubelet-e2e` runs most of them.
//!
//! Owns: the options of these commands, their help, and their exit.

use std::{path::Path, process::ExitCode};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::Runtime;

/// The suite's focus for a node agent.
const FOCUS: &str = r"\[NodeConformance\]|\[sig-node\].*\[Conformance\]|\[sig-storage\].*\[Conformance\]";
/// Specs that run alone, take very long, break the node, or are flaky everywhere; then what this testbed does not have, whoever is the agent: other systems,
/// clouds, servers of network volumes, snapshots, a driver with volume attributes classes, features that are off.
const SKIP: &str = concat!(
    r"\[Serial\]|\[Slow\]|\[Disruptive\]|\[Flaky\]",
    r"|[Ww]indows|SELinux|\[Driver: (azure|cinder|vsphere|nfs|iscsi)|PersistentVolumes NFS",
    r"|[Ss]napshot|volume-modify|\[Feature:OffByDefault\]",
);
/// A spec mostly waits: ten at once keep two cores busy.
pub const PROCESSES: u16 = 10;

pub fn up() -> Command {
    Command::new("up")
        .about("Run Rubelet on this machine, with a containerd of its own, on the manifests in examples/")
        .arg(runtime_arg())
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
        .arg(kubelet_arg().requires("cluster").help("Upstream's kubelet as the node, instead of Rubelet"))
        .arg(
            Arg::new("control-plane-only")
                .long("control-plane-only")
                .action(ArgAction::SetTrue)
                .help("Only run a control plane until Ctrl-C, for running an agent by hand"),
        )
}

pub fn e2e() -> Command {
    Command::new("e2e")
        .about("End-to-end tests on real containerds: Debian's 1.6 and 2.4")
        .arg(runtime_arg())
        .arg(filter_arg())
        .arg(
            Arg::new("agent")
                .long("agent")
                .value_name("rubelet|upstream")
                .value_parser(["rubelet", "upstream"])
                .default_value("rubelet")
                .help("Whom to test; upstream's kubelet shows whether the tests are right"),
        )
        .arg(kubelet_arg().help("Test this kubelet of upstream's, instead of building one"))
        .arg(
            Arg::new("built")
                .long("built")
                .value_name("PATH")
                .help("Test this Rubelet, with what needs no compiler and no cluster"),
        )
        .arg(
            Arg::new("built-cluster")
                .long("built-cluster")
                .action(ArgAction::SetTrue)
                .requires("built")
                .help("With tests on clusters, too: their programs are there as well"),
        )
}

pub fn vm() -> Command {
    Command::new("vm")
        .about("End-to-end tests on an emulated machine with systemd and cgroup version 2")
        .arg(runtime_arg())
        .arg(filter_arg())
        .arg(
            Arg::new("cluster")
                .long("cluster")
                .action(ArgAction::SetTrue)
                .help("With tests on clusters, too, on runtime 2.4; a control plane is slow there, so filter"),
        )
}

pub fn conformance() -> Command {
    let regex = |name, default, help| Arg::new(name).long(name).value_name("RE").default_value(default).help(help);
    Command::new("conformance")
        .about("Upstream's end-to-end suite on a node of ours")
        .arg(regex("focus", FOCUS, "Only specs whose name matches"))
        .arg(regex("skip", SKIP, "No specs whose name matches"))
        .arg(Arg::new("agent").long("agent").value_parser(["rubelet", "upstream"]).default_value("rubelet"))
        .arg(
            Arg::new("procs")
                .long("procs")
                .value_name("N")
                .value_parser(value_parser!(u16).range(1..))
                .help(format!("How many specs run at once [default: {PROCESSES}]")),
        )
}

pub fn bench() -> Command {
    Command::new("bench")
        .about("Measure memory, processor and start times")
        .arg(runtime_arg())
        .arg(
            Arg::new("cluster")
                .long("cluster")
                .action(ArgAction::SetTrue)
                .help("On a control plane: starts as a watcher sees them, requests, and an idle minute"),
        )
        .arg(
            Arg::new("port")
                .long("port")
                .action(ArgAction::SetTrue)
                .conflicts_with("cluster")
                .help("What the kubelet's port costs: figures of 100 pods, commands, a followed log"),
        )
        .arg(kubelet_arg().help("Measure this kubelet of upstream's, too, and show ratios"))
}

pub fn chaos() -> Command {
    Command::new("chaos")
        .about("Faults on a node of a real cluster, one after the other and mixed, and what they cost its pods")
        .arg(Arg::new("agent").long("agent").value_parser(["rubelet", "upstream"]).default_value("rubelet"))
        .arg(
            Arg::new("built")
                .long("built")
                .value_name("PATH")
                .help("Test this Rubelet, instead of building the release"),
        )
        .arg(
            Arg::new("fault")
                .long("fault")
                .value_name("NAME")
                .action(ArgAction::Append)
                .help("Only this fault; may be repeated [default: all, then mixed]"),
        )
        .arg(number_arg("pods", "Pods that must not be affected", "60"))
        .arg(number_arg("seconds", "How long a fault lasts", "60"))
        .arg(number_arg("seed", "Of the random choices", "1"))
}

pub fn churn() -> Command {
    Command::new("churn")
        .about("Pods come and go on a node for a long time: what it keeps of them, and whether starts become slower")
        .arg(runtime_arg())
        .arg(Arg::new("built").long("built").value_name("PATH").help("This Rubelet, instead of building the release"))
        .arg(number_arg("minutes", "How long pods come and go", "60"))
        .arg(number_arg("per-minute", "Pods that come and go each minute", "20"))
}

pub fn volumes() -> Command {
    Command::new("volumes")
        .about("Pods with ten volumes of all kinds each start on a node of a cluster while the agent is killed, and leave nothing")
        .arg(
            Arg::new("agent")
                .long("agent")
                .value_parser(["rubelet", "upstream"])
                .help("Only this agent [default: one after the other, with ratios]"),
        )
        .arg(Arg::new("built").long("built").value_name("PATH").help("This Rubelet, instead of building the release"))
        .arg(number_arg("pods", "How many pods", "50"))
        .arg(number_arg("files", "How many files of a volume get the group of its pod", "1000000"))
}

fn number_arg(name: &'static str, help: &'static str, default: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name("N")
        .value_parser(value_parser!(u32).range(1..))
        .default_value(default)
        .help(help)
}

fn runtime_arg() -> Arg {
    Arg::new("runtime").long("runtime").value_name("debian|2.4").help("Which containerd to use")
}

fn kubelet_arg() -> Arg {
    Arg::new("kubelet").long("kubelet").value_name("PATH")
}

fn filter_arg() -> Arg {
    Arg::new("filter").long("filter").value_name("WORDS").help("Only tests whose name contains this")
}

/// The requested one.
pub fn runtime(args: &ArgMatches) -> anyhow::Result<Option<Runtime>> {
    args.get_one::<String>("runtime").map(|name| Runtime::parse(name)).transpose()
}

/// Upstream's kubelet, when one is given.
pub fn kubelet(args: &ArgMatches) -> Option<&Path> {
    args.get_one::<String>("kubelet").map(Path::new)
}

pub fn filter(args: &ArgMatches) -> &str {
    args.get_one::<String>("filter").map_or("", String::as_str)
}

/// The exit of a program: an error becomes one line, without a backtrace.
pub fn conclude(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|err| {
        eprintln!("error: {err:#}");
        ExitCode::FAILURE
    })
}
