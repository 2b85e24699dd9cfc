//! At the end of a play in a cluster, API server and agent agree.
//!
//! Owns: what must be in the API once all has settled: the desired pods, a mirror pod of each static pod, their statuses.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use rubelet_core::{
    event::Source,
    id::PodUid,
    pod::status::normalize_status,
    pod_manager::{is_mirror_pod, is_mirror_pod_of},
    snapshot::PodView,
    status_manager::is_pod_status_by_kubelet_equal,
};
use serde_json::Value;

use crate::{api::store::Key, play::Play, simulation::SimState};

/// The agent's status is in the API after this long.
const LAG: Duration = Duration::from_secs(5);

impl Play {
    /// The API server holds the agent's status.
    #[track_caller]
    pub(crate) fn expect_agreement(&mut self) -> &mut Self {
        let complaint = self.disagreement();
        assert!(complaint.is_none(), "{}", self.failure("expect agreement", &complaint.unwrap_or_default()));
        self
    }

    #[track_caller]
    pub(crate) fn expect_disagreement(&mut self) -> &mut Self {
        assert!(self.disagreement().is_some(), "{}", self.failure("expect disagreement", "there is none"));
        self
    }

    fn disagreement(&self) -> Option<String> {
        self.look(|sim| {
            let told: Vec<String> = sim.snapshot.pods.keys().map(|uid| uid.as_str().to_owned()).collect();
            complaint(sim, &told)
        })
    }
}

/// The first difference. `wanted` are uids as the agent knows them.
pub(super) fn complaint(sim: &SimState, wanted: &[String]) -> Option<String> {
    // The node is the first object that an agent creates.
    sim.api.of("nodes").next()?;
    let pods: Vec<Pod> = sim.api.of("pods").map(|(_, object)| read(object)).collect();
    let views = || wanted.iter().filter_map(|uid| Some((uid, sim.snapshot.pods.get(&PodUid::new(uid))?)));
    let surplus = pods.iter().find(|pod| !views().any(|(_, view)| stands_for(pod, view)));
    if let Some(surplus) = surplus {
        return Some(format!("{:?} is left in the API", surplus.metadata.name));
    }
    views().find_map(|(uid, view)| disagreement(sim, uid, view))
}

/// Whether it is the pod itself, or the current mirror pod of a static pod.
fn stands_for(pod: &Pod, view: &PodView) -> bool {
    if view.source == Some(Source::Api) {
        !is_mirror_pod(pod) && pod.metadata.uid == view.pod.metadata.uid
    } else {
        pod.metadata.deletion_timestamp.is_none() && is_mirror_pod_of(pod, &view.pod)
    }
}

/// The difference between the pod's status in the API and the agent's.
pub(crate) fn disagreement(sim: &SimState, uid: &str, view: &PodView) -> Option<String> {
    let name = view.pod.metadata.name.clone().unwrap_or_default();
    let Some(pod) = sim.api.object(&Key::pod(&name)).map(|object| read(object)) else {
        return Some(format!("the API does not have {name}"));
    };
    if sim.rules.told_since(uid).is_some_and(|since| sim.now.saturating_sub(since) < LAG) {
        return None;
    }
    let mut stored = pod.status.clone().unwrap_or_default();
    normalize_status(&pod, &mut stored);
    let agrees = is_pod_status_by_kubelet_equal(&stored, &view.status);
    (!agrees).then(|| format!("the API has another status of {name}: {}", shown(&stored, &view.status)))
}

fn shown(stored: &PodStatus, told: &PodStatus) -> String {
    let json = |status: &PodStatus| serde_json::to_string(status).unwrap_or_default();
    format!("\n  {}\n  {}", json(stored), json(told))
}

fn read(object: &Value) -> Pod {
    serde_json::from_value(object.clone()).expect("what is stored as a pod is one")
}
