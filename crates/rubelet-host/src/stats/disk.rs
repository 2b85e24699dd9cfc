//! Usage of file systems and directories.
//!
//! Owns: statfs, and adding up a tree: bounded, without following links, without leaving its file system. Never: runs `du`.
//! Upstream: `fs.Info` and `fs.DiskUsage` of `pkg/volume/util/fs`, `MetricsDu`, `MetricsStatFS`.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};

use crate::{mount, port::VolumeFigures};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileSystem {
    /// The kernel's number of it.
    pub device: u64,
    pub capacity_bytes: u64,
    /// Available to non-root users.
    pub available_bytes: u64,
    pub used_bytes: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

pub fn file_system(path: &Path) -> io::Result<FileSystem> {
    let found = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(FileSystem {
        device: rustix::fs::stat(path)?.st_dev,
        capacity_bytes: bytes(found.f_blocks),
        available_bytes: bytes(found.f_bavail),
        used_bytes: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
        inodes: found.f_files,
        inodes_free: found.f_ffree,
    })
}

/// The usage of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
}

impl Usage {
    #[must_use]
    pub fn saturating_add(self, other: Usage) -> Usage {
        Usage { bytes: self.bytes.saturating_add(other.bytes), inodes: self.inodes.saturating_add(other.inodes) }
    }
}

/// Maximum of entries: a pod with millions of files must not keep the node busy counting them.
const MOST_ENTRIES: u64 = 200_000;
/// Maximum of open directories.
const DEEPEST: usize = 64;

/// The usage of a directory tree on its own file system. An error if it is too large to be counted. `go_on` is asked at
/// every entry; its error ends the count.
pub fn tree_usage(path: &Path, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<Usage> {
    let root = open_dir(CWD, path)?;
    let stat = rustix::fs::fstat(&root)?;
    let mut sum = Sum { device: stat.st_dev, linked: BTreeSet::new(), usage: Usage::default(), entries: 0, go_on };
    sum.add(&stat);
    sum.walk(&root, 0)?;
    Ok(sum.usage)
}

/// The usage of one file.
fn file_usage(path: &Path) -> io::Result<Usage> {
    let stat = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(Usage { bytes: stat_bytes(&stat), inodes: 1 })
}

/// What a volume holds: a mount has a file system of its own.
pub fn volume_figures(path: &Path, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<VolumeFigures> {
    let on = file_system(path)?;
    let is_mount = mount::is_mount_point(path)?;
    let used = if is_mount {
        Usage { bytes: on.used_bytes, inodes: on.inodes.saturating_sub(on.inodes_free) }
    } else {
        tree_usage(path, go_on)?
    };
    Ok(VolumeFigures { used, on, is_mount })
}

/// The usage of the files directly in a directory, without the directory itself and its subdirectories; or of a file.
pub fn files_usage(path: &Path) -> io::Result<Usage> {
    let dir = match open_dir(CWD, path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return file_usage(path),
        opened => opened?,
    };
    let mut usage = Usage::default();
    for entry in Dir::read_from(&dir)?.take(usize::try_from(MOST_ENTRIES).unwrap_or(usize::MAX)) {
        let entry = entry?;
        // A missing file uses nothing.
        let Ok(stat) = rustix::fs::statat(&dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if !FileType::from_raw_mode(stat.st_mode).is_dir() {
            usage = usage.saturating_add(Usage { bytes: stat_bytes(&stat), inodes: 1 });
        }
    }
    Ok(usage)
}

/// `/dev/…`, by the kernel's numbers; the numbers if it has no name.
pub fn device_name(major: u32, minor: u32) -> String {
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok();
    let name = link.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.map_or_else(|| format!("{major}:{minor}"), |name| format!("/dev/{name}"))
}

struct Sum<'a> {
    go_on: &'a dyn Fn() -> io::Result<()>,
    device: u64,
    /// Hard-linked files count once.
    linked: BTreeSet<u64>,
    usage: Usage,
    entries: u64,
}

impl Sum<'_> {
    fn walk(&mut self, dir: &OwnedFd, depth: usize) -> io::Result<()> {
        let too_much = |what: &str| io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {what}"));
        if depth >= DEEPEST {
            return Err(too_much(&format!("{DEEPEST} directories in each other")));
        }
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.entries += 1;
            if self.entries > MOST_ENTRIES {
                return Err(too_much(&format!("{MOST_ENTRIES} files")));
            }
            (self.go_on)()?;
            // A missing file uses nothing.
            let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if stat.st_dev != self.device {
                continue;
            }
            self.add(&stat);
            if FileType::from_raw_mode(stat.st_mode).is_dir()
                && let Ok(child) = open_dir(dir, name)
            {
                self.walk(&child, depth + 1)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, stat: &Stat) {
        let is_dir = FileType::from_raw_mode(stat.st_mode).is_dir();
        if !is_dir && stat.st_nlink > 1 && !self.linked.insert(stat.st_ino) {
            return;
        }
        self.usage = self.usage.saturating_add(Usage { bytes: stat_bytes(stat), inodes: 1 });
    }
}

fn stat_bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

fn open_dir(at: impl AsFd, path: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::{
        mount::Mounter,
        testing::{MountGuard, need_root},
    };

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
        let empty = tree_usage(&tree, &|| Ok(())).unwrap();
        fs::write(tree.join("sub/file"), vec![1; 64 << 10]).unwrap();
        fs::hard_link(tree.join("sub/file"), tree.join("again")).unwrap();
        symlink(&other, tree.join("out")).unwrap();
        Mounter::default().mount_tmpfs(&mounted, None, 0o755).unwrap();
        let _guard = MountGuard(mounted.clone());
        fs::write(mounted.join("elsewhere"), vec![1; 1 << 20]).unwrap();
        let full = tree_usage(&tree, &|| Ok(())).unwrap();
        // One file and one link; the directory under the mount is hidden.
        assert_eq!(full.inodes, empty.inodes + 1);
        let grown = full.bytes - empty.bytes.min(full.bytes);
        assert!((48 << 10..512 << 10).contains(&grown), "{empty:?} {full:?}");
        assert_eq!(files_usage(&tree).unwrap().inodes, 2);
        assert!(file_usage(&other.join("big")).unwrap().bytes >= 1 << 20);
    }

    #[test]
    fn a_tree_too_deep_is_an_error_and_not_a_wrong_number() {
        let dir = tempfile::tempdir().unwrap();
        let mut deep = dir.path().to_owned();
        for _ in 0..DEEPEST {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(tree_usage(dir.path(), &|| Ok(())).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(tree_usage(&dir.path().join("d"), &|| Ok(())).is_ok());
        assert_eq!(tree_usage(&dir.path().join("none"), &|| Ok(())).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn file_system_reports_its_usage() {
        let found = file_system(Path::new("/")).unwrap();
        assert!(found.capacity_bytes >= found.used_bytes + found.available_bytes && found.used_bytes > 0, "{found:?}");
        assert!(file_system(Path::new("/nowhere/at/all")).is_err());
    }
}
