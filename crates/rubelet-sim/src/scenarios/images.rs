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

/// Five images fill the disk; four may stay.
#[test]
fn least_recently_used_image_is_deleted_when_the_disk_is_full() {
    let mut play = Play::seeded(29);
    play.apply("web").until(&running("web"));
    for name in ["a", "b", "c", "d"] {
        let image = format!("reg.test/{name}:v1");
        play.publish(&image, Pull::After(seconds(1)));
        play.apply(with_image(name, &image)).until(&running(name)).wait(minutes(6));
    }
    play.remove("c").wait(minutes(6)).remove("a").remove("b").wait(minutes(12)).settle(minutes(2));
    let left = play.look(|sim| sim.runtime.images.iter().cloned().collect::<Vec<_>>());
    assert_eq!(left, ["reg.test/a:v1", "reg.test/b:v1", "reg.test/d:v1", "sim.test/app:v1"]);
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
