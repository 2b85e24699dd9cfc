//! Version 2: one hierarchy for all controllers.

use std::{os::fd::OwnedFd, path::Path};

use super::{
    CgroupStats, Cpu, CpuLimits, Device, Extent, Memory, MemoryDetails, Pids, Reader, created, limit, open, pressure,
    text::{named_numbers, number},
};

pub(super) fn cpu_nanos(mount: &Path, path: &str, reader: &mut Reader) -> Option<u64> {
    let text = reader.text(open(mount, path)?, "cpu.stat")?;
    let usage = named_numbers(text).find(|(name, _)| *name == "usage_usec");
    usage.map(|(_, micros)| nanos(micros))
}

pub(super) fn read(mount: &Path, path: &str, extent: Extent, reader: &mut Reader) -> Option<CgroupStats> {
    let dir = open(mount, path)?;
    let mut stats = CgroupStats {
        cpu: cpu(&dir, reader),
        memory: memory(&dir, extent, reader),
        io_pressure: reader.text(&dir, "io.pressure").and_then(pressure),
        ..CgroupStats::default()
    };
    if extent == Extent::Usage {
        return Some(stats);
    }
    if let Some(cpu) = &mut stats.cpu {
        cpu.limits = cpu_limits(&dir, reader);
    }
    stats.pids =
        reader.number(&dir, "pids.current").map(|current| Pids { current, limit: reader.number(&dir, "pids.max") });
    stats.devices = devices(reader.text(&dir, "io.stat").unwrap_or_default());
    stats.created = created(&dir, "cgroup.events");
    Some(stats)
}

fn nanos(micros: u64) -> u64 {
    micros.saturating_mul(1000)
}

fn cpu(dir: &OwnedFd, reader: &mut Reader) -> Option<Cpu> {
    let mut cpu = Cpu::default();
    for (name, value) in named_numbers(reader.text(dir, "cpu.stat")?) {
        match name {
            "usage_usec" => cpu.usage_nanos = nanos(value),
            "user_usec" => cpu.user_nanos = nanos(value),
            "system_usec" => cpu.system_nanos = nanos(value),
            "nr_periods" => cpu.throttling.periods = value,
            "nr_throttled" => cpu.throttling.throttled_periods = value,
            "throttled_usec" => cpu.throttling.throttled_nanos = nanos(value),
            "nr_bursts" => cpu.throttling.burst_periods = value,
            "burst_usec" => cpu.throttling.burst_nanos = nanos(value),
            _ => {}
        }
    }
    cpu.pressure = reader.text(dir, "cpu.pressure").and_then(pressure);
    Some(cpu)
}

fn cpu_limits(dir: &OwnedFd, reader: &mut Reader) -> CpuLimits {
    let shares = reader.number(dir, "cpu.weight").filter(|weight| *weight > 0).map(shares);
    // `max 100000` is no limit.
    let (quota, period) = reader.text(dir, "cpu.max").and_then(|text| text.split_once(' ')).unwrap_or_default();
    CpuLimits { shares, quota_micros: number(quota), period_micros: number(period) }
}

/// Version 1 counts CPU shares from 2 to 262144, version 2 weights from 1 to 10000.
fn shares(weight: u64) -> u64 {
    2 + (weight.min(10_000) - 1) * 262_142 / 9999
}

fn memory(dir: &OwnedFd, extent: Extent, reader: &mut Reader) -> Option<Memory> {
    let mut memory = Memory::default();
    let mut kernel_bytes = 0;
    for (name, value) in named_numbers(reader.text(dir, "memory.stat")?) {
        match name {
            "file" => memory.cache_bytes = value,
            "anon" => memory.rss_bytes = value,
            "file_mapped" => memory.mapped_file_bytes = value,
            "pgfault" => memory.page_faults = value,
            "pgmajfault" => memory.major_page_faults = value,
            "inactive_file" => memory.inactive_file_bytes = value,
            "active_file" => memory.active_file_bytes = value,
            "kernel" => kernel_bytes = value,
            _ => {}
        }
    }
    // The root has no such file: anonymous and file memory is what version 1 counts there.
    let usage = reader.number(dir, "memory.current");
    memory.usage_bytes = usage.unwrap_or(memory.rss_bytes.saturating_add(memory.cache_bytes));
    memory.working_set_bytes = memory.usage_bytes.saturating_sub(memory.inactive_file_bytes);
    memory.limit_bytes = limit(reader.number(dir, "memory.max"));
    memory.swap_bytes = reader.number(dir, "memory.swap.current").unwrap_or(0);
    memory.swap_limit_bytes = limit(reader.number(dir, "memory.swap.max"));
    memory.pressure = reader.text(dir, "memory.pressure").and_then(pressure);
    if extent == Extent::All {
        let events = reader.text(dir, "memory.events").unwrap_or_default();
        let oom_kills = named_numbers(events).find_map(|(name, value)| (name == "oom_kill").then_some(value));
        memory.details = MemoryDetails {
            kernel_bytes,
            oom_kills: oom_kills.unwrap_or(0),
            max_usage_bytes: reader.number(dir, "memory.peak").unwrap_or(0),
            // Version 2 does not count these; upstream reports zero.
            limit_hits: 0,
            reservation_bytes: limit(reader.number(dir, "memory.min")),
            stated_swap_limit_bytes: memory.swap_limit_bytes,
        };
    }
    Some(memory)
}

/// Lines as `8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`.
fn devices(text: &str) -> Vec<Device> {
    let device = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (major, minor) = words.next()?.split_once(':')?;
        let mut device = Device { major: major.parse().ok()?, minor: minor.parse().ok()?, ..Device::default() };
        for (name, value) in words.filter_map(|word| word.split_once('=')) {
            let Some(value) = number(value) else { continue };
            match name {
                "rbytes" => device.bytes.push(("Read".to_owned(), value)),
                "wbytes" => device.bytes.push(("Write".to_owned(), value)),
                "rios" => device.requests.push(("Read".to_owned(), value)),
                "wios" => device.requests.push(("Write".to_owned(), value)),
                "cost.usage" => device.cost.get_or_insert_default().usage = value,
                "cost.wait" => device.cost.get_or_insert_default().wait = value,
                "cost.indebt" => device.cost.get_or_insert_default().indebt = value,
                "cost.indelay" => device.cost.get_or_insert_default().indelay = value,
                _ => {}
            }
        }
        Some(device).filter(|device| !device.bytes.is_empty())
    };
    text.lines().filter_map(device).collect()
}
