//! Hints about the first write to a file since it was last looked at.
//!
//! Owns: one inotify instance with a one-shot watch per file, so that a fast writer causes one event and not one per write.
//! A watch belongs to the file, not to its path: after a rename, writes are reported under the path that was watched. The
//! kernel drops the watch of a removed file. Never: reads a file, says what was written.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, sync::Notify};

use crate::watch::register;

/// More than the running containers of a large node. Two events of each fit into the kernel's queue of 16,384.
const MAX_WATCHES: usize = 4096;

/// Clones share one inotify instance, which exists from the first look on.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteWatches {
    state: Arc<Mutex<State>>,
    opened: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    inotify: Option<Arc<AsyncFd<OwnedFd>>>,
    /// By the kernel's watch descriptor.
    paths: BTreeMap<i32, PathBuf>,
}

impl WriteWatches {
    /// Must be called inside of a tokio runtime.
    pub(crate) fn open(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.inotify.is_none() {
            let opened = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
            state.inotify = Some(Arc::new(register(opened)?));
            self.opened.notify_one();
        }
        Ok(())
    }

    /// Watches for the next write. It does nothing if it cannot: hints are not promised.
    pub(crate) fn arm(&self, file: &File, path: &Path) {
        // Locked until the path is known: its first event may be read at once.
        let mut state = self.state();
        let Some(inotify) = state.inotify.clone().filter(|_| state.paths.len() < MAX_WATCHES) else { return };
        let place = format!("/proc/self/fd/{}", file.as_raw_fd());
        if let Ok(number) = inotify::add_watch(inotify.get_ref(), place, WatchFlags::MODIFY | WatchFlags::ONESHOT) {
            state.paths.insert(number, path.to_owned());
        }
    }

    /// The watched paths of files that were written to, each once. Cancel safe: it takes events only when it returns them.
    pub(crate) async fn next(&self) -> Vec<PathBuf> {
        loop {
            let inotify = self.state().inotify.clone();
            let Some(inotify) = inotify else {
                self.opened.notified().await;
                continue;
            };
            let Ok(mut ready) = inotify.readable().await else { std::future::pending().await };
            let written = self.drain(inotify.get_ref());
            ready.clear_ready();
            if !written.is_empty() {
                return written.into_iter().collect();
            }
        }
    }

    /// Reads everything that is queued.
    fn drain(&self, inotify: &OwnedFd) -> BTreeSet<PathBuf> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        let mut written = BTreeSet::new();
        loop {
            match reader.next() {
                // Every file may have been written to.
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    written.extend(std::mem::take(&mut self.state().paths).into_values());
                }
                Ok(event) => {
                    // The watch is over: it was for one write, or its file is gone.
                    let path = self.state().paths.remove(&event.wd());
                    written.extend(path.filter(|_| event.events().contains(ReadFlags::MODIFY)));
                }
                Err(Errno::INTR) => {}
                // Nothing more is queued; any other error would come again, too.
                Err(_) => return written,
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held leaves only a map of paths.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _, time::Duration};

    use super::*;

    async fn next(watches: &WriteWatches) -> Option<Vec<PathBuf>> {
        tokio::time::timeout(Duration::from_millis(300), watches.next()).await.ok()
    }

    fn armed(watches: &WriteWatches, path: &Path) {
        watches.arm(&File::open(path).unwrap(), path);
    }

    #[tokio::test]
    async fn first_write_after_a_look_is_one_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let mut log = File::create(&path).unwrap();
        let watches = WriteWatches::default();
        watches.open().unwrap();
        armed(&watches, &path);
        assert_eq!(next(&watches).await, None);
        for _ in 0..2 {
            for _ in 0..1000 {
                log.write_all(b"line\n").unwrap();
            }
            assert_eq!(next(&watches).await, Some(vec![path.clone()]));
            log.write_all(b"line\n").unwrap();
            assert_eq!(next(&watches).await, None, "it was not looked at since");
            armed(&watches, &path);
        }
    }

    #[tokio::test]
    async fn watch_follows_a_renamed_file_and_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let [path, rotated] = ["0.log", "0.log.1"].map(|name| dir.path().join(name));
        let mut log = File::create(&path).unwrap();
        let watches = WriteWatches::default();
        watches.open().unwrap();
        armed(&watches, &path);
        fs::rename(&path, &rotated).unwrap();
        log.write_all(b"late line\n").unwrap();
        assert_eq!(next(&watches).await, Some(vec![path.clone()]));
        armed(&watches, &rotated);
        drop(log);
        fs::remove_file(&rotated).unwrap();
        assert_eq!(next(&watches).await, None);
        assert!(watches.state().paths.is_empty());
    }

    #[tokio::test]
    async fn receiver_may_wait_before_the_first_look() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, "").unwrap();
        let watches = WriteWatches::default();
        let waiting = tokio::spawn({
            let watches = watches.clone();
            async move { watches.next().await }
        });
        tokio::task::yield_now().await;
        // Without an instance there are no hints, and no error.
        armed(&watches, &path);
        watches.open().unwrap();
        armed(&watches, &path);
        fs::write(&path, "line\n").unwrap();
        let hint = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap();
        assert_eq!(hint, [path]);
    }

    #[tokio::test]
    async fn number_of_watches_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        fs::write(&path, "").unwrap();
        let watches = WriteWatches::default();
        watches.open().unwrap();
        watches.state().paths = (0..MAX_WATCHES).map(|number| (-(number as i32) - 1, PathBuf::new())).collect();
        armed(&watches, &path);
        assert_eq!(watches.state().paths.len(), MAX_WATCHES);
    }
}
