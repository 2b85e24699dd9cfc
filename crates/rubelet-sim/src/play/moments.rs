//! Moments of a play: what a story waits for before it goes on.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ContainerStatus;
use rubelet_core::snapshot::PodView;
use serde_json::Value;

use crate::stage::Scene;

/// The node of every play; static pods carry it in their names.
pub const NODE: &str = "node";

pub struct Moment {
    pub name: String,
    has_come: Box<dyn Fn(&Scene) -> bool>,
}

impl std::fmt::Debug for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Moment {
    pub fn new(name: impl Into<String>, has_come: impl Fn(&Scene) -> bool + 'static) -> Self {
        Moment { name: name.into(), has_come: Box::new(has_come) }
    }

    pub fn has_come(&self, scene: &Scene) -> bool {
        (self.has_come)(scene)
    }
}

pub fn node_name_of(pod: &str) -> String {
    format!("{pod}-{NODE}")
}

/// A pod of the API has its name as it is, a static one with the node's behind it.
pub fn is_called(name: &str, pod: &str) -> bool {
    name == pod || name.strip_suffix(NODE).and_then(|name| name.strip_suffix('-')) == Some(pod)
}

/// A call of this CRI method is under way for something whose name contains `about`.
pub fn calling(method: &'static str, about: &str) -> Moment {
    let wanted = about.to_owned();
    Moment::new(format!("a call of {method} about {about}"), move |scene| {
        scene.runtime.calls.values().any(|(name, subject)| *name == method && subject.contains(&wanted))
    })
}

/// A container of the pod runs.
pub fn running(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} running"), move |scene| {
        scene.runtime.running().any(|found| is_called(&found.pod.name, &name))
    })
}

/// A container of the pod was sent SIGTERM and runs still.
pub fn stopping(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} stopping"), move |scene| {
        scene.runtime.running().any(|found| is_called(&found.pod.name, &name) && found.term_at.is_some())
    })
}

/// The runtime knows nothing of the pod any more.
pub fn gone(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} gone"), move |scene| {
        let picture = &scene.runtime.picture;
        !picture.sandboxes.values().any(|sandbox| is_called(&sandbox.identity().name, &name))
            && !picture.containers.values().any(|container| is_called(&container.pod.name, &name))
    })
}

/// The runtime has a ready sandbox of the pod.
pub fn sandboxed(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} with a sandbox"), move |scene| {
        scene
            .runtime
            .picture
            .sandboxes
            .values()
            .any(|sandbox| sandbox.ready && is_called(&sandbox.identity().name, &name))
    })
}

/// The agent says that a container of the pod waits for this reason.
pub fn waiting(pod: &str, reason: &str) -> Moment {
    let (name, wanted) = (pod.to_owned(), reason.to_owned());
    Moment::new(format!("{pod} waiting: {reason}"), move |scene| {
        views(scene, &name).iter().any(|view| {
            statuses(view).any(|status| {
                let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
                waiting.and_then(|waiting| waiting.reason.as_deref()) == Some(wanted.as_str())
            })
        })
    })
}

/// Containers of the pod were started so many times, over all its versions.
pub fn started(pod: &str, times: u32) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{times} starts of {pod}"), move |scene| starts(scene, &name) >= times)
}

pub fn starts(scene: &Scene, pod: &str) -> u32 {
    scene.rules.history(pod).flat_map(|(_, history)| history.actors.values()).map(|actor| actor.starts).sum()
}

/// The agent says this phase of the pod.
pub fn phase(pod: &str, phase: &str) -> Moment {
    let (name, wanted) = (pod.to_owned(), phase.to_owned());
    Moment::new(format!("{pod} {phase}"), move |scene| {
        views(scene, &name).iter().any(|view| view.status.phase.as_deref() == Some(wanted.as_str()))
    })
}

/// The API server holds this phase of the pod.
pub fn stored_phase(pod: &str, phase: &str) -> Moment {
    let (name, wanted) = (pod.to_owned(), phase.to_owned());
    Moment::new(format!("{pod} {phase} in the API"), move |scene| {
        stored(scene, &name).is_some_and(|object| object["status"]["phase"] == wanted)
    })
}

/// The API server has the pod, or a static pod's mirror.
pub fn known(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} in the API"), move |scene| stored(scene, &name).is_some())
}

/// Nobody has the pod any more, nor its mirror.
pub fn forgotten(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} not in the API"), move |scene| stored(scene, &name).is_none())
}

pub fn stored<'a>(scene: &'a Scene, pod: &str) -> Option<&'a Arc<Value>> {
    scene.api.of("pods").find(|(key, _)| is_called(&key.name, pod)).map(|(_, object)| object)
}

/// The agent says that the pod is ready.
pub fn ready(pod: &str) -> Moment {
    let name = pod.to_owned();
    Moment::new(format!("{pod} ready"), move |scene| {
        let views = views(scene, &name);
        let mut conditions = views.iter().flat_map(|view| view.status.conditions.iter().flatten());
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
    })
}

pub(super) fn views(scene: &Scene, pod: &str) -> Vec<Arc<PodView>> {
    let name_of = |view: &PodView| view.pod.metadata.name.clone().unwrap_or_default();
    scene.snapshot.pods.values().filter(|view| is_called(&name_of(view), pod)).cloned().collect()
}

pub(super) fn statuses(view: &PodView) -> impl Iterator<Item = &ContainerStatus> {
    view.status.container_statuses.iter().chain(&view.status.init_container_statuses).flatten()
}
