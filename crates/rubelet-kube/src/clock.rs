//! The client's clocks.
//!
//! Owns: reading them. Waits use tokio's time, so pausing tokio pauses the client.

use tokio::time::Instant;

pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The wall clock: for credentials with an expiry date.
#[expect(clippy::disallowed_methods, reason = "a date is compared with a date, nothing is decided for pods by it")]
pub(crate) fn wall() -> jiff::Timestamp {
    jiff::Timestamp::now()
}
