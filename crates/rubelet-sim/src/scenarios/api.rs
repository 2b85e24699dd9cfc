//! Pods of an API server: status, deletion, recreation, and an API server that is unreachable, loses history or is slow.

use std::sync::Arc;

use serde_json::json;

use crate::{
    faults::{ApiFaultRates, FaultRates},
    play::{
        Play, Within, minutes,
        predicates::{
            Predicate, calling, forgotten, gone, known, phase, ready, running, started, stopping, stored, stored_phase,
        },
        seconds,
    },
    runtime::store::{Pull, Sandbox},
    script::{EmptyDir, PodScript, Policy},
    simulation::SimState,
};

fn api_storm(api: ApiFaultRates) -> FaultRates {
    FaultRates { api, ..FaultRates::default() }
}

/// The versions of all pods in the API: they increase with every write.
fn versions(sim: &SimState) -> Vec<(String, String)> {
    let pods = sim.api.of("pods");
    pods.map(|(key, object)| (key.name.clone(), object["metadata"]["resourceVersion"].to_string())).collect()
}

fn slow(name: &str) -> PodScript {
    PodScript::pod(name).grace_secs(30).container("app", "slow 8s")
}

#[test]
fn api_pod_runs_is_reported_and_deleted() {
    let mut play = Play::clustered(1);
    play.create("web").until(&stored_phase("web", "Running")).settle(minutes(1)).expect_running("web");
    play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn lost_responses_leave_statuses_correct() {
    for seed in 2..6 {
        let mut play = Play::clustered(seed);
        play.storm(api_storm(ApiFaultRates { done_but_error: 0.5, hang: 0.1, ..ApiFaultRates::default() }));
        play.create("web").create(PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 3s"));
        play.apply("static").wait(minutes(2)).delete("web", Within::ItsOwnTime).wait(minutes(1));
        play.settle(minutes(3)).expect_starts("web", 1).expect_starts("job", 1).expect_starts("static", 1);
    }
}

#[test]
fn duplicate_and_late_watch_events_cause_no_duplicate_work() {
    for seed in 6..10 {
        let mut play = Play::clustered(seed);
        play.storm(api_storm(ApiFaultRates { event_doubled: 0.5, event_late: 0.5, ..ApiFaultRates::default() }));
        play.create(slow("web")).until(&stored_phase("web", "Running")).label("web", "once").wait(seconds(30));
        play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).settle(minutes(2)).expect_starts("web", 1);
    }
}

#[test]
fn recreated_pod_starts_while_old_one_terminates() {
    let mut play = Play::clustered(10);
    play.create(PodScript::pod("web").grace_secs(600).container("app", "stubborn"));
    play.until(&stored_phase("web", "Running")).recreate(PodScript::from("web").version(2)).until(&stopping("web"));
    play.wait(seconds(5)).expect(&stopping("web")).expect_starts("web", 2).expect(&stored_phase("web", "Running"));
    play.settle(minutes(12)).expect_running("web").expect_starts("web", 2);
}

#[test]
fn pod_recreated_while_agent_is_down_starts_beside_old_one() {
    let mut play = Play::clustered(42);
    play.create(PodScript::pod("web").grace_secs(600).container("app", "stubborn"));
    play.until(&stored_phase("web", "Running")).crash_agent().recreate(PodScript::from("web").version(2)).start_agent();
    play.until(&stored_phase("web", "Running")).expect(&stopping("web")).settle(minutes(12)).expect_starts("web", 2);
}

#[test]
fn pod_recreated_while_agent_is_down_is_a_new_pod() {
    let mut play = Play::clustered(11);
    play.create(slow("web")).until(&stored_phase("web", "Running")).crash_agent();
    play.recreate(slow("web").version(2)).wait(seconds(20)).start_agent();
    play.settle(minutes(2)).expect_running("web").expect_starts("web", 2).expect_restart_count("web", 0);
}

#[test]
fn foreign_pod_status_write_is_overwritten() {
    let mut play = Play::clustered(12);
    play.create("web").apply("static").settle(minutes(1));
    let lie = json!({ "phase": "Pending", "conditions": [{ "type": "Ready", "status": "False" }], "podIP": null });
    for pod in ["web", "static-node"] {
        play.overwrite_status(pod, &lie).expect(&stored_phase(pod, "Pending")).wait(seconds(12));
        play.expect(&stored_phase(pod, "Running")).settle(minutes(1));
    }
}

#[test]
fn expired_watch_version_is_relisted_without_losing_pods() {
    for seed in 13..17 {
        let mut play = Play::clustered(seed);
        play.storm(api_storm(ApiFaultRates { gone: 0.3, watch_cut: 0.2, ..ApiFaultRates::default() }));
        for number in 0..6 {
            play.create(format!("pod{number}").as_str()).wait(seconds(3));
        }
        for number in 0..3 {
            let pod = format!("pod{number}");
            play.until(&started(&pod, 1)).delete(&pod, Within::ItsOwnTime).wait(seconds(2));
        }
        play.settle(minutes(3));
        for number in 0..6 {
            play.expect_starts(&format!("pod{number}"), 1);
        }
    }
}

#[test]
fn statuses_are_current_five_seconds_after_long_api_outage() {
    let mut play = Play::clustered(17);
    for number in 0..20 {
        play.create(format!("pod{number}").as_str());
    }
    play.apply("static").settle(minutes(2)).partition();
    for number in 0..10 {
        play.exit_container(&format!("pod{number}"), "app", 1);
    }
    play.wait(minutes(2)).expect_disagreement().heal().wait(seconds(5)).expect_agreement();
    for number in 0..20 {
        play.expect_restart_count(&format!("pod{number}"), i32::from(number < 10));
    }
    play.settle(minutes(1));
}

#[test]
fn network_partition_stops_no_pod_and_statuses_catch_up() {
    let mut play = Play::clustered(18);
    play.create("web").apply("static").settle(minutes(1)).silence_for(minutes(2)).exit_container("web", "app", 1);
    play.wait(minutes(2)).wait(seconds(40)).expect_agreement().settle(minutes(1)).expect_restart_count("web", 1);
    play.expect_starts("static", 1);
}

#[test]
fn agent_killed_before_api_deletion_deletes_after_restart() {
    for seed in 19..23 {
        let mut play = Play::clustered(seed);
        play.create("web").until(&stored_phase("web", "Running")).delete("web", Within::ItsOwnTime);
        let ended = Predicate::new("web ended in the API", |sim| {
            stored(sim, "web").is_some_and(|pod| pod["status"]["phase"] == "Succeeded")
        });
        play.until(&ended).crash_agent().wait(seconds(5)).expect(&known("web")).start_agent();
        play.until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 1);
    }
}

#[test]
fn a_pod_deleted_while_it_starts_ends_without_having_run() {
    let mut play = Play::clustered(23);
    play.publish("reg.test/web:v1", Pull::After(seconds(60)));
    play.create(PodScript::from("web").image("reg.test/web:v1")).until(&calling("PullImage", "web"));
    play.delete("web", Within::Secs(20)).until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 0);
    for (seed, method) in [(24, "RunPodSandbox"), (25, "CreateContainer"), (26, "StartContainer")] {
        let mut play = Play::clustered(seed);
        play.create(PodScript::from("web").empty_dir(EmptyDir::Memory)).until(&calling(method, "web"));
        play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).settle(minutes(1)).expect_gone("web");
    }
}

#[test]
fn a_deletion_that_is_hastened_ends_the_pod_sooner() {
    let mut play = Play::clustered(27);
    let pod = PodScript::pod("web").grace_secs(120).container("app", "stubborn");
    play.create(pod).until(&stored_phase("web", "Running")).delete("web", Within::ItsOwnTime).until(&stopping("web"));
    play.wait(seconds(20)).delete("web", Within::Secs(5)).wait(seconds(8)).expect(&gone_or_ended("web"));
    play.until(&forgotten("web")).settle(minutes(1));
}

fn gone_or_ended(pod: &'static str) -> Predicate {
    let runs = running(pod);
    Predicate::new(format!("{pod} runs no more"), move |sim| !runs.holds(sim))
}

#[test]
fn force_deleted_pod_is_stopped_and_leaves_nothing() {
    let mut play = Play::clustered(28);
    play.create(slow("web")).until(&stored_phase("web", "Running")).force_delete("web").until(&stopping("web"));
    play.until(&gone("web")).settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn finished_pod_keeps_its_status_until_deleted() {
    let mut play = Play::clustered(29);
    play.create(PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 3s"));
    play.until(&stored_phase("job", "Succeeded")).settle(minutes(2)).crash_agent().start_agent().wait(minutes(2));
    play.expect(&stored_phase("job", "Succeeded")).expect_starts("job", 1);
    play.delete("job", Within::ItsOwnTime).expect(&forgotten("job")).settle(minutes(1)).expect_gone("job");
}

#[test]
fn static_pod_runs_during_api_outage_and_gets_mirror_afterwards() {
    let mut play = Play::before_start(30);
    play.in_cluster().partition().apply("web").start_agent().until(&running("web")).wait(minutes(5));
    play.expect_starts("web", 1).expect(&forgotten("web")).heal().until(&stored_phase("web", "Running"));
    play.settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn static_pod_finished_during_api_outage_gets_mirror_pod() {
    let mut play = Play::clustered(40);
    play.wait(seconds(5)).partition();
    play.apply(PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 3s"));
    play.until(&phase("job", "Succeeded")).wait(seconds(30)).expect(&forgotten("job")).heal();
    play.until(&stored_phase("job", "Succeeded")).settle(minutes(1)).expect_starts("job", 1);
}

#[test]
fn reported_start_failure_is_not_retried_after_agent_restart() {
    let mut play = Play::clustered(41);
    let pod = PodScript::pod("job").policy(Policy::Never).container("app", "run").container("broken", "missing");
    play.create(pod).create(PodScript::pod("gone").policy(Policy::Never).container("broken", "missing"));
    play.until(&stored_phase("gone", "Failed")).settle(minutes(1));
    let before = play.look(versions);
    play.crash_agent().wait(seconds(3)).start_agent().wait(minutes(2)).expect_starts("job", 2).expect_starts("gone", 1);
    assert_eq!(play.look(versions), before);
}

#[test]
fn deleted_mirror_pod_is_recreated_and_static_pod_keeps_running() {
    for (seed, within) in [(31, Within::ItsOwnTime), (32, Within::Secs(0))] {
        let mut play = Play::clustered(seed);
        play.apply("web").until(&stored_phase("web", "Running")).settle(minutes(1));
        let uid = |sim: &SimState| stored(sim, "web").map(|pod| pod["metadata"]["uid"].to_string());
        let before = play.look(uid);
        play.delete("web-node", within).wait(seconds(10)).settle(minutes(1)).expect_starts("web", 1);
        assert_ne!(play.look(uid), before);
    }
}

#[test]
fn mirror_pod_follows_changes_and_removal_of_its_static_pod() {
    let mut play = Play::clustered(33);
    play.apply("web")
        .until(&stored_phase("web", "Running"))
        .apply(PodScript::from("web").version(2))
        .settle(minutes(2));
    play.remove("web").until(&forgotten("web")).settle(minutes(2)).expect_gone("web");
}

#[test]
fn changed_manifest_keeps_mirror_pod_until_old_pod_terminates() {
    let mut play = Play::clustered(42);
    play.apply(PodScript::pod("web").grace_secs(60).container("app", "slow 45s"))
        .until(&stored_phase("web", "Running"));
    let uid = |sim: &SimState| stored(sim, "web").map(|pod| pod["metadata"]["uid"].to_string());
    let before = play.look(uid);
    play.apply(PodScript::from("web").version(2)).until(&stopping("web")).wait(seconds(40));
    assert_eq!(play.look(uid), before);
    play.expect(&stored_phase("web", "Running")).wait(seconds(10)).settle(minutes(2)).expect_running("web");
    assert_ne!(play.look(uid), before);
}

#[test]
fn restarted_agent_terminates_nothing_while_api_is_unreachable() {
    let mut play = Play::clustered(34);
    play.create("web").apply("static").settle(minutes(1)).crash_agent().partition().delete("web", Within::ItsOwnTime);
    play.start_agent().wait(minutes(10)).expect(&running("web")).expect(&running("static")).heal();
    play.until(&forgotten("web")).settle(minutes(1)).expect_starts("web", 1).expect_starts("static", 1);
}

#[test]
fn restarted_agent_writes_no_unchanged_pod_status() {
    let mut play = Play::clustered(35);
    let probe = json!({ "exec": { "command": ["ok"] }, "periodSeconds": 5 });
    play.create("web").create(PodScript::pod("probed").container("app", "run").field("readinessProbe", probe));
    play.create(PodScript::pod("job").policy(Policy::Never).container("app", "exit 0 after 3s"));
    play.create(PodScript::pod("flaky").container("app", "flaky 2")).apply("static");
    play.apply(PodScript::pod("ended").policy(Policy::Never).container("app", "exit 1 after 3s"))
        .until(&running("static"));
    play.change(|sim| {
        let of_static = |sandbox: &&Arc<Sandbox>| sandbox.identity().name == "static-node";
        let id = sim.runtime.picture.sandboxes.values().find(of_static).map(|sandbox| sandbox.id.clone());
        sim.kill_sandbox(&id.expect("the pod runs in one"));
    });
    play.wait(seconds(5)).settle(minutes(3)).expect(&ready("probed"));
    let before = play.look(versions);
    for _ in 0..3 {
        play.crash_agent().wait(seconds(3)).start_agent().wait(minutes(2));
    }
    assert_eq!(play.look(versions), before);
}

#[test]
fn an_api_server_that_restarts_disturbs_no_pod() {
    let mut play = Play::clustered(36);
    play.create("web").apply("static").settle(minutes(1));
    for _ in 0..3 {
        play.restart_api().wait(seconds(20)).partition_for(seconds(30)).wait(minutes(1));
    }
    play.settle(minutes(1)).expect_starts("web", 1).expect_starts("static", 1);
}

#[test]
fn a_failed_post_start_hook_counts_one_restart_per_failure() {
    let hook = json!({ "postStart": { "exec": { "command": ["fail", "first"] } } });
    let mut play = Play::clustered(37);
    let pod = |name: &str| PodScript::pod(name).container("app", "run").field("lifecycle", hook.clone());
    play.create(pod("web")).apply(pod("static")).until(&started("web", 2)).until(&started("static", 2));
    play.settle(minutes(3)).expect_starts("web", 2).expect_restart_count("web", 1);
    play.expect_starts("static", 2).expect_restart_count("static", 1);
}

#[test]
fn a_pod_waits_for_its_config_map_and_starts_when_it_comes() {
    let mut play = Play::clustered(38);
    let from = json!([{ "configMapRef": { "name": "settings" } }]);
    play.create(PodScript::pod("web").container("app", "run").field("envFrom", from)).wait(minutes(1));
    play.expect_starts("web", 0).expect(&phase("web", "Pending"));
    play.put_config_map("settings", &json!({ "COLOR": "blue" })).until(&stored_phase("web", "Running"));
    play.settle(minutes(1)).expect_starts("web", 1);
}

#[test]
fn lease_is_renewed_while_runtime_is_busy() {
    let mut play = Play::clustered(39);
    play.create("web").settle(minutes(1)).runtime_down();
    for _ in 0..10 {
        play.wait(seconds(60));
        let renewed = play.look(|sim| {
            let (_, lease) = sim.api.of("leases").next().expect("the node has a lease");
            let at: jiff::Timestamp = lease["spec"]["renewTime"].as_str().unwrap().parse().unwrap();
            sim.wall.duration_since(at)
        });
        assert!(renewed.as_secs() <= 12, "renewed {renewed:?} ago");
    }
}

#[test]
fn agent_killed_at_any_call_starts_and_deletes_api_pod_once() {
    for nth in 0..90 {
        let mut play = Play::before_start(8_000 + nth);
        play.in_cluster().supervised().start_agent();
        play.change(|sim| sim.agent_dies_after = Some(nth));
        play.create("web").until(&stored_phase("web", "Running")).wait(seconds(2)).delete("web", Within::ItsOwnTime);
        play.until(&forgotten("web")).settle(minutes(3)).expect_gone("web").expect_starts("web", 1);
    }
}
