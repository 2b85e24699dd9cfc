//! The runtime's container events, as hints.
//!
//! Owns: the stream, its reconnection, reporting to the loop whether it is connected. Never: uses an event for more than a hint.
//! Upstream: `EventedPLEG`.

use std::time::Duration;

use rubelet_core::{
    event::{Event, EventStream},
    id::PodUid,
};
use rubelet_cri::{port::RpcErrorKind, v1};
use rubelet_kube::error_chain;
use tokio::sync::mpsc;

use crate::world::World;

const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The next relist notices a runtime that is back; this only reopens the stream.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Why the stream is not followed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The runtime has no such call (containerd before 2.0): only relists find changes.
    Unsupported,
    /// The loop has ended.
    Unwanted,
}

/// Runs until the loop ends, or the runtime turns out to have no events. Dropping it ends the stream.
pub async fn follow(world: &World, inbox: &mpsc::Sender<Event>) -> Ended {
    let mut wait = FIRST_WAIT;
    loop {
        let opened = world.runtime.container_events().await;
        world.metrics.effects.events_followed(opened.is_ok());
        match opened {
            Ok(events) => {
                wait = FIRST_WAIT;
                if pass_on(events, inbox).await.is_err() {
                    return Ended::Unwanted;
                }
            }
            Err(error) if error.kind == RpcErrorKind::Unimplemented => return Ended::Unsupported,
            Err(error) => tracing::debug!(error = error_chain(&error), "container event stream failed"),
        }
        // Cancel-safe: neither of the two holds anything.
        tokio::select! {
            biased;
            () = inbox.closed() => return Ended::Unwanted,
            () = tokio::time::sleep(wait) => {}
        }
        wait = wait.saturating_mul(2).min(LONGEST_WAIT);
    }
}

struct Unwanted;

/// Runs until the stream ends.
async fn pass_on(
    mut events: mpsc::Receiver<v1::ContainerEventResponse>,
    inbox: &mpsc::Sender<Event>,
) -> Result<(), Unwanted> {
    let send = async |event| inbox.send(event).await.map_err(|_| Unwanted);
    send(Event::RuntimeEvents(EventStream::Up)).await?;
    loop {
        // Cancel-safe: `recv` is; without a receiver a lost event does not matter.
        let event = tokio::select! {
            biased;
            () = inbox.closed() => return Err(Unwanted),
            event = events.recv() => event,
        };
        let Some(event) = event else { return send(Event::RuntimeEvents(EventStream::Down)).await };
        let Some(pod) = pod_of(event) else { continue };
        send(Event::Hint { pod }).await?;
    }
}

fn pod_of(event: v1::ContainerEventResponse) -> Option<PodUid> {
    let metadata = event.pod_sandbox_status?.metadata?;
    (!metadata.uid.is_empty()).then(|| PodUid::new(metadata.uid))
}
