//! Directories and files below a directory that pods may be able to write to.
//!
//! Owns: that nothing is made, written or read through a link: a component that is one is an error, wherever it points.
//! The directory itself is the operator's: links in its path are followed.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{File, Permissions},
    io::{self, Read as _, Seek as _},
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags},
    io::Errno,
};

use super::{absent_is_none, in_one_step, make_dir, regular, resolve, set_mode, write_new};
use crate::port::ReadError;

pub(super) const NO_LINKS: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// Creates `path` and missing parents up to `root`; sets the mode of the last one, whatever the umask.
pub fn make_dir_beneath(root: &Path, path: &Path, mode: u32) -> io::Result<()> {
    let mut dir = match open_root(root) {
        // Removed while the agent runs.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_dir(root, mode)?;
            open_root(root)?
        }
        opened => opened?,
    };
    for part in parts(root, path)? {
        dir = match open_dir(&dir, part) {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&dir, part, Mode::from_raw_mode(mode)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                open_dir(&dir, part)?
            }
            opened => opened?,
        };
    }
    set_mode(&File::from(dir), mode)
}

/// Removes a file or a link; a missing one is no error.
pub fn remove_file_beneath(root: &Path, path: &Path) -> io::Result<()> {
    let removed =
        open_parent(root, path).and_then(|(dir, name)| Ok(rustix::fs::unlinkat(dir, name, AtFlags::empty())?));
    absent_is_none(removed).map(|_| ())
}

/// Creates an empty file; an existing regular one is unchanged.
pub fn make_file_beneath(root: &Path, path: &Path, mode: u32) -> io::Result<()> {
    let (dir, name) = open_parent(root, path)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(&dir, name, flags, Mode::from_raw_mode(0o600)) {
        Ok(file) => File::from(file).set_permissions(Permissions::from_mode(mode)),
        Err(Errno::EXIST) => {
            let found = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(found.st_mode) {
                FileType::RegularFile => Ok(()),
                FileType::Symlink => Err(Errno::LOOP.into()),
                _ => Err(Errno::EXIST.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Creates or replaces a file atomically; a link in its place is replaced, not followed.
pub fn write_file_beneath(root: &Path, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let (dir, name) = open_parent(root, path)?;
    let place = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name);
    in_one_step(&place, |temporary| write_new(temporary, content, mode).map(drop))
}

/// A mount on the way is not entered: it may hang, and this call belongs to the device of `root`. `seen` gets each regular
/// file before its size is read.
pub fn file_sizes(
    root: &Path,
    paths: Vec<PathBuf>,
    seen: &dyn Fn(&File, &Path),
) -> io::Result<BTreeMap<PathBuf, Option<u64>>> {
    let dir = open_root(root)?;
    let size = |path: &Path| {
        let below = path.strip_prefix(root).ok()?;
        match resolve::open(&dir, below, OFlags::PATH, NO_LINKS | ResolveFlags::NO_XDEV) {
            Ok(place) => {
                let file = File::from(place);
                if !file.metadata().ok()?.is_file() {
                    return None;
                }
                seen(&file, path);
                Some(Some(file.metadata().ok()?.len()))
            }
            Err(Errno::NOENT) => Some(None),
            Err(_) => None,
        }
    };
    Ok(paths.into_iter().filter_map(|path| size(&path).map(|size| (path, size))).collect())
}

pub fn rename_beneath(root: &Path, path: &Path, name: &str) -> io::Result<()> {
    let (dir, old) = open_parent(root, path)?;
    let mut new = Path::new(name).components();
    let (Some(Component::Normal(new)), None) = (new.next(), new.next()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    Ok(rustix::fs::renameat_with(&dir, old, &dir, new, RenameFlags::NOREPLACE)?)
}

pub fn read_tail(root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
    let (dir, name) = open_parent(root, path)?;
    let place = resolve::open(&dir, name, OFlags::PATH, NO_LINKS).map_err(io::Error::from)?;
    let mut file = regular(&File::from(place))?;
    let length = file.metadata()?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(limit_bytes)))?;
    let mut content = Vec::new();
    // Bytes written during the read are not part of the tail.
    file.take(limit_bytes).read_to_end(&mut content)?;
    Ok(content)
}

pub(super) fn open_parent<'a>(root: &Path, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
    let mut parts = parts(root, path)?;
    let name = parts.pop().ok_or(io::ErrorKind::InvalidInput)?;
    let mut dir = open_root(root)?;
    for part in parts {
        dir = open_dir(&dir, part)?;
    }
    Ok((dir, name))
}

/// One component.
fn open_dir(dir: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    resolve::open(dir, name, OFlags::RDONLY | OFlags::DIRECTORY, NO_LINKS)
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The names on the way from `root` to `path`.
fn parts<'a>(root: &Path, path: &'a Path) -> io::Result<Vec<&'a OsStr>> {
    let below = path.strip_prefix(root).map_err(|_| io::ErrorKind::InvalidInput)?;
    let name = |part| match part {
        Component::Normal(name) => Ok(name),
        _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
    };
    below.components().map(name).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, symlink},
    };

    use super::*;
    use crate::{fs as host_fs, port::FileKind};

    /// A directory with a victim beside the root, which `root/last` and `root/middle` are links to.
    fn hostile() -> (tempfile::TempDir, [std::path::PathBuf; 2]) {
        let dir = tempfile::tempdir().unwrap();
        let [root, victim] = ["root", "victim"].map(|name| dir.path().join(name));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("file"), "secret").unwrap();
        fs::set_permissions(&victim, Permissions::from_mode(0o700)).unwrap();
        symlink(&victim, root.join("last")).unwrap();
        symlink(&victim, root.join("middle")).unwrap();
        symlink(victim.join("file"), root.join("file")).unwrap();
        symlink(victim.join("new"), root.join("dangling")).unwrap();
        (dir, [root, victim])
    }

    #[test]
    fn no_link_is_followed_at_the_end_or_on_the_way() {
        let (_dir, [root, victim]) = hostile();
        let at = |name: &str| root.join(name);
        for name in ["last", "middle/sub", "middle/sub/sub", "file", "dangling"] {
            make_dir_beneath(&root, &at(name), 0o755).unwrap_err();
        }
        for name in ["last", "middle/new", "file", "dangling"] {
            make_file_beneath(&root, &at(name), 0o644).unwrap_err();
        }
        for name in ["middle/file", "middle/new"] {
            write_file_beneath(&root, &at(name), b"hostile", 0o644).unwrap_err();
            remove_file_beneath(&root, &at(name)).unwrap_err();
        }
        for name in ["file", "middle/file", "dangling", "../victim/file"] {
            read_tail(&root, &at(name), 100).unwrap_err();
        }
        read_tail(&root, &victim.join("file"), 100).unwrap_err();
        // A link that is replaced or removed itself is not followed.
        for name in ["file", "dangling"] {
            write_file_beneath(&root, &at(name), b"mine", 0o644).unwrap();
            assert_eq!(read_tail(&root, &at(name), 100).unwrap(), b"mine");
        }
        remove_file_beneath(&root, &at("last")).unwrap();
        assert_eq!(fs::metadata(&victim).unwrap().mode() & 0o777, 0o700);
        assert_eq!(host_fs::list_dir(&victim).unwrap().len(), 1);
        assert_eq!(fs::read(victim.join("file")).unwrap(), b"secret");
    }

    /// Why the functions of this file exist.
    #[test]
    fn directories_of_the_operator_are_made_through_links() {
        let (_dir, [root, victim]) = hostile();
        host_fs::make_dir(&root.join("last"), 0o755).unwrap();
        host_fs::make_dir(&root.join("middle/sub"), 0o755).unwrap();
        assert!(fs::metadata(&victim).unwrap().mode() & 0o777 == 0o755 && victim.join("sub").is_dir());
        host_fs::make_file(&root.join("dangling"), 0o644).unwrap_err();
    }

    #[test]
    fn honest_paths_are_made_with_their_mode() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        let (made, file) = (root.join("a/b"), root.join("a/b/file"));
        for _ in 0..2 {
            make_dir_beneath(&root, &made, 0o777).unwrap();
            make_file_beneath(&root, &file, 0o666).unwrap();
            assert_eq!((mode(&made), mode(&file)), (0o777, 0o666));
            fs::write(&file, "kept").unwrap();
        }
        write_file_beneath(&root, &file, b"new", 0o644).unwrap();
        assert_eq!((mode(&file), fs::read_to_string(&file).unwrap().as_str()), (0o644, "new"));
        for _ in 0..2 {
            remove_file_beneath(&root, &file).unwrap();
        }
        assert_eq!(fs::read_dir(&made).unwrap().count(), 0);
        make_dir_beneath(&root, dir.path(), 0o755).unwrap_err();
        make_dir_beneath(&root, &root.join("../up"), 0o755).unwrap_err();
    }

    #[test]
    fn tail_is_the_end_of_a_file_of_any_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "12345").unwrap();
        let tail = |limit_bytes| String::from_utf8(read_tail(dir.path(), &path, limit_bytes).unwrap()).unwrap();
        assert_eq!([tail(0), tail(2), tail(5), tail(100)], ["", "45", "12345", "12345"]);
        assert!(matches!(
            read_tail(dir.path().parent().unwrap(), dir.path(), 5),
            Err(ReadError::NotRegular(FileKind::Directory))
        ));
    }
}
