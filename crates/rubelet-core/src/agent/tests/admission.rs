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

fn critical(uid: &str, cpu: &str, priority: i32) -> Pod {
    let mut pod = from_api(uid, cpu, 5);
    pod.spec.as_mut().expect("a spec").priority = Some(priority);
    pod
}

impl TestAgent {
    fn api_lists(&mut self, pods: &[&Pod]) {
        let pods = pods.iter().map(|pod| Arc::new((*pod).clone())).collect();
        self.handle(Event::Config { source: Source::Api, pods });
    }

    fn lifecycles(&self, uids: &[&str]) -> String {
        uids.iter().map(|uid| self.lifecycle(uid)).collect::<Vec<_>>().join(" ")
    }
}

/// A small node on which this pod runs.
fn running_on_small_node(pod: &Pod) -> TestAgent {
    let mut test = TestAgent::new(small_node());
    test.api_lists(&[pod]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    test
}

#[test]
fn critical_pod_waits_until_the_pod_preempted_for_it_has_ended() {
    let low = from_api("low", "600m", 1);
    let mut test = running_on_small_node(&low);
    let high = critical("high", "600m", 2_000_000_000);
    test.api_lists(&[&low, &high]);
    assert_eq!((test.lifecycles(&["low", "high"]).as_str(), told(&test, "Preempting")), ("Terminating Waiting", true));
    let waits_for = test.agent.records[&PodUid::new("high")].waits_for.as_ref().expect("it waits").to_string();
    assert_eq!(waits_for, "the resources of terminating pods: default/low");
    assert_eq!(test.agent.snapshot().pods[&PodUid::new("low")].counts.preempted_for.as_deref(), Some("cpu"));

    // What is free, or becomes so, is the critical pod's.
    test.api_lists(&[&low, &high, &from_api("late", "100m", 9)]);
    assert!(told(&test, "OutOfcpu"), "{:?}", test.events);
    test.inspected("sandbox gone");
    test.answer("StopContainer", Ok(Facts::Nothing));
    assert_eq!(test.lifecycle("high"), "Waiting", "the container may still run");
    test.inspected("a: exit(0) 0s ago");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    assert_eq!(test.lifecycles(&["low", "high"]), "Terminating Waiting");
    test.inspected("sandbox notready 60s; a: exit(0) 0s ago");
    assert_eq!(test.lifecycle("high"), "Syncing");
    assert_eq!(test.events.iter().filter(|reason| *reason == "Preempting").count(), 1);
}

#[test]
fn critical_pod_waits_for_terminating_pods_before_it_preempts_others() {
    let (ending, other) = (from_api("ending", "400m", 1), from_api("other", "400m", 2));
    for (cpu, expected) in [("600m", "Terminating Syncing Waiting"), ("601m", "Terminating Terminating Waiting")] {
        let mut test = running_on_small_node(&other);
        test.api_lists(&[&ending, &other]);
        let mut deleted = ending.clone();
        deleted.metadata.deletion_timestamp = mk_pod("always | deleted").metadata.deletion_timestamp;
        test.api_lists(&[&deleted, &other, &critical("high", cpu, 2_000_000_000)]);
        assert_eq!(test.lifecycles(&["ending", "other", "high"]), expected, "{cpu}");
    }
}

#[test]
fn critical_pod_waits_for_one_and_a_half_grace_periods_at_most() {
    for (grace_secs, waits_secs) in [(30, 45), (1, 10)] {
        let mut low = from_api("low", "600m", 1);
        low.spec.as_mut().expect("a spec").termination_grace_period_seconds = Some(grace_secs);
        let mut test = running_on_small_node(&low);
        test.api_lists(&[&low, &critical("high", "600m", 2_000_000_000)]);
        test.at_secs += waits_secs - 1;
        test.handle(Event::Due);
        assert_eq!(test.lifecycle("high"), "Waiting", "{grace_secs}");
        assert!(test.agent.wake_at(test.now()) <= later(test.at_secs + 1).uptime);
        test.at_secs += 1;
        test.handle(Event::Due);
        assert_eq!(test.lifecycles(&["low", "high"]), "Terminating Syncing", "{grace_secs}");
    }
}

#[test]
fn critical_pod_is_rejected_if_no_pods_of_lower_priority_make_room() {
    let first = critical("first", "600m", 2_000_000_000);
    for (priority, expected, is_rejected) in
        [(2_000_000_000, "Syncing Syncing", true), (2_000_001_000, "Terminating Waiting", false)]
    {
        let mut test = running_on_small_node(&first);
        test.api_lists(&[&first, &critical("second", "600m", priority)]);
        assert_eq!(test.lifecycles(&["first", "second"]), expected, "{priority}");
        assert_eq!(told(&test, "UnexpectedAdmissionError"), is_rejected, "{priority}");
        assert_eq!(told(&test, "Preempting"), !is_rejected, "{priority}");
    }
}

#[test]
fn waiting_critical_pod_is_preempted_by_one_of_higher_priority() {
    let low = from_api("low", "600m", 1);
    let mut test = running_on_small_node(&low);
    let first = critical("first", "600m", 2_000_000_000);
    test.api_lists(&[&low, &first]);
    assert_eq!(test.lifecycles(&["low", "first"]), "Terminating Waiting");
    test.api_lists(&[&low, &first, &critical("second", "900m", 2_000_001_000)]);
    assert_ne!(test.lifecycle("first"), "Waiting");
    assert_eq!(test.lifecycle("second"), "Waiting");
}
