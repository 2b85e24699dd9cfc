//! Every rule can be broken: a rule that nothing breaks holds nothing.

mod api;
mod patrol;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::SignedDuration;
use k8s_openapi::{
    api::core::v1::{ContainerState, ContainerStateRunning, ContainerStatus, PodCondition, PodStatus},
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
    script::{Hook, IMAGE, LABEL_POD, LABEL_VERSION, Policy, Script},
    stage::{Scene, Stage},
};

/// The rules that a story breaks.
fn broken_by(script: &Script, story: impl FnOnce(&mut Scene)) -> Vec<&'static str> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _entered = tokio.enter();
    Stage::new(1).with(|scene| {
        scene.rules.learn(script);
        story(scene);
        scene.rules.violations.iter().map(|violation| violation.rule).collect()
    })
}

fn sandbox(scene: &mut Scene, uid: &str, attempt: u32) -> String {
    let metadata =
        v1::PodSandboxMetadata { name: "web-node".into(), uid: uid.into(), namespace: "default".into(), attempt };
    let labels = BTreeMap::from([(LABEL_POD.to_owned(), "web".to_owned()), (LABEL_VERSION.to_owned(), "1".to_owned())]);
    let config = v1::PodSandboxConfig { metadata: Some(metadata), labels, ..Default::default() };
    scene.perform(&Act::RunSandbox(Arc::new(config))).unwrap()
}

fn start(scene: &mut Scene, sandbox: &str, role: &str, attempt: u32) -> String {
    let config = v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: role.into(), attempt }),
        image: Some(v1::ImageSpec { image: IMAGE.into(), ..Default::default() }),
        command: vec!["sim".into(), "run".into()],
        ..Default::default()
    };
    let act = Act::Create { sandbox: sandbox.to_owned(), config: Arc::new(config) };
    let id = scene.perform(&act).unwrap();
    scene.perform(&Act::Start(id.clone())).unwrap();
    id
}

fn pass(scene: &mut Scene, secs: u64) {
    scene.now += Duration::from_secs(secs);
}

#[test]
fn an_orderly_life_breaks_no_rule() {
    let script = Script::pod("web").init("setup", "exit 0").container("app", "run");
    let broken = broken_by(&script, |scene| {
        let home = sandbox(scene, "u1", 0);
        let setup = start(scene, &home, "setup", 0);
        scene.exit_container(&setup, 0, "Completed");
        for (attempt, wait) in [(0, 0), (1, 11), (2, 21)] {
            let app = start(scene, &home, "app", attempt);
            scene.exit_container(&app, 1, "Error");
            pass(scene, wait);
        }
        pass(scene, 60);
        let last = start(scene, &home, "app", 3);
        scene.perform(&Act::Term(last.clone())).unwrap();
        pass(scene, 5);
        scene.perform(&Act::Kill(last)).unwrap();
        scene.perform(&Act::StopSandbox(home)).unwrap();
    });
    assert_eq!(broken, Vec::<&str>::new());
}

#[test]
fn company_that_must_not_be_is_seen() {
    let script = Script::pod("web").container("app", "run").container("side", "run");
    let twice = broken_by(&script, |scene| {
        let home = sandbox(scene, "u1", 0);
        start(scene, &home, "app", 0);
        start(scene, &home, "app", 1);
    });
    assert_eq!(twice, ["a container runs once"]);
    let two_homes = broken_by(&script, |scene| {
        let (first, second) = (sandbox(scene, "u1", 0), sandbox(scene, "u1", 1));
        start(scene, &first, "app", 0);
        start(scene, &second, "side", 0);
    });
    assert_eq!(two_homes, ["a pod runs in one sandbox"]);
    let replaced = broken_by(&script, |scene| {
        let (old, new) = (sandbox(scene, "u1", 0), sandbox(scene, "u2", 0));
        start(scene, &old, "app", 0);
        start(scene, &new, "app", 0);
    });
    assert_eq!(replaced, ["a replaced static pod is gone before the next starts"]);
}

#[test]
fn starts_out_of_turn_are_seen() {
    let script = Script::pod("web").policy(Policy::Never).init("setup", "exit 0").container("app", "run");
    let early = broken_by(&script, |scene| {
        let home = sandbox(scene, "u1", 0);
        start(scene, &home, "app", 0);
    });
    assert_eq!(early, ["init containers come first, in order"]);
    let again = broken_by(&Script::pod("web").policy(Policy::Never).container("app", "run"), |scene| {
        let home = sandbox(scene, "u1", 0);
        let app = start(scene, &home, "app", 0);
        scene.exit_container(&app, 1, "Error");
        start(scene, &home, "app", 1);
    });
    assert_eq!(again, ["restartPolicy is kept"]);
    let hasty = broken_by(&"web".into(), |scene| {
        let home = sandbox(scene, "u1", 0);
        for attempt in 0..3 {
            let app = start(scene, &home, "app", attempt);
            scene.exit_container(&app, 1, "Error");
        }
    });
    assert_eq!(hasty, ["a crash loop waits longer each time"]);
    let backwards = broken_by(&"web".into(), |scene| {
        let home = sandbox(scene, "u1", 0);
        let app = start(scene, &home, "app", 4);
        scene.exit_container(&app, 1, "Error");
        start(scene, &home, "app", 3);
    });
    assert_eq!(backwards, ["attempts only grow"]);
    let over = broken_by(&"web".into(), |scene| {
        let home = sandbox(scene, "u1", 0);
        scene.perform(&Act::RemoveSandbox(home)).unwrap();
        sandbox(scene, "u1", 0);
    });
    assert_eq!(over, ["a pod starts over only when asked for again"]);
}

#[test]
fn a_death_before_its_time_is_seen() {
    let script = Script::pod("web").grace_secs(30).container("app", "stubborn");
    let ends: [fn(&mut Scene, &str, &str); 3] = [
        |scene, _, app| drop(scene.perform(&Act::Kill(app.to_owned())).unwrap()),
        |scene, home, _| drop(scene.perform(&Act::StopSandbox(home.to_owned())).unwrap()),
        |scene, _, app| drop(scene.perform(&Act::RemoveContainer(app.to_owned())).unwrap()),
    ];
    for end in ends {
        let broken = broken_by(&script, |scene| {
            let home = sandbox(scene, "u1", 0);
            let app = start(scene, &home, "app", 0);
            scene.perform(&Act::Term(app.clone())).unwrap();
            pass(scene, 20);
            end(scene, &home, &app);
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
        census: Default::default(),
        facts: None,
        steps: Vec::new(),
    };
    Snapshot { pods: [(PodUid::new("u1"), Arc::new(view))].into_iter().collect(), ..Default::default() }
}

#[test]
fn what_the_agent_may_not_say_is_heard() {
    for (before, after, expected) in [
        (told("Terminating", "Running", 0), told("Syncing", "Running", 0), vec!["a lifecycle only moves forward"]),
        (told("Syncing", "Failed", 0), told("Syncing", "Running", 0), vec!["a phase never leaves its end"]),
        (told("Syncing", "Running", 2), told("Syncing", "Running", 1), vec!["restartCount never falls"]),
        (told("Syncing", "Running", 1), told("Terminating", "Failed", 2), vec![]),
        (told("Terminated", "Failed", 2), told("Waiting", "Pending", 0), vec![]),
    ] {
        let broken = broken_by(&"web".into(), |scene| {
            scene.rules.told(scene.now, scene.wall, &before);
            scene.rules.told(scene.now, scene.wall, &after);
        });
        assert_eq!(broken, expected);
    }
    let after_its_end = broken_by(&"web".into(), |scene| {
        scene.rules.told(scene.now, scene.wall, &told("Terminating", "Running", 0));
        scene.rules.ordered(scene.now, "u1", "StartContainer");
    });
    assert_eq!(after_its_end, ["nothing is started for a pod that ends"]);
}

#[test]
fn a_condition_dated_before_its_change_is_noticed() {
    let ready = |scene: &Scene, status: &str, secs_ago: i64| {
        let mut snapshot = told("Syncing", "Running", 0);
        let view = Arc::make_mut(snapshot.pods.get_mut(&PodUid::new("u1")).unwrap());
        view.source = Some(Source::Api);
        let condition = PodCondition {
            type_: "Ready".to_owned(),
            status: status.to_owned(),
            last_transition_time: Some(Time(scene.wall - SignedDuration::from_secs(secs_ago))),
            ..Default::default()
        };
        Arc::make_mut(&mut view.status).conditions = Some(vec![condition]);
        snapshot
    };
    for (secs_ago, expected) in [(0, vec![]), (60, vec!["a condition is dated when it changes"])] {
        let broken = broken_by(&"web".into(), |scene| {
            scene.rules.told(scene.now, scene.wall, &ready(scene, "False", 100));
            scene.rules.told(scene.now, scene.wall, &ready(scene, "True", secs_ago));
        });
        assert_eq!(broken, expected);
    }
}

#[test]
fn a_hook_that_runs_twice_is_noticed() {
    let twice = |meanwhile: fn(&mut Scene)| {
        broken_by(&"web".into(), |scene| {
            let home = sandbox(scene, "u1", 0);
            let app = start(scene, &home, "app", 0);
            let app = scene.runtime.picture.containers[&app].clone();
            scene.rules.hook_runs(scene.now, &app, Hook::PreStop);
            meanwhile(scene);
            scene.rules.hook_runs(scene.now, &app, Hook::PreStop);
        })
    };
    assert_eq!(twice(|_| ()), ["a hook runs once per instance"]);
    assert_eq!(twice(|scene| scene.rules.agent_begins(scene.now)), Vec::<&str>::new());
}

#[test]
fn an_ephemeral_container_that_starts_again_is_noticed() {
    let again = broken_by(&"web".into(), |scene| {
        let home = sandbox(scene, "u1", 0);
        let debug = start(scene, &home, "debug", 0);
        scene.exit_container(&debug, 0, "Completed");
        start(scene, &home, "debug", 1);
    });
    assert_eq!(again, ["restartPolicy is kept"]);
}

#[test]
fn restart_counts_are_remembered_over_a_death_of_the_agent() {
    let broken = broken_by(&"web".into(), |scene| {
        scene.rules.told(scene.now, scene.wall, &told("Syncing", "Running", 3));
        scene.rules.agent_begins(scene.now);
        scene.rules.told(scene.now, scene.wall, &Snapshot::default());
        scene.rules.told(scene.now, scene.wall, &told("Syncing", "Running", 0));
    });
    assert_eq!(broken, ["restartCount never falls"]);
}
