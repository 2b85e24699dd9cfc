//! Watches one object for as long as a pod needs it.
//!
//! Owns: the watch of a single object, and the effect of a change. An immutable object is read once.
//! Upstream: `watch_based_manager.go`.

use std::{collections::BTreeMap, sync::Arc};

use rubelet_core::{
    event::Event,
    id::PodUid,
    objects::{Object, ObjectKey, ObjectKind, TrustBundle},
    volumes::trust_bundles,
};
use rubelet_kube::reflector::{self, Delta, Selection};
use tokio::sync::mpsc;

use super::{CachedObject, Shared, collection, locked};

/// Changes of one object are rare, and each is applied at once.
const BACKLOG: usize = 1;

/// The bundles of a signer by name.
type Bundles = BTreeMap<String, TrustBundle>;

pub(super) async fn follow(shared: Arc<Shared>, key: ObjectKey) {
    let field = if key.kind == ObjectKind::TrustBundlesOfSigner { "spec.signerName" } else { "metadata.name" };
    let selection = Selection { collection: collection(&key), fields: Some(format!("{field}={}", key.name)) };
    let (sender, mut changes) = mpsc::channel(BACKLOG);
    let taking_in = async {
        while let Some(change) = changes.recv().await {
            if take_in(&shared, &key, change).await == Next::Stop {
                break;
            }
        }
    };
    tokio::select! {
        biased;
        // Neither is awaited again after the other has ended.
        () = taking_in => {}
        () = reflector::follow(&*shared.api, &selection, shared.seed(&key.to_string()), &sender) => {}
    }
}

#[derive(PartialEq, Eq)]
enum Next {
    GoOn,
    /// It is immutable, or no pod needs it.
    Stop,
}

async fn take_in(shared: &Shared, key: &ObjectKey, change: Delta) -> Next {
    let object = match shared.read(key, change) {
        Ok(object) => object.map(Arc::new),
        Err(error) => {
            // The error's position is safe to log; the value there may be secret.
            tracing::warn!(object = %key, line = error.line(), column = error.column(), "failed to decode object");
            return Next::GoOn;
        }
    };
    let is_immutable = object.as_ref().is_some_and(|object| object.is_immutable());
    let Some(pods) = shared.enter(key, object.as_ref()) else { return Next::Stop };
    if !pods.is_empty() {
        tracing::debug!(object = %key, pods = pods.len(), "object changed");
    }
    if let Some(inbox) = shared.inbox.get() {
        for pod in pods {
            // The loop has ended; the hint has no receiver.
            let _ = inbox.send(Event::Refresh { pod }).await;
        }
    }
    if is_immutable { Next::Stop } else { Next::GoOn }
}

impl Shared {
    /// The object after the change; `None` when there is none.
    fn read(&self, key: &ObjectKey, change: Delta) -> Result<Option<Object>, serde_json::Error> {
        if key.kind == ObjectKind::TrustBundlesOfSigner {
            return self.bundles_after(key, change).map(|bundles| Some(Object::TrustBundles(bundles)));
        }
        let body = match change {
            Delta::Replaced(objects) => objects.into_iter().next(),
            Delta::Applied(object) => Some(object),
            Delta::Deleted(_) => None,
        };
        body.map(|body| Object::read(key.kind, &body)).transpose()
    }

    /// All bundles of a signer after the change; there may be none.
    fn bundles_after(&self, key: &ObjectKey, change: Delta) -> Result<Bundles, serde_json::Error> {
        let known = locked(&self.entries).get(key).map(|entry| entry.cached.borrow().clone());
        let mut bundles = match known {
            Some(CachedObject::Read { object: Some(object), .. }) => match &*object {
                Object::TrustBundles(bundles) => bundles.clone(),
                Object::ConfigMap(_) | Object::Secret(_) | Object::RuntimeClass(_) | Object::CsiDriver(_) => {
                    Bundles::new()
                }
            },
            Some(CachedObject::Read { object: None, .. } | CachedObject::Unread) | None => Bundles::new(),
        };
        match change {
            Delta::Replaced(all) => {
                bundles = all.iter().map(|body| trust_bundles::read(body)).collect::<Result<_, _>>()?;
            }
            Delta::Applied(body) => bundles.extend([trust_bundles::read(&body)?]),
            Delta::Deleted(body) => drop(bundles.remove(&trust_bundles::read(&body)?.0)),
        }
        Ok(bundles)
    }

    /// Stores the new value, and returns the pods to hint; `None` if no pod needs it.
    fn enter(&self, key: &ObjectKey, object: Option<&Arc<Object>>) -> Option<Vec<PodUid>> {
        let mut entries = locked(&self.entries);
        let entry = entries.get_mut(key)?;
        let at = self.clock.now().uptime;
        let is_news = match entry.cached.send_replace(CachedObject::Read { object: object.cloned(), at }) {
            CachedObject::Unread => std::mem::take(&mut entry.was_missed),
            CachedObject::Read { object: last, .. } => last.as_ref() != object,
        };
        Some(if is_news { entry.pods.iter().cloned().collect() } else { Vec::new() })
    }
}
