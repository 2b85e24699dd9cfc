//! The client's clock, for waits only. It is tokio's, so pausing tokio pauses the client.

use tokio::time::Instant;

pub(crate) fn now() -> Instant {
    Instant::now()
}
