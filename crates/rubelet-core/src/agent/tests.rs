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
    id::{PodRef, PodUid},
    observation::{ListedPod, Listing, PodFacts, Remains, RuntimeStatus, SandboxState},
    op::{ContainerOp, NodeOp, Op, PodOp, VolumeOp},
    settings::Settings,
    snapshot::NodeReadiness,
    test_support::{facts, later, mk_pod},
    time::Now,
};

mod admission;
mod api;
mod api_requests;
mod ends;
mod images;
mod model;
mod odd_pods;
mod orphans;
mod probes;
mod upkeep;

/// An agent, the seconds since it began, and its effects without a result.
struct Turns {
    agent: Agent,
    at_secs: u64,
    asked: Vec<(EffectId, Op)>,
    recalled: Vec<EffectId>,
    /// The reasons of events.
    told: Vec<String>,
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

impl Turns {
    /// Without pod cgroups, to keep tests short; `with_cgroups` has them.
    fn new(settings: Settings) -> Self {
        Turns::with_cgroups(Settings { cgroups: None, ..settings })
    }

    fn with_cgroups(settings: Settings) -> Self {
        let mut turns = Turns {
            agent: Agent::new(settings, later(0)),
            at_secs: 0,
            asked: Vec::new(),
            recalled: Vec::new(),
            told: Vec::new(),
        };
        turns.happens(Event::Due);
        turns
    }

    fn now(&self) -> Now {
        later(self.at_secs)
    }

    fn happens(&mut self, event: Event) {
        for effect in self.agent.handle(self.now(), event) {
            match effect {
                Effect::Do { id, op, .. } => self.asked.push((id, op)),
                Effect::Cancel(id) => self.asked.retain(|(asked, _)| *asked != id),
                Effect::Recall(id) => self.recalled.push(id),
                Effect::Record(record) => self.told.push(record.reason),
            }
        }
        let wake_at = self.agent.wake_at(self.now());
        assert!(wake_at > self.now().uptime, "the agent would spin: it wants to be woken at {wake_at:?}");
    }

    fn config(&mut self, pods: &[Pod]) {
        let pods = pods.iter().cloned().map(Arc::new).collect();
        self.happens(Event::Config { source: Source::File, pods });
    }

    /// Gives the result of the only pending operation of this name.
    fn answer(&mut self, name: &str, result: Result<Facts, EffectError>) {
        let position = self.asked.iter().position(|(_, op)| op.name() == name);
        let position = position.unwrap_or_else(|| panic!("nobody asked for {name}: {:?}", self.pending()));
        let (id, op) = self.asked.remove(position);
        let result = result.map(|facts| if facts == Facts::Nothing { nothing_else(&op) } else { facts });
        self.happens(Event::Done { id, result });
    }

    fn pending(&self) -> Vec<&'static str> {
        self.asked.iter().map(|(_, op)| op.name()).collect()
    }

    /// The runtime answers, with these pods in it.
    fn runtime_is_up(&mut self, listed: &[ListedPod]) {
        self.happens(Event::RuntimeEvents(EventStream::Up));
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
    fn asked_to_start(&mut self) {
        self.inspected("");
        self.carried_out(&["MakePodDirs", "SetUpVolumes"], "");
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
    let mut turns = Turns::with_cgroups(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    assert_eq!(turns.pending(), ["CheckRuntime"], "nothing happens before the runtime is known");
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox gone");
    // Preparation on the node changes nothing in the runtime: no look follows it.
    for step in ["SetUpPodCgroup", "MakePodDirs", "SetUpVolumes", "RunSandbox"] {
        assert!(!turns.pending().contains(&"InspectPod"), "before {step}");
        turns.answer(step, Ok(Facts::Nothing));
    }
    turns.inspected("sandbox ready 1s");
    let image = ImageFacts { id: "sha256:1".to_owned(), ..ImageFacts::default() };
    turns.answer("InspectImage", Ok(Facts::Image(Some(image))));
    turns.answer("StartContainer", Ok(Facts::Nothing));
    turns.inspected("sandbox ready 1s; a: running 0s");
    assert_eq!(turns.pending(), ["ListPodDirs", "SyncQosCgroups"]);
    let snapshot = turns.agent.snapshot();
    let view = &snapshot.pods[&PodUid::new("u1")];
    assert_eq!(view.status.phase.as_deref(), Some("Running"));
    assert!(view.steps.iter().all(|step| step.state == crate::snapshot::StepState::Done), "{:#?}", view.steps);
}

#[test]
fn a_pod_counts_as_worked_on_until_it_runs() {
    let mut turns = Turns::new(Settings::for_node("node"));
    let is_working = |turns: &Turns| turns.agent.snapshot().pods[&PodUid::new("u1")].counts.is_working;
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox gone");
    for step in ["MakePodDirs", "SetUpVolumes", "RunSandbox"] {
        assert!(is_working(&turns), "before {step}");
        turns.answer(step, Ok(Facts::Nothing));
        assert!(is_working(&turns), "after {step}");
    }
    turns.inspected("sandbox ready 1s");
    assert!(is_working(&turns), "it waits for its image");
    turns.answer("InspectImage", Ok(Facts::Image(Some(ImageFacts::default()))));
    assert!(is_working(&turns), "its container is started");
    turns.answer("StartContainer", Ok(Facts::Nothing));
    assert!(is_working(&turns), "its container is looked at");
    turns.inspected("sandbox ready 1s; a: running 0s");
    assert!(!is_working(&turns));
}

#[test]
fn nothing_is_cleaned_up_before_all_sources_are_ready() {
    let settings = Settings { sources: vec![Source::File, Source::Http], ..Settings::for_node("node") };
    let mut turns = Turns::new(settings);
    turns.config(&[]);
    turns.runtime_is_up(&[listed("stranger", "stranger")]);
    assert_eq!(turns.lifecycle("stranger"), "unknown");
    turns.happens(Event::Config { source: Source::Http, pods: Vec::new() });
    turns.relisted(&[listed("stranger", "stranger")]);
    assert_eq!(turns.lifecycle("stranger"), "Terminating");
}

#[test]
fn unreadable_pod_is_no_orphan_until_its_source_drops_it() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.happens(Event::Unreadable { pods: BTreeSet::from([PodUid::new("odd")]) });
    turns.config(&[]);
    turns.runtime_is_up(&[listed("odd", "odd")]);
    assert_eq!(turns.lifecycle("odd"), "unknown");
    turns.happens(Event::Unreadable { pods: BTreeSet::new() });
    turns.at_secs += 300;
    turns.happens(Event::Due);
    turns.relisted(&[listed("odd", "odd")]);
    assert_eq!(turns.lifecycle("odd"), "Terminating");
}

#[test]
fn changed_manifest_waits_for_old_pod_also_after_restart() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("new")]);
    turns.runtime_is_up(&[listed("old", "web")]);
    assert_eq!((turns.lifecycle("old"), turns.lifecycle("new")), ("Terminating".to_owned(), "Waiting".to_owned()));
    let is_of = |uid: &str, op: &Op| matches!(op, Op::Pod(PodOp::Inspect { pod }) if pod.uid.as_str() == uid);
    assert!(!turns.asked.iter().any(|(_, op)| is_of("new", op)), "the new pod is not even looked at");
}

#[test]
fn runtime_down_stops_all_plans_until_a_check_succeeds() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox ready 1s; a: running 0s");
    turns.answer("ListPodDirs", unavailable());
    assert_eq!(turns.pending(), ["CheckRuntime"], "one call without an answer is reason to ask");
    turns.answer("CheckRuntime", unavailable());
    assert!(turns.agent.snapshot().node.runtime_problem.is_some());
    turns.at_secs += 300;
    turns.happens(Event::Due);
    assert_eq!(turns.pending(), ["CheckRuntime"], "while it is away nothing else is asked");
    turns.runtime_is_up(&[]);
    assert!(turns.agent.snapshot().node.runtime_problem.is_none());
    assert!(turns.pending().contains(&"InspectPod"), "every pod is looked at again: {:?}", turns.pending());
}

#[test]
fn work_goes_on_while_the_runtime_status_is_late() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[]);
    turns.runtime_is_up(&[]);
    turns.at_secs += 10;
    turns.happens(Event::Due);
    assert!(turns.pending().contains(&"CheckRuntime"));
    let readiness = |turns: &Turns| turns.agent.snapshot().node.readiness.clone();
    turns.at_secs += 19;
    turns.happens(Event::Due);
    assert_eq!(readiness(&turns), NodeReadiness::Ready);
    assert_eq!(turns.agent.wake_at(turns.now()), later(30).uptime, "then patience with the runtime ends");
    turns.at_secs += 1;
    turns.happens(Event::Due);
    assert_eq!(readiness(&turns), NodeReadiness::NotReady(vec!["container runtime is down".to_owned()]));
    turns.config(&[web("u1")]);
    turns.inspected("sandbox gone");
    assert!(turns.pending().contains(&"MakePodDirs"), "{:?}", turns.pending());
    let late = EffectError { kind: ErrorKind::TimedOut, message: "no answer within 120 s".to_owned() };
    turns.answer("CheckRuntime", Err(late));
    turns.answer("MakePodDirs", Ok(Facts::Nothing));
    assert!(turns.pending().contains(&"SetUpVolumes"), "{:?}", turns.pending());
}

#[test]
fn changed_object_retries_only_what_it_can_cure() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[fed("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox gone");
    turns.answer("MakePodDirs", Ok(Facts::Nothing));
    let failed = || Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() });
    let changed = || Event::Refresh { pod: PodUid::new("u1") };
    turns.answer("SetUpVolumes", failed());
    assert!(!turns.pending().contains(&"SetUpVolumes"), "{:?}", turns.pending());
    turns.happens(changed());
    turns.answer("SetUpVolumes", Ok(Facts::Nothing));
    turns.answer("RunSandbox", failed());
    turns.inspected("sandbox gone");
    turns.happens(changed());
    assert!(!turns.pending().contains(&"RunSandbox"), "the runtime's failure waits: {:?}", turns.pending());
    turns.at_secs += 1;
    turns.happens(Event::Due);
    let class_is_missing = EffectError { kind: ErrorKind::MissingObject, message: "no such class".to_owned() };
    turns.answer("RunSandbox", Err(class_is_missing));
    turns.inspected("sandbox gone");
    turns.happens(changed());
    assert!(turns.pending().contains(&"RunSandbox"), "{:?}", turns.pending());
}

#[test]
fn pod_that_no_source_knows_is_stopped_at_once() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[]);
    turns.runtime_is_up(&[listed("stranger", "stranger")]);
    turns.inspected("a: running 30s");
    let stop = turns.asked.iter().find_map(|(_, op)| match op {
        Op::Container(ContainerOp::Stop { grace_secs, .. }) => Some(*grace_secs),
        _ => None,
    });
    assert_eq!(stop, Some(2));
}

#[test]
fn effect_without_result_times_out() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox gone");
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "sandbox gone");
    assert!(turns.pending().contains(&"RunSandbox"));
    turns.asked.retain(|(_, op)| op.name() != "RunSandbox");
    turns.at_secs += 300;
    turns.happens(Event::Due);
    assert!(turns.pending().contains(&"InspectPod"), "the pod is looked at: {:?}", turns.pending());
}

#[test]
fn a_look_that_began_before_the_last_change_plans_nothing() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox gone");
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "sandbox gone");
    turns.happens(Event::Hint { pod: PodUid::new("u1") });
    turns.answer("RunSandbox", Ok(Facts::Nothing));
    turns.inspected("sandbox gone");
    assert!(!turns.pending().contains(&"RunSandbox"), "{:?}", turns.pending());
    turns.inspected("sandbox gone");
    assert!(turns.pending().contains(&"RunSandbox"), "{:?}", turns.pending());
}

#[test]
fn a_pod_removed_while_its_image_is_pulled_stops_the_pull() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox ready 1s");
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "sandbox ready 1s");
    turns.answer("InspectImage", Ok(Facts::Image(None)));
    assert!(turns.pending().contains(&"PullImage"));
    turns.config(&[]);
    assert!(!turns.pending().contains(&"PullImage"), "{:?}", turns.pending());
    assert!(turns.pending().contains(&"StopSandbox"), "{:?}", turns.pending());
}

#[test]
fn start_in_flight_is_recalled_when_its_pod_is_removed() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("a: created 1s");
    let id = turns.asked.iter().find(|(_, op)| op.name() == "ResumeContainer").expect("it is to be started").0;
    turns.config(&[]);
    assert_eq!(turns.recalled, [id]);
    assert!(!turns.pending().contains(&"StopSandbox"), "{:?}", turns.pending());
    let recalled = EffectError { kind: ErrorKind::Retry, message: "the pod is to end".to_owned() };
    turns.answer("ResumeContainer", Err(recalled));
    turns.inspected("a: created 1s");
    assert!(turns.pending().contains(&"StopSandbox"), "{:?}", turns.pending());
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
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.answer("InspectPod", never_ran("a: exit(128) 1s", canceled));
    turns.answer("RemoveContainer", Ok(Facts::Nothing));
    turns.asked_to_start();
    let is_first = |op: &Op| matches!(op, Op::Container(ContainerOp::Start(order)) if order.attempt == 0);
    assert!(turns.asked.iter().any(|(_, op)| is_first(op)), "{:?}", turns.asked);
    // The same end of a start of this process is a crash.
    turns.answer("StartContainer", Ok(Facts::Nothing));
    turns.answer("InspectPod", never_ran("a: exit(128) 1s", canceled));
    assert!(!turns.pending().contains(&"RemoveContainer"), "{:?}", turns.pending());
    // A start that failed by itself is a crash, whichever process sent it.
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.answer("InspectPod", never_ran("a: exit(128) 1s", "failed to create containerd task: no such program"));
    assert!(!turns.pending().contains(&"RemoveContainer"), "{:?}", turns.pending());
}

/// The start of its container is in flight; it has a postStart hook.
fn starting_with_a_hook() -> Turns {
    let mut pod = web("u1");
    let exec = ExecAction { command: Some(vec!["prepare".to_owned()]) };
    let post_start = LifecycleHandler { exec: Some(exec), ..Default::default() };
    let lifecycle = Lifecycle { post_start: Some(post_start), ..Default::default() };
    pod.spec.as_mut().expect("mk_pod makes one").containers[0].lifecycle = Some(lifecycle);
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[pod]);
    turns.runtime_is_up(&[]);
    turns.asked_to_start();
    turns
}

#[test]
fn look_older_than_the_start_keeps_post_start_failure() {
    let mut turns = starting_with_a_hook();
    turns.happens(Event::Hint { pod: "u1".into() });
    turns.answer("StartContainer", Ok(Facts::Container { id: "a0".into() }));
    turns.answer("RunHook", Err(EffectError { kind: ErrorKind::Retry, message: "failed".to_owned() }));
    turns.inspected("");
    turns.inspected("a: running 1s");
    assert!(turns.pending().contains(&"StopContainer"), "{:?}", turns.pending());
}

#[test]
fn post_start_hook_ends_with_its_container() {
    let mut turns = starting_with_a_hook();
    turns.answer("StartContainer", Ok(Facts::Container { id: "a0".into() }));
    turns.inspected("a: running 1s");
    assert!(turns.pending().contains(&"RunHook"), "{:?}", turns.pending());
    turns.happens(Event::Hint { pod: "u1".into() });
    turns.inspected("a: exit(1) 0s");
    assert!(!turns.pending().contains(&"RunHook"), "{:?}", turns.pending());
}

/// The pod has terminated and its resources are reclaimed; its dead container is still there.
fn ended(turns: &mut Turns) {
    turns.answer("StopContainer", Ok(Facts::Nothing));
    turns.inspected("a: exit(137) 0s");
    turns.answer("StopSandbox", Ok(Facts::Nothing));
    turns.inspected("sandbox notready 60s; a: exit(137) 0s");
    // A previous process may have mounted something.
    turns.carried_out(&["TearDownVolumes", "RemovePodCgroup"], "sandbox notready 60s; a: exit(137) 0s");
}

#[test]
fn pod_desired_again_starts_over_with_its_attempts() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("a: running 5s");
    turns.config(&[]);
    assert_eq!(turns.lifecycle("u1"), "Terminating");
    turns.config(&[web("u1")]);
    ended(&mut turns);
    assert_eq!(turns.lifecycle("u1"), "Syncing", "it starts over");
    assert!(!turns.pending().contains(&"RemoveContainer"), "its attempts count on");
}

#[test]
fn a_removed_static_pod_leaves_nothing_after_a_minute() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    turns.inspected("a: running 5s");
    turns.config(&[]);
    ended(&mut turns);
    turns.at_secs += 59;
    turns.happens(Event::Due);
    assert!(!turns.pending().contains(&"RemoveContainer"), "its manifest may come back");
    turns.at_secs += 1;
    turns.happens(Event::Due);
    turns.answer("RemoveContainer", Ok(Facts::Nothing));
    turns.inspected("sandbox notready 60s");
    turns.carried_out(&["RemoveSandbox", "RemovePodDir", "RemoveLogDir"], "sandbox gone");
    assert_eq!(turns.lifecycle("u1"), "unknown");
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
fn burstable_shares(turns: &Turns) -> Option<u64> {
    turns.asked.iter().rev().find_map(|(_, op)| match op {
        Op::Node(NodeOp::SyncQosCgroups { cgroups }) => cgroups[1].limits.cpu_shares,
        _ => None,
    })
}

#[test]
fn burstable_cgroup_shares_follow_the_set_of_pods() {
    let mut turns = Turns::with_cgroups(Settings::for_node("node"));
    turns.config(&[burstable("u1", "500m")]);
    turns.runtime_is_up(&[]);
    assert_eq!(burstable_shares(&turns), Some(512));
    turns.answer("SyncQosCgroups", Ok(Facts::Cgroups { names: Vec::new() }));
    assert_eq!(burstable_shares(&turns), None, "nothing changed");
    turns.config(&[burstable("u1", "500m"), burstable("u2", "1")]);
    assert_eq!(burstable_shares(&turns), Some(1536));
    turns.answer("SyncQosCgroups", Ok(Facts::Cgroups { names: Vec::new() }));
    turns.at_secs += 60;
    turns.happens(Event::Due);
    assert_eq!(burstable_shares(&turns), Some(1536), "once a minute they are set again");
}

#[test]
fn cgroup_of_an_unknown_pod_is_removed() {
    let mut turns = Turns::with_cgroups(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    let names = ["burstable", "podu1", "podstranger", "system.slice"].map(str::to_owned).to_vec();
    turns.answer("SyncQosCgroups", Ok(Facts::Cgroups { names }));
    assert_eq!((turns.lifecycle("stranger"), turns.lifecycle("u1")), ("Terminating".to_owned(), "Syncing".to_owned()));
}

#[test]
fn failed_qos_cgroup_sync_is_recorded_once() {
    let mut turns = Turns::with_cgroups(Settings::for_node("node"));
    turns.config(&[]);
    turns.runtime_is_up(&[]);
    let refused = || Err(EffectError { kind: ErrorKind::Retry, message: "read-only".to_owned() });
    let mut told = Vec::new();
    for _ in 0..3 {
        turns.answer("SyncQosCgroups", refused());
        told.push(turns.told.len());
        turns.at_secs += 60;
        turns.happens(Event::Due);
    }
    assert_eq!(told[0], told[2], "{:?}", turns.told);
    assert!(turns.told.contains(&"FailedNodeAllocatableEnforcement".to_owned()), "{:?}", turns.told);
}

/// A running pod of a previous process, with a config map volume.
fn running_and_fed() -> Turns {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[fed("u1")]);
    turns.runtime_is_up(&[listed("u1", "web")]);
    turns.inspected("a: running");
    turns
}

#[test]
fn volumes_are_refreshed_after_an_agent_restart() {
    let mut turns = running_and_fed();
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "a: running");
    assert!(!turns.pending().contains(&"RefreshVolumes"), "{:?}", turns.pending());
    turns.at_secs += 61;
    turns.happens(Event::Due);
    turns.answer("RefreshVolumes", Ok(Facts::Nothing));
    assert!(!turns.pending().contains(&"InspectPod"), "nothing in the runtime changed: {:?}", turns.pending());
    assert!(!turns.pending().contains(&"RefreshVolumes"), "{:?}", turns.pending());
}

#[test]
fn object_change_refreshes_volumes_again_if_changed_meanwhile() {
    let mut turns = running_and_fed();
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "a: running");
    turns.happens(Event::Refresh { pod: PodUid::new("u1") });
    assert!(turns.pending().contains(&"RefreshVolumes"));
    turns.happens(Event::Refresh { pod: PodUid::new("u1") });
    assert_eq!(turns.pending().iter().filter(|name| **name == "RefreshVolumes").count(), 1);
    turns.answer("RefreshVolumes", unready("configmap \"m\" not found"));
    assert!(turns.pending().contains(&"RefreshVolumes"));
    turns.answer("RefreshVolumes", Ok(Facts::Nothing));
    assert!(!turns.pending().contains(&"RefreshVolumes"), "{:?}", turns.pending());
    assert_eq!(turns.lifecycle("u1"), "Syncing");
}

#[test]
fn a_pod_that_ends_is_not_refreshed() {
    let mut turns = running_and_fed();
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "a: running");
    turns.happens(Event::Refresh { pod: PodUid::new("u1") });
    turns.config(&[]);
    assert!(!turns.pending().contains(&"RefreshVolumes"), "{:?}", turns.pending());
    turns.happens(Event::Refresh { pod: PodUid::new("u1") });
    assert!(!turns.pending().contains(&"RefreshVolumes"), "{:?}", turns.pending());
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
    let mut turns = Turns::new(small_node());
    // In the order of their names the younger one would come first.
    let pods = [from_api("a-young", "600m", 2), from_api("b-old", "600m", 1)].map(Arc::new).to_vec();
    turns.happens(Event::Config { source: Source::Api, pods });
    turns.runtime_is_up(&[]);
    assert!(turns.told.contains(&"OutOfcpu".to_owned()), "{:?}", turns.told);
    for _ in 0..2 {
        turns.inspected("sandbox gone");
    }
    turns.carried_out(&["TearDownVolumes", "RemovePodCgroup"], "sandbox gone");
    let snapshot = turns.agent.snapshot();
    let view = |uid: &str| &snapshot.pods[&PodUid::new(uid)];
    assert_eq!((view("a-young").lifecycle.as_str(), view("b-old").lifecycle.as_str()), ("Finished", "Syncing"));
    let status = &view("a-young").status;
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("OutOfcpu")));
    assert_eq!(
        status.message.as_deref(),
        Some("Pod was rejected: Node didn't have enough resource: cpu, requested: 600, used: 600, capacity: 1000")
    );
    assert_eq!(status.container_statuses, None);
    assert_eq!(turns.asked.iter().filter(|(_, op)| op.name() == "MakePodDirs").count(), 1, "only the other is set up");
}

#[test]
fn running_pod_is_readmitted_first_without_checks() {
    let mut turns = Turns::new(small_node());
    let pods = [from_api("a-old", "600m", 1), from_api("b-runs", "2", 2)].map(Arc::new).to_vec();
    turns.happens(Event::Config { source: Source::Api, pods });
    turns.runtime_is_up(&[listed("b-runs", "b-runs")]);
    assert_eq!(turns.told.iter().filter(|reason| *reason == "OutOfcpu").count(), 1, "{:?}", turns.told);
    turns.inspected("sandbox gone");
    let snapshot = turns.agent.snapshot();
    assert_eq!(snapshot.pods[&PodUid::new("a-old")].status.reason.as_deref(), Some("OutOfcpu"));
    assert_eq!(snapshot.pods[&PodUid::new("b-runs")].lifecycle, "Syncing");
}

#[test]
fn a_pod_that_outlives_its_deadline_fails_and_is_stopped() {
    let mut pod = web("u1");
    pod.spec.as_mut().expect("a spec").active_deadline_seconds = Some(100);
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[pod]);
    turns.runtime_is_up(&[]);
    // Its sandbox, and so the pod, is a minute old.
    turns.inspected("a: running 50s");
    assert_eq!(turns.lifecycle("u1"), "Syncing");
    turns.at_secs += 39;
    turns.happens(Event::Due);
    assert_eq!(turns.lifecycle("u1"), "Syncing");
    assert!(turns.agent.wake_at(turns.now()) <= later(40).uptime, "it is woken for the deadline");
    turns.at_secs += 1;
    turns.happens(Event::Due);
    assert_eq!(turns.lifecycle("u1"), "Terminating");
    assert!(turns.pending().contains(&"StopContainer"), "{:?}", turns.pending());
    let status = turns.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("DeadlineExceeded")));
}
