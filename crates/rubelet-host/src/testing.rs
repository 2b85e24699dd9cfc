//! What the tests of this crate share.

use std::path::PathBuf;

use rustix::mount::UnmountFlags;

/// Fails rather than skips: a test that did not run proves nothing.
pub fn need_root() {
    assert!(rustix::process::geteuid().is_root(), "this test mounts file systems: run it as root");
}

/// Takes a mount away when the test ends, however it ends.
pub struct MountGuard(pub PathBuf);

impl Drop for MountGuard {
    fn drop(&mut self) {
        while rustix::mount::unmount(&self.0, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    }
}
