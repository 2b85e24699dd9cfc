//! The runtime's container events, as hints.
//!
//! Owns: the stream, its reconnection, `World::has_runtime_events`. Never: trusts an event beyond "look at this pod".
//! Upstream: `EventedPLEG`.

use std::{sync::atomic::Ordering, time::Duration};

use rubelet_core::{event::Event, id::PodUid};
use rubelet_cri::{port::RpcErrorKind, v1};
use tokio::sync::mpsc;

use crate::world::World;

const FIRST_WAIT: Duration = Duration::from_secs(1);
/// A runtime that is back is noticed by the next relist anyway; this only brings the events back.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Why nobody follows events any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The runtime has no such call (containerd before 2.0): relists have to do.
    Unsupported,
    /// Nobody listens to the hints.
    Unwanted,
}

/// Runs until there is nobody to tell, or nobody to listen to. Dropping it ends the stream.
pub async fn follow(world: &World, hints: &mpsc::Sender<Event>) -> Ended {
    let mut wait = FIRST_WAIT;
    loop {
        let opened = world.runtime.container_events().await;
        world.metrics.effects.events_followed(opened.is_ok());
        match opened {
            Ok(events) => {
                wait = FIRST_WAIT;
                let _up = Up::new(world);
                if pass_on(events, hints).await.is_err() {
                    return Ended::Unwanted;
                }
            }
            Err(error) if error.kind == RpcErrorKind::Unimplemented => return Ended::Unsupported,
            Err(error) => tracing::debug!(%error, "no container events from the runtime"),
        }
        // Cancel-safe: neither of the two holds anything.
        tokio::select! {
            biased;
            () = hints.closed() => return Ended::Unwanted,
            () = tokio::time::sleep(wait) => {}
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

struct Unwanted;

/// Until the stream ends.
async fn pass_on(
    mut events: mpsc::Receiver<v1::ContainerEventResponse>,
    hints: &mpsc::Sender<Event>,
) -> Result<(), Unwanted> {
    loop {
        // Cancel-safe: `recv` is; an event lost with the last listener has nobody to reach.
        let event = tokio::select! {
            biased;
            () = hints.closed() => return Err(Unwanted),
            event = events.recv() => event,
        };
        let Some(event) = event else { return Ok(()) };
        let Some(pod) = pod_of(event) else { continue };
        hints.send(Event::Hint { pod }).await.map_err(|_| Unwanted)?;
    }
}

fn pod_of(event: v1::ContainerEventResponse) -> Option<PodUid> {
    let metadata = event.pod_sandbox_status?.metadata?;
    (!metadata.uid.is_empty()).then(|| PodUid::new(metadata.uid))
}

/// The stream is up for as long as this lives, however it ends.
struct Up<'a>(&'a World);

impl<'a> Up<'a> {
    fn new(world: &'a World) -> Self {
        world.has_runtime_events.store(true, Ordering::Relaxed);
        Up(world)
    }
}

impl Drop for Up<'_> {
    fn drop(&mut self) {
        self.0.has_runtime_events.store(false, Ordering::Relaxed);
    }
}
