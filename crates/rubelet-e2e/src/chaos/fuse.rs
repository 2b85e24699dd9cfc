//! A file system that hangs: the smallest FUSE server, which agrees on the protocol and then never answers.
//!
//! Owns: the mount and its end. Requests stay unread, so whoever waits for one can be killed, as with a lost NFS server.
//! If this process dies, the kernel ends the connection, and every access fails instead of hanging.

use std::{
    ffi::CString,
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Of `include/uapi/linux/fuse.h`.
const INIT: u32 = 26;
const IN_HEADER: usize = 40;
const OUT_HEADER: u32 = 16;
const INIT_OUT: u32 = 64;
/// At least what the kernel asks of a reader.
const READ_SIZE: usize = 1 << 17;

#[derive(Debug)]
pub struct HungMount {
    path: PathBuf,
    /// Open as long as requests hang.
    device: Option<File>,
}

impl HungMount {
    /// Hides what is in the directory `path`.
    pub fn over(path: &Path) -> anyhow::Result<Self> {
        let mut device = File::options().read(true).write(true).open("/dev/fuse").context("open /dev/fuse")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("hung", path, "fuse", flags, Some(CString::new(options)?.as_c_str()))
            .with_context(|| format!("mount a hanging file system on {}", path.display()))?;
        let agreed = agree(&mut device);
        let mounted = HungMount { path: path.to_owned(), device: Some(device) };
        agreed.map(|()| mounted)
    }

    /// The directory is what it was before; blocked requests fail.
    pub fn release(&mut self) {
        let Some(device) = self.device.take() else { return };
        // Detached first: a retry after the failure then finds the directory, not the dead mount.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        drop(device);
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        self.release();
    }
}

/// The first request of the kernel; the only one that gets a response.
fn agree(device: &mut File) -> anyhow::Result<()> {
    let mut request = vec![0; READ_SIZE];
    let length = device.read(&mut request).context("read the kernel's first FUSE request")?;
    ensure!(length >= IN_HEADER + 8, "a FUSE request of {length} bytes");
    let word = |at: usize| u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]]);
    ensure!(word(4) == INIT, "the first FUSE request is {}", word(4));
    device.write_all(&init_response(&request[8..16], word(IN_HEADER + 4))).context("answer the first FUSE request")
}

/// Version 7 and the kernel's minor version, and no features.
fn init_response(unique: &[u8], minor: u32) -> Vec<u8> {
    let mut response = Vec::new();
    for word in [OUT_HEADER + INIT_OUT, 0] {
        response.extend(word.to_ne_bytes());
    }
    response.extend(unique);
    // major, minor, max_readahead, flags, max_background and congestion_threshold, max_write
    for word in [7, minor, 0, 0, 0, 4096] {
        response.extend(word.to_ne_bytes());
    }
    response.resize((OUT_HEADER + INIT_OUT) as usize, 0);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_response_has_the_length_it_states() {
        let response = init_response(&7_u64.to_ne_bytes(), 39);
        assert_eq!(response.len(), 80);
        assert_eq!(response[..4], 80_u32.to_ne_bytes());
        assert_eq!(response[8..16], 7_u64.to_ne_bytes());
        assert_eq!(response[16..24], [7_u32.to_ne_bytes(), 39_u32.to_ne_bytes()].concat());
    }
}
