//! The resources in the status of a pod and its containers.
//!
//! Owns: `resources` and `allocatedResources` of containers and of the pod, from the allocation and the runtime's report.
//! Never: the desired resources of a resize; its input is the allocated pod.
//! Upstream: `convertContainerStatusResources`, `convertToAPIPodLevelResourcesStatus`, `getEffectiveAllocatedResources`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Container, ContainerStatus, Pod, PodSpec, PodStatus, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity as Text,
};

use super::phase::RUNNING;
use crate::{
    container::resources::{every_container_is_limited, pod_limits, pod_requests},
    observation::{ContainerFacts, ContainerResources},
    quantity::{Quantity, amount},
};

type List = BTreeMap<String, Text>;

/// At or below these the kernel applies its minimum, so the allocated amount is reported.
const MIN_CPU_LIMIT_MILLIS: i64 = 10;
const MIN_CPU_REQUEST_MILLIS: i64 = 2;

/// For a running container the runtime's report; values it lacks stay as reported before.
pub(super) fn of_container(
    spec: &Container,
    facts: &ContainerFacts,
    before: Option<&ContainerStatus>,
) -> ResourceRequirements {
    let mut resources = spec.resources.clone().unwrap_or_default();
    if !facts.is_running() {
        return resources;
    }
    let ContainerResources { cpu_limit_millis, cpu_request_millis, memory_limit_bytes } = facts.resources;
    let before = before.and_then(|before| before.resources.as_ref());
    if let Some(limits) = &mut resources.limits {
        let before = before.and_then(|before| before.limits.as_ref());
        set_cpu(limits, cpu_limit_millis, MIN_CPU_LIMIT_MILLIS, before);
        match memory_limit_bytes {
            Some(bytes) => drop(limits.insert("memory".to_owned(), Quantity::from_units(bytes).binary_text())),
            None => keep(limits, "memory", before),
        }
    }
    if let Some(requests) = &mut resources.requests {
        let before = before.and_then(|before| before.requests.as_ref());
        set_cpu(requests, cpu_request_millis, MIN_CPU_REQUEST_MILLIS, before);
        keep(requests, "memory", before);
    }
    resources
}

fn set_cpu(list: &mut List, reported_millis: Option<i64>, minimum_millis: i64, before: Option<&List>) {
    match reported_millis {
        Some(millis) if millis.max(amount(Some(list), "cpu").millis()) > minimum_millis => {
            list.insert("cpu".to_owned(), Quantity::from_millis(millis).decimal_text());
        }
        Some(_) => {}
        None => keep(list, "cpu", before),
    }
}

fn keep(list: &mut List, name: &str, before: Option<&List>) {
    if let Some(known) = before.and_then(|before| before.get(name)) {
        list.insert(name.to_owned(), known.clone());
    }
}

/// Sets `resources` and `allocatedResources` of the pod as a whole; its phase must be set. A running pod keeps its reported
/// values, since nothing resizes it: upstream reads its cgroup, whose rounding depends on the kernel.
pub(super) fn set_pod_level(pod: &Pod, old: Option<&PodStatus>, status: &mut PodStatus) {
    let Some(spec) = &pod.spec else { return };
    let is_running = |status: &PodStatus| status.phase.as_deref() == Some(RUNNING);
    let reported = old.filter(|old| is_running(status) && is_running(old)).and_then(|old| old.resources.as_ref());
    let requests = totals(spec, |resources| resources.requests.as_ref(), pod_requests);
    status.resources = Some(match reported {
        Some(reported) => reported.clone(),
        None if is_running(status) => of_pod_cgroup(spec, &requests),
        None => ResourceRequirements {
            limits: listed(totals(spec, |resources| resources.limits.as_ref(), pod_limits)),
            requests: listed(requests.clone()),
            claims: spec.resources.as_ref().and_then(|resources| resources.claims.clone()),
        },
    });
    status.allocated_resources = listed(requests);
}

/// The limits of a running pod's cgroup, and the memory request, which no cgroup holds.
fn of_pod_cgroup(spec: &PodSpec, requested: &List) -> ResourceRequirements {
    let own = spec.resources.clone().unwrap_or_default();
    let mut requests = own.requests.unwrap_or_default();
    set_cpu(&mut requests, pod_requests(spec, "cpu").map(Quantity::millis), MIN_CPU_REQUEST_MILLIS, None);
    if let Some(memory) = requested.get("memory") {
        requests.entry("memory".to_owned()).or_insert_with(|| memory.clone());
    }
    let mut limits = own.limits.unwrap_or_default();
    let limit = |name: &str| pod_limits(spec, name).filter(|_| every_container_is_limited(spec, name));
    set_cpu(&mut limits, limit("cpu").map(Quantity::millis), MIN_CPU_LIMIT_MILLIS, None);
    if let Some(memory) = limit("memory") {
        limits.insert("memory".to_owned(), memory.binary_text());
    }
    ResourceRequirements { limits: listed(limits), requests: listed(requests), claims: own.claims }
}

/// The pod's total of every resource that a container or the pod names.
fn totals(
    spec: &PodSpec,
    list_of: fn(&ResourceRequirements) -> Option<&List>,
    total: fn(&PodSpec, &str) -> Option<Quantity>,
) -> List {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let resources = spec.resources.iter().chain(containers.filter_map(|container| container.resources.as_ref()));
    let named = resources.filter_map(list_of).flatten();
    let mut formats: BTreeMap<&String, &Text> = BTreeMap::new();
    for (name, text) in named {
        formats.entry(name).or_insert(text);
    }
    let totals =
        formats.into_iter().filter_map(|(name, format)| Some((name.clone(), like(format, total(spec, name)?))));
    totals.collect()
}

/// A sum has the format of its first addend.
fn like(format: &Text, total: Quantity) -> Text {
    match Quantity::parse(&format.0) {
        Ok(same) if same == total => format.clone(),
        Ok(_) | Err(_) if format.0.ends_with('i') => total.binary_text(),
        Ok(_) | Err(_) => total.decimal_text(),
    }
}

fn listed(list: List) -> Option<List> {
    (!list.is_empty()).then_some(list)
}
