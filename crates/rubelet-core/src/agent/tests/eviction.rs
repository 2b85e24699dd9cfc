//! Eviction, from a look at the node to the end of a pod.

use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;

use super::*;
use crate::{
    eviction::{
        threshold::{Observation, Signal, Threshold, ThresholdValue},
        usage::{ContainerUsage, NodeUsage, PodUsage},
    },
    image_gc::{ImageListing, ListedImage},
};

fn threshold(signal: Signal) -> Threshold {
    let value = ThresholdValue::Quantity(100, "100".to_owned());
    Threshold { signal, value, min_reclaim: None, grace: Duration::ZERO }
}

fn node(signal: Signal) -> TestAgent {
    let eviction = EvictionSettings { thresholds: vec![threshold(signal)], ..EvictionSettings::default() };
    TestAgent::new(Settings { sources: vec![Source::Api], eviction, ..Settings::for_node("node") })
}

fn pod(name: &str) -> Pod {
    let mut pod = mk_pod("always | main a");
    (pod.metadata.name, pod.metadata.uid) = (Some(name.to_owned()), Some(name.to_owned()));
    pod
}

impl TestAgent {
    fn running(&mut self, pods: &[Pod]) {
        self.handle(Event::Config { source: Source::Api, pods: pods.iter().cloned().map(Arc::new).collect() });
        self.runtime_is_up(&[]);
        if self.pending().contains(&"FindImageFs") {
            self.answer("FindImageFs", Ok(Facts::Nothing));
        }
        for _ in pods {
            self.inspected("a: running 5s");
        }
    }

    fn node_has(&mut self, signal: Signal, available: u64) {
        let signals = BTreeMap::from([(signal, Observation { available, capacity: 1000 })]);
        let usage = NodeUsage { signals, layout: None };
        self.answer("MeasureNode", Ok(Facts::NodeUsage(usage)));
    }

    fn pods_use(&mut self, pods: &[(&str, u64)]) {
        let usage = |bytes: u64| PodUsage {
            memory_bytes: bytes,
            containers: BTreeMap::from([(
                "a".to_owned(),
                ContainerUsage { memory_bytes: bytes, ..ContainerUsage::default() },
            )]),
            ..PodUsage::default()
        };
        let usages = pods.iter().map(|(name, bytes)| (PodUid::new(*name), usage(*bytes))).collect();
        self.answer("MeasurePods", Ok(Facts::PodUsages(usages)));
    }

    fn failure_of(&self, name: &str) -> Option<String> {
        let record = &self.agent.records[&PodUid::new(name)];
        record.failure.as_ref().map(|failure| format!("{}: {}", failure.reason, failure.message))
    }
}

#[test]
fn largest_pod_is_evicted_when_memory_runs_low_and_looked_at_again_when_it_is_gone() {
    let mut test = node(Signal::MemoryAvailable);
    test.running(&[pod("big"), pod("small")]);
    test.node_has(Signal::MemoryAvailable, 99);
    assert_eq!(test.events, ["EvictionThresholdMet"]);
    test.pods_use(&[("big", 500), ("small", 10)]);
    let message = "Evicted: The node was low on resource: memory. Threshold quantity: 100, available: 99. \
        Container a was using 500, request is 0, has larger consumption of memory. ";
    assert_eq!((test.failure_of("big").as_deref(), test.failure_of("small")), (Some(message), None));
    assert!(test.events.contains(&"Evicted".to_owned()));
    assert!(!test.pending().contains(&"MeasureNode"), "{:?}", test.pending());

    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(137) 0s ago");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(137) 0s ago");
    test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    test.node_has(Signal::MemoryAvailable, 99);
    test.pods_use(&[("small", 10)]);
    assert!(test.failure_of("small").is_some());
}

#[test]
fn memory_is_looked_at_while_the_runtime_does_not_say_where_its_images_are() {
    let mut test = node(Signal::MemoryAvailable);
    test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(pod("big"))] });
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    assert!(test.pending().contains(&"FindImageFs"), "{:?}", test.pending());
    test.node_has(Signal::MemoryAvailable, 99);
    test.pods_use(&[("big", 500)]);
    assert!(test.failure_of("big").is_some());
}

#[test]
fn disk_pressure_waits_for_the_layout_of_the_disks() {
    let mut test = node(Signal::NodeFsAvailable);
    test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(pod("big"))] });
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test.node_has(Signal::NodeFsAvailable, 99);
    assert!(test.events.is_empty(), "{:?}", test.events);
    // It fails: then the disks are taken as one, and looked at now.
    test.answer("FindImageFs", Ok(Facts::Nothing));
    test.node_has(Signal::NodeFsAvailable, 99);
    assert_eq!(test.events, ["EvictionThresholdMet"]);
}

#[test]
fn status_of_an_evicted_pod_says_why_after_an_agent_restart() {
    let mut test = node(Signal::MemoryAvailable);
    let mut evicted = pod("big");
    evicted.status = Some(PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some("Evicted".to_owned()),
        message: Some("The node was low on resource: memory. ".to_owned()),
        ..PodStatus::default()
    });
    test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(evicted)] });
    test.runtime_is_up(&[]);
    if test.pending().contains(&"InspectPod") {
        test.inspected("sandbox gone");
    }
    let snapshot = test.agent.snapshot();
    let status = &snapshot.pods.get(&PodUid::new("big")).expect("it is kept").status;
    let said = (status.phase.as_deref(), status.reason.as_deref(), status.message.as_deref());
    assert_eq!(said, (Some("Failed"), Some("Evicted"), Some("The node was low on resource: memory. ")));
}

#[test]
fn deleted_pod_that_is_still_being_stopped_is_not_evicted() {
    let mut test = node(Signal::MemoryAvailable);
    test.running(&[pod("big"), pod("small")]);
    test.handle(Event::ConfigChange { source: Source::Api, pods: Vec::new(), removed: vec![PodUid::new("big")] });
    test.node_has(Signal::MemoryAvailable, 99);
    test.pods_use(&[("big", 500), ("small", 10)]);
    assert_eq!(test.failure_of("big"), None);
    assert!(test.failure_of("small").is_some());
}

/// A node low on disk space with a pod that has ended, and has this phase in the API.
fn low_on_disk_with_an_ended_pod(phase: &str) -> TestAgent {
    let mut test = node(Signal::NodeFsAvailable);
    let mut done = pod("done");
    done.spec.as_mut().expect("a spec").restart_policy = Some("Never".to_owned());
    test.running(&[pod("web")]);
    let change = |pod: Pod| Event::ConfigChange { source: Source::Api, pods: vec![Arc::new(pod)], removed: Vec::new() };
    test.handle(change(done.clone()));
    test.inspected("a: exit(0) 9s ago");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(0) 9s ago");
    test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    done.status.get_or_insert_default().phase = Some(phase.to_owned());
    test.handle(change(done));
    test.node_has(Signal::NodeFsAvailable, 99);
    test
}

#[test]
fn dead_containers_of_a_pod_whose_end_is_not_in_the_api_stay() {
    let test = low_on_disk_with_an_ended_pod("Running");
    assert!(!test.pending().contains(&"RemoveContainer"), "{:?}", test.pending());
}

#[test]
fn dead_containers_and_unused_images_go_before_pods() {
    let mut test = low_on_disk_with_an_ended_pod("Succeeded");
    assert!(test.pending().contains(&"RemoveContainer"), "{:?}", test.pending());
    test.answer("RemoveContainer", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s");
    let image = ListedImage { id: "old".to_owned(), ..ListedImage::default() };
    test.answer("ListImages", Ok(Facts::Images(ImageListing { images: vec![image], ..ImageListing::default() })));
    // It was seen for the first time, and is too young.
    assert!(!test.pending().contains(&"DeleteImage"), "{:?}", test.pending());
    test.node_has(Signal::NodeFsAvailable, 99);
    test.pods_use(&[("web", 10)]);
    assert!(test.failure_of("web").is_some());
    assert_eq!(test.events.iter().filter(|reason| *reason == "EvictionThresholdMet").count(), 1);
}

#[test]
fn image_that_is_a_volume_of_a_container_is_not_deleted() {
    let mut settings = Settings { sources: vec![Source::Api], ..Settings::for_node("node") };
    settings.image_gc.min_age = Duration::ZERO;
    settings.image_gc.high_percent = 50;
    settings.image_gc.low_percent = 0;
    let eviction = EvictionSettings { limits_local_storage: false, ..settings.eviction };
    let mut test = TestAgent::with_cgroups(Settings { cgroups: None, eviction, ..settings });
    test.running(&[pod("web")]);
    let record = test.agent.records.get_mut(&PodUid::new("web")).expect("it runs");
    let facts = Arc::make_mut(record.facts.as_mut().expect("facts"));
    facts.containers[0].image_volumes = vec!["data".to_owned()];
    for _ in 0..2 {
        while !test.pending().contains(&"ListImages") {
            test.at_secs += 60;
            test.handle(Event::Due);
        }
        let images = ["data", "old"].map(|id| ListedImage { id: id.to_owned(), ..ListedImage::default() });
        let space = Some(crate::image_gc::Space { capacity_bytes: 100, available_bytes: 1 });
        let listing = ImageListing { images: images.to_vec(), space, ..ImageListing::default() };
        test.answer("ListImages", Ok(Facts::Images(listing)));
    }
    test.answer("DeleteImage", Ok(Facts::ImageDeleted { space: None }));
    test.handle(Event::Due);
    let deleted: Vec<_> = test.in_flight.iter().filter(|(_, op)| matches!(op, Op::Image(_))).collect();
    assert!(deleted.is_empty(), "only the unused one: {deleted:?}");
}

#[test]
fn pod_over_its_storage_limit_is_evicted_and_critical_ones_stay() {
    let settings = Settings { sources: vec![Source::Api], ..Settings::for_node("node") };
    let mut test = TestAgent::with_cgroups(Settings { cgroups: None, ..settings });
    let limited = |name: &str, priority: i32| {
        let mut pod = pod(name);
        let spec = pod.spec.as_mut().expect("a spec");
        let volume = serde_json::json!({ "name": "v", "emptyDir": { "sizeLimit": "1Ki" } });
        spec.volumes = Some(vec![serde_json::from_value(volume).expect("a volume")]);
        spec.priority = Some(priority);
        pod
    };
    test.running(&[limited("web", 0), limited("critical", 2_000_000_000), pod("free")]);
    test.at_secs += 10;
    test.handle(Event::Due);
    let asked = test.in_flight.iter().find_map(|(_, op)| match op {
        Op::Node(NodeOp::MeasurePods { pods, .. }) => Some(pods.iter().map(|it| it.pod.uid.to_string()).collect()),
        _ => None,
    });
    assert_eq!(asked, Some(vec!["critical".to_owned(), "web".to_owned()]));
    let used = crate::eviction::usage::DiskUsage { bytes: 2000, inodes: 1 };
    let usage = || PodUsage { volumes: BTreeMap::from([("v".to_owned(), used)]), ..PodUsage::default() };
    let usages = [(PodUid::new("web"), usage()), (PodUid::new("critical"), usage())].into();
    test.answer("MeasurePods", Ok(Facts::PodUsages(usages)));
    let message = "Evicted: Usage of EmptyDir volume \"v\" exceeds the limit \"1Ki\". ";
    assert_eq!((test.failure_of("web").as_deref(), test.failure_of("critical")), (Some(message), None));
}
