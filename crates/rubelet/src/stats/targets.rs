//! The pods and containers of a sample, and their cgroups.
//!
//! Owns: the mapping from the last snapshot to names, ids and cgroup paths. Pure.
//! Upstream: `getPodAndContainerMaps` and `removeTerminatedPods` of the CRI stats provider; cAdvisor's recognition of containers.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodSpec;
use rubelet_core::{
    cgroups::CgroupTree,
    id::{PodUid, name_of, namespace_of},
    observation::{ContainerFacts, ContainerState},
    settings::Settings,
    snapshot::{PodView, Snapshot},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Targets {
    pub node_name: String,
    /// The cgroup of all pods, and those of the QoS classes below it; none without `cgroupsPerQOS`.
    pub tiers: Vec<String>,
    pub pods: Vec<PodTarget>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodTarget {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    pub created: Timestamp,
    pub sandbox_id: String,
    /// Set in a sample that shows sandboxes.
    pub sandbox_image: String,
    /// Candidates for its cgroup: the QoS class of a pod known only to the runtime is unknown.
    pub cgroups: Vec<String>,
    pub containers: Vec<ContainerTarget>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerTarget {
    pub name: String,
    pub id: String,
    pub image: String,
    pub created: Timestamp,
}

/// The pods with a sandbox and a running container.
pub(crate) fn targets(snapshot: &Snapshot, settings: &Settings) -> Targets {
    let tree = CgroupTree::new(settings, snapshot.node.cgroup_driver);
    let tiers = tree.map(|tree| tree.qos_cgroups(std::iter::empty::<&PodSpec>())).unwrap_or_default();
    Targets {
        node_name: settings.node_name.clone(),
        tiers: tiers.into_iter().map(|tier| tier.path).collect(),
        pods: snapshot.pods.iter().filter_map(|(uid, view)| pod(uid, view, tree)).collect(),
    }
}

fn pod(uid: &PodUid, view: &PodView, tree: Option<CgroupTree<'_>>) -> Option<PodTarget> {
    let facts = view.facts.as_ref()?;
    let sandbox = facts.ready_sandbox()?;
    let containers: Vec<ContainerTarget> = facts.containers.iter().filter_map(container).collect();
    if containers.is_empty() {
        return None;
    }
    let cgroups = match (tree, &view.pod.spec) {
        (None, _) => Vec::new(),
        (Some(tree), Some(spec)) => vec![tree.pod_path(spec, uid)],
        (Some(tree), None) => tree.pod_paths(uid),
    };
    Some(PodTarget {
        uid: uid.clone(),
        namespace: namespace_of(&view.pod).to_owned(),
        name: name_of(&view.pod).to_owned(),
        created: sandbox.created_at.unwrap_or_default(),
        sandbox_id: sandbox.id.to_string(),
        sandbox_image: String::new(),
        cgroups,
        containers,
    })
}

fn container(facts: &ContainerFacts) -> Option<ContainerTarget> {
    match facts.state {
        ContainerState::Running { .. } => Some(ContainerTarget {
            name: facts.name.clone(),
            id: facts.id.to_string(),
            image: facts.image.clone(),
            created: facts.created_at,
        }),
        ContainerState::Created | ContainerState::Exited(_) | ContainerState::Unknown => None,
    }
}

/// The cgroup of a container among those of its pod: `<id>`, `cri-containerd-<id>.scope`, `crio-<id>.scope`. CRI-O puts its
/// monitor beside it, as `crio-conmon-<id>.scope`.
pub(crate) fn cgroup_of<'a>(id: &str, children: &'a [String]) -> Option<&'a str> {
    let is_its = |name: &&String| match name.strip_suffix(".scope") {
        Some(scope) => {
            scope.strip_suffix(id).is_some_and(|runtime| runtime.ends_with('-') && !runtime.contains("conmon"))
        }
        None => name.as_str() == id,
    };
    children.iter().find(is_its).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rubelet_core::{
        cgroups::{CgroupDriver, CgroupSettings},
        id::{ContainerId, SandboxId},
        observation::{ContainerResources, PodFacts, SandboxFacts, SandboxState},
    };
    use serde_json::json;

    use super::*;
    use crate::server::views::tests::{at, snapshot, view};

    fn running(name: &str, id: &str) -> ContainerFacts {
        ContainerFacts {
            id: ContainerId::new(id),
            sandbox: SandboxId::new("s1"),
            name: name.to_owned(),
            attempt: 0,
            hash: None,
            image: "busybox".to_owned(),
            image_ref: String::new(),
            created_at: at("2026-11-15T18:00:01Z"),
            state: ContainerState::Running { started_at: at("2026-11-15T18:00:02Z") },
            log_path: String::new(),
            image_volumes: Vec::new(),
            user: None,
            resources: ContainerResources::default(),
        }
    }

    fn facts(state: SandboxState, containers: Vec<ContainerFacts>) -> Option<Arc<PodFacts>> {
        let sandbox = SandboxFacts {
            id: SandboxId::new("s1"),
            attempt: 0,
            state,
            created_at: Some(at("2026-11-15T18:00:00Z")),
            runtime_handler: String::new(),
            host_network: false,
            ips: Vec::new(),
        };
        Some(Arc::new(PodFacts { sandboxes: vec![sandbox], containers, ..PodFacts::default() }))
    }

    #[test]
    fn only_running_pods_are_measured_in_their_qos_cgroup() {
        let named = |name: &str, facts: Option<Arc<PodFacts>>| {
            let mut view = view("default", name, &["a"], &[], json!({}));
            view.facts = facts;
            view
        };
        let ended = ContainerFacts { state: ContainerState::Created, ..running("b", "c2") };
        let mut stray = named("stray", facts(SandboxState::Ready, vec![running("x", "c4")]));
        Arc::make_mut(&mut stray.pod).spec = None;
        let mut seen = snapshot(
            "n1",
            [
                ("u1", named("web", facts(SandboxState::Ready, vec![running("a", "c1"), ended]))),
                ("u2", named("ending", facts(SandboxState::NotReady, vec![running("a", "c3")]))),
                ("u3", named("waiting", None)),
                ("u4", stray),
            ],
        );
        seen.node.cgroup_driver = Some(CgroupDriver::Cgroupfs);
        let mut settings = Settings::for_node("n1");
        settings.cgroups = Some(CgroupSettings { root: vec!["top".to_owned()], ..CgroupSettings::default() });
        let found = targets(&seen, &settings);
        assert_eq!(found.tiers, ["/top/kubepods", "/top/kubepods/burstable", "/top/kubepods/besteffort"]);
        let shown: Vec<_> =
            found.pods.iter().map(|pod| (pod.name.as_str(), pod.cgroups.len(), pod.containers.len())).collect();
        assert_eq!(shown, [("web", 1, 1), ("stray", 3, 1)]);
        assert_eq!(found.pods[0].cgroups, ["/top/kubepods/besteffort/podu1"]);
        settings.cgroups = None;
        assert!(targets(&seen, &settings).tiers.is_empty());
    }

    #[test]
    fn container_cgroup_is_found_by_id_despite_runtime_prefix() {
        let children = ["0a", "cri-containerd-0b.scope", "crio-conmon-0c.scope", "crio-0c.scope", "x0d.scope"];
        let children = children.map(str::to_owned);
        let found = ["0a", "0b", "0c", "0d", "0e"].map(|id| cgroup_of(id, &children));
        assert_eq!(found, [Some("0a"), Some("cri-containerd-0b.scope"), Some("crio-0c.scope"), None, None]);
    }
}
