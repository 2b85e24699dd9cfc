//! The kernel's own words that memory runs short.
//!
//! Owns: stalls of the whole node (`/proc/pressure/memory`), and crossings of a usage in a cgroup of version 1. Both are
//! hints: they carry no figure. Never: decides what is short.
//! Upstream: `threshold_notifier_linux.go`, for cgroups of version 1 only.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    cgroup::below,
    watch::{register, register_for},
};

/// Tasks waited for memory for 0.15 s within 2 s. Shorter windows need CAP_SYS_RESOURCE.
const STALL: &[u8] = b"some 150000 2000000\0";
const PRESSURE: &str = "/proc/pressure/memory";
/// Where version 1 has its memory hierarchy.
const MEMORY_TREE: &str = "/sys/fs/cgroup/memory";

/// Stalls of any task of the node for lack of memory.
#[derive(Debug)]
pub struct MemoryStalls(AsyncFd<OwnedFd>);

impl MemoryStalls {
    /// Must be called inside of a tokio runtime. An error where the kernel does not measure stalls.
    pub fn open() -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).open(PRESSURE)?;
        file.write_all(STALL)?;
        Ok(MemoryStalls(register_for(file.into(), Interest::PRIORITY)?))
    }

    pub async fn next(&mut self) -> io::Result<()> {
        let mut ready = self.0.ready(Interest::PRIORITY).await?;
        ready.clear_ready();
        Ok(())
    }
}

/// A usage of a cgroup of version 1 that is to be reported when it is crossed, in either direction.
#[derive(Debug)]
pub struct UsageCrossing(AsyncFd<OwnedFd>);

impl UsageCrossing {
    /// `more_bytes` over the current usage. Must be called inside of a tokio runtime. An error without version 1.
    pub fn arm(cgroup: &str, more_bytes: u64) -> io::Result<Self> {
        let tree = Path::new(MEMORY_TREE);
        let dir = if cgroup == "/" { tree.to_owned() } else { below(tree, Path::new(cgroup))? };
        let mut usage = File::open(dir.join("memory.usage_in_bytes"))?;
        let mut text = String::new();
        usage.read_to_string(&mut text)?;
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let used: u64 = text.trim().parse().map_err(invalid)?;
        let reports = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let order = format!("{} {} {}", reports.as_raw_fd(), usage.as_raw_fd(), used.saturating_add(more_bytes));
        OpenOptions::new().write(true).open(dir.join("cgroup.event_control"))?.write_all(order.as_bytes())?;
        Ok(UsageCrossing(register(reports)?))
    }

    pub async fn next(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut count = [0; 8];
            if let Ok(read) = ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref(), &mut count)?)) {
                return read.map(drop);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Only where this machine has version 1 and a cgroup may be made.
    #[tokio::test]
    async fn crossing_is_reported() {
        let dir = Path::new(MEMORY_TREE).join(format!("rubelet-test-{}", std::process::id()));
        if std::fs::create_dir(&dir).is_err() {
            return;
        }
        let name = format!("/{}", dir.file_name().unwrap().to_str().unwrap());
        let mut crossing = UsageCrossing::arm(&name, 8 << 20).unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(200), crossing.next()).await.is_err());
        let script = format!("echo $$ > {}/cgroup.procs; head -c 16000000 /dev/zero | tail > /dev/null", dir.display());
        let status = tokio::process::Command::new("sh").args(["-c", &script]).status();
        let (status, crossed) = tokio::join!(status, tokio::time::timeout(Duration::from_secs(20), crossing.next()));
        std::fs::remove_dir(&dir).unwrap();
        assert!(status.unwrap().success());
        crossed.unwrap().unwrap();
    }

    #[tokio::test]
    async fn stalls_can_be_watched_where_the_kernel_measures_them() {
        if Path::new(PRESSURE).exists() {
            let mut stalls = MemoryStalls::open().unwrap();
            // A quiet moment has none; a busy machine may.
            let _ = tokio::time::timeout(Duration::from_millis(50), stalls.next()).await;
        }
    }
}
