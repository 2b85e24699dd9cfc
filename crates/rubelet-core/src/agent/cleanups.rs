//! Cleanup of orphans: pods in the runtime and directories on disk that belong to no desired pod.
//!
//! Owns: what counts as an orphan. Nothing does until all sources are ready.
//! Upstream: HandlePodCleanups, `cleanupOrphanedPodDirs`, container garbage collection.

use std::sync::Arc;

use crate::{
    agent::{Agent, config::named_pod},
    gc,
    id::{PodRef, PodUid},
    observation::Listing,
    pod::{Lifecycle, plan::Planned},
    time::Now,
};

impl Agent {
    /// Stops pods that are in the runtime and not desired.
    pub(super) fn handle_pod_cleanups(&mut self, now: Now) {
        if !self.config.sources_ready(&self.settings.sources) {
            return;
        }
        let Some(listing) = &self.node.listing else { return };
        let unknown: Vec<PodRef> = listing
            .pods
            .values()
            .map(|listed| listed.pod.clone())
            .filter(|pod| {
                !self.records.contains_key(&pod.uid) && !self.node.was_gone_after(&pod.uid, listing.looked_at)
            })
            .collect();
        for pod in unknown {
            self.adopt_orphan(pod, now);
        }
    }

    /// A directory of an unknown pod is removed like that of a terminated pod.
    pub(super) fn adopt_directories(&mut self, uids: Vec<PodUid>, log_dirs: &[String], now: Now) {
        let named = log_dirs.iter().filter_map(|name| parse_log_dir(name));
        let unnamed = uids.into_iter().map(|uid| {
            let logs = log_dirs.iter().filter_map(|name| parse_log_dir(name)).find(|pod| pod.uid == uid);
            logs.unwrap_or_else(|| PodRef::unnamed(uid))
        });
        let orphans: Vec<_> = named.chain(unnamed).filter(|pod| !self.records.contains_key(&pod.uid)).collect();
        for pod in orphans {
            if !self.records.contains_key(&pod.uid) {
                self.adopt_orphan(pod, now);
            }
        }
    }

    /// Orphans found by their directory or cgroup get their names from the runtime: a static pod waits for a pod of the same
    /// name.
    pub(super) fn name_orphans(&mut self, listing: &Listing) {
        for record in self.records.values_mut().filter(|record| record.id.is_unnamed()) {
            if let Some(listed) = listing.pods.get(&record.id.uid) {
                record.id = listed.pod.clone();
                record.pod = Arc::new(named_pod(&record.id));
            }
        }
    }

    /// Periodic: syncs every pod and enforces the node's limit on dead containers.
    pub(super) fn handle_housekeeping(&mut self, now: Now) {
        self.node.housekeeping_at = now.uptime + self.settings.sync_frequency;
        self.touched.extend(self.records.keys().cloned());
        self.handle_pod_cleanups(now);
        self.compare_mirror_pods();
        let living = self.records.values().filter(|record| !matches!(record.lifecycle, Lifecycle::Terminating { .. }));
        let with_facts = living.filter_map(|record| Some((record, record.fresh_facts()?.as_ref())));
        let removals: Vec<(PodUid, Planned)> = gc::over_node_limit(with_facts, &self.settings, now)
            .into_iter()
            .map(|(record, planned)| (record.id.uid.clone(), planned))
            .collect();
        for (uid, planned) in removals {
            self.send_planned(&uid, planned, now);
        }
    }
}

/// `<namespace>_<name>_<uid>`: none of the three can hold an underscore.
fn parse_log_dir(name: &str) -> Option<PodRef> {
    let mut parts = name.split('_');
    let (namespace, pod, uid) = (parts.next()?, parts.next()?, parts.next()?);
    let is_whole = parts.next().is_none() && !uid.is_empty();
    is_whole.then(|| PodRef { uid: PodUid::new(uid), namespace: namespace.into(), name: pod.into() })
}
