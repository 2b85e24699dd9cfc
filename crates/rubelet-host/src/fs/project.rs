//! Projects files into a directory and replaces them atomically.
//!
//! Owns: upstream's layout. The files are in a hidden directory with a date in its name; `..data` links to it; the visible
//! names are links through `..data`. Renaming that one link changes everything at once. Every step goes from an open
//! directory to a name in it, so that no link on the way leads elsewhere.
//! Never: changes anything if the content is unchanged.
//! Upstream: `pkg/volume/util/atomic_writer.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{File, Permissions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::PermissionsExt},
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid},
    io::Errno,
};

use super::{remove_tree, resolve};
use crate::port::{Projected, ProjectedFile, Projection};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";
const DIR_MODE: u32 = 0o755;
/// The permissions of the group that shares a directory or file without write access.
const GROUP_DIR_BITS: u32 = 0o2550;
const GROUP_FILE_BITS: u32 = 0o440;
/// Names tried for the hidden directory before giving up.
const MAX_NAMES: u32 = 1000;

/// See `Host::project`.
pub fn project(path: &Path, projection: &Projection) -> io::Result<Projected> {
    if let Some(bad) = projection.files.keys().find(|path| !is_plain(path)) {
        let message = format!("{} is no path below a directory", bad.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty())?;
    let current = current_name(dir.as_fd())?;
    let is_current = match &current {
        Some(name) => shows(dir.as_fd(), name, &projection.files)?,
        None => false,
    };
    let (name, projected) = match current.filter(|_| is_current) {
        Some(name) => (name, Projected::Unchanged),
        None => (replace(path, dir.as_fd(), projection)?, Projected::Written),
    };
    // Also without changes: an earlier try may have been interrupted.
    link_names(dir.as_fd(), &projection.files)?;
    remove_rest(path, dir.as_fd(), &name, &projection.files)?;
    Ok(projected)
}

/// Only plain names, the first of which is not one of ours.
fn is_plain(path: &Path) -> bool {
    let mut names = path.components();
    let is_ours = path.as_os_str().as_bytes().starts_with(b"..");
    !is_ours && path.file_name().is_some() && names.all(|name| matches!(name, Component::Normal(_)))
}

/// The hidden directory that `..data` links to.
fn current_name(dir: BorrowedFd<'_>) -> io::Result<Option<String>> {
    let target = match rustix::fs::readlinkat(dir, DATA, Vec::new()) {
        Ok(target) => target,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let name = target.into_string().ok().filter(|name| name.starts_with("..") && !name.contains('/'));
    Ok(name.filter(|name| name != ".." && name != DATA && name != NEW_DATA))
}

/// Whether the hidden directory holds exactly these files with these contents.
fn shows(dir: BorrowedFd<'_>, name: &str, files: &BTreeMap<PathBuf, ProjectedFile>) -> io::Result<bool> {
    let top = match open_beneath(dir, Path::new(name), OFlags::DIRECTORY) {
        Ok(top) => top,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    };
    let mut expected: BTreeSet<&Path> = files.keys().map(PathBuf::as_path).collect();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        let at = if directory.as_os_str().is_empty() { Path::new(".") } else { &directory };
        for entry in Dir::new(open_beneath(top.as_fd(), at, OFlags::DIRECTORY)?)? {
            let entry = entry?;
            let entry_name = entry.file_name().to_bytes();
            if matches!(entry_name, b"." | b"..") {
                continue;
            }
            let path = directory.join(OsStr::from_bytes(entry_name));
            match entry.file_type() {
                FileType::Directory => directories.push(path),
                FileType::RegularFile if expected.remove(path.as_path()) => {
                    if !has_content(top.as_fd(), &path, &files[&path].content)? {
                        return Ok(false);
                    }
                }
                _ => return Ok(false),
            }
        }
    }
    Ok(expected.is_empty())
}

fn has_content(top: BorrowedFd<'_>, path: &Path, content: &[u8]) -> io::Result<bool> {
    let file = File::from(open_beneath(top, path, OFlags::NONBLOCK)?);
    if file.metadata()?.len() != content.len() as u64 {
        return Ok(false);
    }
    let mut found = Vec::with_capacity(content.len());
    file.take(content.len() as u64 + 1).read_to_end(&mut found)?;
    Ok(found == content)
}

/// Writes everything into a new hidden directory, then links `..data` to it. Returns its name.
fn replace(path: &Path, dir: BorrowedFd<'_>, projection: &Projection) -> io::Result<String> {
    let name = make_hidden(dir, &projection.stamp)?;
    let written = write_all(dir, &name, projection).and_then(|()| {
        unlink(dir, NEW_DATA)?;
        rustix::fs::symlinkat(name.as_str(), dir, NEW_DATA)?;
        Ok(rustix::fs::renameat(dir, NEW_DATA, dir, DATA)?)
    });
    if written.is_err() {
        // The first error is the relevant one; leftovers are removed at the next try.
        let _ = remove_tree(&path.join(&name), &|| Ok(()));
    }
    written.map(|()| name)
}

fn make_hidden(dir: BorrowedFd<'_>, stamp: &str) -> io::Result<String> {
    for number in 0..MAX_NAMES {
        let name = format!("{stamp}{number}");
        match rustix::fs::mkdirat(dir, name.as_str(), Mode::from_raw_mode(0o700)) {
            Ok(()) => return Ok(name),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{stamp}0 and {MAX_NAMES} more names are taken")))
}

fn write_all(dir: BorrowedFd<'_>, name: &str, projection: &Projection) -> io::Result<()> {
    let top = open_beneath(dir, Path::new(name), OFlags::DIRECTORY)?;
    for (path, file) in &projection.files {
        let parents: Vec<_> = path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()).collect();
        for parent in parents.into_iter().rev() {
            match rustix::fs::mkdirat(&top, parent, Mode::from_raw_mode(0o700)) {
                Ok(()) => open_up(open_beneath(top.as_fd(), parent, OFlags::DIRECTORY)?, projection.group)?,
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        write_one(top.as_fd(), path, file, projection.group)?;
    }
    open_up(top, projection.group)
}

fn write_one(top: BorrowedFd<'_>, path: &Path, file: &ProjectedFile, group: Option<u32>) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(top, path, flags, Mode::from_raw_mode(0o600))?;
    rustix::fs::fchown(&made, file.owner.map(Uid::from_raw), group.map(Gid::from_raw))?;
    let mut made = File::from(made);
    made.write_all(&file.content)?;
    let group_bits = if group.is_some() { GROUP_FILE_BITS } else { 0 };
    // Last: writing and a change of owner clear mode bits.
    made.set_permissions(Permissions::from_mode(file.mode | group_bits))
}

/// Directories are world-readable; a group shares them.
fn open_up(directory: OwnedFd, group: Option<u32>) -> io::Result<()> {
    rustix::fs::fchown(&directory, None, group.map(Gid::from_raw))?;
    let group_bits = if group.is_some() { GROUP_DIR_BITS } else { 0 };
    File::from(directory).set_permissions(Permissions::from_mode(DIR_MODE | group_bits))
}

/// The visible names. Existing ones stay, whether links or mount points for another volume.
fn link_names(dir: BorrowedFd<'_>, files: &BTreeMap<PathBuf, ProjectedFile>) -> io::Result<()> {
    for name in first_names(files) {
        match rustix::fs::symlinkat(Path::new(DATA).join(name), dir, name) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Removes links to files that are gone, and hidden directories other than the current one.
fn remove_rest(
    path: &Path,
    dir: BorrowedFd<'_>,
    current: &str,
    files: &BTreeMap<PathBuf, ProjectedFile>,
) -> io::Result<()> {
    let names = first_names(files);
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        let is_ours = name.as_bytes().starts_with(b"..") && name != "..";
        match entry.file_type() {
            FileType::Directory if is_ours && name != current => {
                remove_tree(&path.join(name), &|| Ok(()))?;
            }
            FileType::Symlink if !is_ours && !names.contains(name) => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new())?;
                if Path::new(OsStr::from_bytes(target.to_bytes())) == Path::new(DATA).join(name) {
                    rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn first_names(files: &BTreeMap<PathBuf, ProjectedFile>) -> BTreeSet<&OsStr> {
    files.keys().filter_map(|path| path.iter().next()).collect()
}

fn open_beneath(dir: BorrowedFd<'_>, path: &Path, more: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    resolve::open(dir, path, OFlags::RDONLY | more, resolve)
}

fn unlink(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use super::*;

    fn projection(files: &[(&str, &str, u32)]) -> Projection {
        let file = |&(path, content, mode): &(&str, &str, u32)| {
            let file = ProjectedFile { content: content.as_bytes().to_vec(), mode, owner: None };
            (PathBuf::from(path), file)
        };
        Projection { files: files.iter().map(file).collect(), group: None, stamp: "..2026_01_02_03_04_05.".to_owned() }
    }

    /// Every name in the directory: links with their target, hidden directories as `..DATE`.
    fn listed(dir: &Path) -> String {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                match fs::read_link(entry.path()) {
                    Ok(target) => format!("{name}->{}", target.display()),
                    Err(_) => name,
                }
            })
            .collect();
        names.sort();
        names.join(" ")
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn files_appear_through_links_in_upstreams_layout() {
        let dir = tempfile::tempdir().unwrap();
        let files = projection(&[("a", "1", 0o644), ("sub/b", "2", 0o400), ("sub/deep/c", "3", 0o600)]);
        assert_eq!(project(dir.path(), &files).unwrap(), Projected::Written);
        assert_eq!(
            listed(dir.path()),
            "..2026_01_02_03_04_05.0 ..data->..2026_01_02_03_04_05.0 a->..data/a sub->..data/sub"
        );
        assert_eq!(fs::read_to_string(dir.path().join("sub/deep/c")).unwrap(), "3");
        let modes = ["..data", "a", "sub", "sub/b", "sub/deep", "sub/deep/c"].map(|name| mode(&dir.path().join(name)));
        assert_eq!(modes, [0o755, 0o644, 0o755, 0o400, 0o755, 0o600]);
    }

    #[test]
    fn unchanged_projection_is_kept_and_changed_one_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let first = projection(&[("a", "1", 0o644), ("b", "2", 0o644)]);
        project(dir.path(), &first).unwrap();
        let inode = fs::metadata(dir.path().join("a")).unwrap().ino();
        assert_eq!(project(dir.path(), &first).unwrap(), Projected::Unchanged);
        assert_eq!(fs::metadata(dir.path().join("a")).unwrap().ino(), inode);
        let second = projection(&[("a", "1", 0o644), ("c/d", "3", 0o644)]);
        assert_eq!(project(dir.path(), &second).unwrap(), Projected::Written);
        assert_eq!(
            listed(dir.path()),
            "..2026_01_02_03_04_05.1 ..data->..2026_01_02_03_04_05.1 a->..data/a c->..data/c"
        );
        assert_eq!(project(dir.path(), &projection(&[])).unwrap(), Projected::Written);
        assert_eq!(listed(dir.path()), "..2026_01_02_03_04_05.0 ..data->..2026_01_02_03_04_05.0");
    }

    #[test]
    fn a_reader_with_the_old_content_open_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        project(dir.path(), &projection(&[("a", "old", 0o644)])).unwrap();
        let mut before = File::open(dir.path().join("a")).unwrap();
        project(dir.path(), &projection(&[("a", "new", 0o644)])).unwrap();
        let mut seen = String::new();
        before.read_to_string(&mut seen).unwrap();
        assert_eq!((seen.as_str(), fs::read_to_string(dir.path().join("a")).unwrap().as_str()), ("old", "new"));
    }

    #[test]
    fn a_try_that_was_cut_off_is_made_good() {
        let dir = tempfile::tempdir().unwrap();
        let files = projection(&[("a", "1", 0o644)]);
        project(dir.path(), &files).unwrap();
        fs::remove_file(dir.path().join("a")).unwrap();
        fs::create_dir(dir.path().join("..2025_half.0")).unwrap();
        std::os::unix::fs::symlink("..2025_half.0", dir.path().join("..data_tmp")).unwrap();
        assert_eq!(project(dir.path(), &files).unwrap(), Projected::Unchanged);
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "1");
        assert!(!dir.path().join("..2025_half.0").exists());
        project(dir.path(), &projection(&[("a", "2", 0o644)])).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "2");
    }

    #[test]
    fn a_failed_write_leaves_the_old_content() {
        let dir = tempfile::tempdir().unwrap();
        project(dir.path(), &projection(&[("a", "1", 0o644)])).unwrap();
        let before = listed(dir.path());
        // A file cannot be a directory too.
        project(dir.path(), &projection(&[("a", "2", 0o644), ("a/b", "3", 0o644)])).unwrap_err();
        assert_eq!(listed(dir.path()), before);
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "1");
    }

    #[test]
    fn paths_out_of_the_directory_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["../a", "a/../../b", "/etc/x", "..data", "..a/b", "", "."] {
            assert!(project(dir.path(), &projection(&[(path, "x", 0o644)])).is_err(), "{path}");
        }
        let target = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(target.path(), &link).unwrap();
        assert!(project(&link, &projection(&[("a", "x", 0o644)])).is_err());
        assert_eq!(listed(target.path()), "");
    }

    #[test]
    fn group_gets_owners_read_permission() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = projection(&[("sub/a", "1", 0o600)]);
        files.group = Some(4321);
        files.files.get_mut(Path::new("sub/a")).unwrap().owner = Some(1234);
        project(dir.path(), &files).unwrap();
        let file = fs::metadata(dir.path().join("sub/a")).unwrap();
        assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (0o640, 1234, 4321));
        let sub = fs::metadata(dir.path().join("sub")).unwrap();
        assert_eq!((sub.mode() & 0o7777, sub.gid()), (0o2755, 4321));
    }
}
