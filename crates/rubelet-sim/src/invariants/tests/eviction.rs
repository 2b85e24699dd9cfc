//! Tests that every rule about evictions can be broken.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use rubelet_core::{
    effect::{Effect, EventRecord, InvolvedObject, Severity},
    event::Source,
    id::{PodRef, PodUid},
    snapshot::{PodView, Snapshot},
};
use serde_json::json;

use super::{broken_by, pass, sandbox, start, told};
use crate::{
    invariants::trouble::Touched,
    memory::THRESHOLD_BYTES,
    runtime::store::IMAGE_FS_THRESHOLD_BYTES,
    script::{EmptyDir, PodScript},
    simulation::{AgentState, Incarnation, SimState},
};

const CROSSED: &str = "no eviction without a crossed threshold";
const LOW_MEMORY: &str = "The node was low on resource: memory. ";
const LOW_DISK: &str = "The node was low on resource: ephemeral-storage. ";

fn evict(sim: &mut SimState, uid: &str, message: &str) {
    let pod = PodRef { uid: PodUid::new(uid), namespace: "default".into(), name: uid.into() };
    let record = EventRecord::new(InvolvedObject::Pod(pod), Severity::Warning, "Evicted", message);
    sim.check_eviction(&Effect::Record(record));
}

/// The agent reports these pods of the API as running: uid, priority and memory request.
fn tell(sim: &mut SimState, pods: &[(&str, i32, &str)]) {
    let template = told("Syncing", "Running", 0).pods.values().next().expect("one pod").clone();
    let views = pods.iter().map(|(uid, priority, request)| {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "uid": uid },
            "spec": {
                "priority": priority,
                "containers": [{ "name": "app", "resources": { "requests": { "memory": request } } }],
            },
        }))
        .unwrap();
        let mut view = PodView::clone(&template);
        (view.source, view.pod) = (Some(Source::Api), Arc::new(pod));
        (PodUid::new(uid), Arc::new(view))
    });
    sim.snapshot = Arc::new(Snapshot { pods: views.collect(), ..Default::default() });
}

fn broken(steps: impl FnOnce(&mut SimState)) -> Vec<&'static str> {
    broken_by(&"web".into(), |sim| {
        tell(sim, &[("u1", 0, "0Mi")]);
        sim.rules.pod_measured("u1", 1);
        steps(sim);
    })
}

#[test]
fn eviction_needs_a_look_that_found_a_crossed_threshold() {
    let none = Vec::<&str>::new();
    assert_eq!(broken(|sim| evict(sim, "u1", LOW_MEMORY)), [CROSSED]);
    for (available, expected) in [(THRESHOLD_BYTES - 1, &none), (THRESHOLD_BYTES, &vec![CROSSED])] {
        let found = broken(|sim| {
            sim.rules.memory_measured(sim.now, available);
            evict(sim, "u1", LOW_MEMORY);
        });
        assert_eq!(found, *expected);
    }
    for (available, expected) in [(IMAGE_FS_THRESHOLD_BYTES - 1, &none), (IMAGE_FS_THRESHOLD_BYTES, &vec![CROSSED])] {
        let found = broken(|sim| {
            sim.rules.image_fs_measured(sim.now, available);
            evict(sim, "u1", LOW_DISK);
        });
        assert_eq!(found, *expected);
    }
    let late = broken(|sim| {
        sim.rules.memory_measured(sim.now, 0);
        pass(sim, 6);
        evict(sim, "u1", LOW_MEMORY);
    });
    assert_eq!(late, [CROSSED]);
    let second = broken(|sim| {
        tell(sim, &[("u1", 0, "0Mi"), ("u2", 0, "0Mi")]);
        sim.rules.pod_measured("u2", 1);
        sim.rules.memory_measured(sim.now, 0);
        evict(sim, "u1", LOW_MEMORY);
        evict(sim, "u2", LOW_MEMORY);
    });
    assert_eq!(second, [CROSSED]);
    assert_eq!(broken(|sim| evict(sim, "u1", "Some other reason. ")), [CROSSED]);
}

#[test]
fn rejection_needs_pressure() {
    let rejected = |sim: &mut SimState| evict(sim, "u1", "The node had condition: [MemoryPressure]. ");
    assert_eq!(broken(rejected), ["no pod is rejected without pressure"]);
    let after_pressure = broken(|sim| {
        sim.rules.memory_measured(sim.now, 0);
        sim.rules.memory_measured(sim.now, u64::MAX);
        rejected(sim);
    });
    assert_eq!(after_pressure, Vec::<&str>::new());
}

#[test]
fn limit_must_be_exceeded() {
    let script = PodScript::pod("web").container("app", "run").empty_dir(EmptyDir::Disk).size_limit("64Ki");
    for (bytes, expected) in [(65 << 10, vec![]), (64 << 10, vec!["no eviction without an exceeded limit"])] {
        let found = broken_by(&script, |sim| {
            sandbox(sim, "u1", 0);
            tell(sim, &[("u1", 0, "0Mi")]);
            sim.rules.volume_measured("u1", bytes);
            evict(sim, "u1", "Usage of EmptyDir volume \"scratch\" exceeds the limit \"64Ki\". ");
        });
        assert_eq!(found, expected);
    }
}

#[test]
fn evicted_pod_must_be_the_first_by_rank() {
    const RULE: &str = "the first by rank is evicted";
    let mib = |count: u64| count << 20;
    // `u1` is evicted; the other pod has this priority and request, and uses so much.
    for (priority, request, used, expected) in [
        (0, "0Mi", Some(mib(99)), vec![]),
        (0, "0Mi", Some(mib(101)), vec![RULE]),
        (1, "0Mi", Some(mib(101)), vec![]),
        (-1, "0Mi", Some(mib(1)), vec![RULE]),
        (-1, "2Mi", Some(mib(2)), vec![]),
        (1, "0Mi", None, vec![RULE]),
        (2_000_000_000, "0Mi", None, vec![]),
    ] {
        let found = broken(|sim| {
            tell(sim, &[("u1", 0, "0Mi"), ("u2", priority, request)]);
            sim.rules.memory_measured(sim.now, 0);
            sim.rules.pod_measured("u1", mib(100));
            if let Some(used) = used {
                sim.rules.pod_measured("u2", used);
            }
            evict(sim, "u1", LOW_MEMORY);
        });
        assert_eq!(found, expected, "{priority} {request} {used:?}");
    }
    let unknown = broken(|sim| {
        sim.rules.memory_measured(sim.now, 0);
        evict(sim, "u2", LOW_MEMORY);
    });
    assert_eq!(unknown, [RULE]);
}

#[test]
fn critical_pod_or_an_evicted_one_must_not_be_evicted() {
    let critical = broken(|sim| {
        tell(sim, &[("u1", 2_000_000_000, "0Mi")]);
        sim.rules.memory_measured(sim.now, 0);
        evict(sim, "u1", LOW_MEMORY);
    });
    assert_eq!(critical, ["no critical or deleted pod is evicted"]);
    let twice = |meanwhile: fn(&mut SimState)| {
        broken(|sim| {
            for _ in 0..2 {
                sim.rules.memory_measured(sim.now, 0);
                sim.rules.pod_measured("u1", 1);
                evict(sim, "u1", LOW_MEMORY);
                meanwhile(sim);
            }
        })
    };
    assert_eq!(twice(|_| ()), ["a pod is evicted once"]);
    assert_eq!(twice(|sim| sim.rules.agent_begins(sim.now)), Vec::<&str>::new());
    let written = |sim: &mut SimState| {
        let status = PodStatus { phase: Some("Failed".into()), reason: Some("Evicted".into()), ..Default::default() };
        sim.rules.evictions.status_written("u1", &status);
        sim.rules.agent_begins(sim.now);
    };
    assert_eq!(twice(written), ["a pod is evicted once"]);
    let again = |meanwhile: fn(&mut SimState)| {
        broken(|sim| {
            written(sim);
            meanwhile(sim);
            sim.rules.ordered(sim.now, "u1", "StartContainer");
        })
    };
    assert_eq!(again(|_| ()), ["an evicted pod never runs again"]);
    assert_eq!(again(|sim| sim.rules.pod_edited("web", "u1")), Vec::<&str>::new());
}

#[test]
fn low_memory_without_an_eviction_breaks_a_rule() {
    const RULE: &str = "pressure is relieved";
    let after = |secs: u64, steps: fn(&mut SimState)| {
        let found = broken(|sim| {
            sim.agent = AgentState::Alive(Incarnation(1));
            sim.now = Duration::from_secs(1_000);
            let home = sandbox(sim, "u1", 0);
            let app = start(sim, &home, "app", 0);
            sim.memory.hogs.insert(app, 7 << 30);
            steps(sim);
            for _ in 0..=secs {
                sim.patrol();
                pass(sim, 1);
            }
        });
        found.contains(&RULE)
    };
    assert!(after(13, |_| ()));
    assert!(!after(12, |_| ()));
    assert!(!after(13, |sim| sim.memory.hogs.clear()));
    assert!(!after(13, |sim| tell(sim, &[("u1", 2_000_000_000, "0Mi")])));
    assert!(!after(13, |sim| sim.rules.trouble.enter(Touched::Node)));
    // Another one ends.
    let ends = |sim: &mut SimState| {
        sim.rules.memory_measured(sim.now, 0);
        evict(sim, "u2", LOW_DISK);
    };
    assert!(!after(43, ends));
    assert!(after(44, ends));
}
