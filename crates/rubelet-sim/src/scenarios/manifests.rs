//! Valid, invalid and half-written manifests.

use std::path::Path;

use crate::{
    play::{
        MANIFESTS, Play, minutes,
        predicates::{gone, running},
    },
    script::PodScript,
};

#[test]
fn half_written_manifest_keeps_pods_until_it_is_complete() {
    let mut play = Play::seeded(110);
    play.apply("web").until(&running("web"));
    let next = PodScript::from("web").version(2);
    let text = next.manifest().to_string();
    play.write_manifest("web.yaml", &text.as_bytes()[..text.len() / 2]).wait(minutes(2)).expect(&running("web"));
    play.expect_starts("web", 1).apply(next).settle(minutes(2)).expect_starts("web", 2);
}

#[test]
fn files_that_are_no_manifests_disturb_no_pod() {
    let mut play = Play::seeded(111);
    play.write_manifest("a-invalid.yaml", b"{{{").write_manifest(".hidden.yaml", b"junk");
    play.write_manifest("b-huge.yaml", &vec![b' '; 20 << 20]).write_manifest("c-list.yaml", b"[1, 2, 3]");
    play.change(|sim| {
        let dir = Path::new(MANIFESTS);
        sim.disk.make_fifo(&dir.join("d-fifo.yaml")).expect("there is room");
        sim.disk.make_dir(&dir.join("e-dir.yaml"), 0o755).expect("there is room");
        sim.disk.make_link(Path::new("/nowhere"), &dir.join("f-dangling.yaml")).expect("there is room");
    });
    play.apply("web").settle(minutes(2)).expect_running("web").expect_starts("web", 1);
}

#[test]
fn a_directory_that_comes_later_is_found() {
    let mut play = Play::before_start(112);
    play.change(|sim| sim.disk.remove_tree(Path::new(MANIFESTS)).expect("nothing is mounted there"));
    play.start_agent().wait(minutes(1));
    play.change(|sim| sim.disk.make_dir(Path::new(MANIFESTS), 0o755).expect("there is room"));
    play.apply("web").settle(minutes(2)).expect_running("web");
}

#[test]
fn a_symlinked_manifest_is_a_manifest() {
    let mut play = Play::seeded(113);
    let script = PodScript::from("web");
    let text = script.manifest().to_string();
    play.change(|sim| {
        sim.rules.learn(&script);
        sim.disk.make_dir(Path::new("/srv"), 0o755).expect("there is room");
        sim.disk.write_file(Path::new("/srv/web"), text.as_bytes(), 0o644).expect("there is room");
        sim.disk.make_link(Path::new("/srv/web"), &Path::new(MANIFESTS).join("web.yaml")).expect("there is room");
    });
    play.until(&running("web")).remove("web").settle(minutes(2)).expect_gone("web");
}

#[test]
fn manifest_change_without_hint_is_found_by_polling() {
    let mut play = Play::seeded(114);
    play.storm(crate::faults::FaultRates { hint_lost: 1.0, ..Default::default() }).apply("web").calm();
    play.until(&running("web")).settle(minutes(1));
}

#[test]
fn pods_from_a_url_stay_while_its_server_is_away() {
    let mut play = Play::before_start(115);
    play.with_url_source().serve(&[PodScript::from("web"), PodScript::from("db")]).start_agent();
    play.until(&running("web")).until(&running("db"));
    play.change(|sim| sim.pages.clear()).wait(minutes(5));
    play.expect(&running("web")).expect_starts("web", 1).serve(&[PodScript::from("db")]).forget("web");
    play.until(&gone("web")).settle(minutes(2)).expect_running("db").expect_starts("db", 1);
}

#[test]
fn two_manifests_with_one_pod_name_run_one_pod() {
    let mut play = Play::seeded(116);
    play.apply("web").until(&running("web"));
    let twin = PodScript::from("web").version(2).manifest().to_string();
    play.write_manifest("zz-twin.yaml", twin.as_bytes()).wait(minutes(2)).settle(minutes(2)).expect_starts("web", 1);
}
