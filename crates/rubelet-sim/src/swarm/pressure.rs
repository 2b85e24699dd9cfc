//! Random pressure: memory, the image file system, and volumes with a limit.

use std::{path::Path, time::Duration};

use fastrand::Rng;

use super::mishaps::some_running;
use crate::{
    memory::THRESHOLD_BYTES,
    play::Play,
    runtime::store::IMAGE_BYTES,
    simulation::{ScheduledEvent, SimState},
};

/// One random event.
pub(super) fn happen(play: &mut Play, rng: &mut Rng) {
    match rng.u32(0..6) {
        0..3 => press_memory(play, rng),
        3 => fill_image_fs(play, rng),
        _ => fill_some_volume(play, rng),
    }
}

/// A container, or two, use memory for a while: up to the threshold of the node, or beyond it.
fn press_memory(play: &mut Play, rng: &mut Rng) {
    let count: u64 = [1, 1, 1, 2][rng.usize(..4)];
    let picks: Vec<usize> = (0..count).map(|_| rng.usize(..)).collect();
    let margin = rng.u64(0..64) << 20;
    let is_over = rng.u32(0..3) > 0;
    // Static pods are critical: others are evicted for them.
    let may_be_static = rng.u32(0..6) == 0;
    let time = Duration::from_millis(rng.u64(1_000..90_000));
    play.change(|sim| {
        let left = sim.memory.available(&sim.runtime.picture).saturating_sub(THRESHOLD_BYTES);
        let bytes = if is_over { left + margin + (1 << 20) } else { left.saturating_sub(margin) };
        for pick in picks {
            let chosen = if may_be_static { some_running(sim, pick) } else { some_running_of_the_api(sim, pick) };
            let Some(id) = chosen else { continue };
            sim.log("world", format!("{id} uses {} MiB more", (bytes / count) >> 20));
            sim.memory.hogs.insert(id.clone(), bytes / count);
            sim.schedule_in(time, ScheduledEvent::MemoryFreed(id));
        }
    });
}

/// Others than images use the file system of images for a while.
fn fill_image_fs(play: &mut Play, rng: &mut Rng) {
    let bytes = rng.u64(1..4) * IMAGE_BYTES;
    let time = Duration::from_millis(rng.u64(1_000..120_000));
    play.change(|sim| {
        sim.log("world", format!("{} MiB of the image file system are used by others", bytes >> 20));
        sim.runtime.image_fs_others = bytes;
        sim.schedule_in(time, ScheduledEvent::ImageFsHasRoom);
    });
}

/// A container writes to the volume of its pod: less than a limit, or more.
fn fill_some_volume(play: &mut Play, rng: &mut Rng) {
    let pick = rng.usize(..);
    let bytes = if rng.bool() { 40 << 10 } else { 80 << 10 };
    play.change(|sim| {
        let limited = |uid: &str| sim.rules.script_of(uid).is_some_and(|script| script.size_limit.is_some());
        let uids: Vec<String> =
            sim.runtime.running().map(|found| found.pod.uid.clone()).filter(|uid| limited(uid)).collect();
        if !uids.is_empty() {
            sim.fill_volume(&uids[pick % uids.len()], bytes);
        }
    });
}

fn some_running_of_the_api(sim: &SimState, pick: usize) -> Option<String> {
    let sandboxes = &sim.runtime.picture.sandboxes;
    let is_of_the_api = |sandbox: &String| sandboxes.get(sandbox).is_some_and(|sandbox| sandbox.is_of_the_api());
    let running = sim.runtime.running().filter(|found| is_of_the_api(&found.sandbox));
    let running: Vec<&str> = running.map(|found| found.id.as_str()).collect();
    (!running.is_empty()).then(|| running[pick % running.len()].to_owned())
}

impl SimState {
    /// The pod's emptyDir volume holds this much, if it is there and the disk has room.
    pub(crate) fn fill_volume(&mut self, uid: &str, bytes: usize) {
        let path = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/scratch/file");
        let result = self.disk.write_file(Path::new(&path), &vec![b'x'; bytes], 0o644);
        self.log("world", format!("the volume of {uid} holds {bytes} bytes: {result:?}"));
    }
}
