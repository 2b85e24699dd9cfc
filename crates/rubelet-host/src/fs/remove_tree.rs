//! Removes a tree with hostile content.
//!
//! Owns: a removal that never leaves the tree. Every step goes from an open directory to a name in it, and the kernel itself
//! refuses to traverse a link or another mount; so concurrent links, renames and mounts can at worst make the
//! removal fail. Depth costs neither stack nor descriptors: deep levels are moved to the top first.
//! Never: follows a link, crosses a mount, recurses.

use std::{
    ffi::{CStr, CString, OsStr},
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, IFlags, Mode, OFlags, RenameFlags, ResolveFlags},
    io::Errno,
};

use super::resolve;
use crate::mount;

/// Maximum of open directories; a level deeper is moved to the top of the tree.
const MAX_OPEN: usize = 16;
/// How often a directory that is being refilled is emptied before it is an error.
const MAX_PASSES: u32 = 64;

/// The maximum of a name (`NAME_MAX`), which the combined names of a pod can exceed.
const MAX_NAME_BYTES: usize = 255;

/// See `Host::remove_tree`. `go_on` is asked before every step; its error ends the removal.
pub fn remove_tree(path: &Path, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} has no name to remove", path.display())));
    };
    if name.len() > MAX_NAME_BYTES {
        return Ok(());
    }
    // Checked first, so that a tree with a mount in it stays complete instead of half removed.
    if let Some(point) = mount::mounts_below(path)?.first() {
        let message = format!("{} is still mounted", point.display());
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
    }
    let name = CString::new(name.as_bytes())?;
    let parent =
        match rustix::fs::openat(CWD, parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(parent) => parent,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
    let Some(top) = enter(parent.as_fd(), &name)? else { return Ok(()) };
    Removal { stack: vec![top], parent, moved: 0, moved_before_pass: 0, go_on }.run()
}

struct Removal<'a> {
    /// From the top of the tree to the current directory.
    stack: Vec<Level>,
    /// The directory that holds the tree.
    parent: OwnedFd,
    /// Directories moved to the top so far.
    moved: u64,
    moved_before_pass: u64,
    go_on: &'a dyn Fn() -> io::Result<()>,
}

struct Level {
    dir: Dir,
    /// In the level above.
    name: CString,
    passes: u32,
}

impl Removal<'_> {
    fn run(mut self) -> io::Result<()> {
        while let Some(level) = self.stack.last_mut() {
            (self.go_on)()?;
            match level.dir.read() {
                Some(Ok(entry)) => self.remove_entry(entry.file_name(), entry.file_type())?,
                Some(Err(errno)) => return Err(errno.into()),
                None => self.leave()?,
            }
        }
        Ok(())
    }

    fn remove_entry(&mut self, name: &CStr, file_type: FileType) -> io::Result<()> {
        if matches!(name.to_bytes(), b"." | b"..") {
            return Ok(());
        }
        let here = self.stack.last().expect("an entry was read from it").dir.fd()?;
        // Most entries are files; unlinking a directory fails recognisably.
        if file_type != FileType::Directory {
            match unlink(here, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {}
                done => return done.map_err(|errno| failed(name, errno)),
            }
        }
        if self.stack.len() >= MAX_OPEN && self.move_to_top(name)? == Moved::Yes {
            return Ok(());
        }
        let here = self.stack.last().expect("it is still there").dir.fd()?;
        if let Some(level) = enter(here, name)? {
            self.stack.push(level);
        }
        Ok(())
    }

    /// If the file system refuses (another project quota), the caller descends as long as descriptors last.
    fn move_to_top(&mut self, name: &CStr) -> io::Result<Moved> {
        let here = self.stack.last().expect("the caller is in it").dir.fd()?;
        let top = self.stack.first().expect("as above").dir.fd()?;
        loop {
            self.moved += 1;
            let free = format!(".rubelet-removing-{}", self.moved);
            match rustix::fs::renameat_with(here, name, top, &*free, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(Moved::Yes),
                // The tree may contain this name, or an earlier removal was interrupted.
                Err(Errno::EXIST) => {}
                Err(_) => return Ok(Moved::No),
            }
        }
    }

    /// At the end of the directory: remove it, or read it again.
    fn leave(&mut self) -> io::Result<()> {
        let mut level = self.stack.pop().expect("it was just read");
        let above = match self.stack.last() {
            Some(above) => above.dir.fd()?,
            None => self.parent.as_fd(),
        };
        match unlink(above, &level.name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            done => return done.map_err(|errno| failed(&level.name, errno)),
        }
        // A pass that found directories moved up by us does not count as a refill.
        if self.moved == self.moved_before_pass {
            level.passes += 1;
        }
        self.moved_before_pass = self.moved;
        if level.passes > MAX_PASSES {
            return Err(failed(&level.name, Errno::NOTEMPTY));
        }
        level.dir.rewind();
        self.stack.push(level);
        Ok(())
    }
}

#[derive(PartialEq, Eq)]
enum Moved {
    Yes,
    No,
}

/// Opens a directory to be emptied. `None` if it is gone, or was not a directory and has been removed.
fn enter(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<Level>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    match resolve::open(parent, name, flags, resolve) {
        Ok(dir) => Ok(Some(Level { dir: Dir::new(dir)?, name: name.to_owned(), passes: 0 })),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            unlink(parent, name, AtFlags::empty()).map_err(|errno| failed(name, errno))?;
            Ok(None)
        }
        Err(Errno::XDEV) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("{} is still mounted", shown(name))))
        }
        Err(errno) => Err(failed(name, errno)),
    }
}

/// Removes one name; a missing one is no error.
fn unlink(parent: BorrowedFd<'_>, name: &CStr, flags: AtFlags) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(parent, name, flags) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::PERM) => {
            // A container may have made the file or its directory immutable.
            make_mutable(parent)?;
            if let Some(entry) = open_plain(parent, name) {
                make_mutable(entry.as_fd())?;
            }
            rustix::fs::unlinkat(parent, name, flags)
        }
        done => done,
    }
}

/// Only files that have flags and can be opened without side effects.
fn open_plain(parent: BorrowedFd<'_>, name: &CStr) -> Option<File> {
    let found = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    if !matches!(FileType::from_raw_mode(found.st_mode), FileType::RegularFile | FileType::Directory) {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    resolve::open(parent, name, flags, resolve).ok().map(File::from)
}

fn make_mutable(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let stubborn = IFlags::IMMUTABLE | IFlags::APPEND;
    match rustix::fs::ioctl_getflags(file) {
        Ok(flags) if flags.intersects(stubborn) => rustix::fs::ioctl_setflags(file, flags.difference(stubborn)),
        // The file system has no such flags: the refusal had another reason, which the next try reports.
        Ok(_) | Err(_) => Ok(()),
    }
}

fn failed(name: &CStr, errno: Errno) -> io::Error {
    let error = io::Error::from(errno);
    io::Error::new(error.kind(), format!("remove {}: {error}", shown(name)))
}

fn shown(name: &CStr) -> String {
    format!("{:?}", OsStr::from_bytes(name.to_bytes()))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
        path::PathBuf,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use super::*;
    use crate::testing::{MountGuard, need_root};

    fn remove(path: &Path) -> io::Result<()> {
        remove_tree(path, &|| Ok(()))
    }

    /// A directory to remove beside one that must survive.
    struct TreeFixture {
        dir: tempfile::TempDir,
    }

    impl TreeFixture {
        fn new() -> Self {
            TreeFixture { dir: tempfile::tempdir().unwrap() }.filled()
        }

        fn filled(self) -> Self {
            fs::create_dir(self.tree()).unwrap();
            fs::create_dir(self.precious()).unwrap();
            fs::write(self.precious().join("file"), "data").unwrap();
            self
        }

        fn tree(&self) -> PathBuf {
            self.dir.path().join("tree")
        }

        fn precious(&self) -> PathBuf {
            self.dir.path().join("precious")
        }

        fn assert_only_the_tree_is_gone(&self) {
            assert!(fs::symlink_metadata(self.tree()).is_err(), "the tree is still there");
            assert_eq!(fs::read_to_string(self.precious().join("file")).unwrap(), "data");
        }
    }

    #[test]
    fn tree_removal_removes_every_file_type_and_nothing_outside() {
        let fixture = TreeFixture::new();
        let tree = fixture.tree();
        fs::create_dir_all(tree.join("a/b/c")).unwrap();
        symlink("/", tree.join("root")).unwrap();
        symlink(fixture.precious(), tree.join("a/link")).unwrap();
        symlink("../../precious/file", tree.join("a/b/file")).unwrap();
        symlink("loop", tree.join("loop")).unwrap();
        rustix::fs::mknodat(CWD, tree.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
        fs::hard_link(fixture.precious().join("file"), tree.join("hard")).unwrap();
        fs::write(tree.join(OsStr::from_bytes(b"\xff\n \x1b[31m")), "").unwrap();
        fs::write(tree.join("x".repeat(255)), "").unwrap();
        fs::set_permissions(tree.join("a/b"), fs::Permissions::from_mode(0o000)).unwrap();
        remove(&tree).unwrap();
        fixture.assert_only_the_tree_is_gone();
        remove(&tree).unwrap();
    }

    #[test]
    fn overlong_name_counts_as_removed() {
        let fixture = TreeFixture::new();
        fs::write(fixture.tree().join("x".repeat(MAX_NAME_BYTES)), "").unwrap();
        let name = "x".repeat(MAX_NAME_BYTES + 1);
        assert_eq!(fs::write(fixture.tree().join(&name), "").unwrap_err().kind(), io::ErrorKind::InvalidFilename);
        remove(&fixture.tree().join(&name)).unwrap();
    }

    #[test]
    fn a_link_in_place_of_the_tree_is_removed_itself() {
        let fixture = TreeFixture::new();
        fs::remove_dir(fixture.tree()).unwrap();
        symlink(fixture.precious(), fixture.tree()).unwrap();
        remove(&fixture.tree()).unwrap();
        fixture.assert_only_the_tree_is_gone();
    }

    #[test]
    fn tree_deeper_than_path_and_descriptor_limits_is_removed() {
        need_root();
        // In memory, because creating this many directories on a disk takes a minute.
        let disk = tempfile::tempdir().unwrap();
        let _guard = MountGuard(disk.path().to_owned());
        mount::Mounter::default().mount_tmpfs(disk.path(), None, 0o700).unwrap();
        let fixture = TreeFixture { dir: tempfile::tempdir_in(disk.path()).unwrap() }.filled();
        let name = "d".repeat(100);
        let mut here = rustix::fs::open(fixture.tree(), OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        for depth in 0..30_000 {
            rustix::fs::mkdirat(&here, &*name, Mode::from_raw_mode(0o700)).unwrap();
            if depth % 1000 == 0 {
                rustix::fs::symlinkat("/", &here, "root").unwrap();
            }
            here = rustix::fs::openat(&here, &*name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        }
        drop(here);
        // A name the removal itself would use.
        fs::create_dir(fixture.tree().join(".rubelet-removing-1")).unwrap();
        remove(&fixture.tree()).unwrap();
        fixture.assert_only_the_tree_is_gone();
    }

    #[test]
    fn a_wide_directory_is_removed() {
        let fixture = TreeFixture::new();
        for number in 0..5_000 {
            fs::File::create(fixture.tree().join(number.to_string())).unwrap();
        }
        remove(&fixture.tree()).unwrap();
        fixture.assert_only_the_tree_is_gone();
    }

    #[test]
    fn tree_with_bind_mount_of_same_device_is_not_removed() {
        need_root();
        let fixture = TreeFixture::new();
        let inside = fixture.tree().join("z/mounted");
        fs::create_dir_all(&inside).unwrap();
        fs::write(fixture.tree().join("a"), "").unwrap();
        let guard = MountGuard(inside.clone());
        rustix::mount::mount_bind(fixture.precious(), &inside).unwrap();
        let error = remove(&fixture.tree()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert!(error.to_string().ends_with("/tree/z/mounted is still mounted"), "{error}");
        assert!(fixture.tree().join("a").exists());
        // Without the mount table the kernel refuses: this covers a mount added in between.
        let parent = fs::File::open(fixture.tree().join("z")).unwrap();
        let error = enter(parent.as_fd(), c"mounted").err().expect("a mount is not entered");
        assert_eq!(error.to_string(), "\"mounted\" is still mounted");
        drop(guard);
        remove(&fixture.tree()).unwrap();
        fixture.assert_only_the_tree_is_gone();
    }

    #[test]
    fn immutable_files_and_directories_are_removed() {
        need_root();
        let fixture = TreeFixture::new();
        let dir = fixture.tree().join("dir");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        for (path, flag) in [(dir.join("file"), IFlags::IMMUTABLE), (dir, IFlags::APPEND)] {
            let file = fs::File::open(path).unwrap();
            match rustix::fs::ioctl_getflags(&file) {
                Ok(flags) => rustix::fs::ioctl_setflags(&file, flags | flag).unwrap(),
                Err(errno) => panic!("the temporary directory's file system has no such flags: {errno}"),
            }
        }
        remove(&fixture.tree()).unwrap();
        fixture.assert_only_the_tree_is_gone();
    }

    #[test]
    fn tree_removal_is_safe_against_directories_swapped_for_links() {
        let fixture = TreeFixture::new();
        let tree = fixture.tree();
        let over = Arc::new(AtomicBool::new(false));
        let racer = std::thread::spawn({
            let (tree, precious, over) = (tree.clone(), fixture.precious(), over.clone());
            move || {
                while !over.load(Ordering::Relaxed) {
                    let _ = fs::create_dir_all(tree.join("victim/inner"));
                    let _ = fs::write(tree.join("victim/inner/file"), "");
                    let _ = symlink(&precious, tree.join("trap"));
                    let (from, to) = (tree.join("trap"), tree.join("victim"));
                    let _ = rustix::fs::renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE);
                    let _ = fs::remove_file(&to);
                }
            }
        });
        for _ in 0..100 {
            // It may fail because the directory never becomes empty; it must not reach outside.
            let _ = remove(&tree);
            let _ = fs::create_dir(&tree);
        }
        over.store(true, Ordering::Relaxed);
        racer.join().unwrap();
        remove(&tree).unwrap();
        fixture.assert_only_the_tree_is_gone();
    }

    #[test]
    fn abandoned_removal_stops() {
        let fixture = TreeFixture::new();
        fs::write(fixture.tree().join("file"), "").unwrap();
        let error = remove_tree(&fixture.tree(), &|| Err(io::ErrorKind::TimedOut.into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(fixture.tree().join("file").exists());
    }
}
