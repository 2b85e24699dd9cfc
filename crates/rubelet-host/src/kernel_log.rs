//! The kernel's log, as it grows.
//!
//! Owns: reading records of `/dev/kmsg`. Never: reads what was logged before it was opened, interprets a message.

use std::{io, os::fd::OwnedFd};

use rustix::{
    fs::{Mode, OFlags, SeekFrom},
    io::Errno,
};
use tokio::io::unix::AsyncFd;

use crate::watch::register;

/// More than any record has; the kernel returns one at a time.
const RECORD_BYTES: usize = 8192;

#[derive(Debug)]
pub struct KernelLog(AsyncFd<OwnedFd>);

impl KernelLog {
    /// Must be called inside of a tokio runtime.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/kmsg", flags, Mode::empty())?;
        rustix::fs::seek(&fd, SeekFrom::End(0))?;
        Ok(KernelLog(register(fd)?))
    }

    /// The message of the next record.
    pub async fn next(&mut self) -> io::Result<String> {
        let mut record = vec![0; RECORD_BYTES];
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut record)?)) {
                Ok(Ok(read)) => return Ok(message(&record[..read])),
                // Records were overwritten before they were read.
                Ok(Err(error)) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {}
                Ok(Err(error)) => return Err(error),
                // Not ready after all.
                Err(_) => {}
            }
        }
    }
}

/// `6,339,5140900,-;message`, and lines about the device behind it.
fn message(record: &[u8]) -> String {
    let text = String::from_utf8_lossy(record);
    let first = text.lines().next().unwrap_or_default();
    first.split_once(';').map_or(first, |(_, message)| message).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_of_a_record_comes_behind_its_head() {
        assert_eq!(message(b"6,339,5140900,-;NET: registered; PF_INET\n SUBSYSTEM=net\n"), "NET: registered; PF_INET");
        assert_eq!(message(b"odd"), "odd");
        assert_eq!(message(b""), "");
    }
}
