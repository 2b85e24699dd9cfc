//! Time for the commands: how long something took, and how long it may take.
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

/// Asks until there is an answer or `limit` has passed; the question is asked at least once.
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

/// On some machines everything may take several times as long: they may be emulated.
pub fn patient(limit: Duration) -> Duration {
    limit * std::env::var("XTASK_PATIENCE").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Asks until the answer is no error; the last error then names what was waited for and what was there instead.
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

/// Wall-clock now, to compare with what the runtime reports.
#[expect(clippy::disallowed_methods, reason = "the commands read the wall clock, in this one place")]
pub fn wall() -> SystemTime {
    SystemTime::now()
}
