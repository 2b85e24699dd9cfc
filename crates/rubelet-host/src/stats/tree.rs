//! The usage of a directory tree, counted in slices.
//!
//! Owns: the state of a walk between two slices, and the pace of all walks together: counting files costs the node little,
//! however many a pod has, and a large tree lets others through. Never: follows links, leaves the file system, keeps results.
//! Upstream: `fs.DiskUsage` of `pkg/volume/util/fs`, which walks every volume once a minute as fast as it can.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep_until},
};

use super::disk::Usage;
use crate::fs::resolve;

/// Maximum of open directories of one walk; those below them are walked through later.
const MAX_OPEN: usize = 64;
/// Maximum of directories that are left for later.
const MAX_LATER: usize = 10_000;
/// Entries of one slice; then other walks, and removals on the same device, have their turn.
const SLICE_ENTRIES: u64 = 1000;
/// Entries of all walks together: about 10 % of one core, if no disk is needed.
const ENTRIES_PER_SEC: u32 = 20_000;
/// All walks together rest for this many times as long as they work: they take a tenth of a slow disk's, or a busy node's, time.
const REST_FACTOR: u32 = 9;
/// The longest rest after one slice: a disk that was slow once delays walks on others no longer.
const MAX_REST: Duration = Duration::from_secs(1);
/// Hard-linked files whose inode numbers one walk remembers, to count each once.
const MAX_LINKED: usize = 100_000;

const DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A walk through a tree on its own file system.
#[derive(Debug)]
pub struct TreeWalk {
    device: u64,
    linked: BTreeSet<u64>,
    usage: Usage,
    top: OwnedFd,
    /// Below the top: where the first open directory is.
    base: PathBuf,
    /// From there to the current directory, with their names; empty at the end.
    open: Vec<(Dir, PathBuf)>,
    /// Below the top.
    later: Vec<PathBuf>,
}

/// A walk after one more slice.
#[derive(Debug)]
pub struct Slice {
    pub walk: TreeWalk,
    pub entries: u64,
    pub worked: Duration,
}

impl TreeWalk {
    pub fn begin(path: &Path) -> io::Result<Self> {
        let top = open_dir(CWD, path)?;
        let stat = rustix::fs::fstat(&top)?;
        let first = Dir::new(open_dir(&top, c".")?)?;
        let mut walk = TreeWalk {
            device: stat.st_dev,
            linked: BTreeSet::new(),
            usage: Usage::default(),
            top,
            base: PathBuf::new(),
            open: vec![(first, PathBuf::new())],
            later: Vec::new(),
        };
        walk.add(&stat);
        Ok(walk)
    }

    /// What was counted so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    pub fn is_finished(&self) -> bool {
        self.open.is_empty()
    }

    /// Counts one more slice, and returns how many entries it had. `go_on` is asked at every entry; its error ends the walk.
    /// Another error means that the tree is too deep, or too wide far below.
    fn advance(&mut self, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<u64> {
        let mut entries: u64 = 0;
        while entries < SLICE_ENTRIES
            && let Some((dir, _)) = self.open.last_mut()
        {
            go_on()?;
            entries = entries.saturating_add(1);
            let Some(entry) = dir.read() else {
                self.open.pop();
                self.go_on_later()?;
                continue;
            };
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let here = dir.fd()?;
            // A missing file uses nothing.
            let Ok(stat) = rustix::fs::statat(here, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if stat.st_dev != self.device {
                continue;
            }
            let below = if FileType::from_raw_mode(stat.st_mode).is_dir() { open_dir(here, name).ok() } else { None };
            self.add(&stat);
            if let Some(below) = below {
                let name = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
                self.enter(below, name)?;
            }
        }
        Ok(entries)
    }

    /// The same, with what it cost.
    pub fn slice(mut self, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<Slice> {
        let began = Instant::now();
        let entries = self.advance(go_on)?;
        Ok(Slice { walk: self, entries, worked: began.elapsed() })
    }

    fn enter(&mut self, dir: OwnedFd, name: PathBuf) -> io::Result<()> {
        if self.open.len() < MAX_OPEN {
            self.open.push((Dir::new(dir)?, name));
            return Ok(());
        }
        if self.later.len() >= MAX_LATER {
            return Err(too_large(&format!("{MAX_LATER} directories below {MAX_OPEN} others")));
        }
        let names = self.open.iter().map(|(_, name)| name.as_path()).chain([name.as_path()]);
        self.later.push(names.fold(self.base.clone(), |path, name| path.join(name)));
        Ok(())
    }

    /// When nothing is open: the next directory that was left for later. One that is gone uses nothing.
    fn go_on_later(&mut self) -> io::Result<()> {
        while self.open.is_empty()
            && let Some(path) = self.later.pop()
        {
            let flags = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
            match resolve::open(&self.top, &path, DIR_FLAGS, flags) {
                Ok(dir) => {
                    self.open.push((Dir::new(dir)?, PathBuf::new()));
                    self.base = path;
                }
                Err(Errno::NAMETOOLONG) => return Err(too_large("a path can name")),
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn add(&mut self, stat: &Stat) {
        let (mut bytes, mut inodes) = (stat_bytes(stat), 1);
        if stat.st_nlink > 1 && !FileType::from_raw_mode(stat.st_mode).is_dir() {
            if self.linked.len() < MAX_LINKED {
                if !self.linked.insert(stat.st_ino) {
                    return;
                }
            } else if self.linked.contains(&stat.st_ino) {
                return;
            } else {
                // Too many to remember: each link counts for its share.
                (bytes, inodes) = (bytes.checked_div(stat.st_nlink).unwrap_or(bytes), 0);
            }
        }
        self.usage = self.usage.saturating_add(Usage { bytes, inodes });
    }
}

pub(super) fn stat_bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

pub(super) fn open_dir(at: impl AsFd, path: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(at, path, DIR_FLAGS, Mode::empty())
}

fn too_large(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {what}"))
}

/// The pace of all walks together.
#[derive(Debug)]
pub struct WalkBudget {
    /// First come, first served: a large tree has no more of it than a small one.
    turn: Semaphore,
    /// When the next slice may begin.
    next: Mutex<Option<Instant>>,
}

impl Default for WalkBudget {
    fn default() -> Self {
        WalkBudget { turn: Semaphore::new(1), next: Mutex::default() }
    }
}

impl WalkBudget {
    /// Waits until one more slice may begin.
    pub async fn admit(&self) {
        let _turn = self.turn.acquire().await;
        loop {
            let next = *self.next.lock().unwrap_or_else(PoisonError::into_inner);
            match next.filter(|next| *next > Instant::now()) {
                Some(next) => sleep_until(next).await,
                None => return,
            }
        }
    }

    /// A slice is over: the next one begins after the rest that it costs.
    pub fn spend(&self, entries: u64, worked: Duration) {
        let now = Instant::now();
        let rest = rest_after(entries, worked);
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let from = next.map_or(now, |next| next.max(now));
        *next = from.checked_add(rest);
    }
}

fn rest_after(entries: u64, worked: Duration) -> Duration {
    let entries = u32::try_from(entries).unwrap_or(u32::MAX);
    let by_entries = Duration::from_secs(1).saturating_mul(entries).checked_div(ENTRIES_PER_SEC).unwrap_or_default();
    by_entries.max(worked.saturating_mul(REST_FACTOR)).min(MAX_REST)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::{
        mount::Mounter,
        testing::{MountGuard, need_root},
    };

    fn tree_usage(path: &Path) -> io::Result<(Usage, usize)> {
        let mut walk = TreeWalk::begin(path)?;
        let mut slices = 0;
        while !walk.is_finished() {
            let entries = walk.advance(&|| Ok(()))?;
            assert!(entries <= SLICE_ENTRIES);
            slices += 1;
        }
        Ok((walk.usage(), slices))
    }

    #[test]
    fn disk_usage_counts_files_once_without_links_and_mounts() {
        need_root();
        let dir = tempfile::tempdir().unwrap();
        let (tree, other, mounted) =
            (dir.path().join("tree"), dir.path().join("other"), dir.path().join("tree/mounted"));
        for made in [&tree, &other, &mounted, &tree.join("sub")] {
            fs::create_dir(made).unwrap();
        }
        fs::write(other.join("big"), vec![1; 1 << 20]).unwrap();
        let (empty, _) = tree_usage(&tree).unwrap();
        fs::write(tree.join("sub/file"), vec![1; 64 << 10]).unwrap();
        fs::hard_link(tree.join("sub/file"), tree.join("again")).unwrap();
        symlink(&other, tree.join("out")).unwrap();
        Mounter::default().mount_tmpfs(&mounted, None, 0o755).unwrap();
        let _guard = MountGuard(mounted.clone());
        fs::write(mounted.join("elsewhere"), vec![1; 1 << 20]).unwrap();
        let (full, _) = tree_usage(&tree).unwrap();
        // One file and one link; the directory under the mount is hidden.
        assert_eq!(full.inodes, empty.inodes + 1);
        let grown = full.bytes - empty.bytes.min(full.bytes);
        assert!((48 << 10..512 << 10).contains(&grown), "{empty:?} {full:?}");
    }

    #[test]
    fn large_tree_is_counted_completely_in_slices() {
        let dir = tempfile::tempdir().unwrap();
        for (sub, files) in [("a", 1500), ("a/b", 700), ("c", 1)] {
            fs::create_dir_all(dir.path().join(sub)).unwrap();
            for file in 0..files {
                fs::write(dir.path().join(sub).join(file.to_string()), "").unwrap();
            }
        }
        let (usage, slices) = tree_usage(dir.path()).unwrap();
        assert_eq!((usage.inodes, slices), (1500 + 700 + 1 + 4, 3));
    }

    #[test]
    fn deep_tree_is_counted_completely_with_few_open_directories() {
        let dir = tempfile::tempdir().unwrap();
        let mut deep = dir.path().to_owned();
        for _ in 0..3 * MAX_OPEN {
            deep.push("d");
            fs::create_dir_all(deep.join("side")).unwrap();
        }
        fs::write(deep.join("bottom"), vec![1; 1 << 20]).unwrap();
        let (usage, _) = tree_usage(dir.path()).unwrap();
        assert_eq!(usage.inodes, 1 + 2 * 3 * MAX_OPEN as u64 + 1);
        assert!(usage.bytes >= 1 << 20, "{usage:?}");
        assert_eq!(tree_usage(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_tree_too_deep_for_a_path_is_an_error_and_not_a_wrong_number() {
        let dir = tempfile::tempdir().unwrap();
        let name = "d".repeat(100);
        let mut deep = open_dir(CWD, dir.path()).unwrap();
        for _ in 0..MAX_OPEN {
            rustix::fs::mkdirat(&deep, &name, Mode::RWXU).unwrap();
            deep = open_dir(&deep, &name).unwrap();
        }
        assert_eq!(tree_usage(dir.path()).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn rest_grows_with_entries_and_with_slow_disks() {
        let millis = |entries, worked| rest_after(entries, Duration::from_millis(worked)).as_millis();
        assert_eq!(millis(1000, 1), 50, "20,000 a second");
        assert_eq!(millis(20, 1), 9);
        assert_eq!(millis(20, 30), 270, "a tenth of the time");
        assert_eq!(millis(1000, 5000), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn small_trees_do_not_wait_for_a_large_one() {
        let budget = std::sync::Arc::new(WalkBudget::default());
        let began = Instant::now();
        let walk = |entries: u64| {
            let budget = budget.clone();
            async move {
                let mut left = entries;
                while left > 0 {
                    budget.admit().await;
                    let slice = left.min(SLICE_ENTRIES);
                    budget.spend(slice, Duration::from_millis(1));
                    left -= slice;
                }
                began.elapsed()
            }
        };
        let large = tokio::spawn(walk(1_000_000));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let small: Vec<_> = (0..20).map(|_| tokio::spawn(walk(100))).collect();
        for one in small {
            let took = one.await.unwrap();
            assert!(took < Duration::from_secs(3), "{took:?}");
        }
        let took = large.await.unwrap();
        assert!((50..53).contains(&took.as_secs()), "{took:?}");
    }
}
