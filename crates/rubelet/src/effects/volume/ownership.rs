//! Events while a volume's files are given to the pod's fsGroup.
//!
//! Owns: the events meanwhile, and when each is due. Never: changes a file, ends the work.
//! Upstream: `VolumeOwnership.monitorProgress` of `pkg/volume/volume_linux.go`.

use std::{io, path::Path, pin::pin, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    id::PodRef,
};
use rubelet_host::port::SharedFiles;
use tokio::time::timeout;

use crate::world::World;

/// Upstream's.
const FIRST_EVENT_AFTER: Duration = Duration::from_secs(30);
/// Upstream's.
const EVENT_EVERY: Duration = Duration::from_secs(60);
const ADVICE: &str = "consider using OnRootMismatch - https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
                      #configure-volume-permission-and-ownership-change-policy-for-pods";

/// Waits for the work, with events while it lasts.
pub(super) async fn reported(
    world: &World,
    pod: &Pod,
    place: &Path,
    done: &SharedFiles,
    work: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let mut work = pin!(work);
    let Ok(ended) = timeout(FIRST_EVENT_AFTER, &mut work).await else {
        let pod = PodRef::of(pod);
        let place = from_pod_on(place, &pod);
        record(world, &pod, format!("Setting volume ownership for {place} is taking longer than expected, {ADVICE}"));
        loop {
            if let Ok(ended) = timeout(EVENT_EVERY, &mut work).await {
                return ended;
            }
            let count = done.get();
            record(world, &pod, format!("Setting volume ownership for {place}, processed {count} files."));
        }
    };
    ended
}

fn record(world: &World, pod: &PodRef, message: String) {
    let reason = event_reasons::VOLUME_PERMISSION_CHANGE_IN_PROGRESS;
    let event = EventRecord::new(InvolvedObject::Pod(pod.clone()), Severity::Warning, reason, message);
    world.events.record(event, world.clock.now().wall);
}

/// The path from the pod's UID on, as upstream shows it.
fn from_pod_on(place: &Path, pod: &PodRef) -> String {
    let place = place.display().to_string();
    place.find(pod.uid.as_str()).map_or_else(|| place.clone(), |start| place[start..].to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::world::testing::world_in;

    /// Work that takes this long, and counts a file per second.
    async fn slow(secs: u64, done: &SharedFiles) -> io::Result<()> {
        for _ in 0..secs {
            let _ = timeout(Duration::from_secs(1), std::future::pending::<()>()).await;
            done.count();
        }
        Ok(())
    }

    async fn events_after(secs: u64) -> String {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let metadata = json!({"name": "web", "namespace": "prod", "uid": "u1"});
        let pod = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        let (place, done) =
            (Path::new("/var/lib/kubelet/pods/u1/volumes/kubernetes.io~csi/pv/mount"), SharedFiles::default());
        reported(&world, &pod, place, &done, slow(secs, &done)).await.unwrap();
        let events = world.events.since(0).into_iter();
        events.map(|event| format!("{} {}", event.record.reason, event.record.message)).collect::<Vec<_>>().join("\n")
    }

    #[tokio::test(start_paused = true)]
    async fn long_change_of_ownership_is_reported_while_it_lasts() {
        assert_eq!(events_after(29).await, "");
        insta::assert_snapshot!(events_after(155).await, @r"
        VolumePermissionChangeInProgress Setting volume ownership for u1/volumes/kubernetes.io~csi/pv/mount is taking longer than expected, consider using OnRootMismatch - https://kubernetes.io/docs/tasks/configure-pod-container/security-context/#configure-volume-permission-and-ownership-change-policy-for-pods
        VolumePermissionChangeInProgress Setting volume ownership for u1/volumes/kubernetes.io~csi/pv/mount, processed 90 files.
        VolumePermissionChangeInProgress Setting volume ownership for u1/volumes/kubernetes.io~csi/pv/mount, processed 150 files.
        ");
    }
}
