//! The client's clocks.
//!
//! Owns: reading them, and moments that lie ahead. Waits use tokio's time, so pausing tokio pauses the client.

use std::time::Duration;

use tokio::time::Instant;

/// Longer than any call or watch, and short enough for any clock.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 86_400);

pub(crate) fn now() -> Instant {
    Instant::now()
}

/// `wait` may come from the server: it saturates.
pub(crate) fn after(moment: Instant, wait: Duration) -> Instant {
    moment.checked_add(wait.min(LONGEST_WAIT)).unwrap_or(moment)
}

/// The wall clock: for credentials with an expiry date.
#[expect(clippy::disallowed_methods, reason = "a date is compared with a date, nothing is decided for pods by it")]
pub(crate) fn wall() -> jiff::Timestamp {
    jiff::Timestamp::now()
}
