//! Probes second by second, and their requests.

use std::time::Duration;

use insta::assert_snapshot;
use k8s_openapi::api::core::v1::{Container, ExecAction, Pod};
use serde_json::{Value, json};

use super::*;
use crate::{
    id::ContainerId,
    test_support::{facts, later, mk_pod, now},
};

fn probe(period: i32, failure_threshold: i32) -> Probe {
    Probe {
        exec: Some(ExecAction { command: Some(vec!["check".to_owned()]) }),
        period_seconds: Some(period),
        failure_threshold: Some(failure_threshold),
        ..Probe::default()
    }
}

/// A pod of one container, its probes, and the outcomes so far.
struct ProbeFixture {
    id: PodRef,
    pod: Pod,
    facts: PodFacts,
    status: PodStatus,
    stage: ProbedStage,
    probes: Probes,
    at_secs: u64,
}

impl ProbeFixture {
    fn new(seen: &str, change: impl FnOnce(&mut Container)) -> ProbeFixture {
        let mut pod = mk_pod("always | main a");
        change(&mut pod.spec.as_mut().expect("a spec").containers[0]);
        let (stage, probes) = (ProbedStage::Running, Probes::default());
        ProbeFixture {
            id: PodRef::of(&pod),
            pod,
            facts: facts(seen),
            status: PodStatus::default(),
            stage,
            probes,
            at_secs: 0,
        }
    }

    fn probed(&self) -> Probed<'_> {
        let spec = self.pod.spec.as_ref().expect("a spec");
        Probed { id: &self.id, spec, facts: &self.facts, status: &self.status, stage: self.stage }
    }

    fn now(&self) -> Now {
        later(self.at_secs)
    }

    /// The probes due at this second; they are sent.
    fn due(&mut self) -> Vec<(ContainerId, ProbeKind)> {
        let mut probes = std::mem::take(&mut self.probes);
        let lost = probes.observe(&self.probed(), self.now());
        assert!(lost.is_empty(), "nothing was under way: {lost:?}");
        let due: Vec<_> = probes.due(&self.probed(), self.now()).into_iter().map(|due| (due.id, due.kind)).collect();
        for (id, kind) in &due {
            probes.sent(id, *kind, self.now());
        }
        self.probes = probes;
        due
    }

    /// Advances by seconds; every probe gets `outcome` at once. One line per probe.
    fn run(&mut self, secs: u64, outcome: impl Fn(ProbeKind, u64) -> ProbeOutcome) -> String {
        let mut lines = Vec::new();
        let end = self.at_secs + secs;
        while self.at_secs < end {
            for (id, kind) in self.due() {
                let done = self.probes.done(&self.id, &id, kind, &outcome(kind, self.at_secs)).expect("it was sent");
                let changed = done.changed.map_or(String::new(), |health| format!(" -> {health:?}"));
                lines.push(format!("{}s {id} {}{changed}", self.at_secs, kind.as_str()));
            }
            self.at_secs += 1;
        }
        lines.join("\n")
    }
}

fn ok(_: ProbeKind, _: u64) -> ProbeOutcome {
    ProbeOutcome::Success
}

fn fails(_: ProbeKind, _: u64) -> ProbeOutcome {
    ProbeOutcome::Failure("no".to_owned())
}

#[test]
fn probe_starts_after_its_initial_delay_then_every_period() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| {
        container.readiness_probe = Some(Probe { initial_delay_seconds: Some(5), ..probe(10, 3) });
    });
    assert_snapshot!(fixture.run(30, ok), @"
    5s a0 Readiness -> Passing
    15s a0 Readiness
    25s a0 Readiness
    ");
}

#[test]
fn readiness_changes_after_its_thresholds() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| {
        container.readiness_probe = Some(Probe { success_threshold: Some(2), ..probe(1, 3) });
    });
    let outcome = |_, at| match at {
        0 | 1 | 2 | 8.. => ProbeOutcome::Success,
        4 => ProbeOutcome::Unknown("cannot ask".to_owned()),
        5 => ProbeOutcome::Discarded("half an answer".to_owned()),
        _ => ProbeOutcome::Failure(String::new()),
    };
    assert_snapshot!(fixture.run(10, outcome), @"
    0s a0 Readiness
    1s a0 Readiness -> Passing
    2s a0 Readiness
    3s a0 Readiness
    4s a0 Readiness
    5s a0 Readiness
    6s a0 Readiness
    7s a0 Readiness -> Failing
    8s a0 Readiness
    9s a0 Readiness -> Passing
    ");
}

#[test]
fn failed_liveness_ends_probing_until_the_next_instance() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| container.liveness_probe = Some(probe(2, 2)));
    assert_snapshot!(fixture.run(10, fails), @"
    0s a0 Liveness
    2s a0 Liveness -> Failing
    ");
    assert_eq!(fixture.probes.failure(&"a0".into()), Some(ProbeKind::Liveness));
    fixture.facts = facts("a: exit(0) 1s");
    assert_eq!(fixture.run(5, fails), "");
    assert_eq!(fixture.probes.failure(&"a0".into()), Some(ProbeKind::Liveness), "it is why the container starts again");
    fixture.facts = facts("a: exit(0), running 0s");
    assert_eq!(fixture.probes.failure(&"a1".into()), None);
    assert_snapshot!(fixture.run(3, ok), @"
    15s a1 Liveness
    17s a1 Liveness
    ");
    fixture.facts.containers.retain(|container| container.is_running());
    fixture.due();
    assert_eq!(fixture.probes.failure(&"a0".into()), None, "what the runtime forgot is forgotten");
}

#[test]
fn other_probes_wait_for_the_startup_probe() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| {
        container.startup_probe = Some(probe(3, 10));
        container.readiness_probe = Some(probe(100, 3));
        container.liveness_probe = Some(Probe { initial_delay_seconds: Some(8), ..probe(100, 3) });
    });
    let outcome = |kind, at| {
        if kind == ProbeKind::Startup && at < 6 { fails(kind, at) } else { ok(kind, at) }
    };
    assert_snapshot!(fixture.run(20, outcome), @"
    0s a0 Startup
    3s a0 Startup
    6s a0 Startup -> Passing
    7s a0 Readiness -> Passing
    8s a0 Liveness
    ");
}

#[test]
fn failed_startup_probe_stops_the_container() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| {
        container.startup_probe = Some(probe(1, 2));
        container.liveness_probe = Some(probe(1, 1));
    });
    assert_snapshot!(fixture.run(10, fails), @"
    0s a0 Startup
    1s a0 Startup -> Failing
    ");
    assert_eq!(fixture.probes.failure(&"a0".into()), Some(ProbeKind::Startup));
    assert!(!fixture.probes.has_started(&fixture.pod.spec.as_ref().expect("a spec").containers[0], &"a0".into()));
}

#[test]
fn restarted_agent_keeps_probe_results_and_spreads_probes() {
    let all = |container: &mut Container| {
        container.startup_probe = Some(probe(10, 3));
        container.readiness_probe = Some(probe(16, 1));
        container.liveness_probe = Some(probe(16, 1));
    };
    let mut fixture = ProbeFixture::new("a: running 7200s", all);
    let known = json!({ "containerStatuses": [{
        "name": "a", "image": "", "imageID": "", "restartCount": 0, "ready": true, "started": true,
        "containerID": "containerd://a0", "state": { "running": {} },
    }]});
    fixture.status = serde_json::from_value(known).expect("a status");
    assert!(fixture.due().is_empty(), "no startup probe, and the others are spread over their period");
    assert!(fixture.probes.has_started(&fixture.pod.spec.as_ref().expect("a spec").containers[0], &"a0".into()));
    let wake_at = fixture.probes.next_wakeup(fixture.now()).expect("probes wait");
    assert!(wake_at < fixture.now().uptime + Duration::from_secs(16));
    let mut unknown = ProbeFixture::new("a: running 7200s", |container| container.readiness_probe = Some(probe(16, 1)));
    assert_eq!(unknown.due().len(), 1, "what nobody knows is asked at once");
}

#[test]
fn two_containers_of_one_name_are_probed_once() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| container.readiness_probe = Some(probe(1, 3)));
    let spec = fixture.pod.spec.as_mut().expect("a spec");
    spec.containers.push(spec.containers[0].clone());
    assert_eq!(fixture.due(), [("a0".into(), ProbeKind::Readiness)]);
}

#[test]
fn terminating_pod_runs_only_readiness_probes() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| {
        container.readiness_probe = Some(probe(1, 3));
        container.liveness_probe = Some(probe(1, 3));
    });
    assert_eq!(fixture.due().len(), 2);
    fixture.stage = ProbedStage::Ending;
    let mut probes = std::mem::take(&mut fixture.probes);
    assert_eq!(
        probes.observe(&fixture.probed(), now()),
        [("a0".into(), ProbeKind::Liveness)],
        "the liveness probe under way is called off"
    );
    assert!(probes.done(&fixture.id, &"a0".into(), ProbeKind::Readiness, &ProbeOutcome::Success).is_some());
    assert_eq!(probes.done(&fixture.id, &"a0".into(), ProbeKind::Liveness, &ProbeOutcome::Success), None);
    fixture.probes = probes;
    fixture.at_secs = 1;
    assert_eq!(fixture.due(), [("a0".into(), ProbeKind::Readiness)]);
}

#[test]
fn probe_of_a_removed_container_is_cancelled() {
    let mut fixture = ProbeFixture::new("a: running 0s", |container| container.readiness_probe = Some(probe(1, 3)));
    fixture.due();
    fixture.facts = facts("");
    let mut probes = std::mem::take(&mut fixture.probes);
    assert_eq!(probes.observe(&fixture.probed(), now()), [("a0".into(), ProbeKind::Readiness)]);
    assert_eq!(probes.next_wakeup(now()), None);
}

fn resolved(container: &Value, probe: &Value) -> String {
    let container: Container = serde_json::from_value(container.clone()).expect("a container");
    let probe: Probe = serde_json::from_value(probe.clone()).expect("a probe");
    match ProbeAction::of(&probe, &container, "10.0.0.9") {
        Ok(action) => format!("{action:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn ports_hosts_paths_and_headers_are_as_upstream_sends_them() {
    let container = json!({ "name": "a", "ports": [{ "name": "web", "containerPort": 8080 }] });
    let get = |action: Value| resolved(&container, &json!({ "httpGet": action }));
    assert_snapshot!(get(json!({ "port": "web" })), @r#"Http(HttpGet { url: "http://10.0.0.9:8080/", headers: [("User-Agent", "kube-probe/1.36"), ("Accept", "*/*")] })"#);
    let all = json!({ "port": "9090", "host": "::1", "scheme": "HTTPS", "path": "z?a=b c#d",
        "httpHeaders": [{ "name": "Accept", "value": "" }, { "name": "user-agent", "value": "me" }] });
    assert_snapshot!(get(all), @r#"Http(HttpGet { url: "https://[::1]:9090/z?a=b%20c", headers: [("user-agent", "me")] })"#);
    assert_snapshot!(get(json!({ "port": "no" })), @"port no not found");
    assert_snapshot!(get(json!({ "port": 0 })), @"invalid port number: 0");
    let tcp = json!({ "tcpSocket": { "port": "web" } });
    assert_snapshot!(resolved(&container, &tcp), @r#"Tcp { host: "10.0.0.9", port: 8080 }"#);
    let grpc = json!({ "grpc": { "port": 5000, "service": "s" } });
    assert_snapshot!(resolved(&container, &grpc), @r#"Grpc { host: "10.0.0.9", port: 5000, service: "s", user_agent: "kube-probe/1.36" }"#);
}

#[test]
fn commands_expand_variables_with_a_literal_value() {
    let container = json!({ "name": "a", "env": [{ "name": "A", "value": "1" }] });
    let exec = json!({ "exec": { "command": ["x", "$(A)", "$(B)", "$$(A)"] } });
    assert_snapshot!(resolved(&container, &exec), @r#"Exec { command: ["x", "1", "$(B)", "$(A)"] }"#);
}

#[test]
fn command_beyond_what_the_kernel_executes_is_not_built() {
    let container = json!({ "name": "a", "env": [{ "name": "A", "value": "x".repeat(10_000) }] });
    let exec = json!({ "exec": { "command": ["x", "$(A)".repeat(10_000)] } });
    assert_snapshot!(resolved(&container, &exec), @"command[1] is too long: the kernel takes 6291456 bytes in one string, and 6291456 bytes of command and environment together");
}
