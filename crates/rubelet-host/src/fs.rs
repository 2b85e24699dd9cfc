//! Files and directories, one blocking call each.
//!
//! Owns: opening, replacing and removing files so that a hostile file at the path cannot block the agent, be half seen, or
//! redirect it. Never: decides which files; every descriptor is close-on-exec.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::{CWD, Gid, Mode, OFlags, ResolveFlags};

use crate::port::{DirEntry, FileIdentity, FileKind, ReadError};

/// The name of a file until it is complete.
const TEMPORARY_BEGIN: &str = ".rubelet-";
const TEMPORARY_END: &str = ".tmp";

mod beneath;
mod compress;
mod ownership;
mod project;
mod remove_tree;
pub(crate) mod resolve;

pub use beneath::{
    file_sizes, make_dir_beneath, make_file_beneath, read_tail, remove_file_beneath, rename_beneath, write_file_beneath,
};
pub use compress::compress_beneath;
pub use ownership::share_tree;
pub use project::project;
pub use remove_tree::remove_tree;

pub fn list_dir(path: &Path) -> io::Result<Vec<DirEntry>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        // A name that is not UTF-8 is shown lossily; opening it then fails with that name in the message.
        let name = entry.file_name().to_string_lossy().into_owned();
        match entry.file_type() {
            Ok(file_type) => entries.push(DirEntry { name, kind: kind_of(file_type) }),
            // Removed during the listing.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

pub fn read_file(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
    read_all(open_regular(path)?, limit_bytes)
}

/// Resolves links as a container with `root` as its root would: absolute links and `..` do not leave it.
pub fn read_in_root(root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let root = rustix::fs::open(root, flags, Mode::empty()).map_err(io::Error::from)?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let place = File::from(resolve::open(&root, path, OFlags::PATH, resolve).map_err(io::Error::from)?);
    read_all(regular(&place)?, limit_bytes)
}

fn read_all(file: File, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
    if file.metadata()?.len() > limit_bytes {
        return Err(ReadError::TooLarge { limit_bytes });
    }
    let mut content = Vec::new();
    // One byte more than allowed tells a file that grew from one that just fits.
    file.take(limit_bytes.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > limit_bytes {
        return Err(ReadError::TooLarge { limit_bytes });
    }
    Ok(content)
}

fn open_regular(path: &Path) -> Result<File, ReadError> {
    // A path-only descriptor first: opening a FIFO or a device for reading has side effects.
    let place =
        File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from)?);
    regular(&place)
}

fn regular(place: &File) -> Result<File, ReadError> {
    match kind_of(place.metadata()?.file_type()) {
        FileKind::File => Ok(File::from(reopen(place)?)),
        other => Err(ReadError::NotRegular(other)),
    }
}

/// Opens a regular file below `dir` for reading. Links and mounts on the way are errors.
pub fn open_beneath(dir: &Path, relative: &Path) -> Result<File, ReadError> {
    let dir = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(io::Error::from)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let place = resolve::open(&dir, relative, OFlags::PATH, resolve).map_err(io::Error::from)?;
    regular(&File::from(place))
}

/// Opens a regular file or a directory below `dir` for reading. Links are followed inside of it only.
pub fn open_inside(dir: &Path, relative: &Path) -> Result<(File, FileKind), ReadError> {
    let path_only = OFlags::PATH | OFlags::CLOEXEC;
    let top = rustix::fs::open(dir, path_only | OFlags::DIRECTORY, Mode::empty()).map_err(io::Error::from)?;
    let open = |relative: &Path, resolve| {
        let named = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        resolve::open(&top, named, OFlags::PATH, ResolveFlags::BENEATH | resolve)
    };
    let place = match open(relative, ResolveFlags::NO_MAGICLINKS) {
        // An absolute link, such as those to container logs, may still point below `dir`. Its target is opened
        // without following links, in case it changes meanwhile.
        Err(rustix::io::Errno::XDEV) => {
            let (there, dir) = (fs::canonicalize(dir.join(relative))?, fs::canonicalize(dir)?);
            let inside = there.strip_prefix(&dir).map_err(|_| io::Error::from(io::ErrorKind::PermissionDenied))?;
            open(inside, ResolveFlags::NO_SYMLINKS)
        }
        other => other,
    };
    let place = File::from(place.map_err(io::Error::from)?);
    match kind_of(place.metadata()?.file_type()) {
        kind @ (FileKind::File | FileKind::Directory) => Ok((File::from(reopen(&place)?), kind)),
        other => Err(ReadError::NotRegular(other)),
    }
}

/// The entries of an open directory, whatever its path is by now.
pub fn list_open_dir(dir: &File) -> io::Result<Vec<DirEntry>> {
    list_dir(Path::new(&format!("/proc/self/fd/{}", dir.as_raw_fd())))
}

pub fn file_kind(path: &Path) -> io::Result<Option<FileKind>> {
    absent_is_none(fs::metadata(path).map(|found| kind_of(found.file_type())))
}

pub fn file_identity(path: &Path) -> io::Result<Option<FileIdentity>> {
    absent_is_none(fs::symlink_metadata(path).map(|found| FileIdentity {
        device: found.dev(),
        inode: found.ino(),
        created_at: found.created().ok(),
    }))
}

pub fn file_group(path: &Path) -> io::Result<u32> {
    fs::metadata(path).map(|found| found.gid())
}

pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    set_mode(&File::open(path)?, mode)
}

fn set_mode(dir: &File, mode: u32) -> io::Result<()> {
    // Only the permissions: a set-group-ID bit set later is kept.
    if dir.metadata()?.mode() & 0o777 != mode & 0o777 {
        dir.set_permissions(Permissions::from_mode(mode))?;
    }
    Ok(())
}

pub fn share_dir(path: &Path, group: u32) -> io::Result<()> {
    let dir = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::fchown(&dir, None, Some(Gid::from_raw(group)))?;
    let dir = File::from(dir);
    // After the change of group, which clears the set-group-ID bit.
    let mode = dir.metadata()?.mode() & 0o7777;
    dir.set_permissions(Permissions::from_mode(mode | 0o2770))
}

pub fn make_file(path: &Path, mode: u32) -> io::Result<()> {
    // Never truncates, never blocks on a FIFO, and creates nothing at the end of a dangling link.
    let flags =
        OFlags::RDONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::from_raw_mode(mode))?;
    Ok(())
}

/// Not synced to disk: all such files are rewritten after a power cut.
pub fn write_file(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    in_one_step(path, |temporary| write_new(temporary, content, mode).map(drop))
}

pub fn write_durably(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    in_one_step(path, |temporary| write_new(temporary, content, mode)?.sync_all())?;
    sync_dir(path.parent().unwrap_or(Path::new("/")))
}

pub fn sync_dir(path: &Path) -> io::Result<()> {
    let dir = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(rustix::fs::fsync(dir)?)
}

fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(content)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    Ok(file)
}

pub fn make_link(target: &Path, link: &Path) -> io::Result<()> {
    in_one_step(link, |temporary| std::os::unix::fs::symlink(target, temporary))
}

pub fn read_link(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_link(path) {
        // Something exists there, but not a link.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        read => absent_is_none(read),
    }
}

pub fn remove_file(path: &Path) -> io::Result<()> {
    absent_is_none(fs::remove_file(path)).map(|_| ())
}

pub fn remove_dir(path: &Path, own: &[&str]) -> io::Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
        removed => return absent_is_none(removed).map(|_| ()),
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| is_temporary(name) || own.contains(&name));
        if !is_ours || !entry.file_type()?.is_file() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        files.push(entry.path());
    }
    files.iter().try_for_each(|file| remove_file(file))?;
    absent_is_none(fs::remove_dir(path)).map(|_| ())
}

/// A file that a process was killed while it wrote.
fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMPORARY_BEGIN) && name.ends_with(TEMPORARY_END)
}

/// Creates it under a temporary name beside `path`, then renames it: a reader sees the old or the new, complete.
fn in_one_step(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // The name starts with a dot so that readers of manifest directories skip it.
    let temporary = path.with_file_name(format!("{TEMPORARY_BEGIN}{}-{number}{TEMPORARY_END}", std::process::id()));
    // Left over by a process with the same id.
    remove_file(&temporary)?;
    let done = make(&temporary).and_then(|()| Ok(rustix::fs::renameat(CWD, &temporary, CWD, path)?));
    if done.is_err() {
        // The first error is the relevant one.
        let _ = remove_file(&temporary);
    }
    done
}

/// Reopens a path-only descriptor for reading. The file is known to be regular, so this cannot block.
fn reopen(place: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", place.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?)
}

fn absent_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn kind_of(file_type: fs::FileType) -> FileKind {
    if file_type.is_dir() {
        FileKind::Directory
    } else if file_type.is_symlink() {
        FileKind::Symlink
    } else if file_type.is_fifo() {
        FileKind::Fifo
    } else if file_type.is_socket() {
        FileKind::Socket
    } else if file_type.is_char_device() {
        FileKind::CharDevice
    } else if file_type.is_block_device() {
        FileKind::BlockDevice
    } else {
        FileKind::File
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use rustix::fs::FileType;

    use super::*;

    fn fifo(path: &Path) {
        rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    }

    #[test]
    fn links_are_followed_inside_a_directory_and_not_out_of_it() {
        let outside = tempfile::tempdir().unwrap();
        let dir = outside.path().join("dir");
        fs::create_dir_all(dir.join("sub")).unwrap();
        fs::write(dir.join("file"), "inside").unwrap();
        fs::write(outside.path().join("file"), "outside").unwrap();
        symlink("../file", dir.join("sub/relative")).unwrap();
        symlink(dir.join("file"), dir.join("sub/full")).unwrap();
        symlink(dir.join("sub/full"), dir.join("sub/twice")).unwrap();
        symlink("../../file", dir.join("sub/out")).unwrap();
        symlink(outside.path(), dir.join("sub/up")).unwrap();
        symlink("/proc/self/root", dir.join("sub/magic")).unwrap();
        fifo(&dir.join("fifo"));
        let read = |path: &str| match open_inside(&dir, Path::new(path)) {
            Ok((mut file, FileKind::File)) => {
                let mut content = String::new();
                file.read_to_string(&mut content).unwrap();
                content
            }
            Ok((file, _)) => list_open_dir(&file).unwrap().iter().map(|entry| entry.name.clone() + "|").collect(),
            Err(ReadError::Io(error)) => format!("{:?}", error.kind()),
            Err(error) => error.to_string(),
        };
        let paths =
            ["", "file", "sub/relative", "sub/full", "sub/twice", "sub/out", "sub/up/file", "sub/magic/etc/passwd"];
        let more = ["../file", "/etc/passwd", "sub/../file", "fifo", "nowhere", "file/below"];
        let answers: Vec<String> = paths.iter().chain(&more).map(|path| format!("{path}: {}", read(path))).collect();
        insta::assert_snapshot!(answers.join("\n"), @"
        : fifo|file|sub|
        file: inside
        sub/relative: inside
        sub/full: inside
        sub/twice: inside
        sub/out: PermissionDenied
        sub/up/file: PermissionDenied
        sub/magic/etc/passwd: PermissionDenied
        ../file: PermissionDenied
        /etc/passwd: PermissionDenied
        sub/../file: inside
        fifo: it is a Fifo, not a regular file
        nowhere: NotFound
        file/below: NotADirectory
        ");
    }

    #[test]
    fn links_do_not_leave_their_root() {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("etc/env"), "inside").unwrap();
        fs::write(outside.path().join("env"), "outside").unwrap();
        symlink("/etc/env", root.join("full")).unwrap();
        symlink("../../../etc/env", root.join("up")).unwrap();
        symlink("../env", root.join("out")).unwrap();
        symlink("/proc/self/root/etc/passwd", root.join("magic")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        symlink(&root, outside.path().join("behind")).unwrap();
        fifo(&root.join("fifo"));
        let read = |root: &Path, path: &str| match read_in_root(root, Path::new(path), 6) {
            Ok(content) => String::from_utf8(content).unwrap(),
            Err(ReadError::Io(error)) => format!("{:?}", error.kind()),
            Err(error) => error.to_string(),
        };
        let paths = ["etc/env", "/etc/env", "full", "up", "out", "../env", "magic", "loop", "fifo", "etc"];
        let mut answers: Vec<String> = paths.iter().map(|path| format!("{path}: {}", read(&root, path))).collect();
        answers.push(format!("a linked root: {}", read(&outside.path().join("behind"), "etc/env")));
        fs::write(root.join("etc/env"), "longer!").unwrap();
        answers.push(format!("a longer one: {}", read(&root, "etc/env")));
        insta::assert_snapshot!(answers.join("\n"), @"
        etc/env: inside
        /etc/env: inside
        full: inside
        up: inside
        out: NotFound
        ../env: NotFound
        magic: NotFound
        loop: FilesystemLoop
        fifo: it is a Fifo, not a regular file
        etc: it is a Directory, not a regular file
        a linked root: NotADirectory
        a longer one: it is larger than the limit of 6 bytes
        ");
    }

    #[test]
    fn only_regular_files_are_read_and_nothing_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "12345").unwrap();
        symlink("file", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        fifo(&at("fifo"));
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let read = |path: &Path| match read_file(path, 5) {
            Ok(content) => String::from_utf8(content).unwrap(),
            Err(error) => error.to_string(),
        };
        let mut answers = String::new();
        for name in ["file", "link", "dangling", "fifo", "socket", ".", "/dev/null"] {
            answers += &format!("{name}: {}\n", read(&at(name)));
        }
        insta::assert_snapshot!(answers, @"
        file: 12345
        link: 12345
        dangling: No such file or directory (os error 2)
        fifo: it is a Fifo, not a regular file
        socket: it is a Socket, not a regular file
        .: it is a Directory, not a regular file
        /dev/null: it is a CharDevice, not a regular file
        ");
    }

    #[test]
    fn read_limit_is_exact_even_for_files_of_unknown_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_file(&path, 5).unwrap(), b"12345");
        assert!(matches!(read_file(&path, 4), Err(ReadError::TooLarge { limit_bytes: 4 })));
        // Its size reads as zero, like that of a file that grows after the stat.
        assert!(matches!(read_file(Path::new("/proc/self/mountinfo"), 10), Err(ReadError::TooLarge { .. })));
    }

    #[test]
    fn entries_come_in_order_with_their_own_kind() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("b"), "").unwrap();
        symlink("b", dir.path().join("a")).unwrap();
        fs::create_dir(dir.path().join("c")).unwrap();
        fifo(&dir.path().join("d"));
        let entries: Vec<_> = list_dir(dir.path()).unwrap().into_iter().map(|e| (e.name, e.kind)).collect();
        let expected =
            [("a", FileKind::Symlink), ("b", FileKind::File), ("c", FileKind::Directory), ("d", FileKind::Fifo)];
        assert_eq!(entries, expected.map(|(name, kind)| (name.to_owned(), kind)));
        assert_eq!(file_kind(&dir.path().join("a")).unwrap(), Some(FileKind::File));
        assert_eq!(file_kind(&dir.path().join("e")).unwrap(), None);
    }

    #[test]
    fn directory_goes_with_our_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volume");
        let left = || list_dir(&path).unwrap().into_iter().map(|entry| entry.name).collect::<Vec<_>>();
        remove_dir(&path, &[]).unwrap();
        for foreign in ["data", "data.json"] {
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("data.json"), "{}").unwrap();
            fs::write(path.join(".rubelet-1-2.tmp"), "{").unwrap();
            // A directory of that name is not our file.
            let is_dir = foreign == "data.json";
            if is_dir {
                fs::remove_file(path.join(foreign)).unwrap();
                fs::create_dir(path.join(foreign)).unwrap();
            } else {
                fs::write(path.join(foreign), "of a user").unwrap();
            }
            let before = left();
            let error = remove_dir(&path, &["data.json"]).unwrap_err();
            assert_eq!((error.kind(), left()), (io::ErrorKind::DirectoryNotEmpty, before));
            if is_dir { fs::remove_dir(path.join(foreign)) } else { fs::remove_file(path.join(foreign)) }.unwrap();
            remove_dir(&path, &["data.json"]).unwrap();
            assert!(!path.exists());
        }
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        remove_dir(&file, &[]).unwrap_err();
    }

    #[test]
    fn directory_mode_ignores_umask_and_keeps_setgid() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x/y");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        make_dir(&path, 0o777).unwrap();
        assert_eq!(mode(&path), 0o777);
        share_dir(&path, 1234).unwrap();
        assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), (0o2777, 1234));
        make_dir(&path, 0o777).unwrap();
        assert_eq!(mode(&path), 0o2777);
        make_dir(&path, 0o750).unwrap();
        assert_eq!(mode(&path), 0o750);
    }

    #[test]
    fn files_and_links_are_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        write_file(&file, b"old", 0o600).unwrap();
        let before = File::open(&file).unwrap();
        write_durably(&file, b"new", 0o666).unwrap();
        let mut seen = String::new();
        (&before).read_to_string(&mut seen).unwrap();
        assert_eq!((seen.as_str(), fs::read_to_string(&file).unwrap().as_str()), ("old", "new"));
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o666);
        make_link(Path::new("nowhere"), &link).unwrap();
        make_link(Path::new("file"), &link).unwrap();
        assert_eq!(read_link(&link).unwrap(), Some(PathBuf::from("file")));
        assert_eq!((read_link(&file).unwrap(), read_link(&dir.path().join("no")).unwrap()), (None, None));
        fs::create_dir(dir.path().join("dir")).unwrap();
        write_file(&dir.path().join("dir"), b"x", 0o600).unwrap_err();
        make_file(&file, 0o600).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        let names: Vec<_> = list_dir(dir.path()).unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["dir", "file", "link"]);
        remove_file(&link).unwrap();
        remove_file(&link).unwrap();
    }

    #[test]
    fn open_below_follows_no_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("pod/app")).unwrap();
        fs::write(at("secret"), "s").unwrap();
        fs::write(at("pod/app/0.log"), "line").unwrap();
        symlink("0.log", at("pod/app/1.log")).unwrap();
        symlink("app", at("pod/other")).unwrap();
        fifo(&at("pod/app/2.log"));
        let mut content = String::new();
        open_beneath(&at("pod"), Path::new("app/0.log")).unwrap().read_to_string(&mut content).unwrap();
        assert_eq!(content, "line");
        for hostile in
            ["app/1.log", "other/0.log", "../secret", "app/../../secret", "/etc/hostname", "app/2.log", "app"]
        {
            assert!(open_beneath(&at("pod"), Path::new(hostile)).is_err(), "{hostile}");
        }
    }
}
