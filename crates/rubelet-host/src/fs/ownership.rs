//! Gives a volume's tree to the group of a pod (`fsGroup`).
//!
//! Owns: group and mode bits of every entry of the tree, children before their directory. Never: follows a link, opens a
//! device or a FIFO, stops at an entry that vanished or cannot be changed, as upstream.
//! Upstream: `SetVolumeOwnership` in `pkg/volume/volume_linux.go`.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags};

use crate::port::{SharedFiles, Sharing};

/// Upstream has no limit. Each level holds a descriptor.
const MAX_SHARED_DEPTH: usize = 1000;
const READ_WRITE: u32 = 0o660;
const READ_ONLY: u32 = 0o440;
/// New entries of a directory get its group; the group may enter it.
const DIRECTORY: u32 = 0o2110;

pub fn share_tree(
    path: &Path,
    sharing: Sharing,
    done: &SharedFiles,
    go_on: &dyn Fn() -> io::Result<()>,
) -> io::Result<()> {
    let top = rustix::fs::openat(CWD, path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if sharing.only_on_root_mismatch && is_shared(top.as_fd(), sharing)? {
        return Ok(());
    }
    let mut stack = vec![Dir::new(top)?];
    loop {
        let depth = stack.len();
        let Some(level) = stack.last_mut() else { return Ok(()) };
        go_on()?;
        let Some(entry) = level.read() else {
            change(level.fd()?, sharing).or_else(tolerate)?;
            done.count();
            stack.pop();
            continue;
        };
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let name = CString::from(name);
        let may_be_dir = matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
        match if may_be_dir { enter(level.fd()?, &name) } else { Ok(None) } {
            Ok(Some(below)) if depth < MAX_SHARED_DEPTH => stack.push(below),
            Ok(Some(_)) => {
                let message = format!("{} has more than {MAX_SHARED_DEPTH} levels of directories", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
            }
            Ok(None) => {
                share_entry(level.fd()?, &name, sharing).or_else(tolerate)?;
                done.count();
            }
            Err(error) => tolerate(error)?,
        }
    }
}

/// `None` if it is not a directory.
fn enter(parent: BorrowedFd<'_>, name: &CString) -> io::Result<Option<Dir>> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Ok(dir) => Ok(Some(Dir::new(dir)?)),
        Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn share_entry(parent: BorrowedFd<'_>, name: &CString, sharing: Sharing) -> io::Result<()> {
    let entry = rustix::fs::openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    change(entry.as_fd(), sharing)
}

fn change(entry: BorrowedFd<'_>, sharing: Sharing) -> io::Result<()> {
    let found = rustix::fs::fstat(entry)?;
    let kind = FileType::from_raw_mode(found.st_mode);
    if found.st_gid != sharing.group {
        rustix::fs::chownat(entry, c"", None, Some(Gid::from_raw(sharing.group)), AtFlags::EMPTY_PATH)?;
    }
    if kind == FileType::Symlink {
        return Ok(());
    }
    // The change of group clears the set-group-ID bit.
    let mode = (found.st_mode & 0o7777) | wanted_bits(kind, sharing);
    // The descriptor may be one for its path only, which `fchmod` refuses.
    let shown = format!("/proc/self/fd/{}", entry.as_raw_fd());
    Ok(rustix::fs::chmodat(CWD, shown, Mode::from_raw_mode(mode), AtFlags::empty())?)
}

fn is_shared(top: BorrowedFd<'_>, sharing: Sharing) -> io::Result<bool> {
    let found = rustix::fs::fstat(top)?;
    let bits = wanted_bits(FileType::Directory, sharing);
    Ok(found.st_gid == sharing.group && found.st_mode & bits == bits)
}

fn wanted_bits(kind: FileType, sharing: Sharing) -> u32 {
    let access = if sharing.read_only { READ_ONLY } else { READ_WRITE };
    if kind == FileType::Directory { access | DIRECTORY } else { access }
}

/// Only a node that lacks descriptors or memory ends the walk.
fn tolerate(error: io::Error) -> io::Result<()> {
    match rustix::io::Errno::from_io_error(&error) {
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOMEM) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    };

    use super::*;

    fn shown(path: &Path) -> String {
        let found = fs::symlink_metadata(path).unwrap();
        format!("{:o} {}", found.mode() & 0o7777, found.gid())
    }

    fn share(path: &Path, sharing: Sharing, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<()> {
        share_tree(path, sharing, &SharedFiles::default(), go_on)
    }

    fn sharing(group: u32) -> Sharing {
        Sharing { group, read_only: false, only_on_root_mismatch: false }
    }

    #[test]
    fn tree_is_given_to_the_group_and_links_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, outside) = (dir.path().join("tree"), dir.path().join("outside"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        for path in [tree.join("a/file"), outside.clone()] {
            fs::write(&path, "x").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        symlink(&outside, tree.join("link")).unwrap();
        symlink(dir.path(), tree.join("dirlink")).unwrap();
        for (path, mode) in [("a", 0o700), ("a/b", 0o755)] {
            fs::set_permissions(tree.join(path), fs::Permissions::from_mode(mode)).unwrap();
        }
        let done = SharedFiles::default();
        share_tree(&tree, sharing(4321), &done, &|| Ok(())).unwrap();
        assert_eq!(done.get(), 6, "directories and links count");
        assert_eq!(shown(&tree.join("a")), "2770 4321");
        assert_eq!(shown(&tree.join("a/b")), "2775 4321");
        assert_eq!(shown(&tree.join("a/file")), "660 4321");
        assert!(shown(&tree.join("link")).ends_with(" 4321") && shown(&tree.join("dirlink")).ends_with(" 4321"));
        assert_eq!(shown(&outside), "600 0", "what a link leads to stays");
        assert!(shown(dir.path()).ends_with(" 0"));
    }

    #[test]
    fn read_only_volume_is_only_read_by_the_group() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        for (path, mode) in [(dir.path(), 0o700), (&file, 0o600)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        share(dir.path(), Sharing { read_only: true, ..sharing(4321) }, &|| Ok(())).unwrap();
        assert_eq!((shown(&file).as_str(), shown(dir.path()).as_str()), ("640 4321", "2750 4321"));
    }

    #[test]
    fn matching_root_ends_the_walk_if_the_pod_says_so() {
        let dir = tempfile::tempdir().unwrap();
        share(dir.path(), sharing(4321), &|| Ok(())).unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        std::os::unix::fs::chown(&file, None, Some(1)).unwrap();
        let careful = Sharing { only_on_root_mismatch: true, ..sharing(4321) };
        share(dir.path(), careful, &|| Ok(())).unwrap();
        assert!(shown(&file).ends_with(" 1"), "the root matches");
        share(dir.path(), Sharing { group: 4322, ..careful }, &|| Ok(())).unwrap();
        assert!(shown(&file).ends_with(" 4322"), "the root did not match");
    }

    #[test]
    fn too_deep_a_tree_is_an_error_and_a_caller_may_end_the_walk() {
        let dir = tempfile::tempdir().unwrap();
        let mut deep = dir.path().to_owned();
        for _ in 0..MAX_SHARED_DEPTH {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        let error = share(dir.path(), sharing(0), &|| Ok(())).unwrap_err();
        assert!(error.to_string().contains("more than 1000 levels"), "{error}");
        let ended = || Err(io::Error::from(io::ErrorKind::Interrupted));
        assert_eq!(share(dir.path(), sharing(0), &ended).unwrap_err().kind(), io::ErrorKind::Interrupted);
    }
}
