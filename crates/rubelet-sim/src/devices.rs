//! Devices that do not answer, and the calls that wait for them.
//!
//! Owns: which devices hang, and a lane for each of them, as `rubelet_host::lanes` has it: a call is late after ten seconds,
//! a device with a late call gets no further one, and after that it gets one at a time until one is answered in time.
//! The thread of a late call goes on, so the call has its effect when the device returns.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rubelet_host::lanes::{DeviceLate, LATE_AFTER};
use tokio::sync::Notify;

use crate::{
    invariants::trouble::Touched,
    runtime::act::Act,
    simulation::{SimState, Simulation},
};

/// Mount points of two devices besides the root's.
pub(crate) const DEVICES: [&str; 2] = ["/mnt/nfs", "/mnt/disk"];

#[derive(Debug, Default)]
pub(crate) struct Devices {
    /// By mount point.
    hung: BTreeSet<PathBuf>,
    lanes: BTreeMap<PathBuf, Lane>,
    /// A device that refused calls takes them again.
    pub answered: Arc<Notify>,
    /// All files of pods have one lane, as in an agent with one pool of threads for everything.
    pub is_one_lane: bool,
}

#[derive(Debug, Default)]
struct Lane {
    waiting: Vec<Waiting>,
    /// Its last call was late.
    is_suspect: bool,
    /// When the only call of a suspect device began.
    trial: Option<Duration>,
}

/// What a call does when the device returns.
type Work = Box<dyn FnOnce(&mut SimState) + Send>;

struct Waiting {
    since: Duration,
    work: Work,
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "since {:?}", self.since)
    }
}

/// The place of a call on the device that holds its file.
#[derive(Debug)]
pub(crate) enum Place {
    Free,
    /// The only call of a device that was late.
    Trial {
        _call: Trial,
    },
    /// This device does not answer.
    Hung(PathBuf),
}

impl Devices {
    pub(crate) fn is_any_hung(&self) -> bool {
        !self.hung.is_empty()
    }

    /// No call has to wait.
    pub(crate) fn all_answer(&self) -> bool {
        self.hung.is_empty() && self.lanes.is_empty()
    }

    /// A new process has threads of its own.
    pub(crate) fn agent_begins(&mut self) {
        self.lanes.clear();
        self.answered = Arc::default();
    }

    /// The call waits for the device, even when its caller does not.
    pub(crate) fn wait(&mut self, point: PathBuf, since: Duration, work: Work) {
        self.lanes.entry(point).or_default().waiting.push(Waiting { since, work });
    }
}

impl Lane {
    /// No other call may begin.
    fn is_late(&self, now: Duration) -> bool {
        let mut begun = self.waiting.iter().map(|call| call.since).chain(self.trial);
        begun.any(|since| self.is_suspect || now.saturating_sub(since) >= LATE_AFTER)
    }
}

pub(crate) fn late(point: &Path) -> DeviceLate {
    let (point, fs_type, source) = (point.to_owned(), "nfs4".to_owned(), "server:/export".to_owned());
    DeviceLate { point, fs_type, source }
}

impl SimState {
    pub(crate) fn hang_device(&mut self, point: &Path) {
        self.log("world", format!("{} does not answer", point.display()));
        self.devices.hung.insert(point.to_owned());
    }

    pub(crate) fn bring_device_back(&mut self, point: &Path) {
        if !self.devices.hung.remove(point) {
            return;
        }
        self.log("world", format!("{} answers again", point.display()));
        let Some(mut lane) = self.devices.lanes.remove(point) else { return };
        lane.is_suspect = lane.waiting.iter().any(|call| self.now.saturating_sub(call.since) >= LATE_AFTER);
        let calls = std::mem::take(&mut lane.waiting);
        if lane.is_suspect {
            self.devices.lanes.insert(point.to_owned(), lane);
        }
        let was_late = self.devices.lanes.contains_key(point);
        for call in calls {
            (call.work)(self);
        }
        if was_late {
            self.devices.answered.notify_one();
        }
    }

    pub(crate) fn bring_devices_back(&mut self) {
        for point in self.devices.hung.clone() {
            self.bring_device_back(&point);
        }
    }

    /// A place for a call about a file of a pod.
    pub(crate) fn enter_lane(&mut self, path: &Path, simulation: &Arc<Simulation>) -> Result<Place, DeviceLate> {
        let Some(point) = self.lane_of(path) else { return Ok(Place::Free) };
        let lane = self.devices.lanes.entry(point.clone()).or_default();
        if lane.is_late(self.now) {
            return Err(late(&point));
        }
        if self.devices.hung.contains(&point) {
            return Ok(Place::Hung(point));
        }
        lane.trial = Some(self.now);
        let call = Trial { simulation: simulation.clone(), point, since: self.now };
        Ok(Place::Trial { _call: call })
    }

    /// The hung or suspect device that holds the file.
    fn lane_of(&self, path: &Path) -> Option<PathBuf> {
        let real = self.disk.real_path(path).ok()?;
        let mut points = self.devices.hung.iter().chain(self.devices.lanes.keys());
        points.find(|point| self.devices.is_one_lane || real.starts_with(point)).cloned()
    }

    fn is_on_hung_device(&self, path: &str) -> bool {
        let real = self.disk.real_path(Path::new(path));
        real.is_ok_and(|real| self.devices.hung.iter().any(|point| real.starts_with(point)))
    }

    /// The runtime looks at the source of every mount when it creates a container.
    pub(crate) fn waits_for_device(&self, act: &Act) -> bool {
        let Act::Create { config, .. } = act else { return false };
        config.mounts.iter().any(|mount| self.is_on_hung_device(&mount.host_path))
    }

    /// A hung device is a fault of the pods that use it, and of no other.
    pub(crate) fn strike_users_of_hung_devices(&mut self) {
        if !self.devices.is_any_hung() {
            return;
        }
        let specs = self.snapshot.pods.iter().filter(|(_, view)| {
            let volumes = view.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
            volumes.filter_map(|volume| volume.host_path.as_ref()).any(|host| self.is_on_hung_device(&host.path))
        });
        // Of an orphan only the runtime knows the volumes.
        let containers =
            self.runtime.picture.containers.values().filter(|container| {
                container.config.mounts.iter().any(|mount| self.is_on_hung_device(&mount.host_path))
            });
        let claimed = self.users_of_devices().into_iter();
        let claimed = claimed.filter(|(_, device)| self.is_on_hung_device(&device.content().to_string_lossy()));
        let users: BTreeSet<String> = specs
            .map(|(uid, _)| uid.as_str().to_owned())
            .chain(claimed.map(|(uid, _)| uid))
            .chain(containers.map(|container| container.pod.uid.clone()))
            .collect();
        for uid in users {
            self.rules.trouble.strike(Touched::Pod(uid), self.now);
        }
    }
}

/// The only call of a suspect device. If it ends in time, the device is well.
#[derive(Debug)]
pub(crate) struct Trial {
    simulation: Arc<Simulation>,
    point: PathBuf,
    since: Duration,
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.simulation.with(|sim| {
            let is_late = sim.now.saturating_sub(self.since) >= LATE_AFTER;
            let is_hung = sim.devices.hung.contains(&self.point);
            if let Some(lane) = sim.devices.lanes.get_mut(&self.point) {
                lane.trial = None;
                lane.is_suspect = is_late;
                if !is_late && !is_hung {
                    sim.devices.lanes.remove(&self.point);
                }
                sim.devices.answered.notify_one();
            }
        });
    }
}
