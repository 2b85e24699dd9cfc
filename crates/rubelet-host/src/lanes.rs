//! Blocking calls on pods' files, on threads apart from the agent's own.
//!
//! A call to a file system that does not answer holds its thread until it does, perhaps for ever: a dead NFS server, a FUSE
//! daemon that hangs, a broken disk. So every device has a lane: few calls at once, and none as long as an earlier one is
//! late. Pods on other devices notice nothing.
//! Owns: the threads, and for each device in use its calls. Never: retries, decides about pods. The agent's own files
//! (credentials, certificates, manifests) have tokio's blocking pool for themselves.

mod walk;

use std::{
    collections::BTreeMap,
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};
use walk::{Mounts, Walk, Walked};

use crate::{linux::blocking, mount::Mount, port::ReadError, threads::Threads};

/// A device that took longer for one step of a call is late. A healthy disk under full load answers within seconds.
pub const LATE_AFTER: Duration = Duration::from_secs(10);
/// Calls of one device at once; more would not make a disk faster.
const SHORT_CALLS: usize = 16;
/// Calls that walk a tree have places of their own, because a few big trees would delay every other pod.
const LONG_CALLS: usize = 4;

/// How long a call may take on a device that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// A bounded number of steps.
    Short,
    /// As many steps as a tree has entries; the work reports each by `Call::go_on`.
    Long,
}

/// A device did not answer in time, or has not answered an earlier call yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLate {
    pub point: PathBuf,
    pub fs_type: String,
    pub source: String,
}

impl fmt::Display for DeviceLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceLate { point, fs_type, source } = self;
        let (point, late_secs) = (point.display(), LATE_AFTER.as_secs());
        // The same text for as long as it lasts, so that events of it are counted as one.
        write!(f, "the file system at {point} ({fs_type}, {source}) has not answered for over {late_secs} s")
    }
}

impl Error for DeviceLate {}

/// Whether a call failed because a file system does not answer.
pub fn is_late(error: &(dyn Error + 'static)) -> bool {
    let io = match error.downcast_ref::<ReadError>() {
        Some(ReadError::Io(error)) => Some(error),
        Some(ReadError::NotRegular(_) | ReadError::TooLarge { .. }) | None => error.downcast_ref::<io::Error>(),
    };
    io.and_then(io::Error::get_ref).is_some_and(|inner| inner.is::<DeviceLate>())
}

impl From<DeviceLate> for io::Error {
    fn from(late: DeviceLate) -> Self {
        io::Error::new(io::ErrorKind::TimedOut, late)
    }
}

/// Where blocking calls run. Clones share their threads and devices.
#[derive(Clone, Debug)]
pub struct Lanes(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    threads: Threads,
    mounts: Arc<Mounts>,
    late_after: Duration,
    /// Devices with a call, and those that were late at their last one.
    devices: Mutex<BTreeMap<Device, Arc<DeviceLane>>>,
    /// A device that refused calls takes them again.
    answered: Notify,
}

/// Major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Device(u32, u32);

#[derive(Debug)]
struct DeviceLane {
    device: Device,
    /// A place where it is mounted, for messages.
    point: PathBuf,
    fs_type: String,
    source: String,
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    state: Mutex<LaneState>,
}

#[derive(Debug, Default)]
struct LaneState {
    calls: Vec<Arc<Call>>,
    /// Its last call was late. It gets one call at a time, until one is answered in time.
    is_suspect: bool,
}

/// A call on its thread.
#[derive(Debug)]
pub struct Call {
    started: Instant,
    /// Since `started`.
    last_step_ms: AtomicU64,
    /// Nobody waits for it any more.
    is_abandoned: AtomicBool,
}

impl Lanes {
    pub fn for_pods() -> Self {
        Lanes::new(LATE_AFTER)
    }

    /// No lanes: calls on the agent's own files run on tokio's blocking pool, and wait for none but each other.
    pub fn own_files() -> Self {
        Lanes(None)
    }

    fn new(late_after: Duration) -> Self {
        let (threads, devices) = (Threads::new("pod-files"), Mutex::default());
        let answered = Notify::new();
        Lanes(Some(Arc::new(Shared { threads, mounts: Arc::default(), late_after, devices, answered })))
    }

    /// Waits until a device that refused calls takes them again. For one caller at a time. Cancel safe.
    pub async fn answered(&self) {
        match &self.0 {
            Some(lanes) => lanes.answered.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Runs `work` on a thread of the device that holds `path`. It returns at the latest when the device is late, with
    /// `DeviceLate`; the thread goes on alone then.
    pub async fn run<T, E, W>(&self, path: &Path, length: Length, work: W) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<io::Error> + Send + 'static,
        W: FnOnce(&Call) -> Result<T, E> + Send + 'static,
    {
        let Some(lanes) = &self.0 else {
            let call = Arc::new(Call::new());
            let _waiting = Waiting(call.clone());
            return blocking(move || work(&call)).await;
        };
        let (mut walk, mut work) = (Walk::new(path), work);
        loop {
            let mounts = lanes.mounts.clone();
            let ticket = lanes.admit(&walk, length).await?;
            let step = lanes.on_thread(ticket, move |call| match walk.advance(&mounts) {
                Ok(Walked::Arrived) => Step::Done(work(call)),
                Ok(Walked::Crossed) => Step::Crossed(walk, work),
                Err(error) => Step::Done(Err(error.into())),
            });
            match step.await? {
                Step::Done(result) => return result,
                Step::Crossed(next, same) => (walk, work) = (next, same),
            }
        }
    }
}

impl Shared {
    /// Waits for a place on the device that the walk has reached.
    async fn admit(self: &Arc<Self>, walk: &Walk, length: Length) -> io::Result<Ticket> {
        let mut ticket = self.ticket(&*self.mounts.at(walk)?);
        if ticket.lane.check(self.late_after).is_err() {
            // Another device may be mounted there by now.
            ticket = self.ticket(&*self.mounts.read(walk)?);
            ticket.lane.check(self.late_after)?;
        }
        let lane = &ticket.lane;
        let places = match length {
            Length::Short => lane.short.clone(),
            Length::Long => lane.long.clone(),
        };
        ticket.place = match length {
            Length::Short => match timeout(self.late_after, places.acquire_owned()).await {
                Ok(place) => place.ok(),
                Err(_) => return Err(lane.late().into()),
            },
            // Other trees may take any time; the caller has a deadline.
            Length::Long => places.acquire_owned().await.ok(),
        };
        ticket.call = Some(ticket.lane.enter(self.late_after)?);
        Ok(ticket)
    }

    fn ticket(self: &Arc<Self>, mount: &Mount) -> Ticket {
        let mut devices = lock(&self.devices);
        let lane = devices.entry(mount.device()).or_insert_with(|| Arc::new(DeviceLane::new(mount))).clone();
        Ticket { lanes: self.clone(), lane, place: None, call: None }
    }

    async fn on_thread<T: Send + 'static>(
        &self,
        ticket: Ticket,
        work: impl FnOnce(&Call) -> T + Send + 'static,
    ) -> io::Result<T> {
        // Weak: an ended call leaves nothing that keeps its device in the map.
        let (call, lane) = (ticket.call.clone().expect("it was admitted"), Arc::downgrade(&ticket.lane));
        let waiting = Waiting(call.clone());
        let mut answered = self.threads.spawn(move || {
            // Dropped before the answer is sent: who has the answer finds the place free.
            let ticket = ticket;
            work(ticket.call.as_deref().expect("it was admitted"))
        });
        loop {
            let patience = self.late_after.saturating_sub(call.idle());
            tokio::select! {
                biased;
                // Cancel-safe: the answer stays in its channel.
                result = &mut answered => {
                    drop(waiting);
                    return result.map_err(|_| io::Error::other("the call panicked, or the agent is shutting down"));
                }
                () = sleep(patience) => {
                    if call.idle() >= self.late_after && let Some(lane) = lane.upgrade() {
                        return Err(lane.late().into());
                    }
                }
            }
        }
    }
}

enum Step<T, W> {
    Done(T),
    Crossed(Walk, W),
}

/// Tells the thread when its caller has left.
struct Waiting(Arc<Call>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.is_abandoned.store(true, Ordering::Relaxed);
    }
}

/// A place on a device, held until the call ends, even if nobody waits for it.
struct Ticket {
    lanes: Arc<Shared>,
    lane: Arc<DeviceLane>,
    place: Option<OwnedSemaphorePermit>,
    call: Option<Arc<Call>>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(call) = &self.call
            && self.lane.leave(call, self.lanes.late_after)
        {
            self.lanes.answered.notify_one();
        }
        let mut devices = lock(&self.lanes.devices);
        // Two: the map's and this one. Others are made only under this lock.
        if Arc::strong_count(&self.lane) == 2 && !lock(&self.lane.state).is_suspect {
            devices.remove(&self.lane.device);
        }
    }
}

impl DeviceLane {
    fn new(mount: &Mount) -> Self {
        DeviceLane {
            device: mount.device(),
            point: mount.point.clone(),
            fs_type: mount.fs_type.clone(),
            source: mount.source.clone(),
            short: Arc::new(Semaphore::new(SHORT_CALLS)),
            long: Arc::new(Semaphore::new(LONG_CALLS)),
            state: Mutex::default(),
        }
    }

    fn check(&self, late_after: Duration) -> Result<(), DeviceLate> {
        if lock(&self.state).is_late(late_after) { Err(self.late()) } else { Ok(()) }
    }

    fn enter(&self, late_after: Duration) -> Result<Arc<Call>, DeviceLate> {
        let mut state = lock(&self.state);
        if state.is_late(late_after) {
            return Err(self.late());
        }
        let call = Arc::new(Call::new());
        state.calls.push(call.clone());
        Ok(call)
    }

    /// Whether another call may begin that could not before.
    fn leave(&self, call: &Arc<Call>, late_after: Duration) -> bool {
        let mut state = lock(&self.state);
        let was_late = state.is_late(late_after);
        state.calls.retain(|other| !Arc::ptr_eq(other, call));
        state.is_suspect = call.idle() >= late_after;
        was_late && !state.is_late(late_after)
    }

    fn late(&self) -> DeviceLate {
        let (point, fs_type, source) = (self.point.clone(), self.fs_type.clone(), self.source.clone());
        DeviceLate { point, fs_type, source }
    }
}

impl LaneState {
    /// No other call may begin.
    fn is_late(&self, late_after: Duration) -> bool {
        self.calls.iter().any(|call| self.is_suspect || call.idle() >= late_after)
    }
}

impl Call {
    fn new() -> Self {
        let started = Instant::now();
        Call { started, last_step_ms: AtomicU64::new(0), is_abandoned: AtomicBool::new(false) }
    }

    /// One more step is done. `Err` if nobody waits any more, so that the work ends early.
    pub fn go_on(&self) -> io::Result<()> {
        let elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_step_ms.store(elapsed_ms, Ordering::Relaxed);
        if self.is_abandoned.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the caller did not wait for it"));
        }
        Ok(())
    }

    /// Since its last step.
    fn idle(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.last_step_ms.load(Ordering::Relaxed)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one assignment, so a panic leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::symlink,
        sync::mpsc::{Receiver, Sender, channel},
    };

    use rustix::mount::{MountFlags, mount};

    use super::*;
    use crate::testing::{MountGuard, need_root};

    const LATE: Duration = Duration::from_millis(200);

    /// A file system of its own below a directory, and a call that hangs until it is let go.
    struct Fixture {
        dir: tempfile::TempDir,
        lanes: Lanes,
        _guard: MountGuard,
    }

    impl Fixture {
        fn new() -> Self {
            need_root();
            let dir = tempfile::tempdir().unwrap();
            let point = dir.path().canonicalize().unwrap().join("device");
            fs::create_dir(&point).unwrap();
            mount("tmpfs", &point, "tmpfs", MountFlags::empty(), None).unwrap();
            Fixture { dir, lanes: Lanes::new(LATE), _guard: MountGuard(point) }
        }

        fn path(&self, path: &str) -> PathBuf {
            self.dir.path().join(path)
        }

        fn devices(&self) -> MutexGuard<'_, BTreeMap<Device, Arc<DeviceLane>>> {
            lock(&self.lanes.0.as_ref().unwrap().devices)
        }

        fn late_devices(&self) -> Vec<DeviceLate> {
            self.devices().values().filter_map(|lane| lane.check(LATE).err()).collect()
        }

        async fn quick(&self, path: &str) -> io::Result<()> {
            self.lanes.run(&self.path(path), Length::Short, |_| Ok(())).await
        }

        /// A call that is not answered until the returned sender is dropped.
        async fn hang(&self, path: &str) -> (Sender<()>, io::Result<()>) {
            let (release, released) = channel();
            let hung = self.lanes.run(&self.path(path), Length::Short, move |_| wait(&released)).await;
            (release, hung)
        }
    }

    fn wait(released: &Receiver<()>) -> io::Result<()> {
        let _ = released.recv();
        Ok(())
    }

    fn is_late(result: &io::Result<()>) -> bool {
        result.as_ref().is_err_and(|error| super::is_late(error))
    }

    #[tokio::test]
    async fn hung_device_delays_only_its_own_calls() {
        let node = Fixture::new();
        let (release, hung) = node.hang("device/file").await;
        assert!(is_late(&hung));
        // More than a lane has places: each is refused at once, none takes a thread.
        for _ in 0..100 {
            assert!(is_late(&node.quick("device/other").await));
        }
        node.quick("elsewhere").await.unwrap();
        let named = node.late_devices().pop().unwrap().to_string();
        assert!(named.contains("/device (tmpfs, tmpfs) has not answered for"), "{named}");
        drop(release);
        // The device answers again; that is seen by the next call.
        while is_late(&node.quick("device/other").await) {
            tokio::task::yield_now().await;
        }
        assert_eq!(node.late_devices(), []);
    }

    #[tokio::test]
    async fn refused_callers_are_told_when_the_device_answers() {
        let node = Fixture::new();
        node.quick("device/file").await.unwrap();
        let told = || timeout(LATE / 2, node.lanes.answered());
        told().await.unwrap_err();
        let (release, hung) = node.hang("device/file").await;
        assert!(is_late(&hung));
        assert!(is_late(&node.quick("device/other").await));
        told().await.unwrap_err();
        drop(release);
        told().await.unwrap();
        // This call is a trial; others that came meanwhile were refused.
        node.quick("device/other").await.unwrap();
        told().await.unwrap();
        node.quick("device/other").await.unwrap();
        told().await.unwrap_err();
    }

    #[tokio::test]
    async fn link_to_hung_device_counts_for_the_device() {
        let node = Fixture::new();
        symlink(node.path("device"), node.path("link")).unwrap();
        fs::create_dir(node.path("device/sub")).unwrap();
        symlink("sub/../../elsewhere", node.path("device/back")).unwrap();
        let (release, hung) = node.hang("link/file").await;
        assert!(is_late(&hung));
        assert!(is_late(&node.quick("device").await));
        node.quick("elsewhere").await.unwrap();
        drop(release);
        while is_late(&node.quick("link/file").await) {
            tokio::task::yield_now().await;
        }
        // Through the device to the outside.
        node.quick("device/back/x").await.unwrap();
    }

    #[tokio::test]
    async fn device_that_was_late_gets_one_call_at_a_time() {
        let node = Fixture::new();
        let (release, hung) = node.hang("device").await;
        assert!(is_late(&hung));
        drop(release);
        while !node.devices().values().any(|lane| lock(&lane.state).is_suspect) {
            tokio::task::yield_now().await;
        }
        let (let_go, held) = channel();
        let (begin, began) = channel();
        let path = node.path("device");
        let trial = node.lanes.run(&path, Length::Short, move |_| {
            begin.send(()).map_err(io::Error::other)?;
            wait(&held)
        });
        let others = async {
            while began.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
            let refused = is_late(&node.quick("device").await);
            drop(let_go);
            refused
        };
        let (tried, refused) = tokio::join!(trial, others);
        tried.unwrap();
        assert!(refused);
        node.quick("device").await.unwrap();
    }

    #[tokio::test]
    async fn new_mount_at_the_same_point_is_not_late() {
        let node = Fixture::new();
        let (_release, hung) = node.hang("device").await;
        assert!(is_late(&hung));
        mount("tmpfs", node.path("device"), "tmpfs", MountFlags::empty(), None).unwrap();
        node.quick("device/file").await.unwrap();
    }

    #[tokio::test]
    async fn long_call_is_not_late_while_it_makes_progress() {
        let node = Fixture::new();
        let work = |call: &Call| {
            let began = Instant::now();
            while began.elapsed() < LATE * 3 {
                std::thread::sleep(LATE / 20);
                call.go_on()?;
            }
            io::Result::Ok(())
        };
        node.lanes.run(&node.path("device"), Length::Long, work).await.unwrap();
    }

    #[tokio::test]
    async fn abandoned_call_ends_at_its_next_step() {
        let node = Fixture::new();
        let (ended, end) = channel();
        let work = move |call: &Call| {
            while call.go_on().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            ended.send(()).map_err(io::Error::other)
        };
        let path = node.path("device");
        let call = node.lanes.run(&path, Length::Long, work);
        tokio::time::timeout(Duration::from_millis(50), call).await.unwrap_err();
        end.recv().unwrap();
    }

    #[tokio::test]
    async fn idle_devices_are_forgotten() {
        let node = Fixture::new();
        node.quick("device/file").await.unwrap();
        node.quick("elsewhere").await.unwrap();
        assert!(node.devices().is_empty());
    }
}
