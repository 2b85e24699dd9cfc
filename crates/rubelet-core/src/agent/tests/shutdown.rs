//! A shutdown of the node, turn by turn.

use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;

use super::*;
use crate::{
    op::ApiOp,
    shutdown::{ShutdownGroup, ShutdownSignal},
};

const STARTS: [&str; 3] = ["RunSandbox", "StartContainer", "InspectImage"];

/// Groups of priority 0 and 1000, with 20 and 10 seconds.
fn settings(sources: &[Source]) -> Settings {
    let group = |priority, secs| ShutdownGroup { priority, period: Duration::from_secs(secs) };
    Settings {
        sources: sources.to_vec(),
        shutdown_groups: vec![group(0, 20), group(1000, 10)],
        ..Settings::for_node("node")
    }
}

/// A pod named after its UID.
fn pod(traits: &str, uid: &str, priority: i32) -> Pod {
    let mut pod = mk_pod(&format!("{traits} | main a"));
    pod.metadata.name = Some(uid.to_owned());
    pod.metadata.uid = Some(uid.to_owned());
    pod.spec.as_mut().expect("a spec").priority = Some(priority);
    pod
}

/// A standalone node on which these static pods run.
fn node_with(pods: &[Pod]) -> TestAgent {
    let mut test = TestAgent::new(settings(&[Source::File]));
    test.config(pods);
    test.runtime_is_up(&[]);
    for _ in pods {
        test.inspected("a: running 5s");
    }
    test
}

impl TestAgent {
    fn signal(&mut self, signal: ShutdownSignal) {
        self.handle(Event::Shutdown(signal));
    }

    fn pass(&mut self, secs: u64) {
        self.at_secs += secs;
        self.handle(Event::Due);
    }

    /// The grace periods of the stops in flight, by pod.
    fn stopping(&self) -> Vec<(String, i64)> {
        let stop = |op: &Op| match op {
            Op::Container(ContainerOp::Stop { pod, grace_secs, .. }) => Some((pod.uid.to_string(), *grace_secs)),
            _ => None,
        };
        self.in_flight.iter().filter_map(|(_, op)| stop(op)).collect()
    }

    /// The only pod that is being stopped stops, and its volumes are released.
    fn stopped(&mut self) {
        self.answer("StopContainer", Ok(Facts::Nothing));
        self.inspected("a: exit(0) 0s ago");
        self.answer("StopSandbox", Ok(Facts::Nothing));
        self.inspected("sandbox notready 60s; a: exit(0) 0s ago");
        self.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    }

    fn status(&self, uid: &str) -> Arc<PodStatus> {
        self.agent.snapshot().pods[&PodUid::new(uid)].status.clone()
    }

    /// Phase and reason.
    fn outcome(&self, uid: &str) -> (String, String) {
        let status = self.status(uid);
        (status.phase.clone().unwrap_or_default(), status.reason.clone().unwrap_or_default())
    }

    /// Whether the machine may go down; `None` without a shutdown.
    fn is_over(&self) -> Option<bool> {
        self.agent.snapshot().node.shutdown.map(|shutdown| shutdown.ended_at.is_some())
    }

    fn is_ready(&self) -> bool {
        self.agent.snapshot().node.readiness == NodeReadiness::Ready
    }
}

fn texts(phase: &str, reason: &str) -> (String, String) {
    (phase.to_owned(), reason.to_owned())
}

#[test]
fn groups_end_in_order_of_priority_each_when_the_one_before_has_released_its_volumes() {
    let mut test = node_with(&[pod("always | static", "low", 5), pod("always | static", "high", 1000)]);
    assert!(test.is_ready());
    test.signal(ShutdownSignal::Begins);
    let problems = vec!["node is shutting down".to_owned()];
    assert_eq!(test.agent.snapshot().node.readiness, NodeReadiness::NotReady(problems));
    assert_eq!(test.events, ["NodeReady", "Shutdown", "Killing"]);
    assert_eq!(test.stopping(), [("low".to_owned(), 20)], "its own grace period is 30 s");
    test.pass(3);
    test.answer("StopContainer", Ok(Facts::Nothing));
    test.inspected("a: exit(0) 0s ago");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(0) 0s ago");
    assert!(test.stopping().is_empty(), "the volumes of the first are mounted");
    test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    assert_eq!(test.stopping(), [("high".to_owned(), 10)]);
    assert_eq!(test.is_over(), Some(false));
    test.stopped();
    assert_eq!(test.is_over(), Some(true));
    assert_eq!((test.outcome("low"), test.lifecycle("low")), (texts("Failed", "Terminated"), "Finished".to_owned()));
    let status = test.status("high");
    let message = "Pod was terminated in response to imminent node shutdown.";
    assert_eq!(status.message.as_deref(), Some(message));
    let disruption = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
    let disruption = disruption.expect("the condition");
    assert_eq!(
        (disruption.status.as_str(), disruption.reason.as_deref(), disruption.message.as_deref()),
        ("True", Some("TerminationByKubelet"), Some(message))
    );
    test.signal(ShutdownSignal::Begins);
    assert_eq!(test.events.iter().filter(|reason| *reason == "Shutdown").count(), 1, "a repeated signal is ignored");
}

#[test]
fn a_group_out_of_time_is_left_and_a_group_without_pods_takes_none() {
    let mut test = node_with(&[pod("always | static", "stuck", 0), pod("always | static", "high", 2000)]);
    test.signal(ShutdownSignal::Begins);
    test.pass(19);
    assert_eq!(test.stopping().len(), 1);
    test.pass(1);
    assert_eq!(test.stopping(), [("stuck".to_owned(), 20), ("high".to_owned(), 10)]);
    test.pass(9);
    assert_eq!(test.is_over(), Some(false));
    test.pass(1);
    assert_eq!(test.is_over(), Some(true));

    let mut test = node_with(&[pod("always | static", "high", 1000)]);
    test.signal(ShutdownSignal::Begins);
    assert_eq!(test.stopping(), [("high".to_owned(), 10)]);
    let mut test = node_with(&[]);
    test.signal(ShutdownSignal::Begins);
    assert_eq!(test.is_over(), Some(true));
}

#[test]
fn the_machine_waits_for_a_pod_that_is_killed_but_not_for_long() {
    let killed = || {
        let mut test = node_with(&[pod("always | static", "high", 1000)]);
        test.signal(ShutdownSignal::Begins);
        test.pass(10);
        assert_eq!(test.is_over(), Some(false), "it ignored SIGTERM, and is just killed");
        test
    };
    let mut test = killed();
    test.stopped();
    assert_eq!((test.is_over(), test.outcome("high")), (Some(true), texts("Failed", "Terminated")));
    let mut test = killed();
    test.pass(5);
    assert_eq!(test.is_over(), Some(true));
}

#[test]
fn grace_period_is_the_shorter_of_the_pods_and_the_groups() {
    for (own, expected) in [(Some(5), 5), (Some(120), 20), (None, 20)] {
        let mut pod = pod("always | static", "web", 0);
        pod.spec.as_mut().expect("a spec").termination_grace_period_seconds = own;
        let mut test = node_with(&[pod]);
        test.signal(ShutdownSignal::Begins);
        assert_eq!(test.stopping(), [("web".to_owned(), expected)]);
    }
}

#[test]
fn pod_that_is_being_deleted_gets_no_more_than_the_groups_time() {
    let mut test = TestAgent::new(settings(&[Source::Api]));
    let mut web = pod("always", "web", 0);
    web.spec.as_mut().expect("a spec").termination_grace_period_seconds = Some(300);
    test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(web.clone())] });
    test.runtime_is_up(&[]);
    test.inspected("a: running 5s");
    web.metadata.deletion_timestamp = mk_pod("always | deleted").metadata.deletion_timestamp;
    web.metadata.deletion_grace_period_seconds = Some(300);
    test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(web)] });
    assert_eq!(test.stopping(), [("web".to_owned(), 300)]);
    test.signal(ShutdownSignal::Begins);
    assert_eq!(test.stopping(), [("web".to_owned(), 20)]);
}

#[test]
fn completed_pod_keeps_its_outcome() {
    let mut test = node_with(&[pod("never | static", "job", 0)]);
    test.handle(Event::Hint { pod: PodUid::new("job") });
    test.inspected("a: exit(0) 0s ago");
    assert_eq!(test.lifecycle("job"), "Terminating");
    test.signal(ShutdownSignal::Begins);
    assert_eq!(test.is_over(), Some(false), "its sandbox is being stopped");
    test.answer("StopSandbox", Ok(Facts::Nothing));
    test.inspected("sandbox notready 60s; a: exit(0) 0s ago");
    test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    assert_eq!((test.is_over(), test.outcome("job")), (Some(true), texts("Succeeded", "")));
}

#[test]
fn new_pods_are_rejected_and_static_ones_start_after_a_cancelled_shutdown() {
    let mut test = TestAgent::new(settings(&[Source::File, Source::Api]));
    test.handle(Event::Config { source: Source::Api, pods: Vec::new() });
    test.config(&[]);
    test.runtime_is_up(&[]);
    test.signal(ShutdownSignal::Begins);
    test.config(&[pod("always | static", "new", 1000)]);
    test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(pod("always", "api", 0))] });
    while test.pending().contains(&"InspectPod") {
        test.inspected("sandbox gone");
    }
    for uid in ["new", "api"] {
        assert_eq!(test.outcome(uid), texts("Failed", "NodeShutdown"));
        let message = "Pod was rejected: Pod was rejected as the node is shutting down.";
        assert_eq!(test.status(uid).message.as_deref(), Some(message));
    }
    while test.pending().contains(&"TearDownVolumes") {
        test.answer("TearDownVolumes", Ok(Facts::Remains(Remains::PodDir)));
    }
    assert!(!test.pending().iter().any(|op| STARTS.contains(op)), "{:?}", test.pending());
    test.signal(ShutdownSignal::Cancelled);
    assert_eq!(test.events.iter().filter(|reason| *reason == "Shutdown").count(), 2);
    assert!(test.is_ready());
    assert_eq!((test.lifecycle("new"), test.lifecycle("api")), ("Syncing".to_owned(), "Finished".to_owned()));
    assert_eq!((test.is_over(), test.outcome("api")), (None, texts("Failed", "NodeShutdown")));
}

#[test]
fn cancelled_shutdown_restarts_static_pods_and_spares_the_other_groups() {
    let mut test = node_with(&[pod("always | static", "low", 0), pod("always | static", "high", 1000)]);
    test.signal(ShutdownSignal::Begins);
    test.signal(ShutdownSignal::Cancelled);
    assert_eq!(test.lifecycle("low"), "Terminating", "a stop that was sent is finished");
    test.stopped();
    assert_eq!((test.lifecycle("low"), test.lifecycle("high")), ("Syncing".to_owned(), "Syncing".to_owned()));
    assert!(test.stopping().is_empty());
    test.inspected("sandbox notready 60s; a: exit(0) 0s ago");
    // A new process would stop the dead sandbox once more, too, before it makes the next.
    assert!(test.pending().contains(&"StopSandbox"), "{:?}", test.pending());
    assert_eq!(test.outcome("low").1, "");
}

#[test]
fn pod_that_a_previous_process_admitted_starts_nothing_in_a_shutdown() {
    let mut test = TestAgent::new(settings(&[Source::File]));
    test.signal(ShutdownSignal::Begins);
    test.config(&[pod("always | static", "web", 0)]);
    test.runtime_is_up(&[listed("web", "web")]);
    assert_eq!(test.lifecycle("web"), "Terminating");
    test.inspected("a: exit(1) 5s ago");
    assert!(!test.pending().iter().any(|op| STARTS.contains(op)), "{:?}", test.pending());
    assert_eq!(test.is_over(), Some(false));
}

#[test]
fn the_machine_waits_for_the_last_status_but_not_for_long() {
    for answers in [true, false] {
        let mut test = TestAgent::new(settings(&[Source::Api]));
        let web = Arc::new(pod("always", "web", 0));
        test.handle(Event::Config { source: Source::Api, pods: vec![web.clone()] });
        test.runtime_is_up(&[]);
        test.inspected("a: running 5s");
        let patched = |test: &mut TestAgent| {
            let is_patch = |op: &Op| matches!(op, Op::Api(ApiOp::PatchStatus { .. }));
            while test.in_flight.iter().any(|(_, op)| is_patch(op)) {
                test.answer("PatchStatus", Ok(Facts::ApiPod(web.clone())));
            }
        };
        patched(&mut test);
        test.signal(ShutdownSignal::Begins);
        test.stopped();
        assert_eq!((test.is_over(), test.outcome("web")), (Some(false), texts("Failed", "Terminated")));
        if answers {
            patched(&mut test);
        } else {
            test.pass(4);
            assert_eq!(test.is_over(), Some(false));
            test.pass(1);
        }
        assert_eq!(test.is_over(), Some(true), "{answers}");
    }
}
