//! Node allocatable: what the kernel lets all pods together use, and the cgroups of system and Kubernetes daemons.
//!
//! Owns: the limits of the cgroup above all pods and of the reserved cgroups, and whether the reservations fit the node.
//! Never: touches a cgroup; what pods may request in sum is in `node_status/resources.rs`.
//! Upstream: `cm/node_container_manager_linux.go`.

use std::collections::BTreeMap;

use crate::{
    cgroups::{self, Cgroup, CgroupDriver, Limits, positive},
    config::KubeletConfiguration,
    container::resources::{page_size_name, shares},
    node_status::resources::{HUGE_PAGES, Reservations, ResourceList, reserved},
    quantity::Quantity,
};

/// The resource that is the number of processes and threads.
const PIDS: &str = "pid";

/// An error if more is reserved than the node has.
pub fn check(capacity: &ResourceList, reservations: &Reservations) -> Result<(), String> {
    let excess = capacity.iter().filter_map(|(name, text)| {
        let has = Quantity::parse(&text.0).unwrap_or_default();
        let kept = reserved(name, has, reservations);
        (kept > has).then(|| {
            let kept = if name == "cpu" || name == "pods" { kept.decimal_text() } else { kept.binary_text() };
            let (kept, has) = (kept.0, &text.0);
            format!(
                "Resource {name:?} has a reservation of {kept} but capacity of {has}. Expected capacity >= reservation."
            )
        })
    });
    let excess: Vec<String> = excess.collect();
    if excess.is_empty() {
        Ok(())
    } else {
        Err(format!("invalid Node Allocatable configuration. {}", excess.join(" ")))
    }
}

/// The limits of all pods together. What eviction keeps free lies within them. Without `reservations` they are the capacity.
pub fn kubepods_limits(capacity: &ResourceList, max_pids: Option<i64>, reservations: &Reservations) -> Limits {
    let reservations = Reservations { eviction: BTreeMap::new(), ..reservations.clone() };
    let mut amounts: BTreeMap<&str, Quantity> =
        capacity.iter().map(|(name, text)| (name.as_str(), Quantity::parse(&text.0).unwrap_or_default())).collect();
    amounts.extend(max_pids.map(|pids| (PIDS, Quantity::from_units(pids))));
    for (name, amount) in &mut amounts {
        *amount = amount.less(reserved(name, *amount, &reservations));
    }
    // A node without reserved huge pages has sizes all the same.
    let huge_pages = huge_pages(amounts.iter().map(|(name, amount)| (*name, *amount)));
    Limits { huge_pages, ..limits_of(&|name| amounts.get(name).copied()) }
}

/// A cgroup of daemons with limits from their reservation. It must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedCgroup {
    /// As it is configured.
    pub name: String,
    pub kind: ReservedKind,
    pub is_compressible: bool,
    /// An error if nothing is reserved.
    pub cgroup: Result<Cgroup, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservedKind {
    System,
    Kube,
}

impl ReservedCgroup {
    /// The message of the event.
    pub fn updated(&self) -> String {
        let kind = match self.kind {
            ReservedKind::System => "system",
            ReservedKind::Kube => "kube",
        };
        format!("Updated limits on {kind} reserved cgroup {}", self.name)
    }

    pub fn failed(&self, problem: &str) -> String {
        let kind = match self.kind {
            ReservedKind::System => "System",
            ReservedKind::Kube => "Kube",
        };
        let compressible = if self.is_compressible { "Compressible " } else { "" };
        format!("Failed to enforce {kind} Reserved {compressible}Cgroup Limits on {:?}: {problem}", self.name)
    }
}

/// The cgroups that `enforceNodeAllocatable` names, in upstream's order.
pub fn reserved_cgroups(config: &KubeletConfiguration, protects_memory: bool) -> Vec<ReservedCgroup> {
    let driver = if config.cgroup_driver == "systemd" { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs };
    let levels = [
        ("system-reserved", ReservedKind::System, false),
        ("kube-reserved", ReservedKind::Kube, false),
        ("system-reserved-compressible", ReservedKind::System, true),
        ("kube-reserved-compressible", ReservedKind::Kube, true),
    ];
    let enforced =
        levels.into_iter().filter(|(level, ..)| config.enforce_node_allocatable.iter().any(|it| it == level));
    let reserved = enforced.map(|(_, kind, is_compressible)| {
        let (name, list) = match kind {
            ReservedKind::System => (&config.system_reserved_cgroup, &config.system_reserved),
            ReservedKind::Kube => (&config.kube_reserved_cgroup, &config.kube_reserved),
        };
        let path = cgroups::configured_path(name, driver);
        let cgroup = if list.is_empty() {
            Err(format!("{} cgroup is not configured properly", cgroups::quoted_parts(&path)))
        } else {
            Ok(Cgroup { path, limits: reserved_limits(list, is_compressible, protects_memory) })
        };
        ReservedCgroup { name: name.clone(), kind, is_compressible, cgroup }
    });
    reserved.collect()
}

fn reserved_limits(list: &BTreeMap<String, String>, is_compressible: bool, protects_memory: bool) -> Limits {
    let amount = |name: &str| list.get(name).and_then(|text| Quantity::parse(text).ok());
    let limits = limits_of(&amount);
    if is_compressible {
        return Limits { cpu_shares: limits.cpu_shares, ..Limits::default() };
    }
    let listed = list.keys().filter_map(|name| Some((name.as_str(), amount(name)?)));
    Limits {
        huge_pages: huge_pages(listed),
        memory_min_bytes: limits.memory_bytes.filter(|_| protects_memory),
        ..limits
    }
}

fn limits_of(amount: &dyn Fn(&str) -> Option<Quantity>) -> Limits {
    let units = |name: &str| amount(name).and_then(|amount| positive(amount.value()));
    let cpu_shares = amount("cpu").and_then(|cpu| positive(shares(cpu.millis())));
    Limits { cpu_shares, memory_bytes: units("memory"), pids: units(PIDS), ..Limits::default() }
}

/// By page size (`2MB`), in bytes.
fn huge_pages<'a>(amounts: impl Iterator<Item = (&'a str, Quantity)>) -> BTreeMap<String, u64> {
    let of_size = amounts.filter_map(|(name, amount)| {
        let size = Quantity::parse(name.strip_prefix(HUGE_PAGES)?).ok()?;
        Some((page_size_name(size.value()), u64::try_from(amount.value()).unwrap_or(0)))
    });
    of_size.collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
    use serde_json::json;

    use super::*;

    fn list(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned())).collect()
    }

    fn capacity() -> ResourceList {
        let all = [("cpu", "4"), ("memory", "8Gi"), ("pods", "110"), ("hugepages-2Mi", "1Gi"), ("hugepages-1Gi", "0")];
        all.into_iter().map(|(name, amount)| (name.to_owned(), Text(amount.to_owned()))).collect()
    }

    fn reservations() -> Reservations {
        Reservations {
            system: list(&[("cpu", "500m"), ("memory", "1Gi"), ("pid", "1000"), ("hugepages-2Mi", "2Mi")]),
            kube: list(&[("cpu", "500m"), ("memory", "1Gi")]),
            eviction: list(&[("memory.available", "100Mi")]),
            cpus: None,
        }
    }

    #[test]
    fn all_pods_get_the_capacity_without_reservations() {
        let huge_pages = |bytes| BTreeMap::from([("1GB".to_owned(), 0), ("2MB".to_owned(), bytes)]);
        let limits = kubepods_limits(&capacity(), Some(32_768), &reservations());
        let expected = Limits {
            cpu_shares: Some(3072),
            memory_bytes: Some(6 << 30),
            pids: Some(31_768),
            huge_pages: huge_pages((1 << 30) - (2 << 20)),
            ..Limits::default()
        };
        assert_eq!(limits, expected, "what eviction keeps free is a part of it");
        let whole = kubepods_limits(&capacity(), None, &Reservations::default());
        let expected = Limits {
            cpu_shares: Some(4096),
            memory_bytes: Some(8 << 30),
            huge_pages: huge_pages(1 << 30),
            ..Limits::default()
        };
        assert_eq!(whole, expected);
    }

    #[test]
    fn reservations_beyond_the_capacity_are_an_error() {
        assert_eq!(check(&capacity(), &reservations()), Ok(()));
        let system = list(&[("cpu", "5"), ("memory", "8Gi"), ("pid", "99999999"), ("ephemeral-storage", "9Ti")]);
        let error = check(&capacity(), &Reservations { system, ..reservations() }).unwrap_err();
        insta::assert_snapshot!(error, @r#"invalid Node Allocatable configuration. Resource "cpu" has a reservation of 5500m but capacity of 4. Expected capacity >= reservation. Resource "memory" has a reservation of 9316Mi but capacity of 8Gi. Expected capacity >= reservation."#);
    }

    #[test]
    fn reserved_cgroups_get_the_limits_of_their_reservation() {
        let config = |enforced: &[&str]| KubeletConfiguration {
            enforce_node_allocatable: enforced.iter().map(|level| (*level).to_owned()).collect(),
            system_reserved: reservations().system,
            system_reserved_cgroup: "/system.slice".to_owned(),
            kube_reserved_cgroup: "/podruntime.slice".to_owned(),
            ..KubeletConfiguration::default()
        };
        let shown = |enforced: &[&str], protects_memory: bool| {
            let reserved = reserved_cgroups(&config(enforced), protects_memory);
            let lines = reserved.iter().map(|it| match &it.cgroup {
                Ok(cgroup) => format!("{}\n{}", it.failed("E"), json!(cgroup)),
                Err(problem) => it.failed(problem),
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        assert_eq!(shown(&["pods"], false), "");
        insta::assert_snapshot!(shown(&["kube-reserved", "pods", "system-reserved"], true), @r#"
        Failed to enforce System Reserved Cgroup Limits on "/system.slice": E
        {"limits":{"cpu_quota":null,"cpu_shares":512,"huge_pages":{"2MB":2097152},"memory_bytes":1073741824,"memory_low_bytes":null,"memory_min_bytes":1073741824,"pids":1000,"spares_memory_in_use":false},"path":"/system.slice"}
        Failed to enforce Kube Reserved Cgroup Limits on "/podruntime.slice": ["podruntime"] cgroup is not configured properly
        "#);
        insta::assert_snapshot!(shown(&["system-reserved-compressible"], true), @r#"
        Failed to enforce System Reserved Compressible Cgroup Limits on "/system.slice": E
        {"limits":{"cpu_quota":null,"cpu_shares":512,"huge_pages":{},"memory_bytes":null,"memory_low_bytes":null,"memory_min_bytes":null,"pids":null,"spares_memory_in_use":false},"path":"/system.slice"}
        "#);
        let updated = reserved_cgroups(&config(&["system-reserved"]), false)[0].updated();
        assert_eq!(updated, "Updated limits on system reserved cgroup /system.slice");
    }
}
