//! The client's clocks.
//!
//! Owns: reading them. Waits are by tokio's, so pausing tokio pauses the client.

use tokio::time::Instant;

pub(crate) fn now() -> Instant {
    Instant::now()
}

/// By the calendar: for credentials whose end is a date.
#[expect(clippy::disallowed_methods, reason = "a date is compared with a date, nothing is decided for pods by it")]
pub(crate) fn wall() -> jiff::Timestamp {
    jiff::Timestamp::now()
}
