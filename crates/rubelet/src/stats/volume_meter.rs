//! Measures what volumes hold, in walks that no caller has to wait for.
//!
//! Owns: that a volume is walked by one walk at a time, how often, and what is known of it until the walk ends. A large volume
//! is measured less often, and delays no other. Never: decides what a volume counts as.
//! Upstream: `volume_stat_calculator.go`, a goroutine per pod with volumes, once per `volumeStatsAggPeriod`.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rubelet_core::time::Uptime;
use rubelet_host::port::{Host, VolumeFigures, WalkProgress};
use tokio::{sync::watch, task::JoinSet, time::timeout};

use crate::world::Clock;

/// A volume is not walked again within this time, nor within the time that its last walk took.
const FRESH_FOR: Duration = Duration::from_secs(5);
/// A volume that nobody asked for is forgotten after this time.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Clones share their walks.
#[derive(Clone)]
pub struct VolumeMeter {
    host: Arc<dyn Host>,
    clock: Clock,
    kept: Arc<Mutex<BTreeMap<PathBuf, Kept>>>,
    /// At most one per volume.
    walks: Arc<Mutex<JoinSet<()>>>,
}

/// What is known of a volume.
#[derive(Debug, Default)]
struct Kept {
    /// By the last walk; `None` if it failed, or there was none.
    last: Option<Measured>,
    walk: Option<UnderWay>,
    asked_at: Uptime,
}

#[derive(Clone, Copy, Debug)]
struct Measured {
    figures: VolumeFigures,
    at: Uptime,
    took: Duration,
}

#[derive(Clone, Debug)]
struct UnderWay {
    progress: Arc<WalkProgress>,
    /// Closed when the walk has ended.
    done: watch::Receiver<()>,
}

impl fmt::Debug for VolumeMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeMeter").field("kept", &self.kept).finish_non_exhaustive()
    }
}

impl VolumeMeter {
    pub fn new(host: Arc<dyn Host>, clock: Clock) -> Self {
        VolumeMeter { host, clock, kept: Arc::default(), walks: Arc::default() }
    }

    /// What the last walk that ended found. A new one is begun if it is due, and waited for no longer than this; it goes on
    /// without its caller.
    pub async fn measured(&self, path: &Path, patience: Duration) -> Option<VolumeFigures> {
        self.walk(path, patience).await;
        lock(&self.kept).get(path)?.last.map(|last| last.figures)
    }

    /// The same, or more if the walk under way has already counted more than the last one.
    pub async fn at_least(&self, path: &Path, patience: Duration) -> Option<VolumeFigures> {
        self.walk(path, patience).await;
        let kept = lock(&self.kept);
        let known = kept.get(path)?;
        let so_far = known.walk.as_ref().and_then(|walk| walk.progress.get());
        let last = known.last.map(|last| last.figures);
        [last, so_far].into_iter().flatten().max_by_key(|figures| figures.used.bytes)
    }

    async fn walk(&self, path: &Path, patience: Duration) {
        if let Some(mut walk) = self.under_way(path) {
            // An error is the end of the walk; late or not, its caller takes what is known.
            let _ = timeout(patience, walk.done.changed()).await;
        }
    }

    /// The walk of this volume, begun now if it is due; `None`: what is known is fresh.
    fn under_way(&self, path: &Path) -> Option<UnderWay> {
        let now = self.clock.now().uptime;
        let mut kept = lock(&self.kept);
        kept.retain(|_, known| known.walk.is_some() || now.since(known.asked_at) < FORGET_AFTER);
        let known = kept.entry(path.to_owned()).or_default();
        known.asked_at = now;
        let is_fresh = |last: &Measured| now.since(last.at) < FRESH_FOR.max(last.took);
        // Its task was lost.
        known.walk = known.walk.take().filter(|walk| walk.done.has_changed().is_ok());
        if known.walk.is_none() && !known.last.as_ref().is_some_and(is_fresh) {
            known.walk = Some(self.begin(path, now));
        }
        known.walk.clone()
    }

    fn begin(&self, path: &Path, now: Uptime) -> UnderWay {
        let (ended, done) = watch::channel(());
        let walk = UnderWay { progress: Arc::default(), done };
        let (host, clock, kept) = (self.host.clone(), self.clock.clone(), self.kept.clone());
        let (path, progress) = (path.to_owned(), walk.progress.clone());
        let mut walks = lock(&self.walks);
        while walks.try_join_next().is_some() {}
        walks.spawn(async move {
            let found = host.volume_figures(&path, &progress).await;
            let at = clock.now().uptime;
            keep(&mut lock(&kept), &path, found.map(|figures| Measured { figures, at, took: at.since(now) }));
            drop(ended);
        });
        walk
    }
}

/// Nothing is kept of a volume that is gone.
fn keep(kept: &mut BTreeMap<PathBuf, Kept>, path: &Path, found: io::Result<Measured>) {
    if found.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        kept.remove(path);
    } else if let Some(known) = kept.get_mut(path) {
        (known.last, known.walk) = (found.ok(), None);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete when the lock is given back.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rubelet_host::linux::LinuxHost;

    use super::*;

    const NO_WAIT: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(30);

    fn volume(dir: &Path, name: &str, files: usize) -> PathBuf {
        let path = dir.join(name);
        fs::create_dir(&path).unwrap();
        for file in 0..files {
            fs::write(path.join(file.to_string()), "").unwrap();
        }
        path
    }

    fn inodes(figures: Option<VolumeFigures>) -> u64 {
        figures.map_or(0, |figures| figures.used.inodes)
    }

    #[tokio::test]
    async fn large_volume_is_measured_in_the_background_and_delays_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (large, small) = (volume(dir.path(), "large", 6000), volume(dir.path(), "small", 3));
        let meter = VolumeMeter::new(Arc::new(LinuxHost::default()), Clock::system());
        assert_eq!(inodes(meter.measured(&large, NO_WAIT).await), 0);
        assert_eq!(inodes(meter.measured(&small, LONG).await), 4);
        // Its walk goes on though nobody waits for it, and there is one of it.
        let mut so_far = 0;
        while so_far == 0 {
            so_far = inodes(meter.at_least(&large, Duration::from_millis(1)).await);
        }
        assert!(so_far < 6001, "{so_far} of a volume that takes a third of a second");
        assert_eq!(lock(&meter.kept).values().filter(|known| known.walk.is_some()).count(), 1);
        assert_eq!(inodes(meter.measured(&large, LONG).await), 6001);
        assert!(lock(&meter.kept)[&large].last.unwrap().took > Duration::from_millis(250));
    }

    #[tokio::test]
    async fn fresh_figures_are_kept_and_a_removed_volume_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = volume(dir.path(), "v", 3);
        let meter = VolumeMeter::new(Arc::new(LinuxHost::default()), Clock::system());
        assert_eq!(inodes(meter.measured(&path, LONG).await), 4);
        fs::remove_dir_all(&path).unwrap();
        assert_eq!(inodes(meter.measured(&path, LONG).await), 4);
        lock(&meter.kept).get_mut(&path).unwrap().last = None;
        assert_eq!(meter.measured(&path, LONG).await, None);
        assert!(lock(&meter.kept).is_empty());
    }
}
