//! The Node object: registration and status reports.
//!
//! Owns: the whole `Node` from facts, what counts as a change, the events of a change. Never: sends requests.
//! Fields of other writers (labels, taints, conditions, resources of their own) stay as they are.
//! Upstream: `kubelet_node_status.go`, `nodestatus/setters.go`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeDaemonEndpoints, NodeFeatures, NodeRuntimeHandler,
        NodeRuntimeHandlerFeatures, NodeStatus, NodeSwapStatus, NodeSystemInfo, Taint,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};

use crate::{
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    observation::{RuntimeHandler, RuntimeStatus},
    snapshot::NodeView,
};

pub mod conditions;
pub mod lease;
pub mod patch;
pub mod registration;
pub mod resources;

pub use self::{
    patch::patch,
    registration::{initial, reconciled},
    resources::{Reservations, ResourceList},
};

const LABEL_OS: &str = "kubernetes.io/os";
const LABEL_ARCH: &str = "kubernetes.io/arch";
const OS: &str = "linux";
/// Set for an external cloud provider, which uses it to find the node's addresses.
const PROVIDED_IP: &str = "alpha.kubernetes.io/provided-node-ip";
/// Upstream's limit of names per image.
const MAX_NAMES_PER_IMAGE: usize = 5;

/// Facts about the machine, read once at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    pub machine_id: String,
    pub system_uuid: String,
    pub boot_id: String,
    pub kernel_version: String,
    pub os_image: String,
    pub cpus: i64,
    pub memory_bytes: i64,
    pub swap_bytes: i64,
    /// Reserved pages, by page size in bytes.
    pub huge_pages: BTreeMap<i64, i64>,
    /// The most processes and threads; `None` when it could not be read.
    pub max_pids: Option<i64>,
    /// The file system of the root directory; `None` when it could not be read.
    pub storage_bytes: Option<i64>,
}

/// The node's configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeSetup {
    pub name: String,
    /// From `--node-ip`, or detected; primary first, a second one only if configured.
    pub internal_ips: Vec<String>,
    /// `--node-ip` names at least one address.
    pub has_configured_ips: bool,
    /// `--node-labels`.
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub provider_id: String,
    /// `--cloud-provider=external`.
    pub has_external_cloud: bool,
    /// `enableControllerAttachDetach`.
    pub attaches_by_controller: bool,
    pub max_pods: i64,
    /// Zero is no limit.
    pub pods_per_core: i64,
    pub reservations: Reservations,
    /// `localStorageCapacityIsolation`.
    pub isolates_storage: bool,
    pub port: i32,
    /// `nodeStatusMaxImages`; negative is no limit.
    pub max_images: i32,
    pub kubelet_version: String,
    /// In Go's terms: `amd64`.
    pub architecture: String,
    /// No device plugin is registered, so extended resources of an earlier node of this name are gone.
    pub resets_extended_resources: bool,
    /// Upstream's names of features that the control plane must not assume, in order.
    pub declared_features: Vec<String>,
}

/// The inputs of one report.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    pub setup: &'a NodeSetup,
    pub machine: &'a Machine,
    pub view: &'a NodeView,
    /// `None` when the runtime did not list them: the last report stays.
    pub images: Option<&'a [ImageFacts]>,
    pub at: Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageFacts {
    pub id: String,
    /// Names with digests first, then those with tags.
    pub names: Vec<String>,
    pub size_bytes: i64,
}

/// The updated node, from the one in the API server.
pub fn updated(known: &Node, report: Report<'_>) -> Node {
    let Report { setup, machine, view, images, .. } = report;
    let mut node = known.clone();
    let labels = node.metadata.labels.get_or_insert_default();
    labels.insert(LABEL_OS.to_owned(), OS.to_owned());
    labels.insert(LABEL_ARCH.to_owned(), setup.architecture.clone());
    set_provided_ip(&mut node, setup);

    let status = node.status.get_or_insert_default();
    status.addresses = addresses(status, setup);
    resources::set(status, machine, setup);
    status.node_info = Some(node_info(machine, setup, view));
    status.daemon_endpoints = Some(NodeDaemonEndpoints { kubelet_endpoint: Some(DaemonEndpoint { port: setup.port }) });
    if let Some(images) = images {
        status.images = reported_images(images, setup.max_images);
    }
    status.runtime_handlers = some(view.runtime_handlers.iter().map(runtime_handler).collect());
    if let Some(policy) = view.supplemental_groups_policy {
        status.features = Some(NodeFeatures { supplemental_groups_policy: Some(policy) });
    }
    if let Some(names) = &view.volumes_in_use {
        status.volumes_in_use = some(names.clone());
    }
    status.declared_features = some(setup.declared_features.clone());
    let missing = resources::missing(status, setup);
    conditions::set(status, view, &missing, report.at);
    node
}

/// Everything except heartbeats, which change with every report.
pub fn has_changed(known: &Node, updated: &Node) -> bool {
    known.metadata != updated.metadata || without_heartbeats(known) != without_heartbeats(updated)
}

/// When the node was last reported, by this or a previous process.
pub fn last_report(known: &Node) -> Option<Timestamp> {
    let ready = conditions::find(known.status.as_ref()?, conditions::READY)?;
    ready.last_heartbeat_time.as_ref().map(|time| time.0)
}

/// The changes of a report, as events. `before` is `None` for a node that was just created.
pub fn status_change_events(before: Option<&Node>, after: &Node) -> Vec<EventRecord> {
    let name = after.metadata.name.clone().unwrap_or_default();
    let status_of = |node: &Node| node.status.clone().unwrap_or_default();
    let (before, after) = (before.map(status_of).unwrap_or_default(), status_of(after));
    let mut events: Vec<_> = conditions::turns(&before, &after).map(|reason| status_event(&name, reason)).collect();
    let boot_id = |status: &NodeStatus| status.node_info.as_ref().map(|info| info.boot_id.clone()).unwrap_or_default();
    if !boot_id(&before).is_empty() && boot_id(&before) != boot_id(&after) {
        let message = format!("Node {name} has been rebooted, boot id: {}", boot_id(&after));
        let about = InvolvedObject::Node;
        events.push(EventRecord::new(about, Severity::Warning, event_reasons::NODE_REBOOTED, message));
    }
    events
}

/// `Node n status is now: NodeReady`.
pub fn status_event(name: &str, reason: &str) -> EventRecord {
    let message = format!("Node {name} status is now: {reason}");
    EventRecord::new(InvolvedObject::Node, Severity::Normal, reason, message)
}

/// `containerd://2.4.2`: upstream parses the runtime's version, and drops an invalid one.
pub fn runtime_version(status: &RuntimeStatus) -> String {
    let version = status.version.trim().trim_start_matches('v');
    let numbers_len = version.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (numbers, rest) = version.split_at(numbers_len);
    let numbers = numbers.trim_end_matches('.');
    let is_suffix = rest.starts_with(['-', '+'])
        && numbers.split('.').count() == 3
        && rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-+".contains(&byte));
    let version = match numbers {
        "" => "Unknown".to_owned(),
        _ if is_suffix => format!("{numbers}{rest}"),
        _ => numbers.to_owned(),
    };
    format!("{}://{version}", status.name)
}

fn set_provided_ip(node: &mut Node, setup: &NodeSetup) {
    if setup.has_external_cloud && setup.has_configured_ips {
        let annotations = node.metadata.annotations.get_or_insert_default();
        annotations.insert(PROVIDED_IP.to_owned(), setup.internal_ips.join(","));
    } else if let Some(annotations) = &mut node.metadata.annotations {
        annotations.remove(PROVIDED_IP);
    }
}

fn addresses(status: &NodeStatus, setup: &NodeSetup) -> Option<Vec<NodeAddress>> {
    let address = |kind: &str, address: &String| NodeAddress { type_: kind.to_owned(), address: address.clone() };
    let host_name = address("Hostname", &setup.name);
    let has_addresses = status.addresses.as_ref().is_some_and(|addresses| !addresses.is_empty());
    if setup.has_external_cloud && has_addresses {
        // The addresses are the cloud provider's.
        return status.addresses.clone();
    }
    if setup.has_external_cloud && !setup.has_configured_ips {
        return Some(vec![host_name]);
    }
    if setup.internal_ips.is_empty() {
        return status.addresses.clone();
    }
    let internal = setup.internal_ips.iter().map(|ip| address("InternalIP", ip));
    Some(internal.chain([host_name]).collect())
}

fn node_info(machine: &Machine, setup: &NodeSetup, view: &NodeView) -> NodeSystemInfo {
    NodeSystemInfo {
        machine_id: machine.machine_id.clone(),
        system_uuid: machine.system_uuid.clone(),
        boot_id: machine.boot_id.clone(),
        kernel_version: machine.kernel_version.clone(),
        os_image: machine.os_image.clone(),
        container_runtime_version: view.runtime_version.clone(),
        kubelet_version: setup.kubelet_version.clone(),
        kube_proxy_version: String::new(),
        operating_system: OS.to_owned(),
        architecture: setup.architecture.clone(),
        swap: (machine.swap_bytes != 0).then_some(NodeSwapStatus { capacity: Some(machine.swap_bytes) }),
    }
}

/// The largest images, largest first.
fn reported_images(images: &[ImageFacts], most: i32) -> Option<Vec<ContainerImage>> {
    let mut images: Vec<&ImageFacts> = images.iter().collect();
    images.sort_by(|one, other| (other.size_bytes, &other.id).cmp(&(one.size_bytes, &one.id)));
    if let Ok(most) = usize::try_from(most) {
        images.truncate(most);
    }
    let reported = images.into_iter().map(|image| ContainerImage {
        names: some(image.names.iter().take(MAX_NAMES_PER_IMAGE).cloned().collect()),
        size_bytes: Some(image.size_bytes),
    });
    some(reported.collect())
}

fn runtime_handler(handler: &RuntimeHandler) -> NodeRuntimeHandler {
    NodeRuntimeHandler {
        name: Some(handler.name.clone()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(handler.recursive_read_only_mounts),
            user_namespaces: Some(handler.user_namespaces),
        }),
    }
}

fn without_heartbeats(node: &Node) -> NodeStatus {
    let mut status = node.status.clone().unwrap_or_default();
    let conditions = status.conditions.get_or_insert_default();
    conditions.sort_by(|one, other| one.type_.cmp(&other.type_));
    for condition in conditions {
        condition.last_heartbeat_time = None;
    }
    status
}

/// The API omits empty lists.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn listed(list: ResourceList) -> Option<ResourceList> {
    (!list.is_empty()).then_some(list)
}

/// The API's times have no fractions of a second.
fn whole_seconds(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

#[cfg(test)]
mod tests;
