//! Delays a shutdown of the machine until the pods have ended.
//!
//! Owns: the connection to logind, the inhibitor, the file with the times of the last shutdown. Never: ends a pod, decides
//! when the machine may go down; `core/shutdown.rs` does.
//! Upstream: `nodeshutdown_manager_linux.go`, `storage.go`.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use jiff::Timestamp;
use rubelet_core::{
    event::Event,
    shutdown::{ShutdownSignal, ShutdownView, total},
    snapshot::Snapshot,
};
use rubelet_host::{
    logind::{self, Inhibitor, Logind},
    port::ReadError,
};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};

use crate::world::World;

/// After a lost connection, as upstream. Where logind cannot be used the wait doubles up to the maximum.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);
const RECONNECT_MAX: Duration = Duration::from_secs(60);

const STATE_FILE: &str = "graceful_node_shutdown_state";
/// Far more than two times need.
const MAX_STATE_BYTES: u64 = 64 << 10;
/// A disk that hangs must not hold up the shutdown.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Where logind is.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) bus: String,
    pub(crate) conf_dir: PathBuf,
}

impl Places {
    pub(crate) fn of_machine() -> Self {
        Places { bus: logind::system_bus(), conf_dir: PathBuf::from(logind::CONF_DIR) }
    }
}

/// The times of the last shutdown, in upstream's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ShutdownTimes {
    start_time: Timestamp,
    end_time: Timestamp,
}

impl ShutdownTimes {
    /// Go's zero time.
    const NEVER: Timestamp = Timestamp::constant(-62_135_596_800, 0);

    /// Start and end, zero where there is none.
    pub(crate) fn as_seconds(self) -> [f64; 2] {
        let seconds = |time: Timestamp| if time == Self::NEVER { 0.0 } else { time.as_second() as f64 };
        [seconds(self.start_time), seconds(self.end_time)]
    }
}

impl Default for ShutdownTimes {
    fn default() -> Self {
        ShutdownTimes { start_time: Self::NEVER, end_time: Self::NEVER }
    }
}

/// Runs until it is dropped. The host of this world is for the agent's own files.
pub(crate) async fn run(
    world: World,
    places: Places,
    inbox: mpsc::Sender<Event>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
) {
    let mut guard = ShutdownGuard { world, places, inbox, snapshots, view: None, inhibitor: None };
    guard.load_times().await;
    let mut wait = RECONNECT_AFTER;
    let mut last_problem = String::new();
    loop {
        match guard.serve().await {
            Ok(()) => {
                tracing::warn!("the connection to logind was lost");
                wait = RECONNECT_AFTER;
                last_problem.clear();
            }
            Err(error) => {
                let problem = error.to_string();
                if problem != last_problem {
                    tracing::warn!("no graceful shutdown: {problem}");
                }
                last_problem = problem;
            }
        }
        sleep(wait).await;
        wait = wait.saturating_mul(2).min(RECONNECT_MAX);
    }
}

struct ShutdownGuard {
    world: World,
    places: Places,
    inbox: mpsc::Sender<Event>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    /// As last seen in a snapshot.
    view: Option<ShutdownView>,
    /// Held over a lost connection, too.
    inhibitor: Option<Inhibitor>,
}

impl ShutdownGuard {
    /// Until the connection is lost. An error: logind could not be used.
    async fn serve(&mut self) -> io::Result<()> {
        let mut logind = Logind::connect(&self.places.bus).await?;
        let period = total(&self.world.settings.shutdown_groups);
        logind.ensure_delay(period, &self.places.conf_dir).await?;
        self.compare(&logind).await?;
        tracing::info!(?period, "a shutdown of the machine waits for its pods");
        loop {
            let view = self.view;
            tokio::select! {
                biased;
                // Cancel-safe: a signal that was not taken stays in the queue.
                signal = logind.next_signal() => match signal {
                    None => return Ok(()),
                    Some(true) => self.send(ShutdownSignal::Begins).await,
                    Some(false) => {
                        self.send(ShutdownSignal::Cancelled).await;
                        self.inhibitor = Some(logind.inhibit().await?);
                    }
                },
                // Cancel-safe: waiting for a value takes nothing away.
                true = has_changed(&mut self.snapshots, view) => self.take_view().await,
            }
        }
    }

    /// Signals are lost without a connection, so the state is compared. Logind gives no inhibitor once a shutdown has begun.
    async fn compare(&mut self, logind: &Logind) -> io::Result<()> {
        let is_known = self.snapshots.borrow().node.shutdown.is_some();
        match (logind.is_preparing_for_shutdown().await?, is_known) {
            (true, true) => {}
            (true, false) => self.send(ShutdownSignal::Begins).await,
            (false, is_known) => {
                self.inhibitor = Some(logind.inhibit().await?);
                if is_known {
                    self.send(ShutdownSignal::Cancelled).await;
                }
            }
        }
        Ok(())
    }

    async fn send(&self, signal: ShutdownSignal) {
        tracing::info!(?signal, "shutdown signal of logind");
        // Without a receiver the agent is about to stop.
        let _ = self.inbox.send(Event::Shutdown(signal)).await;
    }

    /// The times are on disk before the machine may go down.
    async fn take_view(&mut self) {
        self.view = self.snapshots.borrow().node.shutdown;
        let Some(ShutdownView { began_at, ended_at }) = self.view else { return };
        let times = ShutdownTimes { start_time: began_at, end_time: ended_at.unwrap_or(ShutdownTimes::NEVER) };
        self.world.metrics.shutdown.set(times);
        let content = serde_json::to_vec(&times).unwrap_or_default();
        let path = self.state_path();
        let written = timeout(STATE_TIMEOUT, self.world.host.write_durably(&path, &content, 0o644)).await;
        if let Err(error) = written.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            tracing::warn!(%error, "cannot write {STATE_FILE}");
        }
        if ended_at.is_some() {
            tracing::info!("pods have ended, the machine may go down");
            self.inhibitor = None;
        }
    }

    async fn load_times(&self) {
        match self.world.host.read_file(&self.state_path(), MAX_STATE_BYTES).await {
            Ok(content) => match serde_json::from_slice(&content) {
                Ok(times) => self.world.metrics.shutdown.set(times),
                Err(error) => tracing::warn!(%error, "cannot read {STATE_FILE}"),
            },
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "cannot read {STATE_FILE}"),
        }
    }

    fn state_path(&self) -> PathBuf {
        self.world.paths.root_dir.join(STATE_FILE)
    }
}

/// Waits for another state of the shutdown; false if there will be none.
async fn has_changed(snapshots: &mut watch::Receiver<Arc<Snapshot>>, known: Option<ShutdownView>) -> bool {
    snapshots.wait_for(|snapshot| snapshot.node.shutdown != known).await.is_ok()
}

#[cfg(test)]
mod tests {
    use rubelet_core::{settings::Settings, shutdown::ShutdownGroup};
    use rubelet_host::logind::fake::FakeLogind;
    use tempfile::TempDir;
    use tokio::task::JoinSet;

    use super::*;
    use crate::world::testing::world_in;

    const BEGAN: &str = "2026-06-01T12:00:00Z";
    const ENDED: &str = "2026-06-01T12:00:07.25Z";

    /// The task over a fake logind, with the other ends of its channels.
    struct Bench {
        logind: FakeLogind,
        events: mpsc::Receiver<Event>,
        snapshots: watch::Sender<Arc<Snapshot>>,
        world: World,
        _tasks: JoinSet<()>,
        _dir: TempDir,
    }

    impl Bench {
        /// `None`: there is no bus on this machine, see `FakeLogind::start`.
        async fn start() -> Option<Self> {
            let dir = tempfile::tempdir().unwrap();
            let group = ShutdownGroup { priority: 0, period: Duration::from_secs(30) };
            let mut world = world_in(dir.path());
            let settings = Settings::clone(&world.settings);
            world.settings = Arc::new(Settings { shutdown_groups: vec![group], ..settings });
            std::fs::create_dir(&world.paths.root_dir).unwrap();
            let logind = FakeLogind::start(Duration::from_secs(5)).await?;
            let (inbox, events) = mpsc::channel(8);
            let (snapshots, receiver) = watch::channel(Arc::default());
            let places = Places { bus: logind.address(), conf_dir: logind.conf_dir().to_owned() };
            let mut tasks = JoinSet::new();
            tasks.spawn(run(world.clone(), places, inbox, receiver));
            let bench = Bench { logind, events, snapshots, world, _tasks: tasks, _dir: dir };
            bench.until_held(1).await;
            Some(bench)
        }

        async fn until_held(&self, count: usize) {
            self.logind.until(|logind| logind.inhibitors().len() == count).await;
        }

        async fn expect(&mut self, signal: ShutdownSignal) {
            let event = timeout(Duration::from_secs(10), self.events.recv()).await.expect("an event in time");
            assert_eq!(event, Some(Event::Shutdown(signal)));
        }

        /// What the core publishes.
        fn publish(&self, began: Option<&str>, ended: Option<&str>) {
            let mut snapshot = Snapshot::default();
            let time = |text: &str| text.parse().unwrap();
            snapshot.node.shutdown =
                began.map(|began| ShutdownView { began_at: time(began), ended_at: ended.map(time) });
            self.snapshots.send_replace(Arc::new(snapshot));
        }

        async fn until_state(&self, expected: &str) {
            let path = self.world.paths.root_dir.join(STATE_FILE);
            self.logind.until(|_| std::fs::read_to_string(&path).is_ok_and(|text| text == expected)).await;
        }

        fn gauges(&self) -> Vec<String> {
            let page = self.world.metrics.page(&Snapshot::default(), Timestamp::UNIX_EPOCH);
            page.lines().filter(|line| line.starts_with("kubelet_graceful")).map(str::to_owned).collect()
        }
    }

    #[tokio::test]
    async fn machine_goes_down_when_the_core_says_so() {
        let Some(mut bench) = Bench::start().await else { return };
        assert_eq!(bench.logind.reloads(), 1, "logind's own delay of 5 s is too short");
        bench.logind.begin_shutdown().await;
        bench.expect(ShutdownSignal::Begins).await;
        bench.publish(Some(BEGAN), None);
        bench.until_state(r#"{"startTime":"2026-06-01T12:00:00Z","endTime":"0001-01-01T00:00:00Z"}"#).await;
        bench.until_held(1).await;
        bench.publish(Some(BEGAN), Some(ENDED));
        bench.until_held(0).await;
        bench.until_state(r#"{"startTime":"2026-06-01T12:00:00Z","endTime":"2026-06-01T12:00:07.25Z"}"#).await;
        let gauges = [
            "kubelet_graceful_shutdown_start_time_seconds 1.7803152e+09",
            "kubelet_graceful_shutdown_end_time_seconds 1.780315207e+09",
        ];
        assert_eq!(bench.gauges(), gauges);
    }

    #[tokio::test]
    async fn cancelled_shutdown_takes_the_inhibitor_again() {
        let Some(mut bench) = Bench::start().await else { return };
        bench.logind.emit_as_a_stranger(true).await;
        bench.expect(ShutdownSignal::Begins).await;
        bench.publish(Some(BEGAN), Some(ENDED));
        bench.until_held(0).await;
        bench.logind.emit_as_a_stranger(false).await;
        bench.expect(ShutdownSignal::Cancelled).await;
        bench.publish(None, None);
        bench.until_held(1).await;
    }

    #[tokio::test]
    async fn signals_missed_without_a_connection_are_made_up_for() {
        let Some(mut bench) = Bench::start().await else { return };
        bench.logind.restart_bus(true).await;
        bench.expect(ShutdownSignal::Begins).await;
        bench.publish(Some(BEGAN), None);
        bench.until_state(r#"{"startTime":"2026-06-01T12:00:00Z","endTime":"0001-01-01T00:00:00Z"}"#).await;
        bench.logind.restart_bus(false).await;
        bench.expect(ShutdownSignal::Cancelled).await;
        bench.until_held(1).await;
    }

    #[tokio::test]
    async fn times_of_an_earlier_process_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        std::fs::create_dir(&world.paths.root_dir).unwrap();
        // As Go writes it, in another zone.
        let text = r#"{"startTime":"2026-06-01T14:00:00.5+02:00","endTime":"0001-01-01T00:00:00Z"}"#;
        std::fs::write(world.paths.root_dir.join(STATE_FILE), text).unwrap();
        let (inbox, _events) = mpsc::channel(1);
        let (_sender, snapshots) = watch::channel(Arc::default());
        let places = Places { bus: "unix:path=/nowhere".to_owned(), conf_dir: PathBuf::from("/nowhere") };
        let guard = ShutdownGuard { world, places, inbox, snapshots, view: None, inhibitor: None };
        guard.load_times().await;
        let page = guard.world.metrics.page(&Snapshot::default(), Timestamp::UNIX_EPOCH);
        assert!(page.contains("\nkubelet_graceful_shutdown_start_time_seconds 1.7803152e+09\n"), "{page}");
        assert!(page.contains("\nkubelet_graceful_shutdown_end_time_seconds 0\n"), "{page}");
    }
}
