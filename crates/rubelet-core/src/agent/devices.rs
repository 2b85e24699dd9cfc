//! Devices: their staging and unstaging, and the looks at them.
//!
//! Owns: the routing, and the events of pods whose device cannot be staged. The decisions are in `volumes/devices.rs`.
//! Upstream: the reconciler's `mountAttachedVolumes`, `unmountDetachDevices`.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    agent::{Agent, outbox::Outbox},
    effect::{EffectError, ErrorKind, EventRecord, Facts, InvolvedObject, Severity},
    event_reasons,
    flights::Subject,
    id::PodUid,
    node::{Node, Routine},
    observation::Remains,
    op::{NodeOp, Op, VolumeOp},
    pod::{
        Cure, Lifecycle, PodRecord,
        status::{FailureReason, PodFailure},
    },
    settings::NodeProfile,
    time::Now,
    volumes::{
        claims::{self, PersistentKind, PersistentSource},
        devices::{DeviceName, DeviceOptions, DeviceState, Devices},
        selinux::{self, LabelReport},
    },
};

impl Agent {
    pub(super) fn stage_device(&mut self, source: Arc<PersistentSource>, options: DeviceOptions, now: Now) {
        let Some(name) = source.device_name() else { return };
        let subject = Subject::Device(name);
        if !self.outbox.flights.contains(&subject) {
            let reason = "a pod needs it".to_owned();
            self.node.devices.begin_stage(&source);
            self.outbox.send(subject, VolumeOp::Stage { source, options }, reason, &self.settings, now);
        }
    }

    /// Looks at devices on disk, and unstages those that no pod uses. Before all sources are ready a pod may not be known yet.
    pub(super) fn sync_devices(&mut self, now: Now) {
        if self.node.devices.look_due(now) {
            let (subject, reason) = (Subject::Node(Routine::ListDevices), "pods may have released devices".to_owned());
            self.outbox.send(subject, NodeOp::ListDevices, reason, &self.settings, now);
        }
        if !self.config.sources_ready(&self.settings.sources) {
            return;
        }
        for (name, device) in self.node.devices.to_unstage(now) {
            let subject = Subject::Device(name.clone());
            if !self.outbox.flights.contains(&subject) {
                self.node.devices.begin_unstage(&name);
                let reason = "no pod uses it".to_owned();
                self.outbox.send(subject, VolumeOp::Unstage { device }, reason, &self.settings, now);
            }
        }
    }

    /// Retries at once what failed for lack of the driver: volumes, their ends, expansions, and devices.
    pub(super) fn handle_driver(&mut self, driver: &str, now: Now) {
        self.touched.extend(self.node.devices.retry(driver, now));
        for (uid, record) in &mut self.records {
            if record.end_back_offs(Cure::ObjectChange, now) {
                record.request_refresh(now);
                self.touched.insert(uid.clone());
            }
        }
    }

    /// Retries at once what failed because a file system did not answer.
    pub(super) fn handle_file_system_answered(&mut self, now: Now) {
        self.touched.extend(self.node.devices.file_system_answered(now));
        for (uid, record) in &mut self.records {
            if record.end_back_offs(Cure::FileSystemAnswer, now) {
                self.touched.insert(uid.clone());
            }
        }
    }

    pub(super) fn devices_listed(&mut self, result: Result<Facts, EffectError>, now: Now) {
        match result {
            Ok(Facts::Devices(devices)) => {
                self.node.devices.listed(devices);
                // Exclusive volumes wait for it, after a restart too.
                self.touched.extend(self.node.devices.waiting_pods());
            }
            Ok(_) | Err(_) => self.node.devices.look_failed(now),
        }
    }

    pub(super) fn device_done(&mut self, name: &DeviceName, op: &Op, result: Result<Facts, EffectError>, now: Now) {
        let users = self.node.devices.users(name);
        match (op, result) {
            (Op::Volume(VolumeOp::Stage { source, .. }), Ok(_)) => self.node.devices.staged(source),
            (Op::Volume(VolumeOp::Stage { source, .. }), Err(error)) => {
                let reason = match source.is_block() {
                    true => event_reasons::FAILED_MAP_VOLUME,
                    false => event_reasons::FAILED_MOUNT_VOLUME,
                };
                for uid in &users {
                    let Some(record) = self.records.get_mut(uid) else { continue };
                    record.stage_failed(name);
                    let about = InvolvedObject::Pod(record.id.clone());
                    self.outbox.record(EventRecord::new(about, Severity::Warning, reason, error.message.clone()));
                }
                self.node.devices.failed(name, Cure::of(op, &error), error.message, now);
            }
            (_, Ok(_)) => self.node.devices.unstaged(name),
            (_, Err(error)) if error.kind == ErrorKind::Gone => self.node.devices.unstaged(name),
            (op, Err(error)) => self.node.devices.failed(name, Cure::of(op, &error), error.message, now),
        }
        self.touched.extend(users);
    }
}

/// The node cannot attach what the pod needs: another node may. Upstream: `VolumeAttachLimitExceededError`.
pub(super) fn reject_for_attach_limit(record: &mut PodRecord, node: &Node, outbox: &mut Outbox, now: Now) {
    if record.lifecycle != Lifecycle::Syncing || record.rejected.is_some() {
        return;
    }
    let listed = |names: &BTreeSet<&str>| names.iter().copied().collect::<Vec<_>>().join(" ");
    let missing: Vec<_> = record.missing_volumes();
    let claimed = |name: &str| record.volumes.get(name).and_then(|known| known.claimed.as_ref());
    let is_unattached = |name: &str| {
        let state = claimed(name).map(|source| node.devices.state(source, node.object.as_ref(), now));
        state == Some(DeviceState::NotAttached)
    };
    let unmounted = missing.iter().map(|volume| volume.name.as_str()).collect();
    let unattached = missing.iter().map(|volume| volume.name.as_str()).filter(|name| is_unattached(name)).collect();
    let unresolved =
        missing.iter().filter(|volume| claims::is_resolved_first(volume) && claimed(&volume.name).is_none());
    let unresolved = unresolved.map(|volume| volume.name.as_str()).collect();
    let message = format!(
        "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[{}], unattached volumes=[{}], failed to process volumes=[{}]: context deadline exceeded",
        listed(&unmounted),
        listed(&unattached),
        listed(&unresolved)
    );
    let failure = PodFailure::new(FailureReason::VolumeAttachmentLimitExceeded, message);
    let (about, reason) = (InvolvedObject::Pod(record.id.clone()), failure.reason.to_string());
    outbox.record(EventRecord::new(about, Severity::Warning, reason, failure.message.clone()));
    record.rejected = Some(failure);
}

/// A resolved volume gets the SELinux label that the pod's containers use; if they conflict, the step fails and the pod waits. One
/// that is set up stays the same volume, with the label that it was set up with.
pub(super) fn labelled(
    record: &mut PodRecord,
    op: &Op,
    result: Result<Facts, EffectError>,
    devices: &Devices,
    node: &NodeProfile,
) -> Result<Facts, EffectError> {
    let (Op::Volume(VolumeOp::Resolve { volume, .. }), Ok(Facts::Volume(source))) = (op, &result) else {
        return result;
    };
    let known = record.volumes.get(volume).filter(|known| known.is_set_up).and_then(|known| known.claimed.as_ref());
    if let Some(known) = known {
        if !known.is_same_volume(source) {
            // What the claim is bound to now was never staged nor mounted for this pod: containers would find an empty directory.
            return Ok(Facts::Volume(known.clone()));
        }
        let (label, is_labelled) = (known.label().map(str::to_owned), known.mount_context().is_some());
        return Ok(Facts::Volume(Arc::new((**source).clone().with_label(label, is_labelled))));
    }
    let others = devices.label_for_others(&record.id.uid, source);
    let (finding, labelled) = selinux::labelled(record.spec(), volume, (**source).clone(), others, node);
    record.volumes.entry(volume.clone()).or_default().label = LabelReport::of(finding, source);
    match labelled {
        Ok(source) => Ok(Facts::Volume(Arc::new(source))),
        Err(message) => Err(EffectError { kind: ErrorKind::Retry, message }),
    }
}

/// Whether the device must be staged again before the next try: a driver that refuses to publish may have lost it in a restart. One
/// that is busy, or was not called, still has it.
fn may_be_unstaged(source: &PersistentSource, error: &EffectError) -> bool {
    match &source.kind {
        PersistentKind::Csi(_) => error.kind == ErrorKind::FailedByDriver,
        PersistentKind::HostPath { .. }
        | PersistentKind::Local(_)
        | PersistentKind::Nfs(_)
        | PersistentKind::Iscsi(_)
        | PersistentKind::Fc(_)
        | PersistentKind::Flex(_) => error.kind != ErrorKind::Uncertain,
    }
}

/// What a pod's step on its volumes says of their devices.
pub(super) fn note_step(devices: &mut Devices, uid: &PodUid, op: &Op, result: &Result<Facts, EffectError>) {
    let Op::Volume(op) = op else { return };
    match (op, result) {
        (VolumeOp::Resolve { .. }, Ok(Facts::Volume(source))) => devices.add_user(uid, source),
        (VolumeOp::SetUp { claimed: Some(source), .. }, Err(error)) if may_be_unstaged(source, error) => {
            devices.mark_unstaged(source);
        }
        (VolumeOp::TearDown(_), Ok(Facts::Remains(remains))) if *remains > Remains::Volumes => devices.release(uid),
        // It need not wait for the pod's other volumes.
        (VolumeOp::Unmount { volume, .. }, Ok(_)) => devices.release_volume(uid, &volume.name),
        (
            VolumeOp::Resolve { .. }
            | VolumeOp::CheckAttachLimit { .. }
            | VolumeOp::SetUp { .. }
            | VolumeOp::Refresh { .. }
            | VolumeOp::Expand { .. }
            | VolumeOp::Unmount { .. }
            | VolumeOp::TearDown(_)
            | VolumeOp::Stage { .. }
            | VolumeOp::Unstage { .. },
            Ok(_) | Err(_),
        ) => {}
    }
}
