//! Usage, limits and pressure of a cgroup.
//!
//! Owns: which file of which version has a value. In version 1 every controller has a hierarchy, in version 2 all share one.
//! Never: names a cgroup, computes a rate.
//! Upstream: `fs` and `fs2` of `github.com/opencontainers/cgroups`, `GetSpec` of cAdvisor's `container/common`.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::{Reader, disk, process, text};
use crate::{
    cgroup::{BASE, below},
    port::{ContainerFigures, MemoryFigures, NodeFigures, PodFigures},
};

mod v1;
mod v2;

pub use v1::Mounts;

/// How much is read: every file has a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// CPU and memory.
    Usage,
    /// Also processes, disks, limits and the details of cAdvisor.
    All,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct CgroupStats {
    pub cpu: Option<Cpu>,
    pub memory: Option<Memory>,
    pub io_pressure: Option<Pressure>,
    /// The rest is read with [`Extent::All`] only.
    pub pids: Option<Pids>,
    pub devices: Vec<Device>,
    /// When the cgroup was made.
    pub created: Option<SystemTime>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cpu {
    pub usage_nanos: u64,
    /// This and the next are read with [`Extent::All`] only.
    pub user_nanos: u64,
    pub system_nanos: u64,
    pub pressure: Option<Pressure>,
    pub throttling: Throttling,
    pub limits: CpuLimits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    pub periods: u64,
    pub throttled_periods: u64,
    pub throttled_nanos: u64,
    pub burst_periods: u64,
    pub burst_nanos: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuLimits {
    /// As version 1 counts them.
    pub shares: Option<u64>,
    pub period_micros: Option<u64>,
    /// `None` is no limit.
    pub quota_micros: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    pub usage_bytes: u64,
    /// The working set: all but inactive file pages.
    pub working_set_bytes: u64,
    pub rss_bytes: u64,
    pub cache_bytes: u64,
    pub mapped_file_bytes: u64,
    pub active_file_bytes: u64,
    pub inactive_file_bytes: u64,
    pub swap_bytes: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    /// `None` is no limit.
    pub limit_bytes: Option<u64>,
    /// Of swap alone; `None` is no limit, or not counted.
    pub swap_limit_bytes: Option<u64>,
    pub pressure: Option<Pressure>,
    pub details: MemoryDetails,
}

/// Read with [`Extent::All`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryDetails {
    pub kernel_bytes: u64,
    pub max_usage_bytes: u64,
    pub limit_hits: u64,
    pub reservation_bytes: Option<u64>,
    /// In version 1 of memory and swap together, in version 2 of swap alone.
    pub stated_swap_limit_bytes: Option<u64>,
    pub oom_kills: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pids {
    /// Threads, too: the kernel counts tasks.
    pub current: u64,
    /// `None` is no limit.
    pub limit: Option<u64>,
}

/// A disk, and its I/O.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// `/dev/…`.
    pub name: String,
    pub major: u32,
    pub minor: u32,
    /// In bytes.
    pub bytes: Operations,
    /// In requests.
    pub requests: Operations,
    /// This and the next are counted in version 1 only, by schedulers that few kernels have: CFQ, and BFQ for debugging.
    pub merged: Operations,
    pub sectors: Operations,
    pub service_nanos: Operations,
    pub queued: Operations,
    /// In version 2 where the kernel has a model of a disk's cost.
    pub cost: Option<IoCost>,
}

/// By `Read`, `Write`, in version 1 others; `Count` if they are not distinguished.
pub type Operations = Vec<(String, u64)>;

/// Time by the kernel's model of a disk, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCost {
    pub usage: u64,
    pub wait: u64,
    pub indebt: u64,
    pub indelay: u64,
}

/// Time lost waiting, of some tasks and of all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    pub some: Stall,
    pub full: Stall,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stall {
    pub total_micros: u64,
    /// Percent of the last ten seconds.
    pub avg10: f64,
    pub avg60: f64,
    pub avg300: f64,
}

/// Where each controller's hierarchy is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trees {
    V1(v1::Mounts),
    V2(PathBuf),
}

impl Trees {
    /// The mounted ones, at the usual mount point.
    pub fn mounted() -> io::Result<Self> {
        let mounts = crate::mount::mount_table()?;
        let at_base = |mount: &crate::mount::Mount| mount.point.as_path() == Path::new(BASE);
        if mounts.iter().any(|mount| mount.fs_type == "cgroup2" && at_base(mount)) {
            return Ok(Trees::V2(PathBuf::from(BASE)));
        }
        let trees = mounts.into_iter().filter(|mount| mount.fs_type == "cgroup" && mount.point.starts_with(BASE));
        Ok(Trees::V1(v1::Mounts::new(trees.map(|mount| mount.point))))
    }

    /// The names of the direct children of this cgroup; none if it does not exist.
    pub fn children(&self, path: &str) -> Vec<String> {
        let tree = match self {
            Trees::V1(mounts) => mounts.any(),
            Trees::V2(mount) => Some(mount.as_path()),
        };
        let dir = tree.and_then(|tree| place(tree, path));
        let entries = dir.and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// The processes directly in this cgroup.
    pub fn processes(&self, path: &str, reader: &mut Reader) -> Vec<u32> {
        let tree = match self {
            Trees::V1(mounts) => mounts.any(),
            Trees::V2(mount) => Some(mount.as_path()),
        };
        let dir = tree.and_then(|tree| open(tree, path));
        let pids = dir.as_ref().and_then(|dir| reader.text(dir, "cgroup.procs"));
        // A process of another PID namespace shows as 0.
        pids.into_iter().flat_map(str::lines).filter_map(|pid| pid.parse().ok()).filter(|pid| *pid != 0).collect()
    }

    /// All readable values; `None` if the cgroup does not exist. The root is `/`.
    pub fn read(&self, path: &str, extent: Extent, reader: &mut Reader) -> Option<CgroupStats> {
        let mut stats = match self {
            Trees::V1(mounts) => v1::read(mounts, path, extent, reader)?,
            Trees::V2(mount) => v2::read(mount, path, extent, reader)?,
        };
        for device in &mut stats.devices {
            device.name = disk::device_name(device.major, device.minor);
        }
        Some(stats)
    }

    /// Memory and processes of the node, and of the cgroup of all pods.
    pub fn node_figures(&self, kubepods: Option<&str>, reader: &mut Reader) -> NodeFigures {
        let machine = process::machine(reader);
        let memory = self.memory("/", reader).map(|memory| MemoryFigures {
            limit_bytes: machine.memory_bytes,
            working_set_bytes: memory.working_set_bytes,
        });
        let of_pods = kubepods.and_then(|path| self.memory(path, reader));
        let memory_of_pods = of_pods.and_then(|memory| {
            Some(MemoryFigures { limit_bytes: memory.limit_bytes?, working_set_bytes: memory.working_set_bytes })
        });
        NodeFigures { memory, memory_of_pods, max_tasks: machine.max_pid, tasks: machine.tasks }
    }

    /// Memory and processes of a pod; `None` if it has no cgroup.
    pub fn pod_figures(&self, path: &str, reader: &mut Reader) -> Option<PodFigures> {
        let working_set_bytes = self.memory(path, reader)?.working_set_bytes;
        let mut containers = BTreeMap::new();
        for name in self.children(path) {
            let child = format!("{path}/{name}");
            // It may have ended meanwhile.
            let Some(memory) = self.memory(&child, reader) else { continue };
            let processes = self.processes(&child, reader).len() as u64;
            containers.insert(name, ContainerFigures { working_set_bytes: memory.working_set_bytes, processes });
        }
        Some(PodFigures { working_set_bytes, containers })
    }

    fn memory(&self, path: &str, reader: &mut Reader) -> Option<Memory> {
        self.read(path, Extent::Usage, reader)?.memory
    }

    /// Only its CPU time.
    pub fn cpu_nanos(&self, path: &str, reader: &mut Reader) -> Option<u64> {
        match self {
            Trees::V1(mounts) => v1::cpu_nanos(mounts, path, reader),
            Trees::V2(mount) => v2::cpu_nanos(mount, path, reader),
        }
    }

    /// The cgroup of this process from `/proc/…/cgroup`: in version 1 that of systemd's hierarchy, if those of `cpu` and `memory` agree.
    pub fn of_process(&self, table: &str) -> Option<String> {
        let of = |controller: &str| {
            table.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                controllers.split(',').any(|name| name == controller).then(|| path.to_owned())
            })
        };
        match self {
            Trees::V1(_) => of("memory")
                .filter(|path| of("cpu").as_ref() == Some(path))
                .map(|path| of("name=systemd").unwrap_or(path)),
            Trees::V2(_) => of(""),
        }
    }
}

fn place(tree: &Path, path: &str) -> Option<PathBuf> {
    // The root is a cgroup, too, if only for reading.
    if path == "/" { Some(tree.to_owned()) } else { below(tree, Path::new(path)).ok() }
}

fn open(tree: &Path, path: &str) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, place(tree, path)?, flags, Mode::empty()).ok()
}

/// The older of a cgroup's directory and a rarely changed file in it: the directory's time changes with its children.
fn created(dir: impl AsFd, file: &str) -> Option<SystemTime> {
    let modified = |stat: rustix::fs::Stat| {
        let secs = u64::try_from(stat.st_mtime).ok()?;
        SystemTime::UNIX_EPOCH.checked_add(std::time::Duration::from_secs(secs))
    };
    let own = rustix::fs::statat(&dir, "", AtFlags::EMPTY_PATH).ok().and_then(modified);
    let steady = rustix::fs::statat(&dir, file, AtFlags::SYMLINK_NOFOLLOW).ok().and_then(modified);
    own.into_iter().chain(steady).min()
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and a line `full`.
fn pressure(text: &str) -> Option<Pressure> {
    let mut pressure = Pressure::default();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let stall = match words.next()? {
            "some" => &mut pressure.some,
            "full" => &mut pressure.full,
            _ => continue,
        };
        for (name, value) in words.filter_map(|word| word.split_once('=')) {
            match name {
                "avg10" => stall.avg10 = value.parse().ok()?,
                "avg60" => stall.avg60 = value.parse().ok()?,
                "avg300" => stall.avg300 = value.parse().ok()?,
                "total" => stall.total_micros = value.parse().ok()?,
                _ => {}
            }
        }
    }
    Some(pressure)
}

/// Above this the kernel means unlimited; less than the maximum, because it rounds to pages.
fn limit(bytes: Option<u64>) -> Option<u64> {
    bytes.filter(|bytes| *bytes <= 1 << 62)
}

#[cfg(test)]
mod tests;
