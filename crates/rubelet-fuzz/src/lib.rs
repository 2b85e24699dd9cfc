//! The fuzz targets: everything that parses bytes from outside.
//!
//! Owns: for each kind of input a function that takes any bytes and panics if a property does not hold, and how much memory
//! it may use. It returns `None` for bytes that the parser rejects. `fuzz/` runs them under libFuzzer, `tests/smoke.rs` on mutations of the corpus.

mod allocation;
mod logs;
mod node_files;
mod numbers;
mod pods;
mod secrets;
mod streams;

use std::fmt;

/// A target's name is that of its directory in `fuzz/corpus/`.
#[derive(Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    check: Check,
    /// An input is at most 4 KiB long, so more than this is an expansion.
    max_bytes: usize,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

type Check = fn(&[u8]) -> Option<()>;

const MIB: usize = 1 << 20;

const fn target(name: &'static str, check: Check) -> Target {
    Target { name, check, max_bytes: 8 * MIB }
}

pub const TARGETS: &[Target] = &[
    // A container's arguments and environment may have 6 MiB, and are compared with a copy.
    Target { max_bytes: 64 * MIB, ..target("api_pod", pods::api_pod) },
    target("api_response", streams::api_response),
    target("certificates", secrets::certificates),
    target("cgroup_files", node_files::cgroup_files),
    target("cri_facts", pods::cri_facts),
    target("duration", numbers::duration),
    target("env_file", node_files::env_file),
    target("http_query", streams::http_query),
    target("keyring", secrets::keyring),
    target("kubeconfig", secrets::kubeconfig),
    target("kubelet_config", node_files::kubelet_config),
    target("log_lines", logs::log_lines),
    Target { max_bytes: 64 * MIB, ..target("manifest", pods::manifest) },
    target("mount_table", node_files::mount_table),
    target("quantity", numbers::quantity),
    // Compressed a thousandfold.
    Target { max_bytes: 64 * MIB, ..target("rotated_logs", logs::rotated_logs) },
    target("spdy", streams::spdy),
    target("systemd", node_files::systemd),
    target("websocket", streams::websocket),
];

impl Target {
    /// Panics if a property does not hold or too much memory is used. Returns whether the input was valid.
    pub fn run(&self, data: &[u8]) -> bool {
        allocation::limited(self.max_bytes, || (self.check)(data)).is_some()
    }
}

/// The target of this name.
pub fn named(name: &str) -> Target {
    *TARGETS.iter().find(|target| target.name == name).expect("a binary has the name of a target")
}

/// The first byte, as the choice between variants, and the rest.
fn choice(data: &[u8]) -> (u8, &[u8]) {
    data.split_first().map_or((0, data), |(first, rest)| (*first, rest))
}
