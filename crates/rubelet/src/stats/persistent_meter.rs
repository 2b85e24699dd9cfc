//! Measures the volumes of claims and of CSI drivers.
//!
//! Owns: when each is measured, that one call at a time measures it, and its last figures. A driver or a server that hangs
//! delays its own volume alone. Volumes on the node's disk are `volume_meter.rs`'s.
//! Upstream: `volume_stat_calculator.go`, `metrics_statfs.go`, `csi_metrics.go`, `collectors/volume_stats.go`.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use rubelet_core::{
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    fnv::fnv32a,
    id::{PodRef, PodUid},
    snapshot::{PodView, Snapshot},
    time::{Uptime, scaled},
    volumes::{
        claims::{self, ClaimRef, PersistentKind, PersistentSource},
        csi::CsiVolume,
    },
};
use rubelet_csi::{CsiResult, VolumeUsage};
use tokio::{sync::watch, task::JoinSet, time::timeout};

use crate::world::World;

/// How often new volumes are looked for.
const TICK: Duration = Duration::from_secs(5);

/// A pod and the name of its volume there.
type Key = (PodUid, String);

/// The last figures. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct PersistentMeter(Arc<Mutex<BTreeMap<Key, PersistentStats>>>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PersistentStats {
    pub volume: String,
    pub claim: Option<ClaimName>,
    pub at: Timestamp,
    pub figures: PersistentFigures,
    /// `None` if the driver does not say.
    pub is_abnormal: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClaimName {
    pub namespace: String,
    pub name: String,
}

/// What is unknown is zero, as upstream shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PersistentFigures {
    pub capacity_bytes: u64,
    pub available_bytes: u64,
    pub used_bytes: u64,
    pub inodes: u64,
    pub inodes_free: u64,
    pub inodes_used: u64,
}

/// How volumes are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// `volumeStatsAggPeriod`. The next measurement follows after one to two periods.
    pub period: Duration,
    /// The gate `CSIVolumeHealth`.
    pub with_health: bool,
}

impl PersistentMeter {
    #[cfg(test)]
    pub(crate) fn knowing(uid: &str, stats: PersistentStats) -> Self {
        let meter = PersistentMeter::default();
        meter.put(uid, stats);
        meter
    }

    #[cfg(test)]
    pub(crate) fn put(&self, uid: &str, stats: PersistentStats) {
        self.lock().insert((PodUid::new(uid), stats.volume.clone()), stats);
    }

    pub(crate) fn of_pod(&self, uid: &PodUid) -> Vec<PersistentStats> {
        let kept = self.lock();
        let from = (uid.clone(), String::new());
        kept.range(from..).take_while(|((pod, _), _)| pod == uid).map(|(_, stats)| stats.clone()).collect()
    }

    /// One for each claim, by the first pod that uses it.
    pub(crate) fn of_claims(&self) -> BTreeMap<ClaimName, PersistentStats> {
        let mut claims = BTreeMap::new();
        for stats in self.lock().values() {
            if let Some(claim) = &stats.claim {
                claims.entry(claim.clone()).or_insert_with(|| stats.clone());
            }
        }
        claims
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, PersistentStats>> {
        // Each change is complete when the lock is given back.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs as long as the agent.
pub(crate) async fn run(world: World, snapshots: watch::Receiver<Arc<Snapshot>>, schedule: Schedule) {
    let mut measuring = Measuring { world, schedule, due: BTreeMap::new(), tasks: JoinSet::new() };
    loop {
        let snapshot = snapshots.borrow().clone();
        measuring.update(&snapshot);
        drop(snapshot);
        measuring.begin_due();
        measuring.wait().await;
    }
}

struct Measuring {
    world: World,
    schedule: Schedule,
    due: BTreeMap<Key, Due>,
    /// At most one per volume; its own calls bound it.
    tasks: JoinSet<(Key, Result<Option<PersistentStats>, String>)>,
}

struct Due {
    target: Target,
    at: Uptime,
    is_under_way: bool,
    rounds: u32,
}

/// A volume of a pod whose sandbox is ready: before that it may not be mounted.
#[derive(Clone, Debug, PartialEq)]
struct Target {
    pod: PodRef,
    volume: String,
    claim: Option<ClaimName>,
    source: Arc<PersistentSource>,
    path: PathBuf,
}

impl Measuring {
    fn update(&mut self, snapshot: &Snapshot) {
        let mut wanted = BTreeMap::new();
        for (uid, view) in snapshot.pods.iter().filter(|(_, view)| view.counts.has_ready_sandbox) {
            let pod_dir = self.world.paths.pod_dir(uid);
            for (volume, known) in &view.volumes {
                let Some(source) = &known.claimed else { continue };
                let (pod, claim) = (PodRef { uid: uid.clone(), ..PodRef::of(&view.pod) }, claim_of(view, volume));
                let path = if source.is_block() {
                    claims::bound_device(&self.world.paths.root_dir, &source.name, uid)
                } else {
                    source.path(&pod_dir)
                };
                let source = source.clone();
                let target = Target { pod, volume: volume.clone(), claim, source, path };
                wanted.insert((uid.clone(), volume.clone()), target);
            }
        }
        self.due.retain(|key, _| wanted.contains_key(key));
        self.world.persistent.lock().retain(|key, _| wanted.contains_key(key));
        for (key, target) in wanted {
            let new = || Due { target: target.clone(), at: Uptime::ZERO, is_under_way: false, rounds: 0 };
            self.due.entry(key).or_insert_with(new).target = target.clone();
        }
    }

    fn begin_due(&mut self) {
        let now = self.world.clock.now().uptime;
        for (key, due) in self.due.iter_mut().filter(|(_, due)| due.at <= now && !due.is_under_way) {
            due.is_under_way = true;
            let (world, key, target, with_health) =
                (self.world.clone(), key.clone(), due.target.clone(), self.schedule.with_health);
            self.tasks.spawn(async move { (key, measure(&world, &target, with_health).await) });
        }
    }

    /// Until the next tick; takes in what ends meanwhile.
    async fn wait(&mut self) {
        let until = self.world.clock.now().uptime + TICK;
        loop {
            let left = until.since(self.world.clock.now().uptime);
            if left.is_zero() {
                return;
            }
            let ended = async {
                match self.tasks.join_next().await {
                    Some(ended) => ended,
                    None => std::future::pending().await,
                }
            };
            match timeout(left, ended).await {
                Ok(Ok((key, found))) => self.ended(key, found),
                // A task that panicked leaves its volume as it is: under way, and never measured again.
                Ok(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Ok(Err(_)) => {}
                Err(_elapsed) => return,
            }
        }
    }

    fn ended(&mut self, key: Key, found: Result<Option<PersistentStats>, String>) {
        let now = self.world.clock.now().uptime;
        // Its pod ended meanwhile.
        let Some(due) = self.due.get_mut(&key) else { return };
        due.is_under_way = false;
        due.rounds = due.rounds.wrapping_add(1);
        due.at = now + scaled(self.schedule.period, 1.0 + jitter(&key, due.rounds));
        match found {
            Ok(Some(stats)) => drop(self.world.persistent.lock().insert(key, stats)),
            Ok(None) => drop(self.world.persistent.lock().remove(&key)),
            Err(error) => {
                tracing::debug!(pod = %due.target.pod, volume = due.target.volume, "not measured: {error}");
                // Old figures would hide that nothing is known.
                self.world.persistent.lock().remove(&key);
            }
        }
    }
}

/// From zero to one; the same for the same measurement, different between volumes and from one time to the next.
fn jitter((pod, volume): &Key, rounds: u32) -> f64 {
    f64::from(fnv32a(format!("{pod}/{volume}/{rounds}").as_bytes())) / (f64::from(u32::MAX) + 1.0)
}

fn claim_of(view: &PodView, volume: &str) -> Option<ClaimName> {
    let mut volumes = view.pod.spec.as_ref()?.volumes.iter().flatten();
    let claim = ClaimRef::of(&view.pod, volumes.find(|known| known.name == volume)?)?;
    Some(ClaimName { namespace: claim.namespace, name: claim.name })
}

/// `None` for a volume of which nothing can be known.
async fn measure(world: &World, target: &Target, with_health: bool) -> Result<Option<PersistentStats>, String> {
    let began = world.clock.now();
    let (measurer, found) = match &target.source.kind {
        PersistentKind::HostPath { .. } => return Ok(None),
        PersistentKind::Flex(volume) if !volume.capabilities.supports_metrics => return Ok(None),
        // It has no file system that could be measured.
        PersistentKind::Local(_) | PersistentKind::Iscsi(_) | PersistentKind::Fc(_) if target.source.is_block() => {
            return Ok(None);
        }
        PersistentKind::Local(_)
        | PersistentKind::Nfs(_)
        | PersistentKind::Iscsi(_)
        | PersistentKind::Fc(_)
        | PersistentKind::Flex(_) => ("statfs", of_file_system(world, target).await),
        PersistentKind::Csi(volume) => (volume.driver.as_str(), ask_driver(world, target, volume, with_health).await),
    };
    world.metrics.storage.measured(measurer, world.clock.now().uptime.since(began.uptime));
    let Some((figures, condition)) = found? else { return Ok(None) };
    if let Some(Condition::Abnormal(message)) = &condition {
        let message = format!("Volume {}: {message}", target.volume);
        let about = InvolvedObject::Pod(target.pod.clone());
        let event = EventRecord::new(about, Severity::Warning, event_reasons::VOLUME_CONDITION_ABNORMAL, message);
        world.events.record(event, world.clock.now().wall);
    }
    Ok(Some(PersistentStats {
        volume: target.volume.clone(),
        claim: target.claim.clone(),
        at: began.wall,
        figures,
        is_abnormal: condition.map(|condition| matches!(condition, Condition::Abnormal(_))),
    }))
}

/// What the driver says of a volume's health.
enum Condition {
    Normal,
    Abnormal(String),
}

type Found = Result<Option<(PersistentFigures, Option<Condition>)>, String>;

async fn of_file_system(world: &World, target: &Target) -> Found {
    let found = world.host.file_system(&target.path).await.map_err(|error| error.to_string())?;
    let figures = PersistentFigures {
        capacity_bytes: found.capacity_bytes,
        available_bytes: found.available_bytes,
        used_bytes: found.used_bytes,
        inodes: found.inodes,
        inodes_free: found.inodes_free,
        inodes_used: found.inodes.saturating_sub(found.inodes_free),
    };
    Ok(Some((figures, None)))
}

/// Each call has a deadline of its own.
async fn ask_driver(world: &World, target: &Target, volume: &CsiVolume, with_health: bool) -> Found {
    let found: CsiResult<_> = async {
        let client = world.csi.client(&volume.driver)?;
        let capabilities = client.capabilities().await?;
        if !capabilities.volume_stats {
            return Ok(None);
        }
        Ok(Some((client.stats(&volume.handle, &target.path, None).await?, capabilities)))
    }
    .await;
    let Some((stats, capabilities)) = found.map_err(|error| error.to_string())? else { return Ok(None) };
    let condition = match stats.condition {
        _ if !(with_health && capabilities.volume_condition) => None,
        Some(condition) if condition.is_abnormal => Some(Condition::Abnormal(condition.message)),
        Some(_) | None => Some(Condition::Normal),
    };
    if condition.is_none() && stats.bytes.is_none() && stats.inodes.is_none() {
        return Err("failed to get usage from response. usage is nil".to_owned());
    }
    let amounts = |usage: Option<VolumeUsage>| {
        let known = |amount: fn(VolumeUsage) -> i64| u64::try_from(usage.map_or(0, amount)).unwrap_or(0);
        [known(|usage| usage.total), known(|usage| usage.available), known(|usage| usage.used)]
    };
    let [capacity_bytes, available_bytes, used_bytes] = amounts(stats.bytes);
    let [inodes, inodes_free, inodes_used] = amounts(stats.inodes);
    let figures = PersistentFigures { capacity_bytes, available_bytes, used_bytes, inodes, inodes_free, inodes_used };
    Ok(Some((figures, condition)))
}

#[cfg(test)]
pub(crate) mod tests;
