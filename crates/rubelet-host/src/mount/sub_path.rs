//! Mounts a subPath of a volume safely against concurrent changes.
//!
//! Owns: resolving the subPath without leaving the volume, creating missing directories, the bind mount. A container's
//! volume content may be hostile, and may change at any time: the result is held by a descriptor, and that is mounted.
//! Never: follows a link out of the volume.
//! Upstream: `pkg/volume/util/subpath`.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
    mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags},
};

use super::{Mounter, resolved, top_mount};
use crate::fs::resolve;

impl Mounter {
    /// Mounts `sub_path` of the volume at `target`; it is no error if it is mounted there already.
    pub fn bind_sub_path(&self, volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()> {
        // First, because it walks the user's volume.
        let part = find_or_make(volume, sub_path)?;
        let _changing = self.change(target)?;
        let found = rustix::fs::fstat(&part)?;
        while let Some(target) = resolved(target)?.filter(|target| matches!(top_mount(target), Ok(Some(_)))) {
            let mounted = fs::symlink_metadata(&target)?;
            if (mounted.dev(), mounted.ino()) == (found.st_dev, found.st_ino) {
                return Ok(());
            }
            rustix::mount::unmount(&target, UnmountFlags::NOFOLLOW)?;
        }
        make_target(target, is_dir(&found))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = rustix::mount::open_tree(&part, "", flags)?;
        Ok(rustix::mount::move_mount(&tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
    }
}

fn is_dir(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::Directory
}

/// Missing directories get the mode of the volume itself.
fn find_or_make(volume: &Path, sub_path: &Path) -> io::Result<OwnedFd> {
    let root = rustix::fs::open(volume, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    match open_within(root.as_fd(), sub_path) {
        Err(Errno::NOENT) => {}
        found => return Ok(found?),
    }
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&root)?.st_mode);
    let mut dir = root.try_clone()?;
    let mut reached = PathBuf::new();
    for part in sub_path.components() {
        let Component::Normal(name) = part else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a sub path goes down only"));
        };
        reached.push(name);
        dir = match open_within(root.as_fd(), &reached) {
            Err(Errno::NOENT) => make_dir(dir.as_fd(), Path::new(name), mode)?,
            found => found?,
        };
    }
    Ok(dir)
}

/// Links are followed inside the volume: files from config maps are such links.
fn open_within(root: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    resolve::open(root, path, OFlags::PATH, resolve)
}

fn make_dir(parent: BorrowedFd<'_>, name: &Path, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let open = || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(parent, name, flags, Mode::empty())
    };
    match rustix::fs::mkdirat(parent, name, mode) {
        Ok(()) => {}
        // Created by another process meanwhile; a link in its place is refused.
        Err(Errno::EXIST) => return open(),
        Err(errno) => return Err(errno),
    }
    let made = open()?;
    rustix::fs::fchmod(&made, mode)?;
    Ok(made)
}

/// A mount point of the same kind, in a directory of the agent.
fn make_target(target: &Path, is_dir: bool) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(parent)?;
    }
    match fs::symlink_metadata(target) {
        Ok(found) if found.is_dir() == is_dir => return Ok(()),
        Ok(found) if found.is_dir() => fs::remove_dir(target)?,
        Ok(_) => fs::remove_file(target)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if is_dir {
        DirBuilder::new().mode(0o750).create(target)
    } else {
        OpenOptions::new().write(true).create_new(true).mode(0o640).open(target).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use tempfile::TempDir;

    use super::*;
    use crate::testing::{MountGuard, need_root};

    /// A volume beside an unrelated directory.
    struct SubPathFixture {
        dir: TempDir,
        _guard: MountGuard,
    }

    impl SubPathFixture {
        fn new() -> Self {
            need_root();
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("volume")).unwrap();
            fs::create_dir(dir.path().join("secret")).unwrap();
            fs::write(dir.path().join("secret/key"), "secret").unwrap();
            let _guard = MountGuard(dir.path().join("subs/app/0"));
            SubPathFixture { dir, _guard }
        }

        fn volume(&self, path: &str) -> PathBuf {
            self.dir.path().join("volume").join(path)
        }

        fn target(&self) -> PathBuf {
            self.dir.path().join("subs/app/0")
        }

        fn bind(&self, sub_path: &str) -> io::Result<()> {
            Mounter::default().bind_sub_path(&self.volume(""), Path::new(sub_path), &self.target())
        }
    }

    #[test]
    fn sub_path_is_mounted_once_and_missing_directories_created() {
        let place = SubPathFixture::new();
        fs::set_permissions(place.volume(""), fs::Permissions::from_mode(0o2775)).unwrap();
        for _ in 0..2 {
            place.bind("a/b").unwrap();
        }
        assert_eq!(super::super::mounts_below(&place.target()).unwrap().len(), 1);
        for path in ["a", "a/b"] {
            assert_eq!(fs::metadata(place.volume(path)).unwrap().mode() & 0o7777, 0o2775, "{path}");
        }
        fs::write(place.target().join("file"), "from below").unwrap();
        assert_eq!(fs::read_to_string(place.volume("a/b/file")).unwrap(), "from below");
    }

    #[test]
    fn replaced_sub_path_file_behind_links_is_remounted() {
        let place = SubPathFixture::new();
        for generation in ["..1", "..2"] {
            fs::create_dir(place.volume(generation)).unwrap();
            fs::write(place.volume(generation).join("key"), generation).unwrap();
        }
        symlink("..1", place.volume("..data")).unwrap();
        symlink("..data/key", place.volume("key")).unwrap();
        place.bind("key").unwrap();
        assert_eq!(fs::read_to_string(place.target()).unwrap(), "..1");
        fs::remove_file(place.volume("..data")).unwrap();
        symlink("..2", place.volume("..data")).unwrap();
        assert_eq!(fs::read_to_string(place.target()).unwrap(), "..1");
        place.bind("key").unwrap();
        assert_eq!(fs::read_to_string(place.target()).unwrap(), "..2");
        assert_eq!(super::super::mounts_below(&place.target()).unwrap().len(), 1);
        // A directory replaces the file.
        place.bind("..1").unwrap();
        assert_eq!(fs::read_to_string(place.target().join("key")).unwrap(), "..1");
    }

    #[test]
    fn no_link_leads_out_of_the_volume_and_nothing_is_made_there() {
        let place = SubPathFixture::new();
        let secret = place.dir.path().join("secret");
        symlink(&secret, place.volume("absolute")).unwrap();
        symlink("../secret", place.volume("relative")).unwrap();
        symlink("/proc/self/root", place.volume("magic")).unwrap();
        symlink("nowhere", place.volume("dangling")).unwrap();
        symlink("loop", place.volume("loop")).unwrap();
        for path in [
            "absolute",
            "absolute/key",
            "absolute/new",
            "relative",
            "relative/new/deep",
            "magic/etc",
            "dangling",
            "dangling/new",
            "loop",
            "../secret",
            "new/../../secret",
            "/",
        ] {
            place.bind(path).unwrap_err();
            assert_eq!(super::super::mounts_below(&place.target()).unwrap(), Vec::<PathBuf>::new(), "{path}");
        }
        assert_eq!(fs::read_dir(&secret).unwrap().count(), 1);
    }

    /// A container that keeps exchanging a directory for a link gets the directory or nothing.
    #[test]
    fn sub_path_swapped_for_link_during_mount_exposes_nothing_outside() {
        let place = SubPathFixture::new();
        fs::create_dir(place.volume("real")).unwrap();
        symlink(place.dir.path().join("secret"), place.volume("link")).unwrap();
        fs::rename(place.volume("real"), place.volume("used")).unwrap();
        let exchanger = exchange(place.volume("used"), place.volume("link"), u64::MAX);
        for _ in 0..300 {
            if place.bind("used/key").is_ok() || place.bind("used").is_ok() {
                let shown = place.target();
                let seen = if shown.is_dir() { fs::read(shown.join("key")) } else { fs::read(shown) };
                assert!(seen.map_or(true, |content| content != b"secret"));
            }
        }
        exchanger.stop();
        assert_eq!(fs::read_dir(place.dir.path().join("secret")).unwrap().count(), 1);
    }

    /// Exchanges two paths until it is stopped, or has done so this often.
    struct Exchanger {
        stop: std::sync::mpsc::Sender<()>,
        thread: std::thread::JoinHandle<()>,
    }

    impl Exchanger {
        fn stop(self) {
            drop(self.stop);
            self.thread.join().unwrap();
        }
    }

    fn exchange(one: PathBuf, other: PathBuf, rounds: u64) -> Exchanger {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            for _ in 0..rounds {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, &one, CWD, &other, flags).unwrap();
                if stopped.try_recv() != Err(std::sync::mpsc::TryRecvError::Empty) {
                    break;
                }
            }
        });
        Exchanger { stop, thread }
    }

    /// Of each racer; a run by hand sets more.
    fn race_rounds() -> u64 {
        std::env::var("SUB_PATH_RACE_ROUNDS").map_or(20_000, |rounds| rounds.parse().unwrap())
    }

    /// The volume is a file system of its own: whatever is reached on another one lies outside.
    #[test]
    fn racing_sub_path_never_leads_out_of_the_volume() {
        let place = SubPathFixture::new();
        let volume = place.volume("");
        let _guard = MountGuard(volume.clone());
        rustix::mount::mount("tmpfs", &volume, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
        let device = fs::metadata(&volume).unwrap().dev();
        let made_name = format!("made-by-racer-{}", std::process::id());
        fs::create_dir(volume.join("used")).unwrap();
        let mut counts = (0_u64, 0_u64);
        // To the root of the node by an absolute and by a relative link, to its configuration, and by a link of the kernel.
        for target in ["/", "../../../../../../../..", "/etc", "/proc/self/root"] {
            let link = volume.join("link");
            symlink(target, &link).unwrap();
            let exchanger = exchange(volume.join("used"), link.clone(), race_rounds());
            while !exchanger.thread.is_finished() {
                for path in ["used".to_owned(), "used/etc/hostname".to_owned(), format!("used/{made_name}/deep")] {
                    if let Ok(part) = find_or_make(&volume, Path::new(&path)) {
                        counts.0 += 1;
                        assert_eq!(rustix::fs::fstat(&part).unwrap().st_dev, device, "{path} by a link to {target}");
                    }
                }
                if place.bind(&format!("used/{made_name}")).is_ok() {
                    counts.1 += 1;
                    assert_eq!(fs::metadata(place.target()).unwrap().dev(), device, "mounted by a link to {target}");
                }
            }
            exchanger.thread.join().unwrap();
            let links = ["used", "link"].map(|name| volume.join(name)).into_iter().filter(|path| path.is_symlink());
            links.for_each(|path| fs::remove_file(path).unwrap());
            if !volume.join("used").exists() {
                fs::rename(link, volume.join("used")).unwrap();
            }
        }
        for outside in ["/", "/etc"] {
            assert!(!Path::new(outside).join(&made_name).exists(), "made in {outside}");
        }
        let (resolved, mounted) = counts;
        println!("resolved {resolved} times, mounted {mounted} times");
        assert!(resolved > 0 && mounted > 0, "the race was never won by the directory: {resolved}, {mounted}");
    }
}
