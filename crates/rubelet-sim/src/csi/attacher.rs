//! The attach/detach controller, with the attacher that does what it asks for.
//!
//! Owns: attachments, from the pods that need them to `volumesAttached` of the node. It detaches only what no pod needs and the
//! node does not report in use, as the real one: it takes the volume out of `volumesAttached` first, then reads the Node again.
//! Upstream: `pkg/controller/volume/attachdetach`, `verifyVolumeIsSafeToDetach`.

use std::{collections::BTreeSet, time::Duration};

use rubelet_kube::port::{ObjectPath, PatchKind, Verb};
use serde_json::{Value, json};

use crate::{
    api::store::Key,
    csi::{
        driver::{Device, sha256_hex},
        objects,
    },
    play::predicates::NODE,
    simulation::{ScheduledEvent, SimState},
};

/// Keeps the object until the volume is detached.
const FINALIZER: &str = "external-attacher/sim";

/// gRPC's code.
const RESOURCE_EXHAUSTED: u32 = 8;
/// After the node had too many volumes.
const ATTACH_RETRY: Duration = Duration::from_secs(10);

/// How far an attachment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attachment {
    Attaching {
        until: Duration,
    },
    Attached,
    /// Not in `volumesAttached` any more; the Node is read again before it is detached.
    Leaving {
        until: Duration,
    },
    Detaching {
        until: Duration,
    },
}

/// The name of the VolumeAttachment, as upstream makes it.
fn object_name(device: &Device) -> String {
    format!("csi-{}", sha256_hex(&[&device.handle, &device.driver, NODE]))
}

impl SimState {
    /// One round of the controller.
    pub(crate) fn attach_and_detach(&mut self) {
        if self.csi.drivers.is_empty() || self.node_object().is_none() {
            return;
        }
        let wanted: BTreeSet<Device> =
            self.users_of_devices().into_iter().map(|(_, device)| device).filter(|it| !it.handle.is_empty()).collect();
        let wanted: BTreeSet<Device> = wanted.into_iter().filter(|device| self.must_be_attached(device)).collect();
        let known = self.csi.attachments.keys().cloned();
        for device in known.chain(wanted.iter().cloned()).collect::<BTreeSet<_>>() {
            self.move_on(&device, wanted.contains(&device));
        }
        self.report_attached();
    }

    /// A driver without an object counts as one whose volumes are attached.
    pub(crate) fn must_be_attached(&self, device: &Device) -> bool {
        let script = self.csi.drivers.get(&device.driver).map(|driver| &driver.script);
        script.is_none_or(|script| script.attaches || !script.has_object) && !super::act::is_inline(&device.handle)
    }

    /// The node can use it.
    pub(crate) fn is_attached(&self, device: &Device) -> bool {
        matches!(self.csi.attachments.get(device), Some(Attachment::Attached | Attachment::Leaving { .. }))
    }

    /// The Node object shows the device in use.
    pub(crate) fn is_in_use(&self, device: &Device) -> bool {
        let Some(node) = self.node_object() else { return false };
        let names = node["status"]["volumesInUse"].as_array().into_iter().flatten();
        names.into_iter().any(|name| *name == device.unique_name())
    }

    fn move_on(&mut self, device: &Device, is_wanted: bool) {
        let now = self.now;
        let is_in_use = self.is_in_use(device) && !self.csi.is_reckless;
        match self.csi.attachments.get(device).copied() {
            None if is_wanted => self.begin_attach(device),
            Some(Attachment::Attaching { until }) if until <= now && !is_wanted && self.has_no_room_for(device) => {
                self.begin_detach(device);
            }
            Some(Attachment::Attaching { until }) if until <= now => self.finish_attach(device),
            Some(Attachment::Attached) if !is_wanted && !is_in_use => {
                let wait = Duration::from_millis(self.rng.u64(0..1_500));
                self.set_attachment(device, wait, |until| Attachment::Leaving { until });
            }
            Some(Attachment::Leaving { until }) if until <= now => {
                if is_wanted || is_in_use {
                    self.csi.attachments.insert(device.clone(), Attachment::Attached);
                } else {
                    self.begin_detach(device);
                }
            }
            Some(Attachment::Detaching { until }) if until <= now => self.finish_detach(device),
            None
            | Some(
                Attachment::Attaching { .. }
                | Attachment::Attached
                | Attachment::Leaving { .. }
                | Attachment::Detaching { .. },
            ) => {}
        }
    }

    fn set_attachment(&mut self, device: &Device, wait: Duration, state: impl FnOnce(Duration) -> Attachment) {
        self.csi.attachments.insert(device.clone(), state(self.now + wait));
        self.schedule_in(wait, ScheduledEvent::AttachDetach);
    }

    fn begin_attach(&mut self, device: &Device) {
        let volumes = self.api.of("persistentvolumes");
        let own = volumes.filter(|(_, volume)| volume["spec"]["csi"]["volumeHandle"] == device.handle.as_str());
        let volume = own.map(|(key, _)| key.name.clone()).next();
        let body = json!({
            "metadata": { "name": object_name(device), "finalizers": [FINALIZER] },
            "spec": { "attacher": device.driver, "nodeName": NODE, "source": { "persistentVolumeName": volume } },
            "status": { "attached": false },
        });
        self.ask(Verb::Create, objects::attachments(), body).expect("the last one is gone");
        let wait = self.faults.attach_takes(&mut self.rng);
        self.set_attachment(device, wait, |until| Attachment::Attaching { until });
    }

    fn finish_attach(&mut self, device: &Device) {
        if self.faults.attach_fails(&mut self.rng) {
            self.log("world", format!("{device} cannot be attached"));
            self.write_attachment(device, |object| {
                object["status"]["attachError"] = json!({ "message": "injected: no attachment" });
            });
            let wait = Duration::from_millis(self.rng.u64(500..15_000));
            return self.set_attachment(device, wait, |until| Attachment::Attaching { until });
        }
        if self.has_no_room_for(device) {
            self.log("world", format!("{device} is one too many"));
            self.write_attachment(device, |object| {
                let error = json!({ "message": "the node has too many", "errorCode": RESOURCE_EXHAUSTED });
                object["status"]["attachError"] = error;
            });
            return self.set_attachment(device, ATTACH_RETRY, |until| Attachment::Attaching { until });
        }
        self.log("world", format!("{device} is attached"));
        self.write_attachment(device, |object| {
            object["status"] = json!({ "attached": true, "attachmentMetadata": { "path": "/dev/sim" } });
        });
        self.csi.attachments.insert(device.clone(), Attachment::Attached);
    }

    /// It is attached, or nothing on the node prevents it.
    pub(crate) fn can_be_attached(&self, device: &Device) -> bool {
        !self.must_be_attached(device) || self.is_attached(device) || !self.has_no_room_for(device)
    }

    /// The driver has as many volumes on the node as it can.
    fn has_no_room_for(&self, device: &Device) -> bool {
        let limit = self.csi.drivers.get(&device.driver).and_then(|driver| driver.script.limit);
        let is_there = |state: &Attachment| !matches!(state, Attachment::Attaching { .. });
        let others = self
            .csi
            .attachments
            .iter()
            .filter(|(other, state)| *other != device && other.driver == device.driver && is_there(state));
        limit.is_some_and(|limit| others.count() >= limit)
    }

    fn begin_detach(&mut self, device: &Device) {
        self.check_detach(device);
        self.ask(Verb::Delete, objects::attachments().named(object_name(device)), json!({})).expect("it is there");
        let wait = self.faults.attach_takes(&mut self.rng);
        self.set_attachment(device, wait, |until| Attachment::Detaching { until });
    }

    fn finish_detach(&mut self, device: &Device) {
        self.check_detach(device);
        self.log("world", format!("{device} is detached"));
        self.write_attachment(device, |object| object["metadata"]["finalizers"] = Value::Null);
        self.csi.attachments.remove(device);
    }

    fn write_attachment(&mut self, device: &Device, change: impl FnOnce(&mut Value)) {
        let path = objects::attachments().named(object_name(device));
        let mut object = self.ask(Verb::Get, path.clone(), Value::Null).expect("the controller made it");
        change(&mut object);
        self.ask(Verb::Update, path, object).expect("nobody else writes it");
    }

    /// `volumesAttached` of the node.
    fn report_attached(&mut self) {
        let attached = self.csi.attachments.iter().filter(|(_, state)| **state == Attachment::Attached);
        let attached: Vec<Value> =
            attached.map(|(device, _)| json!({ "name": device.unique_name(), "devicePath": "" })).collect();
        let Some(node) = self.node_object() else { return };
        if node["status"]["volumesAttached"].as_array().map_or(&[][..], Vec::as_slice) != attached {
            let path = ObjectPath::all("v1", "nodes").named(NODE).sub("status");
            let patch = json!({ "status": { "volumesAttached": attached } });
            self.ask(Verb::Patch(PatchKind::StrategicMerge), path, patch).expect("the node is there");
        }
    }

    fn node_object(&self) -> Option<&Value> {
        let key = Key { resource: "nodes".to_owned(), namespace: String::new(), name: NODE.to_owned() };
        self.api.object(&key).map(|object| &**object)
    }
}
