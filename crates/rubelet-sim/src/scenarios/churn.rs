//! A short churn; `cargo xtask sim --churn HOURS` plays long ones.

use crate::churn::Churn;

#[test]
fn nothing_grows_with_the_pods_that_were_here() {
    let mut reported = 0;
    let rounds = Churn { seed: 5, rounds: 3, minutes: 3, per_minute: 30 }.play(|_| reported += 1);
    let rounds = rounds.unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!((rounds.len(), reported), (3, 3));
    assert!(
        rounds.iter().all(|round| round.agent_bytes > 0 && round.turns > 1000 && round.containers == 0),
        "{rounds:?}"
    );
}
