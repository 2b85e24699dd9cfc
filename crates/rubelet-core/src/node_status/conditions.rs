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
    snapshot::{NodeReadiness, NodeView},
};

pub const READY: &str = "Ready";

/// There is no eviction yet, so pressure is not measured.
struct Pressure {
    condition: &'static str,
    reason: &'static str,
    message: &'static str,
    event: &'static str,
}

/// In the order of a new node.
const PRESSURES: [Pressure; 3] = [
    Pressure {
        condition: "MemoryPressure",
        reason: "KubeletHasSufficientMemory",
        message: "kubelet has sufficient memory available",
        event: event_reasons::NODE_HAS_SUFFICIENT_MEMORY,
    },
    Pressure {
        condition: "DiskPressure",
        reason: "KubeletHasNoDiskPressure",
        message: "kubelet has no disk pressure",
        event: event_reasons::NODE_HAS_NO_DISK_PRESSURE,
    },
    Pressure {
        condition: "PIDPressure",
        reason: "KubeletHasSufficientPID",
        message: "kubelet has sufficient PID available",
        event: event_reasons::NODE_HAS_SUFFICIENT_PID,
    },
];

/// `missing`: resources of unknown capacity.
pub(super) fn set(status: &mut NodeStatus, view: &NodeView, missing: &[&str], at: Timestamp) {
    for pressure in &PRESSURES {
        put(status, condition(pressure.condition, "False", pressure.reason, pressure.message), at);
    }
    let ready = ready(status, view, missing);
    put(status, ready, at);
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
    let pressures = PRESSURES.iter().filter(|pressure| has_turned(pressure.condition)).map(|pressure| pressure.event);
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
