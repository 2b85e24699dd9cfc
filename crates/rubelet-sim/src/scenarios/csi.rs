//! CSI volumes: claims and inline volumes, over drivers that stage and attach or not, that come late, restart and fail.

use crate::{
    csi::{
        driver::{DriverEnd, DriverScript},
        objects::ClaimScript,
    },
    faults::{ApiFaultRates, CsiFaultRates, FaultRates},
    play::{
        Play, Within, minutes,
        predicates::{self, failed_for, forgotten, gone, known, running, stored_phase},
        seconds,
        storage::{
            attached, calling_driver, inline_published, limit_in_csi_node, published, resized, staged, unmounted,
            unused,
        },
    },
    script::PodScript,
};

const DRIVER: &str = "d.sim";

/// A node of a cluster with a driver and a claim, `data`.
fn with_driver(seed: u64, driver: DriverScript) -> Play {
    let mut play = Play::clustered(seed);
    let name = driver.name.clone();
    play.driver(driver).claim(&ClaimScript::new("data", &name));
    play
}

fn on_data(name: &str) -> PodScript {
    PodScript::from(name).claim("data")
}

fn csi_storm(csi: CsiFaultRates) -> FaultRates {
    FaultRates { csi, goes_on_without_client: 0.5, ..FaultRates::default() }
}

#[test]
fn claimed_volume_is_mounted_and_all_of_it_ends_with_its_pod() {
    let drivers = [
        DriverScript::from(DRIVER),
        DriverScript::from(DRIVER).without_attach(),
        DriverScript::from(DRIVER).without_stage(),
        DriverScript::from(DRIVER).without_stage().without_attach(),
        DriverScript::from(DRIVER).without_object(),
    ];
    for (seed, driver) in (3_000..).zip(drivers) {
        let mut play = with_driver(seed, driver.clone());
        play.create(on_data("web")).until(&stored_phase("web", "Running")).expect(&published("data", 1));
        if driver.attaches {
            play.expect(&attached("data"));
        }
        play.settle(minutes(1)).expect_starts("web", 1);
        play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).until(&unused("data")).settle(minutes(1));
    }
}

#[test]
fn inline_volume_is_published_for_its_pod_alone() {
    let mut play = with_driver(3_010, DriverScript::from(DRIVER));
    play.create(PodScript::from("web").inline(DRIVER)).until(&stored_phase("web", "Running"));
    play.expect(&inline_published(DRIVER, &["web"])).create(PodScript::from("job").inline(DRIVER));
    play.until(&stored_phase("job", "Running")).expect(&inline_published(DRIVER, &["job", "web"])).settle(minutes(1));
    play.expect(&inline_published(DRIVER, &["job", "web"])).delete("web", Within::ItsOwnTime).until(&forgotten("web"));
    play.expect(&inline_published(DRIVER, &["job"])).delete("job", Within::ItsOwnTime).until(&forgotten("job"));
    play.expect(&inline_published(DRIVER, &[])).settle(minutes(1)).expect_starts("web", 1).expect_starts("job", 1);
}

#[test]
fn block_volume_is_shown_to_its_pods_and_all_of_it_ends_with_them() {
    for (seed, driver) in (3_012..).zip([DriverScript::from(DRIVER), DriverScript::from(DRIVER).without_stage()]) {
        let mut play = Play::clustered(seed);
        play.driver(driver.expanding()).claim(&ClaimScript::new("data", DRIVER).block());
        let on_data = |name: &str| PodScript::from(name).block_claim("data");
        play.create(on_data("a")).until(&stored_phase("a", "Running")).create(on_data("b")).until(&running("b"));
        play.expect(&published("data", 2)).grow_claim("data").crash_agent().start_agent().until(&resized("data", 2));
        play.delete("a", Within::ItsOwnTime).until(&forgotten("a")).expect(&published("data", 1)).settle(minutes(1));
        play.delete("b", Within::ItsOwnTime).until(&forgotten("b")).until(&unused("data")).settle(minutes(1));
        play.expect_starts("a", 1).expect_starts("b", 1);
    }
}

#[test]
fn two_pods_share_a_device_until_the_last_one_ends() {
    let mut play = with_driver(3_020, DriverScript::from(DRIVER));
    play.create(on_data("a")).create(on_data("b"));
    play.until(&stored_phase("a", "Running")).until(&stored_phase("b", "Running")).expect(&published("data", 2));
    play.delete("a", Within::ItsOwnTime).until(&forgotten("a")).wait(minutes(1));
    play.expect(&published("data", 1)).expect(&staged("data")).expect(&attached("data"));
    play.delete("b", Within::ItsOwnTime).until(&unused("data")).settle(minutes(1));
    let stages = play.trace().iter().filter(|line| line.contains("NodeStageVolume") && line.ends_with("-> ok")).count();
    assert_eq!(stages, 1, "both pods need one staging");
}

#[test]
fn exclusive_volume_goes_to_the_next_pod_when_the_first_has_ended() {
    let mut play = Play::clustered(3_030);
    play.driver(DRIVER).claim(&ClaimScript::new("data", DRIVER).exclusive());
    play.create(on_data("a")).until(&running("a")).create(on_data("b")).wait(minutes(2)).expect_starts("b", 0);
    play.crash_agent().start_agent().wait(minutes(1)).expect_starts("b", 0);
    play.delete("a", Within::ItsOwnTime).until(&running("b")).settle(minutes(1)).expect_starts("b", 1);
}

#[test]
fn pod_with_one_volume_too_many_is_rejected_for_another_node() {
    let mut play = Play::clustered(3_035);
    play.driver(DriverScript::from(DRIVER).limited_to(1));
    play.claim(&ClaimScript::new("data", DRIVER)).claim(&ClaimScript::new("more", DRIVER));
    play.create(on_data("a")).until(&running("a")).create(PodScript::from("b").claim("more"));
    play.wait(minutes(2)).expect(&stored_phase("b", "Pending"));
    let reason = "VolumeAttachmentLimitExceeded";
    assert!(play.run_until(seconds(10), &failed_for("b", reason)).unwrap(), "upstream waits 2 min 3 s");
    play.expect(&limit_in_csi_node(DRIVER, 1)).settle(minutes(1)).expect_starts("a", 1).expect_starts("b", 0);
}

#[test]
fn device_is_staged_anew_for_a_pod_with_another_label() {
    for (seed, dies) in [(3_037, false), (3_038, true)] {
        let mut play = with_driver(seed, DriverScript::from(DRIVER).labelled());
        play.claim(&ClaimScript::new("own", DRIVER).exclusive());
        let on_own = |name: &str, level: &str| PodScript::from(name).claim("own").level(level);
        play.create(on_own("a", "s0:c1,c2")).until(&running("a")).create(on_own("b", "s0:c3,c4")).wait(minutes(1));
        if dies {
            play.crash_agent().start_agent().wait(minutes(1));
        }
        play.expect_starts("b", 0).delete("a", Within::ItsOwnTime).until(&running("b")).settle(minutes(1));
        let (label, words) =
            ("system_u:object_r:container_file_t:s0", ["NodeStageVolume vol-own with", "NodeUnstageVolume"]);
        let trace = play.trace();
        let steps = trace.iter().filter(|line| words.iter().any(|word| line.contains(word)));
        let steps: Vec<&str> = steps.filter_map(|line| line.split_once("Volume ")).map(|(_, step)| step).collect();
        assert_eq!(steps.first().copied(), Some(&*format!("vol-own with context=\"{label}:c1,c2\"")));
        assert_eq!(steps.last().copied(), Some(&*format!("vol-own with context=\"{label}:c3,c4\"")));
        assert!(steps.iter().any(|step| step.ends_with("-> ok")), "it is unstaged in between: {steps:?}");
    }
}

#[test]
fn limit_of_a_driver_is_asked_for_as_often_as_its_object_says() {
    let mut play = Play::clustered(3_036);
    play.driver(DriverScript::from(DRIVER).limited_to(4)).until(&limit_in_csi_node(DRIVER, 4));
    play.limit_driver(DRIVER, 7).wait(seconds(30)).expect(&limit_in_csi_node(DRIVER, 4));
    assert!(play.run_until(seconds(40), &limit_in_csi_node(DRIVER, 7)).unwrap(), "the period is a minute");
    play.settle(minutes(1));
}

#[test]
fn pod_waits_for_a_driver_that_registers_late_and_for_a_late_claim() {
    let mut play = Play::clustered(3_040);
    play.installed_driver(DRIVER).claim(&ClaimScript::new("data", DRIVER).unbound());
    play.create(on_data("web")).wait(minutes(3)).expect_starts("web", 0).bind_claim("data").wait(minutes(3));
    play.expect_starts("web", 0).start_driver(DRIVER).until(&running("web")).settle(minutes(1));
    play.expect_starts("web", 1);
}

#[test]
fn registered_driver_starts_waiting_pods_at_once() {
    let mut play = Play::clustered(3_041);
    play.installed_driver(DRIVER).claim(&ClaimScript::new("data", DRIVER)).create(on_data("web")).wait(minutes(10));
    play.start_driver(DRIVER);
    assert!(play.run_until(seconds(10), &running("web")).unwrap(), "it does not wait for a back-off");
    play.settle(minutes(1));
}

#[test]
fn driver_that_is_away_at_a_pods_end_delays_no_other_volume() {
    for (seed, how) in (3_045..).zip([DriverEnd::Stops, DriverEnd::Dies]) {
        let mut play = Play::clustered(seed);
        play.driver(DRIVER).driver("away.sim");
        play.claim(&ClaimScript::new("data", DRIVER)).claim(&ClaimScript::new("more", "away.sim"));
        play.create(on_data("web").claim("more")).until(&running("web"));
        play.restart_driver("away.sim", how, minutes(10)).delete("web", Within::ItsOwnTime);
        assert!(play.run_until(minutes(2), &unmounted("data")).unwrap(), "its own driver is there");
        play.expect(&published("more", 1)).expect(&known("web"));
        play.until(&forgotten("web")).until(&unused("data")).until(&unused("more")).settle(minutes(4));
    }
}

#[test]
fn driver_restarts_in_the_middle_of_every_call() {
    let calls =
        ["NodeStageVolume", "NodePublishVolume", "NodeExpandVolume", "NodeUnpublishVolume", "NodeUnstageVolume"];
    for (number, method) in (0..).zip(calls) {
        for how in [DriverEnd::Stops, DriverEnd::Dies] {
            for forgetful in [false, true] {
                let driver = DriverScript { is_forgetful: forgetful, ..DriverScript::from(DRIVER).expanding() };
                let mut play = with_driver(3_050 + number, driver);
                play.create(on_data("web"));
                if method == "NodeExpandVolume" {
                    play.until(&running("web")).grow_claim("data");
                }
                if method.starts_with("NodeUn") {
                    play.until(&running("web")).delete("web", Within::ItsOwnTime);
                }
                play.until(&calling_driver(method, "vol-data")).restart_driver(DRIVER, how, seconds(20));
                play.wait(minutes(1));
                if method == "NodeExpandVolume" {
                    play.until(&resized("data", 2));
                }
                if !method.starts_with("NodeUn") {
                    play.delete("web", Within::ItsOwnTime);
                }
                play.until(&unused("data")).settle(minutes(4));
            }
        }
    }
}

#[test]
fn driver_restarts_in_the_middle_of_its_registration() {
    for (number, method) in (0..).zip(["GetInfo", "NodeGetInfo", "NotifyRegistrationStatus"]) {
        for (seed, how) in (3_160 + 10 * number..).zip([DriverEnd::Stops, DriverEnd::Dies, DriverEnd::DiesAlone]) {
            let mut play = Play::clustered(seed);
            play.installed_driver(DRIVER).claim(&ClaimScript::new("data", DRIVER)).create(on_data("web"));
            play.wait(seconds(10)).start_driver(DRIVER).until(&calling_driver(method, DRIVER));
            play.restart_driver(DRIVER, how, seconds(20)).until(&stored_phase("web", "Running")).settle(minutes(1));
            play.expect_starts("web", 1).delete("web", Within::ItsOwnTime).until(&unused("data")).settle(minutes(1));
        }
    }
}

/// How often the file system of the claim's volume became larger.
fn growths(play: &Play) -> usize {
    play.trace().iter().filter(|line| line.contains("vol-data grows to")).count()
}

#[test]
fn claim_that_grows_under_running_pods_gets_its_size_once() {
    let mut play = with_driver(3_200, DriverScript::from(DRIVER).expanding());
    play.create(on_data("a"))
        .create(on_data("b"))
        .until(&running("a"))
        .until(&running("b"))
        .expect(&resized("data", 1));
    play.grow_claim("data").expect_not(&resized("data", 2)).until(&resized("data", 2)).settle(minutes(1));
    play.grow_claim("data").crash_agent().start_agent().until(&resized("data", 3)).settle(minutes(1));
    assert_eq!(growths(&play), 2, "once each");
    play.expect_starts("a", 1).expect_starts("b", 1);
}

#[test]
fn claim_that_grew_while_no_pod_had_it_gets_its_size_with_the_next_pod() {
    let mut play = with_driver(3_201, DriverScript::from(DRIVER).expanding());
    play.grow_claim("data").wait(minutes(3)).expect_not(&resized("data", 2)).create(on_data("web"));
    play.until(&running("web")).until(&resized("data", 2)).settle(minutes(1));
    assert_eq!(growths(&play), 1, "once");
}

#[test]
fn expansion_is_left_to_the_controller_of_a_driver_that_cannot_do_it() {
    let mut play = with_driver(3_202, DriverScript::from(DRIVER));
    play.create(on_data("web"))
        .until(&running("web"))
        .grow_claim("data")
        .settle(minutes(3))
        .expect(&resized("data", 2));
    assert!(!play.trace().iter().any(|line| line.contains("NodeExpandVolume")), "it has no such call");
}

#[test]
fn driver_that_registers_again_expands_at_once_what_waited_for_it() {
    let mut play = with_driver(3_203, DriverScript::from(DRIVER).expanding());
    play.create(on_data("web")).until(&running("web")).end_driver(DRIVER, DriverEnd::Stops).grow_claim("data");
    // Its back-off is two minutes by then.
    play.wait(minutes(12)).expect_not(&resized("data", 2)).start_driver(DRIVER).wait(seconds(10));
    play.expect(&resized("data", 2)).settle(minutes(1));
}

#[test]
fn lost_answers_of_an_expansion_leave_the_claim_right() {
    for seed in 3_210..3_222 {
        let mut play = with_driver(seed, DriverScript::from(DRIVER).expanding());
        play.create(on_data("web")).until(&running("web")).grow_claim("data");
        // Errors for good are left to the claim's user.
        let rates = CsiFaultRates { hang: 0.4, late_answer: 0.3, doubled: 0.3, ..CsiFaultRates::default() };
        play.until(&calling_driver("NodeExpandVolume", "vol-data")).storm(csi_storm(rates)).wait(minutes(10));
        play.settle(minutes(6)).expect(&resized("data", 2)).expect_starts("web", 1);
        assert_eq!(growths(&play), 1, "seed {seed}");
    }
}

#[test]
fn agent_killed_at_any_call_of_an_expansion_gives_the_claim_its_size_once() {
    for nth in 0..40 {
        let mut play = Play::before_start(31_000 + nth);
        play.in_cluster().supervised().start_agent().driver(DriverScript::from(DRIVER).expanding());
        play.claim(&ClaimScript::new("data", DRIVER)).create(on_data("web")).until(&stored_phase("web", "Running"));
        play.grow_claim("data").change(|sim| sim.agent_dies_after = Some(nth));
        play.until(&resized("data", 2)).settle(minutes(3)).expect_starts("web", 1);
        assert_eq!(growths(&play), 1, "call {nth}");
    }
}

#[test]
fn calls_made_twice_do_nothing_more() {
    let mut doubled = 0;
    for seed in 3_230..3_242 {
        let mut play = with_driver(seed, DriverScript::from(DRIVER).expanding());
        let rates = CsiFaultRates { doubled: 0.7, hang: 0.2, late_answer: 0.2, ..CsiFaultRates::default() };
        play.storm(csi_storm(rates)).create(on_data("a")).create(on_data("b")).wait(minutes(5));
        play.grow_claim("data").wait(minutes(3)).delete("a", Within::ItsOwnTime).wait(minutes(5)).crash_agent();
        play.start_agent().wait(minutes(3)).settle(minutes(6)).expect_starts("b", 1).expect(&published("data", 1));
        play.expect(&resized("data", 2)).storm(csi_storm(CsiFaultRates { doubled: 1.0, ..CsiFaultRates::default() }));
        play.delete("b", Within::ItsOwnTime).wait(minutes(5)).calm().until(&unused("data")).settle(minutes(1));
        doubled += play.trace().iter().filter(|line| line.ends_with("a call is made twice")).count();
    }
    assert!(doubled > 50, "{doubled} calls");
}

#[test]
fn restarted_driver_serves_the_next_pod_of_a_staged_device() {
    for (seed, how) in [(3_060, DriverEnd::Stops), (3_061, DriverEnd::Dies)] {
        let mut play = with_driver(seed, DriverScript::from(DRIVER).forgetful());
        play.create(on_data("a")).until(&running("a")).restart_driver(DRIVER, how, seconds(10)).wait(minutes(2));
        play.create(on_data("b")).until(&running("b")).settle(minutes(1)).expect_starts("a", 1);
    }
}

#[test]
fn agent_killed_at_any_call_of_a_pod_with_a_csi_volume_starts_it_once() {
    for nth in 0..150 {
        let mut play = Play::before_start(30_000 + nth);
        play.in_cluster().supervised().start_agent().driver(DRIVER).claim(&ClaimScript::new("data", DRIVER));
        play.wait(seconds(5)).change(|sim| sim.agent_dies_after = Some(nth));
        play.create(on_data("web")).until(&stored_phase("web", "Running")).wait(seconds(2));
        play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).until(&unused("data")).settle(minutes(3));
        let cut_off = play.trace().iter().any(|line| line.ends_with("its start was cut off"));
        let starts = play.look(|sim| predicates::starts(sim, "web"));
        assert!(
            (1..=1 + u32::from(cut_off)).contains(&starts),
            "{}",
            play.failure("expect", &format!("{starts} starts"))
        );
        play.expect_gone("web");
    }
}

#[test]
fn volume_of_a_pod_that_is_deleted_while_it_is_staged_is_unstaged() {
    for (number, method) in (0..).zip(["NodeStageVolume", "NodePublishVolume"]) {
        for seed in 0..4 {
            let mut play = with_driver(3_070 + 10 * number + seed, DriverScript::from(DRIVER));
            // A driver registers within seconds if its answers do.
            play.wait(seconds(5));
            play.storm(csi_storm(CsiFaultRates { hang: 0.3, late_answer: 0.5, ..CsiFaultRates::default() }));
            play.create(on_data("web")).until(&calling_driver(method, "vol-data"));
            play.delete("web", Within::ItsOwnTime).wait(minutes(1)).calm();
            play.until(&forgotten("web")).until(&unused("data")).settle(minutes(6));
        }
    }
}

#[test]
fn pod_deleted_before_its_volume_is_attached_leaves_no_attachment() {
    for seed in 3_090..3_094 {
        let mut play = with_driver(seed, DriverScript::from(DRIVER));
        play.storm(csi_storm(CsiFaultRates { attach_late: 1.0, ..CsiFaultRates::default() }));
        play.create(on_data("web")).wait(seconds(3)).expect_starts("web", 0);
        play.delete("web", Within::ItsOwnTime).until(&forgotten("web")).settle(minutes(6)).expect(&unused("data"));
    }
}

#[test]
fn device_is_not_detached_under_the_next_pod() {
    for seed in 3_100..3_120 {
        let mut play = with_driver(seed, DriverScript::from(DRIVER));
        let late = ApiFaultRates { event_late: 0.5, ..ApiFaultRates::default() };
        play.storm(FaultRates { api: late, ..csi_storm(CsiFaultRates::default()) });
        for number in 1..6 {
            play.create(on_data("web").version(number)).until(&running("web"));
            play.delete("web", Within::Secs(1)).until(&gone("web")).until(&forgotten("web"));
            play.wait(seconds(seed % 4));
        }
        play.settle(minutes(3)).expect(&unused("data"));
    }
}

#[test]
fn lost_answers_of_a_driver_leave_nothing_mounted() {
    for seed in 3_120..3_128 {
        let mut play = with_driver(seed, DriverScript::from(DRIVER));
        let rates = CsiFaultRates { done_but_error: 0.4, error_before: 0.2, hang: 0.1, ..CsiFaultRates::default() };
        play.storm(csi_storm(rates)).create(on_data("a")).create(on_data("b")).wait(minutes(10));
        play.delete("a", Within::ItsOwnTime).wait(minutes(5)).settle(minutes(6)).expect_starts("b", 1);
        play.delete("b", Within::ItsOwnTime).until(&unused("data")).settle(minutes(1));
    }
}

#[test]
fn volumes_survive_an_api_server_that_is_away() {
    let mut play = with_driver(3_130, DriverScript::from(DRIVER));
    play.create(on_data("web")).until(&attached("data")).partition().wait(minutes(3)).heal();
    play.until(&running("web")).partition().crash_agent().start_agent().wait(minutes(3)).expect_starts("web", 1);
    play.expect(&known("web")).heal().settle(minutes(3)).expect_starts("web", 1);
}

#[test]
fn rebooted_node_mounts_its_volumes_again() {
    let mut play = with_driver(3_140, DriverScript::from(DRIVER));
    play.create(on_data("web")).until(&running("web")).reboot().start_agent().until(&running("web"));
    play.settle(minutes(3)).delete("web", Within::ItsOwnTime).until(&unused("data")).settle(minutes(1));
}

/// The rule that breaks if the controller does not look at `volumesInUse`.
#[test]
fn controller_that_ignores_volumes_in_use_breaks_the_rule() {
    for (is_reckless, expected) in [(true, Some("nothing is detached while it is staged")), (false, None)] {
        let mut play = with_driver(3_150, DriverScript::from(DRIVER));
        play.create(on_data("web")).until(&running("web")).change(|sim| sim.csi.is_reckless = is_reckless);
        play.partition().force_delete("web");
        let failure = play.run_for(minutes(2)).err();
        assert_eq!(failure.map(|failure| failure.rule).as_deref(), expected);
    }
}
