//! Forgetting the histories of pods that are gone, for plays that last long.
//!
//! Owns: that list of maps. A rule about a pod whose history is forgotten begins anew.

use std::collections::BTreeSet;

use super::{Rules, trouble::Touched};
use crate::runtime::store::Picture;

impl Rules {
    /// Keeps the histories of these pods, by uid.
    pub(crate) fn forget_all_but(&mut self, kept: &BTreeSet<String>, picture: &Picture) {
        self.pods.retain(|uid, _| kept.contains(uid));
        let scripts: BTreeSet<_> = self.pods.values().map(|pod| pod.script.clone()).collect();
        let names: BTreeSet<_> = scripts.iter().map(|(name, _)| name.clone()).collect();
        self.scripts.retain(|script, _| scripts.contains(script));
        self.busy.retain(|_, count| *count > 0);
        self.hooks.retain(|(container, _), _| picture.containers.contains_key(container));
        self.probes.retain(|container, _| picture.containers.contains_key(container));
        self.seen.forget_all_but(kept);
        self.api.forget_all_but(kept, &names);
        self.forget_csi(kept);
        self.trouble.forget(|touched| matches!(touched, Touched::Pod(uid) if !kept.contains(uid)));
    }
}
