//! PodConfig: which pods a source added, changed or removed.
//!
//! Owns: the latest pods of each source, and the annotations `config.source` and `config.seen`. A source sends its whole set.
//! Never: decides what happens to a pod. Upstream: `config/config.go` (PodConfig mux, sourcesReady).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::{
    effect::{EventRecord, InvolvedObject, Severity},
    event::Source,
    event_reasons,
    id::{PodRef, PodUid},
    manifest::SOURCE_ANNOTATION,
};

/// When this process first saw the pod.
pub const SEEN_ANNOTATION: &str = "kubernetes.io/config.seen";
/// On a mirror pod, the hash of its static pod.
pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// Written by the node, so a difference in them is no change of the pod.
const LOCAL_ANNOTATIONS: [&str; 3] = [SOURCE_ANNOTATION, MIRROR_ANNOTATION, SEEN_ANNOTATION];

/// One change of the desired pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodUpdate {
    pub op: ConfigOp,
    pub source: Source,
    pub pods: Vec<Arc<Pod>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ConfigOp {
    /// The source no longer has the pod.
    Remove,
    Add,
    /// Spec, labels or annotations changed.
    Update,
    /// The pod is to be deleted gracefully, or its grace period shrank.
    Delete,
    /// Only the status in the API changed; it may differ from what we reported.
    Reconcile,
}

/// The result of an update.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// In the order in which they are handled: a name is freed before it is taken again.
    pub updates: Vec<PodUpdate>,
    /// Pods rejected because another of the same set has their name or UID; to be recorded.
    pub refused: Vec<EventRecord>,
}

#[derive(Clone, Debug, Default)]
pub struct PodConfig {
    /// A source is present once it has sent its set, even an empty one.
    sources: BTreeMap<Source, BTreeMap<PodUid, Arc<Pod>>>,
    /// Sources that were read only in part.
    partial: BTreeSet<Source>,
    /// Pods that a source has in a form that cannot be read. Their containers are no orphans.
    pub unreadable: BTreeSet<PodUid>,
}

/// Whether the source was read completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completeness {
    Whole,
    Partial,
}

impl PodConfig {
    /// Applies the whole set of a source.
    pub fn update(&mut self, source: Source, pods: Vec<Arc<Pod>>, now: Timestamp) -> Changes {
        self.partial.remove(&source);
        let mut before = self.sources.remove(&source).unwrap_or_default();
        let mut after = BTreeMap::new();
        let mut changed: BTreeMap<ConfigOp, Vec<Arc<Pod>>> = BTreeMap::new();
        // A new pod does not replace a known one, whatever the order of their files.
        let (known, new): (Vec<_>, Vec<_>) = pods.into_iter().partition(|pod| before.contains_key(&PodUid::of(pod)));
        let (pods, refused) = without_duplicates(known.into_iter().chain(new), source);
        for (uid, pod) in pods {
            let (op, pod) = compared(before.remove(&uid), pod, source, now);
            if let Some(op) = op {
                changed.entry(op).or_default().push(pod.clone());
            }
            after.insert(uid, pod);
        }
        if !before.is_empty() {
            changed.insert(ConfigOp::Remove, before.into_values().collect());
        }
        self.sources.insert(source, after);
        Changes { updates: changed.into_iter().map(|(op, pods)| PodUpdate { op, source, pods }).collect(), refused }
    }

    /// Applies what could be read of a source.
    pub fn update_partially(&mut self, source: Source, pods: Vec<Arc<Pod>>, now: Timestamp) -> Changes {
        let changes = self.update(source, pods, now);
        self.partial.insert(source);
        changes
    }

    /// Applies what was added, changed or removed since the source's whole set. Names are not compared: the API server, the
    /// only such source, has one pod of a name at a time.
    pub fn change(&mut self, source: Source, pods: Vec<Arc<Pod>>, removed: &[PodUid], now: Timestamp) -> Changes {
        let known = self.sources.entry(source).or_default();
        let mut changed: BTreeMap<ConfigOp, Vec<Arc<Pod>>> = BTreeMap::new();
        let gone: Vec<_> = removed.iter().filter_map(|uid| known.remove(uid)).collect();
        if !gone.is_empty() {
            changed.insert(ConfigOp::Remove, gone);
        }
        for pod in pods {
            let uid = PodUid::of(&pod);
            let (op, pod) = compared(known.remove(&uid), pod, source, now);
            if let Some(op) = op {
                changed.entry(op).or_default().push(pod.clone());
            }
            known.insert(uid, pod);
        }
        let updates = changed.into_iter().map(|(op, pods)| PodUpdate { op, source, pods }).collect();
        Changes { updates, refused: Vec::new() }
    }

    /// Whether all sources are ready. Before that, a pod that is not desired may be one whose source is slow.
    pub fn sources_ready(&self, expected: &[Source]) -> bool {
        self.sources_not_ready(expected).is_empty()
    }

    pub fn has_seen(&self, source: Source) -> bool {
        self.sources.contains_key(&source) && !self.partial.contains(&source)
    }

    /// The sources that have not sent their complete set.
    pub fn sources_not_ready(&self, expected: &[Source]) -> Vec<Source> {
        expected.iter().filter(|source| !self.has_seen(**source)).copied().collect()
    }
}

type Identified = Vec<(PodUid, Arc<Pod>)>;

/// The first pod of a name wins. So does the first of a UID, since the UID is the key everywhere else.
fn without_duplicates(pods: impl Iterator<Item = Arc<Pod>>, source: Source) -> (Identified, Vec<EventRecord>) {
    let mut names = BTreeSet::new();
    let mut uids = BTreeSet::new();
    let mut kept = Vec::new();
    let mut refused = Vec::new();
    for pod in pods {
        let pod_ref = PodRef::of(&pod);
        if names.contains(&pod_ref.full_name()) {
            let cause = format!("pod name \"{}\"", pod_ref.name);
            refused.push(refusal(&pod_ref, source, &cause));
        } else if uids.contains(&pod_ref.uid) {
            let cause = format!("pod UID \"{}\"", pod_ref.uid);
            refused.push(refusal(&pod_ref, source, &cause));
        } else {
            names.insert(pod_ref.full_name());
            uids.insert(pod_ref.uid.clone());
            kept.push((pod_ref.uid, pod));
        }
    }
    (kept, refused)
}

fn refusal(pod: &PodRef, source: Source, cause: &str) -> EventRecord {
    let PodRef { uid, namespace, name } = pod;
    EventRecord::new(
        InvolvedObject::Pod(pod.clone()),
        Severity::Warning,
        event_reasons::FAILED_VALIDATION,
        format!(
            "Error validating pod {name}_{namespace}({uid}) from {} due to duplicate {cause}, ignoring",
            source.as_str()
        ),
    )
}

/// The change, and the pod to keep.
fn compared(known: Option<Arc<Pod>>, new: Arc<Pod>, source: Source, now: Timestamp) -> (Option<ConfigOp>, Arc<Pod>) {
    let Some(known) = known else {
        let seen = seen(&new).filter(|_| source == Source::Api).map_or_else(|| now.to_string(), str::to_owned);
        return (Some(ConfigOp::Add), marked(new, source, &seen));
    };
    if Arc::ptr_eq(&known, &new) {
        return (None, known);
    }
    let op = if differ_in_meaning(&known, &new) {
        // A pod that is being deleted stays so, whatever else changes about it.
        if new.metadata.deletion_timestamp.is_some() { ConfigOp::Delete } else { ConfigOp::Update }
    } else if known.status != new.status {
        ConfigOp::Reconcile
    } else {
        return (None, known);
    };
    let mut pod = marked(new, source, seen(&known).unwrap_or_default());
    if let Some(mirror) = annotation(&known, MIRROR_ANNOTATION)
        && annotation(&pod, MIRROR_ANNOTATION) != Some(mirror)
    {
        let annotations = Arc::make_mut(&mut pod).metadata.annotations.get_or_insert_default();
        annotations.insert(MIRROR_ANNOTATION.to_owned(), mirror.to_owned());
    }
    (Some(op), pod)
}

fn differ_in_meaning(known: &Pod, new: &Pod) -> bool {
    known.spec != new.spec
        || known.metadata.labels != new.metadata.labels
        || known.metadata.deletion_timestamp != new.metadata.deletion_timestamp
        || known.metadata.deletion_grace_period_seconds != new.metadata.deletion_grace_period_seconds
        || !foreign_annotations(known).eq(foreign_annotations(new))
}

fn foreign_annotations(pod: &Pod) -> impl Iterator<Item = (&String, &String)> {
    let annotations = pod.metadata.annotations.iter().flatten();
    annotations.filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()))
}

/// When this process first saw the pod, if it is annotated.
pub fn seen(pod: &Pod) -> Option<&str> {
    annotation(pod, SEEN_ANNOTATION)
}

/// Annotates a pod. A source that keeps its pods annotates them itself, so that they need not be copied.
pub fn mark(pod: &mut Pod, source: Source, seen: &str) {
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(SOURCE_ANNOTATION.to_owned(), source.as_str().to_owned());
    annotations.insert(SEEN_ANNOTATION.to_owned(), seen.to_owned());
}

fn marked(mut pod: Arc<Pod>, source: Source, first_seen: &str) -> Arc<Pod> {
    let is_marked = annotation(&pod, SOURCE_ANNOTATION) == Some(source.as_str()) && seen(&pod) == Some(first_seen);
    if !is_marked {
        mark(Arc::make_mut(&mut pod), source, first_seen);
    }
    pod
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::id::full_name_of;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn pod(name: &str, uid: &str, changes: &serde_json::Value) -> Arc<Pod> {
        let mut pod = json!({
            "metadata": { "name": name, "namespace": "default", "uid": uid, "annotations": { "a": "1" } },
            "spec": { "containers": [{ "name": "c", "image": "i" }] },
        });
        for (pointer, value) in changes.as_object().unwrap() {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            let parent = pod.pointer_mut(parent).unwrap();
            parent[key.replace("~1", "/")] = value.clone();
        }
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn plain(name: &str, uid: &str) -> Arc<Pod> {
        pod(name, uid, &json!({}))
    }

    fn shown(changes: &Changes) -> String {
        let ops = changes.updates.iter().map(|update| {
            let pods: Vec<String> = update.pods.iter().map(|pod| PodUid::of(pod).to_string()).collect();
            format!("{:?} {}", update.op, pods.join(" "))
        });
        ops.chain(changes.refused.iter().map(|record| format!("{}: {}", record.reason, record.message)))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn a_set_becomes_removes_then_adds_then_updates() {
        let mut config = PodConfig::default();
        config.update(Source::File, vec![plain("a", "a1"), plain("b", "b1"), plain("c", "c1")], at(1));
        let changes = config.update(
            Source::File,
            vec![plain("a", "a2"), pod("b", "b1", &json!({ "/metadata/labels": { "x": "y" } })), plain("d", "d1")],
            at(2),
        );
        assert_snapshot!(shown(&changes), @"
        Remove a1 c1
        Add a2 d1
        Update b1
        ");
    }

    #[test]
    fn each_change_of_a_known_pod_has_its_operation() {
        for (change, op) in [
            (json!({}), None),
            (json!({ "/spec/hostNetwork": true }), Some(ConfigOp::Update)),
            (json!({ "/metadata/labels": { "x": "y" } }), Some(ConfigOp::Update)),
            (json!({ "/metadata/annotations/a": "2" }), Some(ConfigOp::Update)),
            (json!({ "/metadata/annotations": {} }), Some(ConfigOp::Update)),
            (json!({ "/metadata/annotations/kubernetes.io~1config.seen": "x" }), None),
            (json!({ "/metadata/resourceVersion": "7" }), None),
            (json!({ "/metadata/deletionTimestamp": "2026-01-01T00:00:00Z" }), Some(ConfigOp::Delete)),
            (json!({ "/status": { "phase": "Running" } }), Some(ConfigOp::Reconcile)),
            (
                json!({ "/metadata/deletionTimestamp": "2026-01-01T00:00:00Z", "/spec/hostNetwork": true }),
                Some(ConfigOp::Delete),
            ),
            (json!({ "/status": { "phase": "Running" }, "/metadata/labels": { "x": "y" } }), Some(ConfigOp::Update)),
        ] {
            let mut config = PodConfig::default();
            config.update(Source::Api, vec![plain("a", "a1")], at(1));
            let changes = config.update(Source::Api, vec![pod("a", "a1", &change)], at(2));
            let ops: Vec<ConfigOp> = changes.updates.iter().map(|update| update.op).collect();
            assert_eq!(ops, Vec::from_iter(op), "{change}");
        }
    }

    #[test]
    fn a_shorter_grace_period_is_a_deletion_again() {
        let deleting = |grace: i64| {
            let change = json!({
                "/metadata/deletionTimestamp": "2026-01-01T00:00:00Z",
                "/metadata/deletionGracePeriodSeconds": grace,
            });
            vec![pod("a", "a1", &change)]
        };
        let mut config = PodConfig::default();
        assert_eq!(shown(&config.update(Source::Api, deleting(30), at(1))), "Add a1");
        assert_eq!(shown(&config.update(Source::Api, deleting(5), at(2))), "Delete a1");
    }

    #[test]
    fn pods_carry_their_source_and_the_time_they_were_first_seen() {
        let mut config = PodConfig::default();
        config.update(Source::Http, vec![plain("a", "a1")], at(0));
        let changes =
            config.update(Source::Http, vec![pod("a", "a1", &json!({ "/metadata/annotations/a": "2" }))], at(99));
        let annotations = changes.updates[0].pods[0].metadata.annotations.as_ref().unwrap();
        assert_eq!(annotations[SOURCE_ANNOTATION], "http");
        assert_eq!(annotations[SEEN_ANNOTATION], "1970-01-01T00:00:00Z");
        assert_eq!(annotations["a"], "2");
    }

    #[test]
    fn annotated_api_pod_is_not_copied() {
        let marked = |change: &serde_json::Value| {
            let mut pod = pod("a", "a1", change);
            mark(Arc::make_mut(&mut pod), Source::Api, "1970-01-01T00:00:00Z");
            pod
        };
        let mut config = PodConfig::default();
        for change in
            [json!({}), json!({ "/status": { "phase": "Running" } }), json!({ "/metadata/annotations/a": "2" })]
        {
            let pod = marked(&change);
            let changes = config.update(Source::Api, vec![pod.clone()], at(99));
            assert!(Arc::ptr_eq(&changes.updates[0].pods[0], &pod), "{change}");
            assert_eq!(config.update(Source::Api, vec![pod], at(99)), Changes::default());
        }
        // Elsewhere the annotation comes from a manifest.
        let changes = config.update(Source::File, vec![marked(&json!({}))], at(99));
        assert_eq!(seen(&changes.updates[0].pods[0]), Some("1970-01-01T00:01:39Z"));
    }

    #[test]
    fn first_of_two_pods_with_one_name_or_uid_wins() {
        let mut config = PodConfig::default();
        let changes = config.update(Source::File, vec![plain("a", "a1"), plain("a", "a2"), plain("b", "a1")], at(1));
        assert_snapshot!(shown(&changes), @r#"
        Add a1
        FailedValidation: Error validating pod a_default(a2) from file due to duplicate pod name "a", ignoring
        FailedValidation: Error validating pod b_default(a1) from file due to duplicate pod UID "a1", ignoring
        "#);
    }

    #[test]
    fn sources_are_ready_when_each_has_sent_a_set() {
        let expected = [Source::File, Source::Http];
        let mut config = PodConfig::default();
        assert_eq!(config.sources_not_ready(&expected), expected);
        config.update(Source::File, Vec::new(), at(1));
        assert_eq!(config.sources_not_ready(&expected), [Source::Http]);
        config.update(Source::Http, vec![plain("a", "a1")], at(1));
        assert!(config.sources_ready(&expected));
        assert!(PodConfig::default().sources_ready(&[]));
    }

    fn any_pod() -> impl Strategy<Value = Arc<Pod>> {
        (0..4_u8, 0..3_u8, 0..2_u8, 0..2_u8, any::<bool>()).prop_map(|(name, version, label, phase, ending)| {
            let mut change = json!({
                "/metadata/labels": { "l": label.to_string() },
                "/status": { "phase": phase.to_string() },
            });
            if ending {
                change["/metadata/deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            pod(&format!("p{name}"), &format!("p{name}-{version}"), &change)
        })
    }

    proptest! {
        /// Applying all changes gives the source's set, and never has one name twice.
        #[test]
        fn applying_the_updates_gives_the_sources_set(
            sets in prop::collection::vec(prop::collection::vec(any_pod(), 0..6), 1..8),
        ) {
            let mut config = PodConfig::default();
            let mut model: BTreeMap<PodUid, Arc<Pod>> = BTreeMap::new();
            for set in sets {
                let is_known = |pod: &Arc<Pod>| model.contains_key(&PodUid::of(pod));
                let (known, new): (Vec<_>, Vec<_>) = set.iter().cloned().partition(is_known);
                let (wanted, _) = without_duplicates(known.into_iter().chain(new), Source::Api);
                for update in config.update(Source::Api, set, at(1)).updates {
                    prop_assert!(!update.pods.is_empty());
                    for pod in update.pods {
                        let uid = PodUid::of(&pod);
                        match update.op {
                            ConfigOp::Add => prop_assert!(model.insert(uid, pod).is_none()),
                            ConfigOp::Remove => prop_assert!(model.remove(&uid).is_some()),
                            ConfigOp::Update | ConfigOp::Delete | ConfigOp::Reconcile => {
                                prop_assert_eq!(
                                    update.op == ConfigOp::Delete && pod.metadata.deletion_timestamp.is_none(),
                                    false
                                );
                                let known = model.insert(uid, pod.clone());
                                prop_assert!(known.is_some_and(|known| known != pod));
                            }
                        }
                    }
                    let names: BTreeSet<String> = model.values().map(|pod| full_name_of(pod)).collect();
                    prop_assert_eq!(names.len(), model.len());
                }
                prop_assert_eq!(model.len(), wanted.len());
                for (uid, pod) in wanted {
                    prop_assert!(!differ_in_meaning(&model[&uid], &pod));
                    prop_assert_eq!(&model[&uid].status, &pod.status);
                }
            }
        }
    }
}
