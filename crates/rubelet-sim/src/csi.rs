//! The CsiPlugins port over simulated drivers: calls take time, can fail in every way, and outlive their client or not.
//!
//! Owns: the course of a call. Never: what a call does (`act.rs`), which drivers there are (`driver.rs`).
//! A call can be made twice, as by a retry of the transport, but not after its client has an answer.

pub(crate) mod act;
pub(crate) mod attacher;
pub(crate) mod driver;
pub(crate) mod objects;

use std::{
    collections::BTreeMap,
    future::pending,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use rubelet_csi::{
    AccessType, CALL_TIMEOUT, Code, CsiError, CsiPlugins, CsiResult, DriverAddress, ExpandVolume, NodeCapabilities,
    NodeInfo, PublishVolume, StageVolume, VolumeStats, VolumeUsage, pluginregistration::PluginInfo,
};
use tokio::time::{sleep, timeout};

use crate::{
    csi::{
        act::CsiAct,
        attacher::Attachment,
        driver::{Device, Driver},
    },
    faults::{CsiCourse, CsiOutcome},
    simulation::{Incarnation, ScheduledEvent, SimState, Simulation},
};

const STAGE: Duration = Duration::from_millis(400);
const PUBLISH: Duration = Duration::from_millis(60);
const EXPAND: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_millis(4);
/// The client's deadlines of plugin registration, which `rubelet_csi` keeps to itself.
const INFO_TIMEOUT: Duration = Duration::from_secs(1);
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Drivers, the volumes they serve, and what is attached.
#[derive(Debug, Default)]
pub(crate) struct Csi {
    pub drivers: BTreeMap<String, Driver>,
    pub attachments: BTreeMap<Device, Attachment>,
    /// What volumes were last staged with.
    pub options: BTreeMap<Device, String>,
    /// Calls under way: their method and what they are about.
    pub calls: BTreeMap<u64, (&'static str, String)>,
    calls_made: u64,
    /// The attach/detach controller ignores `volumesInUse`, to prove the rules.
    pub is_reckless: bool,
}

impl Csi {
    /// A call begins; the number is for its end.
    fn list_call(&mut self, method: &'static str, about: String) -> u64 {
        self.calls_made += 1;
        self.calls.insert(self.calls_made, (method, about));
        self.calls_made
    }

    /// The driver that listens on this socket.
    fn listening(&self, socket: &Path) -> CsiResult<&Driver> {
        let driver = self.drivers.values().find(|driver| driver.is_up && driver.has_socket(socket));
        driver.ok_or_else(|| unreachable_driver(socket))
    }
}

/// The plugins as one process of the agent reaches them.
#[derive(Debug)]
pub(crate) struct FakePlugins {
    simulation: Arc<Simulation>,
    incarnation: Incarnation,
}

impl FakePlugins {
    pub(crate) fn new(simulation: Arc<Simulation>, incarnation: Incarnation) -> Self {
        FakePlugins { simulation, incarnation }
    }

    /// A call that changes nothing.
    async fn look<T>(
        &self,
        method: &'static str,
        socket: &Path,
        view: impl FnOnce(&mut SimState, &str) -> CsiResult<T>,
    ) -> CsiResult<T> {
        let (name, epoch, course, id) = self.simulation.with(|sim| {
            let driver = sim.csi.listening(socket)?;
            let (name, epoch) = (driver.script.name.clone(), driver.epoch);
            let course = sim.faults.csi_course(&mut sim.rng, LOOK);
            if course.is_faulty() {
                sim.strike_users_of(&name);
            }
            let id = sim.csi.list_call(method, name.clone());
            CsiResult::Ok((name, epoch, course, id))
        })?;
        let _listed = ListedCall { simulation: self.simulation.clone(), id };
        let CsiCourse { outcome, before, after, .. } = course;
        self.pass(&name, epoch, before).await?;
        match outcome {
            CsiOutcome::ErrorBefore(code) | CsiOutcome::DoneButError(code) => return Err(injected(code)),
            CsiOutcome::HangBefore | CsiOutcome::HangAfter => return pending().await,
            CsiOutcome::Answered => {}
        }
        let answer = self.simulation.with(|sim| view(sim, &name));
        self.pass(&name, epoch, after).await?;
        answer
    }

    async fn change(&self, socket: &Path, act: CsiAct, usual: Duration) -> CsiResult<()> {
        if !self.simulation.look(|sim| sim.is_alive(self.incarnation)) {
            return pending().await;
        }
        self.within(CALL_TIMEOUT, async {
            let mut call = self.begin(socket, act, usual)?;
            let CsiCourse { outcome, before, after, again_after, .. } = call.course;
            let (name, epoch) = (call.driver.clone(), call.epoch);
            self.pass(&name, epoch, before).await?;
            match outcome {
                CsiOutcome::ErrorBefore(code) => return Err(injected(code)),
                CsiOutcome::HangBefore => return pending().await,
                CsiOutcome::HangAfter | CsiOutcome::DoneButError(_) | CsiOutcome::Answered => {}
            }
            let mut answer = call.perform();
            if outcome == CsiOutcome::HangAfter {
                return pending().await;
            }
            if let Some(wait) = again_after {
                self.pass(&name, epoch, wait).await?;
                answer = call.perform_again();
            }
            self.pass(&name, epoch, after).await?;
            if let CsiOutcome::DoneButError(code) = outcome {
                return Err(injected(code));
            }
            answer?;
            self.simulation.with(|sim| sim.rules.csi_succeeded(&call.act));
            Ok(())
        })
        .await
    }

    fn begin(&self, socket: &Path, act: CsiAct, usual: Duration) -> CsiResult<Call> {
        self.simulation.with(|sim| {
            let driver = sim.csi.listening(socket)?;
            let (name, epoch, is_pending) =
                (driver.script.name.clone(), driver.epoch, driver.pending.contains_key(act.handle()));
            sim.check_csi_call(&name, &act);
            if is_pending {
                let handle = act.handle();
                sim.log("csi", format!("{act}: an operation with volume {handle} exists"));
                return Err(busy(handle));
            }
            let course = sim.faults.csi_course(&mut sim.rng, usual);
            if course.is_faulty() {
                sim.strike_users_of(&name);
            }
            let id = sim.csi.list_call(act.method(), act.to_string());
            sim.driver(&name).pending.insert(act.handle().to_owned(), id);
            sim.rules.csi_begins(sim.now, &name, &act);
            Ok(Call { simulation: self.simulation.clone(), id, driver: name, act, course, epoch, times_done: 0 })
        })
    }

    /// Time passes; the call fails if the driver ended meanwhile, and is lost if the caller is dead.
    async fn pass(&self, driver: &str, epoch: u32, wait: Duration) -> CsiResult<()> {
        self.simulation.with(|sim| sim.may_kill_agent(self.incarnation));
        sleep(wait).await;
        let (is_alive, is_there) = self.simulation.look(|sim| {
            let is_there = sim.csi.drivers.get(driver).is_some_and(|driver| driver.is_up && driver.epoch == epoch);
            (sim.is_alive(self.incarnation), is_there)
        });
        if !is_alive {
            return pending().await;
        }
        if is_there { Ok(()) } else { Err(CsiError::new(Code::Unavailable, "error reading from server: EOF")) }
    }

    async fn within<T>(&self, limit: Duration, call: impl Future<Output = CsiResult<T>>) -> CsiResult<T> {
        let late = |_| Err(CsiError::new(Code::DeadlineExceeded, "context deadline exceeded"));
        let answer = timeout(limit, call).await.unwrap_or_else(late);
        if !self.simulation.look(|sim| sim.is_alive(self.incarnation)) {
            return pending().await;
        }
        answer
    }
}

/// A running changing call. When its client disconnects the driver drops it, or continues it alone.
struct Call {
    simulation: Arc<Simulation>,
    id: u64,
    driver: String,
    act: CsiAct,
    course: CsiCourse,
    epoch: u32,
    times_done: u32,
}

impl Call {
    fn perform(&mut self) -> CsiResult<()> {
        self.times_done = 1;
        self.simulation.with(|sim| {
            sim.driver(&self.driver).pending.remove(self.act.handle());
            sim.perform_csi(&self.driver, &self.act)
        })
    }

    /// The transport made the call again. Other calls may have come in between.
    fn perform_again(&mut self) -> CsiResult<()> {
        self.times_done = 2;
        self.simulation.with(|sim| {
            if sim.driver(&self.driver).pending.contains_key(self.act.handle()) {
                return Err(busy(self.act.handle()));
            }
            sim.log("csi", "a call is made twice");
            sim.perform_csi(&self.driver, &self.act)
        })
    }

    /// Whether the driver has yet to do something that its client does not wait for any more.
    fn goes_on(&self, sim: &mut SimState) -> bool {
        match self.times_done {
            0 => self.course.goes_on_without_client && self.course.outcome == CsiOutcome::Answered,
            1 => {
                let is_free = !sim.driver(&self.driver).pending.contains_key(self.act.handle());
                self.course.again_after.is_some() && is_free
            }
            _ => false,
        }
    }
}

/// A call that is listed among those under way.
struct ListedCall {
    simulation: Arc<Simulation>,
    id: u64,
}

impl Drop for ListedCall {
    fn drop(&mut self) {
        self.simulation.with(|sim| sim.csi.calls.remove(&self.id));
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.simulation.with(|sim| {
            sim.csi.calls.remove(&self.id);
            sim.rules.csi_returned(&self.driver, &self.act);
            if sim.driver(&self.driver).epoch != self.epoch {
                return;
            }
            if self.goes_on(sim) {
                // The volume is locked until then: an unstaging made twice would else end what others staged in between.
                sim.driver(&self.driver).pending.insert(self.act.handle().to_owned(), self.id);
                let most_secs = if sim.rng.u32(0..4) == 0 { 150 } else { 3 };
                let wait = Duration::from_millis(sim.rng.u64(1..most_secs * 1_000));
                let late = LateCsiCall { driver: self.driver.clone(), act: self.act.clone(), epoch: self.epoch };
                sim.schedule_in(wait, ScheduledEvent::Csi(Box::new(late)));
            } else if self.times_done == 0 {
                sim.driver(&self.driver).pending.remove(self.act.handle());
            }
        });
    }
}

/// A call that the driver finishes after its client disconnected.
#[derive(Clone, Debug)]
pub(crate) struct LateCsiCall {
    driver: String,
    act: CsiAct,
    epoch: u32,
}

impl LateCsiCall {
    pub(crate) fn finish(&self, sim: &mut SimState) {
        // A restarted driver does not know it.
        if sim.driver(&self.driver).epoch != self.epoch {
            return;
        }
        sim.driver(&self.driver).pending.remove(self.act.handle());
        sim.log("csi", "a call without a client goes on");
        drop(sim.perform_csi(&self.driver, &self.act));
    }
}

fn unreachable_driver(socket: &Path) -> CsiError {
    let dialing = format!("dial unix {}: connect: connection refused", socket.display());
    CsiError::new(Code::Unavailable, format!("connection error: desc = \"transport: Error while dialing: {dialing}\""))
}

fn busy(handle: &str) -> CsiError {
    CsiError::new(Code::Aborted, format!("an operation with volume {handle} already exists"))
}

fn injected(code: Code) -> CsiError {
    CsiError::new(code, "injected")
}

#[async_trait]
impl CsiPlugins for FakePlugins {
    async fn plugin_info(&self, socket: &Path) -> CsiResult<PluginInfo> {
        let asked = self.look("GetInfo", socket, |sim, name| Ok(sim.driver(name).info()));
        self.within(INFO_TIMEOUT, asked).await
    }

    /// As the usual registrar, one that was refused ends, and is started again.
    async fn notify_registration(&self, socket: &Path, outcome: Result<(), String>) -> CsiResult<()> {
        let told = self.look("NotifyRegistrationStatus", socket, |sim, name| {
            sim.log("csi", format!("{name} is registered: {outcome:?}"));
            if outcome.is_err() {
                sim.restart_registrar(name);
            }
            Ok(())
        });
        self.within(NOTIFY_TIMEOUT, told).await
    }

    async fn node_info(&self, driver: &DriverAddress) -> CsiResult<NodeInfo> {
        let asked = self.look("NodeGetInfo", &driver.socket, |sim, name| {
            let max_volumes = sim.driver(name).script.limit.and_then(|limit| i64::try_from(limit).ok());
            Ok(NodeInfo { node_id: format!("{name}-node"), max_volumes, ..NodeInfo::default() })
        });
        self.within(CALL_TIMEOUT, asked).await
    }

    async fn capabilities(&self, driver: &DriverAddress) -> CsiResult<NodeCapabilities> {
        let asked =
            self.look("NodeGetCapabilities", &driver.socket, |sim, name| Ok(sim.driver(name).script.capabilities));
        self.within(CALL_TIMEOUT, asked).await
    }

    async fn stage(&self, driver: &DriverAddress, volume: StageVolume) -> CsiResult<()> {
        let options = match &volume.access.access_type {
            AccessType::Mount { mount_flags, .. } => mount_flags.join(","),
            AccessType::Block => String::new(),
        };
        if !options.is_empty() {
            let line = format!("NodeStageVolume {} with {options}", volume.handle);
            self.simulation.with(|sim| sim.log("csi", line));
        }
        let act = CsiAct::Stage { handle: volume.handle, staging: volume.staging_path, options };
        self.change(&driver.socket, act, STAGE).await
    }

    async fn unstage(&self, driver: &DriverAddress, handle: &str, staging_path: &Path) -> CsiResult<()> {
        let act = CsiAct::Unstage { handle: handle.to_owned(), staging: staging_path.to_owned() };
        self.change(&driver.socket, act, STAGE).await
    }

    async fn publish(&self, driver: &DriverAddress, volume: PublishVolume) -> CsiResult<()> {
        let act = CsiAct::Publish {
            handle: volume.handle,
            staging: volume.staging_path,
            target: volume.target_path,
            mode: volume.access.mode,
        };
        self.change(&driver.socket, act, PUBLISH).await
    }

    async fn unpublish(&self, driver: &DriverAddress, handle: &str, target_path: &Path) -> CsiResult<()> {
        let act = CsiAct::Unpublish { handle: handle.to_owned(), target: target_path.to_owned() };
        self.change(&driver.socket, act, PUBLISH).await
    }

    async fn stats(
        &self,
        driver: &DriverAddress,
        handle: &str,
        volume_path: &Path,
        _staging_path: Option<&Path>,
    ) -> CsiResult<VolumeStats> {
        let (handle, path) = (handle.to_owned(), PathBuf::from(volume_path));
        let asked = self.look("NodeGetVolumeStats", &driver.socket, move |sim, name| {
            if !sim.driver(name).script.capabilities.volume_stats {
                return Err(CsiError::new(Code::Unimplemented, "NodeGetVolumeStats is not implemented"));
            }
            let total = sim.driver(name).volumes.get(&handle).map(|size| size.file_system);
            let total = total.filter(|_| sim.disk.mounted_at(&path).is_some());
            let total = total.ok_or_else(|| CsiError::new(Code::NotFound, format!("volume {handle} is not at it")))?;
            let bytes = VolumeUsage { available: total, total, used: 0 };
            Ok(VolumeStats { bytes: Some(bytes), inodes: None, condition: None })
        });
        self.within(CALL_TIMEOUT, asked).await
    }

    async fn expand(&self, driver: &DriverAddress, volume: ExpandVolume) -> CsiResult<Option<i64>> {
        let ExpandVolume { handle, volume_path, required_bytes, .. } = volume;
        let act = CsiAct::Expand { handle: handle.clone(), path: volume_path, bytes: required_bytes };
        self.change(&driver.socket, act, EXPAND).await?;
        let size = self.simulation.look(|sim| sim.csi.drivers.get(&driver.name)?.volumes.get(&handle).copied());
        Ok(size.map(|size| size.file_system))
    }
}
