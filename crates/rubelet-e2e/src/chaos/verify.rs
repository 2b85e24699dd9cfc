//! Whether everything is right: the API server's pods against what they should be, and against the runtime.
//!
//! Owns: the comparison. The runtime's view is containerd's own, without the agent: its running tasks and their bundles.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use rubelet_testbed::Testbed;
use serde_json::Value;

use crate::e2e::node::PodSeen;

/// What a pod should be, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    Ready,
    Succeeded,
    Gone,
}

/// The running containers and sandboxes of the runtime.
#[derive(Debug, Default)]
pub struct RuntimeView {
    /// The pod's UID by the container's id; sandboxes apart.
    containers: BTreeMap<String, String>,
    sandboxes: BTreeMap<String, String>,
}

impl RuntimeView {
    pub fn read(bed: &Testbed) -> anyhow::Result<Self> {
        let mut view = RuntimeView::default();
        let bundles = bed.layout.dir.join("state/io.containerd.runtime.v2.task/k8s.io");
        for line in bed.ctr(["tasks", "list"])?.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [id, _, "RUNNING"] = words[..] else { continue };
            // One that was removed meanwhile is not running.
            let Ok(text) = fs::read_to_string(bundles.join(id).join("config.json")) else { continue };
            let config: Value = serde_json::from_str(&text)?;
            let note = |name: &str| config["annotations"][format!("io.kubernetes.cri.{name}")].as_str();
            let uid = note("sandbox-uid").unwrap_or_default().to_owned();
            let of_kind =
                if note("container-type") == Some("sandbox") { &mut view.sandboxes } else { &mut view.containers };
            of_kind.insert(id.to_owned(), uid);
        }
        Ok(view)
    }
}

/// One line for each thing that is wrong.
pub fn problems(pods: &[PodSeen], expected: &BTreeMap<String, Expected>, runtime: &RuntimeView) -> Vec<String> {
    let mut wrong: Vec<String> = expected.iter().filter_map(|(name, should)| differs(pods, name, *should)).collect();
    for pod in pods {
        for status in pod.all_container_statuses() {
            let id = status["containerID"].as_str().unwrap_or_default();
            let id = id.strip_prefix("containerd://").unwrap_or(id);
            let says_running = status["state"]["running"].is_object();
            if says_running != runtime.containers.contains_key(id) {
                wrong.push(format!("{} {}: status {}, in the runtime it is not so", pod.name(), id, status["state"]));
            }
        }
    }
    let known: BTreeSet<&str> = pods.iter().map(PodSeen::uid).collect();
    let strays = runtime.containers.iter().chain(&runtime.sandboxes).filter(|(_, uid)| !known.contains(uid.as_str()));
    wrong.extend(strays.map(|(id, uid)| format!("{id} runs for {uid}, which the API server does not have")));
    wrong
}

fn differs(pods: &[PodSeen], name: &str, should: Expected) -> Option<String> {
    let pod = pods.iter().find(|pod| pod.name() == name);
    let is_right = match (should, pod) {
        (Expected::Gone, pod) => pod.is_none(),
        (_, None) => false,
        (Expected::Ready, Some(pod)) => pod.check_running().is_ok() && pod.is_ready() && !pod.is_being_deleted(),
        (Expected::Succeeded, Some(pod)) => pod.phase() == "Succeeded",
    };
    (!is_right).then(|| match pod {
        Some(pod) => format!("{name} should be {should:?}: {} {}", pod.phase(), pod.status()["containerStatuses"]),
        None => format!("{name} should be {should:?} and is not there"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn seen(name: &str, id: &str, state: &str) -> PodSeen {
        PodSeen(json!({
            "metadata": { "name": name, "uid": format!("u-{name}") },
            "status": {
                "phase": "Running",
                "conditions": [{ "type": "Ready", "status": "True" }],
                "containerStatuses": [{ "name": "main", "containerID": format!("containerd://{id}"), "state": { state: {} } }],
            },
        }))
    }

    fn runtime(containers: &[(&str, &str)]) -> RuntimeView {
        let containers = containers.iter().map(|(id, uid)| ((*id).to_owned(), (*uid).to_owned())).collect();
        RuntimeView { containers, sandboxes: BTreeMap::new() }
    }

    #[test]
    fn nothing_is_wrong_when_api_and_runtime_agree() {
        let expected = BTreeMap::from([("a".to_owned(), Expected::Ready), ("b".to_owned(), Expected::Gone)]);
        assert!(problems(&[seen("a", "1", "running")], &expected, &runtime(&[("1", "u-a")])).is_empty());
    }

    #[test]
    fn each_difference_is_found() {
        let expected = BTreeMap::from([("a".to_owned(), Expected::Ready)]);
        let found = |pods: &[PodSeen], runs: &[(&str, &str)]| problems(pods, &expected, &runtime(runs)).len();
        assert_eq!(found(&[], &[]), 1);
        assert_eq!(found(&[seen("a", "1", "running")], &[]), 1);
        assert_eq!(found(&[seen("a", "1", "running")], &[("1", "u-a"), ("2", "u-b")]), 1);
        assert_eq!(found(&[seen("a", "1", "terminated")], &[("1", "u-a")]), 2);
    }
}
