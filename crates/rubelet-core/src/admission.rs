//! Admission: whether this pod may run on this node.
//!
//! Owns: upstream's admission handlers, in their order: pressure, sysctls, operating system, supplemental groups, resources, node
//! affinity, node name, host ports, taints, AppArmor, node shutdown. Never: chooses the pods that are preempted for a critical pod
//! (`preemption.rs`), or ends one.
//! Upstream: `lifecycle/predicate.go`, `sysctl/allowlist.go`, `security/apparmor`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ContainerPort, Pod, PodSpec, Taint};

use crate::{
    container::resources,
    eviction::threshold::Pressure,
    node_object::NodeObject,
    node_status::resources::{HUGE_PAGES, is_extended},
    pod::{
        restart_policy::is_sidecar,
        status::{FailureReason, PodFailure},
    },
    pod_manager::is_static_pod,
    preemption::Requirement,
    qos::{QosClass, is_critical, qos_class},
    settings::Settings,
};

pub(crate) mod affinity;
mod sysctls;
mod taints;
#[cfg(test)]
mod tests;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmitResult {
    Admit,
    Reject(PodFailure),
    /// Only the node's labels do not match, and they may have changed just now.
    RecheckNode(PodFailure),
    /// Only resources are missing, and the pod is critical: other pods may be preempted for it.
    Preempt(Vec<Requirement>),
}

/// The inputs of admission beside the pod.
#[derive(Clone, Copy, Debug)]
pub struct AdmitContext<'a> {
    pub settings: &'a Settings,
    /// The pods that were admitted and have not terminated.
    pub others: &'a [&'a Pod],
    pub node: &'a NodeObject,
    /// The runtime supports the strict supplemental groups policy.
    pub has_strict_groups: bool,
    /// The node's.
    pub pressures: &'a BTreeSet<Pressure>,
    pub is_shutting_down: bool,
}

/// The resource that is the number of pods.
const PODS: &str = "pods";
const OS: &str = "linux";
const LABEL_OS: &str = "kubernetes.io/os";

pub fn admit(pod: &Pod, context: AdmitContext<'_>) -> AdmitResult {
    let Some(spec) = &pod.spec else { return AdmitResult::Admit };
    let refusal = pressure_refusal(pod, spec, context.pressures)
        .or_else(|| sysctls::refusal(spec, &context.settings.allowed_unsafe_sysctls))
        .or_else(|| os_refusal(pod, spec))
        .or_else(|| groups_refusal(spec, context));
    if let Some(refusal) = refusal {
        return AdmitResult::Reject(refusal);
    }
    match general_filters(pod, spec, context) {
        // Upstream asks these after it has preempted others, and may then reject the pod all the same.
        fits @ (AdmitResult::Admit | AdmitResult::Preempt(_)) => {
            let refusal = apparmor_refusal(pod, spec, context).or_else(|| shutdown_refusal(context));
            refusal.map_or(fits, AdmitResult::Reject)
        }
        // Another look at the labels takes time, and the pod could not start anyway.
        AdmitResult::RecheckNode(failure) if context.is_shutting_down => AdmitResult::Reject(failure),
        rejected @ (AdmitResult::Reject(_) | AdmitResult::RecheckNode(_)) => rejected,
    }
}

fn shutdown_refusal(context: AdmitContext<'_>) -> Option<PodFailure> {
    let message = "Pod was rejected as the node is shutting down.";
    context.is_shutting_down.then(|| PodFailure::new(FailureReason::NodeShutdown, message))
}

fn refused(reason: FailureReason, message: impl Into<String>) -> Option<PodFailure> {
    Some(PodFailure::new(reason, message))
}

/// Under pressure the node takes critical pods only; under pressure of memory alone also those that request memory or
/// tolerate it.
fn pressure_refusal(pod: &Pod, spec: &PodSpec, pressures: &BTreeSet<Pressure>) -> Option<PodFailure> {
    if pressures.is_empty() || is_critical(pod, spec) {
        return None;
    }
    let is_memory_alone = pressures.iter().all(|pressure| *pressure == Pressure::Memory);
    let is_spared = || {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        let tolerations = spec.tolerations.as_deref().unwrap_or_default();
        qos_class(spec) != QosClass::BestEffort || taints::is_tolerated(&taint, tolerations)
    };
    if is_memory_alone && is_spared() {
        return None;
    }
    let conditions: Vec<_> = pressures.iter().map(|pressure| pressure.condition()).collect();
    refused(FailureReason::Evicted, format!("The node had condition: [{}]. ", conditions.join(" ")))
}

fn os_refusal(pod: &Pod, spec: &PodSpec) -> Option<PodFailure> {
    let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_OS));
    if label.is_some_and(|os| os != OS) {
        let message = "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label";
        return refused(FailureReason::PodOsSelectorNodeLabelDoesNotMatch, message);
    }
    if spec.os.as_ref().is_some_and(|os| os.name != OS) {
        return refused(FailureReason::PodOsNotSupported, "Failed to admit pod as the OS field doesn't match node OS");
    }
    None
}

fn groups_refusal(spec: &PodSpec, context: AdmitContext<'_>) -> Option<PodFailure> {
    let policy = spec.security_context.as_ref()?.supplemental_groups_policy.as_deref()?;
    if policy != "Strict" || context.has_strict_groups {
        return None;
    }
    let message = "SupplementalGroupsPolicy=Strict is not supported in this node";
    refused(FailureReason::SupplementalGroupsPolicyNotSupported, message)
}

/// Upstream's general filters; the first reason is reported. Resources are no reason to reject a critical pod.
fn general_filters(pod: &Pod, spec: &PodSpec, context: AdmitContext<'_>) -> AdmitResult {
    let insufficient = insufficient_resources(spec, context);
    let is_critical = is_critical(pod, spec);
    if let Some(first) = insufficient.first().filter(|_| !is_critical) {
        return AdmitResult::Reject(first.failure());
    }
    let node_affinity = if affinity::matches(spec, &context.node.labels, &context.settings.node_name) {
        None
    } else {
        predicate(FailureReason::NodeAffinity, "node(s) didn't match Pod's node affinity/selector")
    };
    let others = node_name(spec, context)
        .or_else(|| port_conflict(spec, context))
        .or_else(|| untolerated_taint(pod, spec, context));
    match (node_affinity, others) {
        (Some(node_affinity), None) if insufficient.is_empty() => AdmitResult::RecheckNode(node_affinity),
        (Some(node_affinity), _) => AdmitResult::Reject(node_affinity),
        (None, Some(other)) => AdmitResult::Reject(other),
        (None, None) if insufficient.is_empty() => AdmitResult::Admit,
        (None, None) => AdmitResult::Preempt(insufficient.iter().map(Insufficient::missing).collect()),
    }
}

fn node_name(spec: &PodSpec, context: AdmitContext<'_>) -> Option<PodFailure> {
    let name = spec.node_name.as_ref().filter(|name| !name.is_empty())?;
    if *name == context.settings.node_name {
        return None;
    }
    predicate(FailureReason::NodeName, "node(s) didn't match the requested node name")
}

fn port_conflict(spec: &PodSpec, context: AdmitContext<'_>) -> Option<PodFailure> {
    let wanted = host_ports(spec);
    let mut taken = context.others.iter().filter_map(|other| other.spec.as_ref()).flat_map(host_ports);
    if !taken.any(|taken| wanted.iter().any(|wanted| taken.conflicts_with(wanted))) {
        return None;
    }
    predicate(FailureReason::NodePorts, "node(s) didn't have free ports for the requested pod ports")
}

/// Static pods tolerate every taint, as upstream.
fn untolerated_taint(pod: &Pod, spec: &PodSpec, context: AdmitContext<'_>) -> Option<PodFailure> {
    if is_static_pod(pod)
        || taints::are_tolerated(&context.node.taints, spec.tolerations.as_deref().unwrap_or_default())
    {
        return None;
    }
    predicate(FailureReason::TaintToleration, "node(s) had taints that the pod didn't tolerate")
}

fn predicate(reason: FailureReason, why: &str) -> Option<PodFailure> {
    let message = format!("Predicate {reason} failed: {why}");
    refused(reason, message)
}

/// A resource the node has too little of.
struct Insufficient {
    resource: String,
    requested: i64,
    used: i64,
    capacity: i64,
}

impl Insufficient {
    fn failure(&self) -> PodFailure {
        let Insufficient { resource, requested, used, capacity } = self;
        let message = format!(
            "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
        );
        PodFailure::new(FailureReason::OutOf(resource.clone()), message)
    }

    fn missing(&self) -> Requirement {
        let free = self.capacity.saturating_sub(self.used);
        Requirement { resource: self.resource.clone(), quantity: self.requested.saturating_sub(free) }
    }
}

/// A capacity of zero is unknown.
fn insufficient_resources(spec: &PodSpec, context: AdmitContext<'_>) -> Vec<Insufficient> {
    let allocatable = &context.settings.node.allocatable;
    let known = [
        (PODS, allocatable.pods),
        ("cpu", allocatable.cpu_millis),
        ("memory", allocatable.memory_bytes),
        ("ephemeral-storage", allocatable.ephemeral_storage_bytes),
    ];
    let known = known.into_iter().filter(|(_, capacity)| *capacity > 0);
    let counted = scalar_resources(spec);
    let counted = counted.iter().filter_map(|name| Some((*name, countable(name, context.node)?)));
    let specs = || context.others.iter().filter_map(|other| other.spec.as_ref());
    let checked = known.chain(counted).map(|(name, capacity)| Insufficient {
        resource: name.to_owned(),
        requested: requested(spec, name),
        used: specs().map(|other| requested(other, name)).fold(0, i64::saturating_add),
        capacity,
    });
    checked.filter(|it| it.requested > 0 && it.requested > it.capacity.saturating_sub(it.used)).collect()
}

/// The scalar resources that the pod requests: huge pages and extended resources.
fn scalar_resources(spec: &PodSpec) -> BTreeSet<&str> {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let of_containers = containers.filter_map(|container| container.resources.as_ref());
    let requests = of_containers.chain(&spec.resources).filter_map(|resources| resources.requests.as_ref());
    let names = requests.chain(&spec.overhead).flat_map(|list| list.keys().map(String::as_str));
    let is_counted = |name: &&str| {
        let is_native = name.contains("kubernetes.io/") || name.starts_with("attachable-volumes-");
        is_native || name.starts_with(HUGE_PAGES) || is_extended(name)
    };
    names.filter(is_counted).collect()
}

/// The node's amount; `None` for an extended resource the node does not have, which the cluster accounts for.
fn countable(name: &str, node: &NodeObject) -> Option<i64> {
    let has = node.has(name);
    if is_extended(name) { has } else { Some(has.unwrap_or(0)) }
}

/// CPU in thousandths, pods by number, everything else in whole units.
pub fn requested(spec: &PodSpec, name: &str) -> i64 {
    if name == PODS {
        return 1;
    }
    let asked = resources::pod_requests(spec, name).unwrap_or_default();
    if name == "cpu" { asked.millis() } else { asked.value() }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct HostPort {
    ip: String,
    protocol: String,
    port: i32,
}

const ANY_ADDRESS: &str = "0.0.0.0";

impl HostPort {
    fn of(port: &ContainerPort) -> Option<Self> {
        let given = |text: &Option<String>, or: &str| text.clone().filter(|it| !it.is_empty()).unwrap_or(or.to_owned());
        let number = port.host_port.filter(|number| *number > 0)?;
        Some(HostPort { ip: given(&port.host_ip, ANY_ADDRESS), protocol: given(&port.protocol, "TCP"), port: number })
    }

    fn conflicts_with(&self, other: &HostPort) -> bool {
        let same_address = self.ip == other.ip || self.ip == ANY_ADDRESS || other.ip == ANY_ADDRESS;
        same_address && self.port == other.port && self.protocol == other.protocol
    }
}

/// Of all containers that run as long as the pod.
fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let sidecars = spec.init_containers.iter().flatten().filter(|init| is_sidecar(init));
    let containers = sidecars.chain(&spec.containers);
    containers.flat_map(|container| container.ports.iter().flatten()).filter_map(HostPort::of).collect()
}

fn apparmor_refusal(pod: &Pod, spec: &PodSpec, context: AdmitContext<'_>) -> Option<PodFailure> {
    const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
    let of_pod = spec.security_context.iter().filter_map(|context| context.app_armor_profile.as_ref());
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let contexts = containers.filter_map(|container| container.security_context.as_ref());
    let of_containers = contexts.filter_map(|context| context.app_armor_profile.as_ref());
    let is_named = of_pod.chain(of_containers).any(|profile| profile.type_ != "Unconfined");
    let annotations = pod.metadata.annotations.iter().flatten();
    let is_annotated = annotations.into_iter().any(|(key, value)| key.starts_with(ANNOTATION) && value != "unconfined");
    if context.settings.node.apparmor_enabled || !(is_named || is_annotated) {
        return None;
    }
    refused(FailureReason::AppArmor, "Cannot enforce AppArmor: AppArmor is not enabled on the host")
}
