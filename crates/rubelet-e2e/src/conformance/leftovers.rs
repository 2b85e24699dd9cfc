//! What the suite's hostpath drivers leave on this machine.
//!
//! Owns: the directory of their volumes, and loop devices over files in it, which a driver that was ended early does not detach.

use std::{collections::BTreeSet, fs, path::Path};

use rubelet_testbed::command::{SHORT, command, output};

/// As the suite's manifests have it.
const DATA: &str = "/var/lib/csi-hostpath-data";
/// The drivers' names, and so the directories of their volumes, begin with it.
const DRIVER: &str = "/csi-hostpath-";

/// Removes both at the end of a run; what was there before stays.
#[derive(Debug)]
pub struct Leftovers {
    is_ours: bool,
    loops_before: BTreeSet<String>,
}

impl Leftovers {
    pub fn of_this_run() -> Self {
        Leftovers { is_ours: !Path::new(DATA).exists(), loops_before: loops().map(|(name, _)| name).collect() }
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        for (name, file) in loops() {
            if self.loops_before.contains(&name) || !file.contains(DRIVER) {
                continue;
            }
            let device = format!("/dev/{name}");
            if let Err(err) = output(&mut command("losetup", ["--detach", &device]), SHORT) {
                eprintln!("{device} stays attached to {file}: {err:#}");
            }
        }
        if self.is_ours
            && let Err(err) = fs::remove_dir_all(DATA)
            && err.kind() != std::io::ErrorKind::NotFound
        {
            eprintln!("{DATA} is not removed: {err}");
        }
    }
}

/// The attached loop devices with their files, as the kernel names them.
fn loops() -> impl Iterator<Item = (String, String)> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices.filter_map(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        Some((device.file_name().into_string().ok()?, file.trim_end().to_owned()))
    })
}
