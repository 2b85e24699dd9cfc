//! A container is being stopped when its pod is deleted.

use serde_json::{Value, json};

use crate::{
    play::{
        Play, Within, minutes,
        predicates::{Predicate, forgotten, running, stopping, stored_phase},
        seconds,
    },
    runtime::store::Pull,
    script::PodScript,
};

/// Fails a second after the start.
fn unhealthy() -> Value {
    json!({ "exec": { "command": ["fail"] }, "periodSeconds": 1, "failureThreshold": 1 })
}

fn stopped(pod: &'static str) -> Predicate {
    let runs = running(pod);
    Predicate::new(format!("{pod} runs no more"), move |sim| !runs.holds(sim))
}

#[test]
fn deletion_shortens_the_stop_of_an_unhealthy_container() {
    let mut play = Play::clustered(1);
    let pod = PodScript::pod("web").grace_secs(600).container("app", "stubborn").field("livenessProbe", unhealthy());
    play.create(pod).until(&stopping("web")).wait(seconds(20)).expect(&stopping("web"));
    play.delete("web", Within::Secs(5)).wait(seconds(8)).expect(&stopped("web"));
    play.until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn deletion_shortens_the_stop_of_a_changed_container() {
    let mut play = Play::clustered(2);
    play.publish("reg.test/other:v2", Pull::After(seconds(1)));
    play.create(PodScript::pod("web").grace_secs(600).container("app", "stubborn"));
    play.until(&stored_phase("web", "Running")).edit_image("web", "app", "reg.test/other:v2").until(&stopping("web"));
    play.wait(seconds(20)).delete("web", Within::Secs(5)).wait(seconds(8)).expect(&stopped("web"));
    play.until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn deletion_shortens_pre_stop_hook_of_unhealthy_container() {
    let hook = json!({ "preStop": { "exec": { "command": ["sleep", "1000s"] } } });
    let mut play = Play::clustered(3);
    let pod = PodScript::pod("web").grace_secs(600).container("app", "stubborn");
    play.create(pod.field("livenessProbe", unhealthy()).field("lifecycle", hook)).until(&running("web"));
    play.wait(seconds(20)).expect_not(&stopping("web")).delete("web", Within::Secs(5));
    play.wait(seconds(10)).expect(&stopped("web")).until(&forgotten("web")).settle(minutes(1));
}

#[test]
fn deletion_does_not_count_a_hook_that_ran_before_it() {
    let hook = json!({ "preStop": { "exec": { "command": ["sleep", "30s"] } } });
    let mut play = Play::clustered(4);
    let pod = PodScript::pod("web").grace_secs(600).container("app", "slow 15s");
    play.create(pod.field("livenessProbe", unhealthy()).field("lifecycle", hook)).until(&stopping("web"));
    play.delete("web", Within::Secs(20)).until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn deletion_does_not_lengthen_a_shorter_stop() {
    let mut play = Play::clustered(5);
    let mut probe = unhealthy();
    probe["terminationGracePeriodSeconds"] = 5.into();
    let pod = PodScript::pod("web").grace_secs(5).container("app", "stubborn").field("livenessProbe", probe);
    play.create(pod).until(&stopping("web")).wait(seconds(2)).delete("web", Within::Secs(60)).wait(seconds(6));
    play.expect(&stopped("web")).until(&forgotten("web")).settle(minutes(1));
}
