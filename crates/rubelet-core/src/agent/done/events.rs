//! Events about results of effects that failed or were repaired.
//!
//! Owns: their words. Never: decides whether one is recorded.

use std::{collections::BTreeSet, path::Path};

use crate::{
    effect::{EffectError, EventRecord, InvolvedObject, Severity},
    event_reasons,
    id::ContainerId,
    op::{ContainerOp, Op, VolumeOp},
    pod::{PodRecord, sync_pod::event},
    volumes::claims::{BlockPlaces, PersistentSource},
};

/// The container is gone; its runtime had kept processes that CRI does not show.
pub(super) fn leftover_task(record: &PodRecord, name: &str, id: &ContainerId, error: &str) -> EventRecord {
    let message = format!("Container {id} could not be removed ({error}) before its leftover task was deleted");
    event(record, name, Severity::Warning, event_reasons::DELETED_LEFTOVER_TASK, message)
}

/// The runtime has refused a removal several times. The pod's sandbox and directory stay until it succeeds.
pub(super) fn stuck(record: &PodRecord, op: &Op, error: &str) -> EventRecord {
    let reason = event_reasons::FAILED_TO_REMOVE;
    match op {
        Op::Container(ContainerOp::Remove { name, id, .. }) => {
            let message = format!("The runtime cannot remove container {id}: {error}");
            event(record, name, Severity::Warning, reason, message)
        }
        other => EventRecord::new(
            InvolvedObject::Pod(record.id.clone()),
            Severity::Warning,
            reason,
            format!("The runtime refuses {other}: {error}"),
        ),
    }
}

pub(super) fn failed_mount(record: &PodRecord, error: &EffectError) -> EventRecord {
    EventRecord::new(
        InvolvedObject::Pod(record.id.clone()),
        Severity::Warning,
        event_reasons::FAILED_MOUNT_VOLUME,
        error.message.clone(),
    )
}

pub(super) fn failed_volume(record: &PodRecord, op: &VolumeOp, error: &EffectError) -> EventRecord {
    match op {
        VolumeOp::Resolve { volume, .. } if record.has_claim(volume) || record.has_flex_driver(volume) => {
            failed_claim(record, volume, error)
        }
        VolumeOp::SetUp { claimed: Some(source), .. } if source.is_block() => {
            let event = failed_mount(record, error);
            EventRecord { reason: event_reasons::FAILED_MAP_VOLUME.to_owned(), ..event }
        }
        _ => failed_mount(record, error),
    }
}

/// A block volume's device is shown to the pod.
pub(super) fn mapped(record: &PodRecord, source: &PersistentSource, places: &BlockPlaces) -> Vec<EventRecord> {
    let place = |what: &str, path: &Path| {
        let message = format!(
            "MapVolume.MapPodDevice succeeded for volume {:?} {what} {:?}",
            source.name,
            path.display().to_string()
        );
        let about = InvolvedObject::Pod(record.id.clone());
        EventRecord::new(about, Severity::Normal, event_reasons::SUCCESSFUL_MOUNT_VOLUME, message)
    };
    vec![place("globalMapPath", &places.bound_dir), place("volumeMapPath", &places.link_dir)]
}

/// Upstream's sentence about a volume whose claim cannot be used.
fn failed_claim(record: &PodRecord, volume: &str, error: &EffectError) -> EventRecord {
    let missing: BTreeSet<_> = record.missing_volumes().into_iter().map(|volume| volume.name.as_str()).collect();
    let unmounted = missing.into_iter().collect::<Vec<_>>().join(" ");
    let message = format!(
        "Unable to attach or mount volumes: unmounted volumes=[{unmounted}], unattached volumes=[], failed to process volumes=[{volume}]: {}",
        error.message
    );
    EventRecord::new(
        InvolvedObject::Pod(record.id.clone()),
        Severity::Warning,
        event_reasons::FAILED_MOUNT_VOLUME,
        message,
    )
}
