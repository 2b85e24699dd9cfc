//! Which pod and container a path means.
//!
//! Owns: exact names, as programs give them; people's names are `views/find.rs`.
//! Upstream: `GetPodByName`, `GetContainerSpec`, `findContainer`.

use std::sync::Arc;

use rubelet_core::{
    id::{PodUid, name_of, namespace_of},
    snapshot::{PodView, Snapshot},
};

/// The pod somebody asks for under this name. Of two, the one that is not on its way out.
pub fn pod_named<'a>(snapshot: &'a Snapshot, namespace: &str, name: &str) -> Option<(&'a PodUid, &'a Arc<PodView>)> {
    let has_name = |view: &PodView| name_of(&view.pod) == name && namespace_of(&view.pod) == namespace;
    let named = snapshot.pods.iter().filter(|(_, view)| view.source.is_some() && has_name(view));
    named.min_by_key(|(_, view)| !matches!(view.lifecycle.as_str(), "Waiting" | "Syncing"))
}

pub fn has_container(view: &PodView, container: &str) -> bool {
    let Some(spec) = &view.pod.spec else { return false };
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|each| each.name.as_str());
    let ordinary = spec.init_containers.iter().flatten().chain(&spec.containers).map(|each| each.name.as_str());
    ordinary.chain(ephemeral).any(|name| name == container)
}
