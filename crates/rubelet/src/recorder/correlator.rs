//! Decides which events are written, and how.
//!
//! Owns: counting repeats, aggregating similar events, and the rate limit per object.
//! Never: writes anything, reads a clock.
//! Upstream: `EventCorrelator` of `client-go/tools/record/events_cache.go`.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use rubelet_core::effect::Severity;

use super::lru::LruCache;

/// From this many different messages of one reason on, they are aggregated.
const COMBINED_FROM: usize = 10;
/// Events further apart than this are not similar.
const SIMILAR_WITHIN: SignedDuration = SignedDuration::from_mins(10);
const COMBINED_PREFIX: &str = "(combined from similar events): ";

/// The burst of events per object and type, then one every five minutes.
const SPAM_BURST: f64 = 25.0;
const SPAM_REFILL_SECS: f64 = 300.0;

const COMPONENT: &str = "kubelet";
/// The API's limit for names.
const NAME_MAX: usize = 253;

/// An event observed once or several times since the last read.
#[derive(Clone, Debug)]
pub(super) struct ObservedEvent {
    pub object: ObjectReference,
    pub severity: Severity,
    pub reason: String,
    pub message: String,
    pub annotations: BTreeMap<String, String>,
    pub times: u32,
    pub first_at: Timestamp,
    pub last_at: Timestamp,
}

/// The request to write.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CorrelateResult {
    /// Complete, for creation, also when the server has expired it.
    pub event: Event,
    /// Exists on the server: only its count, time and message change.
    pub is_update: bool,
}

#[derive(Debug)]
pub(super) struct Correlator {
    host: String,
    similar: LruCache<AggregateRecord>,
    known: LruCache<Option<EventLogEntry>>,
    budgets: LruCache<SpamRecord>,
    /// Makes the event names unique.
    last_number: i128,
}

/// The messages of one reason about one object.
#[derive(Debug)]
struct AggregateRecord {
    messages: BTreeSet<String>,
    last_at: Timestamp,
}

#[derive(Debug)]
struct EventLogEntry {
    name: String,
    first_at: Timestamp,
    count: u32,
}

#[derive(Debug)]
struct SpamRecord {
    tokens: f64,
    at: Timestamp,
}

impl Correlator {
    pub(super) fn new(host: &str) -> Self {
        Correlator {
            host: host.to_owned(),
            similar: LruCache::default(),
            known: LruCache::default(),
            budgets: LruCache::default(),
            last_number: 0,
        }
    }

    /// `None`: rate limited, not written.
    pub(super) fn correlate(&mut self, observed: ObservedEvent) -> Option<CorrelateResult> {
        let (observed, key) = self.combined(observed);
        let written = self.counted(&observed, &key);
        let budget = self.budgets.entry(&object_key(&observed), || SpamRecord::full(observed.last_at));
        budget.spend(observed.last_at).then_some(written)
    }

    /// The event to write, and the key under which it is counted.
    fn combined(&mut self, mut observed: ObservedEvent) -> (ObservedEvent, String) {
        let at = observed.last_at;
        let reason_key = joined(&[&object_key(&observed), &observed.reason]);
        let similar = self.similar.entry(&reason_key, || AggregateRecord { messages: BTreeSet::new(), last_at: at });
        if at.duration_since(similar.last_at) > SIMILAR_WITHIN {
            similar.messages.clear();
        }
        similar.last_at = at;
        similar.messages.insert(observed.message.clone());
        if similar.messages.len() < COMBINED_FROM {
            let field = observed.object.field_path.as_deref().unwrap_or_default();
            let key = joined(&[&reason_key, field, &observed.message]);
            return (observed, key);
        }
        // The set does not grow: new messages are counted under the aggregate event.
        similar.messages.remove(&observed.message);
        observed.message = format!("{COMBINED_PREFIX}{}", observed.message);
        observed.first_at = at;
        (observed, reason_key)
    }

    fn counted(&mut self, observed: &ObservedEvent, key: &str) -> CorrelateResult {
        let known = self.known.entry(key, || None);
        let is_update = known.is_some();
        let known = known.get_or_insert_with(|| {
            let number = observed.last_at.as_nanosecond().max(self.last_number + 1);
            self.last_number = number;
            let object_name = observed.object.name.as_deref().unwrap_or_default();
            EventLogEntry { name: event_name(object_name, number), first_at: observed.first_at, count: 0 }
        });
        known.count = known.count.saturating_add(observed.times);
        CorrelateResult { event: event(observed, known, &self.host), is_update }
    }
}

impl SpamRecord {
    fn full(at: Timestamp) -> Self {
        SpamRecord { tokens: SPAM_BURST, at }
    }

    fn spend(&mut self, at: Timestamp) -> bool {
        let refill = at.duration_since(self.at).as_secs_f64().max(0.0) / SPAM_REFILL_SECS;
        self.tokens = (self.tokens + refill).min(SPAM_BURST);
        self.at = at;
        let is_enough = self.tokens >= 1.0;
        if is_enough {
            self.tokens -= 1.0;
        }
        is_enough
    }
}

fn event(observed: &ObservedEvent, known: &EventLogEntry, host: &str) -> Event {
    let object = observed.object.clone();
    Event {
        metadata: ObjectMeta {
            name: Some(known.name.clone()),
            // Events about cluster-scoped objects are stored in this namespace.
            namespace: Some(object.namespace.clone().unwrap_or_else(|| "default".to_owned())),
            annotations: (!observed.annotations.is_empty()).then(|| observed.annotations.clone()),
            ..ObjectMeta::default()
        },
        involved_object: object,
        type_: Some(type_of(observed.severity).to_owned()),
        reason: Some(observed.reason.clone()),
        message: Some(observed.message.clone()),
        count: Some(i32::try_from(known.count).unwrap_or(i32::MAX)),
        first_timestamp: Some(Time(known.first_at)),
        last_timestamp: Some(Time(observed.last_at)),
        source: Some(EventSource { component: Some(COMPONENT.to_owned()), host: Some(host.to_owned()) }),
        reporting_component: Some(COMPONENT.to_owned()),
        reporting_instance: Some(host.to_owned()),
        ..Event::default()
    }
}

/// `web.18796fabc0d1e2f3`; a long object name is truncated.
fn event_name(object_name: &str, number: i128) -> String {
    let number = format!(".{number:x}");
    let room = NAME_MAX - number.len();
    let cut: String = object_name.chars().take(room).collect();
    format!("{}{number}", cut.trim_end_matches(['-', '.']))
}

/// Source and object; the source is always this node.
fn object_key(observed: &ObservedEvent) -> String {
    let object = &observed.object;
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    joined(&[
        &part(&object.kind),
        &part(&object.namespace),
        &part(&object.name),
        &part(&object.uid),
        type_of(observed.severity),
    ])
}

/// A NUL occurs in none of the parts.
fn joined(parts: &[&str]) -> String {
    parts.join("\0")
}

fn type_of(severity: Severity) -> &'static str {
    match severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn repeated_event_raises_count_of_same_object() {
        let mut correlator = Correlator::new("n1");
        let first = correlator.correlate(observed("Pulled", "a", 0)).unwrap();
        let second = correlator.correlate(ObservedEvent { times: 3, ..observed("Pulled", "a", 700) }).unwrap();
        assert!(!first.is_update && second.is_update);
        assert_eq!(first.event.metadata.name, second.event.metadata.name);
        assert_eq!(second.event.count, Some(4));
        assert_eq!(second.event.first_timestamp, first.event.first_timestamp);
        assert_eq!(second.event.last_timestamp, Some(Time(at(700))));
    }

    #[test]
    fn event_has_source_and_involved_object() {
        let mut correlator = Correlator::new("n1");
        let written = correlator.correlate(observed("Pulled", "a", 0)).unwrap();
        assert_snapshot!(serde_json::to_string_pretty(&written.event).unwrap(), @r#"
        {
          "apiVersion": "v1",
          "kind": "Event",
          "count": 1,
          "firstTimestamp": "2027-01-15T08:00:00Z",
          "involvedObject": {
            "apiVersion": "v1",
            "fieldPath": "spec.containers{a}",
            "kind": "Pod",
            "name": "web",
            "namespace": "default",
            "resourceVersion": "7",
            "uid": "u1"
          },
          "lastTimestamp": "2027-01-15T08:00:00Z",
          "message": "a",
          "metadata": {
            "annotations": {
              "starved_resource": "memory"
            },
            "name": "web.18fae27693b40000",
            "namespace": "default"
          },
          "reason": "Pulled",
          "reportingComponent": "kubelet",
          "reportingInstance": "n1",
          "source": {
            "component": "kubelet",
            "host": "n1"
          },
          "type": "Warning"
        }
        "#);
    }

    #[test]
    fn tenth_similar_event_is_aggregated() {
        let mut correlator = Correlator::new("n1");
        let told: Vec<_> = (0..12)
            .map(|number| correlator.correlate(observed("Failed", &format!("m{number}"), number)).unwrap())
            .map(|written| (written.event.message.unwrap(), written.event.count.unwrap(), written.is_update))
            .collect();
        let combined = |text: &str| format!("{COMBINED_PREFIX}{text}");
        assert_eq!(told[8], ("m8".to_owned(), 1, false));
        assert_eq!(told[9], (combined("m9"), 1, false));
        assert_eq!(told[10], (combined("m10"), 2, true));
        assert_eq!(told[11], (combined("m11"), 3, true));
        let again = correlator.correlate(observed("Failed", "m3", 20)).unwrap();
        assert_eq!((again.event.message.as_deref(), again.event.count), (Some("m3"), Some(2)));
    }

    #[test]
    fn messages_more_than_ten_minutes_apart_are_not_combined() {
        let mut correlator = Correlator::new("n1");
        for number in 0..9 {
            correlator.correlate(observed("Failed", &format!("m{number}"), number));
        }
        let later = correlator.correlate(observed("Failed", "m9", 8 + 601)).unwrap();
        assert_eq!(later.event.message.as_deref(), Some("m9"));
    }

    #[test]
    fn event_burst_is_25_per_object_then_one_per_five_minutes() {
        let mut correlator = Correlator::new("n1");
        let mut written = |second| correlator.correlate(observed("Unhealthy", "same", second)).is_some();
        assert_eq!((0..40).filter(|_| written(0)).count(), 25);
        assert!(!written(299));
        assert!(written(301));
        assert!(!written(302));
    }

    #[test]
    fn rate_limited_events_still_raise_the_count() {
        let mut correlator = Correlator::new("n1");
        for _ in 0..30 {
            correlator.correlate(observed("Unhealthy", "same", 0));
        }
        let next = correlator.correlate(observed("Unhealthy", "same", 400)).unwrap();
        assert_eq!(next.event.count, Some(31));
    }

    #[test]
    fn normal_events_do_not_use_up_the_room_of_warnings() {
        let mut correlator = Correlator::new("n1");
        for _ in 0..30 {
            correlator.correlate(ObservedEvent { severity: Severity::Normal, ..observed("Pulled", "same", 0) });
        }
        assert!(correlator.correlate(observed("Failed", "same", 0)).is_some());
    }

    #[test]
    fn simultaneous_events_get_distinct_valid_names() {
        let mut correlator = Correlator::new("n1");
        let mut long = observed("Pulled", "a", 0);
        long.object.name = Some(format!("{}-{}", "a".repeat(235), "b".repeat(17)));
        let names = [long.clone(), ObservedEvent { message: "b".to_owned(), ..long }]
            .map(|observed| correlator.correlate(observed).unwrap().event.metadata.name.unwrap());
        assert_ne!(names[0], names[1]);
        assert!(names.iter().all(|name| name.len() <= NAME_MAX && !name.contains("-.")), "{names:?}");
    }

    fn observed(reason: &str, message: &str, second: i64) -> ObservedEvent {
        ObservedEvent {
            object: ObjectReference {
                kind: Some("Pod".to_owned()),
                api_version: Some("v1".to_owned()),
                namespace: Some("default".to_owned()),
                name: Some("web".to_owned()),
                uid: Some("u1".to_owned()),
                resource_version: Some("7".to_owned()),
                field_path: Some("spec.containers{a}".to_owned()),
            },
            severity: Severity::Warning,
            reason: reason.to_owned(),
            message: message.to_owned(),
            annotations: BTreeMap::from([("starved_resource".to_owned(), "memory".to_owned())]),
            times: 1,
            first_at: at(second),
            last_at: at(second),
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }
}
