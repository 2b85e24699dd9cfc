//! Durations and timeouts of the commands.
//!
//! Owns: every clock read of the commands, and the polling of conditions.

use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, anyhow};

#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    #[expect(clippy::disallowed_methods, reason = "the commands measure real time, in this one place")]
    pub fn start() -> Self {
        Stopwatch(Instant::now())
    }

    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    pub fn secs(self) -> f64 {
        self.elapsed().as_secs_f64()
    }
}

/// Polls until there is a value or `limit` has passed; polls at least once.
pub fn poll<T>(limit: Duration, every: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let limit = patient(limit);
    let watch = Stopwatch::start();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if watch.elapsed() >= limit {
            return None;
        }
        thread::sleep(every);
    }
}

/// Emulated machines may take several times as long.
pub fn patient(limit: Duration) -> Duration {
    limit * std::env::var("XTASK_PATIENCE").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Polls until there is no error; the last error then names the condition and the actual state.
pub fn wait<T>(
    what: &str,
    limit: Duration,
    every: Duration,
    mut ask: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let watch = Stopwatch::start();
    let mut last = anyhow!("never asked");
    let answer = poll(limit, every, || ask().map_err(|err| last = err).ok());
    answer.ok_or(last).with_context(|| format!("waited {:.0} s for: {what}", watch.secs()))
}

/// The wall clock, to compare with the runtime's timestamps.
#[expect(clippy::disallowed_methods, reason = "the commands read the wall clock, in this one place")]
pub fn wall() -> SystemTime {
    SystemTime::now()
}
