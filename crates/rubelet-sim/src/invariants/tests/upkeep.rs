//! Rules about logs and images.

use std::path::{Path, PathBuf};

use super::*;
use crate::runtime::store::image_id;

const LOG: &str = "/logs/app/0.log";

/// A container with a log, which is open.
fn writing(sim: &mut SimState) -> String {
    let home = sandbox(sim, "u1", 0);
    let id = start(sim, &home, "app", 0);
    sim.disk.make_dir(Path::new("/logs/app"), 0o755).unwrap();
    sim.disk.write_file(Path::new(LOG), b"", 0o640).unwrap();
    let container = Arc::make_mut(sim.runtime.picture.containers.get_mut(&id).unwrap());
    container.log_path = PathBuf::from(LOG);
    sim.open_log(&id, Path::new(LOG));
    id
}

fn rotate(sim: &mut SimState, name: &str) {
    sim.rename_log(Path::new(LOG), &Path::new(LOG).with_file_name(name)).unwrap();
}

#[test]
fn rotated_log_must_have_every_line_once() {
    let script = PodScript::pod("web").container("app", "run");
    let lost = ["no line of a log is lost or doubled"];
    let broken = |steps: fn(&mut SimState, &str)| {
        broken_by(&script, |sim| {
            let id = writing(sim);
            pass(sim, 60);
            rotate(sim, "0.log.20260601-120000");
            steps(sim, &id);
            pass(sim, 60);
            sim.check_log(Path::new(LOG));
        })
    };
    let reopen = |sim: &mut SimState, id: &str| drop(sim.perform(&Act::ReopenLog(id.to_owned())));
    assert!(broken(reopen).is_empty());
    let compressed_while_open = |sim: &mut SimState, _id: &str| {
        sim.compress_log(Path::new("/logs/app/0.log.20260601-120000"), Path::new("/logs/app/0.log.20260601-120000.gz"))
            .unwrap();
    };
    assert!(broken(compressed_while_open).starts_with(&lost));
    let wrong_order = |sim: &mut SimState, id: &str| {
        sim.perform(&Act::ReopenLog(id.to_owned())).unwrap();
        pass(sim, 60);
        rotate(sim, "0.log.20260601-110000");
    };
    assert!(broken(wrong_order).starts_with(&lost));
}

#[test]
fn image_of_a_container_must_not_be_deleted() {
    let script = PodScript::pod("web").container("app", "run");
    let broken = broken_by(&script, |sim| {
        let home = sandbox(sim, "u1", 0);
        start(sim, &home, "app", 0);
        sim.perform(&Act::RemoveImage(image_id("reg.test/unknown:v1"))).unwrap();
        assert!(sim.rules.violations.is_empty());
        sim.perform(&Act::RemoveImage(image_id(IMAGE))).unwrap();
    });
    assert_eq!(broken, ["no image in use is deleted"]);
}
