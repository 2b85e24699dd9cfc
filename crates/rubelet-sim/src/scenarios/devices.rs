//! A device that does not answer: pods that use it wait, and no other pod does.

use crate::{
    csi::{driver::Device, objects::ClaimScript},
    play::{
        Play, Within, minutes,
        predicates::{Predicate, is_called, known, phase, running, stored_phase},
        seconds,
    },
    script::PodScript,
    simulation::SimState,
};

const NFS: &str = "/mnt/nfs";

fn on_nfs(name: &str) -> PodScript {
    PodScript::from(name).host_path("/mnt/nfs/data")
}

fn stopped(pod: &str) -> Predicate {
    let name = pod.to_owned();
    Predicate::new(format!("{pod} stopped"), move |sim| {
        let picture = &sim.runtime.picture;
        !picture.sandboxes.values().any(|it| it.ready && is_called(&it.identity().name, &name))
    })
}

#[track_caller]
fn holds_within(play: &mut Play, secs: u64, predicate: &Predicate) {
    match play.run_until(seconds(secs), predicate) {
        Ok(held) => assert!(held, "{}", play.failure("within", &predicate.name)),
        Err(failure) => panic!("{failure}"),
    }
}

/// The rule that breaks if all pods' files share their threads.
#[test]
fn shared_lane_for_all_devices_breaks_the_rule() {
    for (is_one_lane, expected) in [(true, Some("a hung device delays only the pods that use it")), (false, None)] {
        let mut play = Play::seeded(150);
        play.change(|sim| sim.devices.is_one_lane = is_one_lane).hang_device_for(NFS, minutes(5));
        play.apply(on_nfs("data")).wait(seconds(15)).apply("web");
        let failure = play.run_for(minutes(3)).err();
        assert_eq!(failure.map(|failure| failure.rule).as_deref(), expected);
    }
}

#[test]
fn other_pods_start_and_stop_while_a_device_hangs() {
    let mut play = Play::seeded(151);
    play.apply("old").until(&running("old")).hang_device_for(NFS, minutes(10));
    play.apply(on_nfs("data")).apply(on_nfs("more").sub_path("part")).wait(seconds(30)).apply("web").remove("old");
    holds_within(&mut play, 5, &phase("web", "Running"));
    holds_within(&mut play, 5, &stopped("old"));
    play.apply(PodScript::from("disk").host_path("/mnt/disk/data").sub_path("part"));
    holds_within(&mut play, 5, &running("disk"));
    play.wait(minutes(8)).expect_starts("data", 0).expect_starts("more", 0);
    // The back-off of a volume is two minutes by now; the answer ends it.
    play.change(SimState::bring_devices_back);
    holds_within(&mut play, 5, &running("data"));
    holds_within(&mut play, 20, &running("more"));
    play.settle(minutes(1));
}

#[test]
fn statuses_are_reported_while_a_device_hangs() {
    let mut play = Play::before_start(152);
    play.in_cluster()
        .start_agent()
        .create("old")
        .until(&stored_phase("old", "Running"))
        .hang_device_for(NFS, minutes(8));
    play.create(on_nfs("data")).wait(seconds(30)).create(PodScript::pod("job").container("app", "exit 1 after 2s"));
    holds_within(&mut play, 5, &stored_phase("job", "Running"));
    play.wait(minutes(6)).settle(minutes(6)).expect_running("data");
}

#[test]
fn running_container_on_hung_device_is_restarted_after_its_return() {
    for sub_path in [None, Some("part")] {
        let mut play = Play::seeded(153);
        let script = on_nfs("data");
        play.apply(sub_path.into_iter().fold(script, PodScript::sub_path)).until(&running("data"));
        // Less than the deadline of the start that waits for it.
        play.hang_device_for(NFS, seconds(230))
            .exit_container("data", "app", 1)
            .wait(minutes(3))
            .expect_starts("data", 1);
        play.wait(minutes(1));
        holds_within(&mut play, 300, &running("data"));
        play.settle(minutes(1)).expect_starts("data", 2);
    }
}

/// The thread of a late call mounts a sub path of a pod that is gone by then.
#[test]
fn mount_by_a_late_call_is_removed_with_its_pod() {
    for seed in 154..158 {
        let mut play = Play::seeded(seed);
        play.apply(on_nfs("data").sub_path("part")).until(&running("data")).hang_device_for(NFS, minutes(4));
        play.exit_container("data", "app", 1).wait(seconds(20)).remove("data").wait(minutes(4)).settle(minutes(6));
    }
}

#[test]
fn pod_on_hung_device_is_removed_after_its_return() {
    let mut play = Play::before_start(158);
    play.in_cluster().start_agent().create(on_nfs("data").sub_path("part")).until(&running("data"));
    play.hang_device_for(NFS, minutes(4)).delete("data", Within::ItsOwnTime).wait(minutes(3));
    play.expect(&stopped("data")).expect(&known("data")).settle(minutes(6));
}

#[test]
fn csi_volume_that_hangs_delays_only_the_pods_that_use_it() {
    const DRIVER: &str = "d.sim";
    let on_claim = |name: &str, claim: &str| PodScript::from(name).claim(claim);
    let point = Device::new(DRIVER, "vol-data").content();
    let point = point.to_str().expect("the name is text");
    let mut play = Play::clustered(159);
    play.driver(DRIVER).claim(&ClaimScript::new("data", DRIVER)).claim(&ClaimScript::new("more", DRIVER));
    play.create(on_claim("old", "data")).create(on_claim("busy", "data"));
    play.until(&stored_phase("old", "Running"))
        .until(&stored_phase("busy", "Running"))
        .hang_device_for(point, minutes(8));
    play.create(on_claim("new", "data")).exit_container("busy", "app", 1).wait(seconds(30));
    play.create(on_claim("web", "more"));
    holds_within(&mut play, 15, &stored_phase("web", "Running"));
    play.delete("web", Within::ItsOwnTime).delete("old", Within::ItsOwnTime);
    holds_within(&mut play, 10, &stopped("web"));
    holds_within(&mut play, 10, &stopped("old"));
    play.wait(minutes(3)).expect_starts("new", 0).expect_starts("busy", 1).wait(minutes(4));
    holds_within(&mut play, 400, &running("new"));
    holds_within(&mut play, 400, &running("busy"));
    play.settle(minutes(6)).expect_gone("web").expect_gone("old");
}
