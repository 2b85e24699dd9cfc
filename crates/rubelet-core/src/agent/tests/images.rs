//! Images in the loop: when they are requested, and when a request is obsolete.

use super::*;
use crate::op::ImageOp;

/// A pod that waits for its image, which the node does not have.
fn wanting(settings: Settings, pods: &[Pod]) -> Turns {
    let mut turns = Turns::new(settings);
    turns.config(pods);
    turns.runtime_is_up(&[]);
    for _ in pods {
        turns.inspected("sandbox ready 1s");
    }
    for step in ["MakePodDirs", "SetUpVolumes", "InspectImage"] {
        for _ in pods {
            let is_image = step == "InspectImage";
            turns.answer(step, Ok(if is_image { Facts::Image(None) } else { Facts::Nothing }));
        }
    }
    turns
}

fn pulls(turns: &Turns) -> usize {
    turns.asked.iter().filter(|(_, op)| matches!(op, Op::Image(ImageOp::Pull { .. }))).count()
}

fn failed() -> Result<Facts, EffectError> {
    Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() })
}

#[test]
fn failed_pull_is_shown_and_retried_after_its_back_off() {
    let mut turns = wanting(Settings::for_node("node"), &[web("u1")]);
    turns.answer("PullImage", failed());
    let shown = |turns: &Turns| {
        let status = turns.agent.snapshot().pods[&PodUid::new("u1")].status.clone();
        let state = status.container_statuses.as_ref().expect("one")[0].state.clone();
        state.and_then(|state| state.waiting?.reason)
    };
    assert_eq!(shown(&turns).as_deref(), Some("ErrImagePull"));
    turns.told.clear();
    let mut reasons = Vec::new();
    while !turns.pending().contains(&"InspectImage") {
        turns.at_secs += 1;
        turns.happens(Event::Due);
        reasons.push(shown(&turns).unwrap_or_default());
    }
    assert!(reasons.contains(&"ImagePullBackOff".to_owned()), "{reasons:?}");
    assert_eq!((turns.told.as_slice(), reasons.len()), (&["BackOff".to_owned(), "Failed".to_owned()][..], 10));
}

#[test]
fn a_queued_pull_starts_when_the_registrys_rate_allows_it() {
    let mut other = web("u2");
    other.metadata.name = Some("other".to_owned());
    let settings =
        Settings { registry_pull_qps: 1, registry_burst: 1, max_parallel_pulls: None, ..Settings::for_node("node") };
    let mut turns = wanting(settings, &[web("u1"), other]);
    assert_eq!(pulls(&turns), 1);
    assert_eq!(turns.agent.wake_at(turns.now()), later(1).uptime);
    turns.at_secs += 1;
    turns.happens(Event::Due);
    assert_eq!(pulls(&turns), 2);
}

#[test]
fn pull_is_cancelled_when_its_image_is_not_needed() {
    let mut pod = web("u1");
    pod.metadata.annotations = None;
    let mut turns = Turns::new(Settings { sources: vec![Source::Api], ..Settings::for_node("node") });
    let shows = |turns: &mut Turns, pod: &Pod| {
        turns.happens(Event::Config { source: Source::Api, pods: vec![Arc::new(pod.clone())] });
    };
    shows(&mut turns, &pod);
    turns.runtime_is_up(&[]);
    turns.inspected("sandbox ready 1s");
    turns.carried_out(&["MakePodDirs", "SetUpVolumes"], "sandbox ready 1s");
    turns.answer("InspectImage", Ok(Facts::Image(None)));
    assert_eq!(pulls(&turns), 1);
    pod.spec.as_mut().unwrap().containers[0].image = Some("a:2".to_owned());
    shows(&mut turns, &pod);
    assert!(pulls(&turns) == 0 && turns.pending().contains(&"InspectImage"), "{:?}", turns.pending());
}
