//! Writes recorded events to the API server as core/v1 Events.
//!
//! Owns: reading the event log. The log is the queue, so recording never waits; if it wraps, the number of lost events is
//! logged. Never: decides what is worth writing (`recorder/correlator.rs`), writes (`recorder/writer.rs`).
//! Upstream: `client-go/tools/record/event.go`.

mod correlator;
mod lru;
mod writer;

use std::{collections::VecDeque, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use rubelet_core::{effect::InvolvedObject, id::PodRef, snapshot::Snapshot};
use rubelet_kube::port::ApiServer;
use tokio::sync::watch;

use crate::event_log::{EventLog, LoggedEvent};

use self::{
    correlator::{Correlator, ObservedEvent},
    lru::LruCache,
    writer::Writer,
};

/// Reads the log until the task ends. Snapshots provide the involved objects of events.
pub(crate) async fn run(
    api: Arc<dyn ApiServer>,
    events: EventLog,
    node: String,
    snapshots: watch::Receiver<Arc<Snapshot>>,
) {
    let mut newest = events.subscribe();
    let mut reader = Reader::default();
    let mut correlator = Correlator::new(&node);
    let mut writer = Writer::new(api);
    // As many as one read of the log returns.
    let mut unwritten = VecDeque::new();
    loop {
        if unwritten.is_empty() {
            unwritten.extend(reader.read(&events));
        }
        while writer.has_room()
            && let Some((event, times)) = unwritten.pop_front()
        {
            let Some(object) = object_of(&event.record.about, &node, &snapshots.borrow()) else { continue };
            if let Some(written) = correlator.correlate(observed(event, object, times)) {
                writer.take(written);
            }
        }
        tokio::select! {
            biased;
            // Cancel-safe: running calls stay with the writer.
            () = writer.turn() => {}
            // Cancel-safe: it only triggers a read.
            heard = newest.wait_for(|sequence| *sequence > reader.sequence), if unwritten.is_empty() => {
                if heard.is_err() {
                    return;
                }
            }
        }
    }
}

/// The read position in the log.
#[derive(Debug, Default)]
struct Reader {
    sequence: u64,
    /// For each event in the log: its sequence number, and its count at the last read.
    counts: LruCache<(Timestamp, u32)>,
}

impl Reader {
    /// New events, oldest first, with their count since the last read.
    fn read(&mut self, events: &EventLog) -> Vec<(LoggedEvent, u32)> {
        let new = events.since(self.sequence);
        let Some(newest) = new.last().map(|event| event.sequence) else { return Vec::new() };
        let counted: Vec<_> = new.into_iter().map(|event| (self.times(&event), event)).collect();
        let told: u64 = counted.iter().map(|(times, _)| u64::from(*times)).sum();
        let lost = (newest - self.sequence).saturating_sub(told);
        if lost > 0 {
            tracing::warn!(lost, "event log overflowed, oldest events not written");
        }
        self.sequence = newest;
        counted.into_iter().map(|(times, event)| (event, times)).collect()
    }

    fn times(&mut self, event: &LoggedEvent) -> u32 {
        let record = &event.record;
        let key = format!("{}\0{:?}\0{}\0{}", record.about, record.severity, record.reason, record.message);
        let known = self.counts.entry(&key, || (event.first_at, 0));
        let before = if known.0 == event.first_at { known.1 } else { 0 };
        *known = (event.first_at, event.count);
        // Every event in the log has happened at least once.
        event.count.saturating_sub(before).max(1)
    }
}

fn observed(event: LoggedEvent, object: ObjectReference, times: u32) -> ObservedEvent {
    let LoggedEvent { record, first_at, last_at, .. } = event;
    ObservedEvent {
        object,
        severity: record.severity,
        reason: record.reason,
        message: record.message,
        annotations: record.annotations,
        times,
        first_at: if times > 1 { first_at } else { last_at },
        last_at,
    }
}

/// `None`: there is no object in the API that it could be about.
fn object_of(about: &InvolvedObject, node: &str, snapshot: &Snapshot) -> Option<ObjectReference> {
    match about {
        InvolvedObject::Node => Some(ObjectReference {
            kind: Some("Node".to_owned()),
            api_version: Some("v1".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        }),
        InvolvedObject::Pod(pod) => Some(pod_reference(pod, snapshot)),
        InvolvedObject::Container { pod, container } => {
            let known = snapshot.pods.get(&pod.uid);
            let section = known.map_or("containers", |known| section_of(container, &known.pod));
            Some(ObjectReference {
                field_path: Some(format!("spec.{section}{{{container}}}")),
                ..pod_reference(pod, snapshot)
            })
        }
        InvolvedObject::Claim { namespace, name, uid } => Some(ObjectReference {
            kind: Some("PersistentVolumeClaim".to_owned()),
            api_version: Some("v1".to_owned()),
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        }),
        InvolvedObject::Manifest(_) => None,
    }
}

fn pod_reference(pod: &PodRef, snapshot: &Snapshot) -> ObjectReference {
    let known = snapshot.pods.get(&pod.uid);
    ObjectReference {
        kind: Some("Pod".to_owned()),
        api_version: Some("v1".to_owned()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        resource_version: known.and_then(|known| known.pod.metadata.resource_version.clone()),
        ..ObjectReference::default()
    }
}

fn section_of(container: &str, pod: &Pod) -> &'static str {
    let Some(spec) = &pod.spec else { return "containers" };
    if spec.init_containers.iter().flatten().any(|init| init.name == container) {
        "initContainers"
    } else if spec.ephemeral_containers.iter().flatten().any(|ephemeral| ephemeral.name == container) {
        "ephemeralContainers"
    } else {
        "containers"
    }
}

#[cfg(test)]
mod tests;
