//! Logs grow and are rotated. The rule about their lines is checked at every rotation.

use crate::{
    faults::FaultRates,
    play::{
        Play, minutes,
        predicates::{calling, running},
        seconds,
    },
    script::PodScript,
};

/// The files of the only container's log: the oldest first, the live one last.
fn log_files(play: &Play) -> Vec<String> {
    play.look(|sim| {
        let container = sim.runtime.picture.containers.values().next().expect("a container");
        let files = sim.disk.files_named(&container.log_path);
        files.into_iter().map(|(path, _)| path.extension().unwrap_or_default().to_string_lossy().into_owned()).collect()
    })
}

#[test]
fn full_logs_are_rotated_and_the_newest_are_kept() {
    let mut play = Play::seeded(1);
    play.apply(PodScript::pod("web").container("app", "run")).until(&running("web"));
    assert_eq!(log_files(&play), ["log"]);
    play.wait(minutes(10)).settle(minutes(2)).expect_running("web");
    let files = log_files(&play);
    let [compressed, rotated, live] = files.as_slice() else { panic!("three files are kept: {files:?}") };
    assert!(compressed == "gz" && rotated.len() == "20260601-120000".len() && live == "log", "{files:?}");
}

#[test]
fn agent_killed_during_a_rotation_loses_no_line() {
    for seed in 0..16 {
        let mut play = Play::seeded(seed);
        play.apply(PodScript::pod("web").container("app", "run")).until(&running("web"));
        for _ in 0..4 {
            play.until(&calling("ReopenContainerLog", "web")).crash_agent().wait(seconds(seed)).start_agent();
        }
        play.wait(minutes(5)).settle(minutes(2)).expect_running("web");
        assert_eq!(log_files(&play).len(), 3);
    }
}

/// The only container suddenly prints more than a log may have.
fn burst(play: &mut Play) {
    play.change(|sim| {
        let id = sim.runtime.picture.containers.keys().next().expect("a container").clone();
        sim.print_burst(&id, 100);
    });
}

#[test]
fn log_that_suddenly_grows_is_rotated_within_two_seconds() {
    for seed in 0..16 {
        let mut play = Play::seeded(seed);
        play.apply(PodScript::pod("web").container("app", "run")).until(&running("web"));
        play.wait(seconds(3 + seed));
        burst(&mut play);
        play.wait(seconds(2));
        assert_eq!(log_files(&play).len(), 2, "seed {seed}");
    }
}

#[test]
fn log_that_suddenly_grows_is_rotated_at_the_interval_without_hints() {
    let mut play = Play::seeded(1);
    play.storm(FaultRates { hint_lost: 1.0, ..FaultRates::default() });
    play.apply(PodScript::pod("web").container("app", "run")).wait(seconds(65));
    play.expect_running("web");
    burst(&mut play);
    play.wait(seconds(12));
    assert_eq!(log_files(&play).len(), 2);
}

#[test]
fn rotation_on_a_full_disk_is_made_up_for() {
    let mut play = Play::seeded(2);
    play.apply(PodScript::pod("web").container("app", "run")).until(&running("web"));
    play.wait(minutes(1)).disk_full_for(minutes(5)).wait(minutes(5)).settle(minutes(2)).expect_running("web");
    assert_eq!(log_files(&play).len(), 3);
}
