//! Hints that something in a directory changed.
//!
//! Owns: one inotify instance per watched directory, read by one small task that ends with its receiver.
//! Never: says what changed; the receiver looks for itself.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, sync::mpsc};

use crate::linux::blocking;

/// What a watcher wants to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Entries that come, go, or are complete after writing.
    Entries,
    /// The same, and every single write: for following a log.
    Writes,
}

/// See `Host::watch_dir`. The channel holds one hint, because a second would say nothing the first does not.
pub async fn watch_dir(path: &Path, interest: Interest) -> io::Result<mpsc::Receiver<()>> {
    let path = path.to_owned();
    let inotify = blocking(move || open(&path, interest)).await?;
    let inotify = register(inotify)?;
    let (hints, receiver) = mpsc::channel(1);
    // Nobody joins this task: it holds nothing but the watch, and ends as soon as the receiver or the directory is gone.
    tokio::spawn(forward(inotify, hints));
    Ok(receiver)
}

fn open(path: &Path, interest: Interest) -> io::Result<OwnedFd> {
    let entries = WatchFlags::CLOSE_WRITE
        | WatchFlags::MOVED_TO
        | WatchFlags::MOVED_FROM
        | WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR;
    let events = match interest {
        Interest::Entries => entries,
        Interest::Writes => entries | WatchFlags::MODIFY,
    };
    let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    inotify::add_watch(&inotify, path, events)?;
    Ok(inotify)
}

#[expect(unsafe_code, reason = "tokio leaves to its caller that the descriptor stays the same while it is registered")]
fn register(inotify: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is one open descriptor for as long as it lives, and `AsyncFd` takes it with it.
    Ok(unsafe { AsyncFd::register_with_interest(inotify, tokio::io::Interest::READABLE) }?)
}

async fn forward(inotify: AsyncFd<OwnedFd>, hints: mpsc::Sender<()>) {
    loop {
        let mut ready = tokio::select! {
            biased;
            // Both arms only wait; an event not read stays in the kernel's queue.
            () = hints.closed() => return,
            ready = inotify.readable() => match ready {
                Ok(ready) => ready,
                Err(_) => return,
            },
        };
        let drained = drain(inotify.get_ref());
        ready.clear_ready();
        // A full channel already holds the hint.
        let _ = hints.try_send(());
        match drained {
            Ok(Fate::Alive) => {}
            Ok(Fate::Gone) | Err(_) => return,
        }
    }
}

enum Fate {
    Alive,
    /// The directory was removed, renamed or unmounted: its path means something else now.
    Gone,
}

/// Reads everything that is queued. Whatever it is, it means one hint; so does an overflow of the queue.
fn drain(inotify: &OwnedFd) -> io::Result<Fate> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(inotify, &mut buffer);
    let mut fate = Fate::Alive;
    let last_words = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT | ReadFlags::IGNORED;
    loop {
        match reader.next() {
            Ok(event) if event.events().intersects(last_words) => fate = Fate::Gone,
            Ok(_) => {}
            Err(Errno::AGAIN) => return Ok(fate),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    async fn hint(hints: &mut mpsc::Receiver<()>) -> Option<()> {
        tokio::time::timeout(Duration::from_secs(5), hints.recv()).await.expect("a hint or the end within five seconds")
    }

    async fn quiet(hints: &mut mpsc::Receiver<()>) -> bool {
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
        // What the task saw in between may be one more.
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
    async fn single_writes_are_heard_only_by_those_who_ask() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let mut file = fs::File::create(dir.path().join("log")).unwrap();
        let mut entries = watch_dir(dir.path(), Interest::Entries).await.unwrap();
        let mut writes = watch_dir(dir.path(), Interest::Writes).await.unwrap();
        file.write_all(b"line").unwrap();
        assert_eq!(hint(&mut writes).await, Some(()));
        assert!(quiet(&mut entries).await);
    }
}
