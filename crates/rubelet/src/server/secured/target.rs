//! Finds the pod and container that a path names.
//!
//! Owns: exact names, as programs use them; names typed by users are `views/find.rs`.
//! Upstream: `GetPodByName`, `GetContainerSpec`, `findContainer`, `TranslatePodUID`.

use std::sync::Arc;

use rubelet_core::{
    id::{PodUid, name_of, namespace_of},
    snapshot::{PodView, Snapshot},
};

/// The pod of this name. Of two, the one that is not terminating.
pub(super) fn pod_named<'a>(
    snapshot: &'a Snapshot,
    namespace: &str,
    name: &str,
) -> Option<(&'a PodUid, &'a Arc<PodView>)> {
    let has_name = |view: &PodView| name_of(&view.pod) == name && namespace_of(&view.pod) == namespace;
    let named = snapshot.pods.iter().filter(|(_, view)| view.source.is_some() && has_name(view));
    named.min_by_key(|(_, view)| !matches!(view.lifecycle.as_str(), "Waiting" | "Syncing"))
}

/// A static pod is also found by the UID of its mirror pod, which API clients know it by.
pub(super) fn has_uid(uid: &PodUid, view: &PodView, wanted: &str) -> bool {
    [Some(uid), view.mirror_uid.as_ref()].into_iter().flatten().any(|known| known.as_str() == wanted)
}

pub(super) fn has_container(view: &PodView, container: &str) -> bool {
    let Some(spec) = &view.pod.spec else { return false };
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|each| each.name.as_str());
    let ordinary = spec.init_containers.iter().flatten().chain(&spec.containers).map(|each| each.name.as_str());
    ordinary.chain(ephemeral).any(|name| name == container)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::server::views::tests::view;

    #[test]
    fn static_pod_is_found_by_own_and_mirror_uid() {
        let mut web = view("default", "web-n1", &["a"], &[], json!({}));
        let uid = PodUid::new("u1");
        assert!(has_uid(&uid, &web, "u1") && !has_uid(&uid, &web, "m1"));
        web.mirror_uid = Some(PodUid::new("m1"));
        assert!(has_uid(&uid, &web, "u1") && has_uid(&uid, &web, "m1") && !has_uid(&uid, &web, "m2"));
    }
}
