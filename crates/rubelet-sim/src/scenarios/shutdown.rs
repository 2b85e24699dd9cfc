//! A shutdown of the machine, in the middle of anything.

use serde_json::Value;

use crate::{
    faults::FaultRates,
    play::{
        Play, minutes,
        predicates::{self, NODE, Predicate, phase, running, shutdown_is_over, stopping},
        seconds,
    },
    script::{EmptyDir, PodScript},
    simulation::SimState,
};

fn pod(name: &str, priority: i32, program: &str) -> PodScript {
    PodScript::pod(name).priority(priority).grace_secs(300).empty_dir(EmptyDir::Memory).container("app", program)
}

/// One pod for each group, and one below all.
fn four() -> [PodScript; 4] {
    [pod("bee", -7, "slow 3s"), pod("ant", 0, "slow 5s"), pod("cat", 1500, "slow 4s"), pod("dog", 9999, "run")]
}

const NAMES: [&str; 4] = ["ant", "bee", "cat", "dog"];

fn none_runs() -> Predicate {
    Predicate::new("no container runs", |sim| sim.runtime.running().next().is_none())
}

/// The status of condition Ready of the Node object.
fn ready_of_node(sim: &SimState) -> Value {
    let node = sim.api.of("nodes").find(|(key, _)| key.name == NODE).map(|(_, node)| node["status"].clone());
    let conditions = node.and_then(|status| status["conditions"].as_array().cloned()).unwrap_or_default();
    let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready");
    ready.map_or(Value::Null, |condition| condition["status"].clone())
}

#[test]
fn shutdown_ends_every_pod_and_its_cancellation_restarts_static_pods() {
    for seed in 700..706 {
        let mut play = Play::seeded(seed);
        for script in four() {
            play.apply(script);
        }
        for name in NAMES {
            play.until(&running(name));
        }
        play.begin_shutdown().until(&stopping("ant")).expect_not(&stopping("cat")).expect_not(&stopping("dog"));
        play.until(&stopping("cat")).expect_not(&running("ant")).expect_not(&running("bee"));
        play.until(&shutdown_is_over()).expect(&none_runs());
        // A manifest that changes, and time for every resync.
        play.apply(pod("fox", 2000, "run"))
            .apply(pod("ant", 0, "run").version(2))
            .wait(minutes(3))
            .expect(&none_runs());
        for name in ["bee", "cat", "dog", "fox"] {
            play.expect(&phase(name, "Failed"));
        }
        play.cancel_shutdown().settle(minutes(3));
        for name in NAMES.into_iter().chain(["fox"]) {
            play.expect_running(name);
        }
        play.expect_starts("dog", 2);
    }
}

#[test]
fn pods_that_do_not_end_take_no_more_than_their_groups_time() {
    for seed in 706..710 {
        let mut play = Play::seeded(seed);
        play.apply(pod("ant", 0, "stubborn")).apply(pod("cat", 1000, "stubborn"));
        play.until(&running("ant")).until(&running("cat")).begin_shutdown();
        play.wait(seconds(19)).expect(&running("ant")).expect_not(&stopping("cat"));
        play.wait(seconds(2)).expect(&stopping("cat")).wait(seconds(12));
        play.expect(&shutdown_is_over()).expect(&none_runs());
    }
}

#[test]
fn agent_killed_in_a_shutdown_ends_the_rest() {
    for seed in 710..722 {
        let mut play = Play::seeded(seed);
        for script in four() {
            play.apply(script);
        }
        for name in NAMES {
            play.until(&running(name));
        }
        play.begin_shutdown().wait(seconds(seed % 12)).crash_agent().wait(seconds(seed % 3)).start_agent();
        play.until(&shutdown_is_over()).expect(&none_runs()).wait(minutes(2)).expect(&none_runs());
        play.cancel_shutdown().settle(minutes(3));
        for name in NAMES {
            play.expect_running(name);
        }
    }
}

#[test]
fn statuses_are_in_the_api_before_the_machine_goes_down_and_the_node_returns_ready() {
    for seed in 722..726 {
        let mut play = Play::clustered(seed);
        for script in four() {
            play.create(script);
        }
        play.apply(pod("fox", 2000, "run"));
        for name in NAMES.into_iter().chain(["fox"]) {
            play.until(&running(name));
        }
        play.until(&Predicate::new("a ready node", |sim| ready_of_node(sim) == "True"));
        play.begin_shutdown().until(&shutdown_is_over()).expect(&none_runs());
        play.look(|sim| {
            assert_eq!(ready_of_node(sim), "False");
            for name in NAMES.into_iter().chain(["fox"]) {
                let status = &predicates::stored(sim, name).expect("it is in the API")["status"];
                assert_eq!((&status["phase"], &status["reason"]), (&"Failed".into(), &"Terminated".into()), "{name}");
                let conditions = status["conditions"].as_array().expect("conditions");
                assert!(conditions.iter().any(|it| it["type"] == "DisruptionTarget" && it["status"] == "True"));
                assert!(conditions.iter().any(|it| it["type"] == "ContainersReady" && it["status"] == "False"));
            }
        });
        play.reboot().wait(seconds(30)).start_agent();
        // Once ready it stays so.
        let mut was_ready = false;
        for _ in 0..90 {
            play.wait(seconds(1));
            let is_ready = play.look(|sim| ready_of_node(sim) == "True");
            assert!(is_ready || !was_ready, "{}", play.failure("the node is ready once", "it was ready before"));
            was_ready = is_ready;
        }
        assert!(was_ready);
        for name in NAMES {
            play.expect(&phase(name, "Failed")).delete(name, crate::play::Within::ItsOwnTime);
        }
        play.settle(minutes(3)).expect_running("fox").expect_gone("ant");
    }
}

/// Faults, deaths of the agent, new pods and removals around a shutdown. The rules are what is checked.
#[test]
fn shutdown_in_the_middle_of_anything_breaks_no_rule() {
    for seed in 730..790 {
        let mut play = Play::before_start(seed);
        play.supervised();
        let mut rng = play.fork_rng();
        if seed % 2 == 0 {
            play.in_cluster();
        }
        play.start_agent();
        for script in four() {
            play.apply(script);
        }
        play.apply(pod("eel", 1000, "stubborn")).apply(pod("gnu", 0, "flaky 2"));
        let mut some = |most: f64| if rng.u32(0..3) == 0 { rng.f64() * most } else { 0.0 };
        play.storm(FaultRates {
            error_before: some(0.2),
            done_but_error: some(0.2),
            late_answer: some(0.1),
            event_lost: some(0.5),
            agent_death: some(0.01),
            ..FaultRates::default()
        });
        play.wait(seconds(rng.u64(0..90))).begin_shutdown().wait(seconds(rng.u64(0..30)));
        if rng.bool() {
            play.remove("ant").apply(pod("bee", 0, "run").version(2)).apply(pod("fox", 0, "run"));
        }
        if rng.u32(0..3) == 0 {
            play.crash_agent();
        }
        play.wait(seconds(rng.u64(0..60)));
        match rng.u32(0..3) {
            0 => play.reboot(),
            _ => play.cancel_shutdown(),
        };
        play.settle(minutes(25));
        for name in ["cat", "dog", "eel", "gnu"] {
            play.expect_running(name);
        }
    }
}
