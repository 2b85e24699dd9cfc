//! The parts of the Node object that admission and statuses use.
//!
//! Owns: its labels, taints, allocatable resources and addresses, as last seen in the API server, or as the agent would
//! register them. Never: what the node reports (`node_status.rs`).
//! Upstream: `GetCachedNode`, `initialNode`, `GetNodeHostIPs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use k8s_openapi::api::core::v1::{Node, Taint};
use serde::{Deserialize, Serialize};

use crate::{
    node_status::{NodeSetup, ResourceList, registration},
    quantity,
};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeObject {
    /// Grows with every change; zero for one that is not from the API server.
    pub version: u64,
    pub labels: Arc<BTreeMap<String, String>>,
    pub taints: Vec<Taint>,
    pub allocatable: ResourceList,
    /// Primary first, one per family; empty when the node has none.
    pub host_ips: Vec<String>,
    /// Unique names of volumes that the node reported in use.
    pub volumes_in_use: BTreeSet<String>,
    /// Unique names of volumes that the attach/detach controller reports as attached.
    pub volumes_attached: BTreeSet<String>,
}

impl NodeObject {
    pub fn of(node: &Node) -> Self {
        let version = node.metadata.resource_version.as_deref().and_then(|version| version.parse().ok());
        let status = node.status.as_ref();
        let attached = status.and_then(|status| status.volumes_attached.as_ref());
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.clone());
        NodeObject {
            version: version.unwrap_or(0),
            labels: Arc::new(node.metadata.labels.clone().unwrap_or_default()),
            taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            allocatable: allocatable.unwrap_or_default(),
            host_ips: host_ips(node),
            volumes_in_use: status.and_then(|status| status.volumes_in_use.clone()).into_iter().flatten().collect(),
            volumes_attached: attached.into_iter().flatten().map(|volume| volume.name.clone()).collect(),
        }
    }

    /// As the node would register itself.
    pub fn initial(setup: &NodeSetup, allocatable: ResourceList) -> Self {
        NodeObject {
            labels: Arc::new(registration::labels(setup)),
            taints: registration::taints(setup),
            allocatable,
            ..NodeObject::default()
        }
    }

    /// The volume is attached, and the controller leaves it so: both are in one version of the object.
    pub fn has_attached(&self, name: &str) -> bool {
        self.volumes_in_use.contains(name) && self.volumes_attached.contains(name)
    }

    /// Whole units of a resource; `None` when the node does not have it.
    pub fn has(&self, resource: &str) -> Option<i64> {
        self.allocatable.contains_key(resource).then(|| quantity::amount(Some(&self.allocatable), resource).value())
    }
}

/// Internal addresses before external ones.
fn host_ips(node: &Node) -> Vec<String> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let of = |kind: &'static str| addresses.clone().filter(move |address| address.type_ == kind);
    let ips = || of("InternalIP").chain(of("ExternalIP")).filter_map(|address| address.address.parse::<IpAddr>().ok());
    let Some(primary) = ips().next() else { return Vec::new() };
    let secondary = ips().find(|ip| ip.is_ipv6() != primary.is_ipv6());
    [Some(primary), secondary].into_iter().flatten().map(|ip| ip.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_show_the_nodes_first_address_of_each_family() {
        let ips = |addresses: &[(&str, &str)]| {
            let addresses = addresses.iter().map(|(kind, address)| json!({ "type": kind, "address": address }));
            let node = json!({ "status": { "addresses": addresses.collect::<Vec<_>>() } });
            NodeObject::of(&serde_json::from_value(node).unwrap()).host_ips
        };
        let outside = ("ExternalIP", "198.51.100.7");
        assert_eq!(ips(&[("Hostname", "n"), outside, ("InternalIP", "10.0.0.7")]), ["10.0.0.7"]);
        assert_eq!(ips(&[("InternalIP", "fd00::7"), ("InternalIP", "fd00::8"), outside]), ["fd00::7", "198.51.100.7"]);
        assert!(ips(&[("InternalDNS", "n.example"), ("InternalIP", "?")]).is_empty());
    }
}
