//! Time as a value.
//!
//! Owns: `Now`, `Uptime`, and arithmetic that saturates: times come from pods, servers and clocks, and a panic ends the agent.
//! Never: reads a clock; the shell passes the time in.
//! Clippy refuses `+`, `-` and `*` on the times of std, tokio and jiff, which panic on overflow (clippy.toml).

use std::{fmt, ops::Add, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// Monotonic time since the agent started. Deadlines and waits use it, so a jump of the wall clock does not move them.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Uptime(Duration);

impl Uptime {
    pub const ZERO: Uptime = Uptime(Duration::ZERO);

    pub const fn new(since_start: Duration) -> Self {
        Self(since_start)
    }

    pub const fn from_secs(secs: u64) -> Self {
        Self(Duration::from_secs(secs))
    }

    pub const fn as_duration(self) -> Duration {
        self.0
    }

    /// The time since `earlier`; zero when it is not after it.
    pub fn since(self, earlier: Uptime) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    pub fn saturating_sub(self, by: Duration) -> Uptime {
        Uptime(self.0.saturating_sub(by))
    }
}

impl Add<Duration> for Uptime {
    type Output = Uptime;

    fn add(self, by: Duration) -> Uptime {
        Uptime(self.0.saturating_add(by))
    }
}

/// `moment` moved by `by`, clamped to the calendar.
pub fn moved(moment: Timestamp, by: SignedDuration) -> Timestamp {
    moment.checked_add(by).unwrap_or(if by.is_negative() { Timestamp::MIN } else { Timestamp::MAX })
}

/// `span` times a factor that is not negative.
pub fn scaled(span: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(span.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}

impl fmt::Debug for Uptime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "+{:?}", self.0)
    }
}

/// The time of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Now {
    /// For waits and deadlines.
    pub uptime: Uptime,
    /// For texts and the API, and for comparing with the runtime's timestamps.
    pub wall: Timestamp,
}

impl Now {
    /// The time since `moment` by the wall clock; zero when it lies ahead, as after a jump of the clock.
    pub fn wall_since(&self, moment: Timestamp) -> Duration {
        Duration::try_from(self.wall.duration_since(moment)).unwrap_or(Duration::ZERO)
    }
}
