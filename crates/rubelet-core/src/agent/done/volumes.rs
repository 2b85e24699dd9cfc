//! Results about volumes that a pod has already.
//!
//! Owns: what the end of a refresh, of another publication, of another look at a claim and of an expansion means, none of which
//! delays the pod; and that of mapping a block volume, which is recorded in events.

use super::events::{failed_mount, failed_volume, mapped};
use crate::{
    effect::{EffectError, ErrorKind, EventRecord, Facts, InvolvedObject, Severity},
    event_reasons,
    op::VolumeOp,
    pod::{Cure, Failure, PodRecord},
    time::Now,
    volumes::{
        claims::PersistentSource,
        expansion::{ClaimedSize, Expanded},
    },
};

/// `None`: the volume is not set up yet, or the operation is tried again after a back-off.
pub(super) fn renewal_ended(
    record: &mut PodRecord,
    op: &VolumeOp,
    result: &Result<Facts, EffectError>,
    now: Now,
) -> Option<Vec<EventRecord>> {
    let failed = |record: &PodRecord| result.as_ref().err().map(|error| failed_mount(record, error));
    match op {
        // It is repeated when it is due.
        VolumeOp::Refresh { .. } => Some(failed(record).into_iter().collect()),
        VolumeOp::SetUp { volume, .. } if record.is_set_up(volume) => {
            record.volumes.entry(volume.clone()).or_default().is_republish_due = false;
            Some(failed(record).into_iter().collect())
        }
        VolumeOp::SetUp { volume, claimed: Some(source), .. } => {
            let known = record.volumes.entry(volume.clone()).or_default();
            known.is_resolve_due = result.is_err();
            let Ok(Facts::Mapped(places)) = result else { return None };
            known.is_set_up = true;
            Some(mapped(record, source, places))
        }
        VolumeOp::Resolve { volume, .. } if record.is_set_up(volume) => result.is_err().then(Vec::new),
        VolumeOp::Resolve { volume, .. } => {
            let known = record.volumes.get_mut(volume)?;
            let source = match result {
                Ok(Facts::Volume(found)) if known.claimed.is_some() => found.clone(),
                // The last resolved source stays in use until the next resolve succeeds.
                Ok(_) | Err(_) => known.claimed.clone()?,
            };
            known.resolved(&source, now);
            Some(result.as_ref().err().map(|error| failed_volume(record, op, error)).into_iter().collect())
        }
        VolumeOp::Expand { volume, source, .. } => match result {
            Ok(Facts::Expanded(expanded)) => Some(expansion_ended(record, volume, source, expanded)),
            Ok(_) => None,
            Err(error) => Some(vec![expansion_failed(record, volume, source, error, now)]),
        },
        // It is repeated when it is due; what it found is not about the volume alone (`agent/devices.rs`).
        VolumeOp::CheckAttachLimit { volume, .. } => {
            record.volumes.entry(volume.clone()).or_default().limit_checked_at = Some(now.uptime);
            Some(Vec::new())
        }
        VolumeOp::SetUp { .. }
        | VolumeOp::Stage { .. }
        | VolumeOp::Unstage { .. }
        | VolumeOp::Unmount { .. }
        | VolumeOp::TearDown(_) => None,
    }
}

fn expansion_failed(
    record: &mut PodRecord,
    volume: &str,
    source: &PersistentSource,
    error: &EffectError,
    now: Now,
) -> EventRecord {
    let known = record.volumes.entry(volume.to_owned()).or_default();
    let failure = Failure::of_volume(known.expansion_failure.as_ref(), error.message.clone(), now);
    let is_late = error.kind == ErrorKind::FileSystemLate;
    let cure = if is_late { Cure::FileSystemAnswer } else { Cure::ObjectChange };
    known.expansion_failure = Some(Failure { cure, ..failure });
    let message = format!("NodeExpandVolume.NodeExpandVolume failed for volume {:?} : {}", source.name, error.message);
    let about = InvolvedObject::Pod(record.id.clone());
    EventRecord::new(about, Severity::Warning, event_reasons::VOLUME_RESIZE_FAILED, message)
}

/// Upstream records the event on the pod and on the claim.
fn expansion_ended(
    record: &mut PodRecord,
    volume: &str,
    source: &PersistentSource,
    expanded: &Expanded,
) -> Vec<EventRecord> {
    let Some(size) = &source.size else { return Vec::new() };
    let known = record.volumes.entry(volume.to_owned()).or_default();
    known.expansion_failure = None;
    if *expanded == Expanded::NotYet {
        known.expansion_waits = true;
        return Vec::new();
    }
    known.expanded_bytes = Some(size.volume_bytes);
    let (severity, reason, message) = match expanded {
        Expanded::NotNeeded | Expanded::NotYet | Expanded::InUse { .. } => return Vec::new(),
        Expanded::Done => {
            let node = record.spec().node_name.as_deref().unwrap_or_default();
            let message = format!("MountVolume.NodeExpandVolume succeeded for volume {:?} {node}", source.name);
            (Severity::Normal, event_reasons::FILE_SYSTEM_RESIZE_SUCCESSFUL, message)
        }
        Expanded::ReadOnly => {
            let message = format!(
                "MountVolume.NodeExpandVolume failed for volume {:?} requested read-only file system",
                source.name
            );
            (Severity::Warning, event_reasons::FILE_SYSTEM_RESIZE_FAILED, message)
        }
    };
    let ClaimedSize { namespace, claim, claim_uid, .. } = size.clone();
    let claim = InvolvedObject::Claim { namespace, name: claim, uid: claim_uid };
    let objects = [InvolvedObject::Pod(record.id.clone()), claim];
    objects.map(|about| EventRecord::new(about, severity, reason, message.clone())).to_vec()
}
