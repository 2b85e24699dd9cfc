//! Objects of storage in the API: CSIDriver, persistent volumes, claims.
//!
//! Owns: their form, and which pods of the node use which volumes. Never: attaches (`attacher.rs`).

use std::collections::BTreeMap;

use rubelet_kube::port::{ObjectPath, PatchKind, Verb};
use serde_json::{Value, json};

use crate::{
    api::store::Key,
    csi::driver::{Device, DriverScript, VOLUME_BYTES},
    invariants::csi::pod_of,
    play::predicates::NODE,
    simulation::SimState,
};

/// Of drivers that say how many volumes they can have on a node.
const UPDATE_PERIOD_SECS: u32 = 60;

const STORAGE: &str = "storage.k8s.io/v1";

/// A claim with its persistent volume.
#[derive(Clone, Debug)]
pub(crate) struct ClaimScript {
    pub name: String,
    pub driver: String,
    pub mode: &'static str,
    /// Its device is used, and no file system.
    pub is_block: bool,
    /// It is bound when it is made.
    pub is_bound: bool,
}

impl ClaimScript {
    pub(crate) fn new(name: &str, driver: &str) -> Self {
        ClaimScript {
            name: name.to_owned(),
            driver: driver.to_owned(),
            mode: "ReadWriteOnce",
            is_block: false,
            is_bound: true,
        }
    }

    /// Its device is used, and no file system.
    pub(crate) fn block(mut self) -> Self {
        self.is_block = true;
        self
    }

    /// One pod at a time may use it.
    pub(crate) fn exclusive(mut self) -> Self {
        self.mode = EXCLUSIVE;
        self
    }

    /// It is bound later.
    pub(crate) fn unbound(mut self) -> Self {
        self.is_bound = false;
        self
    }

    pub(crate) fn device(&self) -> Device {
        Device::new(&self.driver, &format!("vol-{}", self.name))
    }
}

const BLOCK: &str = "Block";
pub(crate) const EXCLUSIVE: &str = "ReadWriteOncePod";

/// The driver has said that the volume cannot grow on the node.
const INFEASIBLE: &str = "NodeResizeInfeasible";

fn gibibytes(bytes: i64) -> String {
    format!("{}Gi", bytes >> 30)
}

/// The persistent volume of a claim.
pub(crate) fn volume_name(claim: &str) -> String {
    format!("pv-{claim}")
}

fn claims() -> ObjectPath {
    ObjectPath::all("v1", "persistentvolumeclaims").within("default")
}

pub(super) fn attachments() -> ObjectPath {
    ObjectPath::all(STORAGE, "volumeattachments")
}

impl SimState {
    pub(crate) fn create_csi_driver(&mut self, script: &DriverScript) {
        let body = json!({
            "metadata": { "name": script.name },
            "spec": {
                "attachRequired": script.attaches,
                "podInfoOnMount": true,
                "fsGroupPolicy": "ReadWriteOnceWithFSType",
                "volumeLifecycleModes": ["Persistent", "Ephemeral"],
                "seLinuxMount": script.takes_label,
                "nodeAllocatableUpdatePeriodSeconds": script.limit.map(|_| UPDATE_PERIOD_SECS),
            },
        });
        self.ask(Verb::Create, ObjectPath::all(STORAGE, "csidrivers"), body).expect("the name is free");
    }

    pub(crate) fn create_claim(&mut self, script: &ClaimScript) {
        let name = volume_name(&script.name);
        let volume_mode = if script.is_block { BLOCK } else { "Filesystem" };
        let claim = json!({
            "metadata": { "name": script.name, "namespace": "default" },
            "spec": {
                "accessModes": [script.mode],
                "resources": { "requests": { "storage": gibibytes(VOLUME_BYTES) } },
                "volumeMode": volume_mode,
                "volumeName": name,
            },
            "status": { "phase": "Pending" },
        });
        let claim = self.ask(Verb::Create, claims(), claim).expect("the name is free");
        let volume = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": [script.mode],
                "capacity": { "storage": gibibytes(VOLUME_BYTES) },
                "volumeMode": volume_mode,
                "claimRef": { "namespace": "default", "name": script.name, "uid": claim["metadata"]["uid"] },
                "csi": { "driver": script.driver, "volumeHandle": script.device().handle, "fsType": "ext4" },
            },
        });
        self.ask(Verb::Create, ObjectPath::all("v1", "persistentvolumes"), volume).expect("the name is free");
        self.add_volume(&script.device());
        if script.is_bound {
            self.bind_claim(&script.name);
        }
    }

    pub(crate) fn bind_claim(&mut self, name: &str) {
        self.log("world", format!("claim {name} is bound"));
        let mut claim = self.ask(Verb::Get, claims().named(name), Value::Null).expect("it was created");
        claim["status"]["phase"] = "Bound".into();
        claim["status"]["capacity"] = json!({ "storage": claim["spec"]["resources"]["requests"]["storage"] });
        self.ask(Verb::Update, claims().named(name), claim).expect("nobody wrote it in between");
    }

    /// A user wants a larger volume, and the resizer has made it so: its file system is left to the node if the driver is. An
    /// expansion that waits for the node comes first, unless it is infeasible.
    pub(crate) fn grow_claim(&mut self, name: &str) {
        let device = self.device_of(&volume_name(name)).expect("the claim was created");
        let mut claim = self.ask(Verb::Get, claims().named(name), Value::Null).expect("it was created");
        let status = &mut claim["status"];
        let state = status["allocatedResourceStatuses"]["storage"].as_str();
        if status["phase"] != "Bound" || state.is_some_and(|state| state != INFEASIBLE) {
            return;
        }
        let is_by_node = self.driver(&device.driver).script.capabilities.expand;
        let size = self.driver(&device.driver).volumes.get_mut(&device.handle).expect("it was created with the claim");
        size.volume += VOLUME_BYTES;
        let text = gibibytes(size.volume);
        if is_by_node {
            status["allocatedResources"] = json!({ "storage": text });
            status["allocatedResourceStatuses"] = json!({ "storage": "NodeResizePending" });
            status["conditions"] = json!([{ "type": "FileSystemResizePending", "status": "True" }]);
        } else {
            size.file_system = size.volume;
            status["capacity"] = json!({ "storage": text });
        }
        claim["spec"]["resources"]["requests"]["storage"] = text.clone().into();
        self.log("world", format!("claim {name} grows to {text}"));
        self.ask(Verb::Update, claims().named(name), claim).expect("nobody wrote it in between");
        let path = ObjectPath::all("v1", "persistentvolumes").named(volume_name(name));
        let patch = json!({ "spec": { "capacity": { "storage": text } } });
        self.ask(Verb::Patch(PatchKind::Merge), path, patch).expect("it was created with the claim");
    }

    /// What is wrong with the size of a volume of a bound claim, and with what the claim says of it. An expansion that a driver
    /// refused for good is left to its user.
    pub(crate) fn size_complaint(&self, claim: &str) -> Option<String> {
        let device = self.device_of(&volume_name(claim))?;
        let size = *self.csi.drivers.get(&device.driver)?.volumes.get(&device.handle)?;
        let status = &self.claim(claim)?["status"];
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let told: Vec<&str> = conditions.filter_map(|condition| condition["message"].as_str()).collect();
        let is_in_use = told.iter().any(|message| message.contains("FailedPrecondition"));
        if is_in_use || status["allocatedResourceStatuses"]["storage"] == INFEASIBLE {
            return None;
        }
        let is_shown = status["capacity"]["storage"] == gibibytes(size.volume).as_str();
        let is_told_done = status["allocatedResourceStatuses"]["storage"].is_null()
            && status["conditions"].as_array().is_none_or(Vec::is_empty);
        let is_right = size.file_system == size.volume && is_shown && is_told_done;
        (!is_right).then(|| format!("{device} has {size:?}, and claim {claim} says {status}"))
    }

    pub(crate) fn is_claim_bound(&self, name: &str) -> bool {
        self.claim(name).is_some_and(|claim| claim["status"]["phase"] == "Bound")
    }

    fn claim(&self, name: &str) -> Option<&Value> {
        let key = Key { resource: "persistentvolumeclaims".to_owned(), namespace: "default".into(), name: name.into() };
        self.api.object(&key).map(|object| &**object)
    }

    /// The device of a persistent volume.
    pub(crate) fn device_of(&self, volume: &str) -> Option<Device> {
        let source = &self.persistent_volume(volume)?["spec"]["csi"];
        Some(Device::new(source["driver"].as_str()?, source["volumeHandle"].as_str()?))
    }

    /// One pod at a time may use the device.
    pub(crate) fn is_exclusive(&self, device: &Device) -> bool {
        let volumes = self.api.of("persistentvolumes").map(|(_, volume)| &volume["spec"]);
        let mut own = volumes.filter(|spec| spec["csi"]["volumeHandle"] == device.handle.as_str());
        own.any(|spec| spec["accessModes"] == json!([EXCLUSIVE]))
    }

    /// The claim's device is used, and no file system.
    pub(crate) fn is_block(&self, claim: &str) -> bool {
        self.persistent_volume(&volume_name(claim)).is_some_and(|volume| volume["spec"]["volumeMode"] == BLOCK)
    }

    /// The name of the persistent volume of a device.
    pub(crate) fn volume_of(&self, device: &Device) -> Option<&str> {
        let mut volumes = self.api.of("persistentvolumes");
        let found = volumes.find(|(_, volume)| volume["spec"]["csi"]["volumeHandle"] == device.handle.as_str());
        found.map(|(key, _)| key.name.as_str())
    }

    pub(super) fn persistent_volume(&self, name: &str) -> Option<&Value> {
        let key = Key { resource: "persistentvolumes".to_owned(), namespace: String::new(), name: name.to_owned() };
        self.api.object(&key).map(|object| &**object)
    }

    /// The devices of bound claims, and the drivers of inline volumes, of the node's pods that have not ended; by uid. The device
    /// of an inline volume has no handle here.
    pub(crate) fn users_of_devices(&self) -> Vec<(String, Device)> {
        if self.csi.drivers.is_empty() {
            return Vec::new();
        }
        let claims: BTreeMap<&str, &Value> =
            self.api.of("persistentvolumeclaims").map(|(key, claim)| (key.name.as_str(), &**claim)).collect();
        let mut found = Vec::new();
        for (_, pod) in self.api.of("pods") {
            let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
            let (Some(uid), false) = (pod["metadata"]["uid"].as_str(), has_ended) else { continue };
            if pod["spec"]["nodeName"] != NODE {
                continue;
            }
            for volume in pod["spec"]["volumes"].as_array().into_iter().flatten() {
                let claim = volume["persistentVolumeClaim"]["claimName"].as_str().and_then(|name| claims.get(name));
                let claim = claim.filter(|claim| claim["status"]["phase"] == "Bound");
                let device = claim.and_then(|claim| self.device_of(claim["spec"]["volumeName"].as_str()?));
                let inline = volume["csi"]["driver"].as_str().map(|driver| Device::new(driver, ""));
                found.extend(device.or(inline).map(|device| (uid.to_owned(), device)));
            }
        }
        found
    }

    /// Pods whose claims are not bound, or stand for a volume of one pod at a time that another one has, and pods whose inline
    /// volume is refused; by uid.
    pub(crate) fn pods_with_waiting_claims(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (_, pod) in self.api.of("pods") {
            let Some(uid) = pod["metadata"]["uid"].as_str() else { continue };
            let volumes = || pod["spec"]["volumes"].as_array().into_iter().flatten();
            let mut claims = volumes().filter_map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str());
            let mut drivers = volumes().filter_map(|volume| volume["csi"]["driver"].as_str());
            if claims.any(|claim| !self.is_claim_bound(claim) || self.is_taken_by_another(claim, uid))
                || drivers.any(|driver| self.refuses_inline(driver))
            {
                found.push(uid.to_owned());
            }
        }
        found
    }

    /// A driver without a CSIDriver object has no inline volumes.
    pub(crate) fn refuses_inline(&self, driver: &str) -> bool {
        self.csi.drivers.get(driver).is_none_or(|driver| !driver.script.has_object)
    }

    /// Another pod has the claim's volume, of which only one may use it at a time.
    pub(crate) fn is_taken_by_another(&self, claim: &str, uid: &str) -> bool {
        let Some(device) = self.device_of(&volume_name(claim)).filter(|device| self.is_exclusive(device)) else {
            return false;
        };
        let content = device.content();
        let mut points = self.disk.mounts_of(&content);
        points.any(|point| pod_of(point).is_some_and(|user| user != uid))
    }
}
