//! Any pod the API server may send runs or is rejected, without a panic.
//!
//! A rich pod is mutated in its JSON, read as the API source reads it, and run to its end, beside a plain pod that must run in
//! every case. Every configuration an effect would build is built.

use std::collections::{BTreeSet, VecDeque};

use jiff::SignedDuration;
use proptest::{collection::vec, prelude::*, sample::Index};
use serde_json::{Map, Value, json};

use super::*;
use crate::{
    api_pod,
    container::{Identity, container_config, environment, hosts, mounts, sandbox_config},
    effect::{ImageUser, Reason},
    id::ContainerId,
    image_gc::{ImageListing, ListedImage, Space},
    node_object::NodeObject,
    objects::{ObjectKey, Objects},
    observation::{ContainerFacts, ContainerResources, ContainerState, Exit},
    op::{ApiOp, ContainerOp, ImageOp, NodeOp, PodOp, RunSandbox, StartContainer, VolumeOp},
    pod::restart_policy::is_sidecar,
    probes::ProbeOutcome,
    settings::{Allocatable, SwapController},
    test_support::{ago, object_of, ready_sandbox},
    volumes::{
        self, VolumeSource,
        files::{Gathered, Token},
    },
};

const RICH: &str = include_str!("../../../testdata/rich_pod.json");
const RESOLV_CONF: &str = "nameserver 10.0.0.10\nsearch example.com\noptions ndots:2\n";

/// One mutation of a place in the JSON.
#[derive(Clone, Debug)]
enum Bend {
    Drop,
    /// Another value of the same type; `Value::Null` for a place whose type has no such value.
    Odd(Index),
    /// Another type.
    Retype(Index),
    /// A copy of another place, of any type.
    CopyOf(Index),
    /// A list with this element so many times; a map with this value under other keys.
    Repeat(usize),
    Rename(Index),
    Empty,
}

fn any_bend() -> impl Strategy<Value = ([Index; 2], Bend)> {
    let bend = prop_oneof![
        2 => Just(Bend::Drop),
        8 => any::<Index>().prop_map(Bend::Odd),
        1 => any::<Index>().prop_map(Bend::Retype),
        2 => any::<Index>().prop_map(Bend::CopyOf),
        2 => (2_usize..40).prop_map(Bend::Repeat),
        2 => any::<Index>().prop_map(Bend::Rename),
        1 => Just(Bend::Empty),
    ];
    (any::<[Index; 2]>(), bend)
}

const NUMBERS: [i64; 12] = [
    0,
    -1,
    1,
    3,
    65_536,
    i32::MAX as i64,
    i32::MIN as i64,
    i32::MAX as i64 + 1,
    i64::MAX,
    i64::MIN,
    i64::MAX / 1000,
    1 << 53,
];

const STRINGS: [&str; 46] = [
    "",
    " ",
    "/",
    "..",
    "../..",
    "a/../b",
    ".",
    "-",
    "_",
    "=",
    ":",
    "@",
    "a@sha256:",
    "ä€\u{1F600}\u{0}\n\"\\",
    "$(A",
    "$(WHO)$$(WHO)",
    "0",
    "-1",
    "1",
    "0.0000000001",
    "1n",
    "-1n",
    "9e99",
    "1e-99",
    "9223372036854775807",
    "9223372036854775808Ei",
    "-9223372036854775808",
    "8E",
    "7Ei",
    "0.5Gi",
    "1.5m",
    "01",
    "+5",
    "1Xi",
    "300.1.1.1",
    "::1",
    "fe80::1%eth0",
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00Z",
    "-009999-01-02T01:59:59Z",
    "Never",
    "Memory",
    "Localhost",
    "hugepages-2Mi",
    "hugepages-",
    "cpu",
];

fn string(index: Index) -> String {
    match index.index(STRINGS.len() + 2) {
        0 => "x".repeat(1 << 12),
        1 => "é".repeat(1 << 10),
        other => STRINGS[other - 2].to_owned(),
    }
}

/// Every place of the document, outermost first.
fn places(value: &Value, here: &str, found: &mut Vec<String>) {
    let children: Vec<_> = match value {
        Value::Object(fields) => {
            fields.iter().map(|(key, value)| (key.replace('~', "~0").replace('/', "~1"), value)).collect()
        }
        Value::Array(elements) => elements.iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        let there = format!("{here}/{key}");
        found.push(there.clone());
        places(child, &there, found);
    }
}

/// The outer one of two places is mutated: deep ones outnumber the others.
fn bend(document: &mut Value, at: [Index; 2], bend: Bend) {
    let mut all = Vec::new();
    places(document, "", &mut all);
    if all.is_empty() {
        return;
    }
    let [one, other] = at.map(|at| &all[at.index(all.len())]);
    let depth = |place: &str| place.matches('/').count();
    let place = if depth(one) < depth(other) { one.clone() } else { other.clone() };
    let old = document.pointer(&place).cloned().unwrap();
    let (parent, key) = place.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/").replace("~0", "~");
    let new = match bend {
        Bend::Odd(which) => odd(&old, which),
        Bend::Retype(which) => {
            [json!(7), json!("7"), json!([]), json!({}), json!(true), Value::Null, json!(1.5)][which.index(7)].clone()
        }
        Bend::CopyOf(other) => document.pointer(&all[other.index(all.len())]).cloned().unwrap(),
        Bend::Empty => match old {
            Value::Array(_) => json!([]),
            Value::Object(_) => json!({}),
            _ => json!(""),
        },
        Bend::Drop | Bend::Repeat(_) | Bend::Rename(_) => old.clone(),
    };
    match (document.pointer_mut(parent).unwrap(), bend) {
        (Value::Object(fields), Bend::Drop) => drop(fields.remove(&key)),
        (Value::Array(elements), Bend::Drop) => drop(elements.remove(key.parse().unwrap())),
        (Value::Object(fields), Bend::Rename(which)) => {
            fields.remove(&key);
            fields.insert(string(which), old);
        }
        (Value::Object(fields), Bend::Repeat(times)) => {
            fields.extend((0..times).map(|time| (format!("{key}{time}"), old.clone())));
        }
        (Value::Array(elements), Bend::Repeat(times)) => elements.extend(std::iter::repeat_n(old, times)),
        _ => *document.pointer_mut(&place).unwrap() = new,
    }
}

fn odd(old: &Value, which: Index) -> Value {
    match old {
        Value::Number(_) => json!(NUMBERS[which.index(NUMBERS.len())]),
        Value::String(_) => json!(string(which)),
        Value::Bool(value) => json!(!value),
        Value::Array(elements) => json!(elements.iter().rev().collect::<Vec<_>>()),
        Value::Object(fields) => {
            let strange: Map<_, _> = fields.iter().map(|(key, _)| (key.clone(), json!(string(which)))).collect();
            Value::Object(strange)
        }
        Value::Null => json!(string(which)),
    }
}

/// A runtime, a host and an API server for one node, with the minimum that pods need.
struct Odd {
    test: TestAgent,
    settings: Settings,
    pods: BTreeMap<PodUid, PodFacts>,
    /// Outcomes of the next effects and containers of the odd pod; when empty, all succeed.
    fate: VecDeque<u8>,
    stored: Vec<Arc<Pod>>,
    needs_before_edit: BTreeSet<ObjectKey>,
}

const BESIDE: &str = "beside";

impl Odd {
    fn new(fate: Vec<u8>) -> Self {
        let mut settings = Settings { sources: vec![Source::Api], ..Settings::for_node("node") };
        let gib = 1 << 30;
        settings.node.allocatable =
            Allocatable { cpu_millis: 4000, memory_bytes: 8 * gib, ephemeral_storage_bytes: 100 * gib, pods: 110 };
        settings.node.memory_capacity_bytes = 8 * gib;
        settings.node.huge_page_sizes = vec!["2MB".to_owned()];
        settings.node.apparmor_enabled = true;
        settings.node.swap_controller = SwapController::CgroupV2;
        settings.node.cluster_domain = "cluster.local".to_owned();
        settings.node.cluster_dns = vec!["10.0.0.10".to_owned()];
        let mut test = TestAgent::with_cgroups(settings.clone());
        test.handle(Event::Node(node_object()));
        test.handle(Event::RuntimeEvents(EventStream::Up));
        Odd {
            test,
            settings,
            pods: BTreeMap::new(),
            fate: fate.into(),
            stored: Vec::new(),
            needs_before_edit: BTreeSet::new(),
        }
    }

    /// The API server's whole set: the odd pod, if any, and the plain one.
    fn listed(&mut self, odd: Option<&Value>) {
        let odd = odd.and_then(|document| api_pod::decode(document.to_string().as_bytes()).ok());
        let beside = json!({"metadata": {"name": BESIDE, "namespace": "shop", "uid": BESIDE},
            "spec": {"containers": [{"name": "a", "image": "a:1"}]}});
        let beside: Pod = serde_json::from_value(beside).unwrap();
        self.stored = odd.into_iter().chain([beside]).map(Arc::new).collect();
        let snapshot = self.test.agent.snapshot();
        self.needs_before_edit = snapshot.pods.values().flat_map(|view| view.needs.objects.iter().cloned()).collect();
        self.test.handle(Event::Config { source: Source::Api, pods: self.stored.clone() });
    }

    /// Gives results, and advances the time when no effect is pending, for so many test.
    fn live(&mut self, test: usize) {
        for _ in 0..test {
            if self.test.in_flight.is_empty() {
                let moment = self.test.agent.wake_at(self.test.now()).as_duration().as_secs();
                self.test.at_secs = (moment.saturating_sub(3600) + 1).min(self.test.at_secs + 3600);
                self.test.handle(Event::Due);
                continue;
            }
            let (id, op) = self.test.in_flight.remove(0);
            serde_json::to_string(&op).unwrap();
            let result = self.done(&op);
            self.test.handle(Event::Done { id, result });
        }
    }

    fn done(&mut self, op: &Op) -> Result<Facts, EffectError> {
        let fate = match subject(op) {
            Some(uid) if uid.as_str() != BESIDE => self.fate.pop_front().unwrap_or(u8::MAX),
            _ => u8::MAX,
        };
        self.build(op)?;
        let failed = |kind| Err(EffectError { kind, message: "as it happens".to_owned() });
        match fate {
            0..10 => return failed(ErrorKind::Retry),
            10..20 => return failed(ErrorKind::Reject(Reason::CreateContainerError)),
            20..25 => return failed(ErrorKind::Gone),
            _ => {}
        }
        Ok(match op {
            Op::Node(NodeOp::CheckRuntime) => {
                Facts::Runtime(RuntimeStatus { name: "containerd".to_owned(), ..RuntimeStatus::default() })
            }
            Op::Api(ApiOp::GetNode) => Facts::Node(node_object()),
            Op::Node(NodeOp::Relist) => {
                Facts::Listing(Listing { looked_at: self.test.now().uptime, pods: BTreeMap::new() })
            }
            Op::Node(NodeOp::ListPodDirs) => Facts::PodDirs { uids: Vec::new(), log_dirs: Vec::new() },
            Op::Node(NodeOp::SyncQosCgroups { .. }) => Facts::Cgroups { names: Vec::new() },
            Op::Node(NodeOp::ListImages(_)) => Facts::Images(images_of_node(fate)),
            Op::Node(NodeOp::MeasureLogs { logs }) => {
                let size = Some(u64::from(fate)).filter(|fate| fate % 7 != 0).map(|fate| fate << 16);
                Facts::LogSizes(logs.iter().map(|log| (log.id.clone(), size)).collect())
            }
            Op::Pod(PodOp::Inspect { pod }) => self.looked(&pod.uid, fate),
            Op::Image(ImageOp::Inspect { .. }) if fate < 100 => Facts::Image(None),
            Op::Image(ImageOp::Inspect { .. }) | Op::Image(ImageOp::Pull { .. }) => Facts::Image(Some(image(fate))),
            Op::Container(ContainerOp::Probe(_)) if fate < 100 => Facts::Probe(ProbeOutcome::Failure("no".to_owned())),
            Op::Container(ContainerOp::Probe(_)) => Facts::Probe(ProbeOutcome::Success),
            Op::Api(ApiOp::PatchStatus { pod, patch, .. }) => self.patched(&pod.uid, patch),
            other => {
                self.change(other);
                nothing_else(op)
            }
        })
    }

    /// Everything the effect would build before its first call; errors there are errors here.
    fn build(&self, op: &Op) -> Result<(), EffectError> {
        let reject = |error: crate::container::ConfigError| EffectError {
            kind: ErrorKind::Reject(Reason::CreateContainerConfigError),
            message: error.0,
        };
        match op {
            Op::Pod(PodOp::RunSandbox(RunSandbox { uid, pod, attempt, cgroup_parent, .. })) => {
                let identity = Identity { uid, attempt: *attempt, cgroup_parent, volume_groups: &[] };
                sandbox_config(pod, identity, &self.settings, RESOLV_CONF).map_err(reject)?;
                self.assert_published(uid, pod.spec.as_ref().and_then(ObjectKey::runtime_class).iter());
            }
            Op::Container(ContainerOp::Start(order)) => {
                let container = crate::container::find(&order.pod, &order.container).map_err(reject)?;
                let objects = self.found(&order.uid, environment::needs(&order.pod, &container));
                let sources = environment::Sources { objects, ..environment::Sources::default() };
                container_config(order, &sources, &self.settings).map_err(reject)?;
                hosts::content(&order.pod, &order.pod_ips, "cluster.local", "127.0.0.1 localhost\n").map_err(reject)?;
                mounts::termination_message_file(order, &container, &self.settings.root_dir);
            }
            Op::Volume(VolumeOp::SetUp { pod, uid, .. } | VolumeOp::Refresh { pod, uid }) => {
                self.make_files(pod, uid).map_err(reject)?
            }
            Op::Image(ImageOp::Pull { pod, secrets, .. }) => {
                let keys: Vec<_> = secrets.iter().map(|name| ObjectKey::secret(&pod.namespace, name)).collect();
                self.assert_published(&pod.uid, &keys);
            }
            _ => {}
        }
        Ok(())
    }

    /// The shell has only the objects that the snapshot lists. An effect sent before the pod was edited may need others; if it
    /// comes too late for them it fails, and the next one is for the edited pod.
    fn assert_published<'a>(&self, uid: &PodUid, keys: impl IntoIterator<Item = &'a ObjectKey>) {
        let snapshot = self.test.agent.snapshot();
        let needs = &snapshot.pods[uid].needs.objects;
        for key in keys.into_iter().filter(|key| !key.name.is_empty()) {
            let is_published = needs.contains(key) || self.needs_before_edit.contains(key);
            assert!(is_published, "{key} was not published as a need of {uid}");
        }
    }

    fn found(&self, uid: &PodUid, keys: BTreeSet<ObjectKey>) -> Objects {
        self.assert_published(uid, &keys);
        let object = |key: &ObjectKey| Arc::new(object_of(key.kind, &[("a", &b"1"[..]), ("ca.crt", &[0xff])]));
        Objects(keys.into_iter().map(|key| (key.clone(), Ok(object(&key)))).collect())
    }

    fn make_files(&self, pod: &Pod, uid: &PodUid) -> Result<(), crate::container::ConfigError> {
        for to_mount in volumes::volumes_to_mount(pod) {
            volumes::nested_mount_points(pod.spec.as_ref().unwrap(), &to_mount.name);
            if let VolumeSource::Files(volume) = to_mount.source {
                let needs = volume.needs();
                let token = Token { token: "token".to_owned(), expires_at: jiff::Timestamp::UNIX_EPOCH };
                let tokens = needs.tokens.into_iter().map(|key| (key, Ok(token.clone()))).collect();
                let gathered = Gathered { objects: self.found(uid, needs.objects), tokens, ..Gathered::default() };
                volume.files(pod, uid, &gathered, self.settings.node.allocatable)?;
            }
        }
        Ok(())
    }

    /// The API server applies the patch, as far as it can be read.
    fn patched(&self, uid: &PodUid, patch: &Value) -> Facts {
        let Some(pod) = self.stored.iter().find(|pod| PodUid::of(pod) == *uid) else { return Facts::Nothing };
        let mut pod = Pod::clone(pod);
        pod.metadata.resource_version = Some((1_000_000 + self.test.at_secs).to_string());
        pod.status = serde_json::from_value(patch["status"].clone()).unwrap_or(pod.status);
        Facts::ApiPod(Arc::new(pod))
    }

    fn looked(&mut self, uid: &PodUid, fate: u8) -> Facts {
        let looked_at = self.test.now().uptime;
        let facts = self.pods.entry(uid.clone()).or_default();
        facts.looked_at = looked_at;
        if let Some(container) = facts.containers.iter_mut().find(|each| each.exit().is_none())
            && fate < 120
        {
            container.state = ended(i32::from(fate % 3));
        }
        Facts::Pod(facts.clone())
    }

    fn change(&mut self, op: &Op) {
        let Some(uid) = subject(op) else { return };
        let facts = self.pods.entry(uid).or_default();
        match op {
            Op::Pod(PodOp::RunSandbox(order)) => facts.sandboxes.insert(0, ready_sandbox(order.attempt)),
            Op::Pod(PodOp::StopSandbox { .. }) => {
                facts.sandboxes.iter_mut().for_each(|each| each.state = SandboxState::NotReady)
            }
            Op::Pod(PodOp::RemoveSandbox { id, .. }) => facts.sandboxes.retain(|each| each.id != *id),
            Op::Container(ContainerOp::Start(order)) => facts.containers.insert(0, started(order)),
            Op::Container(ContainerOp::Resume { id, .. }) => {
                let state = ContainerState::Running { started_at: ago(0) };
                facts.containers.iter_mut().filter(|each| each.id == *id).for_each(|each| each.state = state.clone());
            }
            Op::Container(ContainerOp::Stop { id, .. }) => {
                facts.containers.iter_mut().filter(|each| each.id == *id).for_each(|each| each.state = ended(137));
            }
            Op::Container(ContainerOp::Remove { id, .. }) => facts.containers.retain(|each| each.id != *id),
            _ => {}
        }
    }
}

fn node_object() -> NodeObject {
    let labels = [("kubernetes.io/os", "linux"), ("cores", "4")];
    let allocatable =
        [("cpu", "4"), ("memory", "8Gi"), ("ephemeral-storage", "100Gi"), ("hugepages-2Mi", "8Mi"), ("pods", "110")];
    NodeObject {
        version: 1,
        labels: Arc::new(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
        allocatable: allocatable.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).into(),
        ..NodeObject::default()
    }
}

fn image(fate: u8) -> ImageFacts {
    let user = match fate % 3 {
        0 => ImageUser::Unset,
        1 => ImageUser::Uid(i64::from(fate)),
        _ => ImageUser::Name("app".to_owned()),
    };
    ImageFacts { id: "sha256:1".to_owned(), size_bytes: 1, user }
}

/// A disk that is nearly full of images, which are unused or not.
fn images_of_node(fate: u8) -> ImageListing {
    let image = |id: &str| ListedImage { id: id.to_owned(), size_bytes: 1, ..ListedImage::default() };
    let in_use = if fate.is_multiple_of(2) { BTreeSet::from(["sha256:1".to_owned()]) } else { BTreeSet::new() };
    let space = Some(Space { capacity_bytes: 100, available_bytes: u64::from(fate % 30) });
    let images = vec![image("sha256:1"), image("sha256:2")];
    ImageListing { images, in_use, space, remembered: BTreeMap::new() }
}

/// Init containers complete as soon as they start.
pub(super) fn started(order: &StartContainer) -> ContainerFacts {
    let spec = crate::container::find(&order.pod, &order.container).unwrap();
    let init = order.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let is_done = init.clone().any(|each| each.name == order.container && !is_sidecar(each));
    let state = if is_done { ended(0) } else { ContainerState::Running { started_at: ago(0) } };
    ContainerFacts {
        id: ContainerId::new(format!("{}{}", order.container, order.attempt)),
        sandbox: order.sandbox.clone(),
        name: order.container.clone(),
        attempt: order.attempt,
        hash: Some(crate::container::hash::hash(&spec)),
        image: spec.image.clone().unwrap_or_default(),
        image_ref: order.image.id.clone(),
        created_at: ago(0),
        state,
        log_path: format!("/logs/{}/{}.log", order.container, order.attempt),
        image_volumes: Vec::new(),
        user: None,
        resources: ContainerResources::default(),
    }
}

pub(super) fn ended(code: i32) -> ContainerState {
    let started_at = Some(ago(0) - SignedDuration::from_secs(1));
    ContainerState::Exited(Exit {
        code,
        started_at,
        finished_at: ago(0),
        reason: "Error".to_owned(),
        message: String::new(),
    })
}

fn subject(op: &Op) -> Option<PodUid> {
    Some(match op {
        Op::Node(NodeOp::CheckRuntime)
        | Op::Node(NodeOp::Relist)
        | Op::Api(ApiOp::GetNode)
        | Op::Node(NodeOp::ListPodDirs | NodeOp::ListDevices)
        | Op::Volume(VolumeOp::Stage { .. } | VolumeOp::Unstage { .. })
        | Op::Node(NodeOp::SyncQosCgroups { .. } | NodeOp::MeasureLogs { .. } | NodeOp::ListImages(_))
        | Op::Node(NodeOp::MeasureNode { .. } | NodeOp::FindImageFs | NodeOp::MeasurePods { .. })
        | Op::Image(ImageOp::Delete { .. }) => return None,
        Op::Log(op) => op.log().pod.uid.clone(),
        Op::Pod(PodOp::Inspect { pod })
        | Op::Image(ImageOp::Inspect { pod, .. })
        | Op::Pod(PodOp::SetUpCgroup { pod, .. })
        | Op::Pod(PodOp::MakeDirs { pod })
        | Op::Image(ImageOp::Pull { pod, .. })
        | Op::Pod(PodOp::StopSandbox { pod, .. })
        | Op::Pod(PodOp::RemoveSandbox { pod, .. })
        | Op::Container(ContainerOp::Resume { pod, .. })
        | Op::Container(ContainerOp::Stop { pod, .. })
        | Op::Container(ContainerOp::Remove { pod, .. })
        | Op::Api(ApiOp::PatchStatus { pod, .. })
        | Op::Api(ApiOp::DeletePod { pod })
        | Op::Api(ApiOp::DeleteMirrorPod { pod }) => pod.uid.clone(),
        Op::Container(ContainerOp::Probe(order)) => order.pod.uid.clone(),
        Op::Container(ContainerOp::RunHook(order)) => order.pod.uid.clone(),
        Op::Pod(PodOp::RemoveCgroup(place) | PodOp::RemoveDir(place) | PodOp::RemoveLogDir(place))
        | Op::Volume(VolumeOp::TearDown(place)) => place.pod.uid.clone(),
        Op::Volume(VolumeOp::Resolve { pod, .. }) => PodUid::of(pod),
        Op::Volume(VolumeOp::CheckAttachLimit { pod, .. } | VolumeOp::Unmount { pod, .. }) => pod.uid.clone(),
        Op::Volume(VolumeOp::SetUp { uid, .. } | VolumeOp::Expand { uid, .. } | VolumeOp::Refresh { uid, .. }) => {
            uid.clone()
        }
        Op::Pod(PodOp::RunSandbox(order)) => order.uid.clone(),
        Op::Container(ContainerOp::Start(order)) => order.uid.clone(),
        Op::Api(ApiOp::CreateMirrorPod { pod }) => PodUid::of(pod),
    })
}

fn rich() -> Value {
    serde_json::from_str(RICH).unwrap()
}

fn phase(odd: &Odd, uid: &str) -> Option<String> {
    odd.test.agent.snapshot().pods.get(&PodUid::new(uid))?.status.phase.clone()
}

#[test]
fn rich_pod_runs_without_mutations() {
    let mut odd = Odd::new(Vec::new());
    odd.listed(Some(&rich()));
    odd.live(200);
    let names = odd.pods[&PodUid::new("u1")].containers.iter().map(|each| each.name.clone()).collect::<Vec<_>>();
    assert_eq!(phase(&odd, "u1").as_deref(), Some("Running"), "{names:?}, {:?}", odd.test.events);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    #[test]
    fn no_api_pod_breaks_the_agent_or_another_pod(
        first in vec(any_bend(), 0..4),
        second in vec(any_bend(), 0..3),
        fate in vec(any::<u8>(), 0..80),
    ) {
        let mut document = rich();
        let mut odd = Odd::new(fate);
        for bends in [first, second] {
            for (at, how) in bends {
                bend(&mut document, at, how);
            }
            odd.listed(Some(&document));
            odd.live(120);
        }
        if let Some(metadata) = document["metadata"].as_object_mut() {
            metadata.insert("deletionTimestamp".to_owned(), json!("2026-06-01T12:00:00Z"));
        }
        odd.listed(Some(&document));
        odd.live(80);
        prop_assert_eq!(phase(&odd, BESIDE), Some("Running".to_owned()));
        odd.listed(None);
        odd.live(80);
    }

    #[test]
    fn pod_with_times_at_the_ends_of_their_ranges_is_handled(
        numbers in vec(0..NUMBERS.len(), 1..8),
        moments in vec(0..MOMENTS.len(), 1..4),
        fate in vec(any::<u8>(), 0..80),
    ) {
        let mut document = rich();
        // Fields that the rich pod may not have.
        document["metadata"]["creationTimestamp"] = json!(MOMENTS[0]);
        document["spec"]["activeDeadlineSeconds"] = json!(1);
        document["status"]["startTime"] = json!(MOMENTS[0]);
        let (mut numbers, mut moments) = (numbers.iter().cycle(), moments.iter().cycle());
        let mut odd = Odd::new(fate);
        set_times(&mut document, &mut numbers, &mut moments);
        odd.listed(Some(&document));
        odd.live(120);
        document["metadata"]["deletionTimestamp"] = json!(MOMENTS[0]);
        document["metadata"]["deletionGracePeriodSeconds"] = json!(1);
        set_times(&mut document, &mut numbers, &mut moments);
        odd.listed(Some(&document));
        odd.live(80);
        prop_assert_eq!(phase(&odd, BESIDE), Some("Running".to_owned()));
    }
}

/// The ends of what a timestamp can be, here and in Go, and the time of the test.
const MOMENTS: [&str; 5] = [
    "2026-06-01T12:00:00Z",
    "9999-12-30T22:00:00Z",
    "-009999-01-02T01:59:59Z",
    "0001-01-01T00:00:00Z",
    "1970-01-01T00:00:00Z",
];

/// Replaces every number of seconds and every timestamp of the document.
fn set_times<'a>(
    value: &mut Value,
    numbers: &mut impl Iterator<Item = &'a usize>,
    moments: &mut impl Iterator<Item = &'a usize>,
) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let is_moment = key.ends_with("Timestamp") || key.ends_with("Time") || key.ends_with("At");
                if value.is_number() && key.ends_with("Seconds") {
                    *value = json!(NUMBERS[*numbers.next().unwrap()]);
                } else if value.is_string() && is_moment {
                    *value = json!(MOMENTS[*moments.next().unwrap()]);
                } else {
                    set_times(value, numbers, moments);
                }
            }
        }
        Value::Array(elements) => elements.iter_mut().for_each(|each| set_times(each, numbers, moments)),
        _ => {}
    }
}
