//! The Node object from facts: registration, reports, changes.

use std::collections::BTreeSet;

use k8s_openapi::{
    api::core::v1::{NodeCondition, NodeSpec},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use serde_json::{Value, json};

use super::*;
use crate::{
    eviction::threshold::Pressure,
    snapshot::NodeReadiness,
    test_support::{ago, now},
};

fn setup() -> NodeSetup {
    NodeSetup {
        name: "n1".to_owned(),
        internal_ips: vec!["10.0.0.7".to_owned()],
        attaches_by_controller: true,
        max_pods: 110,
        reservations: Reservations {
            eviction: [("memory.available", "100Mi"), ("nodefs.available", "10%"), ("imagefs.available", "15%")]
                .map(|(signal, threshold)| (signal.to_owned(), threshold.to_owned()))
                .into(),
            ..Reservations::default()
        },
        isolates_storage: true,
        port: 10250,
        max_images: 50,
        kubelet_version: "v1.36.3+x".to_owned(),
        architecture: "amd64".to_owned(),
        declared_features: vec!["ExtendWebSocketsToKubelet".to_owned()],
        ..NodeSetup::default()
    }
}

fn machine() -> Machine {
    Machine {
        machine_id: "m".to_owned(),
        system_uuid: "s".to_owned(),
        boot_id: "b1".to_owned(),
        kernel_version: "6.12".to_owned(),
        os_image: "Debian".to_owned(),
        cpus: 2,
        memory_bytes: 16_761_114_624,
        swap_bytes: 0,
        huge_pages: BTreeMap::from([(2 << 20, 0), (1 << 30, 0)]),
        max_pids: Some(32_768),
        storage_bytes: Some(52_710_469_632),
    }
}

fn view(readiness: NodeReadiness) -> NodeView {
    NodeView { readiness, runtime_version: "containerd://2.4.2".to_owned(), ..NodeView::default() }
}

fn not_ready(problem: &str) -> NodeView {
    view(NodeReadiness::NotReady(vec![problem.to_owned()]))
}

/// The inputs a test varies.
struct Case {
    setup: NodeSetup,
    machine: Machine,
    view: NodeView,
    images: Option<Vec<ImageFacts>>,
    at: Timestamp,
}

impl Case {
    fn new() -> Self {
        Case {
            setup: setup(),
            machine: machine(),
            view: view(NodeReadiness::Ready),
            images: Some(Vec::new()),
            at: now().wall,
        }
    }

    fn report(&self) -> Report<'_> {
        Report {
            setup: &self.setup,
            machine: &self.machine,
            view: &self.view,
            images: self.images.as_deref(),
            at: self.at,
        }
    }
}

/// A node that was registered and reported a minute ago.
fn registered() -> Node {
    initial(Case { at: ago(60), ..Case::new() }.report())
}

fn lines(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap()
}

fn reasons(events: &[EventRecord]) -> Vec<&str> {
    events.iter().map(|event| event.reason.as_str()).collect()
}

#[test]
fn new_node_registers_all_its_fields() {
    let node = serde_json::to_value(initial(Case::new().report())).unwrap();
    insta::assert_snapshot!(lines(&node), @r#"
    {
      "apiVersion": "v1",
      "kind": "Node",
      "metadata": {
        "annotations": {
          "volumes.kubernetes.io/controller-managed-attach-detach": "true"
        },
        "labels": {
          "beta.kubernetes.io/arch": "amd64",
          "beta.kubernetes.io/os": "linux",
          "kubernetes.io/arch": "amd64",
          "kubernetes.io/hostname": "n1",
          "kubernetes.io/os": "linux"
        },
        "name": "n1"
      },
      "spec": {},
      "status": {
        "addresses": [
          {
            "address": "10.0.0.7",
            "type": "InternalIP"
          },
          {
            "address": "n1",
            "type": "Hostname"
          }
        ],
        "allocatable": {
          "cpu": "2",
          "ephemeral-storage": "47439422591",
          "hugepages-1Gi": "0",
          "hugepages-2Mi": "0",
          "memory": "16265876Ki",
          "pods": "110"
        },
        "capacity": {
          "cpu": "2",
          "ephemeral-storage": "51475068Ki",
          "hugepages-1Gi": "0",
          "hugepages-2Mi": "0",
          "memory": "16368276Ki",
          "pods": "110"
        },
        "conditions": [
          {
            "lastHeartbeatTime": "2026-06-01T12:00:00Z",
            "lastTransitionTime": "2026-06-01T12:00:00Z",
            "message": "kubelet has sufficient memory available",
            "reason": "KubeletHasSufficientMemory",
            "status": "False",
            "type": "MemoryPressure"
          },
          {
            "lastHeartbeatTime": "2026-06-01T12:00:00Z",
            "lastTransitionTime": "2026-06-01T12:00:00Z",
            "message": "kubelet has no disk pressure",
            "reason": "KubeletHasNoDiskPressure",
            "status": "False",
            "type": "DiskPressure"
          },
          {
            "lastHeartbeatTime": "2026-06-01T12:00:00Z",
            "lastTransitionTime": "2026-06-01T12:00:00Z",
            "message": "kubelet has sufficient PID available",
            "reason": "KubeletHasSufficientPID",
            "status": "False",
            "type": "PIDPressure"
          },
          {
            "lastHeartbeatTime": "2026-06-01T12:00:00Z",
            "lastTransitionTime": "2026-06-01T12:00:00Z",
            "message": "kubelet is posting ready status",
            "reason": "KubeletReady",
            "status": "True",
            "type": "Ready"
          }
        ],
        "daemonEndpoints": {
          "kubeletEndpoint": {
            "Port": 10250
          }
        },
        "declaredFeatures": [
          "ExtendWebSocketsToKubelet"
        ],
        "nodeInfo": {
          "architecture": "amd64",
          "bootID": "b1",
          "containerRuntimeVersion": "containerd://2.4.2",
          "kernelVersion": "6.12",
          "kubeProxyVersion": "",
          "kubeletVersion": "v1.36.3+x",
          "machineID": "m",
          "operatingSystem": "linux",
          "osImage": "Debian",
          "systemUUID": "s"
        }
      }
    }
    "#);
}

#[test]
fn a_cloud_node_registers_with_labels_taints_and_provider() {
    let mut case = Case::new();
    case.setup.labels = BTreeMap::from([("role".to_owned(), "db".to_owned())]);
    case.setup.taints = vec![Taint { key: "k".to_owned(), effect: "NoExecute".to_owned(), ..Taint::default() }];
    case.setup.provider_id = "cloud://7".to_owned();
    case.setup.has_external_cloud = true;
    let node = initial(case.report());
    let spec = node.spec.unwrap();
    let taints: Vec<_> = spec.taints.unwrap().into_iter().map(|taint| taint.key).collect();
    assert_eq!(taints, ["k", "node.cloudprovider.kubernetes.io/uninitialized"]);
    assert_eq!(spec.provider_id.as_deref(), Some("cloud://7"));
    assert_eq!(node.metadata.labels.unwrap()["role"], "db");
    // Its addresses are set by the cloud provider.
    let kinds: Vec<_> = node.status.unwrap().addresses.unwrap().into_iter().map(|address| address.type_).collect();
    assert_eq!(kinds, ["Hostname"]);
}

#[test]
fn reserved_resources_are_not_allocatable() {
    let mut case = Case::new();
    let list = |cpu: &str, memory: &str| {
        BTreeMap::from([("cpu".to_owned(), cpu.to_owned()), ("memory".to_owned(), memory.to_owned())])
    };
    case.setup.reservations.system = list("100m", "1Gi");
    case.setup.reservations.kube = list("0.5", "512Mi");
    case.machine.huge_pages = BTreeMap::from([(2 << 20, 100)]);
    case.setup.pods_per_core = 10;
    let capacity = resources::capacity(&case.machine, &case.setup);
    let shown = |list: &ResourceList| list.iter().map(|(name, text)| format!("{name}={}", text.0)).collect::<Vec<_>>();
    assert_eq!(
        shown(&capacity),
        ["cpu=2", "ephemeral-storage=51475068Ki", "hugepages-2Mi=200Mi", "memory=16368276Ki", "pods=20"]
    );
    // Upstream keeps 10 % in 32 bits, hence the odd number of bytes.
    assert_eq!(
        shown(&resources::allocatable(&capacity, &case.setup.reservations)),
        ["cpu=1400m", "ephemeral-storage=47439422591", "hugepages-2Mi=200Mi", "memory=14488212Ki", "pods=20"]
    );
    case.setup.reservations.cpus = Some(1);
    assert_eq!(resources::allocatable(&capacity, &case.setup.reservations)["cpu"].0, "1");
    case.setup.reservations.system = list("100m", "1Ti");
    assert_eq!(resources::allocatable(&capacity, &case.setup.reservations)["memory"].0, "0");
}

#[test]
fn an_unchanged_node_changes_only_its_heartbeats() {
    let known = registered();
    let updated = updated(&known, Case::new().report());
    assert!(!has_changed(&known, &updated));
    insta::assert_snapshot!(patch(&known, &updated).unwrap(), @r#"{"status":{"$setElementOrder/conditions":[{"type":"MemoryPressure"},{"type":"DiskPressure"},{"type":"PIDPressure"},{"type":"Ready"}],"conditions":[{"lastHeartbeatTime":"2026-06-01T12:00:00Z","type":"MemoryPressure"},{"lastHeartbeatTime":"2026-06-01T12:00:00Z","type":"DiskPressure"},{"lastHeartbeatTime":"2026-06-01T12:00:00Z","type":"PIDPressure"},{"lastHeartbeatTime":"2026-06-01T12:00:00Z","type":"Ready"}]}}"#);
    assert_eq!(status_change_events(Some(&known), &updated), []);
    assert_eq!(last_report(&known), Some(ago(60)));
}

#[test]
fn not_ready_condition_has_reason_and_date() {
    let known = registered();
    let case = Case { view: not_ready("container runtime is down"), ..Case::new() };
    let updated = updated(&known, case.report());
    assert!(has_changed(&known, &updated));
    let ready = conditions::find(updated.status.as_ref().unwrap(), "Ready").unwrap();
    assert_eq!((ready.status.as_str(), ready.message.as_deref()), ("False", Some("container runtime is down")));
    assert_eq!(ready.last_transition_time, Some(Time(now().wall)));
    let events = status_change_events(Some(&known), &updated);
    assert_eq!(reasons(&events), ["NodeNotReady"]);
    assert_eq!(events[0].message, "Node n1 status is now: NodeNotReady");
    let back = super::updated(&updated, Case::new().report());
    assert_eq!(reasons(&status_change_events(Some(&updated), &back)), ["NodeReady"]);
}

#[test]
fn restarted_agent_keeps_a_pressure_until_its_first_look() {
    let under = |pressures: Option<BTreeSet<Pressure>>| {
        let view = NodeView { pressures, ..view(NodeReadiness::Ready) };
        Case { view, ..Case::new() }
    };
    let pressed = updated(&registered(), under(Some(BTreeSet::from([Pressure::Memory]))).report());
    let status_after = |pressures: Option<BTreeSet<Pressure>>| {
        let node = updated(&pressed, under(pressures).report());
        conditions::find(node.status.as_ref().unwrap(), "MemoryPressure").unwrap().status.clone()
    };
    assert_eq!((status_after(None).as_str(), status_after(Some(BTreeSet::new())).as_str()), ("True", "False"));
}

#[test]
fn several_problems_are_joined_in_one_message() {
    let view = view(NodeReadiness::NotReady(vec!["a".to_owned(), "b".to_owned()]));
    let mut case = Case { view, ..Case::new() };
    case.machine.storage_bytes = None;
    let node = initial(case.report());
    let ready = conditions::find(node.status.as_ref().unwrap(), "Ready").unwrap();
    assert_eq!(ready.message.as_deref(), Some("[a, b, missing node capacity for resources: ephemeral-storage]"));
}

#[test]
fn unknown_readiness_keeps_the_last_condition() {
    let known = registered();
    let case = Case { view: view(NodeReadiness::Unknown), ..Case::new() };
    let updated = updated(&known, case.report());
    let ready = conditions::find(updated.status.as_ref().unwrap(), "Ready").unwrap();
    assert_eq!((ready.status.as_str(), &ready.last_transition_time), ("True", &Some(Time(ago(60)))));
    // A new node, or one whose condition is Unknown, is not reported ready without a check.
    let node = initial(case.report());
    let ready = conditions::find(node.status.as_ref().unwrap(), "Ready").unwrap();
    assert_eq!(ready.message.as_deref(), Some("container runtime status check may not have completed yet"));
}

#[test]
fn foreign_fields_are_kept() {
    let mut known = registered();
    known.metadata.labels.get_or_insert_default().insert("zone".to_owned(), "a".to_owned());
    known.spec = Some(NodeSpec { unschedulable: Some(true), ..NodeSpec::default() });
    let status = known.status.get_or_insert_default();
    let network = NodeCondition {
        type_: "NetworkUnavailable".to_owned(),
        status: "False".to_owned(),
        ..NodeCondition::default()
    };
    status.conditions.get_or_insert_default().insert(0, network);
    status.volumes_in_use = Some(vec!["v".to_owned()]);
    let device =
        ("example.com/device".to_owned(), k8s_openapi::apimachinery::pkg::api::resource::Quantity("4".to_owned()));
    status.capacity.get_or_insert_default().extend([device.clone()]);
    status.allocatable.get_or_insert_default().extend([device]);
    let updated = updated(&known, Case::new().report());
    assert!(!has_changed(&known, &updated), "{:?}", patch(&known, &updated));
    assert_eq!(updated.status.unwrap().conditions.unwrap()[0].type_, "NetworkUnavailable");
}

#[test]
fn registration_updates_only_fields_the_agent_owns() {
    let mut known = registered();
    let labels = known.metadata.labels.get_or_insert_default();
    labels.insert("kubernetes.io/hostname".to_owned(), "other".to_owned());
    labels.insert("role".to_owned(), "web".to_owned());
    known.metadata.annotations = None;
    let quantity = |text: &str| k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.to_owned());
    let capacity = known.status.get_or_insert_default().capacity.get_or_insert_default();
    capacity.extend([("hugepages-64Ki".to_owned(), quantity("0")), ("example.com/gpu".to_owned(), quantity("2"))]);
    let mut case = Case::new();
    case.setup.labels = BTreeMap::from([("role".to_owned(), "db".to_owned())]);
    case.setup.resets_extended_resources = true;
    let node = reconciled(&known, case.report());
    insta::assert_snapshot!(patch(&known, &node).unwrap(), @r#"{"metadata":{"annotations":{"volumes.kubernetes.io/controller-managed-attach-detach":"true"},"labels":{"kubernetes.io/hostname":"n1"}},"status":{"allocatable":{"example.com/gpu":"0"},"capacity":{"example.com/gpu":"0","hugepages-64Ki":null}}}"#);
    assert_eq!(patch(&node, &reconciled(&node, case.report())), None);
}

#[test]
fn owners_of_the_node_are_never_patched() {
    let known = registered();
    let mut owned = known.clone();
    let owner = OwnerReference { kind: "ConfigMap".to_owned(), name: "own".to_owned(), ..OwnerReference::default() };
    owned.metadata.owner_references = Some(vec![owner]);
    for (before, after) in [(&known, &owned), (&owned, &known)] {
        assert_eq!(patch(before, after), None, "{:?}", after.metadata);
    }
    assert_eq!(known.metadata.owner_references, None, "nor is it registered with any");
}

#[test]
fn new_addresses_take_the_place_of_the_old_ones() {
    let known = registered();
    let mut case = Case { at: ago(60), ..Case::new() };
    case.setup.internal_ips = vec!["10.0.0.8".to_owned(), "fd00::8".to_owned()];
    let patch = patch(&known, &updated(&known, case.report())).unwrap();
    assert_eq!(
        patch,
        json!({"status": {"addresses": [
            {"address": "10.0.0.8", "type": "InternalIP"},
            {"address": "fd00::8", "type": "InternalIP"},
            {"address": "n1", "type": "Hostname"},
            {"$patch": "replace"},
        ]}})
    );
}

#[test]
fn reboot_is_recorded_once() {
    let known = registered();
    let mut case = Case::new();
    case.machine.boot_id = "b2".to_owned();
    let updated = updated(&known, case.report());
    let events = status_change_events(Some(&known), &updated);
    assert_eq!(events[0].message, "Node n1 has been rebooted, boot id: b2");
    assert_eq!((events[0].severity, events[0].reason.as_str()), (Severity::Warning, "Rebooted"));
    assert_eq!(status_change_events(Some(&updated), &super::updated(&updated, case.report())), []);
}

#[test]
fn node_created_ready_records_all_conditions() {
    assert_eq!(
        reasons(&status_change_events(None, &registered())),
        ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"]
    );
}

#[test]
fn the_largest_images_are_reported_with_their_first_names() {
    let image = |id: &str, size_bytes| ImageFacts {
        id: id.to_owned(),
        names: (1..=7).map(|number| format!("{id}:{number}")).collect(),
        size_bytes,
    };
    let mut case = Case { images: Some(vec![image("a", 1), image("c", 3), image("b", 2)]), ..Case::new() };
    case.setup.max_images = 2;
    let images = initial(case.report()).status.unwrap().images.unwrap();
    let sizes: Vec<_> = images.iter().filter_map(|image| image.size_bytes).collect();
    assert_eq!(sizes, [3, 2]);
    assert_eq!(images[0].names.as_ref().unwrap().len(), 5);
    case.setup.max_images = -1;
    assert_eq!(initial(case.report()).status.unwrap().images.unwrap().len(), 3);
    // A runtime that cannot list its images has not lost them.
    let known = initial(case.report());
    case.images = None;
    assert_eq!(updated(&known, case.report()).status.unwrap().images, known.status.unwrap().images);
}

#[test]
fn runtime_versions_read_as_upstream_reads_them() {
    for (said, shown) in [
        ("v2.4.2", "containerd://2.4.2"),
        ("2.0.0-rc.1", "containerd://2.0.0-rc.1"),
        ("1.6.20~ds1", "containerd://1.6.20"),
        ("", "containerd://Unknown"),
    ] {
        let status =
            RuntimeStatus { name: "containerd".to_owned(), version: said.to_owned(), ..RuntimeStatus::default() };
        assert_eq!(runtime_version(&status), shown);
    }
}
