//! A file system that hangs on command: a FUSE server in a thread of this process.
//!
//! Owns: the mount and its end, when requests are answered, and the files: a root directory with one file, to read only.
//! Requests that hang are unread, so whoever waits for one can be killed, as with a lost NFS server.
//! If this process dies, the kernel ends the connection, and every access fails instead of hanging.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use crate::e2e::lock;

/// The only file, in the root directory.
pub const FILE: &str = "greeting";
pub const CONTENT: &str = "hello";

/// Numbers of requests, of `include/uapi/linux/fuse.h`.
mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const ACCESS: u32 = 34;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
const INIT_OUT: usize = 64;
/// At least what the kernel asks of a reader.
const READ_SIZE: usize = 1 << 17;
/// `FOPEN_DIRECT_IO`: no read is answered from the kernel's cache.
const DIRECT_IO: u32 = 1;
const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;
/// How soon the thread sees that it should end.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

#[derive(Debug)]
pub struct FuseMount {
    path: PathBuf,
    switch: Arc<Switch>,
    /// Until it is released.
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Switch {
    /// Locked while a request is read and answered: at a change of mode none is half done.
    mode: Mutex<Mode>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Serving,
    Hanging,
    Ended,
}

impl FuseMount {
    /// Answers from now on. Hides what is in the directory `path`.
    pub fn serving(path: &Path) -> anyhow::Result<Self> {
        FuseMount::over(path, Mode::Serving)
    }

    /// Never answers, unless it is resumed. Hides what is in the directory `path`.
    pub fn hung(path: &Path) -> anyhow::Result<Self> {
        FuseMount::over(path, Mode::Hanging)
    }

    fn over(path: &Path, mode: Mode) -> anyhow::Result<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").context("open /dev/fuse")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("hung", path, "fuse", flags, Some(CString::new(options)?.as_c_str()))
            .with_context(|| format!("mount a hanging file system on {}", path.display()))?;
        let switch = Arc::new(Switch { mode: Mutex::new(mode), changed: Condvar::new() });
        let thread = start(device, Arc::clone(&switch)).inspect_err(|_| detach(path))?;
        Ok(FuseMount { path: path.to_owned(), switch, thread: Some(thread) })
    }

    /// Once this returns, no request is answered any more.
    pub fn hang(&self) {
        self.switch.turn(Mode::Hanging);
    }

    /// Answers again, first what was asked meanwhile.
    pub fn resume(&self) {
        self.switch.turn(Mode::Serving);
    }

    /// The directory is what it was before; blocked requests fail.
    pub fn release(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // Detached first: a retry after the failure then finds the directory, not the dead mount.
        detach(&self.path);
        self.switch.turn(Mode::Ended);
        // It closes the device, which ends the connection.
        let _ = thread.join();
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        self.release();
    }
}

impl Switch {
    fn turn(&self, mode: Mode) {
        *lock(&self.mode) = mode;
        self.changed.notify_one();
    }
}

fn detach(path: &Path) {
    let _ = unmount(path, UnmountFlags::DETACH);
}

fn start(mut device: File, switch: Arc<Switch>) -> anyhow::Result<JoinHandle<()>> {
    agree(&mut device)?;
    fcntl_setfl(&device, fcntl_getfl(&device)? | OFlags::NONBLOCK)?;
    Ok(thread::spawn(move || serve(device, &switch)))
}

/// The first request of the kernel.
fn agree(device: &mut File) -> anyhow::Result<()> {
    let mut request = vec![0; READ_SIZE];
    let length = device.read(&mut request).context("read the kernel's first FUSE request")?;
    let request = Request::parse(&request[..length]).with_context(|| format!("a FUSE request of {length} bytes"))?;
    ensure!(request.opcode == opcode::INIT, "the first FUSE request is {}", request.opcode);
    let minor = word(request.body, 4).context("the kernel's version is cut off")?;
    device.write_all(&request.done(init_out(minor))).context("answer the first FUSE request")
}

/// Until the mode says so, or the file system is mounted nowhere.
fn serve(mut device: File, switch: &Switch) {
    let mut request = vec![0; READ_SIZE];
    loop {
        let mode = lock(&switch.mode);
        let mode = switch.changed.wait_while(mode, |mode| *mode == Mode::Hanging);
        let mode = mode.unwrap_or_else(PoisonError::into_inner);
        if *mode == Mode::Ended {
            return;
        }
        match device.read(&mut request) {
            Ok(length) => {
                if let Some(response) = Request::parse(&request[..length]).and_then(|request| request.response()) {
                    // Whoever asked may be gone.
                    let _ = device.write_all(&response);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                drop(mode);
                let _ = poll(&mut [PollFd::new(&device, PollFlags::IN)], Some(&LOOK_EVERY));
            }
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => return,
            // Whoever asked was killed before the request was read.
            Err(_) => {}
        }
    }
}

/// `fuse_in_header`, and what follows.
#[derive(Clone, Copy, Debug)]
struct Request<'a> {
    opcode: u32,
    unique: u64,
    node: u64,
    body: &'a [u8],
}

impl<'a> Request<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let body = bytes.get(IN_HEADER..)?;
        Some(Request { opcode: word(bytes, 4)?, unique: long(bytes, 8)?, node: long(bytes, 16)?, body })
    }

    /// `None` for what the kernel expects no answer to.
    fn response(&self) -> Option<Vec<u8>> {
        let name = || self.body.split(|byte| *byte == 0).next();
        let offset = || usize::try_from(long(self.body, 8).unwrap_or_default()).unwrap_or(usize::MAX);
        Some(match self.opcode {
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
            opcode::LOOKUP if name() == Some(FILE.as_bytes()) => self.done(entry_out()),
            opcode::LOOKUP => self.failed(Errno::NOENT),
            opcode::GETATTR => self.done(attr_out(self.node)),
            opcode::OPENDIR => self.done(open_out(0)),
            opcode::READDIR => self.done(entries(offset())),
            opcode::OPEN => self.done(open_out(DIRECT_IO)),
            opcode::READ => self.done(CONTENT.as_bytes().get(offset()..).unwrap_or_default().to_vec()),
            opcode::STATFS => self.done(statfs_out()),
            opcode::ACCESS | opcode::FLUSH | opcode::RELEASE | opcode::RELEASEDIR => self.done(Vec::new()),
            _ => self.failed(Errno::NOSYS),
        })
    }

    fn done(&self, out: Vec<u8>) -> Vec<u8> {
        self.with_header(0, out)
    }

    fn failed(&self, errno: Errno) -> Vec<u8> {
        self.with_header(-errno.raw_os_error(), Vec::new())
    }

    /// `fuse_out_header`
    fn with_header(&self, error: i32, out: Vec<u8>) -> Vec<u8> {
        let length = u32::try_from(OUT_HEADER + out.len()).unwrap_or(u32::MAX);
        [length.to_ne_bytes().to_vec(), error.to_ne_bytes().to_vec(), self.unique.to_ne_bytes().to_vec(), out].concat()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn longs<const N: usize>(longs: [u64; N]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

/// `fuse_init_out`: version 7 and the kernel's minor version, and no features.
fn init_out(minor: u32) -> Vec<u8> {
    // major, minor, max_readahead, flags, max_background and congestion_threshold, max_write
    let mut out = words([7, minor, 0, 0, 0, 4096]);
    out.resize(INIT_OUT, 0);
    out
}

/// `fuse_attr`
fn attr(node: u64) -> Vec<u8> {
    let (mode, links, size) = if node == ROOT_NODE { (0o040_755, 2, 0) } else { (0o100_644, 1, CONTENT.len() as u64) };
    // ino, size, blocks, and three times
    let mut attr = longs([node, size, 1, 0, 0, 0]);
    // nanoseconds of the times, mode, nlink, uid, gid, rdev, blksize, flags
    attr.extend(words([0, 0, 0, mode, links, 0, 0, 0, 4096, 0]));
    attr
}

/// `fuse_attr_out`, valid for no time: each look at a file asks again.
fn attr_out(node: u64) -> Vec<u8> {
    [longs([0, 0]), attr(node)].concat()
}

/// `fuse_entry_out`, valid for no time.
fn entry_out() -> Vec<u8> {
    // nodeid, generation, and how long the name and its attributes are valid
    [longs([FILE_NODE, 0, 0, 0, 0]), attr(FILE_NODE)].concat()
}

/// `fuse_open_out`
fn open_out(flags: u32) -> Vec<u8> {
    // fh, open_flags, backing_id
    words([0, 0, flags, 0])
}

/// `fuse_statfs_out`
fn statfs_out() -> Vec<u8> {
    // blocks, bfree, bavail, files, ffree
    let mut out = longs([1024, 512, 512, 2, 0]);
    // bsize, namelen, frsize, padding, spare
    out.extend(words([4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0]));
    out
}

/// The root directory, as `fuse_dirent`s, from this one on.
fn entries(from: usize) -> Vec<u8> {
    // In the upper bits of a file's mode.
    const DIRECTORY: u32 = 4;
    const REGULAR: u32 = 8;
    let all = [(".", ROOT_NODE, DIRECTORY), ("..", ROOT_NODE, DIRECTORY), (FILE, FILE_NODE, REGULAR)];
    let mut out = Vec::new();
    for (number, (name, node, kind)) in (1..).zip(all).skip(from) {
        out.extend(longs([node, number]));
        out.extend(words([u32::try_from(name.len()).unwrap_or(u32::MAX), kind]));
        out.extend(name.as_bytes());
        out.resize(out.len().next_multiple_of(8), 0);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The response to a request with this body: its error, and what follows the header.
    fn answered(opcode: u32, node: u64, body: &[u8]) -> Option<(i32, Vec<u8>)> {
        let mut bytes = words([0, opcode]);
        bytes.extend(longs([7, node, 0, 0]));
        bytes.extend(body);
        let response = Request::parse(&bytes).unwrap().response()?;
        assert_eq!(word(&response, 0), Some(response.len() as u32));
        assert_eq!(long(&response, 8), Some(7));
        Some((word(&response, 4).unwrap() as i32, response[OUT_HEADER..].to_vec()))
    }

    #[test]
    fn responses_have_the_lengths_of_the_kernels_structures() {
        let lookup = format!("{FILE}\0");
        for (opcode, body, length) in [
            (opcode::LOOKUP, lookup.as_bytes(), 128),
            (opcode::GETATTR, &[0; 16], 104),
            (opcode::OPEN, &[0; 8], 16),
            (opcode::OPENDIR, &[0; 8], 16),
            (opcode::STATFS, &[], 80),
            (opcode::RELEASE, &[0; 24], 0),
            // 24 bytes and the name, to the next multiple of 8.
            (opcode::READDIR, &[0; 40], 32 + 32 + 32),
        ] {
            let (error, out) = answered(opcode, ROOT_NODE, body).unwrap();
            assert_eq!((error, out.len()), (0, length), "{opcode}");
        }
        assert_eq!(init_out(39).len(), 64);
        assert_eq!(init_out(39)[..8], words([7, 39]));
    }

    #[test]
    fn file_is_read_from_an_offset() {
        let read = |offset: u64| answered(opcode::READ, FILE_NODE, &longs([0, offset, 4096, 0, 0])).unwrap();
        assert_eq!(read(0), (0, b"hello".to_vec()));
        assert_eq!(read(3), (0, b"lo".to_vec()));
        assert_eq!(read(5), (0, Vec::new()));
        assert_eq!(read(u64::MAX), (0, Vec::new()));
    }

    #[test]
    fn directory_is_read_on_behind_its_last_entry() {
        let read = |offset: u64| answered(opcode::READDIR, ROOT_NODE, &longs([0, offset, 4096, 0, 0])).unwrap().1;
        let last = read(2);
        assert_eq!(last[..24], [longs([FILE_NODE, 3]), words([8, 8])].concat());
        assert_eq!(&last[24..], FILE.as_bytes());
        assert!(read(0).ends_with(&last));
        assert!(read(3).is_empty());
    }

    #[test]
    fn root_is_a_directory_and_the_file_has_its_size() {
        let mode_and_size = |node| {
            let (_, out) = answered(opcode::GETATTR, node, &[0; 16]).unwrap();
            let attr = &out[16..];
            (word(attr, 60).unwrap(), long(attr, 8).unwrap())
        };
        assert_eq!(mode_and_size(ROOT_NODE), (0o040_755, 0));
        assert_eq!(mode_and_size(FILE_NODE), (0o100_644, 5));
    }

    #[test]
    fn unknown_names_and_requests_fail_and_some_expect_no_response() {
        assert_eq!(answered(opcode::LOOKUP, ROOT_NODE, b"other\0"), Some((-2, Vec::new())));
        // write
        assert_eq!(answered(16, FILE_NODE, &[]), Some((-38, Vec::new())));
        for silent in [opcode::FORGET, opcode::BATCH_FORGET, opcode::INTERRUPT] {
            assert_eq!(answered(silent, FILE_NODE, &[0; 8]), None);
        }
        assert!(Request::parse(&[0; IN_HEADER - 1]).is_none());
    }
}
