//! The Node object at registration, and the update of an existing one.
//!
//! Owns: the labels, taints and annotations of a new node; on an existing one the labels and resources that the agent owns.
//! Never: changes the taints or the provider ID of an existing node.
//! Upstream: `initialNode`, `tryRegisterWithAPIServer`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Node, NodeSpec, NodeStatus, Taint},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};

use super::{
    LABEL_ARCH, LABEL_OS, NodeSetup, OS, Report,
    resources::{self, HUGE_PAGES},
    some, updated,
};

const LABEL_HOST_NAME: &str = "kubernetes.io/hostname";
const CONTROLLER_MANAGED_ATTACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// Labels that are updated on an existing node; all others stay.
const FOLLOWED_LABELS: [&str; 11] = [
    LABEL_HOST_NAME,
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    LABEL_OS,
    LABEL_ARCH,
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];

/// A new node.
pub fn initial(report: Report<'_>) -> Node {
    let setup = report.setup;
    let annotation = setup.attaches_by_controller.then(attach_annotation);
    let node = Node {
        metadata: ObjectMeta {
            name: Some(setup.name.clone()),
            labels: Some(labels(setup)),
            annotations: annotation.map(|annotation| BTreeMap::from([annotation])),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            taints: some(taints(setup)),
            provider_id: (!setup.provider_id.is_empty()).then(|| setup.provider_id.clone()),
            ..NodeSpec::default()
        }),
        status: None,
    };
    updated(&node, report)
}

/// An existing node, with the agent's fields updated. Its status is left to the next report.
pub fn reconciled(known: &Node, report: Report<'_>) -> Node {
    let setup = report.setup;
    let mut node = known.clone();
    if setup.attaches_by_controller {
        node.metadata.annotations.get_or_insert_default().extend([attach_annotation()]);
    } else if let Some(annotations) = &mut node.metadata.annotations {
        annotations.remove(CONTROLLER_MANAGED_ATTACH);
    }
    let known_labels = node.metadata.labels.get_or_insert_default();
    for (name, value) in labels(setup) {
        if !FOLLOWED_LABELS.contains(&name.as_str()) {
            continue;
        }
        if value.is_empty() {
            known_labels.remove(&name);
        } else {
            known_labels.insert(name, value);
        }
    }
    let status = node.status.get_or_insert_default();
    if setup.resets_extended_resources {
        zero_extended_resources(status);
    }
    forget_huge_pages(status, report);
    node
}

/// The labels that the agent sets.
pub fn labels(setup: &NodeSetup) -> BTreeMap<String, String> {
    let own = [
        (LABEL_HOST_NAME, &setup.name),
        (LABEL_OS, &OS.to_owned()),
        (LABEL_ARCH, &setup.architecture),
        ("beta.kubernetes.io/os", &OS.to_owned()),
        ("beta.kubernetes.io/arch", &setup.architecture),
    ]
    .map(|(name, value)| (name.to_owned(), value.clone()));
    own.into_iter().chain(setup.labels.clone()).collect()
}

/// The taints of a new node.
pub fn taints(setup: &NodeSetup) -> Vec<Taint> {
    let cloud_taint = setup.has_external_cloud.then(|| Taint {
        key: "node.cloudprovider.kubernetes.io/uninitialized".to_owned(),
        value: Some("true".to_owned()),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    });
    setup.taints.iter().cloned().chain(cloud_taint).collect()
}

fn attach_annotation() -> (String, String) {
    (CONTROLLER_MANAGED_ATTACH.to_owned(), "true".to_owned())
}

fn zero_extended_resources(status: &mut NodeStatus) {
    let names: Vec<_> = status
        .capacity
        .iter()
        .flatten()
        .map(|(name, _)| name)
        .filter(|name| resources::is_extended(name))
        .cloned()
        .collect();
    for name in names {
        status.capacity.get_or_insert_default().insert(name.clone(), Quantity("0".to_owned()));
        status.allocatable.get_or_insert_default().insert(name, Quantity("0".to_owned()));
    }
}

/// Removes page sizes that the machine no longer has.
fn forget_huge_pages(status: &mut NodeStatus, report: Report<'_>) {
    let has = resources::capacity(report.machine, report.setup);
    let is_gone = |name: &String| name.starts_with(HUGE_PAGES) && !has.contains_key(name);
    for list in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
        list.retain(|name, _| !is_gone(name));
    }
}
