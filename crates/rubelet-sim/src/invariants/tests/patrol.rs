//! Every rule about time can be broken, and a fault that stands in the way excuses.

use std::{sync::Arc, time::Duration};

use rubelet_core::snapshot::{Readiness, Snapshot};
use rubelet_kube::port::{ObjectPath, Verb};
use serde_json::json;

use super::{broken_by, pass, sandbox, start, told};
use crate::{
    invariants::trouble::Touched,
    script::Script,
    stage::{AgentState, Life, Scene},
};

/// The rules broken so many seconds after the story's last word.
fn broken_after(secs: u64, story: impl FnOnce(&mut Scene)) -> Vec<&'static str> {
    broken_by(&Script::pod("web").grace_secs(5).container("app", "stubborn"), |scene| {
        scene.agent = AgentState::Alive(Life(1));
        scene.now = Duration::from_secs(1_000);
        story(scene);
        pass(scene, secs);
        scene.patrol();
    })
}

fn tells(scene: &mut Scene, snapshot: Snapshot) {
    scene.rules.told(scene.now, scene.wall, &snapshot);
    scene.snapshot = Arc::new(snapshot);
}

#[test]
fn a_pod_that_outlives_its_grace_period_is_noticed() {
    const RULE: &str = "a pod is gone within its grace period";
    let ends = |scene: &mut Scene| {
        let home = sandbox(scene, "u1", 0);
        start(scene, &home, "app", 0);
        tells(scene, told("Terminating", "Running", 0));
    };
    assert_eq!(broken_after(26, ends), [RULE]);
    assert_eq!(broken_after(24, ends), Vec::<&str>::new());
    let disturbed = |touched: Touched| {
        broken_after(26, |scene| {
            ends(scene);
            scene.rules.trouble.enter(touched);
        })
    };
    assert_eq!(disturbed(Touched::Pod("u1".to_owned())), Vec::<&str>::new());
    assert_eq!(disturbed(Touched::Node), Vec::<&str>::new());
    assert_eq!(disturbed(Touched::Pod("u2".to_owned())), [RULE]);
}

#[test]
fn a_shorter_grace_period_asked_for_later_counts() {
    let with_grace = |grace: i64| {
        let mut snapshot = told("Terminating", "Running", 0);
        let view = Arc::make_mut(snapshot.pods.get_mut(&"u1".into()).unwrap());
        let metadata = &mut Arc::make_mut(&mut view.pod).metadata;
        metadata.deletion_grace_period_seconds = Some(grace);
        snapshot
    };
    let broken = broken_after(22, |scene| {
        let home = sandbox(scene, "u1", 0);
        start(scene, &home, "app", 0);
        tells(scene, with_grace(4));
        tells(scene, with_grace(1));
    });
    assert_eq!(broken, ["a pod is gone within its grace period"]);
}

#[test]
fn a_pod_that_gets_no_sandbox_is_noticed() {
    const RULE: &str = "a pod waits for no other pod's faults";
    let waits = |scene: &mut Scene| tells(scene, told("Syncing", "Pending", 0));
    assert_eq!(broken_after(31, waits), [RULE]);
    assert_eq!(broken_after(29, waits), Vec::<&str>::new());
    let other = broken_after(31, |scene| {
        waits(scene);
        scene.rules.trouble.enter(Touched::Pod("u2".to_owned()));
    });
    assert_eq!(other, [RULE]);
}

#[test]
fn a_bound_pod_without_a_status_is_noticed() {
    let made = |scene: &mut Scene| {
        let body = json!({ "metadata": { "name": "web", "namespace": "default" }, "spec": { "containers": [] } });
        scene.ask(Verb::Create, ObjectPath::all("v1", "pods").within("default"), body).unwrap();
        scene.patrol();
    };
    assert_eq!(broken_after(31, made), ["every bound pod has a status"]);
    let silent = broken_after(31, |scene| {
        made(scene);
        scene.silence_api();
    });
    assert_eq!(silent, Vec::<&str>::new());
}

#[test]
fn a_ready_node_without_lists_is_noticed() {
    let mut ready = Snapshot::default();
    ready.node.readiness = Readiness::Ready;
    let listed = |scene: &mut Scene| {
        scene.rules.listed(scene.now);
        tells(scene, ready.clone());
    };
    assert_eq!(broken_after(239, listed), Vec::<&str>::new());
    assert_eq!(broken_after(241, listed), ["a ready node was listed lately"]);
}
