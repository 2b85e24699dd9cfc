//! File systems that answer again, as hints.
//!
//! Owns: passing them on to the loop. Never: calls a file system; the agent decides what is tried again.
//! Upstream has none: a thread of it waits in the kernel for as long as the file system hangs.

use rubelet_core::event::Event;
use tokio::sync::mpsc;

use crate::world::World;

/// Runs until the loop ends. File systems that answer meanwhile share a hint. Each time one is late it causes two: when it takes the
/// first call again, and when that call is answered, because the others were refused until then.
pub async fn run(world: World, inbox: mpsc::Sender<Event>) {
    loop {
        world.host.file_system_answered().await;
        tracing::info!("a file system answers again");
        if inbox.send(Event::FileSystemAnswered).await.is_err() {
            return;
        }
    }
}
