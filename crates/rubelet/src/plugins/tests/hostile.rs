//! Plugins that come and go all the time, hang, or say of the node what nobody should, in paused time.

use std::sync::Mutex;

use async_trait::async_trait;
use rubelet_core::csi_node;
use rubelet_csi::{
    CALL_TIMEOUT, Code, CsiError, CsiPlugins, CsiResult, DriverAddress, Drivers, ExpandVolume, NodeCapabilities,
    NodeInfo, PublishVolume, StageVolume, VolumeStats, pluginregistration::PluginInfo,
};
use rubelet_kube::port::{ApiErrorKind, PatchKind, Verb};
use serde_json::{Value, json};

use super::*;

const NODE: &str = r#"{"metadata": {"name": "n1", "uid": "u1", "labels": {"zone": "b"}}}"#;

/// What a plugin does when it is asked for its NodeGetInfo.
#[derive(Clone)]
enum OnNodeInfo {
    Says(NodeInfo),
    Fails,
    /// Until the port's own deadline.
    Hangs,
}

impl OnNodeInfo {
    fn id(node_id: &str) -> Self {
        OnNodeInfo::Says(NodeInfo { node_id: node_id.to_owned(), ..NodeInfo::default() })
    }

    fn topology(key: &str, value: &str) -> Self {
        let topology = [(key.to_owned(), value.to_owned())].into();
        OnNodeInfo::Says(NodeInfo { node_id: "n1-id".to_owned(), topology, ..NodeInfo::default() })
    }
}

/// The driver's name and answer by the socket of its plugin; what each was asked and told.
#[derive(Default)]
struct FakePlugins {
    plugins: Mutex<BTreeMap<PathBuf, (String, OnNodeInfo)>>,
    asked: Mutex<Vec<PathBuf>>,
    told: Mutex<Vec<(PathBuf, Result<(), String>)>>,
}

#[async_trait]
impl CsiPlugins for FakePlugins {
    async fn plugin_info(&self, socket: &Path) -> CsiResult<PluginInfo> {
        self.asked.lock().unwrap().push(socket.to_owned());
        let name = self.plugins.lock().unwrap()[socket].0.clone();
        let (endpoint, supported_versions) = (String::new(), vec!["1.0.0".to_owned()]);
        Ok(PluginInfo { r#type: csi_node::CSI_PLUGIN_TYPE.to_owned(), name, endpoint, supported_versions })
    }

    async fn notify_registration(&self, socket: &Path, outcome: Result<(), String>) -> CsiResult<()> {
        self.told.lock().unwrap().push((socket.to_owned(), outcome));
        Ok(())
    }

    async fn node_info(&self, driver: &DriverAddress) -> CsiResult<NodeInfo> {
        let answer = self.plugins.lock().unwrap()[&driver.socket].1.clone();
        match answer {
            OnNodeInfo::Says(info) => Ok(info),
            OnNodeInfo::Fails => Err(CsiError::new(Code::Internal, "no metadata service")),
            OnNodeInfo::Hangs => {
                sleep(CALL_TIMEOUT).await;
                Err(CsiError::new(Code::DeadlineExceeded, "context deadline exceeded"))
            }
        }
    }

    async fn capabilities(&self, _: &DriverAddress) -> CsiResult<NodeCapabilities> {
        panic!("a registration has no volumes")
    }

    async fn stage(&self, _: &DriverAddress, _: StageVolume) -> CsiResult<()> {
        panic!("a registration has no volumes")
    }

    async fn unstage(&self, _: &DriverAddress, _: &str, _: &Path) -> CsiResult<()> {
        panic!("a registration has no volumes")
    }

    async fn publish(&self, _: &DriverAddress, _: PublishVolume) -> CsiResult<()> {
        panic!("a registration has no volumes")
    }

    async fn unpublish(&self, _: &DriverAddress, _: &str, _: &Path) -> CsiResult<()> {
        panic!("a registration has no volumes")
    }

    async fn stats(&self, _: &DriverAddress, _: &str, _: &Path, _: Option<&Path>) -> CsiResult<VolumeStats> {
        panic!("a registration has no volumes")
    }

    async fn expand(&self, _: &DriverAddress, _: ExpandVolume) -> CsiResult<Option<i64>> {
        panic!("a registration has no volumes")
    }
}

/// The registry of sockets without a file system: the test says what a look finds.
struct FoundSockets {
    _dir: TempDir,
    plugins: Arc<FakePlugins>,
    api: Arc<FakeApi>,
    world: World,
    registry: Registry,
    _events: JoinSet<()>,
}

fn at(socket: &str) -> PathBuf {
    Path::new("/registry").join(socket)
}

impl FoundSockets {
    fn over(answers: impl IntoIterator<Item = Result<String, ApiErrorKind>>) -> Self {
        let dir = TempDir::new().unwrap();
        let plugins = Arc::<FakePlugins>::default();
        let world = World { csi: Drivers::over(plugins.clone()), ..world_in(dir.path()) };
        let api = FakeApi::answering(answers);
        let (inbox, mut events) = mpsc::channel(1);
        let mut drain = JoinSet::new();
        drain.spawn(async move { while events.recv().await.is_some() {} });
        let registrar = Registrar::new(world.clone(), CsiNodeWriter::new(api.clone(), "n1".to_owned()), inbox);
        let registry = Registry { registrar, sockets: BTreeMap::new(), tasks: JoinSet::new() };
        FoundSockets { _dir: dir, plugins, api, world, registry, _events: drain }
    }

    fn plugin(&self, socket: &str, driver: &str, answer: OnNodeInfo) {
        self.plugins.plugins.lock().unwrap().insert(at(socket), (driver.to_owned(), answer));
    }

    /// The sockets that a look finds, each with the number of its file; then time passes.
    async fn look(&mut self, sockets: &[(&str, u64)], wait_ms: u64) {
        let identity = |inode| FileIdentity { device: 1, inode, created_at: None };
        self.registry.take(sockets.iter().map(|(name, inode)| (at(name), identity(*inode))).collect());
        sleep(Duration::from_millis(wait_ms)).await;
    }

    fn times_asked(&self, socket: &str) -> usize {
        self.plugins.asked.lock().unwrap().iter().filter(|asked| **asked == at(socket)).count()
    }

    /// What the plugin was told last.
    fn told(&self, socket: &str) -> Option<Result<(), String>> {
        let told = self.plugins.told.lock().unwrap();
        told.iter().rev().find(|(to, _)| *to == at(socket)).map(|(_, outcome)| outcome.clone())
    }

    fn is_registered(&self, driver: &str) -> bool {
        self.world.csi.client(driver).is_ok()
    }

    fn writes(&self) -> usize {
        self.api.calls().iter().filter(|call| !matches!(call.verb, Verb::Get)).count()
    }
}

/// Also the most that a registration and its end write: the fake API server has no CSINode, so each makes one.
const WRITES_PER_REGISTRATION: usize = 6;

#[tokio::test(start_paused = true)]
async fn socket_that_comes_and_goes_registers_at_its_pace_and_delays_no_other() {
    // How long it is there and away each time, in milliseconds. Never away: it is made anew.
    for (there, away) in
        [(1000, 0), (60, 0), (60, 600), (700, 300), (3000, 2000), (60, 9000), (60, 30_000), (11_000, 0)]
    {
        let mut found = FoundSockets::over([]);
        found.plugin("a.sock", "a", OnNodeInfo::id("n1-id"));
        found.plugin("b.sock", "b", OnNodeInfo::id("n1-id"));
        for inode in 0..50 {
            found.look(&[("a.sock", inode)], there).await;
            if away > 0 {
                found.look(&[], away).await;
            }
        }
        found.look(&[("b.sock", 1000)], 1).await;
        assert!(found.is_registered("b"), "{there} ms there, {away} ms away: b waits");
        for inode in 50..100 {
            found.look(&[("a.sock", inode), ("b.sock", 1000)], there).await;
            if away > 0 {
                found.look(&[("b.sock", 1000)], away).await;
            }
        }
        let seconds = usize::try_from(100 * (there + away) / 1000).unwrap();
        let (registrations, writes) = (found.times_asked("a.sock"), found.writes());
        let most = 4 + seconds / 10;
        assert!(registrations <= most, "{there} ms there, {away} ms away: {registrations} in {seconds} s");
        let most = (most + 1) * WRITES_PER_REGISTRATION;
        assert!(writes <= most, "{there} ms there, {away} ms away: {writes} writes in {seconds} s");
        assert_eq!(found.times_asked("b.sock"), 1, "nothing happened to b");
    }
}

#[tokio::test(start_paused = true)]
async fn plugin_that_fails_each_time_is_asked_at_its_pace_and_writes_nothing() {
    for (there, away) in [(1000, 0), (60, 0), (60, 600), (11_000, 0), (600_000, 0)] {
        let mut found = FoundSockets::over([]);
        found.plugin("a.sock", "a", OnNodeInfo::Fails);
        found.plugin("b.sock", "b", OnNodeInfo::id("n1-id"));
        for inode in 0..100 {
            found.look(&[("a.sock", inode)], there).await;
            if away > 0 {
                found.look(&[], away).await;
            }
        }
        let seconds = usize::try_from(100 * (there + away) / 1000).unwrap();
        let (tries, most) = (found.times_asked("a.sock"), 5 + seconds / 2);
        assert!(tries <= most, "{there} ms there, {away} ms away: {tries} tries in {seconds} s");
        assert_eq!((found.writes(), found.is_registered("a")), (0, false));
        let told = found.told("a.sock").unwrap().unwrap_err();
        assert!(told.contains("code = Internal desc = no metadata service"), "{told}");
        found.look(&[("a.sock", 100), ("b.sock", 1000)], 1).await;
        assert!(found.is_registered("b"), "{there} ms there, {away} ms away: b waits");
    }
}

#[tokio::test(start_paused = true)]
async fn plugin_that_hangs_in_node_get_info_delays_no_other_and_loses_its_name_by_the_deadline() {
    let mut found = FoundSockets::over([]);
    found.plugin("hangs.sock", "d", OnNodeInfo::Hangs);
    for (socket, driver) in [("other.sock", "e"), ("same.sock", "d"), ("later.sock", "d")] {
        found.plugin(socket, driver, OnNodeInfo::id("n1-id"));
    }
    found.look(&[("hangs.sock", 1)], 1).await;
    assert_eq!(found.times_asked("hangs.sock"), 1);
    let all = [("hangs.sock", 1), ("other.sock", 2), ("same.sock", 3)];
    found.look(&all, 1).await;
    assert!(found.is_registered("e"), "it waits for the one that hangs");
    let refused = found.told("same.sock").unwrap().unwrap_err();
    assert!(refused.contains("Another driver with the same name is already registered"), "{refused}");
    assert!(!found.is_registered("d"), "nobody knows its node yet");
    assert_eq!(found.told("hangs.sock"), None);
    // Another one of the name, as soon as the port's deadline is over; the one that hung tries again half a second later.
    let left_ms = u64::try_from(CALL_TIMEOUT.as_millis()).unwrap();
    found.look(&all, left_ms).await;
    let told = found.told("hangs.sock").unwrap().unwrap_err();
    assert!(told.contains("code = DeadlineExceeded"), "{told}");
    let all = [all[0], all[1], ("later.sock", 4)];
    found.look(&all, 1).await;
    assert_eq!((found.told("later.sock"), found.is_registered("d")), (Some(Ok(())), true));
    found.look(&all, 600_000).await;
    assert!(found.is_registered("d"), "the one that hung takes nothing from it");
    let refused = found.told("hangs.sock").unwrap().unwrap_err();
    assert!(refused.contains("Another driver with the same name is already registered"), "{refused}");
}

/// Answers to the requests of one registration: reads of the Node and its CSINode, the patch, the update.
fn answers(
    patched: Result<(), ApiErrorKind>,
    updated: Result<(), ApiErrorKind>,
) -> impl IntoIterator<Item = Result<String, ApiErrorKind>> {
    let object = serde_json::to_string(&csi_node::initial("n1", "u1")).unwrap();
    let done = |result: Result<(), _>| result.map(|()| "{}".to_owned());
    [Ok(NODE.to_owned()), Ok(object), done(patched), done(updated)]
}

/// A registration with this answer: the requests, and what the plugin was told.
async fn registration(
    answer: OnNodeInfo,
    answers: impl IntoIterator<Item = Result<String, ApiErrorKind>>,
) -> (FoundSockets, Option<Result<(), String>>) {
    let mut found = FoundSockets::over(answers);
    found.plugin("a.sock", "a", answer);
    found.look(&[("a.sock", 1)], 1).await;
    let told = found.told("a.sock");
    (found, told)
}

/// As upstream, which checks no more of it than that the id is not empty and no label has another value: the rest is the API
/// server's to refuse.
#[tokio::test(start_paused = true)]
async fn what_a_driver_says_of_the_node_is_data_and_becomes_no_path_and_no_instruction() {
    let huge = "x".repeat(1 << 20);
    for text in ["..", "../../../etc", "/", "a/b/c", "line\nbreak", "nul\0", "\"}}", "$patch", "$retainKeys", "", &huge]
    {
        let as_id = (!text.is_empty()).then(|| OnNodeInfo::id(text));
        let all = [as_id, Some(OnNodeInfo::topology(text, text)), Some(OnNodeInfo::topology(text, "delete"))];
        for answer in all.into_iter().flatten() {
            let OnNodeInfo::Says(info) = answer.clone() else { panic!("it answers") };
            let (found, told) = registration(answer, answers(Ok(()), Ok(()))).await;
            assert_eq!(told, Some(Ok(())));
            let calls = found.api.calls();
            let shown: Vec<_> = calls.iter().map(|call| format!("{:?} {}", call.verb, call.path)).collect();
            let csi_node = "/apis/storage.k8s.io/v1/csinodes/n1";
            let expected = [
                "Get /api/v1/nodes/n1".to_owned(),
                format!("Get {csi_node}"),
                // Keys of a strategic merge patch can be instructions, such as to remove all labels.
                format!("{:?} /api/v1/nodes/n1/status", Verb::Patch(PatchKind::Merge)),
                format!("Update {csi_node}"),
            ];
            assert_eq!(shown[..4], expected);
            let body = |at: usize| serde_json::from_slice::<Value>(calls[at].body.as_ref().unwrap()).unwrap();
            let ids = json!({"a": info.node_id}).to_string();
            let mut metadata = json!({"annotations": {"csi.volume.kubernetes.io/nodeid": ids}});
            if !info.topology.is_empty() {
                metadata["labels"] = json!(info.topology);
            }
            assert_eq!(body(2), json!({"metadata": metadata}));
            let driver = &body(3)["spec"]["drivers"][0];
            assert_eq!((&driver["name"], &driver["nodeID"]), (&json!("a"), &json!(info.node_id)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_api_server_does_not_take_is_refused_and_the_plugin_is_told() {
    use ApiErrorKind::{Forbidden, Invalid, Unreachable};
    let zone = OnNodeInfo::topology("zone", &"a\n".repeat(1 << 20));
    let (found, told) = registration(OnNodeInfo::id(""), answers(Ok(()), Ok(()))).await;
    let told = told.unwrap().unwrap_err();
    assert!(told.contains("driverNodeID must not be empty"), "{told}");
    assert_eq!((found.writes(), found.is_registered("a")), (0, false));
    let (found, told) = registration(zone, answers(Ok(()), Ok(()))).await;
    let told = told.unwrap().unwrap_err();
    assert!(told.contains(r#"detected topology value collision: driver reported "zone":"a\na\n"#), "{told}");
    assert!(told.len() < 1100, "{} bytes", told.len());
    assert_eq!((found.writes(), found.is_registered("a")), (0, false));
    // A label that NodeRestriction keeps for others, a label that is none, an id that is too long.
    for (patched, updated) in [(Err(Forbidden), Ok(())), (Err(Invalid), Ok(())), (Ok(()), Err(Invalid))] {
        let (found, told) = registration(OnNodeInfo::topology("../..", "x"), answers(patched, updated)).await;
        let told = told.expect("the plugin is told at once").unwrap_err();
        assert!(told.starts_with("RegisterPlugin error -- plugin registration failed with err: "), "{told}");
        assert!(!found.is_registered("a"), "{patched:?} {updated:?}");
    }
    // While the API server is away, the driver is usable; the plugin is told in the end.
    let (mut found, told) = registration(OnNodeInfo::id("n1-id"), vec![Err(Unreachable); 9]).await;
    assert_eq!((told, found.is_registered("a")), (None, true));
    found.look(&[("a.sock", 1)], 10_000).await;
    assert_eq!(found.told("a.sock"), Some(Ok(())));
}
