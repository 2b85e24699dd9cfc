//! Admission, and pods that wait for other pods.

use serde_json::json;

use super::*;
use crate::pod::plan::WaitsFor;

fn told(test: &TestAgent, reason: &str) -> bool {
    test.events.iter().any(|told| told == reason)
}

#[test]
fn terminated_pod_skips_admission_and_holds_nothing() {
    let ended = |uid: &str| {
        let mut pod = from_api(uid, "2", 1);
        pod.status = Some(serde_json::from_value(json!({ "phase": "Succeeded" })).expect("a status"));
        pod
    };
    for (first, is_refused) in [(from_api("a", "2", 1), true), (ended("a"), false)] {
        let mut test = TestAgent::new(small_node());
        let pods = [first, from_api("b", "600m", 2)].map(Arc::new).to_vec();
        test.handle(Event::Config { source: Source::Api, pods });
        test.runtime_is_up(&[]);
        assert_eq!(told(&test, "OutOfcpu"), is_refused, "{:?}", test.events);
        assert_eq!(test.lifecycle("b"), "Syncing", "beside it there is room");
        assert!(test.agent.records[&PodUid::new("b")].rejected.is_none());
    }
}

#[test]
fn strict_supplemental_groups_need_runtime_support() {
    for (answer, is_refused) in [(None, true), (Some(false), true), (Some(true), false)] {
        let mut pod = web("u1");
        let context = json!({ "supplementalGroupsPolicy": "Strict" });
        pod.spec.as_mut().unwrap().security_context = Some(serde_json::from_value(context).unwrap());
        let mut test = TestAgent::new(Settings::for_node("node"));
        test.config(&[pod]);
        let status = RuntimeStatus { supplemental_groups_policy: answer, ..RuntimeStatus::default() };
        test.answer("CheckRuntime", Ok(Facts::Runtime(status)));
        test.relisted(&[]);
        assert_eq!(told(&test, "SupplementalGroupsPolicyNotSupported"), is_refused, "{answer:?}");
    }
}

#[test]
fn second_pod_of_a_name_is_rejected_with_an_event() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1"), web("u2")]);
    assert_eq!((test.lifecycle("u1").as_str(), test.lifecycle("u2").as_str()), ("Waiting", "unknown"));
    assert_eq!(test.events.len(), 1, "{:?}", test.events);
}

#[test]
fn unsupported_fields_are_recorded_runtime_class_only_if_standalone() {
    for (class, sources, is_told) in [
        (None, vec![Source::File], false),
        (Some("fast"), vec![Source::File], true),
        (Some("fast"), vec![Source::File, Source::Api], false),
    ] {
        let mut pod = web("u1");
        pod.spec.as_mut().unwrap().runtime_class_name = class.map(str::to_owned);
        let mut test = TestAgent::new(Settings { sources, ..Settings::for_node("node") });
        test.config(&[pod]);
        test.runtime_is_up(&[]);
        assert_eq!(told(&test, "UnsupportedFields"), is_told, "{class:?}: {:?}", test.events);
    }
}

#[test]
fn orphan_with_a_static_pods_name_ends_before_sources_are_ready() {
    let elsewhere = |uid: &str, namespace: &str, name: &str| {
        let mut other = listed(uid, name);
        other.pod.namespace = namespace.into();
        other
    };
    for (other, lifecycle, own) in [
        (elsewhere("old", "default", "web"), "Terminating", "Waiting"),
        (elsewhere("old", "default", "other"), "unknown", "Syncing"),
        (elsewhere("old", "other", "web"), "unknown", "Syncing"),
    ] {
        let settings = Settings { sources: vec![Source::File, Source::Http], ..Settings::for_node("node") };
        let mut test = TestAgent::new(settings);
        test.config(&[web("u1")]);
        test.runtime_is_up(std::slice::from_ref(&other));
        assert_eq!((test.lifecycle("old").as_str(), test.lifecycle("u1").as_str()), (lifecycle, own), "{other:?}");
        let wait = test.agent.records[&PodUid::new("u1")].waits_for.clone();
        assert_eq!(matches!(wait, Some(WaitsFor::Namesake(_))), own == "Waiting", "{wait:?}");
    }
}

#[test]
fn terminated_pod_releases_its_burstable_shares() {
    let mut test = TestAgent::with_cgroups(Settings::for_node("node"));
    test.config(&[burstable("u1", "500m"), burstable("u2", "1")]);
    test.runtime_is_up(&[]);
    assert_eq!(burstable_shares(&test), Some(1536));
    test.answer("SyncQosCgroups", Ok(Facts::Cgroups { names: Vec::new() }));
    for _ in 0..2 {
        test.inspected("sandbox gone");
    }
    assert_eq!(burstable_shares(&test), None);
    test.config(&[burstable("u1", "500m")]);
    assert_eq!(burstable_shares(&test), Some(512), "it holds nothing of the runtime any more");
}
