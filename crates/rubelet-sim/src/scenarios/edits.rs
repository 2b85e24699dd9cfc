//! Edits of running pods in the API.

use crate::{
    play::{
        Play, minutes,
        predicates::{Predicate, calling, started, stored_phase},
        seconds,
    },
    runtime::store::Pull,
    script::{PodScript, Policy},
};

const OTHER: &str = "reg.test/other:v2";

#[test]
fn changed_image_restarts_container_under_any_policy() {
    for (seed, policy) in [(1, Policy::Always), (2, Policy::OnFailure), (3, Policy::Never)] {
        let mut play = Play::clustered(seed);
        play.publish(OTHER, Pull::After(seconds(3)));
        let pod = PodScript::pod("web").policy(policy).container("app", "run").container("other", "run");
        play.create(pod).until(&stored_phase("web", "Running")).settle(minutes(1));
        play.edit_image("web", "app", OTHER).until(&started("web", 3)).settle(minutes(1));
        play.expect_running("web").expect_starts("web", 3).expect_restart_count("web", 1);
    }
}

#[test]
fn changed_image_restarts_container_despite_restart_policy_never() {
    let mut play = Play::clustered(4);
    play.publish(OTHER, Pull::After(seconds(20)));
    play.create(PodScript::pod("job").policy(Policy::Never).container("app", "slow 3s"));
    play.until(&stored_phase("job", "Running")).edit_image("job", "app", OTHER).until(&started("job", 2));
    play.settle(minutes(1)).expect_running("job").expect_restart_count("job", 1);
}

#[test]
fn changed_image_restarts_nothing_that_had_ended_by_itself() {
    let mut play = Play::clustered(5);
    play.publish(OTHER, Pull::After(seconds(1)));
    let pod = PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 2s").container("other", "run");
    play.create(pod).until(&stored_phase("job", "Running")).wait(seconds(5)).edit_image("job", "app", OTHER);
    play.wait(minutes(2)).expect_starts("job", 2).expect_restart_count("job", 0);
}

#[test]
fn image_edited_before_container_start_is_the_one_run() {
    let old = "reg.test/web:v1";
    let pulled = Predicate::new("the old image is there", move |sim| sim.runtime.images.contains(old));
    let mut play = Play::clustered(6);
    play.publish(old, Pull::After(seconds(60))).publish(OTHER, Pull::After(seconds(5)));
    play.create(PodScript::from("web").image(old)).until(&calling("PullImage", old));
    // Without a network nothing is started, and the image waits for its container.
    play.change(|sim| sim.runtime.network_ready = false).until(&pulled).wait(seconds(70)).expect_starts("web", 0);
    play.edit_image("web", "app", OTHER).wait(seconds(5)).change(|sim| sim.runtime.network_ready = true);
    play.settle(minutes(2)).expect_running("web").expect_starts("web", 1);
}

#[test]
fn image_edited_during_its_pull_is_the_one_that_runs() {
    let mut play = Play::clustered(7);
    play.publish("reg.test/web:v1", Pull::After(seconds(60))).publish(OTHER, Pull::After(seconds(5)));
    play.create(PodScript::from("web").image("reg.test/web:v1")).until(&calling("PullImage", "reg.test/web:v1"));
    play.wait(seconds(2)).edit_image("web", "app", OTHER).wait(seconds(10)).expect_running("web");
    play.settle(minutes(2)).expect_starts("web", 1);
}
