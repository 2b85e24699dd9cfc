//! Tells the API server what happened: the event log becomes core/v1 Events.
//!
//! Owns: following the log, and writing with retries. The log is the queue, so nobody who records ever waits; when it was
//! lapped, how much was lost is said. Never: decides what is worth writing (`recorder/correlator.rs`).
//! Upstream: `client-go/tools/record/event.go`.

mod correlator;
mod recent;

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, ObjectReference, Pod};
use rubelet_core::{effect::About, id::PodRef, snapshot::Snapshot};
use rubelet_kube::port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, PatchKind, Verb};
use serde_json::json;
use tokio::{sync::watch, time::sleep};

use crate::event_log::{EventLog, LoggedEvent};

use self::{
    correlator::{Correlator, Happening, Written},
    recent::Recent,
};

const TRIES: u32 = 12;
const BETWEEN_TRIES: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Follows the log until the task is ended. What the snapshots say of a pod is part of what its events refer to.
pub async fn run(api: Arc<dyn ApiServer>, events: EventLog, node: String, snapshots: watch::Receiver<Arc<Snapshot>>) {
    let mut newest = events.subscribe();
    let mut reader = Reader::default();
    let mut correlator = Correlator::new(&node);
    loop {
        for (event, times) in reader.read(&events) {
            let Some(object) = object_of(&event.record.about, &node, &snapshots.borrow()) else { continue };
            if let Some(written) = correlator.correlate(happening(event, object, times)) {
                write(api.as_ref(), &written).await;
            }
        }
        if newest.wait_for(|sequence| *sequence > reader.sequence).await.is_err() {
            return;
        }
    }
}

/// What of the log was read.
#[derive(Debug, Default)]
struct Reader {
    sequence: u64,
    /// Of each event in the log: when it was entered, and how often it had happened at the last look.
    counts: Recent<(Timestamp, u32)>,
}

impl Reader {
    /// What is new, oldest first, with how often it happened since the last look.
    fn read(&mut self, events: &EventLog) -> Vec<(LoggedEvent, u32)> {
        let new = events.since(self.sequence);
        let Some(newest) = new.last().map(|event| event.sequence) else { return Vec::new() };
        let counted: Vec<_> = new.into_iter().map(|event| (self.times(&event), event)).collect();
        let told: u64 = counted.iter().map(|(times, _)| u64::from(*times)).sum();
        let lost = (newest - self.sequence).saturating_sub(told);
        if lost > 0 {
            tracing::warn!(lost, "events happened faster than they could be written; the oldest were not");
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
        // An event is in the log because it happened.
        event.count.saturating_sub(before).max(1)
    }
}

fn happening(event: LoggedEvent, object: ObjectReference, times: u32) -> Happening {
    let LoggedEvent { record, first_at, last_at, .. } = event;
    Happening {
        object,
        severity: record.severity,
        reason: record.reason,
        message: record.message,
        times,
        first_at: if times > 1 { first_at } else { last_at },
        last_at,
    }
}

/// `None`: there is no object in the API that it could be about.
fn object_of(about: &About, node: &str, snapshot: &Snapshot) -> Option<ObjectReference> {
    match about {
        About::Node => Some(ObjectReference {
            kind: Some("Node".to_owned()),
            api_version: Some("v1".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        }),
        About::Pod(pod) => Some(pod_reference(pod, snapshot)),
        About::Container { pod, container } => {
            let known = snapshot.pods.get(&pod.uid);
            let section = known.map_or("containers", |known| section_of(container, &known.pod));
            Some(ObjectReference {
                field_path: Some(format!("spec.{section}{{{container}}}")),
                ..pod_reference(pod, snapshot)
            })
        }
        About::Manifest(_) => None,
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

async fn write(api: &dyn ApiServer, written: &Written) {
    let event = &written.event;
    for tried in 1..=TRIES {
        let Err(error) = write_once(api, written).await else { return };
        match error.kind {
            ApiErrorKind::Unreachable | ApiErrorKind::Server | ApiErrorKind::TooManyRequests { .. } => {
                tracing::warn!(%error, tried, "an event could not be written; trying again");
            }
            // An earlier try got through whose answer did not.
            ApiErrorKind::AlreadyExists => return,
            ApiErrorKind::NotFound
            | ApiErrorKind::Conflict
            | ApiErrorKind::Expired
            | ApiErrorKind::Unauthorized
            | ApiErrorKind::Forbidden
            | ApiErrorKind::Invalid => {
                tracing::warn!(%error, reason = event.reason, "the server did not take an event");
                return;
            }
        }
        if tried < TRIES {
            sleep(BETWEEN_TRIES).await;
        }
    }
    tracing::error!(reason = event.reason, message = event.message, "an event was given up after {TRIES} tries");
}

async fn write_once(api: &dyn ApiServer, written: &Written) -> Result<(), ApiError> {
    if written.is_update {
        match api.call(update(&written.event)).await {
            // Events live for an hour; what happens again after that is told anew.
            Err(error) if error.kind == ApiErrorKind::NotFound => {}
            answer => return answer.map(drop),
        }
    }
    api.call(creation(&written.event)).await.map(drop)
}

fn update(event: &Event) -> Call {
    let patch = json!({ "count": event.count, "lastTimestamp": event.last_timestamp, "message": event.message });
    Call {
        verb: Verb::Patch(PatchKind::StrategicMerge),
        path: events_of(event).named(event.metadata.name.as_deref().unwrap_or_default()),
        ..call(event, &patch)
    }
}

fn creation(event: &Event) -> Call {
    call(event, &json!(event))
}

fn call(event: &Event, body: &serde_json::Value) -> Call {
    Call {
        lane: Lane::Events,
        verb: Verb::Create,
        path: events_of(event),
        query: Vec::new(),
        body: Some(body.to_string().into()),
        timeout: CALL_TIMEOUT,
    }
}

fn events_of(event: &Event) -> ObjectPath {
    ObjectPath::all("v1", "events").within(event.metadata.namespace.as_deref().unwrap_or("default"))
}

#[cfg(test)]
mod tests;
