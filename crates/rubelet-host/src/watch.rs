//! Hints about changes in directories.
//!
//! Owns: one inotify instance for any number of directories, and the task that reads it. Both exist only while there are
//! watches: the kernel allows a user 128 instances, and other programs of root need theirs.
//! Never: reports what changed; the receiver reads the directory.

use std::{
    collections::BTreeMap,
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, sync::mpsc, task::AbortHandle};

use crate::lanes::{Lanes, Length};

/// The events a watcher receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Entries created, removed, or closed after writing.
    Entries,
    /// The same, and every single write: for following a log.
    Writes,
}

impl Interest {
    fn events(self) -> WatchFlags {
        let entries = WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        match self {
            Interest::Entries => entries,
            Interest::Writes => entries | WatchFlags::MODIFY,
        }
    }
}

/// The watchers by directory. Clones share one inotify instance.
#[derive(Clone, Debug)]
pub struct Watches {
    interest: Interest,
    lanes: Lanes,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    open: Option<Open>,
    /// By the kernel's watch descriptor: watchers of the same directory share it.
    watched: BTreeMap<i32, Vec<mpsc::Sender<()>>>,
    /// Watchers being registered: until they are, no watch descriptor is removed, since it may be theirs.
    arriving: usize,
    /// A watcher left while others were being registered.
    is_untidy: bool,
}

#[derive(Debug)]
struct Open {
    inotify: Arc<AsyncFd<OwnedFd>>,
    /// Owned here: it ends with the last watch.
    reader: AbortHandle,
}

impl Watches {
    pub fn new(interest: Interest, lanes: Lanes) -> Self {
        Watches { interest, lanes, state: Arc::default() }
    }

    /// See `Host::watch_dir`.
    pub async fn watch_dir(&self, path: &Path) -> io::Result<Hints> {
        let arrival = self.arrive()?;
        let (inotify, dir, events) = (arrival.inotify.clone(), path.to_owned(), self.interest.events());
        let add = move |_: &_| io::Result::Ok(inotify::add_watch(inotify.get_ref(), &dir, events)?);
        let number = self.lanes.run(path, Length::Short, add).await?;
        // One hint is enough: a second one adds nothing.
        let (hints, receiver) = mpsc::channel(1);
        self.state().watched.entry(number).or_default().push(hints);
        Ok(Hints { receiver, watch: Some((self.clone(), number)) })
    }

    fn arrive(&self) -> io::Result<Arrival<'_>> {
        let mut state = self.state();
        let inotify = match &state.open {
            Some(open) => open.inotify.clone(),
            None => {
                let opened = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
                let inotify = Arc::new(register(opened)?);
                let reader = tokio::spawn(read(inotify.clone(), self.clone())).abort_handle();
                state.open = Some(Open { inotify: inotify.clone(), reader });
                inotify
            }
        };
        state.arriving += 1;
        Ok(Arrival { watches: self, inotify })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held leaves only a list of channels.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies the watchers of the directory; the channels of a removed one are closed.
    fn tell(&self, number: i32, fate: Fate) {
        let mut state = self.state();
        for hints in state.watched.get(&number).into_iter().flatten() {
            // A full channel already holds the hint.
            let _ = hints.try_send(());
        }
        if fate == Fate::Gone {
            state.watched.remove(&number);
        }
    }

    fn tell_all(&self) {
        for hints in self.state().watched.values().flatten() {
            let _ = hints.try_send(());
        }
    }
}

impl State {
    fn leave(&mut self, number: i32) {
        let Some(all) = self.watched.get_mut(&number) else { return self.close_if_unused() };
        all.retain(|hints| !hints.is_closed());
        if !all.is_empty() {
            return;
        }
        if self.arriving > 0 {
            self.is_untidy = true;
            return;
        }
        self.give_back(number);
        self.close_if_unused();
    }

    fn arrived(&mut self) {
        self.arriving -= 1;
        if self.arriving == 0 && std::mem::take(&mut self.is_untidy) {
            let unheard = self.watched.iter().filter(|(_, all)| all.is_empty()).map(|(number, _)| *number);
            for number in unheard.collect::<Vec<_>>() {
                self.give_back(number);
            }
        }
        self.close_if_unused();
    }

    fn give_back(&mut self, number: i32) {
        self.watched.remove(&number);
        if let Some(open) = &self.open {
            // The kernel may have removed the watch already, which is an error to ignore.
            let _ = inotify::remove_watch(open.inotify.get_ref(), number);
        }
    }

    fn close_if_unused(&mut self) {
        if self.watched.is_empty()
            && self.arriving == 0
            && let Some(open) = self.open.take()
        {
            open.reader.abort();
        }
    }
}

/// A watcher being registered, or one that never will be.
struct Arrival<'a> {
    watches: &'a Watches,
    inotify: Arc<AsyncFd<OwnedFd>>,
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.watches.state().arrived();
    }
}

/// Hints about one directory, until it is dropped or the directory is gone.
#[derive(Debug)]
pub struct Hints {
    receiver: mpsc::Receiver<()>,
    /// `None` for hints that do not come from the kernel.
    watch: Option<(Watches, i32)>,
}

impl Hints {
    /// `None` if the directory was removed. Cancel safe: a hint not taken stays.
    pub async fn recv(&mut self) -> Option<()> {
        self.receiver.recv().await
    }
}

impl From<mpsc::Receiver<()>> for Hints {
    fn from(receiver: mpsc::Receiver<()>) -> Self {
        Hints { receiver, watch: None }
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.receiver.close();
        if let Some((watches, number)) = &self.watch {
            watches.state().leave(*number);
        }
    }
}

pub(crate) fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    register_for(descriptor, tokio::io::Interest::READABLE)
}

#[expect(unsafe_code, reason = "tokio leaves to its caller that the descriptor stays the same while it is registered")]
pub(crate) fn register_for(descriptor: OwnedFd, interest: tokio::io::Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is one open descriptor for as long as it lives, and `AsyncFd` takes it with it.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

async fn read(inotify: Arc<AsyncFd<OwnedFd>>, watches: Watches) {
    while let Ok(mut ready) = inotify.readable().await {
        let drained = drain(inotify.get_ref(), &watches);
        ready.clear_ready();
        if drained.is_err() {
            return;
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Alive,
    /// The directory was removed, renamed or unmounted: its path may name another one now.
    Gone,
}

/// Reads everything that is queued.
fn drain(inotify: &OwnedFd, watches: &Watches) -> io::Result<()> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(inotify, &mut buffer);
    let last_words = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT | ReadFlags::IGNORED;
    loop {
        match reader.next() {
            // The queue overflowed: every directory may have changed.
            Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => watches.tell_all(),
            Ok(event) if event.events().intersects(last_words) => watches.tell(event.wd(), Fate::Gone),
            Ok(event) => watches.tell(event.wd(), Fate::Alive),
            Err(Errno::AGAIN) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    async fn watch_dir(path: &Path, interest: Interest) -> io::Result<Hints> {
        Watches::new(interest, Lanes::own_files()).watch_dir(path).await
    }

    async fn hint(hints: &mut Hints) -> Option<()> {
        tokio::time::timeout(Duration::from_secs(5), hints.recv()).await.expect("a hint or the end within five seconds")
    }

    async fn quiet(hints: &mut Hints) -> bool {
        tokio::time::timeout(Duration::from_millis(100), hints.recv()).await.is_err()
    }

    #[tokio::test]
    async fn each_kind_of_change_gives_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
        let file = dir.path().join("a");
        let changes: [(&str, &dyn Fn()); 5] = [
            ("a file is written", &|| fs::write(&file, "x").unwrap()),
            ("it is moved away", &|| fs::rename(&file, outside.path().join("a")).unwrap()),
            ("it is moved back", &|| fs::rename(outside.path().join("a"), &file).unwrap()),
            ("a link is made", &|| std::os::unix::fs::symlink(&file, dir.path().join("link")).unwrap()),
            ("it is removed", &|| fs::remove_file(&file).unwrap()),
        ];
        let mut hints = watch_dir(dir.path(), Interest::Entries).await.unwrap();
        for (what, change) in changes {
            change();
            assert_eq!(hint(&mut hints).await, Some(()), "{what}");
            while !quiet(&mut hints).await {}
        }
    }

    #[tokio::test]
    async fn many_changes_are_one_hint() {
        let dir = tempfile::tempdir().unwrap();
        let mut hints = watch_dir(dir.path(), Interest::Entries).await.unwrap();
        for number in 0..500 {
            fs::write(dir.path().join(number.to_string()), "x").unwrap();
        }
        assert_eq!(hint(&mut hints).await, Some(()));
        // A read by the task in between may add one.
        let more = usize::from(!quiet(&mut hints).await) + usize::from(!quiet(&mut hints).await);
        assert!(more <= 1, "{more} more hints");
    }

    #[tokio::test]
    async fn the_channel_closes_when_the_directory_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let watched = dir.path().join("watched");
        for away in [
            |path: &Path| fs::remove_dir(path).unwrap(),
            |path: &Path| {
                fs::rename(path, path.with_extension("old")).unwrap();
            },
        ] {
            fs::create_dir(&watched).unwrap();
            let mut hints = watch_dir(&watched, Interest::Entries).await.unwrap();
            away(&watched);
            while hint(&mut hints).await.is_some() {}
        }
    }

    #[tokio::test]
    async fn only_a_directory_that_exists_can_be_watched() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        assert_eq!(watch_dir(&file, Interest::Entries).await.unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&file, "").unwrap();
        assert_eq!(watch_dir(&file, Interest::Entries).await.unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[tokio::test]
    async fn write_hints_go_only_to_write_watchers() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let mut file = fs::File::create(dir.path().join("log")).unwrap();
        let mut entries = watch_dir(dir.path(), Interest::Entries).await.unwrap();
        let mut writes = watch_dir(dir.path(), Interest::Writes).await.unwrap();
        file.write_all(b"line").unwrap();
        assert_eq!(hint(&mut writes).await, Some(()));
        assert!(quiet(&mut entries).await);
    }

    #[tokio::test]
    async fn thousand_watchers_share_one_inotify_instance_and_clean_up() {
        let dir = tempfile::tempdir().unwrap();
        let watches = Watches::new(Interest::Writes, Lanes::own_files());
        let mut all = Vec::new();
        for number in 0..500 {
            let path = dir.path().join(number.to_string());
            fs::create_dir(&path).unwrap();
            // Two for each.
            all.push(watches.watch_dir(&path).await.unwrap());
            all.push(watches.watch_dir(&path).await.unwrap());
        }
        assert_eq!(watches.state().watched.len(), 500);
        fs::write(dir.path().join("7/log"), "line").unwrap();
        assert_eq!((hint(&mut all[14]).await, hint(&mut all[15]).await), (Some(()), Some(())));
        assert!(quiet(&mut all[13]).await && quiet(&mut all[16]).await);
        drop(all.remove(14));
        fs::write(dir.path().join("7/log"), "more").unwrap();
        assert_eq!(hint(&mut all[14]).await, Some(()), "the other one still hears");
        drop(all);
        let state = watches.state();
        assert!(state.watched.is_empty() && state.open.is_none(), "{state:?}");
    }

    #[tokio::test]
    async fn a_refused_watch_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let watches = Watches::new(Interest::Entries, Lanes::own_files());
        watches.watch_dir(&dir.path().join("none")).await.unwrap_err();
        assert!(watches.state().open.is_none());
    }
}
