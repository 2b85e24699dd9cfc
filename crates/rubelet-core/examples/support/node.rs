//! An agent with running pods, for the measurements beside this file.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    agent::Agent,
    api_pod, container,
    effect::{Effect, Facts},
    event::{Event, EventStream, Source},
    id::{ContainerId, PodRef, PodUid, SandboxId},
    observation::{
        ContainerFacts, ContainerResources, ContainerState, ContainerUser, ListedPod, ListedState, Listing, PodFacts,
        RuntimeStatus, SandboxFacts, SandboxState,
    },
    op::{ApiOp, NodeOp, Op, PodOp},
    pod_config::mark,
    settings::Settings,
    time::{Now, Uptime},
};
use serde_json::{Value, json};

const POD: &str = include_str!("../../testdata/pod_at_rest.json");

pub fn uid(number: usize) -> PodUid {
    PodUid::new(format!("00000000-0000-4000-8000-{number:012}"))
}

/// A pod as the API server sends it.
fn document(uid: &PodUid, number: usize) -> Value {
    let mut pod: Value = serde_json::from_str(POD).expect("it is JSON");
    pod["metadata"]["name"] = json!(format!("web-7d4b9c6f5-{number:05}"));
    pod["metadata"]["uid"] = json!(uid.as_str());
    pod
}

/// An agent, and the pods its source keeps.
pub struct TestNode {
    agent: Agent,
    source: BTreeMap<PodUid, Arc<Pod>>,
    asked: Vec<Effect>,
}

impl TestNode {
    /// Capacity for this many pods; none is there yet.
    pub fn new(pods: usize) -> Self {
        let mut settings = Settings { sources: vec![Source::Api], ..Settings::for_node("node") };
        settings.node.allocatable.pods = i64::try_from(pods).expect("a number of pods");
        TestNode { agent: Agent::new(settings, now()), source: BTreeMap::new(), asked: Vec::new() }
    }

    /// The first list of the API server: so many pods, all running.
    pub fn lists(&mut self, pods: usize) {
        self.happens(Event::RuntimeEvents(EventStream::Up));
        for number in 0..pods {
            self.decoded(&document(&uid(number), number));
        }
        self.happens(Event::Config { source: Source::Api, pods: self.source.values().cloned().collect() });
    }

    fn decoded(&mut self, document: &Value) -> Arc<Pod> {
        let mut pod = api_pod::decode(document.to_string().as_bytes()).expect("a pod");
        mark(&mut pod, Source::Api, "2026-06-01T12:00:00Z");
        let pod = Arc::new(pod);
        self.source.insert(PodUid::of(&pod), pod.clone());
        pod
    }

    pub fn happens(&mut self, event: Event) {
        self.asked.extend(self.agent.handle(now(), event));
    }

    /// Gives results until no effect is pending; every pod is running.
    pub fn settle(&mut self) {
        while let Some(effect) = self.asked.pop() {
            if let Effect::Do { id, op, .. } = effect {
                let facts = self.answer(&op);
                self.happens(Event::Done { id, result: Ok(facts) });
            }
        }
    }

    fn answer(&mut self, op: &Op) -> Facts {
        match op {
            Op::Node(NodeOp::CheckRuntime) => {
                let name = "containerd".to_owned();
                Facts::Runtime(RuntimeStatus { name, ..RuntimeStatus::default() })
            }
            Op::Node(NodeOp::Relist) => {
                let pods = self.source.iter().map(|(uid, pod)| (uid.clone(), listed(pod))).collect();
                Facts::Listing(Listing { looked_at: now().uptime, pods })
            }
            Op::Pod(PodOp::Inspect { pod }) => Facts::Pod(running(&self.source[&pod.uid])),
            Op::Api(ApiOp::PatchStatus { pod, patch, .. }) => self.patched(&pod.uid, patch),
            _ => Facts::Nothing,
        }
    }

    /// The API server applies the status, and its watch shows it. The first patch of a pod has all its fields.
    fn patched(&mut self, uid: &PodUid, patch: &Value) -> Facts {
        let mut stored = serde_json::to_value(&*self.source[uid]).expect("a pod");
        stored["metadata"]["resourceVersion"] = json!("2000");
        for (field, value) in
            patch["status"].as_object().into_iter().flatten().filter(|(field, _)| !field.starts_with('$'))
        {
            stored["status"][field] = value.clone();
        }
        let pod = self.decoded(&stored);
        self.happens(Event::ConfigChange { source: Source::Api, pods: vec![pod], removed: Vec::new() });
        Facts::ApiPod(self.source[uid].clone())
    }
}

fn listed(pod: &Pod) -> ListedPod {
    let facts = running(pod);
    ListedPod {
        pod: PodRef::of(pod),
        sandboxes: facts.sandboxes.iter().map(|sandbox| (sandbox.id.clone(), sandbox.state)).collect(),
        containers: facts.containers.iter().map(|it| (it.id.clone(), ListedState::Running)).collect(),
    }
}

fn running(pod: &Pod) -> PodFacts {
    let sandbox = SandboxFacts {
        id: SandboxId::new("b".repeat(64)),
        attempt: 0,
        state: SandboxState::Ready,
        created_at: Some(now().wall),
        runtime_handler: String::new(),
        host_network: false,
        ips: vec!["10.1.0.7".to_owned()],
    };
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers).map(|spec| ContainerFacts {
        id: ContainerId::new(format!("{}{}", spec.name, "c".repeat(60))),
        sandbox: sandbox.id.clone(),
        name: spec.name.clone(),
        attempt: 0,
        hash: Some(container::hash::hash(spec)),
        image: spec.image.clone().unwrap_or_default(),
        image_ref: format!("sha256:{}", "d".repeat(64)),
        created_at: now().wall,
        state: ContainerState::Running { started_at: now().wall },
        log_path: String::new(),
        image_volumes: Vec::new(),
        user: Some(ContainerUser { uid: 0, gid: 0, supplemental_groups: vec![0] }),
        resources: ContainerResources::default(),
    });
    let containers = containers.collect();
    PodFacts { looked_at: now().uptime, sandboxes: vec![sandbox], containers, logged_attempts: BTreeMap::new() }
}

fn now() -> Now {
    Now { uptime: Uptime::new(Duration::from_secs(3600)), wall: Timestamp::UNIX_EPOCH + Duration::from_secs(1 << 30) }
}
