//! Probes in the loop: which are sent, and what a result leads to.

use k8s_openapi::api::core::v1::Probe;
use serde_json::{Value, json};

use super::*;
use crate::probes::{ProbeAction, ProbeOutcome};

const EXEC: &str = r#"{ "exec": { "command": ["x"] }, "failureThreshold": 1, "periodSeconds": 10 }"#;

fn probed(pod: &str, kind: &str, probe: &Value) -> Pod {
    let mut pod = mk_pod(pod);
    let probe: Probe = serde_json::from_value(probe.clone()).expect("a probe");
    let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
    match kind {
        "liveness" => container.liveness_probe = Some(probe),
        "readiness" => container.readiness_probe = Some(probe),
        _ => container.startup_probe = Some(probe),
    }
    pod
}

fn running(pod: Pod) -> TestAgent {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[pod]);
    test.runtime_is_up(&[]);
    test.inspected("a: running 30s");
    for _ in 0..20 {
        if !test.pending().contains(&"Probe") {
            test.at_secs += 1;
            test.handle(Event::Due);
        }
    }
    test
}

fn exec(kind: &str) -> TestAgent {
    running(probed("always | static | main a", kind, &serde_json::from_str(EXEC).expect("json")))
}

fn shown(test: &TestAgent) -> (bool, Option<bool>) {
    let status = test.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
    let container = &status.container_statuses.as_ref().expect("one")[0];
    (container.ready, container.started)
}

#[test]
fn probe_result_updates_status_and_failure_is_recorded() {
    let no = || ProbeOutcome::Failure("no".to_owned());
    let late = || ProbeOutcome::Warning("slow".to_owned());
    for (kind, outcome, expected, told) in [
        ("readiness", ProbeOutcome::Success, (true, Some(true)), None),
        ("readiness", late(), (true, Some(true)), Some("ProbeWarning")),
        ("readiness", no(), (false, Some(true)), Some("Unhealthy")),
        ("startup", ProbeOutcome::Success, (true, Some(true)), None),
        ("startup", no(), (false, Some(false)), Some("Unhealthy")),
    ] {
        let mut test = exec(kind);
        test.events.clear();
        test.answer("Probe", Ok(Facts::Probe(outcome)));
        assert_eq!(shown(&test), expected, "{kind}");
        assert_eq!(test.events.first().map(String::as_str), told, "{kind} {:?}", test.events);
    }
}

#[test]
fn a_container_that_is_not_alive_is_stopped_at_once() {
    let mut test = exec("liveness");
    test.answer("Probe", Ok(Facts::Probe(ProbeOutcome::Failure("no".to_owned()))));
    assert!(test.pending().contains(&"StopContainer"), "{:?}", test.pending());
    assert_eq!(test.events, ["NodeReady", "Unhealthy", "Killing"]);
    // It is stopped to be restarted, whatever its exit code.
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(0) 0s");
    assert!(test.agent.records[&PodUid::new("u1")].instance(&"a0".into()).is_restarting);
}

#[test]
fn probe_without_result_times_out_and_is_sent_again() {
    let mut test = exec("readiness");
    test.in_flight.retain(|(_, op)| op.name() != "Probe");
    test.at_secs += 400;
    test.handle(Event::Due);
    test.at_secs += 10;
    test.handle(Event::Due);
    assert!(test.pending().contains(&"Probe"), "{:?}", test.pending());
}

#[test]
fn a_probe_under_way_is_cancelled_with_its_container() {
    let mut test = exec("readiness");
    test.handle(Event::Hint { pod: PodUid::new("u1") });
    test.inspected("a: exit(1) 0s");
    assert!(!test.pending().contains(&"Probe"), "{:?}", test.pending());
}

#[test]
fn invalid_probe_is_recorded_once_per_period() {
    let probe = json!({ "httpGet": { "port": "nobody" }, "periodSeconds": 10 });
    let test = running(probed("always | static | main a", "readiness", &probe));
    assert!(!test.pending().contains(&"Probe"), "{:?}", test.pending());
    let told = test.events.iter().filter(|reason| *reason == "Unhealthy").count();
    assert!((2..=3).contains(&told), "once every ten of twenty seconds: {:?}", test.events);
}

#[test]
fn probe_without_host_waits_for_the_pod_address() {
    let no_host = json!({ "tcpSocket": { "port": 80 } });
    let with_host = json!({ "tcpSocket": { "port": 80, "host": "h" } });
    for (pod, probe, has_address, expected) in [
        ("always | static | main a", &no_host, true, Some("10.1.0.7")),
        ("always | static | main a", &no_host, false, None),
        ("always | static | main a", &with_host, false, Some("h")),
        ("always | static | host | main a", &no_host, false, Some("127.0.0.1")),
    ] {
        let mut test = TestAgent::new(Settings::for_node("node"));
        test.config(&[probed(pod, "liveness", probe)]);
        test.runtime_is_up(&[]);
        let mut facts = PodFacts { looked_at: test.now().uptime, ..facts("a: running 90s") };
        facts.sandboxes[0].host_network = pod.contains("host");
        if !has_address {
            facts.sandboxes[0].ips.clear();
        }
        test.answer("InspectPod", Ok(Facts::Pod(facts)));
        for _ in 0..20 {
            test.at_secs += 1;
            test.handle(Event::Due);
        }
        let host = test.in_flight.iter().find_map(|(_, op)| match op {
            Op::Container(ContainerOp::Probe(order)) => match &order.action {
                ProbeAction::Tcp { host, .. } => Some(host.as_str()),
                other => panic!("{other:?}"),
            },
            _ => None,
        });
        assert_eq!(host, expected, "{pod} {probe}");
    }
}

/// Pods with as many containers as given, each with an exec probe for readiness that is due at once.
fn with_exec_probes(containers: &[usize]) -> TestAgent {
    let probe: Probe =
        serde_json::from_value(json!({ "exec": { "command": ["x"] }, "failureThreshold": 1 })).expect("a probe");
    let mut test = TestAgent::new(Settings::for_node("node"));
    let pod = |(number, count): (usize, &usize)| {
        let names: String = (0..*count).map(|name| format!(" | main c{name}")).collect();
        let mut pod = mk_pod(&format!("always | static{names}"));
        let uid = format!("u{number:02}");
        (pod.metadata.name, pod.metadata.uid) = (Some(uid.clone()), Some(uid));
        for container in &mut pod.spec.as_mut().expect("a spec").containers {
            container.readiness_probe = Some(probe.clone());
        }
        pod
    };
    test.config(&containers.iter().enumerate().map(pod).collect::<Vec<_>>());
    test.runtime_is_up(&[]);
    let look = |test: &TestAgent| test.in_flight.iter().position(|(_, op)| op.name() == "InspectPod");
    while let Some(position) = look(&test) {
        let (id, op) = test.in_flight.remove(position);
        let Op::Pod(PodOp::Inspect { pod }) = op else { unreachable!() };
        let number: usize = pod.uid.as_str()[1..].parse().expect("a number");
        let states: String = (0..containers[number]).map(|name| format!("c{name}: running 0s; ")).collect();
        let found = PodFacts { looked_at: test.now().uptime, ..facts(&states) };
        test.handle(Event::Done { id, result: Ok(Facts::Pod(found)) });
    }
    test
}

/// The pods of the probes under way.
fn probed_pods(test: &TestAgent) -> Vec<String> {
    let pods = test.in_flight.iter().filter_map(|(_, op)| match op {
        Op::Container(ContainerOp::Probe(order)) => Some(order.pod.uid.as_str().to_owned()),
        _ => None,
    });
    pods.collect()
}

#[test]
fn pod_with_many_exec_probes_leaves_slots_to_others() {
    let test = with_exec_probes(&[40, 1, 1]);
    let pods = probed_pods(&test);
    let of = |uid: &str| pods.iter().filter(|pod| *pod == uid).count();
    assert_eq!((of("u00"), of("u01"), of("u02")), (8, 1, 1));
}

#[test]
fn exec_probe_without_slot_waits_its_turn_and_does_not_fail() {
    let containers = [vec![30; 9], vec![1; 20]].concat();
    let mut test = with_exec_probes(&containers);
    assert_eq!(probed_pods(&test).len(), 64);
    assert!(!probed_pods(&test).contains(&"u20".to_owned()), "it waits");
    test.at_secs += 5;
    test.handle(Event::Due);
    assert_eq!(probed_pods(&test).len(), 64);
    let mut order = Vec::new();
    for _ in 0..29 {
        let before = probed_pods(&test);
        test.answer("Probe", Ok(Facts::Probe(ProbeOutcome::Success)));
        let after = probed_pods(&test);
        assert_eq!(after.len(), 64, "the free slot is taken at once");
        assert_eq!(after[..63], before[1..]);
        order.push(after[63].clone());
    }
    let last = order.iter().position(|pod| pod == "u28").expect("every pod gets a slot");
    assert!(order[..last].iter().filter(|pod| ["u00", "u01", "u02"].contains(&pod.as_str())).count() <= 3, "{order:?}");
    assert!(!test.events.contains(&"Unhealthy".to_owned()), "{:?}", test.events);
}

#[test]
fn slots_of_cancelled_and_lost_probes_are_free_again() {
    let mut test = with_exec_probes(&[vec![30; 9], vec![1; 20]].concat());
    for _ in 0..20 {
        test.answer("Probe", Err(EffectError { kind: ErrorKind::TimedOut, message: "late".to_owned() }));
        assert_eq!(probed_pods(&test).len(), 64);
    }
    test.handle(Event::Hint { pod: PodUid::new("u03") });
    test.inspected("c0: exit(1) 0s");
    assert!(!probed_pods(&test).contains(&"u03".to_owned()), "its probes are cancelled");
    assert_eq!(probed_pods(&test).len(), 64);
}
