//! Finds the device of a path without touching another device.
//!
//! Owns: a walk from `/` that stops where the path enters another mount, and a copy of the mount table. Every step may hang on
//! the device it is on, so the caller makes it on a thread of that device.
//! Never: decides what is opened. A link or mount that changes afterwards only makes a call count for the wrong device.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::{OsStr, OsString},
    io,
    os::{fd::OwnedFd, unix::ffi::OsStringExt},
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};

use super::{Device, lock};
use crate::{
    fs::resolve,
    mount::{Mount, mount_table},
};

/// The kernel's limit of links in one path.
const MAX_LINKS: u32 = 40;

/// Where a walk stands.
#[derive(Debug)]
pub(super) struct Walk {
    path: PathBuf,
    /// Without links; the next steps are made from here.
    reached: PathBuf,
    /// Of the mount that holds `reached`.
    mount_point: PathBuf,
    /// `None` before the first step, and after the walk entered another mount.
    dir: Option<OwnedFd>,
    rest: VecDeque<OsString>,
    links: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Walked {
    /// The rest of the path is on the device of `reached`, or does not exist.
    Arrived,
    /// `reached` is on another device than before.
    Crossed,
}

impl Walk {
    pub(super) fn new(path: &Path) -> Self {
        let rest = names(path).collect();
        let root = PathBuf::from("/");
        Walk { path: path.to_owned(), reached: root.clone(), mount_point: root, dir: None, rest, links: 0 }
    }

    /// Walks on the device of `reached` as far as it goes.
    pub(super) fn advance(&mut self, mounts: &Mounts) -> io::Result<Walked> {
        let is_at_start = self.dir.is_none() && self.reached == Path::new("/") && self.links == 0;
        if is_at_start && stays_on_root(&self.path) {
            return Ok(Walked::Arrived);
        }
        let device = mounts.at(self)?.device();
        while let Some(name) = self.rest.pop_front() {
            match self.step(&name) {
                // What the path leads to does not exist, or cannot be seen: the call itself will tell.
                Err(_) => return Ok(Walked::Arrived),
                Ok(Entered::SameMount) => {}
                Ok(Entered::AnotherMount) => {
                    if mounts.at(self)?.device() != device {
                        return Ok(Walked::Crossed);
                    }
                }
            }
        }
        Ok(Walked::Arrived)
    }

    fn step(&mut self, name: &OsStr) -> rustix::io::Result<Entered> {
        if self.dir.is_none() {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.dir = Some(rustix::fs::openat(CWD, &self.reached, flags, Mode::empty())?);
        }
        let dir = self.dir.as_ref().ok_or(Errno::BADF)?;
        let found = match resolve::open(dir, name, OFlags::PATH | OFlags::NOFOLLOW, ResolveFlags::NO_XDEV) {
            Err(Errno::XDEV) => {
                self.go(name);
                self.dir = None;
                // Upwards it is the mount of a directory above; the table has it.
                self.mount_point.clone_from(&self.reached);
                return Ok(Entered::AnotherMount);
            }
            found => found?,
        };
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::Symlink {
            self.go(name);
            self.dir = Some(found);
            return Ok(Entered::SameMount);
        }
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Errno::LOOP);
        }
        let target = PathBuf::from(OsString::from_vec(rustix::fs::readlinkat(&found, "", Vec::new())?.into_bytes()));
        for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
            self.rest.push_front(name);
        }
        if target.is_absolute() {
            self.reached = PathBuf::from("/");
            self.mount_point = PathBuf::from("/");
            self.dir = None;
            return Ok(Entered::AnotherMount);
        }
        Ok(Entered::SameMount)
    }

    fn go(&mut self, name: &OsStr) {
        if name == ".." {
            self.reached.pop();
        } else {
            self.reached.push(name);
        }
    }
}

enum Entered {
    SameMount,
    /// Perhaps of the same device.
    AnotherMount,
}

/// Most paths do; one call tells.
fn stays_on_root(path: &Path) -> bool {
    !matches!(resolve::open(CWD, path, OFlags::PATH, ResolveFlags::NO_XDEV), Err(Errno::XDEV))
}

fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

/// A copy of the mount table, by mount point. It is read again only when a mount is not in it, because the table of a full
/// node has thousands of lines; so it may show an earlier device of a mount point.
#[derive(Debug, Default)]
pub(super) struct Mounts(Mutex<BTreeMap<PathBuf, Arc<Mount>>>);

impl Mounts {
    /// The mount that the walk has reached.
    pub(super) fn at(&self, walk: &Walk) -> io::Result<Arc<Mount>> {
        let known = lock(&self.0).get(&walk.mount_point).cloned();
        known.map_or_else(|| self.read(walk), Ok)
    }

    /// The same, from the kernel's table of now.
    pub(super) fn read(&self, walk: &Walk) -> io::Result<Arc<Mount>> {
        // Of two mounts on one point the table lists the upper one last.
        let table = mount_table()?.into_iter().map(|mount| (mount.point.clone(), Arc::new(mount))).collect();
        let mut known = lock(&self.0);
        *known = table;
        let nearest = walk.mount_point.ancestors().find_map(|path| known.get(path)).cloned();
        nearest.ok_or_else(|| io::Error::other("the mount table has no line for /"))
    }
}

impl Mount {
    pub(super) fn device(&self) -> Device {
        Device(self.major, self.minor)
    }
}
