//! The pod manager: the desired pods, with static and mirror pods told apart.
//!
//! Owns: pods by UID and by full name, and the translation between a static pod and its mirror pod. Never: decides what happens
//! to them.
//! Upstream: `pod/pod_manager.go`, `types/pod_update.go`.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;

use crate::{
    event::Source,
    id::{PodUid, full_name_of},
    manifest::{HASH_ANNOTATION, SOURCE_ANNOTATION},
    pod_config::MIRROR_ANNOTATION,
};

/// The desired pods. A mirror pod is the API object of a static pod: it has the same full name, another UID, and is never run.
#[derive(Clone, Debug, Default)]
pub struct PodManager {
    pods: BTreeMap<PodUid, Arc<Pod>>,
    uid_by_full_name: BTreeMap<String, PodUid>,
    mirror_pods: BTreeMap<PodUid, Arc<Pod>>,
    mirror_uid_by_full_name: BTreeMap<String, PodUid>,
}

impl PodManager {
    pub fn set_pods(&mut self, pods: impl IntoIterator<Item = Arc<Pod>>) {
        *self = PodManager::default();
        for pod in pods {
            self.add_pod(pod);
        }
    }

    /// Adds the pod, or replaces the one of its UID.
    pub fn add_pod(&mut self, pod: Arc<Pod>) {
        let (uid, full_name) = (PodUid::of(&pod), full_name_of(&pod));
        let (pods, names) = self.maps_for(&pod);
        names.insert(full_name, uid.clone());
        pods.insert(uid, pod);
    }

    /// Like `add_pod`, but a watch event from before our last write does not revert the status.
    pub fn update_pod(&mut self, pod: Arc<Pod>) -> Arc<Pod> {
        let uid = PodUid::of(&pod);
        let (pods, _) = self.maps_for(&pod);
        let pod = match pods.get(&uid) {
            Some(known) if is_newer(known, &pod) => {
                let mut pod = Pod { status: known.status.clone(), ..Pod::clone(&pod) };
                // With its version: a second such event must not count as new either.
                pod.metadata.resource_version.clone_from(&known.metadata.resource_version);
                Arc::new(pod)
            }
            Some(_) | None => pod,
        };
        self.add_pod(pod.clone());
        pod
    }

    /// A newer pod that took over the full name keeps it.
    pub fn remove_pod(&mut self, pod: &Pod) {
        let (uid, full_name) = (PodUid::of(pod), full_name_of(pod));
        let (pods, names) = self.maps_for(pod);
        pods.remove(&uid);
        if names.get(&full_name) == Some(&uid) {
            names.remove(&full_name);
        }
    }

    /// Without mirror pods.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods.values()
    }

    /// Never a mirror pod.
    pub fn pod_by_uid(&self, uid: &PodUid) -> Option<&Arc<Pod>> {
        self.pods.get(uid)
    }

    /// Some source has a pod of this UID, or a mirror pod has it.
    pub fn knows(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid) || self.mirror_pods.contains_key(uid)
    }

    pub fn pod_by_full_name(&self, full_name: &str) -> Option<&Arc<Pod>> {
        self.pods.get(self.uid_by_full_name.get(full_name)?)
    }

    pub fn pod_by_name(&self, namespace: &str, name: &str) -> Option<&Arc<Pod>> {
        self.pod_by_full_name(&format!("{name}_{namespace}"))
    }

    /// Made from the pod's current manifest: a mirror of an older one belongs to another pod.
    pub fn mirror_pod_by_pod(&self, pod: &Pod) -> Option<&Arc<Pod>> {
        self.mirror_pod_by_full_name(&full_name_of(pod)).filter(|mirror| is_mirror_pod_of(mirror, pod))
    }

    pub fn mirror_pod_by_full_name(&self, full_name: &str) -> Option<&Arc<Pod>> {
        self.mirror_pods.get(self.mirror_uid_by_full_name.get(full_name)?)
    }

    pub fn pod_by_mirror_pod(&self, mirror_pod: &Pod) -> Option<&Arc<Pod>> {
        self.pod_by_full_name(&full_name_of(mirror_pod))
    }

    /// The pod's own UID: a mirror pod's is translated to its static pod's.
    pub fn translate_pod_uid(&self, uid: &PodUid) -> PodUid {
        let pod = self.mirror_pods.get(uid).and_then(|mirror| self.pod_by_mirror_pod(mirror));
        pod.map_or_else(|| uid.clone(), |pod| PodUid::of(pod))
    }

    /// The API object of the pod: itself, or for a static pod its mirror pod.
    pub fn api_pod(&self, uid: &PodUid) -> Option<&Arc<Pod>> {
        let pod = self.pods.get(uid)?;
        if is_static_pod(pod) { self.mirror_pod_by_pod(pod) } else { Some(pod) }
    }

    /// Stores the status from the response to our write, ahead of the watch.
    pub fn note_stored(&mut self, stored: &Pod) {
        let uid = PodUid::of(stored);
        let (pods, _) = self.maps_for(stored);
        if let Some(known) = pods.get_mut(&uid)
            && is_newer(stored, known)
        {
            let mut pod = Pod::clone(known);
            pod.status.clone_from(&stored.status);
            pod.metadata.resource_version.clone_from(&stored.metadata.resource_version);
            *known = Arc::new(pod);
        }
    }

    fn maps_for(&mut self, pod: &Pod) -> (&mut BTreeMap<PodUid, Arc<Pod>>, &mut BTreeMap<String, PodUid>) {
        if is_mirror_pod(pod) {
            (&mut self.mirror_pods, &mut self.mirror_uid_by_full_name)
        } else {
            (&mut self.pods, &mut self.uid_by_full_name)
        }
    }
}

/// Resource versions are growing numbers; a pod without one is not newer.
fn is_newer(one: &Pod, other: &Pod) -> bool {
    let version = |pod: &Pod| pod.metadata.resource_version.as_ref().and_then(|text| text.parse::<u64>().ok());
    matches!((version(one), version(other)), (Some(one), Some(other)) if one > other)
}

/// From a file or a URL, not from the API server.
pub fn is_static_pod(pod: &Pod) -> bool {
    annotation(pod, SOURCE_ANNOTATION).is_some_and(|source| source != Source::Api.as_str())
}

pub fn is_mirror_pod(pod: &Pod) -> bool {
    annotation(pod, MIRROR_ANNOTATION).is_some()
}

/// The same name, made from the static pod's current manifest.
pub fn is_mirror_pod_of(mirror_pod: &Pod, pod: &Pod) -> bool {
    let same_names =
        mirror_pod.metadata.name == pod.metadata.name && mirror_pod.metadata.namespace == pod.metadata.namespace;
    let mirrored = annotation(mirror_pod, MIRROR_ANNOTATION);
    same_names && mirrored.is_some_and(|hash| hash == annotation(pod, HASH_ANNOTATION).unwrap_or_default())
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::mk_pod;

    fn named(text: &str, uid: &str, name: &str) -> Arc<Pod> {
        let mut pod = mk_pod(text);
        pod.metadata.uid = Some(uid.to_owned());
        pod.metadata.name = Some(name.to_owned());
        Arc::new(pod)
    }

    fn mirror(uid: &str, name: &str, hash: &str) -> Arc<Pod> {
        let mut pod = Pod::clone(&named("always | main a", uid, name));
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(MIRROR_ANNOTATION.to_owned(), hash.to_owned());
        Arc::new(pod)
    }

    fn manager(pods: &[Arc<Pod>]) -> PodManager {
        let mut manager = PodManager::default();
        manager.set_pods(pods.iter().cloned());
        manager
    }

    #[test]
    fn mirror_pod_translates_to_its_static_pod_in_any_order() {
        let (pod, copy) = (named("always | static | main a", "s1", "web"), mirror("m1", "web", "u1"));
        for pods in [[pod.clone(), copy.clone()], [copy.clone(), pod.clone()]] {
            let manager = manager(&pods);
            assert_eq!(manager.translate_pod_uid(&"m1".into()), "s1".into());
            assert_eq!(manager.translate_pod_uid(&"s1".into()), "s1".into());
            assert_eq!(manager.api_pod(&"s1".into()), Some(&copy));
            assert_eq!(manager.mirror_pod_by_pod(&pod), Some(&copy));
            assert_eq!(manager.pod_by_mirror_pod(&copy), Some(&pod));
            assert!(manager.pod_by_uid(&"m1".into()).is_none(), "a mirror pod is no pod to run");
            assert_eq!(manager.pods().count(), 1);
        }
    }

    #[test]
    fn no_older_watch_event_reverts_our_write() {
        let at = |version: u64, phase: &str| {
            let mut pod = Pod::clone(&named("always | main a", "u1", "web"));
            pod.metadata.resource_version = Some(version.to_string());
            pod.status.get_or_insert_default().phase = Some(phase.to_owned());
            pod
        };
        let mut manager = manager(&[Arc::new(at(1, "Pending"))]);
        manager.note_stored(&at(5, "Running"));
        for echo in [2, 3] {
            let known = manager.update_pod(Arc::new(at(echo, "Pending")));
            assert_eq!(known.status.as_ref().and_then(|status| status.phase.as_deref()), Some("Running"), "{echo}");
        }
        let known = manager.update_pod(Arc::new(at(6, "Failed")));
        assert_eq!(known.status.as_ref().and_then(|status| status.phase.as_deref()), Some("Failed"));
    }

    #[test]
    fn the_mirror_of_an_older_manifest_is_not_the_pods() {
        let (pod, old) = (named("always | static | main a", "s1", "web"), mirror("m1", "web", "older"));
        let manager = manager(&[pod.clone(), old.clone()]);
        assert_eq!(manager.api_pod(&"s1".into()), None);
        assert_eq!(manager.mirror_pod_by_pod(&pod), None);
        assert_eq!(manager.mirror_pod_by_full_name("web_default"), Some(&old), "it is there to be deleted");
    }

    #[test]
    fn a_static_pod_without_a_mirror_is_not_in_the_api() {
        let manager = manager(&[named("always | static | main a", "s1", "web"), named("always | main a", "p1", "api")]);
        assert_eq!(manager.api_pod(&"s1".into()), None);
        assert_eq!(manager.api_pod(&"p1".into()).map(|pod| PodUid::of(pod)), Some("p1".into()));
    }

    #[test]
    fn watch_event_older_than_our_write_does_not_revert_it() {
        let at = |version: &str, phase: &str| {
            let mut pod = Pod::clone(&named("always | main a", "p1", "web"));
            pod.metadata.resource_version = Some(version.to_owned());
            pod.status.get_or_insert_default().phase = Some(phase.to_owned());
            Arc::new(pod)
        };
        let phase =
            |manager: &PodManager| manager.api_pod(&"p1".into()).unwrap().status.clone().unwrap().phase.unwrap();
        let mut manager = manager(&[at("5", "Pending")]);
        manager.note_stored(&at("9", "Running"));
        assert_eq!(phase(&manager), "Running");
        manager.update_pod(at("7", "Pending"));
        assert_eq!(phase(&manager), "Running");
        manager.update_pod(at("10", "Failed"));
        assert_eq!(phase(&manager), "Failed");
        manager.note_stored(&at("9", "Running"));
        assert_eq!(phase(&manager), "Failed", "a late answer is old news");
    }

    #[test]
    fn newer_pod_of_a_name_keeps_the_name() {
        let (old, new) = (named("always | main a", "p1", "web"), named("always | main a", "p2", "web"));
        let mut manager = manager(&[old.clone(), new.clone()]);
        manager.remove_pod(&old);
        assert_eq!(manager.pod_by_name("default", "web"), Some(&new));
        assert_eq!(manager.pod_by_full_name("web_default"), Some(&new));
        assert!(manager.pod_by_uid(&"p1".into()).is_none());
    }

    #[test]
    fn mirror_pod_belongs_to_its_pod_while_manifest_is_unchanged() {
        let pod = named("always | static | main a", "s1", "web");
        assert!(is_mirror_pod_of(&mirror("m1", "web", "u1"), &pod));
        assert!(!is_mirror_pod_of(&mirror("m1", "web", "changed"), &pod));
        assert!(!is_mirror_pod_of(&mirror("m1", "other", "u1"), &pod));
        assert!(!is_mirror_pod_of(&pod, &pod), "it is no mirror at all");
    }

    #[test]
    fn static_pods_come_from_anywhere_but_the_api() {
        let sourced = |source: &str| {
            let mut pod = mk_pod("always | main a");
            let annotations = pod.metadata.annotations.get_or_insert_default();
            annotations.insert(SOURCE_ANNOTATION.to_owned(), source.to_owned());
            pod
        };
        assert!(is_static_pod(&sourced("file")) && is_static_pod(&sourced("http")));
        assert!(!is_static_pod(&sourced("api")) && !is_static_pod(&mk_pod("always | main a")));
    }
}
