//! Usage of file systems, and of the files in one directory.
//!
//! Owns: statfs, and adding up files without following links. Never: walks a tree, which is in `tree.rs`.
//! Upstream: `fs.Info` of `pkg/volume/util/fs`, `MetricsStatFS`.

use std::{io, path::Path};

use rustix::fs::{AtFlags, CWD, Dir, FileType};

use super::tree::{open_dir, stat_bytes};
use crate::mount;

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

/// Maximum of files that are added up in one directory.
const MOST_ENTRIES: usize = 200_000;

/// The usage of one file.
fn file_usage(path: &Path) -> io::Result<Usage> {
    let stat = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(Usage { bytes: stat_bytes(&stat), inodes: 1 })
}

/// The file system of a volume, and whether it is the volume's own.
pub fn volume_place(path: &Path) -> io::Result<(FileSystem, bool)> {
    Ok((file_system(path)?, mount::is_mount_point(path)?))
}

/// The usage of the files directly in a directory, without the directory itself and its subdirectories; or of a file.
pub fn files_usage(path: &Path) -> io::Result<Usage> {
    let dir = match open_dir(CWD, path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return file_usage(path),
        opened => opened?,
    };
    let mut usage = Usage::default();
    for entry in Dir::read_from(&dir)?.take(MOST_ENTRIES) {
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

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn only_files_directly_in_a_directory_are_added_up() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::write(dir.path().join("sub/deep"), "").unwrap();
        fs::write(dir.path().join("big"), vec![1; 1 << 20]).unwrap();
        symlink("sub", dir.path().join("link")).unwrap();
        let found = files_usage(dir.path()).unwrap();
        assert!(found.inodes == 2 && found.bytes >= 1 << 20, "{found:?}");
        assert!(file_usage(&dir.path().join("big")).unwrap().bytes >= 1 << 20);
    }

    #[test]
    fn file_system_reports_its_usage() {
        let found = file_system(Path::new("/")).unwrap();
        assert!(found.capacity_bytes >= found.used_bytes + found.available_bytes && found.used_bytes > 0, "{found:?}");
        assert!(file_system(Path::new("/nowhere/at/all")).is_err());
    }
}
