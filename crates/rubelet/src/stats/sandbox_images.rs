//! The images of sandboxes.
//!
//! Owns: a cache of the images of known sandboxes; CRI has them in the verbose status only, so each is requested once.
//! Never: delays a sample for long; an unknown image is empty.
//! Upstream: cAdvisor, which calls containerd directly.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use rubelet_cri::port::ContainerRuntime;
use serde::Deserialize;

use super::targets::PodTarget;

/// For all calls of a sample together.
const DEADLINE: Duration = Duration::from_secs(2);
/// Enough to hide the latency of a call, too few to crowd out pods at the runtime.
const CALLS_AT_ONCE: usize = 4;

pub(crate) struct SandboxImages {
    runtime: Arc<dyn ContainerRuntime>,
    /// By sandbox.
    known: Mutex<BTreeMap<String, String>>,
}

/// The used part of the runtime's verbose info; containerd and CRI-O agree on it.
#[derive(Deserialize)]
struct SandboxInfo {
    #[serde(default)]
    image: String,
}

impl SandboxImages {
    pub(crate) fn new(runtime: Arc<dyn ContainerRuntime>) -> Self {
        SandboxImages { runtime, known: Mutex::default() }
    }

    pub(crate) async fn fill_in(&self, pods: &mut [PodTarget]) {
        let unknown: Vec<String> = {
            let mut known = self.known();
            known.retain(|id, _| pods.iter().any(|pod| pod.sandbox_id == *id));
            let ids = pods.iter().map(|pod| &pod.sandbox_id);
            ids.filter(|id| !known.contains_key(*id)).cloned().collect()
        };
        let asked = stream::iter(unknown).for_each_concurrent(CALLS_AT_ONCE, |id| self.ask(id));
        // The next sample requests what did not arrive in time.
        let _ = tokio::time::timeout(DEADLINE, asked).await;
        let known = self.known();
        for pod in pods {
            pod.sandbox_image = known.get(&pod.sandbox_id).cloned().unwrap_or_default();
        }
    }

    async fn ask(&self, id: String) {
        if let Ok(info) = self.runtime.pod_sandbox_info(&id).await {
            self.known().insert(id, image_of(&info));
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Empty if the runtime does not report it.
pub(crate) fn image_of(info: &str) -> String {
    serde_json::from_str(info).map(|info: SandboxInfo| info.image).unwrap_or_default()
}

impl std::fmt::Debug for SandboxImages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SandboxImages").field("known", &self.known).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_image_is_found_in_verbose_status() {
        let told =
            r#"{"pid":42,"image":"registry.k8s.io/pause:3.10.2","snapshotKey":"s1","runtimeSpec":{"image":"other"}}"#;
        assert_eq!(image_of(told), "registry.k8s.io/pause:3.10.2");
        for nothing in ["", "{}", "plain text"] {
            assert_eq!(image_of(nothing), "", "{nothing}");
        }
    }
}
