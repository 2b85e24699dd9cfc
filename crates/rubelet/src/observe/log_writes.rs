//! Writes to logs, as hints.
//!
//! Owns: how often the loop is told of them. Never: looks at a file; the agent decides what a hint causes.
//! Upstream has none: it looks at every log at a fixed interval.

use std::time::Duration;

use rubelet_core::event::Event;
use tokio::sync::mpsc;

use crate::world::World;

/// Between two hints of all logs together, so that the agent is woken once a second, however many containers write.
const HINT_INTERVAL: Duration = Duration::from_secs(1);

/// Runs until the loop ends.
pub async fn run(world: World, inbox: mpsc::Sender<Event>) {
    loop {
        let written = world.host.next_writes().await;
        let paths = written.into_iter().filter_map(|path| path.into_os_string().into_string().ok()).collect();
        if inbox.send(Event::LogsWritten { paths }).await.is_err() {
            return;
        }
        tokio::time::sleep(HINT_INTERVAL).await;
    }
}
