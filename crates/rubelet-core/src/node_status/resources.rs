//! Capacity and allocatable resources of the node.
//!
//! Owns: capacity, reservations, allocatable. Never: touches resources of other writers, except their allocatable, which
//! follows their capacity.
//! Upstream: `CapacityFromMachineInfo`, `GetNodeAllocatableReservation`, `hardEvictionReservation`, `MachineInfo`.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::NodeStatus, apimachinery::pkg::api::resource::Quantity as Text};

use super::{Machine, NodeSetup, listed};
use crate::quantity::Quantity;

pub type ResourceList = BTreeMap<String, Text>;

pub(crate) const HUGE_PAGES: &str = "hugepages-";
const CPU: &str = "cpu";
const MEMORY: &str = "memory";
const STORAGE: &str = "ephemeral-storage";
const PODS: &str = "pods";

/// The configured reservations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations {
    /// `systemReserved`.
    pub system: BTreeMap<String, String>,
    /// `kubeReserved`.
    pub kube: BTreeMap<String, String>,
    /// `evictionHard`: reserved for eviction.
    pub eviction: BTreeMap<String, String>,
    /// The number of processors in `reservedSystemCPUs`; it replaces the CPU of the lists.
    pub cpus: Option<i64>,
}

/// The machine's capacity of the resources that the agent owns.
pub fn capacity(machine: &Machine, setup: &NodeSetup) -> ResourceList {
    let pods = match setup.pods_per_core {
        0 => setup.max_pods,
        per_core => setup.max_pods.min(machine.cpus.saturating_mul(per_core)),
    };
    let mut capacity = ResourceList::from([
        (CPU.to_owned(), Quantity::from_units(machine.cpus).decimal_text()),
        (MEMORY.to_owned(), Quantity::from_units(machine.memory_bytes).binary_text()),
        (PODS.to_owned(), Quantity::from_units(pods).decimal_text()),
    ]);
    for (page_bytes, pages) in &machine.huge_pages {
        let name = format!("{HUGE_PAGES}{}", Quantity::from_units(*page_bytes).binary_text().0);
        capacity.insert(name, Quantity::from_units(page_bytes.saturating_mul(*pages)).binary_text());
    }
    if let Some(bytes) = machine.storage_bytes.filter(|_| setup.isolates_storage) {
        capacity.insert(STORAGE.to_owned(), Quantity::from_units(bytes).binary_text());
    }
    capacity
}

/// The part of a capacity that is left for pods.
pub fn allocatable(capacity: &ResourceList, reservations: &Reservations) -> ResourceList {
    let mut allocatable: ResourceList = capacity
        .iter()
        .map(|(name, has)| {
            let left = amount(has).less(reserved(name, amount(has), reservations));
            (name.clone(), text_like(name, left))
        })
        .collect();
    let huge_pages = capacity.iter().filter(|(name, _)| name.starts_with(HUGE_PAGES)).map(|(_, has)| amount(has));
    let huge_pages = huge_pages.fold(Quantity::ZERO, Quantity::saturating_add);
    if let Some(memory) = allocatable.get_mut(MEMORY) {
        *memory = amount(memory).less(huge_pages).binary_text();
    }
    allocatable
}

pub(super) fn set(status: &mut NodeStatus, machine: &Machine, setup: &NodeSetup) {
    let known = status.capacity.take().unwrap_or_default();
    let mut all = known;
    all.extend(capacity(machine, setup));
    let mut left = allocatable(&all, &setup.reservations);
    // Without a capacity, set by an administrator.
    let others = status.allocatable.take().unwrap_or_default();
    left.extend(others.into_iter().filter(|(name, _)| !all.contains_key(name) && !is_extended(name)));
    status.allocatable = listed(left);
    status.capacity = listed(all);
}

/// The resources that a ready node must have, and whose amount is unknown.
pub(super) fn missing(status: &NodeStatus, setup: &NodeSetup) -> Vec<&'static str> {
    let required = [CPU, MEMORY, PODS].into_iter().chain(setup.isolates_storage.then_some(STORAGE));
    let has = |name: &str| status.capacity.as_ref().is_some_and(|capacity| capacity.contains_key(name));
    required.filter(|name| !has(name)).collect()
}

/// A resource with its own domain, such as a device.
pub(crate) fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

pub(crate) fn reserved(name: &str, capacity: Quantity, reservations: &Reservations) -> Quantity {
    let listed = |list: &BTreeMap<String, String>| {
        list.get(name).and_then(|text| Quantity::parse(text).ok()).unwrap_or_default()
    };
    let by_config = match reservations.cpus.filter(|_| name == CPU) {
        Some(cpus) => Quantity::from_units(cpus),
        None => listed(&reservations.system).saturating_add(listed(&reservations.kube)),
    };
    let signal = match name {
        MEMORY => "memory.available",
        STORAGE => "nodefs.available",
        _ => return by_config,
    };
    let threshold = reservations.eviction.get(signal).map(|threshold| threshold_of(threshold, capacity));
    by_config.saturating_add(threshold.unwrap_or_default())
}

/// `100Mi`, or a percentage of the capacity such as `10%`. Upstream keeps the percentage in 32 bits, which shows in the result.
fn threshold_of(text: &str, capacity: Quantity) -> Quantity {
    match text.strip_suffix('%') {
        Some(percentage) => {
            let part = percentage.parse::<f32>().unwrap_or(0.0) / 100.0;
            #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "as upstream computes it")]
            let bytes = (capacity.value() as f64 * f64::from(part)) as i64;
            Quantity::from_units(bytes)
        }
        None => Quantity::parse(text).unwrap_or_default(),
    }
}

fn amount(text: &Text) -> Quantity {
    Quantity::parse(&text.0).unwrap_or_default()
}

fn text_like(name: &str, amount: Quantity) -> Text {
    if name == MEMORY || name == STORAGE || name.starts_with(HUGE_PAGES) {
        amount.binary_text()
    } else {
        amount.decimal_text()
    }
}
