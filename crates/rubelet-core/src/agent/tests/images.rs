//! Images in the loop: when they are requested, and when a request is obsolete.

use super::*;
use crate::op::ImageOp;

/// A pod that waits for its image, which the node does not have.
fn wanting(settings: Settings, pods: &[Pod]) -> TestAgent {
    let mut test = TestAgent::new(settings);
    test.config(pods);
    test.runtime_is_up(&[]);
    for _ in pods {
        test.inspected("sandbox ready 1s");
    }
    for step in ["MakePodDirs", "InspectImage"] {
        for _ in pods {
            let is_image = step == "InspectImage";
            test.answer(step, Ok(if is_image { Facts::Image(None) } else { Facts::Nothing }));
        }
    }
    test
}

fn pulls(test: &TestAgent) -> usize {
    test.in_flight.iter().filter(|(_, op)| matches!(op, Op::Image(ImageOp::Pull { .. }))).count()
}

fn failed() -> Result<Facts, EffectError> {
    Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() })
}

#[test]
fn failed_pull_is_shown_and_retried_after_its_back_off() {
    let mut test = wanting(Settings::for_node("node"), &[web("u1")]);
    test.answer("PullImage", failed());
    let shown = |test: &TestAgent| {
        let status = test.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
        let state = status.container_statuses.as_ref().expect("one")[0].state.clone();
        state.and_then(|state| state.waiting?.reason)
    };
    assert_eq!(shown(&test).as_deref(), Some("ErrImagePull"));
    test.events.clear();
    let mut reasons = Vec::new();
    while !test.pending().contains(&"InspectImage") {
        test.at_secs += 1;
        test.handle(Event::Due);
        reasons.push(shown(&test).unwrap_or_default());
    }
    assert!(reasons.contains(&"ImagePullBackOff".to_owned()), "{reasons:?}");
    assert_eq!((test.events.as_slice(), reasons.len()), (&["BackOff".to_owned(), "Failed".to_owned()][..], 10));
}

#[test]
fn a_queued_pull_starts_when_the_registrys_rate_allows_it() {
    let mut other = web("u2");
    other.metadata.name = Some("other".to_owned());
    let settings =
        Settings { registry_pull_qps: 1, registry_burst: 1, max_parallel_pulls: None, ..Settings::for_node("node") };
    let mut test = wanting(settings, &[web("u1"), other]);
    assert_eq!(pulls(&test), 1);
    assert_eq!(test.agent.wake_at(test.now()), later(1).uptime);
    test.at_secs += 1;
    test.handle(Event::Due);
    assert_eq!(pulls(&test), 2);
}

#[test]
fn pull_is_cancelled_when_its_image_is_not_needed() {
    let mut pod = web("u1");
    pod.metadata.annotations = None;
    let mut test = TestAgent::new(Settings { sources: vec![Source::Api], ..Settings::for_node("node") });
    let shows = |test: &mut TestAgent, pod: &Pod| {
        test.handle(Event::Config { source: Source::Api, pods: vec![Arc::new(pod.clone())] });
    };
    shows(&mut test, &pod);
    test.runtime_is_up(&[]);
    test.inspected("sandbox ready 1s");
    test.carried_out(&["MakePodDirs"], "sandbox ready 1s");
    test.answer("InspectImage", Ok(Facts::Image(None)));
    assert_eq!(pulls(&test), 1);
    pod.spec.as_mut().unwrap().containers[0].image = Some("a:2".to_owned());
    shows(&mut test, &pod);
    assert!(pulls(&test) == 0 && test.pending().contains(&"InspectImage"), "{:?}", test.pending());
}
