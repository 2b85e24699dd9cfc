//! Rules of CSI volumes: the order of attach, stage, publish and their ends.
//!
//! Owns: which calls to drivers are under way, and which publications were confirmed. What is staged and published is in the
//! node's mount table.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use super::Rules;
use crate::{
    csi::{
        act::{CsiAct, is_inline},
        attacher::Attachment,
        driver::{Device, DriverScript},
        objects::volume_name,
    },
    runtime::store::Container,
    simulation::SimState,
};

pub(crate) const KUBELET: &str = "/var/lib/kubelet";
pub(crate) const STAGED: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi";
/// Where block volumes are staged and published.
pub(crate) const BLOCK_VOLUMES: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices";
const PLUGIN_DIR: &str = "kubernetes.io~csi";

#[derive(Debug, Default)]
pub(super) struct CsiSeen {
    /// Calls of a live agent, by volume and directory.
    busy: BTreeMap<(Device, PathBuf), Vec<&'static str>>,
    /// Targets whose publication was answered, and not taken back since.
    published: BTreeSet<PathBuf>,
}

impl Rules {
    /// A changing call to a driver was taken in.
    pub(crate) fn csi_begins(&mut self, now: Duration, driver: &str, act: &CsiAct) {
        if matches!(act, CsiAct::Unpublish { .. }) {
            self.csi.published.remove(act.path());
        }
        let key = (Device::new(driver, act.handle()), act.path().to_owned());
        let calls = self.csi.busy.entry(key).or_default();
        calls.push(act.method());
        if calls.len() > 1 {
            let detail = format!("{calls:?} at once: {act}");
            self.broken("one call per staging or target path", now, detail);
        }
    }

    /// Its client has the answer, or is gone.
    pub(crate) fn csi_returned(&mut self, driver: &str, act: &CsiAct) {
        let key = (Device::new(driver, act.handle()), act.path().to_owned());
        if let Some(calls) = self.csi.busy.get_mut(&key) {
            calls.retain(|method| *method != act.method());
            if calls.is_empty() {
                self.csi.busy.remove(&key);
            }
        }
    }

    /// The live agent has an answer without an error.
    pub(crate) fn csi_succeeded(&mut self, act: &CsiAct) {
        if let CsiAct::Publish { target, .. } = act {
            self.csi.published.insert(target.clone());
        }
    }

    /// The node rebooted: nothing is mounted any more.
    pub(crate) fn mounts_forgotten(&mut self) {
        self.csi.published.clear();
    }

    pub(super) fn forget_csi(&mut self, kept: &BTreeSet<String>) {
        self.csi.published.retain(|target| pod_of(target).is_some_and(|uid| kept.contains(uid)));
    }

    /// The targets of calls under way that publish the device.
    fn published_now(&self, device: &Device) -> impl Iterator<Item = &PathBuf> {
        let calls = self.csi.busy.iter().filter(move |((busy, _), _)| busy == device);
        let calls = calls.filter(|(_, methods)| methods.contains(&"NodePublishVolume"));
        calls.map(|((_, target), _)| target)
    }

    /// A call for the device is under way that could mount it.
    fn is_being_mounted(&self, device: &Device) -> bool {
        let mut calls = self.csi.busy.iter().filter(|((busy, _), _)| busy == device);
        calls
            .any(|(_, methods)| methods.iter().any(|method| matches!(*method, "NodeStageVolume" | "NodePublishVolume")))
    }
}

/// The uid of the pod whose directory this is in, or that a block volume is published for there.
pub(crate) fn pod_of(path: &Path) -> Option<&str> {
    let mut parts = match path.strip_prefix(BLOCK_VOLUMES) {
        // `publish/<volume>/<uid>`
        Ok(block) => {
            let mut parts = block.strip_prefix("publish").ok()?.iter();
            parts.next();
            parts
        }
        Err(_) => path.strip_prefix(KUBELET).ok()?.strip_prefix("pods").ok()?.iter(),
    };
    parts.next()?.to_str()
}

/// A volume is staged there for all pods.
pub(crate) fn is_staging(path: &Path) -> bool {
    path.starts_with(STAGED) && pod_of(path).is_none()
}

impl SimState {
    /// The live agent calls a driver.
    pub(crate) fn check_csi_call(&mut self, driver: &str, act: &CsiAct) {
        let device = Device::new(driver, act.handle());
        match act {
            CsiAct::Stage { .. } => self.check_attached(&device, act),
            CsiAct::Publish { staging, target, .. } => {
                self.check_attached(&device, act);
                self.check_staged(&device, staging.as_deref(), act);
                self.check_exclusive(&device, target);
            }
            CsiAct::Unstage { .. } => self.check_unpublished(&device, act),
            CsiAct::Unpublish { target, .. } => self.check_unused(target),
            CsiAct::Expand { path, .. } => self.check_published(&device, path, act),
        }
    }

    /// After a change: the mount table holds what the rules allow, whoever asked.
    pub(crate) fn check_mounts_of(&mut self, device: &Device) {
        let points: Vec<PathBuf> = self.disk.mounts_of(&device.content()).cloned().collect();
        let is_staged = points.iter().any(|point| is_staging(point));
        let published = points.iter().find(|point| pod_of(point).is_some());
        let stages = self.driver(&device.driver).script.capabilities.stage_unstage && !is_inline(&device.handle);
        if let Some(published) = published.filter(|_| stages && !is_staged) {
            let detail = format!("{device} is mounted at {}, and not staged", published.display());
            self.rules.broken("nothing is unstaged while it is published", self.now, detail);
        }
        let pods: BTreeSet<&str> = points.iter().filter_map(|point| pod_of(point)).collect();
        if pods.len() > 1 && self.is_exclusive(device) {
            self.rules.broken("a ReadWriteOncePod volume has one pod", self.now, format!("{device} is in {pods:?}"));
        }
    }

    fn check_attached(&mut self, device: &Device, act: &CsiAct) {
        if !self.must_be_attached(device) {
            return;
        }
        if !self.is_attached(device) || !self.is_in_use(device) {
            let (state, is_in_use) = (self.csi.attachments.get(device), self.is_in_use(device));
            let detail = format!("{act}: {state:?}, in use: {is_in_use}");
            self.rules.broken("a volume is used only when attached and reported in use", self.now, detail);
        }
    }

    fn check_staged(&mut self, device: &Device, staging: Option<&Path>, act: &CsiAct) {
        let stages = self.driver(&device.driver).script.capabilities.stage_unstage && !is_inline(&device.handle);
        let is_staged = staging.is_some_and(|staging| self.shows(staging, device));
        if stages && !is_staged {
            let detail = format!("{act} from {staging:?}");
            self.rules.broken("nothing is published before it is staged", self.now, detail);
        }
    }

    fn check_exclusive(&mut self, device: &Device, target: &Path) {
        let content = device.content();
        let is_others = |point: &&PathBuf| pod_of(point).is_some_and(|pod| Some(pod) != pod_of(target));
        let mounted = self.disk.mounts_of(&content).find(is_others).cloned();
        let other = mounted.or_else(|| self.rules.published_now(device).find(is_others).cloned());
        if let Some(other) = other.filter(|_| self.is_exclusive(device)) {
            let detail = format!("{device} at {} and at {}", target.display(), other.display());
            self.rules.broken("a ReadWriteOncePod volume has one pod", self.now, detail);
        }
    }

    fn check_published(&mut self, device: &Device, path: &Path, act: &CsiAct) {
        if !self.shows(path, device) || !self.rules.csi.published.contains(path) {
            let detail = format!("{act}, which does not show it");
            self.rules.broken("nothing is expanded before it is published", self.now, detail);
        }
    }

    fn check_unpublished(&mut self, device: &Device, act: &CsiAct) {
        let content = device.content();
        let published = self.disk.mounts_of(&content).find(|point| pod_of(point).is_some()).cloned();
        let busy = self.rules.csi.busy.keys().find(|(busy, path)| busy == device && pod_of(path).is_some());
        if let Some(target) = published.or_else(|| busy.map(|(_, path)| path.clone())) {
            let detail = format!("{act}, published at {}", target.display());
            self.rules.broken("nothing is unstaged while it is published", self.now, detail);
        }
    }

    /// No container of the pod that mounts it runs.
    fn check_unused(&mut self, target: &Path) {
        let text = target.to_string_lossy();
        let is_link_to_it =
            |path: &str| self.disk.read_link(Path::new(path)).is_ok_and(|to| to.as_deref() == Some(target));
        let users = |it: &Container| {
            it.config.mounts.iter().any(|mount| mount.host_path == text)
                || it.config.devices.iter().any(|device| is_link_to_it(&device.host_path))
        };
        let user = self.runtime.running().find(|it| users(it)).map(ToString::to_string);
        if let Some(user) = user {
            let detail = format!("{text} while {user} runs");
            self.rules.broken("no volume is unpublished under a container", self.now, detail);
        }
    }

    /// The controller detaches the device.
    pub(crate) fn check_detach(&mut self, device: &Device) {
        let content = device.content();
        let point = self.disk.mounts_of(&content).next().map(|point| point.display().to_string());
        let busy = self.rules.is_being_mounted(device).then(|| "a call under way".to_owned());
        if let Some(holder) = point.or(busy) {
            let detail = format!("{device} is detached under {holder}");
            self.rules.broken("nothing is detached while it is staged", self.now, detail);
        }
    }

    /// A container starts: its volumes are there.
    pub(crate) fn check_csi_mounts(&mut self, container: &Container) {
        let mounts = container.config.mounts.iter().map(|mount| &mount.host_path);
        let devices = container.config.devices.iter().map(|device| &device.host_path);
        let used: Vec<PathBuf> = mounts.chain(devices).map(PathBuf::from).collect();
        let is_csi = |path: &&PathBuf| path.iter().any(|part| part == PLUGIN_DIR) && pod_of(path).is_some();
        // A block device is a link to where it is published.
        let target = |path: &Path| self.disk.read_link(path).ok().flatten().unwrap_or_else(|| path.to_owned());
        let unpublished = used
            .iter()
            .filter(is_csi)
            .find(|path| self.disk.mounted_at(path).is_none() || !self.rules.csi.published.contains(&target(path)));
        let rule = "a container starts when its volumes are published";
        if let Some(path) = unpublished {
            let detail = format!("{container} starts without {}", path.display());
            return self.rules.broken(rule, self.now, detail);
        }
        let Some(script) = self.rules.script_of(&container.pod.uid) else { return };
        if script.find_container(container.name_in_pod()).is_none() {
            return;
        }
        let dir = Path::new(KUBELET).join("pods").join(&container.pod.uid);
        let place = |claim: &String| match script.block_claims.contains(claim) {
            true => dir.join("volumeDevices").join(PLUGIN_DIR).join(volume_name(claim)),
            false => dir.join("volumes").join(PLUGIN_DIR).join(volume_name(claim)).join("mount"),
        };
        let wrong = script.claims.iter().find(|claim| {
            let (point, device) = (place(claim), self.device_of(&volume_name(claim)));
            !used.contains(&point) || device.is_none_or(|device| !self.shows(&point, &device))
        });
        if let Some(name) = wrong {
            let detail = format!("{container} starts without {name}");
            return self.rules.broken(rule, self.now, detail);
        }
        let level = script.level.as_deref().unwrap_or_default();
        let devices = script.claims.iter().filter(|claim| !script.block_claims.contains(claim));
        let devices = devices.filter_map(|claim| self.device_of(&volume_name(claim)));
        let mislabelled = devices.into_iter().find(|device| self.is_labelled(device) && !self.has_label(device, level));
        if let Some(device) = mislabelled {
            let detail = format!("{container} with {level:?} has {device}, {:?}", self.csi.options.get(&device));
            self.rules.broken("a volume has the label of its pod", self.now, detail);
        }
    }

    /// The driver mounts the volume with the label of the only pod that has it.
    fn is_labelled(&self, device: &Device) -> bool {
        let script = self.csi.drivers.get(&device.driver).map(|driver| &driver.script);
        let takes_label = |it: &DriverScript| it.takes_label && it.has_object && it.capabilities.stage_unstage;
        script.is_some_and(takes_label) && self.is_exclusive(device)
    }

    /// The volume is mounted with a label of this level, or with none if there is no level.
    fn has_label(&self, device: &Device, level: &str) -> bool {
        let options = self.csi.options.get(device).map_or("", String::as_str);
        if level.is_empty() { !options.contains("context=") } else { options.contains(&format!(":{level}\"")) }
    }

    /// A deadline of a pod does not count the time in which its volumes cannot be had.
    pub(super) fn strike_pods_that_wait_for_volumes(&mut self) {
        use super::trouble::Touched;
        for (uid, device) in self.users_of_devices() {
            let is_up = self.csi.drivers.get(&device.driver).is_some_and(|driver| driver.is_up);
            let is_attached = device.handle.is_empty()
                || !self.must_be_attached(&device)
                || self.csi.attachments.get(&device) == Some(&Attachment::Attached);
            if !is_up || !is_attached {
                self.rules.trouble.strike(Touched::Pod(uid), self.now);
            }
        }
        for uid in self.pods_with_waiting_claims() {
            self.rules.trouble.strike(Touched::Pod(uid), self.now);
        }
    }
}
