//! How fast is a processor used now?
//!
//! Owns: earlier readings of processor time, and which of them a rate is taken from. Pure.
//! Upstream: `cpuUsageCache` of the CRI stats provider, which the eviction manager moves every 10 s; cAdvisor's `CpuInst`.

use std::{collections::BTreeMap, time::Duration};

use rubelet_core::time::Uptime;

/// A younger reading makes a rate that jumps.
const YOUNGEST: Duration = Duration::from_secs(5);
/// A rate over more than this is no longer one of now.
const OLDEST: Duration = Duration::from_secs(60);
/// How far apart readings are kept: what upstream moves its own by.
const APART: Duration = Duration::from_secs(10);

/// Processor time at a moment, by cgroup, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    pub at: Uptime,
    pub nanos: BTreeMap<String, u64>,
}

/// Two earlier readings: when the newer is too young for a rate, the older is not.
#[derive(Clone, Debug, Default)]
pub(super) struct Readings {
    older: Option<Reading>,
    newer: Option<Reading>,
}

impl Readings {
    /// The newest reading a rate can be taken from.
    pub(super) fn base(&self, now: Uptime) -> Option<&Reading> {
        let fits = |reading: &&Reading| (YOUNGEST..=OLDEST).contains(&now.since(reading.at));
        [&self.newer, &self.older].into_iter().flatten().find(fits)
    }

    pub(super) fn keep(&mut self, reading: Reading) {
        if self.newer.as_ref().is_some_and(|newer| reading.at.since(newer.at) < APART) {
            return;
        }
        self.older = self.newer.replace(reading);
    }
}

impl Reading {
    /// Cores used since this reading, in billionths; `None` for a cgroup that is newer, or was made anew under its name.
    pub(super) fn nano_cores(&self, cgroup: &str, nanos: u64, now: Uptime) -> Option<u64> {
        let used = nanos.checked_sub(*self.nanos.get(cgroup)?)?;
        let elapsed = now.since(self.at).as_nanos();
        let rate = u128::from(used) * 1_000_000_000 / (elapsed > 0).then_some(elapsed)?;
        u64::try_from(rate).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(secs: u64, nanos: u64) -> Reading {
        Reading { at: Uptime::from_secs(secs), nanos: [("/a".to_owned(), nanos)].into() }
    }

    #[test]
    fn rate_uses_newest_sufficiently_old_reading() {
        let mut readings = Readings::default();
        let base_at = |readings: &Readings, secs| readings.base(Uptime::from_secs(secs)).map(|reading| reading.at);
        assert_eq!(base_at(&readings, 100), None);
        // Asked every second: readings are kept ten seconds apart, and there is always one to compare with.
        for secs in 100..=131 {
            readings.keep(reading(secs, 0));
        }
        assert_eq!(base_at(&readings, 131), Some(Uptime::from_secs(120)));
        assert_eq!(base_at(&readings, 135), Some(Uptime::from_secs(130)));
        assert_eq!(base_at(&readings, 190), Some(Uptime::from_secs(130)));
        assert_eq!(base_at(&readings, 191), None);
    }

    #[test]
    fn half_a_core_for_ten_seconds_is_half_a_core() {
        let base = reading(100, 1_000_000_000);
        let now = Uptime::from_secs(110);
        assert_eq!(base.nano_cores("/a", 6_000_000_000, now), Some(500_000_000));
        assert_eq!(base.nano_cores("/a", 999, now), None);
        assert_eq!(base.nano_cores("/new", 5, now), None);
        assert_eq!(base.nano_cores("/a", 6_000_000_000, Uptime::from_secs(100)), None);
    }
}
