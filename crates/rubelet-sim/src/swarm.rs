//! Random plays: pods, programs, edits and faults, all from one seed.
//!
//! Owns: the plot. Each seed enables its own few faults, because faults hide each other.
//! A run has a stormy part and a calm end; its rules are those of every play.

mod cluster;
mod mishaps;
mod pressure;
pub(crate) mod scripts;
mod storage;

use std::time::Duration;

use fastrand::Rng;
use jiff::SignedDuration;

use crate::{
    devices::DEVICES,
    faults::{ApiFaultRates, CsiFaultRates, FaultRates, HostFaultRates},
    play::{Failure, Play, minutes},
    runtime::store::Pull,
};

/// Within this time of calm everything must settle: the longest back-off is five minutes, a hung call lasts four.
const CALM: Duration = Duration::from_secs(25 * 60);
const NAMES: [&str; 6] = ["ant", "bee", "cat", "dog", "eel", "fox"];
pub(crate) const IMAGES: [&str; 3] = ["reg.test/quick:v1", "reg.test/slow:v1", "reg.test/late:v1"];

/// The result of a run, for the statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlayResult {
    pub starts: usize,
    pub trace: Vec<String>,
}

/// Plays one seed through a storm of this many virtual minutes.
pub fn play_out(seed: u64, storm_minutes: u64) -> Result<PlayResult, Box<Failure>> {
    let mut play = Play::before_start(seed);
    let mut rng = play.fork_rng();
    let mut rates = rates(&mut rng);
    // Half of the nodes belong to a cluster.
    let is_clustered = seed.is_multiple_of(2);
    if is_clustered {
        play.in_cluster();
        rates.api = cluster::rates(&mut rng);
        rates.csi = storage::rates(&mut rng);
        storage::set_up(&mut play, &mut rng);
    }
    play.supervised().publish(IMAGES[0], Pull::After(Duration::from_millis(500)));
    play.publish(IMAGES[1], Pull::After(Duration::from_secs(20)));
    let has_events = rng.bool();
    play.change(|sim| {
        sim.log("play", format!("has_events={has_events} {rates:?}"));
        sim.runtime.has_events = has_events;
    });
    play.start_agent().storm(rates);
    let mut version = 0;
    let mut left = minutes(storm_minutes);
    while left > Duration::ZERO {
        let pause = Duration::from_millis(rng.u64(0..25_000)).min(left);
        play.run_for(pause)?;
        left = left.saturating_sub(pause.max(Duration::from_millis(1)));
        version += 1;
        if is_clustered && rng.bool() {
            cluster::happen(&mut play, &mut rng, version);
        } else {
            happen(&mut play, &mut rng, version);
        }
    }
    // A missing image arrives later, or its pod waits for ever: both are tested.
    if rng.bool() {
        play.publish(IMAGES[2], Pull::After(Duration::from_secs(1)));
    }
    play.try_settle(CALM)?;
    if is_clustered {
        play.try_restart_in_peace()?;
    }
    let trace = play.trace();
    let starts = trace.iter().filter(|line| line.contains("StartContainer") && line.ends_with("-> ok")).count();
    Ok(PlayResult { starts, trace })
}

/// One random action.
fn happen(play: &mut Play, rng: &mut Rng, version: u32) {
    let name = NAMES[rng.usize(..NAMES.len())];
    match rng.u32(0..120) {
        0..35 => drop_in(play, rng, name, version),
        35..50 if play.wanted().contains_key(name) => {
            play.remove(name);
        }
        50..55 => remove_and_add(play, name),
        55..68 => mishaps::end_some_container(play, rng),
        68..72 => mishaps::end_some_sandbox(play, rng),
        72..78 => {
            play.runtime_down_for(Duration::from_millis(rng.u64(100..120_000)));
        }
        78..82 => {
            play.disk_full_for(Duration::from_millis(rng.u64(1_000..90_000)));
        }
        82..88 => {
            play.jump_wall_clock(SignedDuration::from_secs(rng.i64(-7_200..7_200)));
        }
        88..92 => {
            play.crash_agent();
        }
        92..108 => mishaps::happen(play, rng),
        108..116 => {
            let device = DEVICES[rng.usize(..DEVICES.len())];
            play.hang_device_for(device, Duration::from_millis(rng.u64(1_000..400_000)));
        }
        _ => {}
    }
}

fn drop_in(play: &mut Play, rng: &mut Rng, name: &str, version: u32) {
    play.apply(scripts::script(rng, name, version));
}

/// Adds the same manifest again before the agent has finished its removal.
fn remove_and_add(play: &mut Play, name: &str) {
    if let Some(script) = play.wanted().get(name).cloned() {
        play.remove(name);
        // If this hint is lost the agent sees no change at all, which is correct too.
        play.apply(script);
    }
}

/// A few faults, with strengths from the seed.
fn rates(rng: &mut Rng) -> FaultRates {
    // Some plays have no random faults: only there the delay of a single event shows.
    if rng.u32(0..4) == 0 {
        return FaultRates::default();
    }
    let mut some = |most: f64| if rng.u32(0..3) == 0 { rng.f64() * most } else { 0.0 };
    FaultRates {
        error_before: some(0.2),
        hang: some(0.02),
        done_but_error: some(0.2),
        late_answer: some(0.1),
        stale_list: some(0.2),
        stale_look: 0.0,
        event_lost: some(0.5),
        event_doubled: some(0.5),
        event_late: some(0.5),
        hint_lost: some(0.3),
        agent_death: some(0.01),
        goes_on_without_client: some(1.0),
        sandbox_left: some(0.2),
        host: HostFaultRates { io_error: some(0.05), busy: some(0.1), slow: some(0.05), hang: some(0.003) },
        api: ApiFaultRates::default(),
        csi: CsiFaultRates::default(),
    }
}
