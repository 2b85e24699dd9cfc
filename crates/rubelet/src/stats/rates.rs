//! CPU usage rates.
//!
//! Owns: earlier readings of CPU time, and which of them a rate uses. Pure.
//! Upstream: `cpuUsageCache` of the CRI stats provider, which the eviction manager moves every 10 s; cAdvisor's `CpuInst`.

use std::{collections::BTreeMap, time::Duration};

use rubelet_core::time::Uptime;

/// A younger reading makes the rate noisy.
const YOUNGEST: Duration = Duration::from_secs(5);
/// An older reading makes the rate outdated.
const OLDEST: Duration = Duration::from_secs(60);
/// The distance between kept readings: upstream's period.
const APART: Duration = Duration::from_secs(10);

/// CPU time at a moment, by cgroup, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    pub at: Uptime,
    pub nanos: BTreeMap<String, u64>,
}

/// Two earlier readings: if the newer is too young for a rate, the older is used.
#[derive(Clone, Debug, Default)]
pub(super) struct Readings {
    older: Option<Reading>,
    newer: Option<Reading>,
}

impl Readings {
    /// The newest reading old enough for a rate.
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
    /// Nanocores used since this reading; `None` for a cgroup that is newer, or was recreated under its name.
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
        // Requests every second: readings are kept ten seconds apart, and one is always old enough.
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
