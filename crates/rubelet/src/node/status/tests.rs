//! Tests of status reports in paused time, with a scripted server.

use rubelet_core::{node_status::initial, settings::Settings};
use serde_json::{Value, json};
use tempfile::TempDir;

use tokio::task::JoinSet;

use super::*;
use crate::{
    node::testing::{Answer, CONFLICT, NOT_FOUND, Scripted, UNREACHABLE, report, reporting, view},
    world::{Clock, testing::world_in},
};

const CACHED: &str = "Get nodes/n1?resourceVersion=0";
const NEWEST: &str = "Get nodes/n1";
const PATCH: &str = "Patch(StrategicMerge) nodes/n1/status";
const CREATE: &str = "Create nodes";

/// The node as this agent reported it when the tests begin.
fn reported(version: u64) -> Value {
    let reporting = reporting();
    let mut node = serde_json::to_value(initial(report(&reporting, &view()))).unwrap();
    node["metadata"]["resourceVersion"] = json!(version.to_string());
    node["metadata"]["uid"] = json!("u1");
    node
}

fn reported_not_ready(version: u64) -> Value {
    let mut node = reported(version);
    let conditions = node["status"]["conditions"].as_array_mut().unwrap();
    conditions[3]["status"] = json!("False");
    node
}

/// A reporter with a scripted server, on a node whose runtime is down.
struct StatusFixture {
    api: Arc<Scripted>,
    world: World,
    snapshots: watch::Sender<Arc<Snapshot>>,
    node_states: watch::Sender<NodeWatchState>,
    uid: watch::Receiver<Option<String>>,
    /// What the loop receives.
    told: mpsc::Receiver<Event>,
    _tasks: JoinSet<()>,
    _dir: TempDir,
}

impl StatusFixture {
    fn new(readiness: NodeReadiness, answers: impl IntoIterator<Item = Answer>) -> StatusFixture {
        StatusFixture::with(reporting(), readiness, answers)
    }

    fn with(
        reporting: NodeReporting,
        readiness: NodeReadiness,
        answers: impl IntoIterator<Item = Answer>,
    ) -> StatusFixture {
        let dir = tempfile::tempdir().unwrap();
        let clock = Clock::simulated("2026-06-01T12:00:00Z".parse().unwrap(), Arc::default());
        let settings = Arc::new(Settings::for_node("n1"));
        let world = World { clock, settings, ..world_in(dir.path()) };
        let api = Scripted::new(answers);
        let (snapshots, receiver) = watch::channel(snapshot(readiness));
        let (node_states, seen) = watch::channel(NodeWatchState::Unseen);
        let (sender, uid) = watch::channel(None);
        let mut tasks = JoinSet::new();
        let (inbox, told) = mpsc::channel(16);
        let inputs = Inputs { snapshots: receiver, node_states: seen, inbox };
        tasks.spawn(run(world.clone(), api.clone(), Arc::new(reporting), inputs, sender));
        StatusFixture { api, world, snapshots, node_states, uid, told, _tasks: tasks, _dir: dir }
    }

    fn turn(&self, readiness: NodeReadiness) {
        self.snapshots.send_replace(snapshot(readiness));
    }

    async fn after(&self, secs: u64) -> Vec<String> {
        sleep(Duration::from_secs(secs)).await;
        self.api.heard()
    }

    fn events(&self) -> Vec<String> {
        self.world.events.since(0).into_iter().map(|event| event.record.reason).collect()
    }
}

fn snapshot(readiness: NodeReadiness) -> Arc<Snapshot> {
    Arc::new(Snapshot { node: NodeView { readiness, ..NodeView::default() }, ..Snapshot::default() })
}

fn down() -> NodeReadiness {
    NodeReadiness::NotReady(vec!["container runtime is down".to_owned()])
}

#[tokio::test(start_paused = true)]
async fn restarted_agent_writes_no_node_status_before_due() {
    let mut fixture = StatusFixture::new(NodeReadiness::Ready, [Ok(reported(5)), Ok(reported(6))]);
    assert_eq!(fixture.after(299).await, [CACHED]);
    assert_eq!(fixture.uid.borrow().as_deref(), Some("u1"));
    assert!(fixture.told.try_recv().is_err());
    assert_eq!(fixture.after(10).await, [CACHED, PATCH]);
    let Ok(Event::Node(node)) = fixture.told.try_recv() else { panic!("the loop has the reported node at once") };
    assert_eq!(node.version, 6);
    assert_eq!(fixture.events(), <[String; 0]>::default());
}

#[tokio::test(start_paused = true)]
async fn no_node_status_before_first_runtime_status() {
    let fixture = StatusFixture::new(NodeReadiness::Unchecked, [Ok(reported(5))]);
    assert_eq!(fixture.after(5).await, <[&str; 0]>::default());
    fixture.turn(NodeReadiness::Ready);
    assert_eq!(fixture.after(1).await, [CACHED]);
}

#[tokio::test(start_paused = true)]
async fn new_node_is_created_with_full_status() {
    let fixture = StatusFixture::new(NodeReadiness::Ready, [NOT_FOUND, Ok(reported(5))]);
    assert_eq!(fixture.after(60).await, [CACHED, CREATE]);
    assert_eq!(fixture.api.bodies()[1]["status"]["conditions"][3]["status"], "True");
    assert_eq!(
        fixture.events(),
        ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_node_that_turns_is_reported_at_once() {
    let fixture =
        StatusFixture::new(NodeReadiness::Ready, [Ok(reported(5)), Ok(reported_not_ready(6)), Ok(reported(7))]);
    assert_eq!(fixture.after(3).await, [CACHED]);
    fixture.turn(down());
    sleep(Duration::from_millis(1)).await;
    assert_eq!(fixture.api.heard(), [CACHED, PATCH]);
    let patch = fixture.api.bodies().pop().unwrap();
    assert_eq!(patch["status"]["conditions"][3]["message"], "container runtime is down");
    fixture.turn(NodeReadiness::Ready);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(fixture.events(), ["NodeNotReady", "NodeReady"]);
}

#[tokio::test(start_paused = true)]
async fn a_report_that_fails_is_made_again_from_the_newest_node() {
    let answers = [Ok(reported(5)), CONFLICT, Ok(reported(6)), UNREACHABLE, UNREACHABLE, Ok(reported_not_ready(7))];
    let fixture = StatusFixture::new(NodeReadiness::Ready, answers);
    fixture.after(1).await;
    fixture.turn(down());
    assert_eq!(fixture.after(1).await, [CACHED, PATCH, NEWEST, PATCH, NEWEST, PATCH]);
}

#[tokio::test(start_paused = true)]
async fn a_report_is_given_up_after_five_tries_until_the_next_look() {
    let fixture =
        StatusFixture::new(NodeReadiness::Ready, [Ok(reported(5))].into_iter().chain([const { UNREACHABLE }; 10]));
    fixture.after(1).await;
    fixture.turn(down());
    assert_eq!(fixture.after(5).await.iter().filter(|heard| *heard == PATCH).count(), 5);
    assert_eq!(fixture.after(10).await.iter().filter(|heard| *heard == PATCH).count(), 6);
}

#[tokio::test(start_paused = true)]
async fn foreign_node_status_change_is_overwritten() {
    let fixture = StatusFixture::new(NodeReadiness::Ready, [Ok(reported(5)), Ok(reported(7))]);
    fixture.after(1).await;
    fixture
        .node_states
        .send_replace(NodeWatchState::Seen(Arc::new(serde_json::from_value(reported_not_ready(6)).unwrap())));
    assert_eq!(fixture.after(1).await, [CACHED, PATCH]);
    assert_eq!(fixture.uid.borrow().as_deref(), Some("u1"));
    fixture.node_states.send_replace(NodeWatchState::Gone);
    assert_eq!(fixture.after(60).await, [CACHED, PATCH]);
    assert_eq!(*fixture.uid.borrow(), None);
}

#[tokio::test(start_paused = true)]
async fn changed_node_address_is_reported_unless_set_by_flag() {
    for (is_told, address) in [(false, "192.0.2.77"), (true, "10.0.0.7")] {
        let mut reporting = reporting();
        // A node named by its address has that address, whatever was found at start.
        reporting.setup.name = "192.0.2.77".to_owned();
        reporting.setup.has_configured_ips = is_told;
        reporting.node_ip = String::new();
        let fixture =
            StatusFixture::with(reporting, NodeReadiness::Ready, [NOT_FOUND, Ok(reported(5)), Ok(reported(6))]);
        fixture.after(30).await;
        let reports = fixture.api.bodies().into_iter().filter(|body| body["status"]["addresses"].is_array());
        let addresses: Vec<_> = reports.map(|body| body["status"]["addresses"][0]["address"].clone()).collect();
        assert_eq!(addresses.last().unwrap(), address, "{addresses:?}");
    }
}

#[test]
fn a_watch_that_is_behind_brings_no_older_node() {
    let node = |version: u64| serde_json::from_value::<Node>(reported(version)).unwrap();
    assert!(is_newer(&node(10), &node(9)));
    assert!(!is_newer(&node(9), &node(10)) && !is_newer(&node(9), &node(9)));
    assert!(is_newer(&node(1), &Node::default()));
}
