//! Random events of containers, the runtime and the node.

use std::time::Duration;

use fastrand::Rng;

use super::NAMES;
use crate::{
    faults::CallOutcome,
    play::{Play, predicates::node_name_of},
    runtime::store::Ailment,
    simulation::SimState,
};

/// One random event.
pub(super) fn happen(play: &mut Play, rng: &mut Rng) {
    match rng.u32(0..18) {
        0..3 => ail(play, rng, Ailment::NotReady),
        3..6 => ail(play, rng, Ailment::ListsFail),
        6..8 => ail(play, rng, Ailment::StatusLate),
        8..11 => make_some_unkillable(play, rng),
        11..13 => spoil_some_pod(play, rng),
        13..15 => drop(play.reboot()),
        15..17 => lose_track_of_some(play, rng),
        _ => drop(play.change(SimState::lose_runtime_state)),
    }
}

fn ail(play: &mut Play, rng: &mut Rng, ailment: Ailment) {
    play.runtime_ails_for(ailment, Duration::from_millis(rng.u64(1_000..400_000)));
}

fn make_some_unkillable(play: &mut Play, rng: &mut Rng) {
    let pick = rng.usize(..);
    play.change(|sim| {
        if let Some(id) = some_running(sim, pick) {
            sim.make_unkillable(&id);
        }
    });
}

fn lose_track_of_some(play: &mut Play, rng: &mut Rng) {
    let pick = rng.usize(..);
    play.change(|sim| {
        if let Some(id) = some_running(sim, pick) {
            sim.lose_track_of(&id);
        }
    });
}

/// From now on every call that changes something for the pod fails, or hangs.
fn spoil_some_pod(play: &mut Play, rng: &mut Rng) {
    let name = node_name_of(NAMES[rng.usize(..NAMES.len())]);
    let outcome = if rng.bool() { CallOutcome::ErrorBefore } else { CallOutcome::HangBefore };
    play.change(|sim| {
        sim.log("world", format!("calls for {name}: {outcome:?}"));
        sim.runtime.bad_pods.insert(name, outcome);
    });
}

pub(super) fn end_some_container(play: &mut Play, rng: &mut Rng) {
    let pick = rng.usize(..);
    let (code, reason) = if rng.bool() { (1, "Error") } else { (137, "OOMKilled") };
    play.change(|sim| {
        if let Some(id) = some_running(sim, pick) {
            sim.exit_container(&id, code, reason);
        }
    });
}

pub(super) fn end_some_sandbox(play: &mut Play, rng: &mut Rng) {
    let pick = rng.usize(..);
    play.change(|sim| {
        let ready = sim.runtime.picture.sandboxes.values().filter(|sandbox| sandbox.ready);
        let ready: Vec<String> = ready.map(|sandbox| sandbox.id.clone()).collect();
        if !ready.is_empty() {
            sim.kill_sandbox(&ready[pick % ready.len()]);
        }
    });
}

pub(super) fn some_running(sim: &SimState, pick: usize) -> Option<String> {
    let running: Vec<&str> = sim.runtime.running().map(|found| found.id.as_str()).collect();
    (!running.is_empty()).then(|| running[pick % running.len()].to_owned())
}
