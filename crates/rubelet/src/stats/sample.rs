//! Samples of resource usage, taken on request.
//!
//! Owns: that one sample is taken at a time, how long it is cached, and the earlier readings for rates. Never: samples
//! periodically.
//! Upstream: `StatsProvider`, `resourceAnalyzer`; cAdvisor's manager and its memory cache.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use rubelet_core::{
    node_status,
    settings::Settings,
    snapshot::Snapshot,
    time::{Now, Uptime},
};
use rubelet_host::{
    stats::{
        Reader,
        cgroup::{self, CgroupStats, Trees},
        partition::Partition,
        process::{self, Interface, OpenFiles},
    },
    threads::for_caller,
};
use tokio::sync::{Semaphore, watch};

use super::{
    disk::{DiskCounter, Disks},
    measure::{self, Found, Pass},
    persistent_meter::PersistentMeter,
    rates::{Reading, Readings},
    sandbox_images::SandboxImages,
    targets::{ContainerTarget, PodTarget, targets},
};
use crate::world::Clock;

/// Requests within this time share a sample.
const FRESH: Duration = Duration::from_secs(1);
/// Kernel files are read at once; this bounds an overloaded machine.
const DEADLINE: Duration = Duration::from_secs(20);
/// The time between the two readings of a first rate. Short enough for a request to wait, long enough for the clock's resolution.
const FIRST_RATE: Duration = Duration::from_millis(500);

/// The detail of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Extent {
    /// CPU and memory.
    Usage,
    /// Also networks and processes.
    Summary,
    /// Also limits, disks, open files, sandboxes and the cgroups between node and pods.
    Everything,
}

impl Extent {
    pub(super) fn of_cgroups(self) -> cgroup::Extent {
        match self {
            Extent::Usage | Extent::Summary => cgroup::Extent::Usage,
            Extent::Everything => cgroup::Extent::All,
        }
    }
}

/// Whether CPU usage rates are requested, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    /// Prometheus and metrics-server compute rates from counters themselves.
    Unneeded,
    /// The first request waits for a second reading, rather than returning no rate.
    Wanted,
}

#[derive(Debug)]
pub(crate) struct Sample {
    pub at: Timestamp,
    pub extent: Extent,
    pub node_name: String,
    pub agent_started: Timestamp,
    pub identity: Arc<node_status::Machine>,
    pub machine: process::Machine,
    pub topology: process::Topology,
    pub partitions: Vec<Partition>,
    pub root: Option<Measured>,
    pub interfaces: Vec<Interface>,
    /// `kubelet`, `runtime`, `misc`, `pods`, as far as they exist.
    pub system: Vec<(&'static str, Measured)>,
    /// The cgroup of all pods and those of the QoS classes.
    pub tiers: Vec<Measured>,
    pub pods: Vec<PodSample>,
    pub(super) has_rates: bool,
    pub(super) taken: Uptime,
}

/// A cgroup and its values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Measured {
    pub cgroup: String,
    pub stats: CgroupStats,
    pub nano_cores: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct PodSample {
    pub target: PodTarget,
    pub own: Option<Measured>,
    pub sandbox: Option<ContainerSample>,
    pub containers: Vec<ContainerSample>,
    pub interfaces: Vec<Interface>,
}

#[derive(Clone, Debug)]
pub(crate) struct ContainerSample {
    pub target: ContainerTarget,
    pub measured: Measured,
    pub processes: Processes,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Processes {
    pub count: u64,
    pub open: OpenFiles,
    /// `-1` is unlimited.
    pub open_files_limit: Option<i64>,
}

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum SampleError {
    #[error("the cgroups of this node cannot be read: {0}")]
    NoCgroups(String),
    #[error("the figures could not be read within {} s", DEADLINE.as_secs())]
    TooSlow,
}

/// The inputs of samples.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    pub snapshots: watch::Receiver<Arc<Snapshot>>,
    pub settings: Arc<Settings>,
    pub clock: Clock,
    pub named_cgroups: Arc<NamedCgroups>,
    pub identity: Arc<node_status::Machine>,
    pub disk: Arc<DiskCounter>,
    pub sandbox_images: Arc<SandboxImages>,
    /// `--root-dir`.
    pub root_dir: PathBuf,
}

/// Cgroups from the configuration; empty if not configured.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedCgroups {
    /// `--runtime-cgroups`.
    pub runtime: String,
    /// `systemCgroups`.
    pub system: String,
}

/// The sampler; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Stats(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    sources: Sources,
    started: Timestamp,
    trees: OnceLock<Arc<Trees>>,
    /// One at a time; waiting requests then find a fresh sample.
    turn: Semaphore,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    latest: Option<Arc<Sample>>,
    readings: Readings,
}

impl Stats {
    pub(crate) fn new(sources: Sources) -> Self {
        let (started, trees) = (sources.clock.now().wall, OnceLock::new());
        Stats(Arc::new(Shared { sources, started, trees, turn: Semaphore::new(1), kept: Mutex::default() }))
    }

    pub(crate) async fn sample(&self, extent: Extent, rate: Rate) -> Result<Arc<Sample>, SampleError> {
        let _turn = self.0.turn.acquire().await.expect("nobody closes it");
        if let Some(fresh) = self.fresh(extent, rate) {
            return Ok(fresh);
        }
        // Cancel-safe: an abandoned pass ends by itself, and its result is dropped.
        let taken = tokio::time::timeout(DEADLINE, self.take(extent, rate)).await;
        let sample = Arc::new(taken.unwrap_or(Err(SampleError::TooSlow))?);
        self.kept().latest = Some(sample.clone());
        Ok(sample)
    }

    /// The disk usage of the pods in a sample.
    pub(crate) async fn disks(&self, sample: &Sample) -> Disks {
        let pods: Vec<PodTarget> = sample.pods.iter().map(|pod| pod.target.clone()).collect();
        self.0.sources.disk.disks(&pods).await
    }

    /// What the volumes of claims and CSI drivers hold.
    pub(crate) fn persistent(&self) -> &PersistentMeter {
        self.0.sources.disk.persistent()
    }

    fn fresh(&self, extent: Extent, rate: Rate) -> Option<Arc<Sample>> {
        let now = self.now().uptime;
        let latest = self.kept().latest.clone()?;
        let is_enough = latest.extent >= extent && (latest.has_rates || rate == Rate::Unneeded);
        (is_enough && now.since(latest.taken) < FRESH).then_some(latest)
    }

    async fn take(&self, extent: Extent, rate: Rate) -> Result<Sample, SampleError> {
        let base = self.kept().readings.base(self.now().uptime).cloned();
        let base = match base {
            None if rate == Rate::Wanted => {
                let first = self.reading().await?;
                tokio::time::sleep(FIRST_RATE).await;
                Some(first)
            }
            base => base,
        };
        let sources = &self.0.sources;
        let mut targets = targets(&sources.snapshots.borrow(), &sources.settings);
        if extent == Extent::Everything {
            sources.sandbox_images.fill_in(&mut targets.pods).await;
        }
        let named = sources.named_cgroups.clone();
        let node_name = targets.node_name.clone();
        let trees = self.trees().await?;
        let (clock, root_dir) = (sources.clock.clone(), sources.root_dir.clone());
        let (mut found, now) = on_a_thread(move || {
            let now = clock.now();
            let mut pass = Pass { trees: &trees, named: &named, extent, reader: Reader::default() };
            (pass.run(targets, &root_dir), now)
        })
        .await?;
        if measure::is_blind(&found) {
            return Err(SampleError::NoCgroups("the root has no figures of processor or memory".to_owned()));
        }
        let has_rates = self.rate(&mut found, base.as_ref(), now);
        let Found { machine, topology, partitions, root, interfaces, system, tiers, pods } = found;
        Ok(Sample {
            at: now.wall,
            extent,
            node_name,
            agent_started: self.0.started,
            identity: self.0.sources.identity.clone(),
            machine,
            topology,
            partitions,
            root,
            interfaces,
            system,
            tiers,
            pods,
            has_rates,
            taken: now.uptime,
        })
    }

    /// Adds CPU usage rates, and keeps the reading for later rates.
    fn rate(&self, found: &mut Found, base: Option<&Reading>, now: Now) -> bool {
        let mut reading = Reading { at: now.uptime, ..Reading::default() };
        for measured in measure::all_measured(found) {
            let Some(cpu) = &measured.stats.cpu else { continue };
            measured.nano_cores = base.and_then(|base| base.nano_cores(&measured.cgroup, cpu.usage_nanos, now.uptime));
            reading.nanos.insert(measured.cgroup.clone(), cpu.usage_nanos);
        }
        self.kept().readings.keep(reading);
        base.is_some()
    }

    async fn reading(&self) -> Result<Reading, SampleError> {
        let sources = &self.0.sources;
        let targets = targets(&sources.snapshots.borrow(), &sources.settings);
        let named = sources.named_cgroups.clone();
        let trees = self.trees().await?;
        let clock = sources.clock.clone();
        on_a_thread(move || {
            let at = clock.now().uptime;
            let mut pass = Pass { trees: &trees, named: &named, extent: Extent::Usage, reader: Reader::default() };
            Reading { at, ..pass.reading(&targets) }
        })
        .await
    }

    /// Constant while the node is up.
    async fn trees(&self) -> Result<Arc<Trees>, SampleError> {
        if let Some(trees) = self.0.trees.get() {
            return Ok(trees.clone());
        }
        let found = for_caller(Trees::mounted).await.map_err(|error| SampleError::NoCgroups(error.to_string()))?;
        Ok(self.0.trees.get_or_init(|| Arc::new(found)).clone())
    }

    fn now(&self) -> Now {
        self.0.sources.clock.now()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, SampleError> {
    let done: std::io::Result<T> = for_caller(move || Ok(work())).await;
    done.map_err(|error| SampleError::NoCgroups(error.to_string()))
}

#[cfg(test)]
mod tests {
    use rubelet_cri::client::CriClient;

    use super::*;
    use crate::{
        stats::{disk::DiskSources, volume_meter::VolumeMeter},
        world::Paths,
    };

    fn stats() -> (watch::Sender<Arc<Snapshot>>, Stats) {
        let (sender, snapshots) = watch::channel(Arc::default());
        let clock = Clock::system();
        let nowhere = PathBuf::from("/nowhere");
        let runtime = Arc::new(CriClient::new("unix:///no.sock", "unix:///no.sock", Duration::from_secs(1)).unwrap());
        let host = Arc::new(rubelet_host::linux::LinuxHost::default());
        let disk = DiskCounter::new(DiskSources {
            volumes: VolumeMeter::new(host.clone(), clock.clone()),
            persistent: PersistentMeter::default(),
            host,
            runtime: runtime.clone(),
            paths: Paths {
                root_dir: nowhere.clone(),
                pod_logs_dir: nowhere.clone(),
                volume_plugin_dir: nowhere.clone(),
                container_links_dir: nowhere.clone(),
            },
            clock: clock.clone(),
            volumes_count_for: None,
        });
        let sources = Sources {
            snapshots,
            settings: Arc::new(Settings::for_node("n1")),
            clock,
            named_cgroups: Arc::default(),
            identity: Arc::default(),
            disk: Arc::new(disk),
            sandbox_images: Arc::new(SandboxImages::new(runtime)),
            root_dir: nowhere,
        };
        (sender, Stats::new(sources))
    }

    #[tokio::test]
    async fn concurrent_requests_share_a_sample_unless_it_lacks_data() {
        let (_sender, stats) = stats();
        let (first, second) =
            tokio::join!(stats.sample(Extent::Usage, Rate::Unneeded), stats.sample(Extent::Usage, Rate::Unneeded));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        let more = stats.sample(Extent::Everything, Rate::Unneeded).await.unwrap();
        assert!(!Arc::ptr_eq(&first, &more) && more.extent == Extent::Everything);
        let less = stats.sample(Extent::Usage, Rate::Unneeded).await.unwrap();
        assert!(Arc::ptr_eq(&more, &less));
    }

    #[tokio::test]
    async fn first_rate_request_waits_for_second_reading() {
        let (_sender, stats) = stats();
        let plain = stats.sample(Extent::Usage, Rate::Unneeded).await.unwrap();
        assert_eq!(plain.root.as_ref().unwrap().nano_cores, None);
        let rated = stats.sample(Extent::Usage, Rate::Wanted).await.unwrap();
        assert!(rated.root.as_ref().unwrap().nano_cores.is_some());
        assert!(rated.machine.memory_bytes > 0);
    }
}
