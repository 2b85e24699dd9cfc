//! Random actions in the API.
//!
//! Owns: the actions of users, controllers and the API server itself. Its pods have separate names.

use std::time::Duration;

use fastrand::Rng;
use serde_json::json;

use super::{
    IMAGES, NAMES, pressure,
    scripts::{GATE, script},
    storage,
};
use crate::{
    faults::ApiFaultRates,
    play::{
        Play, Within,
        predicates::{node_name_of, stored},
    },
};

const API_NAMES: [&str; 5] = ["asp", "bat", "cod", "doe", "elk"];

/// One random action.
pub(super) fn happen(play: &mut Play, rng: &mut Rng, version: u32) {
    let name = API_NAMES[rng.usize(..API_NAMES.len())];
    let is_there = play.look(|sim| stored(sim, name).is_some());
    match rng.u32(0..146) {
        0..35 if !is_there => {
            let script = script(rng, name, version);
            let script = storage::with_volumes(play, rng, script);
            play.create(script)
        }
        0..25 if is_there => play.delete(name, within(rng)),
        35..45 => {
            let script = script(rng, name, version);
            let script = storage::with_volumes(play, rng, script);
            play.recreate(script)
        }
        45..50 => play.force_delete(name),
        50..60 => lie(play, rng, name),
        60..65 => play.label(name, &version.to_string()),
        65..75 => play.partition_for(Duration::from_millis(rng.u64(100..180_000))),
        75..80 => play.silence_for(Duration::from_millis(rng.u64(100..120_000))),
        80..86 => play.restart_api(),
        86..92 => play.change(|sim| sim.api.forget_history()),
        92..95 => play.delete(&node_name_of(NAMES[rng.usize(..NAMES.len())]), within(rng)),
        95..97 => play.lag(),
        97..99 => play.fail_over().catch_up_in(Duration::from_millis(rng.u64(1_000..180_000))),
        99..100 => play.expire_credentials_for(Duration::from_millis(rng.u64(1_000..120_000))),
        100..106 if play.wanted().get(name).is_some_and(|script| !script.gates.is_empty()) => {
            let status = if rng.u32(0..4) == 0 { "False" } else { "True" };
            play.overwrite_status(name, &json!({ "conditions": [{ "type": GATE, "status": status }] }))
        }
        106..116 if is_there && play.wanted().contains_key(name) => edit(play, rng, name, version),
        116..128 => {
            pressure::happen(play, rng);
            play
        }
        128..146 => {
            storage::happen(play, rng);
            play
        }
        _ => play,
    };
}

/// A user changes a pod that is there.
fn edit<'a>(play: &'a mut Play, rng: &mut Rng, name: &str, version: u32) -> &'a mut Play {
    match rng.u32(0..8) {
        0..4 => {
            let containers: Vec<_> =
                play.wanted()[name].containers.iter().map(|container| container.name.clone()).collect();
            play.edit_image(name, &containers[rng.usize(..containers.len())], IMAGES[rng.usize(..2)])
        }
        4 => play.set_deadline(name, rng.i64(1..300)),
        _ => {
            let program = ["run", "exit 0 after 3s", "exit 1 after 1s", "stubborn"][rng.usize(..4)];
            play.debug(name, &format!("debug{version}"), program)
        }
    }
}

fn within(rng: &mut Rng) -> Within {
    match rng.u32(0..3) {
        0 => Within::ItsOwnTime,
        1 => Within::Secs(rng.i64(1..60)),
        _ => Within::Secs(1),
    }
}

/// A foreign write of a wrong status.
fn lie<'a>(play: &'a mut Play, rng: &mut Rng, name: &str) -> &'a mut Play {
    let lies = [
        json!({ "phase": "Pending" }),
        json!({ "conditions": [{ "type": "Ready", "status": "False", "reason": "Lie" }] }),
        json!({ "containerStatuses": [] }),
        json!({ "podIP": null, "message": "nothing is so" }),
    ];
    let target = if rng.bool() { name.to_owned() } else { node_name_of(NAMES[rng.usize(..NAMES.len())]) };
    play.overwrite_status(&target, &lies[rng.usize(..lies.len())])
}

/// A few faults, with strengths from the seed.
pub(super) fn rates(rng: &mut Rng) -> ApiFaultRates {
    let mut some = |most: f64| if rng.u32(0..3) == 0 { rng.f64() * most } else { 0.0 };
    ApiFaultRates {
        refused: some(0.3),
        conflict: some(0.3),
        throttled: some(0.2),
        server_error: some(0.3),
        rejected: some(0.1),
        done_but_error: some(0.3),
        hang: some(0.1),
        late_answer: some(0.2),
        watch_cut: some(0.2),
        gone: some(0.1),
        event_doubled: some(0.5),
        event_late: some(0.3),
    }
}
