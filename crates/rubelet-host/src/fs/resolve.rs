//! Opens a path without leaving a directory.
//!
//! Owns: the one call that resolves untrusted paths, and its retry. Never: decides what a path may cross.

use std::os::fd::{AsFd, OwnedFd};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags},
    io::Errno,
    path::Arg,
};

/// The kernel returns EAGAIN for `..` while anything on the node is renamed or mounted. After
/// too many retries the path is refused.
const MAX_TRIES: u32 = 128;

pub(crate) fn open(
    dir: impl AsFd,
    path: impl Arg + Copy,
    flags: OFlags,
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let dir = dir.as_fd();
    let open = || rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
    for _ in 1..MAX_TRIES {
        match open() {
            Err(Errno::AGAIN) => {}
            found => return found,
        }
    }
    open()
}
