//! The world the agent acts on: its ports and its paths on disk.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::SignedDuration;
use rubelet_core::{
    id::PodUid,
    settings::Settings,
    time::{Now, moved},
};
use rubelet_cri::port::ContainerRuntime;
use rubelet_csi::Drivers;
use rubelet_host::port::Host;
use rubelet_kube::port::ApiServer;
use tokio::time::Instant;

use crate::{
    event_log::EventLog,
    metrics::Metrics,
    node::csi_node::CsiNodeWriter,
    objects::{ObjectCache, Strategy},
    stats::{persistent_meter::PersistentMeter, volume_meter::VolumeMeter},
};

/// Where upstream puts links to container logs and log collectors read them.
const CONTAINER_LINKS_DIR: &str = "/var/log/containers";

#[derive(Clone)]
pub struct World {
    pub runtime: Arc<dyn ContainerRuntime>,
    pub host: Arc<dyn Host>,
    /// What pods' volumes hold.
    pub volumes: VolumeMeter,
    /// What the volumes of claims and CSI drivers hold.
    pub persistent: PersistentMeter,
    /// The CSI drivers that registered with this agent.
    pub csi: Drivers,
    /// `None` on a standalone node.
    pub cluster: Option<Cluster>,
    pub paths: Paths,
    pub clock: Clock,
    pub events: EventLog,
    pub metrics: Arc<Metrics>,
    pub settings: Arc<Settings>,
}

impl World {
    /// The world of a standalone node, with no events recorded and upstream's paths.
    pub fn new(runtime: Arc<dyn ContainerRuntime>, host: Arc<dyn Host>, clock: Clock, settings: Settings) -> Self {
        World {
            runtime,
            volumes: VolumeMeter::new(host.clone(), clock.clone()),
            host,
            persistent: PersistentMeter::default(),
            csi: Drivers::default(),
            cluster: None,
            paths: Paths {
                root_dir: settings.root_dir.clone(),
                pod_logs_dir: settings.pod_logs_dir.clone(),
                volume_plugin_dir: settings.volume_plugin_dir.clone(),
                container_links_dir: PathBuf::from(CONTAINER_LINKS_DIR),
            },
            clock,
            events: EventLog::default(),
            metrics: Arc::default(),
            settings: Arc::new(settings),
        }
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("paths", &self.paths).finish_non_exhaustive()
    }
}

/// What only a node of a cluster has.
#[derive(Clone)]
pub struct Cluster {
    pub api: Arc<dyn ApiServer>,
    pub objects: ObjectCache,
    /// Writes what CSI drivers say of this node.
    pub csi_node: Arc<CsiNodeWriter>,
}

impl Cluster {
    pub fn new(api: Arc<dyn ApiServer>, strategy: Strategy, node_name: &str, clock: &Clock) -> Self {
        let csi_node = Arc::new(CsiNodeWriter::new(api.clone(), node_name.to_owned()));
        Cluster { objects: ObjectCache::new(api.clone(), strategy, node_name, clock.clone()), csi_node, api }
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

/// The only reader of clocks. It uses tokio's time, so pausing tokio pauses the agent.
#[derive(Clone, Debug)]
pub struct Clock {
    started: Instant,
    started_wall: jiff::Timestamp,
    /// The simulator moves the wall clock, which otherwise advances with tokio's time.
    source: WallSource,
}

#[derive(Clone, Debug)]
enum WallSource {
    System,
    /// Tokio's clock plus an offset in milliseconds that the simulator may change.
    Virtual(Arc<std::sync::atomic::AtomicI64>),
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "this is the one file that may read the clock")]
    pub fn system() -> Self {
        Clock { started: Instant::now(), started_wall: jiff::Timestamp::now(), source: WallSource::System }
    }

    /// A wall clock that starts at `wall` and moves with tokio's time, plus `offset_ms`.
    pub fn simulated(wall: jiff::Timestamp, offset_ms: Arc<std::sync::atomic::AtomicI64>) -> Self {
        Clock { started: Instant::now(), started_wall: wall, source: WallSource::Virtual(offset_ms) }
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one file that may read the clock")]
    pub fn now(&self) -> Now {
        let since_start = self.started.elapsed();
        let wall = match &self.source {
            WallSource::System => jiff::Timestamp::now(),
            WallSource::Virtual(offset_ms) => {
                let offset = SignedDuration::from_millis(offset_ms.load(std::sync::atomic::Ordering::Relaxed));
                let since_start = SignedDuration::try_from(since_start).unwrap_or(SignedDuration::MAX);
                moved(self.started_wall, since_start.saturating_add(offset))
            }
        };
        Now { uptime: rubelet_core::time::Uptime::new(since_start), wall }
    }

    /// The tokio instant of an uptime, for sleeping until then.
    pub fn instant(&self, uptime: rubelet_core::time::Uptime) -> Instant {
        let since_start = uptime.as_duration().min(Duration::from_secs(86_400 * 365));
        self.started.checked_add(since_start).unwrap_or(self.started)
    }
}

/// Upstream's layout on disk.
#[derive(Clone, Debug)]
pub struct Paths {
    /// `--root-dir`, links resolved.
    pub root_dir: PathBuf,
    /// `podLogsDir`, usually `/var/log/pods`.
    pub pod_logs_dir: PathBuf,
    /// `volumePluginDir`.
    pub volume_plugin_dir: PathBuf,
    /// `/var/log/containers`.
    pub container_links_dir: PathBuf,
}

impl Paths {
    pub fn pods_dir(&self) -> PathBuf {
        self.root_dir.join("pods")
    }

    pub fn pod_dir(&self, uid: &PodUid) -> PathBuf {
        self.pods_dir().join(uid.as_str())
    }

    /// The directory of the operator that a pod's file is in; below it no link is followed, as pods that mount it can make
    /// them. An earlier agent may have named its directories by other links: then `<pod>/<container>/<file>` is below one.
    pub fn root_of(&self, path: &Path) -> PathBuf {
        let roots = [self.pods_dir(), self.pod_logs_dir.clone()];
        let other = || path.ancestors().nth(3).unwrap_or(Path::new("/")).to_owned();
        roots.into_iter().find(|root| path.starts_with(root)).unwrap_or_else(other)
    }

    pub fn volumes_dir(&self, uid: &PodUid) -> PathBuf {
        self.pod_dir(uid).join("volumes")
    }
}

#[cfg(test)]
pub mod testing {
    use std::{path::Path, sync::Arc, time::Duration};

    use rubelet_core::settings::Settings;
    use rubelet_cri::client::CriClient;
    use rubelet_host::linux::LinuxHost;

    use super::{Clock, World};

    /// The real host, below a temporary directory, and a runtime that never responds.
    pub fn world_in(dir: &Path) -> World {
        let dir = dir.canonicalize().unwrap();
        let runtime = CriClient::new("unix:///nowhere", "unix:///nowhere", Duration::from_secs(1)).unwrap();
        let settings = Settings {
            root_dir: dir.join("root"),
            pod_logs_dir: dir.join("pods"),
            volume_plugin_dir: dir.join("volume-plugins"),
            ..Settings::for_node("n1")
        };
        let mut world = World::new(Arc::new(runtime), Arc::new(LinuxHost::default()), Clock::system(), settings);
        world.paths.container_links_dir = dir.join("containers");
        world
    }
}
