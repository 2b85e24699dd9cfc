//! Thresholds for readers.
//!
//! Owns: what `rubelet node` shows of a threshold, and how close to it counts as close. Never: decides.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    Eviction, EvictionSettings,
    threshold::{Observation, Signal},
};
use crate::{pod::PodRecord, time::Now};

/// A signal whose distance from the threshold is less than this share of the capacity is close to it.
const CLOSE_PERCENT: u128 = 10;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ThresholdView {
    pub signal: Signal,
    /// As configured: `100Mi`, `10%`.
    pub value: String,
    /// The value in bytes, inodes or processes; `None`: a share of a capacity that could not be measured.
    pub amount: Option<u64>,
    /// Zero for a hard threshold.
    pub grace_secs: u64,
    /// `None`: it could not be measured.
    pub observed: Option<Observation>,
    pub met_since: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThresholdState {
    NotMeasured,
    Ok,
    Close,
    Met { since: Timestamp },
}

impl ThresholdView {
    pub fn state(&self) -> ThresholdState {
        if let Some(since) = self.met_since {
            return ThresholdState::Met { since };
        }
        let (Some(Observation { available, capacity }), Some(amount)) = (self.observed, self.amount) else {
            return ThresholdState::NotMeasured;
        };
        let left = u128::from(available.saturating_sub(amount)).saturating_mul(100);
        if left < u128::from(capacity).saturating_mul(CLOSE_PERCENT) {
            ThresholdState::Close
        } else {
            ThresholdState::Ok
        }
    }
}

impl Eviction {
    /// Each threshold with what was observed.
    pub fn view(&self, settings: &EvictionSettings, now: Now) -> Vec<ThresholdView> {
        let views = settings.thresholds.iter().enumerate().map(|(place, threshold)| {
            let observed = self.observed.get(&threshold.signal).map(|seen| seen.observed);
            ThresholdView {
                signal: threshold.signal,
                value: threshold.value.configured_text(),
                amount: threshold.value.known_amount(observed.map(|observed| observed.capacity)),
                grace_secs: threshold.grace.as_secs(),
                observed,
                met_since: self.met_since.get(&place).map(|since| PodRecord::wall(*since, now)),
            }
        });
        views.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threshold_is_close_within_a_tenth_of_the_capacity() {
        let since: Timestamp = "2026-11-15T19:00:00Z".parse().expect("a time");
        let observed = |available| Some(Observation { available, capacity: 1000 });
        let table = [
            (observed(300), Some(200), None, ThresholdState::Ok),
            (observed(299), Some(200), None, ThresholdState::Close),
            (observed(200), Some(200), None, ThresholdState::Close),
            // Not yet looked at again, or the minimum is not reclaimed.
            (observed(900), Some(200), Some(since), ThresholdState::Met { since }),
            (None, Some(200), None, ThresholdState::NotMeasured),
            (None, None, None, ThresholdState::NotMeasured),
        ];
        for (observed, amount, met_since, expected) in table {
            let signal = Signal::MemoryAvailable;
            let view = ThresholdView { signal, value: String::new(), amount, grace_secs: 0, observed, met_since };
            assert_eq!(view.state(), expected, "{view:?}");
        }
    }
}
