//! What of the Node object pods are judged by.
//!
//! Owns: its labels, taints and allocatable resources, as the API server last showed them, or as the agent would register
//! them. Never: what the node reports of itself (`node_status.rs`).
//! Upstream: `GetCachedNode`, `initialNode`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Taint};
use serde::{Deserialize, Serialize};

use crate::{
    node_status::{NodeSetup, ResourceList, registration},
    quantity,
};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeObject {
    /// Grows with every change; zero for one that the API server has not seen.
    pub version: u64,
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub allocatable: ResourceList,
}

impl NodeObject {
    pub fn of(node: &Node) -> Self {
        let version = node.metadata.resource_version.as_deref().and_then(|version| version.parse().ok());
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.clone());
        NodeObject {
            version: version.unwrap_or(0),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            allocatable: allocatable.unwrap_or_default(),
        }
    }

    /// As the node would introduce itself.
    pub fn initial(setup: &NodeSetup, allocatable: ResourceList) -> Self {
        NodeObject { version: 0, labels: registration::labels(setup), taints: registration::taints(setup), allocatable }
    }

    /// Whole units of a resource; `None` when the node does not know it.
    pub fn has(&self, resource: &str) -> Option<i64> {
        self.allocatable.contains_key(resource).then(|| quantity::amount(Some(&self.allocatable), resource).value())
    }
}
