//! Objects of storage in the API: CSIDriver, persistent volumes, claims.
//!
//! Owns: their form, and which pods of the node use which volumes. Never: attaches (`attacher.rs`).

use std::collections::BTreeMap;

use rubelet_kube::port::{ObjectPath, Verb};
use serde_json::{Value, json};

use crate::{
    api::store::Key,
    csi::driver::{Device, DriverScript},
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
    /// It is bound when it is made.
    pub is_bound: bool,
}

impl ClaimScript {
    pub(crate) fn new(name: &str, driver: &str) -> Self {
        ClaimScript { name: name.to_owned(), driver: driver.to_owned(), mode: "ReadWriteOnce", is_bound: true }
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

pub(crate) const EXCLUSIVE: &str = "ReadWriteOncePod";

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
        let claim = json!({
            "metadata": { "name": script.name, "namespace": "default" },
            "spec": { "accessModes": [script.mode], "volumeName": name },
            "status": { "phase": "Pending" },
        });
        let claim = self.ask(Verb::Create, claims(), claim).expect("the name is free");
        let volume = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": [script.mode],
                "capacity": { "storage": "1Gi" },
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
        self.ask(Verb::Update, claims().named(name), claim).expect("nobody else writes claims");
    }

    pub(crate) fn is_claim_bound(&self, name: &str) -> bool {
        let key = Key { resource: "persistentvolumeclaims".to_owned(), namespace: "default".into(), name: name.into() };
        self.api.object(&key).is_some_and(|claim| claim["status"]["phase"] == "Bound")
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
