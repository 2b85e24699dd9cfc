//! The PodStatus of a pod, computed from facts.
//!
//! Owns: the whole `PodStatus`. Never: keeps state; what must last comes in as the previous status or as facts.
//! Upstream: `kubelet_pods.go` (generateAPIPodStatus, convertStatusToAPIStatus, getPhase), `status/generate.go`, `reason_cache.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{ContainerStatus, HostIP, Pod, PodIP, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde::{Deserialize, Serialize};

use crate::{
    container::is_host_network,
    effect::Reason,
    event_reasons,
    id::ContainerId,
    observation::{PodFacts, RuntimeStatus, SandboxFacts, SandboxState},
    pod_manager::is_static_pod,
    qos::{QosClass, qos_class},
    time::Now,
};

pub mod conditions;
mod containers;
mod normalize;
mod phase;
mod resources;

pub(crate) use containers::{LOST_WHEN_TERMINATED, has_ended_for_good, lost};
pub use normalize::normalize_status;
pub use phase::is_terminal;

/// The input of a status. The pod must have been looked at once, or an agent restart would change its dates.
#[derive(Clone, Copy, Debug)]
pub struct StatusInput<'a> {
    /// With the resources its containers were given (`pod/allocation.rs`).
    pub pod: &'a Pod,
    pub facts: &'a PodFacts,
    /// The status last computed for this pod. `None` after an agent restart: then the status in the API server counts, if any.
    pub previous: Option<&'a PodStatus>,
    /// The status in the API server; for a static pod, that of its mirror pod.
    pub stored: Option<&'a PodStatus>,
    /// By container name.
    pub waiting: &'a BTreeMap<String, Waiting>,
    /// Containers that were stopped because a probe failed, and restart whatever their exit code.
    pub restarting: &'a BTreeSet<ContainerId>,
    /// The spec has other resources than the containers were given.
    pub is_resize_pending: bool,
    pub worker_state: PodWorkerState,
    /// Primary first; empty when unknown.
    pub host_ips: &'a [String],
    pub runtime: &'a RuntimeStatus,
    /// The pod has failed, whatever its containers do: rejected, evicted, or over its deadline.
    pub failed: Option<&'a PodFailure>,
    pub now: Now,
}

/// Why a container's last start attempt failed, or what its next one waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    pub reason: Reason,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodWorkerState {
    /// Containers are started and restarted.
    Syncing,
    /// Containers are being stopped; none is started.
    Terminating,
    /// No container runs, none will.
    Terminated,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFailure {
    pub reason: FailureReason,
    pub message: String,
    /// The message of condition DisruptionTarget, where the node ends a pod that did not fail by itself.
    pub disruption: Option<String>,
}

impl PodFailure {
    pub fn new(reason: FailureReason, message: impl Into<String>) -> Self {
        PodFailure { reason, message: message.into(), disruption: None }
    }
}

/// Why a pod as a whole has failed, in upstream's terms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureReason {
    DeadlineExceeded,
    /// For lack of resources on the node, or more local storage than its limit; also of pods rejected under pressure.
    Evicted,
    /// For a critical pod that lacked this resource first of all.
    Preempting(String),
    /// By a shutdown of the node.
    Terminated,
    // Reasons of rejected pods.
    SysctlForbidden,
    PodOsSelectorNodeLabelDoesNotMatch,
    PodOsNotSupported,
    SupplementalGroupsPolicyNotSupported,
    NodeAffinity,
    NodeName,
    NodePorts,
    TaintToleration,
    /// The resource the node has too little of.
    OutOf(String),
    AppArmor,
    UnexpectedAdmissionError,
    NodeShutdown,
    VolumeAttachmentLimitExceeded,
}

impl fmt::Display for FailureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FailureReason::DeadlineExceeded => "DeadlineExceeded",
            FailureReason::Evicted => "Evicted",
            FailureReason::Preempting(_) => event_reasons::PREEMPT_CONTAINER,
            FailureReason::Terminated => "Terminated",
            FailureReason::SysctlForbidden => "SysctlForbidden",
            FailureReason::PodOsSelectorNodeLabelDoesNotMatch => "PodOSSelectorNodeLabelDoesNotMatch",
            FailureReason::PodOsNotSupported => "PodOSNotSupported",
            FailureReason::SupplementalGroupsPolicyNotSupported => "SupplementalGroupsPolicyNotSupported",
            FailureReason::NodeAffinity => "NodeAffinity",
            FailureReason::NodeName => "NodeName",
            FailureReason::NodePorts => "NodePorts",
            FailureReason::TaintToleration => "TaintToleration",
            FailureReason::OutOf(resource) => return write!(f, "OutOf{resource}"),
            FailureReason::AppArmor => "AppArmor",
            FailureReason::UnexpectedAdmissionError => "UnexpectedAdmissionError",
            FailureReason::NodeShutdown => "NodeShutdown",
            FailureReason::VolumeAttachmentLimitExceeded => "VolumeAttachmentLimitExceeded",
        })
    }
}

pub fn pod_status(input: &StatusInput<'_>) -> PodStatus {
    let old = input.old_status();
    let api = input.pod.status.as_ref();
    let mut status = PodStatus {
        qos_class: Some(known_qos_class(input.pod)),
        container_statuses: listed(containers::regular(input)),
        init_container_statuses: listed(containers::init(input)),
        ephemeral_container_statuses: listed(containers::ephemeral(input)),
        start_time: Some(Time(start_time(input))),
        ..PodStatus::default()
    };
    // Other writers own these; the API server would drop them if we left them out.
    if let Some(api) = api {
        status.resource_claim_statuses.clone_from(&api.resource_claim_statuses);
        status.extended_resource_claim_status.clone_from(&api.extended_resource_claim_status);
        status.node_allocatable_resource_claim_statuses.clone_from(&api.node_allocatable_resource_claim_statuses);
        status.nominated_node_name.clone_from(&api.nominated_node_name);
    }
    set_phase(input, &mut status);
    let goes_on = !status.phase.as_deref().is_some_and(is_terminal);
    containers::await_unknown(input, status.container_statuses.as_mut().filter(|_| goes_on));
    resources::set_pod_level(input.pod, old.or(input.stored), &mut status);
    set_addresses(input, old, &mut status);
    status.conditions = Some(conditions::all(input, &status));
    normalize_status(input.pod, &mut status);
    status
}

/// The status of a pod this node rejected: nothing of it ever ran here.
pub fn rejected(pod: &Pod, failure: &PodFailure) -> PodStatus {
    PodStatus {
        qos_class: Some(known_qos_class(pod)),
        phase: Some(phase::FAILED.to_owned()),
        reason: Some(failure.reason.to_string()),
        message: Some(format!("Pod was rejected: {}", failure.message)),
        ..PodStatus::default()
    }
}

/// An ended pod of which nothing ran here, such as one that an earlier process rejected: its status names no container, and
/// the runtime has none.
pub fn never_ran(status: &PodStatus, facts: &PodFacts) -> bool {
    let named = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    named.into_iter().flatten().all(Vec::is_empty) && facts.containers.is_empty() && facts.sandboxes.is_empty()
}

impl<'a> StatusInput<'a> {
    fn old_status(&self) -> Option<&'a PodStatus> {
        self.previous.or(self.pod.status.as_ref())
    }

    /// A deleted or terminating pod starts no container.
    fn may_start_containers(&self) -> bool {
        self.worker_state == PodWorkerState::Syncing && self.pod.metadata.deletion_timestamp.is_none()
    }
}

/// The generation of the spec in a status; a static pod has none.
pub(crate) fn generation(pod: &Pod) -> Option<i64> {
    pod.metadata.generation.filter(|generation| *generation != 0)
}

/// The QoS class set by the API server, else the one computed from the spec.
fn known_qos_class(pod: &Pod) -> String {
    let given = pod.status.as_ref().and_then(|status| status.qos_class.clone());
    let computed = || pod.spec.as_ref().map_or(QosClass::BestEffort, qos_class).as_str().to_owned();
    given.filter(|class| !class.is_empty()).unwrap_or_else(computed)
}

fn listed(statuses: Vec<ContainerStatus>) -> Option<Vec<ContainerStatus>> {
    (!statuses.is_empty()).then_some(statuses)
}

/// The start time in the API server stays. Without a mirror pod a static pod's status does not survive an agent restart, but
/// its first sandbox does: its creation time gives the same start time before and after.
fn start_time(input: &StatusInput<'_>) -> Timestamp {
    let time_of = |status: Option<&PodStatus>| status.and_then(|status| status.start_time.as_ref()).map(|time| time.0);
    let oldest = input.facts.sandboxes.last();
    let first = oldest.filter(|sandbox| sandbox.attempt == 0 && is_static_pod(input.pod));
    let created_at = |sandbox: &SandboxFacts| sandbox.created_at;
    time_of(input.stored)
        .or(first.and_then(created_at))
        .or(time_of(input.old_status()))
        .or(oldest.and_then(created_at))
        .unwrap_or(input.now.wall)
}

/// The phase never leaves Succeeded or Failed, and its reason and message stay as long as it does.
fn set_phase(input: &StatusInput<'_>, status: &mut PodStatus) {
    let old = input.old_status();
    let api = input.pod.status.as_ref();
    let phase_of = |status: Option<&PodStatus>| status.and_then(|status| status.phase.clone());
    let ended = |status: Option<&PodStatus>| phase_of(status).filter(|phase| is_terminal(phase));

    let phase = ended(api).or(ended(old)).unwrap_or_else(|| phase::phase(input, status).to_owned());
    if phase_of(old).as_ref() == Some(&phase) {
        let text = |pick: fn(&PodStatus) -> &Option<String>| {
            let said =
                |status: Option<&PodStatus>| status.and_then(|status| pick(status).clone()).filter(|it| !it.is_empty());
            said(old).or_else(|| said(api))
        };
        status.reason = text(|status| &status.reason);
        status.message = text(|status| &status.message);
    }
    status.phase = Some(phase);
    if let Some(failure) = input.failed.filter(|_| status.phase.as_deref() != Some(phase::SUCCEEDED)) {
        status.phase = Some(phase::FAILED.to_owned());
        status.reason = Some(failure.reason.to_string());
        status.message = Some(failure.message.clone());
    }
}

fn set_addresses(input: &StatusInput<'_>, old: Option<&PodStatus>, status: &mut PodStatus) {
    status.host_ip = input.host_ips.first().cloned();
    let host_ips: Vec<_> = input.host_ips.iter().take(2).map(|ip| HostIP { ip: ip.clone() }).collect();
    status.host_ips = (!host_ips.is_empty()).then_some(host_ips);

    let mut ips = sandbox_ips(input);
    if ips.is_empty() && input.pod.spec.as_ref().is_some_and(is_host_network) {
        ips = preferred(input.host_ips, input.host_ips);
    }
    // The API expects a finished pod to keep its address after its network is gone.
    let is_finished = !input.facts.containers.is_empty() || status.phase.as_deref().is_some_and(is_terminal);
    if ips.is_empty() && input.facts.ready_sandbox().is_none() && is_finished {
        let mut known = [old, input.stored].into_iter().flatten().filter_map(|known| known.pod_ips.as_ref());
        let kept = known.find(|ips| !ips.is_empty());
        ips = kept.into_iter().flatten().map(|ip| ip.ip.clone()).collect();
    }
    status.pod_ip = ips.first().cloned();
    status.pod_ips = (!ips.is_empty()).then(|| ips.into_iter().map(|ip| PodIP { ip }).collect());
}

/// Only the newest sandbox counts, and only while it is ready.
fn sandbox_ips(input: &StatusInput<'_>) -> Vec<String> {
    match input.facts.newest_sandbox() {
        Some(sandbox) if sandbox.state == SandboxState::Ready => preferred(&sandbox.ips, input.host_ips),
        Some(_) | None => Vec::new(),
    }
}

/// At most one address per family, the node's family first.
fn preferred(ips: &[String], host_ips: &[String]) -> Vec<String> {
    let parse = |ip: &String| ip.parse::<IpAddr>().ok();
    let first_is_ipv6 = host_ips.first().and_then(parse).is_some_and(|ip| ip.is_ipv6());
    let first_of = |ipv6: bool| ips.iter().filter_map(parse).find(|ip| ip.is_ipv6() == ipv6);
    [first_of(first_is_ipv6), first_of(!first_is_ipv6)].into_iter().flatten().map(|ip| ip.to_string()).collect()
}

#[cfg(test)]
mod tests;
