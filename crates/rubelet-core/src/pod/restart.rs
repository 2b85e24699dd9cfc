//! The crash-loop back-off of a container.
//!
//! Owns: when a container may restart. Never: whether it does; see `restart_policy.rs`.
//! Upstream: `doBackOff`, client-go's `flowcontrol.Backoff`.

use std::time::Duration;

use crate::time::Uptime;

/// The first wait; each further crash doubles it.
pub const FIRST_DELAY: Duration = Duration::from_secs(10);

/// A run longer than this resets the back-off.
pub const EXPIRES_AFTER: Duration = Duration::from_secs(600);

/// The back-off of a restarted container. The first restart does not wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashLoop {
    /// How long the next restart waits, counted from the exit.
    pub delay: Duration,
    /// When the container was last restarted.
    started: Uptime,
    /// A new image resets the back-off.
    image: String,
}

impl CrashLoop {
    /// After a restart at `now` of a container that exited at `ended`.
    pub fn after_restart(
        previous: Option<&CrashLoop>,
        image: &str,
        ended: Uptime,
        max_delay: Duration,
        now: Uptime,
    ) -> Self {
        let delay = match previous {
            Some(previous) if previous.image == image && !previous.has_expired(ended) => {
                previous.delay.saturating_mul(2)
            }
            Some(_) | None => FIRST_DELAY,
        };
        CrashLoop { delay: delay.min(max_delay), started: now, image: image.to_owned() }
    }

    /// When a container that exited at `ended` may restart.
    pub fn not_before(&self, image: &str, ended: Uptime) -> Uptime {
        if self.image != image || self.has_expired(ended) { ended } else { ended + self.delay }
    }

    fn has_expired(&self, ended: Uptime) -> bool {
        ended.since(self.started) > EXPIRES_AFTER
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX: Duration = Duration::from_secs(300);

    #[test]
    fn the_waits_grow_from_ten_seconds_to_the_maximum() {
        let mut waits = Vec::new();
        let mut known: Option<CrashLoop> = None;
        let mut now = Uptime::from_secs(100);
        for _ in 0..8 {
            let ended = now;
            let start = known.as_ref().map_or(ended, |known| known.not_before("i", ended));
            waits.push(start.since(ended).as_secs());
            known = Some(CrashLoop::after_restart(known.as_ref(), "i", ended, MAX, start));
            now = start;
        }
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn a_long_run_or_another_image_starts_over() {
        let crashing = CrashLoop { delay: Duration::from_secs(160), started: Uptime::from_secs(0), image: "i".into() };
        let almost_long_run = Uptime::from_secs(600);
        assert_eq!(crashing.not_before("i", almost_long_run), Uptime::from_secs(760));
        let long_run = Uptime::from_secs(601);
        assert_eq!(crashing.not_before("i", long_run), long_run);
        assert_eq!(CrashLoop::after_restart(Some(&crashing), "i", long_run, MAX, long_run).delay, FIRST_DELAY);
        let short_run = Uptime::from_secs(5);
        assert_eq!(crashing.not_before("other", short_run), short_run);
        assert_eq!(crashing.not_before("i", short_run), Uptime::from_secs(165));
    }

    proptest! {
        #[test]
        fn no_wait_is_longer_than_the_maximum(max_secs in 1u64..=300, runs in proptest::collection::vec(0u64..2000, 1..20)) {
            let max = Duration::from_secs(max_secs);
            let mut known: Option<CrashLoop> = None;
            let mut now = Uptime::ZERO;
            for run in runs {
                let ended = now + Duration::from_secs(run);
                let start = known.as_ref().map_or(ended, |known| known.not_before("i", ended));
                prop_assert!(start.since(ended) <= max);
                known = Some(CrashLoop::after_restart(known.as_ref(), "i", ended, max, start));
                now = start;
            }
        }
    }
}
