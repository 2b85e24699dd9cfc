//! Predicates over the simulated state that a play waits for.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};
use rubelet_core::{id::PodUid, pod::status::is_terminal, snapshot::PodView};
use serde_json::Value;

use crate::simulation::SimState;

/// The node of every play; static pods carry it in their names.
pub(crate) const NODE: &str = "node";

pub(crate) struct Predicate {
    pub name: String,
    holds: Box<dyn Fn(&SimState) -> bool>,
}

impl std::fmt::Debug for Predicate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Predicate {
    pub(crate) fn new(name: impl Into<String>, holds: impl Fn(&SimState) -> bool + 'static) -> Self {
        Predicate { name: name.into(), holds: Box::new(holds) }
    }

    pub(crate) fn holds(&self, sim: &SimState) -> bool {
        (self.holds)(sim)
    }
}

pub(crate) fn node_name_of(pod: &str) -> String {
    format!("{pod}-{NODE}")
}

/// A pod of the API has its plain name, a static one the node name suffix.
pub(crate) fn is_called(name: &str, pod: &str) -> bool {
    name == pod || name.strip_suffix(NODE).and_then(|name| name.strip_suffix('-')) == Some(pod)
}

/// A call of this CRI method is under way for something whose name contains `about`.
pub(crate) fn calling(method: &'static str, about: &str) -> Predicate {
    let wanted = about.to_owned();
    Predicate::new(format!("a call of {method} about {about}"), move |sim| {
        sim.runtime.calls.values().any(|(name, subject)| *name == method && subject.contains(&wanted))
    })
}

/// A container of the pod runs.
pub(crate) fn running(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} running"), move |sim| {
        sim.runtime.running().any(|found| is_called(&found.pod.name, &name))
    })
}

/// A container of the pod got SIGTERM and still runs.
pub(crate) fn stopping(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} stopping"), move |sim| {
        sim.runtime.running().any(|found| is_called(&found.pod.name, &name) && found.term_at.is_some())
    })
}

/// The runtime has nothing of the pod.
pub(crate) fn gone(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} gone"), move |sim| {
        let picture = &sim.runtime.picture;
        !picture.sandboxes.values().any(|sandbox| is_called(&sandbox.identity().name, &name))
            && !picture.containers.values().any(|container| is_called(&container.pod.name, &name))
    })
}

/// The runtime has a ready sandbox of the pod.
pub(crate) fn sandboxed(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} with a sandbox"), move |sim| {
        sim.runtime
            .picture
            .sandboxes
            .values()
            .any(|sandbox| sandbox.ready && is_called(&sandbox.identity().name, &name))
    })
}

/// The agent reports a container of the pod as waiting for this reason.
pub(crate) fn waiting(pod: &str, reason: &str) -> Predicate {
    let (name, wanted) = (pod.to_owned(), reason.to_owned());
    Predicate::new(format!("{pod} waiting: {reason}"), move |sim| {
        views(sim, &name).iter().any(|view| {
            statuses(view).any(|status| {
                let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
                waiting.and_then(|waiting| waiting.reason.as_deref()) == Some(wanted.as_str())
            })
        })
    })
}

/// Containers of the pod were started this often, over all its versions.
pub(crate) fn started(pod: &str, times: u32) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{times} starts of {pod}"), move |sim| starts(sim, &name) >= times)
}

pub(crate) fn starts(sim: &SimState, pod: &str) -> u32 {
    sim.rules.history(pod).flat_map(|(_, history)| history.containers.values()).map(|container| container.starts).sum()
}

/// The agent says that the machine may go down.
pub(crate) fn shutdown_is_over() -> Predicate {
    Predicate::new("all pods had their time to end", |sim| {
        sim.snapshot.node.shutdown.is_some_and(|shutdown| shutdown.ended_at.is_some())
    })
}

/// The agent reports this phase of the pod.
pub(crate) fn phase(pod: &str, phase: &str) -> Predicate {
    let (name, wanted) = (pod.to_owned(), phase.to_owned());
    Predicate::new(format!("{pod} {phase}"), move |sim| {
        views(sim, &name).iter().any(|view| view.status.phase.as_deref() == Some(wanted.as_str()))
    })
}

/// The API server holds this phase of the pod.
pub(crate) fn stored_phase(pod: &str, phase: &str) -> Predicate {
    let (name, wanted) = (pod.to_owned(), phase.to_owned());
    Predicate::new(format!("{pod} {phase} in the API"), move |sim| {
        stored(sim, &name).is_some_and(|object| object["status"]["phase"] == wanted)
    })
}

/// The API server has the pod as failed, for this reason.
pub(crate) fn failed_for(pod: &str, reason: &str) -> Predicate {
    let (name, wanted) = (pod.to_owned(), reason.to_owned());
    Predicate::new(format!("{pod} failed in the API: {reason}"), move |sim| {
        stored(sim, &name).is_some_and(|object| {
            object["status"]["phase"] == "Failed" && object["status"]["reason"] == wanted.as_str()
        })
    })
}

/// The agent reports that the node has ended the pod.
pub(crate) fn disrupted(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} ended by its node"), move |sim| {
        let views = views(sim, &name);
        let mut statuses = views.iter().map(|view| &view.status);
        statuses.any(|status| is_disrupted(status) && status.phase.as_deref().is_some_and(is_terminal))
    })
}

pub(super) fn is_disrupted(status: &PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "DisruptionTarget" && condition.status == "True")
}

/// The API server has the pod, or a static pod's mirror pod.
pub(crate) fn known(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} in the API"), move |sim| stored(sim, &name).is_some())
}

/// Neither runtime nor API has the pod, nor its mirror pod.
pub(crate) fn forgotten(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} not in the API"), move |sim| stored(sim, &name).is_none())
}

/// The agent reports the pod as evicted, after it ran or before, or as rejected because the node is full or has too many volumes.
pub(crate) fn is_evicted(sim: &SimState, uid: &str) -> bool {
    let status = sim.snapshot.pods.get(&PodUid::new(uid)).map(|view| &view.status);
    let is_meant =
        |reason: &str| matches!(reason, "Evicted" | "VolumeAttachmentLimitExceeded") || reason.starts_with("OutOf");
    status.is_some_and(|it| it.phase.as_deref() == Some("Failed") && it.reason.as_deref().is_some_and(is_meant))
}

pub(crate) fn stored<'a>(sim: &'a SimState, pod: &str) -> Option<&'a Arc<Value>> {
    sim.api.of("pods").find(|(key, _)| is_called(&key.name, pod)).map(|(_, object)| object)
}

/// The agent reports the pod as ready.
pub(crate) fn ready(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} ready"), move |sim| {
        let views = views(sim, &name);
        let mut conditions = views.iter().flat_map(|view| view.status.conditions.iter().flatten());
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
    })
}

pub(super) fn views(sim: &SimState, pod: &str) -> Vec<Arc<PodView>> {
    let name_of = |view: &PodView| view.pod.metadata.name.clone().unwrap_or_default();
    sim.snapshot.pods.values().filter(|view| is_called(&name_of(view), pod)).cloned().collect()
}

pub(super) fn statuses(view: &PodView) -> impl Iterator<Item = &ContainerStatus> {
    view.status.container_statuses.iter().chain(&view.status.init_container_statuses).flatten()
}
