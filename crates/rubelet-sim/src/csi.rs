//! The CsiPlugins port over simulated drivers: calls take time, can fail in every way, and outlive their client or not.
//!
//! Owns: the course of a call. Never: what a call does (`act.rs`), which drivers there are (`driver.rs`).

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
const LOOK: Duration = Duration::from_millis(4);
/// The client's deadlines of plugin registration.
const INFO_TIMEOUT: Duration = Duration::from_secs(1);
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Drivers, the volumes they serve, and what is attached.
#[derive(Debug, Default)]
pub(crate) struct Csi {
    pub drivers: BTreeMap<String, Driver>,
    pub attachments: BTreeMap<Device, Attachment>,
    /// Calls under way: their method and what they are about.
    pub calls: BTreeMap<u64, (&'static str, String)>,
    calls_made: u64,
    /// The attach/detach controller ignores `volumesInUse`, to prove the rules.
    pub is_reckless: bool,
}

impl Csi {
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
    async fn look<T>(&self, socket: &Path, view: impl FnOnce(&mut SimState, &str) -> CsiResult<T>) -> CsiResult<T> {
        let (name, epoch, course) = self.simulation.with(|sim| {
            let driver = sim.csi.listening(socket)?;
            let (name, epoch) = (driver.script.name.clone(), driver.epoch);
            let course = sim.faults.csi_course(&mut sim.rng, LOOK);
            if course.is_faulty() {
                sim.strike_users_of(&name);
            }
            CsiResult::Ok((name, epoch, course))
        })?;
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
            let CsiCourse { outcome, before, after, .. } = call.course;
            let (name, epoch) = (call.driver.clone(), call.epoch);
            self.pass(&name, epoch, before).await?;
            match outcome {
                CsiOutcome::ErrorBefore(code) => return Err(injected(code)),
                CsiOutcome::HangBefore => return pending().await,
                CsiOutcome::HangAfter | CsiOutcome::DoneButError(_) | CsiOutcome::Answered => {}
            }
            let answer = call.perform();
            if outcome == CsiOutcome::HangAfter {
                return pending().await;
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
                return Err(CsiError::new(Code::Aborted, format!("an operation with volume {handle} already exists")));
            }
            let course = sim.faults.csi_course(&mut sim.rng, usual);
            if course.is_faulty() {
                sim.strike_users_of(&name);
            }
            sim.csi.calls_made += 1;
            let id = sim.csi.calls_made;
            sim.csi.calls.insert(id, (act.method(), act.to_string()));
            sim.driver(&name).pending.insert(act.handle().to_owned(), id);
            sim.rules.csi_begins(sim.now, &name, &act);
            Ok(Call { simulation: self.simulation.clone(), id, driver: name, act, course, epoch, is_performed: false })
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
    is_performed: bool,
}

impl Call {
    fn perform(&mut self) -> CsiResult<()> {
        self.is_performed = true;
        self.simulation.with(|sim| {
            sim.driver(&self.driver).pending.remove(self.act.handle());
            sim.perform_csi(&self.driver, &self.act)
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.simulation.with(|sim| {
            sim.csi.calls.remove(&self.id);
            sim.rules.csi_returned(&self.driver, &self.act);
            if self.is_performed || sim.driver(&self.driver).epoch != self.epoch {
                return;
            }
            if self.course.goes_on_without_client && self.course.outcome == CsiOutcome::Answered {
                // The volume stays locked until then.
                let most_secs = if sim.rng.u32(0..4) == 0 { 150 } else { 3 };
                let wait = Duration::from_millis(sim.rng.u64(1..most_secs * 1_000));
                let late = LateCsiCall { driver: self.driver.clone(), act: self.act.clone(), epoch: self.epoch };
                sim.schedule_in(wait, ScheduledEvent::Csi(Box::new(late)));
            } else {
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

fn injected(code: Code) -> CsiError {
    CsiError::new(code, "injected")
}

#[async_trait]
impl CsiPlugins for FakePlugins {
    async fn plugin_info(&self, socket: &Path) -> CsiResult<PluginInfo> {
        let asked = self.look(socket, |sim, name| Ok(sim.driver(name).info()));
        self.within(INFO_TIMEOUT, asked).await
    }

    /// As the usual registrar, one that was refused ends, and is started again.
    async fn notify_registration(&self, socket: &Path, outcome: Result<(), String>) -> CsiResult<()> {
        let told = self.look(socket, |sim, name| {
            sim.log("csi", format!("{name} is registered: {outcome:?}"));
            if outcome.is_err() {
                sim.restart_registrar(name);
            }
            Ok(())
        });
        self.within(NOTIFY_TIMEOUT, told).await
    }

    async fn node_info(&self, driver: &DriverAddress) -> CsiResult<NodeInfo> {
        let asked = self.look(&driver.socket, |sim, name| {
            let max_volumes = sim.driver(name).script.limit.and_then(|limit| i64::try_from(limit).ok());
            Ok(NodeInfo { node_id: format!("{name}-node"), max_volumes, ..NodeInfo::default() })
        });
        self.within(CALL_TIMEOUT, asked).await
    }

    async fn capabilities(&self, driver: &DriverAddress) -> CsiResult<NodeCapabilities> {
        let asked = self.look(&driver.socket, |sim, name| Ok(sim.driver(name).script.capabilities));
        self.within(CALL_TIMEOUT, asked).await
    }

    async fn stage(&self, driver: &DriverAddress, volume: StageVolume) -> CsiResult<()> {
        if let AccessType::Mount { mount_flags, .. } = &volume.access.access_type
            && !mount_flags.is_empty()
        {
            let line = format!("NodeStageVolume {} with {}", volume.handle, mount_flags.join(","));
            self.simulation.with(|sim| sim.log("csi", line));
        }
        let act = CsiAct::Stage { handle: volume.handle, staging: volume.staging_path };
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
        let asked = self.look(&driver.socket, move |sim, name| {
            if !sim.driver(name).script.capabilities.volume_stats {
                return Err(CsiError::new(Code::Unimplemented, "NodeGetVolumeStats is not implemented"));
            }
            let total = sim.driver(name).volumes.get(&handle).copied();
            let total = total.filter(|_| sim.disk.mounted_at(&path).is_some());
            let total = total.ok_or_else(|| CsiError::new(Code::NotFound, format!("volume {handle} is not at it")))?;
            let bytes = VolumeUsage { available: total, total, used: 0 };
            Ok(VolumeStats { bytes: Some(bytes), inodes: None, condition: None })
        });
        self.within(CALL_TIMEOUT, asked).await
    }

    async fn expand(&self, driver: &DriverAddress, volume: ExpandVolume) -> CsiResult<Option<i64>> {
        let asked = self.look(&driver.socket, move |sim, name| {
            let ExpandVolume { handle, required_bytes, .. } = volume;
            let driver = sim.driver(name);
            if !driver.script.capabilities.expand {
                return Err(CsiError::new(Code::Unimplemented, "NodeExpandVolume is not implemented"));
            }
            let missing = || CsiError::new(Code::NotFound, format!("volume {handle} does not exist"));
            let size = driver.volumes.get_mut(&handle).ok_or_else(missing)?;
            *size = required_bytes.max(*size);
            let size = *size;
            sim.log("csi", format!("NodeExpandVolume {handle}: {size} bytes"));
            Ok(Some(size))
        });
        self.within(CALL_TIMEOUT, asked).await
    }
}
