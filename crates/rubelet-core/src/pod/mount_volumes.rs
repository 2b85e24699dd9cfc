//! Volumes of a pod that should run: their next steps.
//!
//! Owns: what comes before a volume is set up, each volume for itself, and what is done for it while the pod runs. Whether its
//! device is ready is decided in `volumes/devices.rs`. Never: does anything.
//! Upstream: the reconciler's `mountOrAttachVolumes`, the populator's `processPodVolumes`.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Volume;

use crate::{
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    flights::PodSubject,
    op::VolumeOp,
    pod::{
        PodRecord, VolumeRecord,
        plan::{Plan, PodState, WaitsFor},
        sync_pod::{SyncContext, prepare},
    },
    time::{Now, Uptime},
    volumes::{
        self,
        claims::{self, PersistentSource},
        devices::{DeviceName, DeviceOptions, DeviceState},
    },
};

/// Upstream's time limit for all volumes of a pod.
const POD_ATTACH_AND_MOUNT_TIMEOUT: Duration = Duration::from_secs(123);

/// True when all volumes of the pod are set up; otherwise plans what can be done for them now.
pub fn set_up_volumes(record: PodState<'_>, context: SyncContext<'_>, plan: &mut Plan, now: Now) -> bool {
    let missing = record.missing_volumes();
    for volume in &missing {
        let subject = PodSubject::Volume(volume.name.clone());
        if plan.has_step(&subject) || record.is_busy(&subject, now) {
            // While the volume is resolved again, the pod keeps its reason to wait.
            let wait = record.volumes.get(&volume.name).and_then(|known| known.waits_for.clone());
            wait.into_iter().for_each(|wait| plan.wait_for_volume(&volume.name, wait));
            continue;
        }
        let known = record.volumes.get(&volume.name);
        if let Some((known, source)) = known.and_then(|known| Some((known, known.claimed.as_ref()?))) {
            claimed_volume(record, volume, (known, source), (context, now), plan);
        } else if claims::is_resolved_first(volume) {
            // A claim, and an inline volume of a driver: the spec does not say all.
            let op = resolve(&record, volume.name.clone(), context);
            plan.step(subject, op, "the volume is not resolved");
        } else {
            plan.step(subject, set_up(&record, volume.name.clone(), None), "the volume may be missing");
        }
    }
    if missing.is_empty() {
        return true;
    }
    plan.wait_for(WaitsFor::Volumes(missing.into_iter().map(|volume| volume.name.clone()).collect()));
    false
}

/// What can be done now for a volume of which it is known what it stands for.
enum NextStep {
    SetUp,
    Stage,
    /// The last try failed.
    BackOff,
    /// For another pod, an unstage, or the attach/detach controller.
    Wait,
}

/// What the volume stands for is asked again after a try with it failed, and from time to time while it waits: its persistent
/// volume may have been changed, and its driver's object made, which say how it is attached and set up.
fn claimed_volume(
    record: PodState<'_>,
    volume: &Volume,
    (known, source): (&VolumeRecord, &Arc<PersistentSource>),
    (context, now): (SyncContext<'_>, Now),
    plan: &mut Plan,
) {
    let subject = PodSubject::Volume(volume.name.clone());
    let step = next_step(record, volume, source, (context, now), plan);
    let resolve_at = known.resolved_at.unwrap_or(now.uptime) + context.settings.sync_frequency;
    let is_resolve_due = match step {
        NextStep::SetUp | NextStep::Stage => known.is_resolve_due,
        NextStep::Wait => resolve_at <= now.uptime && !plan.has_step(&subject),
        NextStep::BackOff => false,
    };
    if is_resolve_due {
        let op = resolve(&record, volume.name.clone(), context);
        return plan.step(subject, op, "the claim or its PersistentVolume may have changed");
    }
    match step {
        NextStep::SetUp => {
            let op = set_up(&record, volume.name.clone(), Some(source.clone()));
            plan.step(subject, op, "the volume may be missing");
        }
        NextStep::Stage => {
            let options = DeviceOptions { group: volumes::fs_group(record.spec()) };
            plan.devices.push((source.clone(), options));
        }
        NextStep::Wait => plan.wake_by(resolve_at),
        NextStep::BackOff => {}
    }
}

/// Says what the volume waits for, if it does.
fn next_step(
    record: PodState<'_>,
    volume: &Volume,
    source: &Arc<PersistentSource>,
    (context, now): (SyncContext<'_>, Now),
    plan: &mut Plan,
) -> NextStep {
    let name = volume.name.clone();
    if context.devices.is_used_by_another_pod(&record.id.uid, source) {
        let (reason, step) = match source.is_block() {
            true => (event_reasons::FAILED_MAP_VOLUME, "MapVolume.SetUpDevice"),
            false => (event_reasons::FAILED_MOUNT_VOLUME, "MountVolume.SetUp"),
        };
        let message = format!(
            "{step} failed for volume {:?} : volume uses the ReadWriteOncePod access mode and is already in use by another pod",
            source.name
        );
        let waits_for = WaitsFor::ExclusiveVolume(name);
        // Before the first look at the disk it is not known whether another pod has it: no event.
        match context.devices.are_listed() {
            true => wait_with_event(&record, &volume.name, waits_for, (reason, message), plan),
            false => plan.wait_for(waits_for),
        }
        return NextStep::Wait;
    }
    match context.devices.state(source, context.node, now) {
        DeviceState::Staged => return NextStep::SetUp,
        DeviceState::NotAttached => {
            plan.wait_for_volume(&volume.name, WaitsFor::Attachment(name));
            check_attach_limit(record, volume, source, now, plan);
        }
        DeviceState::OtherLabel => {
            let device = source.device_name().map(|name| name.to_string()).unwrap_or_default();
            let message = format!(
                "Unable to attach or mount volumes: unmounted volumes=[{name}], unattached volumes=[], failed to process volumes=[]: \
                 waiting for unmount of volume {device:?}, because it is already mounted to a different pod with a different SELinux label"
            );
            let event = (event_reasons::FAILED_MOUNT_VOLUME, message);
            wait_with_event(&record, &volume.name, WaitsFor::OtherLabel(name), event, plan);
        }
        DeviceState::NeedsController => {
            let message = format!(
                "AttachVolume.Attach failed for volume {:?} : attaching volumes from the kubelet is not supported",
                source.name
            );
            let event = (event_reasons::FAILED_ATTACH_VOLUME, message);
            wait_with_event(&record, &volume.name, WaitsFor::Controller(name), event, plan);
        }
        DeviceState::Unstaged => return NextStep::Stage,
        DeviceState::Failed(failure) => {
            plan.wake_by(failure.retry_at);
            let waits_for = WaitsFor::Device { volume: name, message: failure.message.clone() };
            plan.wait_for_volume(&volume.name, waits_for);
            return NextStep::BackOff;
        }
    }
    NextStep::Wait
}

/// The event is recorded when the volume's wait begins, whatever else the pod waits for.
fn wait_with_event(
    record: &PodRecord,
    volume: &str,
    waits_for: WaitsFor,
    (reason, message): (&str, String),
    plan: &mut Plan,
) {
    let known = record.volumes.get(volume).and_then(|known| known.waits_for.as_ref());
    if ![known, plan.volume_waits.get(volume)].contains(&Some(&waits_for)) {
        let about = InvolvedObject::Pod(record.id.clone());
        plan.events.push(EventRecord::new(about, Severity::Warning, reason, message));
    }
    plan.wait_for_volume(volume, waits_for);
}

/// Checks the attach limit after every `POD_ATTACH_AND_MOUNT_TIMEOUT` without an attachment. Not for a running pod, which is never
/// rejected.
fn check_attach_limit(
    record: PodState<'_>,
    volume: &Volume,
    source: &Arc<PersistentSource>,
    now: Now,
    plan: &mut Plan,
) {
    let is_active = record.facts.as_ref().is_none_or(|facts| facts.is_active());
    if is_active || !source.has_changing_limit() {
        return;
    }
    let last = record.volumes.get(&volume.name).and_then(|known| known.limit_checked_at);
    let due = last.unwrap_or(record.since.uptime) + POD_ATTACH_AND_MOUNT_TIMEOUT;
    if due > now.uptime {
        return plan.wake_by(due);
    }
    let (pod, name) = (record.id.clone(), volume.name.clone());
    let op = VolumeOp::CheckAttachLimit { pod, volume: name.clone(), source: source.clone() };
    plan.step(PodSubject::Volume(name), op, "the volume is still not attached");
}

fn set_up(record: &PodRecord, volume: String, claimed: Option<Arc<PersistentSource>>) -> VolumeOp {
    let (pod, uid) = (record.pod.clone(), record.id.uid.clone());
    VolumeOp::SetUp { pod, uid, volume, claimed }
}

fn resolve(record: &PodRecord, volume: String, context: SyncContext<'_>) -> VolumeOp {
    let pod = record.pod.clone();
    VolumeOp::Resolve { pod, volume, node_labels: context.node.map(|node| node.labels.clone()) }
}

/// Volumes with API content are refreshed periodically, and at once when an object changed. Claims are resolved again: a node
/// may not watch them. A volume that cannot be set up delays no other.
pub fn refresh_volumes(record: PodState<'_>, context: SyncContext<'_>, plan: &mut Plan, now: Now) {
    if !volumes::change_with_time(&record.pod) {
        return;
    }
    // A previous process set them up; this one must set up each of them once before it can refresh it.
    prepare(record, context, plan, now);
    let Some(refresh_at) = record.refresh_at else { return };
    let is_due = refresh_at <= now.uptime;
    if is_due {
        refresh_files(record, plan, now);
    } else {
        plan.wake_by(refresh_at);
    }
    for (name, volume) in record.volumes.iter().filter(|(_, volume)| volume.is_set_up) {
        let Some(source) = &volume.claimed else { continue };
        let subject = PodSubject::Volume(name.clone());
        if record.is_busy(&subject, now) {
            continue;
        }
        let (is_expansion_due, expand_at) = (volume.is_expansion_due(), volume.expand_at());
        if volume.is_republish_due {
            // First: the driver's tokens expire.
            let op = set_up(&record, name.clone(), Some(source.clone()));
            plan.step(subject, op, "its CSIDriver sets requiresRepublish");
        } else if is_expansion_due && expand_at <= now.uptime {
            let (pod, uid) = (record.pod.clone(), record.id.uid.clone());
            let op = VolumeOp::Expand { pod, uid, volume: name.clone(), source: source.clone() };
            plan.step(subject, op, "the persistent volume has grown");
        } else if is_due {
            let op = resolve(&record, name.clone(), context);
            plan.step(subject, op, "the claim or its PersistentVolume may have changed");
        } else if is_expansion_due {
            plan.wake_by(expand_at);
        }
    }
}

/// All volumes of files in one step. While one of them is not set up, it may be under way, and the others are refreshed alone.
fn refresh_files(record: PodState<'_>, plan: &mut Plan, now: Now) {
    let names = volumes::file_volumes(&record.pod);
    let (ready, missing): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| record.is_set_up(name));
    let (pod, uid) = (&record.pod, &record.id.uid);
    let is_busy = |name: &String| record.is_busy(&PodSubject::Volume(name.clone()), now);
    if !missing.is_empty() {
        for volume in ready.into_iter().filter(|name| !is_busy(name)) {
            let subject = PodSubject::Volume(volume.clone());
            plan.step(subject, set_up(&record, volume, None), "what it is made of may have changed");
        }
    } else if !ready.is_empty() && !record.flights.contains(&PodSubject::Volumes) && !ready.iter().any(is_busy) {
        let op = VolumeOp::Refresh { pod: pod.clone(), uid: uid.clone() };
        plan.step(PodSubject::Volumes, op, "what its volumes are made of may have changed");
    }
}

impl PodRecord {
    /// This process has set up the volume.
    pub fn is_set_up(&self, volume: &str) -> bool {
        self.volumes.get(volume).is_some_and(|known| known.is_set_up)
    }

    /// Staging the device failed: its volumes may stand for something else now.
    pub fn stage_failed(&mut self, device: &DeviceName) {
        for known in self.volumes.values_mut().filter(|known| !known.is_set_up) {
            let own = known.claimed.as_ref().and_then(|source| source.device_name());
            known.is_resolve_due |= own.as_ref() == Some(device);
        }
    }

    /// A step on one volume or on all begins, and the next refresh follows at that time. A volume that is tried again until it
    /// is set up does not put off the refresh of those that are.
    pub fn put_off_refresh(&mut self, volume: Option<&str>, until: Uptime) {
        let is_try = volume.is_some_and(|volume| !self.is_set_up(volume));
        let delays_others = is_try && self.volumes.values().any(|known| known.is_set_up);
        if self.refresh_at.is_none() || !delays_others {
            self.refresh_at = volumes::change_with_time(&self.pod).then_some(until);
        }
    }
}
