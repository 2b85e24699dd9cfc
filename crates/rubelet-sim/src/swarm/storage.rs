//! Random storage: drivers, claims, pods with volumes, and drivers that end.

use std::time::Duration;

use fastrand::Rng;
use rubelet_csi::NodeCapabilities;

use crate::{
    csi::{
        driver::{DriverEnd, DriverScript},
        objects::ClaimScript,
    },
    faults::CsiFaultRates,
    play::{Play, minutes},
    script::PodScript,
    simulation::ScheduledEvent,
};

const DRIVERS: [&str; 2] = ["disk.sim", "share.sim"];
const CLAIMS: [&str; 4] = ["cl0", "cl1", "cl2", "cl3"];
const LEVELS: [&str; 2] = ["s0:c1,c2", "s0:c3,c4"];

/// Two drivers of any kind, and claims of their volumes. Half of the nodes of clusters have none.
pub(super) fn set_up(play: &mut Play, rng: &mut Rng) {
    if rng.bool() {
        return;
    }
    for name in DRIVERS {
        let capabilities =
            NodeCapabilities { stage_unstage: rng.u32(0..4) > 0, expand: rng.bool(), ..NodeCapabilities::default() };
        let driver = DriverScript {
            name: name.to_owned(),
            capabilities,
            attaches: rng.u32(0..3) > 0,
            has_object: rng.u32(0..6) > 0,
            is_forgetful: rng.u32(0..4) == 0,
            takes_label: rng.bool(),
            limit: (rng.u32(0..3) == 0).then(|| rng.usize(1..4)),
        };
        play.installed_driver(driver);
        if rng.u32(0..3) > 0 {
            play.start_driver(name);
        } else {
            let wait = Duration::from_millis(rng.u64(100..300_000));
            play.change(|sim| sim.schedule_in(wait, ScheduledEvent::DriverReturns(name.to_owned())));
        }
    }
    for name in CLAIMS {
        let mut claim = ClaimScript::new(name, DRIVERS[rng.usize(..2)]);
        claim.mode = ["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"][rng.usize(..3)];
        claim.is_block = rng.u32(0..4) == 0;
        claim.is_bound = rng.u32(0..4) > 0;
        if !claim.is_bound && rng.u32(0..4) > 0 {
            let wait = Duration::from_millis(rng.u64(100..600_000));
            play.change(|sim| sim.schedule_in(wait, ScheduledEvent::ClaimBound(name.to_owned())));
        }
        play.claim(&claim);
    }
}

/// A few pods have volumes, if the node has drivers.
pub(super) fn with_volumes(play: &Play, rng: &mut Rng, script: PodScript) -> PodScript {
    if play.look(|sim| sim.csi.drivers.is_empty()) || rng.bool() {
        return script;
    }
    let first = rng.usize(..CLAIMS.len());
    let script = if rng.bool() { script.level(LEVELS[rng.usize(..LEVELS.len())]) } else { script };
    let with = |script: PodScript, claim: &str| match play.look(|sim| sim.is_block(claim)) {
        true => script.block_claim(claim),
        false => script.claim(claim),
    };
    match rng.u32(0..6) {
        0..3 => with(script, CLAIMS[first]),
        3 => with(with(script, CLAIMS[first]), CLAIMS[(first + 1) % CLAIMS.len()]),
        4 => script.inline(DRIVERS[rng.usize(..2)]),
        _ => with(script, CLAIMS[first]).inline(DRIVERS[rng.usize(..2)]),
    }
}

/// A driver ends, and is back later; or it can have more or fewer volumes; or a claim grows.
pub(super) fn happen(play: &mut Play, rng: &mut Rng) {
    if play.look(|sim| sim.csi.drivers.is_empty()) {
        return;
    }
    let name = DRIVERS[rng.usize(..2)];
    match rng.u32(0..8) {
        0..3 => play.grow_claim(CLAIMS[rng.usize(..CLAIMS.len())]),
        3 if play.look(|sim| sim.csi.drivers[name].script.limit.is_some()) => play.limit_driver(name, rng.usize(1..4)),
        _ if play.look(|sim| sim.csi.drivers[name].is_up) => {
            let how = [DriverEnd::Stops, DriverEnd::Dies, DriverEnd::DiesAlone][rng.usize(..3)];
            let most = if rng.bool() { minutes(5) } else { Duration::from_secs(3) };
            let wait = Duration::from_millis(rng.u64(10..u64::try_from(most.as_millis()).unwrap_or(u64::MAX)));
            play.restart_driver(name, how, wait)
        }
        _ => play,
    };
}

/// A few faults, with strengths from the seed.
pub(super) fn rates(rng: &mut Rng) -> CsiFaultRates {
    let mut some = |most: f64| if rng.u32(0..3) == 0 { rng.f64() * most } else { 0.0 };
    CsiFaultRates {
        error_before: some(0.3),
        done_but_error: some(0.3),
        hang: some(0.1),
        late_answer: some(0.2),
        doubled: some(0.3),
        attach_late: some(0.3),
        attach_error: some(0.4),
    }
}
