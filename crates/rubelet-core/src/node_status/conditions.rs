//! The node's conditions: three pressures, and Ready as the last one.
//!
//! Owns: the four conditions with their reasons and messages, and which of their changes are events.
//! Never: touches conditions of other owners (`NetworkUnavailable`).
//! Upstream: `MemoryPressureCondition`, `DiskPressureCondition`, `PIDPressureCondition`, `ReadyCondition`.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};

use super::whole_seconds;
use crate::{
    event_reasons,
    eviction::threshold::Pressure,
    snapshot::{NodeReadiness, NodeView},
};

pub const READY: &str = "Ready";

/// What a condition says in one of its two states.
struct Said {
    reason: &'static str,
    message: &'static str,
    event: &'static str,
}

/// Under pressure, and without.
fn said(pressure: Pressure) -> (Said, Said) {
    let said = |reason, message, event| Said { reason, message, event };
    match pressure {
        Pressure::Memory => (
            said(
                "KubeletHasInsufficientMemory",
                "kubelet has insufficient memory available",
                event_reasons::NODE_HAS_INSUFFICIENT_MEMORY,
            ),
            said(
                "KubeletHasSufficientMemory",
                "kubelet has sufficient memory available",
                event_reasons::NODE_HAS_SUFFICIENT_MEMORY,
            ),
        ),
        Pressure::Disk => (
            said("KubeletHasDiskPressure", "kubelet has disk pressure", event_reasons::NODE_HAS_DISK_PRESSURE),
            said("KubeletHasNoDiskPressure", "kubelet has no disk pressure", event_reasons::NODE_HAS_NO_DISK_PRESSURE),
        ),
        Pressure::Pid => (
            said(
                "KubeletHasInsufficientPID",
                "kubelet has insufficient PID available",
                event_reasons::NODE_HAS_INSUFFICIENT_PID,
            ),
            said(
                "KubeletHasSufficientPID",
                "kubelet has sufficient PID available",
                event_reasons::NODE_HAS_SUFFICIENT_PID,
            ),
        ),
    }
}

/// `missing`: resources of unknown capacity.
pub(super) fn set(status: &mut NodeStatus, view: &NodeView, missing: &[&str], at: Timestamp) {
    // In the order of a new node.
    for pressure in Pressure::ALL {
        let condition = self::pressure(status, view, pressure);
        put(status, condition, at);
    }
    let ready = ready(status, view, missing);
    put(status, ready, at);
}

/// A restarted agent keeps what is known until its first look.
fn pressure(status: &NodeStatus, view: &NodeView, pressure: Pressure) -> NodeCondition {
    let (under, without) = said(pressure);
    let (state, said) = match (&view.pressures, find(status, pressure.condition())) {
        (None, Some(known)) if known.status != "Unknown" => return known.clone(),
        (Some(pressures), _) if pressures.contains(&pressure) => ("True", under),
        _ => ("False", without),
    };
    condition(pressure.condition(), state, said.reason, said.message)
}

fn ready(status: &NodeStatus, view: &NodeView, missing: &[&str]) -> NodeCondition {
    let problems = match &view.readiness {
        NodeReadiness::Ready => Vec::new(),
        NodeReadiness::NotReady(problems) => problems.clone(),
        NodeReadiness::Unchecked | NodeReadiness::Unknown => match find(status, READY) {
            Some(known) if known.status != "Unknown" => return known.clone(),
            _ => vec!["container runtime status check may not have completed yet".to_owned()],
        },
    };
    let lacking = format!("missing node capacity for resources: {}", missing.join(", "));
    let lacking = (!missing.is_empty()).then_some(lacking);
    let problems: Vec<_> = problems.into_iter().chain(lacking).collect();
    match problems.as_slice() {
        [] => condition(READY, "True", "KubeletReady", "kubelet is posting ready status"),
        [one] => condition(READY, "False", "KubeletNotReady", one),
        several => condition(READY, "False", "KubeletNotReady", &format!("[{}]", several.join(", "))),
    }
}

pub(super) fn find<'a>(status: &'a NodeStatus, kind: &str) -> Option<&'a NodeCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
}

/// The events for conditions whose status changed.
pub(super) fn turns(before: &NodeStatus, after: &NodeStatus) -> impl Iterator<Item = &'static str> {
    let status_of = |status: &NodeStatus, kind: &str| find(status, kind).map(|condition| condition.status.clone());
    let has_turned = |kind: &str| status_of(before, kind) != status_of(after, kind);
    let event = |pressure: Pressure| {
        let (under, without) = said(pressure);
        if status_of(after, pressure.condition()).as_deref() == Some("True") { under.event } else { without.event }
    };
    let pressures = Pressure::ALL.into_iter().filter(|pressure| has_turned(pressure.condition())).map(event);
    let ready = has_turned(READY).then(|| match status_of(after, READY).as_deref() {
        Some("True") => event_reasons::NODE_READY,
        _ => event_reasons::NODE_NOT_READY,
    });
    pressures.collect::<Vec<_>>().into_iter().chain(ready)
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> NodeCondition {
    NodeCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        ..NodeCondition::default()
    }
}

/// A condition keeps its place, and its transition time until its status changes.
fn put(status: &mut NodeStatus, mut condition: NodeCondition, at: Timestamp) {
    let conditions = status.conditions.get_or_insert_default();
    let known = conditions.iter_mut().find(|known| known.type_ == condition.type_);
    let turned = known.as_ref().filter(|known| known.status == condition.status);
    let turned = turned.and_then(|known| known.last_transition_time.clone());
    condition.last_transition_time = turned.or_else(|| Some(whole_seconds(at)));
    condition.last_heartbeat_time = Some(whole_seconds(at));
    match known {
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
}
