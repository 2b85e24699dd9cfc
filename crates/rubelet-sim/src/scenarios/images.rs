//! Images that are present, arrive later, or never.

use crate::{
    play::{
        Play, minutes,
        predicates::{calling, running, waiting},
        seconds,
    },
    runtime::store::Pull,
    script::PodScript,
};

fn with_image(name: &str, image: &str) -> PodScript {
    PodScript::from(name).image(image)
}

#[test]
fn an_image_that_appears_later_is_pulled_at_the_next_try() {
    let mut play = Play::seeded(30);
    play.apply(with_image("web", "reg.test/late:v1")).until(&waiting("web", "ErrImagePull"));
    play.until(&waiting("web", "ImagePullBackOff")).publish("reg.test/late:v1", Pull::After(seconds(1)));
    play.settle(minutes(6)).expect_running("web").expect_starts("web", 1);
}

#[test]
fn stuck_pull_does_not_delay_pods_without_pull() {
    let mut play = Play::seeded(31);
    play.publish("reg.test/stuck:v1", Pull::Stuck).apply(with_image("slow", "reg.test/stuck:v1"));
    play.until(&calling("PullImage", "stuck")).apply("web").until(&running("web"));
    play.wait(minutes(3)).expect_running("web").remove("slow").settle(minutes(3)).expect_gone("slow");
}

#[test]
fn pods_sharing_an_image_all_start() {
    let mut play = Play::seeded(32);
    play.publish("reg.test/big:v1", Pull::After(seconds(20)));
    for name in ["a", "b", "c", "d"] {
        play.apply(with_image(name, "reg.test/big:v1"));
    }
    play.settle(minutes(5));
}

#[test]
fn pull_policy_never_waits_for_missing_image() {
    let mut play = Play::seeded(33);
    play.apply(with_image("web", "reg.test/absent:v1").pull("Never")).until(&waiting("web", "ErrImageNeverPull"));
    play.change(|sim| {
        sim.runtime.images.insert("reg.test/absent:v1".to_owned());
    });
    play.settle(minutes(6)).expect_running("web");
}

#[test]
fn a_pod_removed_during_its_pull_is_gone_and_starts_nothing() {
    let mut play = Play::seeded(34);
    play.publish("reg.test/big:v1", Pull::After(seconds(60))).apply(with_image("web", "reg.test/big:v1"));
    play.until(&calling("PullImage", "big"))
        .remove("web")
        .settle(minutes(3))
        .expect_gone("web")
        .expect_starts("web", 0);
}
