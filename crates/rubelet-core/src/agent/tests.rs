//! The agent turn by turn: events in, effects out, results given by hand.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{
    api::core::v1::{ExecAction, Lifecycle, LifecycleHandler, Pod, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};

use crate::{
    agent::Agent,
    effect::{Effect, EffectError, EffectId, ErrorKind, Facts, ImageFacts},
    event::{Event, EventStream, Source},
    eviction::EvictionSettings,
    id::{PodRef, PodUid},
    observation::{ListedPod, Listing, PodFacts, Remains, RuntimeStatus, SandboxState},
    op::{ContainerOp, NodeOp, Op, PodOp, VolumeOp},
    settings::{ImageGcSettings, Settings},
    snapshot::NodeReadiness,
    test_support::{facts, later, mk_pod},
    time::Now,
};

mod admission;
mod api;
mod api_requests;
mod ends;
mod eviction;
mod images;
mod model;
mod odd_pods;
mod orphans;
mod probes;
mod shutdown;
mod upkeep;
mod volumes;

/// An agent, the seconds since it began, and its effects without a result.
struct TestAgent {
    agent: Agent,
    at_secs: u64,
    in_flight: Vec<(EffectId, Op)>,
    recalled: Vec<EffectId>,
    /// The reasons of events.
    events: Vec<String>,
}

/// The facts of a successful operation, if none are given: what it was to remove is gone.
fn nothing_else(op: &Op) -> Facts {
    match op {
        Op::Volume(VolumeOp::TearDown(_)) => Facts::Remains(Remains::Cgroup),
        Op::Pod(PodOp::RemoveCgroup(_)) => Facts::Remains(Remains::PodDir),
        Op::Pod(PodOp::RemoveDir(_)) => Facts::Remains(Remains::Logs),
        Op::Pod(PodOp::RemoveLogDir(_)) => Facts::Remains(Remains::Nothing),
        _ => Facts::Nothing,
    }
}

impl TestAgent {
    /// Without pod cgroups and looks at images, to keep tests short; `with_cgroups` has them.
    fn new(settings: Settings) -> Self {
        let image_gc = ImageGcSettings { high_percent: 100, ..settings.image_gc };
        let eviction = EvictionSettings { limits_local_storage: false, ..settings.eviction };
        TestAgent::with_cgroups(Settings { cgroups: None, image_gc, eviction, ..settings })
    }

    fn with_cgroups(settings: Settings) -> Self {
        let mut test = TestAgent {
            agent: Agent::new(settings, later(0)),
            at_secs: 0,
            in_flight: Vec::new(),
            recalled: Vec::new(),
            events: Vec::new(),
        };
        test.handle(Event::Due);
        test
    }

    fn now(&self) -> Now {
        later(self.at_secs)
    }

    fn handle(&mut self, event: Event) {
        for effect in self.agent.handle(self.now(), event) {
            match effect {
                // Most tests are not about devices; the look at them finds none.
                Effect::Do { id, op: Op::Node(NodeOp::ListDevices), .. } => {
                    self.handle(Event::Done { id, result: Ok(Facts::Devices(Vec::new())) });
                }
                Effect::Do { id, op, .. } => self.in_flight.push((id, op)),
                Effect::Cancel(id) => self.in_flight.retain(|(known, _)| *known != id),
                Effect::Recall(id) => self.recalled.push(id),
                Effect::Record(record) => self.events.push(record.reason),
            }
        }
        let wake_at = self.agent.wake_at(self.now());
        assert!(wake_at > self.now().uptime, "the agent would spin: it wants to be woken at {wake_at:?}");
    }

    fn config(&mut self, pods: &[Pod]) {
        let pods = pods.iter().cloned().map(Arc::new).collect();
        self.handle(Event::Config { source: Source::File, pods });
    }

    /// Gives the result of the only pending operation of this name.
    fn answer(&mut self, name: &str, result: Result<Facts, EffectError>) {
        let position = self.in_flight.iter().position(|(_, op)| op.name() == name);
        let position = position.unwrap_or_else(|| panic!("{name} is not in flight: {:?}", self.pending()));
        let (id, op) = self.in_flight.remove(position);
        let result = result.map(|facts| if facts == Facts::Nothing { nothing_else(&op) } else { facts });
        self.handle(Event::Done { id, result });
    }

    fn pending(&self) -> Vec<&'static str> {
        self.in_flight.iter().map(|(_, op)| op.name()).collect()
    }

    /// The runtime answers, with these pods in it.
    fn runtime_is_up(&mut self, listed: &[ListedPod]) {
        self.handle(Event::RuntimeEvents(EventStream::Up));
        let status = RuntimeStatus { name: "containerd".to_owned(), ..RuntimeStatus::default() };
        self.answer("CheckRuntime", Ok(Facts::Runtime(status)));
        self.relisted(listed);
    }

    fn relisted(&mut self, listed: &[ListedPod]) {
        let pods = listed.iter().map(|listed| (listed.pod.uid.clone(), listed.clone())).collect();
        self.answer("Relist", Ok(Facts::Listing(Listing { looked_at: self.now().uptime, pods })));
    }

    fn inspected(&mut self, text: &str) {
        let facts = PodFacts { looked_at: self.now().uptime, ..facts(text) };
        self.answer("InspectPod", Ok(Facts::Pod(facts)));
    }

    /// Every step succeeds, and a look after it finds the pod like this.
    fn carried_out(&mut self, steps: &[&str], state: &str) {
        for step in steps {
            self.answer(step, Ok(Facts::Nothing));
            if self.pending().contains(&"InspectPod") {
                self.inspected(state);
            }
        }
    }

    /// Everything the container of a pod in an empty sandbox needs is there, so its start is sent.
    fn start_requested(&mut self) {
        self.inspected("");
        self.carried_out(&["MakePodDirs"], "");
        let image = ImageFacts { id: "sha256:1".to_owned(), ..ImageFacts::default() };
        self.answer("InspectImage", Ok(Facts::Image(Some(image))));
    }

    fn lifecycle(&self, uid: &str) -> String {
        let snapshot = self.agent.snapshot();
        snapshot.pods.get(&PodUid::new(uid)).map_or("unknown".to_owned(), |view| view.lifecycle.clone())
    }
}

fn web(uid: &str) -> Pod {
    let mut pod = mk_pod("always | static | main a");
    pod.metadata.uid = Some(uid.to_owned());
    pod
}

/// A pod with a config map volume.
fn fed(uid: &str) -> Pod {
    let mut pod = web(uid);
    let spec = pod.spec.as_mut().unwrap();
    let map = serde_json::json!({"name": "v", "configMap": {"name": "m"}});
    spec.volumes = Some(vec![serde_json::from_value(map).unwrap()]);
    let mount = serde_json::json!({"name": "v", "mountPath": "/v"});
    spec.containers[0].volume_mounts = Some(vec![serde_json::from_value(mount).unwrap()]);
    pod
}

fn listed(uid: &str, name: &str) -> ListedPod {
    ListedPod {
        pod: PodRef { uid: PodUid::new(uid), namespace: "default".into(), name: name.into() },
        sandboxes: BTreeMap::from([("sb0".into(), SandboxState::Ready)]),
        containers: BTreeMap::new(),
    }
}

fn unavailable() -> Result<Facts, EffectError> {
    Err(EffectError { kind: ErrorKind::Unavailable, message: "connection refused".to_owned() })
}

#[test]
fn a_pod_goes_from_manifest_to_running_in_the_documented_order() {
    let mut test = TestAgent::with_cgroups(Settings::for_node("node"));
    test.config(&[web("u1")]);
    assert_eq!(test.pending(), ["CheckRuntime"], "nothing happens before the runtime is known");
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    // Preparation on the node changes nothing in the runtime: no look follows it.
    for step in ["SetUpPodCgroup", "MakePodDirs", "RunSandbox"] {
        assert!(!test.pending().contains(&"InspectPod"), "before {step}");
        test.answer(step, Ok(Facts::Nothing));
    }
    test.inspected("sandbox ready 1s");
    let image = ImageFacts { id: "sha256:1".to_owned(), ..ImageFacts::default() };
    test.answer("InspectImage", Ok(Facts::Image(Some(image))));
    test.answer("StartContainer", Ok(Facts::Nothing));
    test.inspected("sandbox ready 1s; a: running 0s");
    assert_eq!(test.pending(), ["ListPodDirs", "ListImages", "SyncQosCgroups"]);
    let snapshot = test.agent.snapshot();
    let view = &snapshot.pods[&PodUid::new("u1")];
    assert_eq!(view.status.phase.as_deref(), Some("Running"));
    assert!(view.steps.iter().all(|step| step.state == crate::snapshot::StepState::Done), "{:#?}", view.steps);
}

#[test]
fn a_pod_counts_as_worked_on_until_it_runs() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    let is_working = |test: &TestAgent| test.agent.snapshot().pods[&PodUid::new("u1")].counts.is_working;
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    for step in ["MakePodDirs", "RunSandbox"] {
        assert!(is_working(&test), "before {step}");
        test.answer(step, Ok(Facts::Nothing));
        assert!(is_working(&test), "after {step}");
    }
    test.inspected("sandbox ready 1s");
    assert!(is_working(&test), "it waits for its image");
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    assert!(is_working(&test), "its container is started");
    test.answer("StartContainer", Ok(Facts::Nothing));
    assert!(is_working(&test), "its container is looked at");
    test.inspected("sandbox ready 1s; a: running 0s");
    assert!(!is_working(&test));
}

#[test]
fn nothing_is_cleaned_up_before_all_sources_are_ready() {
    let settings = Settings { sources: vec![Source::File, Source::Http], ..Settings::for_node("node") };
    let mut test = TestAgent::new(settings);
    test.config(&[]);
    test.runtime_is_up(&[listed("stranger", "stranger")]);
    assert_eq!(test.lifecycle("stranger"), "unknown");
    test.handle(Event::Config { source: Source::Http, pods: Vec::new() });
    test.relisted(&[listed("stranger", "stranger")]);
    assert_eq!(test.lifecycle("stranger"), "Terminating");
}

#[test]
fn unreadable_pod_is_no_orphan_until_its_source_drops_it() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.handle(Event::Unreadable { pods: BTreeSet::from([PodUid::new("odd")]) });
    test.config(&[]);
    test.runtime_is_up(&[listed("odd", "odd")]);
    assert_eq!(test.lifecycle("odd"), "unknown");
    test.handle(Event::Unreadable { pods: BTreeSet::new() });
    test.at_secs += 300;
    test.handle(Event::Due);
    test.relisted(&[listed("odd", "odd")]);
    assert_eq!(test.lifecycle("odd"), "Terminating");
}

#[test]
fn changed_manifest_waits_for_old_pod_also_after_restart() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("new")]);
    test.runtime_is_up(&[listed("old", "web")]);
    assert_eq!((test.lifecycle("old"), test.lifecycle("new")), ("Terminating".to_owned(), "Waiting".to_owned()));
    let is_of = |uid: &str, op: &Op| matches!(op, Op::Pod(PodOp::Inspect { pod }) if pod.uid.as_str() == uid);
    assert!(!test.in_flight.iter().any(|(_, op)| is_of("new", op)), "the new pod is not even looked at");
}

#[test]
fn runtime_down_stops_all_plans_until_a_check_succeeds() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox ready 1s; a: running 0s");
    test.answer("ListPodDirs", unavailable());
    assert_eq!(test.pending(), ["CheckRuntime"], "one call without an answer is reason to ask");
    test.answer("CheckRuntime", unavailable());
    assert!(test.agent.snapshot().node.runtime_problem.is_some());
    test.at_secs += 300;
    test.handle(Event::Due);
    assert_eq!(test.pending(), ["CheckRuntime"], "while it is away nothing else is asked");
    test.runtime_is_up(&[]);
    assert!(test.agent.snapshot().node.runtime_problem.is_none());
    assert!(test.pending().contains(&"InspectPod"), "every pod is looked at again: {:?}", test.pending());
}

#[test]
fn work_goes_on_while_the_runtime_status_is_late() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[]);
    test.at_secs += 10;
    test.handle(Event::Due);
    assert!(test.pending().contains(&"CheckRuntime"));
    let readiness = |test: &TestAgent| test.agent.snapshot().node.readiness.clone();
    test.at_secs += 19;
    test.handle(Event::Due);
    assert_eq!(readiness(&test), NodeReadiness::Ready);
    assert_eq!(test.agent.wake_at(test.now()), later(30).uptime, "then patience with the runtime ends");
    test.at_secs += 1;
    test.handle(Event::Due);
    assert_eq!(readiness(&test), NodeReadiness::NotReady(vec!["container runtime is down".to_owned()]));
    test.config(&[web("u1")]);
    test.inspected("sandbox gone");
    assert!(test.pending().contains(&"MakePodDirs"), "{:?}", test.pending());
    let late = EffectError { kind: ErrorKind::TimedOut, message: "no answer within 120 s".to_owned() };
    test.answer("CheckRuntime", Err(late));
    test.answer("MakePodDirs", Ok(Facts::Nothing));
    assert!(test.pending().contains(&"RunSandbox"), "{:?}", test.pending());
}

#[test]
fn changed_object_retries_only_what_it_can_cure() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[fed("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.answer("MakePodDirs", Ok(Facts::Nothing));
    let failed = || Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() });
    let changed = || Event::Refresh { pod: PodUid::new("u1") };
    test.answer("SetUpVolume", failed());
    assert!(!test.pending().contains(&"SetUpVolume"), "{:?}", test.pending());
    test.handle(changed());
    test.answer("SetUpVolume", Ok(Facts::Nothing));
    test.answer("RunSandbox", failed());
    test.inspected("sandbox gone");
    test.handle(changed());
    assert!(!test.pending().contains(&"RunSandbox"), "the runtime's failure waits: {:?}", test.pending());
    test.at_secs += 1;
    test.handle(Event::Due);
    let class_is_missing = EffectError { kind: ErrorKind::MissingObject, message: "no such class".to_owned() };
    test.answer("RunSandbox", Err(class_is_missing));
    test.inspected("sandbox gone");
    test.handle(changed());
    assert!(test.pending().contains(&"RunSandbox"), "{:?}", test.pending());
}

#[test]
fn pod_that_no_source_knows_is_stopped_at_once() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[listed("stranger", "stranger")]);
    test.inspected("a: running 30s");
    let stop = test.in_flight.iter().find_map(|(_, op)| match op {
        Op::Container(ContainerOp::Stop { grace_secs, .. }) => Some(*grace_secs),
        _ => None,
    });
    assert_eq!(stop, Some(2));
}

#[test]
fn effect_without_result_times_out() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.carried_out(&["MakePodDirs"], "sandbox gone");
    assert!(test.pending().contains(&"RunSandbox"));
    test.in_flight.retain(|(_, op)| op.name() != "RunSandbox");
    test.at_secs += 300;
    test.handle(Event::Due);
    assert!(test.pending().contains(&"InspectPod"), "the pod is looked at: {:?}", test.pending());
}

#[test]
fn a_look_that_began_before_the_last_change_plans_nothing() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox gone");
    test.carried_out(&["MakePodDirs"], "sandbox gone");
    test.handle(Event::Hint { pod: PodUid::new("u1") });
    test.answer("RunSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox gone");
    assert!(!test.pending().contains(&"RunSandbox"), "{:?}", test.pending());
    test.inspected("sandbox gone");
    assert!(test.pending().contains(&"RunSandbox"), "{:?}", test.pending());
}

#[test]
fn a_pod_removed_while_its_image_is_pulled_stops_the_pull() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("sandbox ready 1s");
    test.carried_out(&["MakePodDirs"], "sandbox ready 1s");
    test.answer("InspectImage", Ok(Facts::Image(None)));
    assert!(test.pending().contains(&"PullImage"));
    test.config(&[]);
    assert!(!test.pending().contains(&"PullImage"), "{:?}", test.pending());
    assert!(test.pending().contains(&"StopSandbox"), "{:?}", test.pending());
}

#[test]
fn start_in_flight_is_recalled_when_its_pod_is_removed() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("a: created 1s");
    let id = test.in_flight.iter().find(|(_, op)| op.name() == "ResumeContainer").expect("it is to be started").0;
    test.config(&[]);
    assert_eq!(test.recalled, [id]);
    assert!(!test.pending().contains(&"StopSandbox"), "{:?}", test.pending());
    let recalled = EffectError { kind: ErrorKind::Retry, message: "the pod is to end".to_owned() };
    test.answer("ResumeContainer", Err(recalled));
    test.inspected("a: created 1s");
    assert!(test.pending().contains(&"StopSandbox"), "{:?}", test.pending());
}

#[test]
fn start_interrupted_by_an_agent_crash_keeps_its_attempt() {
    let never_ran = |text: &str, message: &str| {
        let mut facts = PodFacts { looked_at: later(0).uptime, ..facts(text) };
        for container in &mut facts.containers {
            if let crate::observation::ContainerState::Exited(exit) = &mut container.state {
                exit.started_at = None;
                exit.message = message.to_owned();
            }
        }
        Ok(Facts::Pod(facts))
    };
    let canceled = "failed to create containerd task: context canceled";
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.answer("InspectPod", never_ran("a: exit(128) 1s", canceled));
    test.answer("RemoveContainer", Ok(Facts::Nothing));
    test.start_requested();
    let is_first = |op: &Op| matches!(op, Op::Container(ContainerOp::Start(order)) if order.attempt == 0);
    assert!(test.in_flight.iter().any(|(_, op)| is_first(op)), "{:?}", test.in_flight);
    // The same end of a start of this process is a crash.
    test.answer("StartContainer", Ok(Facts::Nothing));
    test.answer("InspectPod", never_ran("a: exit(128) 1s", canceled));
    assert!(!test.pending().contains(&"RemoveContainer"), "{:?}", test.pending());
    // A start that failed by itself is a crash, whichever process sent it.
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.answer("InspectPod", never_ran("a: exit(128) 1s", "failed to create containerd task: no such program"));
    assert!(!test.pending().contains(&"RemoveContainer"), "{:?}", test.pending());
}

/// The start of its container is in flight; it has a postStart hook.
fn starting_with_a_hook() -> TestAgent {
    let mut pod = web("u1");
    let exec = ExecAction { command: Some(vec!["prepare".to_owned()]) };
    let post_start = LifecycleHandler { exec: Some(exec), ..Default::default() };
    let lifecycle = Lifecycle { post_start: Some(post_start), ..Default::default() };
    pod.spec.as_mut().expect("mk_pod makes one").containers[0].lifecycle = Some(lifecycle);
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[pod]);
    test.runtime_is_up(&[]);
    test.start_requested();
    test
}

#[test]
fn look_older_than_the_start_keeps_post_start_failure() {
    let mut test = starting_with_a_hook();
    test.handle(Event::Hint { pod: "u1".into() });
    test.answer("StartContainer", Ok(Facts::Container { id: "a0".into() }));
    test.answer("RunHook", Err(EffectError { kind: ErrorKind::Retry, message: "failed".to_owned() }));
    test.inspected("");
    test.inspected("a: running 1s");
    assert!(test.pending().contains(&"StopContainer"), "{:?}", test.pending());
}

#[test]
fn post_start_hook_ends_with_its_container() {
    let mut test = starting_with_a_hook();
    test.answer("StartContainer", Ok(Facts::Container { id: "a0".into() }));
    test.inspected("a: running 1s");
    assert!(test.pending().contains(&"RunHook"), "{:?}", test.pending());
    test.handle(Event::Hint { pod: "u1".into() });
    test.inspected("a: exit(1) 0s");
    assert!(!test.pending().contains(&"RunHook"), "{:?}", test.pending());
}

/// The pod has terminated and its resources are reclaimed; its dead container is still there.
fn ended(test: &mut TestAgent) {
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(137) 0s");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(137) 0s");
    // A previous process may have mounted something.
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup"], "sandbox notready 60s; a: exit(137) 0s");
}

#[test]
fn pod_desired_again_starts_over_with_its_attempts() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test.config(&[]);
    assert_eq!(test.lifecycle("u1"), "Terminating");
    test.config(&[web("u1")]);
    ended(&mut test);
    assert_eq!(test.lifecycle("u1"), "Syncing", "it starts over");
    assert!(!test.pending().contains(&"RemoveContainer"), "its attempts count on");
}

#[test]
fn pod_desired_again_keeps_its_back_off() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    let crashed = "a: exit(1) 1s";
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected(crashed);
    test.carried_out(&["MakePodDirs"], crashed);
    test.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    test.carried_out(&["StartContainer"], "a: exit(1), running 0s");
    test.config(&[]);
    test.config(&[web("u1")]);
    test.carried_out(&["StopContainer"], "a: exit(1), exit(137) 0s");
    let dead = "sandbox notready 60s; a: exit(1), exit(137) 0s";
    test.carried_out(&["StopSandbox", "TearDownVolumes", "RemovePodCgroup"], dead);
    assert_eq!(test.lifecycle("u1"), "Syncing", "it starts over");
    test.carried_out(&["StopSandbox", "MakePodDirs"], dead);
    test.carried_out(&["RunSandbox"], "a: exit(1), exit(137) 0s");
    for (secs, is_started) in [(9, false), (1, true)] {
        test.at_secs += secs;
        test.handle(Event::Due);
        assert_eq!(test.pending().contains(&"InspectImage"), is_started, "{:?}", test.pending());
    }
}

#[test]
fn a_removed_static_pod_leaves_nothing_after_a_minute() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test.config(&[]);
    ended(&mut test);
    test.at_secs += 59;
    test.handle(Event::Due);
    assert!(!test.pending().contains(&"RemoveContainer"), "its manifest may come back");
    test.at_secs += 1;
    test.handle(Event::Due);
    test.answer("RemoveContainer", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s");
    test.carried_out(&["RemoveSandbox", "RemovePodDir", "RemoveLogDir"], "sandbox gone");
    assert_eq!(test.lifecycle("u1"), "unknown");
}

/// A pod that requests this much CPU.
fn burstable(uid: &str, cpu: &str) -> Pod {
    let mut pod = web(uid);
    pod.metadata.name = Some(uid.to_owned());
    let requests = std::iter::once(("cpu".to_owned(), Quantity(cpu.to_owned()))).collect();
    let resources = ResourceRequirements { requests: Some(requests), ..ResourceRequirements::default() };
    pod.spec.as_mut().unwrap().containers[0].resources = Some(resources);
    pod
}

/// The CPU shares of the burstable cgroup, as last requested.
fn burstable_shares(test: &TestAgent) -> Option<u64> {
    test.in_flight.iter().rev().find_map(|(_, op)| match op {
        Op::Node(NodeOp::SyncQosCgroups { cgroups }) => cgroups[1].limits.cpu_shares,
        _ => None,
    })
}

#[test]
fn burstable_cgroup_shares_follow_the_set_of_pods() {
    let mut test = TestAgent::with_cgroups(Settings::for_node("node"));
    test.config(&[burstable("u1", "500m")]);
    test.runtime_is_up(&[]);
    assert_eq!(burstable_shares(&test), Some(512));
    test.answer("SyncQosCgroups", Ok(Facts::Cgroups { names: Vec::new() }));
    assert_eq!(burstable_shares(&test), None, "nothing changed");
    test.config(&[burstable("u1", "500m"), burstable("u2", "1")]);
    assert_eq!(burstable_shares(&test), Some(1536));
    test.answer("SyncQosCgroups", Ok(Facts::Cgroups { names: Vec::new() }));
    test.at_secs += 60;
    test.handle(Event::Due);
    assert_eq!(burstable_shares(&test), Some(1536), "once a minute they are set again");
}

#[test]
fn cgroup_of_an_unknown_pod_is_removed() {
    let mut test = TestAgent::with_cgroups(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    let names = ["burstable", "podu1", "podstranger", "system.slice"].map(str::to_owned).to_vec();
    test.answer("SyncQosCgroups", Ok(Facts::Cgroups { names }));
    assert_eq!((test.lifecycle("stranger"), test.lifecycle("u1")), ("Terminating".to_owned(), "Syncing".to_owned()));
}

#[test]
fn failed_qos_cgroup_sync_is_recorded_once() {
    let mut test = TestAgent::with_cgroups(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[]);
    let refused = || Err(EffectError { kind: ErrorKind::Retry, message: "read-only".to_owned() });
    let mut counts = Vec::new();
    for _ in 0..3 {
        test.answer("SyncQosCgroups", refused());
        counts.push(test.events.len());
        test.at_secs += 60;
        test.handle(Event::Due);
    }
    assert_eq!(counts[0], counts[2], "{:?}", test.events);
    assert!(test.events.contains(&"FailedNodeAllocatableEnforcement".to_owned()), "{:?}", test.events);
}

/// A running pod of a previous process, with a config map volume.
fn running_and_fed() -> TestAgent {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[fed("u1")]);
    test.runtime_is_up(&[listed("u1", "web")]);
    test.inspected("a: running");
    test
}

#[test]
fn volumes_are_refreshed_after_an_agent_restart() {
    let mut test = running_and_fed();
    test.carried_out(&["MakePodDirs", "SetUpVolume"], "a: running");
    assert!(!test.pending().contains(&"RefreshVolumes"), "{:?}", test.pending());
    test.at_secs += 61;
    test.handle(Event::Due);
    test.answer("RefreshVolumes", Ok(Facts::Nothing));
    assert!(!test.pending().contains(&"InspectPod"), "nothing in the runtime changed: {:?}", test.pending());
    assert!(!test.pending().contains(&"RefreshVolumes"), "{:?}", test.pending());
}

#[test]
fn object_change_refreshes_volumes_again_if_changed_meanwhile() {
    let mut test = running_and_fed();
    test.carried_out(&["MakePodDirs", "SetUpVolume"], "a: running");
    test.handle(Event::Refresh { pod: PodUid::new("u1") });
    assert!(test.pending().contains(&"RefreshVolumes"));
    test.handle(Event::Refresh { pod: PodUid::new("u1") });
    assert_eq!(test.pending().iter().filter(|name| **name == "RefreshVolumes").count(), 1);
    test.answer("RefreshVolumes", unready("configmap \"m\" not found"));
    assert!(test.pending().contains(&"RefreshVolumes"));
    test.answer("RefreshVolumes", Ok(Facts::Nothing));
    assert!(!test.pending().contains(&"RefreshVolumes"), "{:?}", test.pending());
    assert_eq!(test.lifecycle("u1"), "Syncing");
}

#[test]
fn a_pod_that_ends_is_not_refreshed() {
    let mut test = running_and_fed();
    test.carried_out(&["MakePodDirs", "SetUpVolume"], "a: running");
    test.handle(Event::Refresh { pod: PodUid::new("u1") });
    test.config(&[]);
    assert!(!test.pending().contains(&"RefreshVolumes"), "{:?}", test.pending());
    test.handle(Event::Refresh { pod: PodUid::new("u1") });
    assert!(!test.pending().contains(&"RefreshVolumes"), "{:?}", test.pending());
}

fn unready(message: &str) -> Result<Facts, EffectError> {
    Err(EffectError { kind: ErrorKind::Retry, message: message.to_owned() })
}

/// An API pod that requests this much CPU, created at this second.
fn from_api(uid: &str, cpu: &str, created_secs: i64) -> Pod {
    let mut pod = burstable(uid, cpu);
    pod.metadata.annotations = None;
    let created = jiff::Timestamp::from_second(1_700_000_000 + created_secs).unwrap();
    pod.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(created));
    pod
}

/// A node with one processor and an API server.
fn small_node() -> Settings {
    let mut settings = Settings { sources: vec![Source::Api], ..Settings::for_node("node") };
    settings.node.allocatable.cpu_millis = 1000;
    settings
}

#[test]
fn pod_that_does_not_fit_fails_and_holds_nothing() {
    let mut test = TestAgent::new(small_node());
    // In the order of their names the younger one would come first.
    let pods = [from_api("a-young", "600m", 2), from_api("b-old", "600m", 1)].map(Arc::new).to_vec();
    test.handle(Event::Config { source: Source::Api, pods });
    test.runtime_is_up(&[]);
    assert!(test.events.contains(&"OutOfcpu".to_owned()), "{:?}", test.events);
    for _ in 0..2 {
        test.inspected("sandbox gone");
    }
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup"], "sandbox gone");
    let snapshot = test.agent.snapshot();
    let view = |uid: &str| &snapshot.pods[&PodUid::new(uid)];
    assert_eq!((view("a-young").lifecycle.as_str(), view("b-old").lifecycle.as_str()), ("Finished", "Syncing"));
    let status = &view("a-young").status;
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("OutOfcpu")));
    assert_eq!(
        status.message.as_deref(),
        Some("Pod was rejected: Node didn't have enough resource: cpu, requested: 600, used: 600, capacity: 1000")
    );
    assert_eq!(status.container_statuses, None);
    assert_eq!(
        test.in_flight.iter().filter(|(_, op)| op.name() == "MakePodDirs").count(),
        1,
        "only the other is set up"
    );
}

#[test]
fn running_pod_is_readmitted_first_without_checks() {
    let mut test = TestAgent::new(small_node());
    let pods = [from_api("a-old", "600m", 1), from_api("b-runs", "2", 2)].map(Arc::new).to_vec();
    test.handle(Event::Config { source: Source::Api, pods });
    test.runtime_is_up(&[listed("b-runs", "b-runs")]);
    assert_eq!(test.events.iter().filter(|reason| *reason == "OutOfcpu").count(), 1, "{:?}", test.events);
    test.inspected("sandbox gone");
    let snapshot = test.agent.snapshot();
    assert_eq!(snapshot.pods[&PodUid::new("a-old")].status.reason.as_deref(), Some("OutOfcpu"));
    assert_eq!(snapshot.pods[&PodUid::new("b-runs")].lifecycle, "Syncing");
}

#[test]
fn a_pod_that_outlives_its_deadline_fails_and_is_stopped() {
    let mut pod = web("u1");
    pod.spec.as_mut().expect("a spec").active_deadline_seconds = Some(100);
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[pod]);
    test.runtime_is_up(&[]);
    // Its sandbox, and so the pod, is a minute old.
    test.inspected("a: running 50s");
    assert_eq!(test.lifecycle("u1"), "Syncing");
    test.at_secs += 39;
    test.handle(Event::Due);
    assert_eq!(test.lifecycle("u1"), "Syncing");
    assert!(test.agent.wake_at(test.now()) <= later(40).uptime, "it is woken for the deadline");
    test.at_secs += 1;
    test.handle(Event::Due);
    assert_eq!(test.lifecycle("u1"), "Terminating");
    assert!(test.pending().contains(&"StopContainer"), "{:?}", test.pending());
    let status = test.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("DeadlineExceeded")));
}
