//! A disk that fails, is busy, slow or hangs; a node that reboots.

use crate::{
    faults::{FaultRates, HostFaultRates},
    play::{
        Play, minutes,
        predicates::{gone, running, started},
        seconds,
    },
    script::{EmptyDir, PodScript},
};

fn host(host: HostFaultRates) -> FaultRates {
    FaultRates { host, ..FaultRates::default() }
}

#[test]
fn log_links_go_with_their_pod_when_disk_calls_fail() {
    for seed in 130..138 {
        let mut play = Play::seeded(seed);
        play.apply("web").until(&running("web")).wait(seconds(5));
        play.storm(host(HostFaultRates { io_error: 0.3, ..HostFaultRates::default() })).remove("web").wait(minutes(3));
        play.settle(minutes(12));
    }
}

#[test]
fn a_busy_or_slow_disk_only_delays_pods() {
    let rates = host(HostFaultRates { busy: 0.3, slow: 0.1, ..HostFaultRates::default() });
    let mut play = Play::seeded(138);
    play.storm(rates).apply(PodScript::pod("web").container("app", "run").empty_dir(EmptyDir::Memory)).wait(minutes(3));
    play.settle(minutes(6)).expect_running("web").expect_starts("web", 1).remove("web").settle(minutes(6));
}

#[test]
fn hung_disk_call_delays_only_its_pod() {
    let mut play = Play::seeded(139);
    play.apply("first").storm(host(HostFaultRates { hang: 1.0, ..HostFaultRates::default() })).wait(seconds(2)).calm();
    play.apply("second").until(&running("second")).settle(minutes(12)).expect_running("first");
}

#[test]
fn pods_run_again_after_a_reboot() {
    let mut play = Play::seeded(140);
    play.apply(PodScript::pod("web").container("app", "run").empty_dir(EmptyDir::Memory)).apply("old");
    play.until(&running("web")).until(&running("old")).reboot().remove("old").start_agent();
    play.until(&started("web", 2)).settle(minutes(3)).expect_running("web").expect_restart_count("web", 1);
    play.expect(&gone("old"));
}
