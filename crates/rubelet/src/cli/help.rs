//! `rubelet --help`.
//!
//! Owns: the text. The flags and their groups are those of `flags.rs`.

use std::fmt::Write as _;

use super::flags::{Flag, GROUPS, Kind};

const INTRODUCTION: &str = "\
Rubelet runs the pods of one Kubernetes node.

Usage:
  rubelet [flags]                            run the node
  rubelet pods                               the pods, as a table
  rubelet node                               readiness, eviction thresholds, what was evicted and collected
  rubelet explain POD                        a pod's current state, and what it waits for
  rubelet logs POD [-c CONTAINER] [-f]       a container's log
  rubelet events                             recent events
  rubelet config check FILE [--config-dir DIR]
                                             validate a configuration; list fields without effect

A standalone node needs a directory of manifests and a container runtime:
  rubelet --pod-manifest-path=/etc/kubernetes/manifests
Without --config and --kubeconfig its port is on loopback and for client certificates only (--client-ca-file).

Use --config to load a KubeletConfiguration file. A flag with an arrow sets that field;
most such flags are deprecated in favour of the file. Flags override drop-ins, drop-ins override the file.
";

/// The column of the help text; longer names get a line of their own.
const HELP_COLUMN: usize = 44;

pub(super) fn text() -> String {
    let mut text = INTRODUCTION.to_owned();
    for group in GROUPS {
        let _ = writeln!(text, "\n{}:", group.title);
        for flag in group.flags {
            describe(&mut text, flag);
        }
    }
    text
}

fn describe(text: &mut String, flag: &Flag) {
    let short = flag.short.map_or("    ".to_owned(), |short| format!("-{short}, "));
    let left = format!("  {short}--{}{}", flag.name, placeholder(flag.kind));
    let arrow = match flag.target {
        super::flags::Target::Field(path) => format!(" \u{2192} {path}"),
        _ => String::new(),
    };
    let _ = if flag.help.is_empty() {
        writeln!(text, "{left}")
    } else if left.chars().count() < HELP_COLUMN {
        writeln!(text, "{left:HELP_COLUMN$}{}{arrow}", flag.help)
    } else {
        writeln!(text, "{left}\n{:HELP_COLUMN$}{}{arrow}", "", flag.help)
    };
}

fn placeholder(kind: Kind) -> &'static str {
    match kind {
        Kind::Bool | Kind::Version => "",
        Kind::Text => " TEXT",
        Kind::Int32 | Kind::Int64 | Kind::Level => " N",
        Kind::Duration => " TIME",
        Kind::Ip => " IP",
        Kind::List => " A,B",
        Kind::Map | Kind::Pair | Kind::Labels => " A=B",
        Kind::Gates => " A=true",
        Kind::Thresholds => " A<B",
        Kind::Headers => " A:B",
        Kind::Taints => " TAINTS",
        Kind::ReservedMemory => " MEMORY",
        Kind::Quantity => " SIZE",
        Kind::VModule => " A=N",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_every_flag_and_fits_a_wide_terminal() {
        let text = text();
        for flag in GROUPS.iter().flat_map(|group| group.flags) {
            assert!(text.contains(&format!("--{}", flag.name)), "{}", flag.name);
        }
        for line in text.lines() {
            assert!(line.chars().count() <= 150, "{line}");
        }
    }
}
