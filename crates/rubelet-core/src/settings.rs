//! The few settings the core's decisions depend on, taken from KubeletConfiguration and flags by the shell.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::event::Source;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub node_name: String,
    /// Primary first. May be empty on a node without a network.
    pub host_ips: Vec<String>,
    /// The sources that must have spoken before anything is cleaned up.
    pub sources: Vec<Source>,
    /// How long a quiet, healthy pod goes without a sync.
    pub sync_frequency: Duration,
    /// Crash-loop back-off never waits longer.
    pub max_container_restart_period: Duration,
    /// `None`: as many as are asked for. `Some(1)`: serial pulls.
    pub max_parallel_pulls: Option<u32>,
    /// Pulls per second; zero is no limit.
    pub registry_pull_qps: u32,
    pub registry_burst: u32,
    /// The deadline of an ordinary CRI call.
    pub runtime_request_timeout: Duration,
    /// Dead instances kept per container; negative is no limit.
    pub max_dead_containers_per_container: i32,
    /// Dead containers kept on the node; negative is no limit.
    pub max_dead_containers: i32,
    /// A dead container younger than this is not collected.
    pub min_container_ttl: Duration,
    /// `--root-dir`, links resolved.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
}

impl Settings {
    /// Upstream's defaults for a node of this name.
    pub fn for_node(node_name: &str) -> Self {
        Settings {
            node_name: node_name.to_owned(),
            host_ips: Vec::new(),
            sources: vec![Source::File],
            sync_frequency: Duration::from_secs(60),
            max_container_restart_period: Duration::from_secs(300),
            max_parallel_pulls: Some(1),
            registry_pull_qps: 5,
            registry_burst: 10,
            runtime_request_timeout: Duration::from_secs(120),
            max_dead_containers_per_container: 1,
            max_dead_containers: -1,
            min_container_ttl: Duration::ZERO,
            root_dir: PathBuf::from("/var/lib/kubelet"),
            pod_logs_dir: PathBuf::from("/var/log/pods"),
        }
    }
}
