//! Tests that every deadline rule can be broken, and that a fault excuses.

use std::{path::Path, sync::Arc, time::Duration};

use rubelet_core::{
    event::Source,
    snapshot::{NodeReadiness, Snapshot},
};
use rubelet_kube::port::{ObjectPath, Verb};
use serde_json::json;

use super::{broken_by, pass, sandbox, start, told};
use crate::{
    api::store::Key,
    invariants::trouble::Touched,
    script::PodScript,
    simulation::{AgentState, Incarnation, SimState},
};

/// The rules broken this many seconds after the sequence.
fn broken_after(secs: u64, steps: impl FnOnce(&mut SimState)) -> Vec<&'static str> {
    broken_by(&PodScript::pod("web").grace_secs(5).container("app", "stubborn"), |sim| {
        sim.agent = AgentState::Alive(Incarnation(1));
        sim.now = Duration::from_secs(1_000);
        steps(sim);
        pass(sim, secs);
        sim.patrol();
    })
}

fn tells(sim: &mut SimState, snapshot: Snapshot) {
    sim.rules.told(sim.now, sim.wall, &snapshot);
    sim.snapshot = Arc::new(snapshot);
}

#[test]
fn pod_running_after_its_grace_period_breaks_a_rule() {
    const RULE: &str = "a pod is gone within its grace period";
    let ends = |sim: &mut SimState| {
        let home = sandbox(sim, "u1", 0);
        start(sim, &home, "app", 0);
        tells(sim, told("Terminating", "Running", 0));
    };
    assert_eq!(broken_after(26, ends), [RULE]);
    assert_eq!(broken_after(24, ends), Vec::<&str>::new());
    let disturbed = |touched: Touched| {
        broken_after(26, |sim| {
            ends(sim);
            sim.rules.trouble.enter(touched);
        })
    };
    assert_eq!(disturbed(Touched::Pod("u1".to_owned())), Vec::<&str>::new());
    assert_eq!(disturbed(Touched::Node), Vec::<&str>::new());
    assert_eq!(disturbed(Touched::Pod("u2".to_owned())), [RULE]);
}

#[test]
fn later_shorter_grace_period_is_enforced() {
    let with_grace = |grace: i64| {
        let mut snapshot = told("Terminating", "Running", 0);
        let view = Arc::make_mut(snapshot.pods.get_mut(&"u1".into()).unwrap());
        let metadata = &mut Arc::make_mut(&mut view.pod).metadata;
        metadata.deletion_grace_period_seconds = Some(grace);
        snapshot
    };
    let broken = broken_after(22, |sim| {
        let home = sandbox(sim, "u1", 0);
        start(sim, &home, "app", 0);
        tells(sim, with_grace(4));
        tells(sim, with_grace(1));
    });
    assert_eq!(broken, ["a pod is gone within its grace period"]);
}

#[test]
fn pod_that_does_not_start_breaks_a_rule() {
    const RULE: &str = "a pod waits for no other pod's faults";
    let waits = |sim: &mut SimState| tells(sim, told("Syncing", "Pending", 0));
    assert_eq!(broken_after(31, waits), [RULE]);
    assert_eq!(broken_after(29, waits), Vec::<&str>::new());
    let empty = |sim: &mut SimState| {
        sandbox(sim, "u1", 0);
        waits(sim);
    };
    assert_eq!(broken_after(31, empty), [RULE]);
    let started = |sim: &mut SimState| {
        let home = sandbox(sim, "u1", 0);
        start(sim, &home, "app", 0);
        waits(sim);
    };
    assert_eq!(broken_after(31, started), Vec::<&str>::new());
    let starts_over = |sim: &mut SimState| {
        waits(sim);
        tells(sim, told("Terminated", "Failed", 0));
        pass(sim, 100);
        waits(sim);
    };
    assert_eq!(broken_after(31, starts_over), [RULE]);
    assert_eq!(broken_after(29, starts_over), Vec::<&str>::new());
    let other = broken_after(31, |sim| {
        waits(sim);
        sim.rules.trouble.enter(Touched::Pod("u2".to_owned()));
    });
    assert_eq!(other, [RULE]);
}

#[test]
fn bound_pod_without_status_breaks_a_rule() {
    let made = |sim: &mut SimState| {
        let body = json!({ "metadata": { "name": "web", "namespace": "default" }, "spec": { "containers": [] } });
        sim.ask(Verb::Create, ObjectPath::all("v1", "pods").within("default"), body).unwrap();
        sim.patrol();
    };
    assert_eq!(broken_after(31, made), ["every bound pod has a status"]);
    let silent = broken_after(31, |sim| {
        made(sim);
        sim.silence_api();
    });
    assert_eq!(silent, Vec::<&str>::new());
}

#[test]
fn ready_node_without_lists_breaks_a_rule() {
    let mut ready = Snapshot::default();
    ready.node.readiness = NodeReadiness::Ready;
    let listed = |sim: &mut SimState| {
        sim.rules.listed(sim.now);
        tells(sim, ready.clone());
    };
    assert_eq!(broken_after(239, listed), Vec::<&str>::new());
    assert_eq!(broken_after(241, listed), ["a ready node was listed lately"]);
}

/// The agent's node, and a lease renewed by now.
fn register(sim: &mut SimState) {
    let body = json!({ "metadata": { "name": "node" } });
    sim.ask(Verb::Create, ObjectPath::all("v1", "nodes"), body).unwrap();
    sim.rules.known.renewed = Some(sim.now);
}

#[test]
fn unwritten_status_breaks_a_rule() {
    let changed = |stored_phase: &'static str| {
        move |sim: &mut SimState| {
            register(sim);
            let mut snapshot = told("Syncing", "Running", 0);
            let view = Arc::make_mut(snapshot.pods.get_mut(&"u1".into()).unwrap());
            view.source = Some(Source::Api);
            Arc::make_mut(&mut view.pod).metadata.name = Some("web".to_owned());
            let mut pod = json!({ "metadata": { "name": "web", "uid": "u1" }, "status": *view.status });
            pod["status"]["phase"] = stored_phase.into();
            pod["status"]["conditions"] = json!([{ "type": "another's", "status": "True" }]);
            sim.api.put(Key::pod("web"), pod);
            let home = sandbox(sim, "u1", 0);
            start(sim, &home, "app", 0);
            tells(sim, snapshot);
        }
    };
    assert_eq!(broken_after(31, changed("Pending")), ["a changed status is written"]);
    assert_eq!(broken_after(31, changed("Running")), Vec::<&str>::new());
    assert_eq!(broken_after(29, changed("Pending")), Vec::<&str>::new());
    let silent = broken_after(31, |sim| {
        changed("Pending")(sim);
        sim.silence_api();
    });
    assert_eq!(silent, Vec::<&str>::new());
}

#[test]
fn lease_that_is_not_renewed_breaks_a_rule() {
    assert_eq!(broken_after(39, register), Vec::<&str>::new());
    assert_eq!(broken_after(41, register), ["the lease is renewed"]);
}

#[test]
fn deadline_missed_while_a_device_hangs_breaks_its_rule() {
    let waits = |path: &'static str| {
        move |sim: &mut SimState| {
            let mut snapshot = told("Syncing", "Pending", 0);
            let view = Arc::make_mut(snapshot.pods.get_mut(&"u1".into()).unwrap());
            let volume = json!({ "name": "data", "hostPath": { "path": path } });
            let spec = json!({ "containers": [], "volumes": [volume] });
            Arc::make_mut(&mut view.pod).spec = Some(serde_json::from_value(spec).unwrap());
            tells(sim, snapshot);
            sim.hang_device(Path::new("/mnt/nfs"));
        }
    };
    assert_eq!(broken_after(31, waits("/mnt/disk/data")), ["a hung device delays only the pods that use it"]);
    assert_eq!(broken_after(31, waits("/mnt/nfs/data")), Vec::<&str>::new());
}
