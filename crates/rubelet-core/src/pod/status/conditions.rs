//! The conditions of a pod, and since when they hold.
//!
//! Owns: PodReadyToStartContainers, Initialized, Ready, ContainersReady, PodScheduled. Conditions of other owners are only
//! carried along.
//! Upstream: `status/generate.go`, `types/pod_status.go`.

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Container, ContainerStatus, Pod, PodCondition, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::{
    StatusInput,
    containers::terminated,
    generation,
    phase::{FAILED, SUCCEEDED},
};
use crate::{
    pod::{restart_policy::is_sidecar, sandbox::usable_sandbox},
    pod_manager::is_static_pod,
};

pub const READY: &str = "Ready";
pub const CONTAINERS_READY: &str = "ContainersReady";
pub const INITIALIZED: &str = "Initialized";
pub const POD_SCHEDULED: &str = "PodScheduled";
const POD_RESIZE_PENDING: &str = "PodResizePending";
pub const POD_READY_TO_START_CONTAINERS: &str = "PodReadyToStartContainers";
/// Shared: other components set it, too; it is sent only with the final status of the pod.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";

const TERMINATION_BY_KUBELET: &str = "TerminationByKubelet";

const OWNED: [&str; 8] = [
    POD_SCHEDULED,
    READY,
    INITIALIZED,
    CONTAINERS_READY,
    POD_READY_TO_START_CONTAINERS,
    "PodResizeInProgress",
    POD_RESIZE_PENDING,
    "AllContainersRestarting",
];

const UNKNOWN_CONTAINER_STATUSES: &str = "UnknownContainerStatuses";
const POD_COMPLETED: &str = "PodCompleted";
const POD_FAILED: &str = "PodFailed";
const CONTAINERS_NOT_READY: &str = "ContainersNotReady";
const CONTAINERS_NOT_INITIALIZED: &str = "ContainersNotInitialized";
/// Upstream's reason for a resize that this node cannot carry out.
const INFEASIBLE: &str = "Infeasible";
const NO_RESIZE: &str = "In-place resize is not supported by this node's agent";
const READINESS_GATES_NOT_READY: &str = "ReadinessGatesNotReady";

/// Only the kubelet writes conditions of this type.
pub fn is_owned(condition_type: &str) -> bool {
    OWNED.contains(&condition_type)
}

pub fn find<'a>(status: &'a PodStatus, condition_type: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == condition_type)
}

/// In upstream's order: those of other owners, then ours.
pub(super) fn all(input: &StatusInput<'_>, status: &PodStatus) -> Vec<PodCondition> {
    let api = input.pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut conditions: Vec<_> = api.filter(|condition| !is_owned(&condition.type_)).cloned().collect();
    let known = input.old_status().and_then(|old| find(old, DISRUPTION_TARGET)).cloned();
    if let Some(disruption) = terminated_by_kubelet(input).or(known) {
        replace_or_append(&mut conditions, disruption);
    }
    let sandbox_serves = input.pod.spec.as_ref().is_some_and(|spec| usable_sandbox(spec, input.facts).is_ok());
    let ready_to_start = if sandbox_serves { ConditionValue::True } else { ConditionValue::no("", "") };
    let dates = Dates::of(input, status);
    if input.is_resize_pending {
        let value = ConditionValue::TrueBecause { reason: INFEASIBLE, message: NO_RESIZE };
        let mut condition = value.into_condition(POD_RESIZE_PENDING, input.pod);
        condition.last_transition_time = Some(Time(transition_time(input, &condition, None, dates.start)));
        conditions.push(condition);
    }
    for (condition_type, value, since_true, since_false) in [
        (POD_READY_TO_START_CONTAINERS, ready_to_start, dates.sandbox, None),
        (INITIALIZED, initialized(input, status), dates.initialized, Some(dates.start)),
        (READY, ready(input.pod, status, &conditions), dates.running, dates.stopped),
        (CONTAINERS_READY, containers_ready(input.pod, status), dates.running, dates.stopped),
        (POD_SCHEDULED, ConditionValue::True, Some(dates.start), None),
    ] {
        let mut condition = value.into_condition(condition_type, input.pod);
        let since = if condition.status == "True" { since_true } else { since_false };
        condition.last_transition_time = Some(Time(transition_time(input, &condition, since, dates.start)));
        conditions.push(condition);
    }
    conditions
}

/// The node ends the pod. The final status dates it.
fn terminated_by_kubelet(input: &StatusInput<'_>) -> Option<PodCondition> {
    let message = input.failed?.disruption.as_ref()?;
    let mut condition = ConditionValue::True.into_condition(DISRUPTION_TARGET, input.pod);
    condition.reason = Some(TERMINATION_BY_KUBELET.to_owned());
    condition.message = Some(message.clone());
    condition.last_transition_time = Some(Time(input.now.wall));
    Some(condition)
}

pub fn replace_or_append(conditions: &mut Vec<PodCondition>, condition: PodCondition) {
    match conditions.iter_mut().find(|existing| existing.type_ == condition.type_) {
        Some(existing) => *existing = condition,
        None => conditions.push(condition),
    }
}

/// Ready, from container statuses and readiness gates; without a date.
pub fn pod_ready_condition(pod: &Pod, status: &PodStatus) -> PodCondition {
    ready(pod, status, status.conditions.as_deref().unwrap_or_default()).into_condition(READY, pod)
}

/// ContainersReady, from container statuses; without a date.
pub fn containers_ready_condition(pod: &Pod, status: &PodStatus) -> PodCondition {
    containers_ready(pod, status).into_condition(CONTAINERS_READY, pod)
}

/// Ready or ContainersReady of a terminated pod; without a date.
pub fn condition_of_ended_pod(condition_type: &str, pod: &Pod, phase: &str) -> PodCondition {
    ConditionValue::of_ended(phase).into_condition(condition_type, pod)
}

enum ConditionValue {
    True,
    /// As upstream has it for a pod that completed, and for a resize that waits.
    TrueBecause {
        reason: &'static str,
        message: &'static str,
    },
    False {
        reason: &'static str,
        message: String,
    },
}

impl ConditionValue {
    fn no(reason: &'static str, message: impl Into<String>) -> ConditionValue {
        ConditionValue::False { reason, message: message.into() }
    }

    fn of_ended(phase: &str) -> ConditionValue {
        ConditionValue::no(if phase == FAILED { POD_FAILED } else { POD_COMPLETED }, "")
    }

    fn into_condition(self, condition_type: &str, pod: &Pod) -> PodCondition {
        let (status, reason, message) = match self {
            ConditionValue::True => ("True", "", String::new()),
            ConditionValue::TrueBecause { reason, message } => ("True", reason, message.to_owned()),
            ConditionValue::False { reason, message } => ("False", reason, message),
        };
        PodCondition {
            type_: condition_type.to_owned(),
            status: status.to_owned(),
            reason: (!reason.is_empty()).then(|| reason.to_owned()),
            message: (!message.is_empty()).then_some(message),
            observed_generation: generation(pod),
            ..PodCondition::default()
        }
    }
}

fn containers_ready(pod: &Pod, status: &PodStatus) -> ConditionValue {
    let phase = status.phase.as_deref().unwrap_or_default();
    if !has_container_statuses(status) {
        return ConditionValue::no(UNKNOWN_CONTAINER_STATUSES, "");
    }
    let sidecars = init_containers(pod).filter(|container| is_sidecar(container));
    let specs = sidecars.chain(pod.spec.iter().flat_map(|spec| &spec.containers));
    let (mut unknown, mut unready) = (Vec::new(), Vec::new());
    for spec in specs {
        match status_of(status, &spec.name) {
            None => unknown.push(spec.name.as_str()),
            Some(container) if !container.ready => unready.push(spec.name.as_str()),
            Some(_) => {}
        }
    }
    if phase == FAILED || (phase == SUCCEEDED && unknown.is_empty()) {
        return ConditionValue::of_ended(phase);
    }
    let message = sentence(&[("unknown", &unknown), ("unready", &unready)]);
    if message.is_empty() { ConditionValue::True } else { ConditionValue::no(CONTAINERS_NOT_READY, message) }
}

fn ready(pod: &Pod, status: &PodStatus, conditions: &[PodCondition]) -> ConditionValue {
    match containers_ready(pod, status) {
        ConditionValue::True => {}
        value @ (ConditionValue::TrueBecause { .. } | ConditionValue::False { .. }) => return value,
    }
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let closed: Vec<_> = gates
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match conditions.iter().find(|condition| condition.type_ == *name) {
                None => Some(format!("corresponding condition of pod readiness gate \"{name}\" does not exist.")),
                Some(condition) if condition.status != "True" => Some(format!(
                    "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                    condition.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    if closed.is_empty() {
        ConditionValue::True
    } else {
        ConditionValue::no(READINESS_GATES_NOT_READY, closed.join(", "))
    }
}

fn initialized(input: &StatusInput<'_>, status: &PodStatus) -> ConditionValue {
    let pod = input.pod;
    let phase = status.phase.as_deref().unwrap_or_default();
    if !has_container_statuses(status) && init_containers(pod).next().is_some() {
        return ConditionValue::no(UNKNOWN_CONTAINER_STATUSES, "");
    }
    let (mut unknown, mut incomplete) = (Vec::new(), Vec::new());
    for spec in init_containers(pod) {
        match status_of(status, &spec.name) {
            None => unknown.push(spec.name.as_str()),
            Some(container) if !is_initialized(spec, container) => incomplete.push(spec.name.as_str()),
            Some(_) => {}
        }
    }
    if phase == SUCCEEDED && unknown.is_empty() {
        return ConditionValue::TrueBecause { reason: POD_COMPLETED, message: "" };
    }
    // Initialized never becomes false again: a restarting sidecar or a removed init container does not change it.
    let old = input.old_status().and_then(|old| find(old, INITIALIZED));
    let was = old.is_some_and(|condition| condition.status == "True");
    if was || any_regular_container_started(pod, status) {
        return ConditionValue::True;
    }
    let message = sentence(&[("unknown", &unknown), ("incomplete", &incomplete)]);
    if message.is_empty() { ConditionValue::True } else { ConditionValue::no(CONTAINERS_NOT_INITIALIZED, message) }
}

fn is_initialized(spec: &Container, status: &ContainerStatus) -> bool {
    if is_sidecar(spec) { status.started == Some(true) } else { status.ready }
}

fn any_regular_container_started(pod: &Pod, status: &PodStatus) -> bool {
    let mut regular = pod.spec.iter().flat_map(|spec| &spec.containers);
    regular.any(|spec| {
        let state = status_of(status, &spec.name).and_then(|container| container.state.as_ref());
        state.is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    })
}

/// `containers with unknown status: [a b], containers with unready status: [c]`
fn sentence(groups: &[(&str, &Vec<&str>)]) -> String {
    let told = groups.iter().filter(|(_, names)| !names.is_empty());
    let parts: Vec<_> =
        told.map(|(what, names)| format!("containers with {what} status: [{}]", names.join(" "))).collect();
    parts.join(", ")
}

fn has_container_statuses(status: &PodStatus) -> bool {
    status.container_statuses.is_some() || status.init_container_statuses.is_some()
}

fn status_of<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let lists = [&status.init_container_statuses, &status.container_statuses];
    lists.into_iter().flatten().flatten().find(|container| container.name == name)
}

fn init_containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten())
}

/// When each condition of a static pod changed, by the facts. Its status may not survive an agent restart; the facts do, so the
/// dates stay the same.
struct Dates {
    start: Timestamp,
    /// Creation of the newest sandbox.
    sandbox: Option<Timestamp>,
    /// The last init container completed, the last sidecar started. `None` where a probe decides.
    initialized: Option<Timestamp>,
    /// The last start of a running container. `None` where a probe decides.
    running: Option<Timestamp>,
    /// The last stop of a container that does not run.
    stopped: Option<Timestamp>,
}

impl Dates {
    fn of(input: &StatusInput<'_>, status: &PodStatus) -> Dates {
        let start = status.start_time.as_ref().map_or(input.now.wall, |time| time.0);
        let init = || status.init_container_statuses.iter().flatten();
        let counts_for_ready = |container: &&ContainerStatus| {
            init_containers(input.pod).all(|spec| spec.name != container.name || is_sidecar(spec))
        };
        let judged = || init().filter(counts_for_ready).chain(status.container_statuses.iter().flatten());
        let sidecars = || init_containers(input.pod).filter(|spec| is_sidecar(spec));
        let init_is_probed = sidecars().any(|spec| spec.startup_probe.is_some());
        let regular = input.pod.spec.iter().flat_map(|spec| &spec.containers);
        let is_probed =
            sidecars().chain(regular).any(|spec| spec.startup_probe.is_some() || spec.readiness_probe.is_some());
        let init_changes = init().flat_map(|container| [started_at(container), stopped_at(container)]).flatten();
        let has_init = init_containers(input.pod).next().is_some();
        Dates {
            start,
            sandbox: input.facts.newest_sandbox().and_then(|sandbox| sandbox.created_at),
            initialized: if has_init { init_changes.max().filter(|_| !init_is_probed) } else { Some(start) },
            running: judged().filter_map(started_at).max().filter(|_| !is_probed),
            stopped: judged().filter_map(stopped_at).max(),
        }
    }
}

fn started_at(status: &ContainerStatus) -> Option<Timestamp> {
    status.state.as_ref()?.running.as_ref()?.started_at.as_ref().map(|time| time.0)
}

/// `None` for a running container.
fn stopped_at(status: &ContainerStatus) -> Option<Timestamp> {
    if status.state.as_ref().is_some_and(|state| state.running.is_some()) {
        return None;
    }
    let end = terminated(status.state.as_ref()).or_else(|| terminated(status.last_state.as_ref()))?;
    end.finished_at.as_ref().map(|time| time.0)
}

/// A date holds while the status does, also over a restart: the API server keeps it. A change is dated when it is seen, as
/// upstream does; that of a static pod by its cause where facts show it (see `Dates`).
fn transition_time(
    input: &StatusInput<'_>,
    condition: &PodCondition,
    since: Option<Timestamp>,
    start: Timestamp,
) -> Timestamp {
    let now = input.now.wall;
    let is_static = is_static_pod(input.pod);
    let old_status = input.old_status();
    let old = old_status.and_then(|old| find(old, &condition.type_));
    let known = old.and_then(|old| Some((old, old.last_transition_time.as_ref()?)));
    if let Some((_, old_time)) = known.filter(|(old, _)| old.status == condition.status) {
        // A date equal to a static pod's start moves with it (see `start_time`).
        let old_start = old_status.and_then(|old| old.start_time.as_ref());
        return if is_static && old_start == Some(old_time) { start } else { old_time.0 };
    }
    let since = since.filter(|_| is_static);
    let cause = match known {
        Some((_, old_time)) => since.filter(|since| since.as_second() > old_time.0.as_second()),
        None if is_static && condition.status == "False" => since.or(Some(start)),
        None => since,
    };
    cause.map_or(now, |cause| cause.min(now))
}
