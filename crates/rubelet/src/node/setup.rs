//! Node settings from the options.
//!
//! Owns: the mapping from flags and configuration to `NodeSetup` and `NodeReporting`. Never: sends a request.

use std::sync::Arc;

use rubelet_core::{
    cgroups::Limits,
    config::gates::{Gate, Gates},
    node_allocatable,
    node_status::{Machine, NodeSetup, Reservations, ResourceList, resources},
    quantity,
    settings::Allocatable,
};

use super::NodeReporting;
use crate::{
    cli::{KUBERNETES_VERSION, Options},
    observe::node::cpu_list_len,
};

pub fn setup(options: &Options, node_name: &str, internal_ips: &[String]) -> NodeSetup {
    let Options { flags, config, .. } = options;
    let eviction =
        if flags.experimental_allocatable_ignore_eviction { &Default::default() } else { &config.eviction_hard };
    NodeSetup {
        name: node_name.to_owned(),
        internal_ips: internal_ips.to_vec(),
        has_configured_ips: super::addresses::names_an_address(&flags.node_ip),
        labels: flags.node_labels.clone(),
        taints: config.register_with_taints.clone(),
        provider_id: config.provider_id.clone(),
        has_external_cloud: flags.cloud_provider == "external",
        attaches_by_controller: config.enable_controller_attach_detach,
        max_pods: i64::from(config.max_pods),
        pods_per_core: i64::from(config.pods_per_core),
        reservations: Reservations {
            system: config.system_reserved.clone(),
            kube: config.kube_reserved.clone(),
            eviction: eviction.clone(),
            cpus: (!config.reserved_system_cpus.is_empty()).then(|| cpu_list_len(&config.reserved_system_cpus)),
        },
        isolates_storage: config.local_storage_capacity_isolation,
        port: config.port,
        max_images: config.node_status_max_images,
        kubelet_version: KUBERNETES_VERSION.to_owned(),
        architecture: architecture().to_owned(),
        resets_extended_resources: !flags.root_dir.join("device-plugins/kubelet_internal_checkpoint").exists(),
        declared_features: declared_features(&options.gates),
    }
}

/// Upstream's list has more; unimplemented features are not declared.
fn declared_features(gates: &Gates) -> Vec<String> {
    let done = [Gate::ExtendWebSocketsToKubelet];
    let is_declared = |gate: &Gate| gates.enabled(Gate::NodeDeclaredFeatures) && gates.enabled(*gate);
    done.into_iter().filter(is_declared).map(|gate| gate.name().to_owned()).collect()
}

pub fn reporting(options: &Options, setup: NodeSetup, machine: Machine) -> Arc<NodeReporting> {
    let config = &options.config;
    Arc::new(NodeReporting {
        setup,
        machine,
        node_ip: options.flags.node_ip.clone(),
        registers: config.register_node,
        check_every: config.node_status_update_frequency.as_std(),
        report_every: config.node_status_report_frequency.as_std(),
        lease_secs: config.node_lease_duration_seconds,
    })
}

/// The resource values a container without a limit sees.
pub fn allocatable(machine: &Machine, setup: &NodeSetup) -> Allocatable {
    let left = allocatable_list(machine, setup);
    let amount = |name| quantity::amount(Some(&left), name);
    Allocatable {
        cpu_millis: amount("cpu").millis(),
        memory_bytes: amount("memory").value(),
        ephemeral_storage_bytes: amount("ephemeral-storage").value(),
        pods: amount("pods").value(),
    }
}

pub fn allocatable_list(machine: &Machine, setup: &NodeSetup) -> ResourceList {
    resources::allocatable(&resources::capacity(machine, setup), &setup.reservations)
}

/// The limits of all pods together.
pub fn kubepods_limits(options: &Options, machine: &Machine, setup: &NodeSetup) -> Limits {
    let is_enforced = options.config.enforce_node_allocatable.iter().any(|what| what == "pods");
    let whole = Reservations::default();
    let reservations = if is_enforced { &setup.reservations } else { &whole };
    node_allocatable::kubepods_limits(&resources::capacity(machine, setup), machine.max_pids, reservations)
}

/// The node's memory without reservations; what eviction keeps free is a part of it.
pub fn unreserved_memory_bytes(machine: &Machine, setup: &NodeSetup) -> i64 {
    let capacity = resources::capacity(machine, setup);
    let limits = node_allocatable::kubepods_limits(&capacity, None, &setup.reservations);
    i64::try_from(limits.memory_bytes.unwrap_or(0)).unwrap_or(i64::MAX)
}

/// Go's architecture names, which the API uses.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}
