//! Rules about node allocatable, reserved CPUs and memory.

use std::collections::BTreeSet;

use super::Rules;
use crate::config::{gates::Gate, names};

impl Rules<'_> {
    pub(super) fn allocatable(&mut self) {
        const FIELD: &str = "enforceNodeAllocatable";
        const NAME: &str = "enforceNodeAllocatable (--enforce-node-allocatable)";
        let config = self.config;
        let wanted: BTreeSet<&str> = config.enforce_node_allocatable.iter().map(String::as_str).collect();
        for kind in ["system-reserved", "kube-reserved"] {
            let compressible = format!("{kind}-compressible");
            if wanted.contains(kind) && wanted.contains(compressible.as_str()) {
                let both = format!("both {kind:?} and {compressible:?} cannot be specified together in {NAME}");
                self.invalid(FIELD, both);
            }
        }
        let mut seen = BTreeSet::new();
        for level in &config.enforce_node_allocatable {
            if !seen.insert(level.as_str()) {
                self.invalid(FIELD, format!("duplicated enforcements {level:?} in {NAME}"));
                continue;
            }
            match level.as_str() {
                "pods" => {}
                "system-reserved" | "system-reserved-compressible" => {
                    let name = "systemReservedCgroup (--system-reserved-cgroup)";
                    self.need_cgroup("systemReservedCgroup", name, "system-reserved", &config.system_reserved_cgroup);
                }
                "kube-reserved" | "kube-reserved-compressible" => {
                    let name = "kubeReservedCgroup (--kube-reserved-cgroup)";
                    self.need_cgroup("kubeReservedCgroup", name, "kube-reserved", &config.kube_reserved_cgroup);
                }
                "none" => {
                    if config.enforce_node_allocatable.len() > 1 {
                        let when = r#"may not contain additional enforcements when "none" is specified"#;
                        self.invalid(FIELD, format!("{NAME} {when}"));
                    }
                    continue;
                }
                _ => {
                    let allowed = r#"Valid options are "pods", "system-reserved", "system-reserved-compressible", "kube-reserved", "kube-reserved-compressible" or "none""#;
                    self.invalid(FIELD, format!("option {level:?} specified for {NAME}. {allowed}"));
                    continue;
                }
            }
            if !config.cgroups_per_qos {
                let needed = "cgroupsPerQOS (--cgroups-per-qos) must be set to true";
                self.invalid("cgroupsPerQOS", format!("{needed} when {level:?} contained in {NAME}"));
            }
        }
    }

    fn need_cgroup(&mut self, field: &str, name: &str, kind: &str, cgroup: &str) {
        if cgroup.is_empty() {
            let when = format!("when {kind:?} or \"{kind}-compressible\" included in");
            let place = "enforceNodeAllocatable (--enforce-node-allocatable)";
            self.invalid(field, format!("{name} must be specified {when} {place}"));
        }
    }

    pub(super) fn memory(&mut self) {
        self.reserved_cpus();
        self.reserved_memory();
        let config = self.config;
        let factor = config.memory_throttling_factor;
        if factor <= 0.0 || factor > 1.0 {
            let allowed = "must be greater than 0 and less than or equal to 1.0";
            self.invalid("memoryThrottlingFactor", format!("memoryThrottlingFactor {factor} {allowed}"));
        }
        let policy = config.memory_reservation_policy.as_str();
        if policy == "TieredReservation" && !self.gates.enabled(Gate::MemoryQos) {
            let gate = "requires MemoryQoS feature gate to be enabled";
            self.invalid("memoryReservationPolicy", format!("memoryReservationPolicy {policy:?} {gate}"));
        }
        if !["None", "TieredReservation"].contains(&policy) {
            let allowed = r#"Valid options are "None" or "TieredReservation""#;
            let message = format!("option {policy:?} specified for memoryReservationPolicy. {allowed}");
            self.invalid("memoryReservationPolicy", message);
        }
    }

    fn reserved_cpus(&mut self) {
        const NAME: &str = "reservedSystemCPUs (--reserved-cpus)";
        let config = self.config;
        let cpus = config.reserved_system_cpus.as_str();
        if cpus.is_empty() {
            return;
        }
        if !config.system_reserved_cgroup.is_empty() || !config.kube_reserved_cgroup.is_empty() {
            let others =
                "systemReservedCgroup (--system-reserved-cgroup) or kubeReservedCgroup (--kube-reserved-cgroup)";
            self.invalid("reservedSystemCPUs", format!("can't use {NAME} with {others}"));
        }
        if let Err(error) = cpu_set(cpus) {
            self.invalid("reservedSystemCPUs", format!("unable to parse {NAME} {cpus}, error: {error}"));
        }
    }

    fn reserved_memory(&mut self) {
        const FIELD: &str = "reservedMemory";
        let mut seen = BTreeSet::new();
        for reservation in &self.config.reserved_memory {
            let node = reservation.numa_node;
            for (resource, limit) in &reservation.limits {
                if resource != "memory" && !names::is_huge_page(resource) {
                    let only = "only [memory hugepages-<HugePageSize>] is accepted";
                    let message = format!("the limit type {resource:?} for NUMA node {node} is not supported, {only}");
                    self.invalid(FIELD, message);
                }
                let place = format!("for NUMA node {node} and resource {resource:?}");
                if limit.amount.is_zero() {
                    self.invalid(FIELD, format!("reserved memory may not be zero {place}"));
                }
                if !seen.insert((node, resource)) {
                    self.invalid(FIELD, format!("the reserved memory has a duplicate value {place}"));
                }
            }
        }
    }
}

/// Reads `0-3,7`.
fn cpu_set(text: &str) -> Result<BTreeSet<u32>, String> {
    let number =
        |text: &str| text.parse::<u32>().map_err(|_| format!("strconv.Atoi: parsing {text:?}: invalid syntax"));
    let mut cpus = BTreeSet::new();
    for item in text.split(',') {
        match item.split_once('-') {
            None => {
                cpus.insert(number(item)?);
            }
            Some((first, last)) => {
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(format!("invalid range {item:?} ({first} > {last})"));
                }
                // More than any machine has; a range of billions must not use up the memory.
                if last > 1 << 16 {
                    return Err(format!("invalid range {item:?} ({last} > {})", 1 << 16));
                }
                cpus.extend(first..=last);
            }
        }
    }
    Ok(cpus)
}
