//! Tests that every rule can be broken.

mod api;
mod csi;
mod eviction;
mod patrol;
mod shutdown;
mod upkeep;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::SignedDuration;
use k8s_openapi::{
    api::core::v1::{ContainerState, ContainerStateRunning, ContainerStatus, PodCondition, PodSpec, PodStatus},
    apimachinery::pkg::apis::meta::v1::Time,
};
use rubelet_core::{
    event::Source,
    id::PodUid,
    snapshot::{PodView, Snapshot},
};
use rubelet_cri::v1;

use crate::{
    runtime::act::Act,
    script::{Hook, IMAGE, LABEL_POD, LABEL_VERSION, PodScript, Policy},
    simulation::{SimState, Simulation},
};

/// The rules that a sequence of calls breaks.
fn broken_by(script: &PodScript, steps: impl FnOnce(&mut SimState)) -> Vec<&'static str> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _entered = tokio.enter();
    Simulation::new(1).with(|sim| {
        sim.rules.learn(script);
        steps(sim);
        sim.rules.violations.iter().map(|violation| violation.rule).collect()
    })
}

fn sandbox(sim: &mut SimState, uid: &str, attempt: u32) -> String {
    let metadata =
        v1::PodSandboxMetadata { name: "web-node".into(), uid: uid.into(), namespace: "default".into(), attempt };
    let labels = BTreeMap::from([(LABEL_POD.to_owned(), "web".to_owned()), (LABEL_VERSION.to_owned(), "1".to_owned())]);
    let config = v1::PodSandboxConfig { metadata: Some(metadata), labels, ..Default::default() };
    sim.perform(&Act::RunSandbox(Arc::new(config))).unwrap()
}

fn start(sim: &mut SimState, sandbox: &str, name: &str, attempt: u32) -> String {
    let config = v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: name.into(), attempt }),
        image: Some(v1::ImageSpec { image: IMAGE.into(), ..Default::default() }),
        command: vec!["sim".into(), "run".into()],
        ..Default::default()
    };
    let act = Act::Create { sandbox: sandbox.to_owned(), config: Arc::new(config) };
    let id = sim.perform(&act).unwrap();
    sim.perform(&Act::Start(id.clone())).unwrap();
    id
}

fn pass(sim: &mut SimState, secs: u64) {
    sim.now += Duration::from_secs(secs);
}

#[test]
fn valid_pod_lifecycle_breaks_no_rule() {
    let script = PodScript::pod("web").init("setup", "exit 0").container("app", "run");
    let broken = broken_by(&script, |sim| {
        let home = sandbox(sim, "u1", 0);
        let setup = start(sim, &home, "setup", 0);
        sim.exit_container(&setup, 0, "Completed");
        for (attempt, wait) in [(0, 0), (1, 11), (2, 21)] {
            let app = start(sim, &home, "app", attempt);
            sim.exit_container(&app, 1, "Error");
            pass(sim, wait);
        }
        pass(sim, 60);
        let last = start(sim, &home, "app", 3);
        sim.perform(&Act::Term(last.clone())).unwrap();
        pass(sim, 5);
        sim.perform(&Act::Kill(last)).unwrap();
        sim.perform(&Act::StopSandbox(home)).unwrap();
    });
    assert_eq!(broken, Vec::<&str>::new());
}

#[test]
fn forbidden_concurrent_starts_break_rules() {
    let script = PodScript::pod("web").container("app", "run").container("side", "run");
    let twice = broken_by(&script, |sim| {
        let home = sandbox(sim, "u1", 0);
        start(sim, &home, "app", 0);
        start(sim, &home, "app", 1);
    });
    assert_eq!(twice, ["a container runs once"]);
    let two_homes = broken_by(&script, |sim| {
        let (first, second) = (sandbox(sim, "u1", 0), sandbox(sim, "u1", 1));
        start(sim, &first, "app", 0);
        start(sim, &second, "side", 0);
    });
    assert_eq!(two_homes, ["a pod runs in one sandbox"]);
    let replaced = broken_by(&script, |sim| {
        let (old, new) = (sandbox(sim, "u1", 0), sandbox(sim, "u2", 0));
        start(sim, &old, "app", 0);
        start(sim, &new, "app", 0);
    });
    assert_eq!(replaced, ["a replaced static pod is gone before the next starts"]);
}

#[test]
fn starts_out_of_order_break_rules() {
    let script = PodScript::pod("web").policy(Policy::Never).init("setup", "exit 0").container("app", "run");
    let early = broken_by(&script, |sim| {
        let home = sandbox(sim, "u1", 0);
        start(sim, &home, "app", 0);
    });
    assert_eq!(early, ["init containers come first, in order"]);
    let again = broken_by(&PodScript::pod("web").policy(Policy::Never).container("app", "run"), |sim| {
        let home = sandbox(sim, "u1", 0);
        let app = start(sim, &home, "app", 0);
        sim.exit_container(&app, 1, "Error");
        start(sim, &home, "app", 1);
    });
    assert_eq!(again, ["restartPolicy is kept"]);
    let hasty = broken_by(&"web".into(), |sim| {
        let home = sandbox(sim, "u1", 0);
        for attempt in 0..3 {
            let app = start(sim, &home, "app", attempt);
            sim.exit_container(&app, 1, "Error");
        }
    });
    assert_eq!(hasty, ["a crash loop waits longer each time"]);
    let backwards = broken_by(&"web".into(), |sim| {
        let home = sandbox(sim, "u1", 0);
        let app = start(sim, &home, "app", 4);
        sim.exit_container(&app, 1, "Error");
        start(sim, &home, "app", 3);
    });
    assert_eq!(backwards, ["attempts only grow"]);
    let over = broken_by(&"web".into(), |sim| {
        let home = sandbox(sim, "u1", 0);
        sim.perform(&Act::RemoveSandbox(home)).unwrap();
        sandbox(sim, "u1", 0);
    });
    assert_eq!(over, ["a pod starts over only when asked for again"]);
}

#[test]
fn early_sigkill_breaks_a_rule() {
    let script = PodScript::pod("web").grace_secs(30).container("app", "stubborn");
    let ends: [fn(&mut SimState, &str, &str); 3] = [
        |sim, _, app| drop(sim.perform(&Act::Kill(app.to_owned())).unwrap()),
        |sim, home, _| drop(sim.perform(&Act::StopSandbox(home.to_owned())).unwrap()),
        |sim, _, app| drop(sim.perform(&Act::RemoveContainer(app.to_owned())).unwrap()),
    ];
    for end in ends {
        let broken = broken_by(&script, |sim| {
            let home = sandbox(sim, "u1", 0);
            let app = start(sim, &home, "app", 0);
            sim.perform(&Act::Term(app.clone())).unwrap();
            pass(sim, 20);
            end(sim, &home, &app);
        });
        assert_eq!(broken, ["SIGKILL waits for the grace period"]);
    }
}

fn told(lifecycle: &str, phase: &str, restart_count: i32) -> Snapshot {
    let state = ContainerState { running: Some(ContainerStateRunning::default()), ..Default::default() };
    let status = ContainerStatus { name: "app".into(), restart_count, state: Some(state), ..Default::default() };
    let status = PodStatus { phase: Some(phase.into()), container_statuses: Some(vec![status]), ..Default::default() };
    let view = PodView {
        source: None,
        mirror_uid: None,
        pod: Arc::default(),
        status: Arc::new(status),
        lifecycle: lifecycle.into(),
        lifecycle_since: jiff::Timestamp::UNIX_EPOCH,
        running: BTreeMap::new(),
        counts: Default::default(),
        facts: None,
        volumes: std::collections::BTreeMap::new(),
        needs: Arc::default(),
        steps: Vec::new(),
    };
    Snapshot { pods: [(PodUid::new("u1"), Arc::new(view))].into_iter().collect(), ..Default::default() }
}

#[test]
fn preemption_without_a_waiting_critical_pod_breaks_a_rule() {
    let rule = ["only a critical pod preempts, and only pods below it"];
    for (victim, other, waits, is_broken) in [
        (None, Some(2_000_000_000), true, false),
        (Some(7), Some(2_000_000_000), true, false),
        (Some(7), Some(2_000_000_000), false, true),
        (Some(7), Some(8), true, true),
        (Some(2_000_000_000), Some(2_000_000_000), true, true),
        (Some(2_000_000_000), Some(2_000_000_001), true, false),
    ] {
        let view = |lifecycle: &str, priority: Option<i32>, preempted_for: Option<&str>| {
            let mut view = told(lifecycle, "Running", 0).pods[&PodUid::new("u1")].as_ref().clone();
            view.source = Some(Source::Api);
            Arc::make_mut(&mut view.pod).spec = Some(PodSpec { priority, ..PodSpec::default() });
            view.counts.preempted_for = preempted_for.map(str::to_owned);
            Arc::new(view)
        };
        let lifecycle = if waits { "Waiting" } else { "Syncing" };
        let pods = [
            (PodUid::new("u1"), view("Terminating", victim, Some("cpu"))),
            (PodUid::new("u2"), view(lifecycle, other, None)),
        ];
        let broken = broken_by(&"web".into(), |sim| {
            let after = Snapshot { pods: pods.into_iter().collect(), ..Default::default() };
            sim.rules.told(sim.now, jiff::Timestamp::UNIX_EPOCH, &after);
        });
        assert_eq!(broken == rule, is_broken, "{victim:?} {other:?} {waits}: {broken:?}");
    }
}

#[test]
fn illegal_snapshot_transitions_break_rules() {
    for (before, after, expected) in [
        (told("Terminating", "Running", 0), told("Syncing", "Running", 0), vec!["a lifecycle only moves forward"]),
        (told("Syncing", "Failed", 0), told("Syncing", "Running", 0), vec!["a phase never leaves its end"]),
        (told("Syncing", "Running", 2), told("Syncing", "Running", 1), vec!["restartCount never falls"]),
        (told("Syncing", "Running", 1), told("Terminating", "Failed", 2), vec![]),
        (told("Terminated", "Failed", 2), told("Waiting", "Pending", 0), vec![]),
    ] {
        let broken = broken_by(&"web".into(), |sim| {
            sim.rules.told(sim.now, sim.wall, &before);
            sim.rules.told(sim.now, sim.wall, &after);
        });
        assert_eq!(broken, expected);
    }
    let after_its_end = broken_by(&"web".into(), |sim| {
        sim.rules.told(sim.now, sim.wall, &told("Terminating", "Running", 0));
        sim.rules.ordered(sim.now, "u1", "StartContainer");
    });
    assert_eq!(after_its_end, ["nothing is started for a pod that ends"]);
}

#[test]
fn backdated_condition_breaks_a_rule() {
    let ready = |sim: &SimState, status: &str, secs_ago: i64| {
        let mut snapshot = told("Syncing", "Running", 0);
        let view = Arc::make_mut(snapshot.pods.get_mut(&PodUid::new("u1")).unwrap());
        view.source = Some(Source::Api);
        let condition = PodCondition {
            type_: "Ready".to_owned(),
            status: status.to_owned(),
            last_transition_time: Some(Time(sim.wall - SignedDuration::from_secs(secs_ago))),
            ..Default::default()
        };
        Arc::make_mut(&mut view.status).conditions = Some(vec![condition]);
        snapshot
    };
    for (secs_ago, expected) in [(0, vec![]), (60, vec!["a condition is dated when it changes"])] {
        let broken = broken_by(&"web".into(), |sim| {
            sim.rules.told(sim.now, sim.wall, &ready(sim, "False", 100));
            sim.rules.told(sim.now, sim.wall, &ready(sim, "True", secs_ago));
        });
        assert_eq!(broken, expected);
    }
}

#[test]
fn second_hook_run_breaks_a_rule() {
    let twice = |meanwhile: fn(&mut SimState)| {
        broken_by(&"web".into(), |sim| {
            let home = sandbox(sim, "u1", 0);
            let app = start(sim, &home, "app", 0);
            let app = sim.runtime.picture.containers[&app].clone();
            sim.rules.hook_runs(sim.now, &app, Hook::PreStop);
            meanwhile(sim);
            sim.rules.hook_runs(sim.now, &app, Hook::PreStop);
        })
    };
    assert_eq!(twice(|_| ()), ["a hook runs once per instance"]);
    assert_eq!(twice(|sim| sim.rules.agent_begins(sim.now)), Vec::<&str>::new());
}

#[test]
fn restarted_ephemeral_container_breaks_a_rule() {
    let again = broken_by(&"web".into(), |sim| {
        let home = sandbox(sim, "u1", 0);
        let debug = start(sim, &home, "debug", 0);
        sim.exit_container(&debug, 0, "Completed");
        start(sim, &home, "debug", 1);
    });
    assert_eq!(again, ["restartPolicy is kept"]);
}

#[test]
fn restart_counts_are_kept_across_agent_restarts() {
    let broken = broken_by(&"web".into(), |sim| {
        sim.rules.told(sim.now, sim.wall, &told("Syncing", "Running", 3));
        sim.rules.agent_begins(sim.now);
        sim.rules.told(sim.now, sim.wall, &Snapshot::default());
        sim.rules.told(sim.now, sim.wall, &told("Syncing", "Running", 0));
    });
    assert_eq!(broken, ["restartCount never falls"]);
}

#[test]
fn overwritten_restart_counts_may_fall() {
    let broken = broken_by(&"web".into(), |sim| {
        sim.rules.told(sim.now, sim.wall, &told("Syncing", "Running", 3));
        sim.rules.restart_counts_overwritten("u1");
        sim.rules.told(sim.now, sim.wall, &told("Syncing", "Running", 0));
    });
    assert_eq!(broken, [""; 0]);
}
