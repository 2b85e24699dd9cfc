//! Version 1: a hierarchy per controller.

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use super::{
    CgroupStats, Cpu, CpuLimits, Device, Extent, Memory, MemoryDetails, Operations, Pids, Reader, Throttling, created,
    limit, open,
    text::{named_numbers, number},
};

/// The kernel counts the time of processes in hundredths of a second, whatever its own clock does.
const TICK_NANOS: u64 = 10_000_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    cpu: Option<PathBuf>,
    cpuacct: Option<PathBuf>,
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    blkio: Option<PathBuf>,
}

impl Mounts {
    /// The mount's directory name lists its controllers: `cpu,cpuacct`.
    pub fn new(points: impl Iterator<Item = PathBuf>) -> Self {
        let mut mounts = Mounts::default();
        for point in points {
            let names = point.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            for name in names.split(',') {
                let place = match name {
                    "cpu" => &mut mounts.cpu,
                    "cpuacct" => &mut mounts.cpuacct,
                    "memory" => &mut mounts.memory,
                    "pids" => &mut mounts.pids,
                    "blkio" => &mut mounts.blkio,
                    _ => continue,
                };
                *place = Some(point.clone());
            }
        }
        mounts
    }

    /// A hierarchy that contains every container.
    pub fn any(&self) -> Option<&Path> {
        self.memory.as_deref().or(self.cpu.as_deref())
    }
}

fn in_tree(tree: Option<&PathBuf>, path: &str) -> Option<OwnedFd> {
    open(tree?, path)
}

pub(super) fn cpu_nanos(mounts: &Mounts, path: &str, reader: &mut Reader) -> Option<u64> {
    reader.number(in_tree(mounts.cpuacct.as_ref(), path)?, "cpuacct.usage")
}

pub(super) fn read(mounts: &Mounts, path: &str, extent: Extent, reader: &mut Reader) -> Option<CgroupStats> {
    let cpuacct = in_tree(mounts.cpuacct.as_ref(), path);
    let memory = in_tree(mounts.memory.as_ref(), path);
    if cpuacct.is_none() && memory.is_none() {
        return None;
    }
    let mut stats = CgroupStats {
        cpu: cpuacct.as_ref().and_then(|dir| cpu(dir, extent, reader)),
        memory: memory.as_ref().and_then(|dir| self::memory(dir, extent, reader)),
        ..CgroupStats::default()
    };
    if extent == Extent::Usage {
        return Some(stats);
    }
    if let (Some(cpu), Some(dir)) = (&mut stats.cpu, in_tree(mounts.cpu.as_ref(), path)) {
        cpu.throttling = throttling(reader.text(&dir, "cpu.stat").unwrap_or_default());
        cpu.limits = CpuLimits {
            shares: reader.number(&dir, "cpu.shares"),
            period_micros: reader.number(&dir, "cpu.cfs_period_us"),
            // Unlimited is -1, which does not parse here.
            quota_micros: reader.number(&dir, "cpu.cfs_quota_us"),
        };
    }
    stats.pids = in_tree(mounts.pids.as_ref(), path).and_then(|dir| {
        Some(Pids { current: reader.number(&dir, "pids.current")?, limit: reader.number(&dir, "pids.max") })
    });
    stats.devices = in_tree(mounts.blkio.as_ref(), path).map(|dir| devices(&dir, reader)).unwrap_or_default();
    stats.created = memory.or(cpuacct).and_then(|dir| created(dir, "cgroup.clone_children"));
    Some(stats)
}

fn cpu(dir: &OwnedFd, extent: Extent, reader: &mut Reader) -> Option<Cpu> {
    let mut cpu = Cpu { usage_nanos: reader.number(dir, "cpuacct.usage")?, ..Cpu::default() };
    if extent == Extent::Usage {
        return Some(cpu);
    }
    for (name, ticks) in named_numbers(reader.text(dir, "cpuacct.stat").unwrap_or_default()) {
        match name {
            "user" => cpu.user_nanos = ticks.saturating_mul(TICK_NANOS),
            "system" => cpu.system_nanos = ticks.saturating_mul(TICK_NANOS),
            _ => {}
        }
    }
    Some(cpu)
}

fn throttling(text: &str) -> Throttling {
    let mut throttling = Throttling::default();
    for (name, value) in named_numbers(text) {
        match name {
            "nr_periods" => throttling.periods = value,
            "nr_throttled" => throttling.throttled_periods = value,
            "throttled_time" => throttling.throttled_nanos = value,
            "nr_bursts" => throttling.burst_periods = value,
            "burst_time" => throttling.burst_nanos = value,
            _ => {}
        }
    }
    throttling
}

fn memory(dir: &OwnedFd, extent: Extent, reader: &mut Reader) -> Option<Memory> {
    let mut memory = Memory { usage_bytes: reader.number(dir, "memory.usage_in_bytes")?, ..Memory::default() };
    // Without `total_` they would exclude child cgroups.
    for (name, value) in named_numbers(reader.text(dir, "memory.stat").unwrap_or_default()) {
        match name {
            "total_cache" => memory.cache_bytes = value,
            "total_rss" => memory.rss_bytes = value,
            "total_mapped_file" => memory.mapped_file_bytes = value,
            "total_swap" => memory.swap_bytes = value,
            "total_pgfault" => memory.page_faults = value,
            "total_pgmajfault" => memory.major_page_faults = value,
            "total_inactive_file" => memory.inactive_file_bytes = value,
            "total_active_file" => memory.active_file_bytes = value,
            _ => {}
        }
    }
    memory.working_set_bytes = memory.usage_bytes.saturating_sub(memory.inactive_file_bytes);
    memory.limit_bytes = limit(reader.number(dir, "memory.limit_in_bytes"));
    let with_swap = limit(reader.number(dir, "memory.memsw.limit_in_bytes"));
    memory.swap_limit_bytes =
        with_swap.zip(memory.limit_bytes).map(|(with_swap, without)| with_swap.saturating_sub(without));
    if extent == Extent::All {
        let oom = reader.text(dir, "memory.oom_control").unwrap_or_default();
        let oom_kills = named_numbers(oom).find_map(|(name, value)| (name == "oom_kill").then_some(value));
        memory.details = MemoryDetails {
            oom_kills: oom_kills.unwrap_or(0),
            kernel_bytes: reader.number(dir, "memory.kmem.usage_in_bytes").unwrap_or(0),
            max_usage_bytes: reader.number(dir, "memory.max_usage_in_bytes").unwrap_or(0),
            limit_hits: reader.number(dir, "memory.failcnt").unwrap_or(0),
            reservation_bytes: limit(reader.number(dir, "memory.soft_limit_in_bytes")),
            stated_swap_limit_bytes: with_swap,
        };
    }
    Some(memory)
}

type OperationsOf = fn(&mut Device) -> &mut Operations;

/// Besides the bytes, which every scheduler counts.
const DEVICE_FILES: [(&str, OperationsOf); 5] = [
    ("io_serviced", |device| &mut device.requests),
    ("io_merged", |device| &mut device.merged),
    ("sectors", |device| &mut device.sectors),
    ("io_service_time", |device| &mut device.service_nanos),
    ("io_queued", |device| &mut device.queued),
];

/// The file depends on the scheduler of the disks; the first with values is used.
fn devices(dir: &OwnedFd, reader: &mut Reader) -> Vec<Device> {
    for kind in ["blkio.bfq", "blkio", "blkio.throttle"] {
        let mut devices = Vec::new();
        let text = reader.text(dir, &format!("{kind}.io_service_bytes_recursive")).unwrap_or_default();
        add_operations(text, &mut devices, |device| &mut device.bytes);
        if devices.is_empty() {
            continue;
        }
        for (name, of) in DEVICE_FILES {
            let text = reader.text(dir, &format!("{kind}.{name}_recursive")).unwrap_or_default();
            add_operations(text, &mut devices, of);
        }
        return devices;
    }
    Vec::new()
}

/// Lines as `8:0 Read 4096` or `8:0 4096`; the last is a sum over all, `Total 4096`.
fn add_operations(text: &str, devices: &mut Vec<Device>, of: OperationsOf) {
    for line in text.lines() {
        let Some((id, rest)) = line.split_once(' ') else { continue };
        let Some((major, minor)) = id.split_once(':') else { continue };
        let (operation, value) = rest.split_once(' ').unwrap_or(("Count", rest));
        let (Ok(major), Ok(minor), Some(value)) = (major.parse(), minor.parse(), number(value)) else { continue };
        let known = devices.iter().position(|device| (device.major, device.minor) == (major, minor));
        let index = known.unwrap_or_else(|| {
            devices.push(Device { major, minor, ..Device::default() });
            devices.len() - 1
        });
        of(&mut devices[index]).push((operation.to_owned(), value));
    }
}
