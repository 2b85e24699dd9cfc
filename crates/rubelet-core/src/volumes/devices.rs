//! Devices: volumes that are attached to the node or staged on it, once for all pods that use them.
//!
//! Owns: which pods need a device, whether it is staged, which devices on disk no pod uses, and `volumesInUse`.
//! A device that this process did not stage is not trusted to be staged: staging is safe to repeat. What is on disk, and which
//! pods' directories refer to it, comes from looks. Never: touches the disk or a driver.
//! Upstream: `ActualStateOfWorld` and `DesiredStateOfWorld` for attachable and device-mountable plugins.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    id::PodUid,
    node_object::NodeObject,
    pod::{Cure, Failure},
    time::{Now, Uptime},
    volumes::{
        claims::{PersistentKind, PersistentSource},
        csi::CsiLifecycle,
        fc::FcDevice,
        iscsi::IscsiDevice,
    },
};

/// Delay after a failed look at the disk.
const LOOK_RETRY: Duration = Duration::from_secs(15);

/// Unique on the node. Of CSI and local volumes it is upstream's unique volume name; the others' may be spelt in several ways in
/// specs (`PersistentSource::volume_name`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceName(String);

impl DeviceName {
    pub fn of(device: &Device) -> Self {
        DeviceName(match device {
            Device::Csi(CsiDevice { driver, handle, .. }) => format!("kubernetes.io/csi/{driver}^{handle}"),
            Device::Local { name } => format!("kubernetes.io/local-volume/{name}"),
            Device::Iscsi(device) => device.name(),
            Device::Fc { dir } => format!("kubernetes.io/fc/{dir}"),
            Device::Flex { driver, name } => format!("{driver}/{name}"),
        })
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A volume that is staged for all pods, or may be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Device {
    Csi(CsiDevice),
    /// By the name of its persistent volume. Only a block device leaves something on disk.
    Local {
        name: String,
    },
    Iscsi(IscsiDevice),
    /// By the name of its directory.
    Fc {
        dir: String,
    },
    /// By its driver, and the name of its persistent volume or of the volume in its pod: as upstream, pods of which volumes have
    /// one name share it.
    Flex {
        driver: String,
        name: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CsiDevice {
    pub driver: String,
    pub handle: String,
    /// Of a block volume, which has a staging path of its own: the name of its persistent volume.
    pub block: Option<String>,
}

impl CsiDevice {
    /// `None` for a volume without one.
    pub fn of(source: &PersistentSource) -> Option<CsiDevice> {
        let PersistentKind::Csi(volume) = &source.kind else { return None };
        let block = volume.is_block.then(|| source.name.clone());
        let device = CsiDevice { driver: volume.driver.clone(), handle: volume.handle.clone(), block };
        Some(device).filter(|_| volume.lifecycle == CsiLifecycle::Persistent)
    }
}

impl Device {
    /// `None` for volumes that are only mounted into pods.
    pub fn of(source: &PersistentSource) -> Option<Device> {
        match &source.kind {
            PersistentKind::Csi(_) => CsiDevice::of(source).map(Device::Csi),
            PersistentKind::Local(_) => Some(Device::Local { name: source.name.clone() }),
            PersistentKind::Iscsi(volume) => Some(Device::Iscsi(volume.device(&source.name))),
            PersistentKind::Fc(volume) => Some(Device::Fc { dir: volume.device.dir_name() }),
            PersistentKind::Flex(volume) if volume.capabilities.attach => {
                Some(Device::Flex { driver: volume.driver.clone(), name: source.name.clone() })
            }
            PersistentKind::HostPath { .. } | PersistentKind::Nfs(_) | PersistentKind::Flex(_) => None,
        }
    }

    /// What the Node object may call it.
    fn volume_names(&self) -> Vec<String> {
        match self {
            Device::Csi(_) | Device::Local { .. } | Device::Flex { .. } => vec![DeviceName::of(self).to_string()],
            Device::Iscsi(device) => device.volume_names(),
            Device::Fc { dir } => FcDevice::parse(dir).map(|device| device.volume_name()).into_iter().collect(),
        }
    }

    /// Containers get it as a device.
    pub fn is_block(&self) -> bool {
        matches!(self, Device::Csi(CsiDevice { block: Some(_), .. }))
    }

    /// The name of its plugin in metrics.
    pub fn plugin(&self) -> String {
        match self {
            Device::Csi(device) => format!("kubernetes.io/csi:{}", device.driver),
            Device::Local { .. } => "kubernetes.io/local-volume".to_owned(),
            Device::Iscsi(_) => "kubernetes.io/iscsi".to_owned(),
            Device::Fc { .. } => "kubernetes.io/fc".to_owned(),
            Device::Flex { driver, .. } => driver.clone(),
        }
    }

    pub fn csi(driver: &str, handle: &str) -> Device {
        Device::Csi(CsiDevice { driver: driver.to_owned(), handle: handle.to_owned(), block: None })
    }
}

/// What the pod for which a device is staged asks of it. Other pods get it as it is, as upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceOptions {
    /// Its fsGroup, for drivers that apply it themselves.
    pub group: Option<u32>,
}

/// A device as found on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundDevice {
    pub device: Device,
    /// Pods whose directories refer to it.
    pub pods: BTreeSet<PodUid>,
    /// The SELinux label that it is mounted with.
    pub context: Option<String>,
}

/// Whether a pod's volume may be set up on its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceState<'a> {
    /// The Node object does not show it as attached and in use.
    NotAttached,
    /// To be staged now.
    Unstaged,
    /// It is mounted with another SELinux label, and has to be unstaged first.
    OtherLabel,
    /// Only the attach/detach controller can attach it, and this node does not leave that to it.
    NeedsController,
    /// Its last operation failed; the next one waits.
    Failed(&'a Failure),
    Staged,
}

#[derive(Clone, Debug, Default)]
pub struct Devices {
    /// By pods whose volumes are not torn down.
    desired: BTreeMap<DeviceName, DesiredDevice>,
    by_pod: BTreeMap<PodUid, BTreeSet<DeviceName>>,
    /// By this process.
    staged: BTreeSet<DeviceName>,
    /// What this process began to stage, until a look finds nothing of it on disk.
    stage_attempts: BTreeMap<DeviceName, StageAttempt>,
    /// The last look at the disk; `None` before the first.
    found: Option<BTreeMap<DeviceName, FoundDevice>>,
    /// Found devices that no pod's directory refers to and no pod needs.
    unused: BTreeMap<DeviceName, Device>,
    failures: BTreeMap<DeviceName, Failure>,
    look: LookState,
    /// The attach/detach controller leaves this node alone. What that means depends on the kind of a volume.
    has_no_controller: bool,
}

#[derive(Clone, Debug)]
struct DesiredDevice {
    source: Arc<PersistentSource>,
    /// In order of arrival; an exclusive volume goes to the first.
    pods: Vec<PodUid>,
}

#[derive(Clone, Debug)]
struct StageAttempt {
    /// Its name on the Node object, if the attach/detach controller attached it.
    attached_name: Option<String>,
    /// The SELinux label that it is mounted with.
    context: Option<String>,
    is_under_way: bool,
}

impl StageAttempt {
    fn of(source: &PersistentSource, is_under_way: bool) -> Self {
        let context = source.mount_context().map(str::to_owned);
        StageAttempt { attached_name: source.attached_name(), context, is_under_way }
    }
}

/// The look at devices on disk: one at a time; one requested meanwhile follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LookState {
    Idle,
    Due(Uptime),
    UnderWay { is_requested: bool },
}

impl Default for LookState {
    fn default() -> Self {
        LookState::Due(Uptime::ZERO)
    }
}

impl Devices {
    /// Of a standalone node, where volumes of pods rarely have devices: the first look follows the end of a pod.
    pub fn standalone() -> Self {
        Devices { look: LookState::Idle, ..Devices::default() }
    }

    /// Of a node whose configuration has `enableControllerAttachDetach: false`.
    pub fn without_controller() -> Self {
        Devices { has_no_controller: true, ..Devices::default() }
    }

    /// The pod's volume lies on this device.
    pub fn add_user(&mut self, pod: &PodUid, source: &Arc<PersistentSource>) {
        let Some(name) = source.device_name() else { return };
        self.unused.remove(&name);
        self.by_pod.entry(pod.clone()).or_default().insert(name.clone());
        let desired = self.desired.entry(name).or_insert(DesiredDevice { source: source.clone(), pods: Vec::new() });
        desired.source = source.clone();
        if !desired.pods.contains(pod) {
            desired.pods.push(pod.clone());
        }
    }

    /// The pod's volumes are torn down: its devices may be unused now, and so may those of a pod that a previous process knew.
    pub fn release(&mut self, pod: &PodUid) {
        let names = self.by_pod.remove(pod);
        for name in names.iter().flatten() {
            self.drop_user(name, pod);
        }
        let has_devices = self.found.as_ref().is_none_or(|found| !found.is_empty());
        if names.is_some() || has_devices {
            self.request_look();
        }
    }

    /// One of the pod's volumes is unmounted, which is called so in its directory. A pod that a previous process served is
    /// no user here; the last look shows whether it had one.
    pub fn release_volume(&mut self, pod: &PodUid, volume: &str) {
        let is_it = |name: &DeviceName| self.desired.get(name).is_some_and(|desired| desired.source.name == volume);
        let names = self.by_pod.get_mut(pod);
        let desired =
            names.and_then(|names| names.iter().find(|name| is_it(name)).cloned().and_then(|it| names.take(&it)));
        if let Some(name) = &desired {
            self.drop_user(name, pod);
        }
        let was_found = self.found.iter().flat_map(BTreeMap::values).any(|found| found.pods.contains(pod));
        if desired.is_some() || was_found {
            self.request_look();
        }
    }

    fn drop_user(&mut self, name: &DeviceName, pod: &PodUid) {
        if let Some(desired) = self.desired.get_mut(name) {
            desired.pods.retain(|other| other != pod);
            if desired.pods.is_empty() {
                self.desired.remove(name);
            }
        }
    }

    pub fn state<'a>(&'a self, source: &PersistentSource, node: Option<&NodeObject>, now: Now) -> DeviceState<'a> {
        let Some(name) = source.device_name() else { return DeviceState::Staged };
        if self.context(&name).is_some_and(|context| context != source.mount_context()) {
            return DeviceState::OtherLabel;
        }
        if self.staged.contains(&name) {
            return DeviceState::Staged;
        }
        if let Some(volume) = source.attached_name() {
            if self.has_no_controller {
                // As upstream: a disk of a target or a fabric needs no more than its staging does.
                if matches!(source.kind, PersistentKind::Csi(_)) {
                    return DeviceState::NeedsController;
                }
            } else if !node.is_some_and(|node| node.has_attached(&volume)) {
                return DeviceState::NotAttached;
            }
        }
        match self.failures.get(&name).filter(|failure| failure.retry_at > now.uptime) {
            Some(failure) => DeviceState::Failed(failure),
            None => DeviceState::Unstaged,
        }
    }

    /// The SELinux label that a device on the node is mounted with. `None` if it is not there.
    fn context(&self, name: &DeviceName) -> Option<Option<&str>> {
        match self.stage_attempts.get(name) {
            Some(attempt) => Some(attempt.context.as_deref()),
            None => self.found.as_ref()?.get(name).map(|found| found.context.as_deref()),
        }
    }

    /// The SELinux label for which other pods need the volume. `None` if none does.
    pub fn label_for_others(&self, pod: &PodUid, source: &PersistentSource) -> Option<Option<&str>> {
        let desired = self.desired.get(&source.device_name()?)?;
        let is_shared = desired.pods.iter().any(|other| other != pod) && !desired.pods.contains(pod);
        is_shared.then(|| desired.source.label())
    }

    /// Devices that pods need, and that are mounted with another SELinux label which no pod uses.
    fn mislabelled(&self) -> impl Iterator<Item = (DeviceName, Device)> {
        let is_free = |name: &DeviceName| {
            let found = self.found.as_ref().and_then(|found| found.get(name));
            let is_under_way = self.stage_attempts.get(name).is_some_and(|attempt| attempt.is_under_way);
            found.is_some_and(|found| found.pods.is_empty()) && !is_under_way
        };
        let is_other = |name: &DeviceName, desired: &DesiredDevice| {
            self.context(name).is_some_and(|context| context != desired.source.mount_context())
        };
        let all = self.desired.iter().filter(move |(name, desired)| is_other(name, desired) && is_free(name));
        all.filter_map(|(name, desired)| Some((name.clone(), Device::of(&desired.source)?)))
    }

    /// The pods that need devices.
    pub fn user_uids(&self) -> impl Iterator<Item = &PodUid> {
        self.by_pod.keys()
    }

    /// The pods that need the device.
    pub fn users(&self, name: &DeviceName) -> Vec<PodUid> {
        self.desired.get(name).map(|desired| desired.pods.clone()).unwrap_or_default()
    }

    /// The pods that need a device which is not staged, or which serves one pod only and may be free now.
    pub fn waiting_pods(&self) -> Vec<PodUid> {
        let may_wait =
            |name: &DeviceName, desired: &DesiredDevice| desired.source.is_exclusive || !self.staged.contains(name);
        let waiting = self.desired.iter().filter(|(name, desired)| may_wait(name, desired));
        waiting.flat_map(|(_, desired)| desired.pods.iter().cloned()).collect()
    }

    /// A look has shown which pods of a previous process have devices.
    pub fn are_listed(&self) -> bool {
        self.found.is_some()
    }

    /// Another pod uses a volume that only one pod may use: one that a previous process served, or one that came first.
    pub fn is_used_by_another_pod(&self, pod: &PodUid, source: &PersistentSource) -> bool {
        let Some(name) = Device::of(source).filter(|_| source.is_exclusive).map(|device| DeviceName::of(&device))
        else {
            return false;
        };
        let Some(found) = &self.found else { return true };
        match found.get(&name).map(|found| &found.pods).filter(|pods| !pods.is_empty()) {
            Some(pods) => !pods.contains(pod),
            None => self.desired.get(&name).and_then(|desired| desired.pods.first()).is_some_and(|first| first != pod),
        }
    }

    /// Pods that wait for a device of which the Node object says something new.
    pub fn attachment_changed(&self, before: Option<&NodeObject>, after: Option<&NodeObject>) -> Vec<PodUid> {
        let has = |node: Option<&NodeObject>, volume: &str| node.is_some_and(|it| it.has_attached(volume));
        let is_changed = |volume: String| has(before, &volume) != has(after, &volume);
        let changed = self.desired.values().filter(|desired| desired.source.attached_name().is_some_and(is_changed));
        changed.flat_map(|desired| desired.pods.iter().cloned()).collect()
    }

    /// From now on it may be staged, whatever the result.
    pub fn begin_stage(&mut self, source: &PersistentSource) {
        let Some(name) = source.device_name() else { return };
        self.stage_attempts.insert(name, StageAttempt::of(source, true));
    }

    pub fn staged(&mut self, source: &PersistentSource) {
        let Some(name) = source.device_name() else { return };
        self.stage_attempts.insert(name.clone(), StageAttempt::of(source, false));
        self.failures.remove(&name);
        if !self.desired.contains_key(&name) {
            self.request_look();
        }
        self.staged.insert(name);
    }

    /// The driver may have staged it despite the error: if no pod needs it, the disk is looked at.
    pub fn failed(&mut self, name: &DeviceName, cure: Cure, message: String, now: Now) {
        let failure = Failure::of_volume(self.failures.get(name), message, now);
        self.failures.insert(name.clone(), Failure { cure, ..failure });
        // A label that it was to be mounted with keeps other pods waiting until a look shows that it is not.
        let mut has_label = false;
        if let Some(attempt) = self.stage_attempts.get_mut(name) {
            attempt.is_under_way = false;
            has_label = attempt.context.is_some();
        }
        if has_label || !self.desired.contains_key(name) {
            self.request_look();
        }
    }

    /// A volume could not be published: a driver that was restarted may not know that it is staged.
    pub fn mark_unstaged(&mut self, source: &PersistentSource) {
        if let Some(name) = source.device_name() {
            self.staged.remove(&name);
        }
    }

    /// What failed on the driver's devices is tried again at once. Returns the pods that need them.
    pub fn retry(&mut self, driver: &str, now: Now) -> Vec<PodUid> {
        let prefix = DeviceName::of(&Device::csi(driver, ""));
        self.retry_those(|name, _| name.0.starts_with(&prefix.0), now)
    }

    /// What failed because a file system did not answer is tried again at once. Returns the pods that need it.
    pub fn file_system_answered(&mut self, now: Now) -> Vec<PodUid> {
        self.retry_those(|_, failure| failure.cure == Cure::FileSystemAnswer, now)
    }

    fn retry_those(&mut self, is_meant: impl Fn(&DeviceName, &Failure) -> bool, now: Now) -> Vec<PodUid> {
        let mut names = Vec::new();
        for (name, failure) in self.failures.iter_mut().filter(|(name, failure)| is_meant(name, failure)) {
            failure.retry_at = failure.retry_at.min(now.uptime);
            names.push(name.clone());
        }
        names.iter().flat_map(|name| self.users(name)).collect()
    }

    pub fn unstaged(&mut self, name: &DeviceName) {
        self.failures.remove(name);
        self.staged.remove(name);
        self.stage_attempts.remove(name);
        self.unused.remove(name);
        if let Some(found) = &mut self.found {
            found.remove(name);
        }
    }

    /// An unstage begins: from now on it is not staged, whatever the result.
    pub fn begin_unstage(&mut self, name: &DeviceName) {
        self.staged.remove(name);
    }

    /// The look that is to begin now; it counts as under way.
    pub fn look_due(&mut self, now: Now) -> bool {
        let is_due = matches!(self.look, LookState::Due(at) if at <= now.uptime);
        if is_due {
            self.look = LookState::UnderWay { is_requested: false };
        }
        is_due
    }

    fn request_look(&mut self) {
        self.look = match self.look {
            LookState::UnderWay { .. } => LookState::UnderWay { is_requested: true },
            LookState::Idle | LookState::Due(_) => LookState::Due(Uptime::ZERO),
        };
    }

    pub fn look_failed(&mut self, now: Now) {
        self.look = LookState::Due(now.uptime + LOOK_RETRY);
    }

    /// Takes in a look: what is on disk, needed by no pod and referred to by no pod's directory is unused.
    pub fn listed(&mut self, devices: Vec<FoundDevice>) {
        let was_requested = self.look == LookState::UnderWay { is_requested: true };
        self.look = if was_requested { LookState::Due(Uptime::ZERO) } else { LookState::Idle };
        let mut found = BTreeMap::new();
        self.unused.clear();
        // One may have several directories: it is in use if one of them is.
        for device in devices {
            let name = DeviceName::of(&device.device);
            let known = found.entry(name).or_insert_with(|| device.clone());
            known.pods.extend(device.pods);
        }
        for (name, device) in &found {
            if device.pods.is_empty() && !self.desired.contains_key(name) {
                self.unused.insert(name.clone(), device.device.clone());
            }
        }
        self.failures.retain(|name, _| self.desired.contains_key(name) || found.contains_key(name));
        self.staged.retain(|name| self.desired.contains_key(name) || found.contains_key(name));
        // A look that began before the last change may not show it. Each failure of a stage with a label is followed by a look,
        // which shows whether the label counts.
        let (desired, staged) = (&self.desired, &self.staged);
        let may_stay = |name: &DeviceName, stage: &StageAttempt| {
            let is_desired = desired.contains_key(name) && (stage.context.is_none() || staged.contains(name));
            stage.is_under_way || was_requested || is_desired || found.contains_key(name)
        };
        self.stage_attempts.retain(|name, stage| may_stay(name, stage));
        self.found = Some(found);
    }

    /// The devices to unstage now. The caller leaves out those with an operation in flight.
    pub fn to_unstage(&self, now: Now) -> Vec<(DeviceName, Device)> {
        let may = |name: &DeviceName| self.failures.get(name).is_none_or(|failure| failure.retry_at <= now.uptime);
        let unused = self.unused.iter().map(|(name, device)| (name.clone(), device.clone()));
        unused.chain(self.mislabelled()).filter(|(name, _)| may(name)).collect()
    }

    /// `volumesInUse` of the node: the attach/detach controller leaves these attached. `None` before the first look at the disk,
    /// and before the Node object is known: what it has stays.
    pub fn in_use(&self, node: Option<&NodeObject>) -> Option<Vec<String>> {
        let (found, node) = (self.found.as_ref()?, node?);
        let desired = self.desired.values().filter_map(|desired| desired.source.attached_name());
        let attempt = self.stage_attempts.values().filter_map(|stage| stage.attached_name.clone());
        // Whether a previous process's devices were attached is only in the Node object.
        let was_in_use = |volume: &String| node.volumes_in_use.contains(volume);
        let found = found.values().flat_map(|found| found.device.volume_names()).filter(was_in_use);
        let names: BTreeSet<_> = desired.chain(attempt).chain(found).collect();
        Some(names.into_iter().collect())
    }

    pub fn next_wakeup(&self, now: Now) -> Option<Uptime> {
        let look_at = match self.look {
            LookState::Due(at) => Some(at),
            LookState::Idle | LookState::UnderWay { .. } => None,
        };
        let to_end = self.unused.keys().cloned().chain(self.mislabelled().map(|(name, _)| name));
        let retries = to_end.filter_map(|name| self.failures.get(&name)).map(|failure| failure.retry_at);
        retries.filter(|at| *at > now.uptime).chain(look_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        test_support::{later, now},
        volumes::{
            csi::{AccessMode, CsiVolume, DriverRules},
            in_tree,
        },
    };

    fn source(handle: &str) -> Arc<PersistentSource> {
        let source = serde_json::json!({"driver": "d", "volumeHandle": handle});
        let source = serde_json::from_value(source).unwrap();
        let volume = CsiVolume::persistent(&source, AccessMode::ReadWriteOnce, DriverRules::of(None));
        let kind = PersistentKind::Csi(volume);
        let name = format!("pv-{handle}");
        Arc::new(PersistentSource { name, read_only: false, is_exclusive: false, kind, size: None, group: None })
    }

    fn device(handle: &str) -> Device {
        Device::csi("d", handle)
    }

    fn found(handle: &str, pods: &[&str]) -> FoundDevice {
        let pods = pods.iter().map(|uid| PodUid::new(*uid)).collect();
        FoundDevice { device: device(handle), pods, context: None }
    }

    fn node(in_use: &[&str], attached: &[&str]) -> NodeObject {
        let names = |handles: &[&str]| handles.iter().map(|handle| DeviceName::of(&device(handle)).0).collect();
        NodeObject { volumes_in_use: names(in_use), volumes_attached: names(attached), ..NodeObject::default() }
    }

    fn unstaged_now(devices: &Devices) -> Vec<String> {
        devices.to_unstage(now()).into_iter().map(|(name, _)| name.0).collect()
    }

    #[test]
    fn device_is_staged_once_attached_and_reported_in_use() {
        let (mut devices, pod) = (Devices::default(), PodUid::new("p"));
        let wanted = source("h");
        devices.add_user(&pod, &wanted);
        let state = |devices: &Devices, node: &NodeObject| format!("{:?}", devices.state(&wanted, Some(node), now()));
        assert_eq!(state(&devices, &node(&[], &["h"])), "NotAttached");
        assert_eq!(state(&devices, &node(&["h"], &[])), "NotAttached");
        assert_eq!(devices.state(&wanted, None, now()), DeviceState::NotAttached);
        let ready = node(&["h"], &["h"]);
        assert_eq!(devices.attachment_changed(None, Some(&ready)), [pod]);
        assert_eq!(state(&devices, &ready), "Unstaged");
        devices.failed(&DeviceName::of(&device("h")), Cure::Nothing, "no".to_owned(), now());
        assert!(state(&devices, &ready).starts_with("Failed"));
        assert_eq!(
            devices.state(&wanted, Some(&ready), later(1_000_000)),
            DeviceState::Unstaged,
            "the back-off is over"
        );
        devices.staged(&wanted);
        assert_eq!(state(&devices, &node(&[], &[])), "Staged");
    }

    #[test]
    fn without_the_controller_the_node_attaches_what_it_can() {
        let (csi, pod) = (source("h"), PodUid::new("p"));
        let target = serde_json::json!({"targetPortal": "1.2.3.4", "iqn": "iqn.2003-01.org.x:y", "lun": 1});
        let volume = serde_json::json!({"name": "v", "iscsi": target});
        let disk = in_tree::inline(&serde_json::from_value(volume).unwrap(), "default").unwrap().unwrap();
        let disk = Arc::new(disk);
        let mut devices = Devices::without_controller();
        for wanted in [&csi, &disk] {
            devices.add_user(&pod, wanted);
        }
        assert_eq!(devices.state(&csi, Some(&node(&["h"], &["h"])), now()), DeviceState::NeedsController);
        assert_eq!(devices.state(&disk, Some(&node(&[], &[])), now()), DeviceState::Unstaged);
        devices.look_due(now());
        devices.listed(Vec::new());
        assert_eq!(devices.in_use(Some(&node(&[], &[]))).unwrap().len(), 2, "upstream reports both all the same");
    }

    #[test]
    fn device_with_several_directories_is_used_if_one_is() {
        let mut devices = Devices::default();
        for (pods, unused) in [(["p"].as_slice(), 0), (&[], 1)] {
            for listed in [[found("h", pods), found("h", &[])], [found("h", &[]), found("h", pods)]] {
                devices.look_due(now());
                devices.listed(listed.to_vec());
                assert_eq!(unstaged_now(&devices).len(), unused);
                devices.request_look();
            }
        }
    }

    #[test]
    fn device_is_unstaged_when_no_pod_wants_it_and_none_refers_to_it() {
        let mut devices = Devices::default();
        let pods = [PodUid::new("p"), PodUid::new("q")];
        for pod in &pods {
            devices.add_user(pod, &source("h"));
        }
        assert!(devices.look_due(now()), "a previous process may have left devices");
        devices.listed(vec![found("h", &["p"]), found("left", &[]), found("running", &["r"])]);
        assert_eq!(unstaged_now(&devices), ["kubernetes.io/csi/d^left"]);
        devices.release(&pods[0]);
        assert!(devices.look_due(now()));
        devices.listed(vec![found("h", &[])]);
        assert!(unstaged_now(&devices).is_empty(), "another pod wants it");
        devices.release(&pods[1]);
        assert!(unstaged_now(&devices).is_empty(), "not looked at yet");
        assert!(devices.look_due(now()));
        devices.listed(vec![found("h", &[])]);
        assert_eq!(unstaged_now(&devices), ["kubernetes.io/csi/d^h"]);
        devices.add_user(&pods[0], &source("h"));
        assert!(unstaged_now(&devices).is_empty(), "a pod wants it again");
    }

    #[test]
    fn device_is_released_before_the_pods_other_volumes_are_unmounted() {
        let (mut devices, pod) = (Devices::default(), PodUid::new("p"));
        devices.look_due(now());
        devices.listed(Vec::new());
        for handle in ["a", "hangs"] {
            devices.add_user(&pod, &source(handle));
        }
        devices.release_volume(&pod, "pv-a");
        assert!(devices.look_due(now()));
        devices.listed(vec![found("a", &[]), found("hangs", &["p"])]);
        assert_eq!(unstaged_now(&devices), ["kubernetes.io/csi/d^a"]);
        assert_eq!(devices.users(&DeviceName::of(&device("hangs"))), [pod]);
    }

    #[test]
    fn volume_of_a_pod_of_a_previous_process_is_released_before_its_others() {
        let (mut devices, pod) = (Devices::default(), PodUid::new("p"));
        devices.look_due(now());
        devices.listed(vec![found("a", &["p"]), found("hangs", &["p"])]);
        devices.release_volume(&PodUid::new("other"), "pv-a");
        assert!(!devices.look_due(now()), "that pod has no device");
        devices.release_volume(&pod, "pv-a");
        assert!(devices.look_due(now()));
        devices.listed(vec![found("a", &[]), found("hangs", &["p"])]);
        assert_eq!(unstaged_now(&devices), ["kubernetes.io/csi/d^a"]);
    }

    #[test]
    fn label_of_a_failed_stage_counts_only_if_it_is_on_disk() {
        let (mut devices, pod, name) = (Devices::default(), PodUid::new("p"), DeviceName::of(&device("h")));
        let labelled = |label: &str| Arc::new((*source("h")).clone().with_label(Some(label.to_owned()), true));
        let ready = node(&["h"], &["h"]);
        devices.look_due(now());
        devices.listed(Vec::new());
        devices.add_user(&pod, &labelled("one"));
        devices.begin_stage(&labelled("one"));
        devices.failed(&name, Cure::Nothing, "no such option".to_owned(), now());
        devices.add_user(&pod, &source("h"));
        assert_eq!(devices.state(&source("h"), Some(&ready), later(1_000)), DeviceState::OtherLabel, "it may be there");
        assert!(devices.look_due(now()));
        devices.listed(Vec::new());
        assert_eq!(devices.state(&source("h"), Some(&ready), later(1_000)), DeviceState::Unstaged);
    }

    #[test]
    fn volumes_are_in_use_until_they_are_unstaged() {
        let (mut devices, pod) = (Devices::default(), PodUid::new("p"));
        assert_eq!(devices.in_use(Some(&node(&["h"], &[]))), None, "not looked at the disk yet");
        devices.look_due(now());
        devices.listed(vec![found("old", &["r"]), found("never-attached", &["r"])]);
        assert_eq!(devices.in_use(None), None, "what the Node object has is not known yet");
        let names = |devices: &Devices| devices.in_use(Some(&node(&["old", "gone"], &[]))).unwrap();
        assert_eq!(names(&devices), ["kubernetes.io/csi/d^old"]);
        devices.add_user(&pod, &source("h"));
        assert_eq!(names(&devices), ["kubernetes.io/csi/d^h", "kubernetes.io/csi/d^old"]);
        devices.staged(&source("h"));
        devices.release(&pod);
        assert_eq!(names(&devices).len(), 2, "it is still staged");
        devices.unstaged(&DeviceName::of(&device("h")));
        assert_eq!(names(&devices), ["kubernetes.io/csi/d^old"]);
    }

    #[test]
    fn volume_whose_stage_is_under_way_stays_in_use_without_its_pod() {
        let (mut devices, pod, name) = (Devices::default(), PodUid::new("p"), DeviceName::of(&device("h")));
        let in_use = |devices: &Devices| !devices.in_use(Some(&node(&[], &[]))).unwrap().is_empty();
        devices.add_user(&pod, &source("h"));
        devices.look_due(now());
        devices.begin_stage(&source("h"));
        devices.release(&pod);
        devices.listed(Vec::new());
        assert!(in_use(&devices), "the stage is under way");
        assert!(devices.look_due(now()));
        devices.failed(&name, Cure::Nothing, "no answer".to_owned(), now());
        devices.listed(Vec::new());
        assert!(in_use(&devices), "the look began before the stage ended");
        assert!(devices.look_due(now()));
        devices.listed(Vec::new());
        assert!(!in_use(&devices), "nothing is on disk");
    }

    #[test]
    fn device_with_another_label_is_unstaged_first() {
        let (mut devices, pods) = (Devices::default(), ["p", "q"].map(PodUid::new));
        let labelled = |label: &str| Arc::new((*source("h")).clone().with_label(Some(label.to_owned()), true));
        let (name, ready) = (DeviceName::of(&device("h")), node(&["h"], &["h"]));
        let found = |pods: &[&str]| FoundDevice { context: Some("one".to_owned()), ..found("h", pods) };
        devices.look_due(now());
        devices.listed(vec![found(&["p"])]);
        devices.add_user(&pods[0], &labelled("one"));
        assert_eq!(devices.label_for_others(&pods[1], &source("h")), Some(Some("one")));
        assert_eq!(devices.state(&labelled("one"), Some(&ready), now()), DeviceState::Unstaged);
        devices.staged(&labelled("one"));
        devices.release(&pods[0]);
        assert_eq!(devices.label_for_others(&pods[1], &source("h")), None);
        devices.add_user(&pods[1], &labelled("two"));
        assert_eq!(devices.state(&labelled("two"), Some(&ready), now()), DeviceState::OtherLabel);
        assert!(unstaged_now(&devices).is_empty(), "the first pod may still have it");
        assert!(devices.look_due(now()));
        devices.listed(vec![found(&[])]);
        assert_eq!(unstaged_now(&devices), ["kubernetes.io/csi/d^h"]);
        devices.begin_unstage(&name);
        devices.unstaged(&name);
        assert_eq!(devices.state(&labelled("two"), Some(&ready), now()), DeviceState::Unstaged);
        devices.staged(&labelled("two"));
        devices.listed(vec![found(&[])]);
        assert_eq!(devices.state(&labelled("two"), Some(&ready), now()), DeviceState::Staged, "the look is older");
    }

    #[test]
    fn device_is_staged_again_after_a_failed_publication() {
        let (mut devices, wanted) = (Devices::default(), source("h"));
        devices.look_due(now());
        devices.listed(Vec::new());
        devices.add_user(&PodUid::new("p"), &wanted);
        devices.staged(&wanted);
        devices.mark_unstaged(&wanted);
        assert_eq!(devices.state(&wanted, Some(&node(&["h"], &["h"])), now()), DeviceState::Unstaged);
        devices.release(&PodUid::new("p"));
        assert_eq!(devices.in_use(Some(&node(&[], &[]))).unwrap(), ["kubernetes.io/csi/d^h"], "it may be staged");
    }

    #[test]
    fn exclusive_volume_serves_one_pod() {
        let mut devices = Devices::default();
        let exclusive = Arc::new(PersistentSource { is_exclusive: true, ..(*source("h")).clone() });
        devices.add_user(&PodUid::new("p"), &exclusive);
        assert!(devices.is_used_by_another_pod(&PodUid::new("p"), &exclusive), "the disk may show another one");
        devices.look_due(now());
        devices.listed(Vec::new());
        devices.add_user(&PodUid::new("q"), &exclusive);
        assert!(!devices.is_used_by_another_pod(&PodUid::new("p"), &exclusive));
        assert!(devices.is_used_by_another_pod(&PodUid::new("q"), &exclusive));
        assert!(
            !devices.is_used_by_another_pod(&PodUid::new("q"), &source("h")),
            "other access modes allow several pods"
        );
        devices.listed(vec![found("h", &["q"])]);
        assert!(
            devices.is_used_by_another_pod(&PodUid::new("p"), &exclusive),
            "a previous process served the other one"
        );
        assert!(!devices.is_used_by_another_pod(&PodUid::new("q"), &exclusive));
        devices.staged(&exclusive);
        assert_eq!(devices.waiting_pods().len(), 2, "each look may show that it is free, staged or not");
    }
}
