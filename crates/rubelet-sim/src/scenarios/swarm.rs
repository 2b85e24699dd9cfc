//! A fixed number of random plays, and the test that a seed determines its run.

use crate::swarm::play_out;

/// Virtual minutes of faults in each play.
const STORM_MINUTES: u64 = 10;

/// Two halves, so that two cores share them; together well under three minutes.
#[test]
fn random_plays_break_no_rule() {
    plays_well(1..=20);
}

#[test]
fn more_random_plays_break_no_rule() {
    plays_well(21..=40);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in [3, 17, 29] {
        let runs = [play_out(seed, 5), play_out(seed, 5)].map(|run| run.map_err(|failure| failure.to_string()));
        assert_eq!(runs[0], runs[1]);
        assert!(runs[0].as_ref().is_ok_and(|result| result.starts > 0), "a play in which something happens");
    }
}

#[track_caller]
fn plays_well(seeds: std::ops::RangeInclusive<u64>) {
    for seed in seeds {
        if let Err(failure) = play_out(seed, STORM_MINUTES) {
            panic!("{failure}");
        }
    }
}
