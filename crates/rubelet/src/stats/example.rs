//! A sample for the tests of documents: a node with one pod of one container.

use std::sync::Arc;

use jiff::Timestamp;
use rubelet_core::{id::PodUid, node_status, time::Uptime};
use rubelet_host::stats::{
    cgroup::{CgroupStats, Cpu, CpuLimits, Device, Memory, MemoryDetails, Pids, Pressure, Stall, Throttling},
    disk::{FileSystem, Usage},
    partition::{DiskStats, Partition},
    process::{Interface, Machine, OpenFiles, Topology, Traffic},
};

use super::{
    disk::{Disks, Layer, PodDisk},
    persistent_meter::{ClaimName, PersistentFigures, PersistentStats},
    pod_disk::{PodFiles, Volume},
    sample::{ContainerSample, Extent, Measured, PodSample, Processes, Sample},
    targets::{ContainerTarget, PodTarget},
};

const MIB: u64 = 1 << 20;
const DISK: FileSystem = FileSystem {
    device: 1,
    capacity_bytes: 1000 * MIB,
    available_bytes: 600 * MIB,
    used_bytes: 300 * MIB,
    inodes: 10_000,
    inodes_free: 9000,
};

fn at(moment: &str) -> Timestamp {
    moment.parse().expect("a literal")
}

fn pressure(total_micros: u64) -> Pressure {
    let stall = Stall { total_micros, avg10: 1.5, avg60: 0.25, avg300: 0.0 };
    Pressure { some: stall, full: Stall { total_micros: total_micros / 2, ..Stall::default() } }
}

fn measured(cgroup: &str, limit_bytes: Option<u64>) -> Measured {
    let cpu = Cpu {
        usage_nanos: 2_500_000_000,
        user_nanos: 1_500_000_000,
        system_nanos: 1_000_000_000,
        pressure: Some(pressure(98_765)),
        throttling: Throttling {
            periods: 50,
            throttled_periods: 7,
            throttled_nanos: 123_000_000,
            ..Throttling::default()
        },
        limits: CpuLimits {
            shares: Some(256),
            period_micros: Some(100_000),
            quota_micros: limit_bytes.map(|_| 30_000),
        },
    };
    let memory = Memory {
        usage_bytes: 10 * MIB,
        working_set_bytes: 9 * MIB,
        rss_bytes: 4 * MIB,
        cache_bytes: 5 * MIB,
        mapped_file_bytes: 2 * MIB,
        active_file_bytes: 3 * MIB,
        inactive_file_bytes: MIB,
        swap_bytes: 4096,
        page_faults: 1234,
        major_page_faults: 5,
        limit_bytes,
        swap_limit_bytes: limit_bytes.map(|_| 8192),
        pressure: Some(pressure(11)),
        details: MemoryDetails {
            kernel_bytes: MIB,
            max_usage_bytes: 12 * MIB,
            limit_hits: 3,
            reservation_bytes: None,
            oom_kills: 2,
            stated_swap_limit_bytes: limit_bytes.map(|_| 8192),
        },
    };
    let operations = |read, write| vec![("Read".to_owned(), read), ("Write".to_owned(), write)];
    let device = Device {
        name: "/dev/vda".to_owned(),
        major: 8,
        minor: 0,
        bytes: operations(409_600, 8192),
        requests: operations(10, 2),
        ..Device::default()
    };
    let stats = CgroupStats {
        cpu: Some(cpu),
        memory: Some(memory),
        io_pressure: Some(pressure(77)),
        pids: Some(Pids { current: 3, limit: None }),
        devices: vec![device],
        created: Some(at("2026-11-15T18:00:02Z").into()),
    };
    Measured { cgroup: cgroup.to_owned(), stats, nano_cores: Some(300_000_000) }
}

fn disk_stats() -> DiskStats {
    DiskStats {
        reads: 10,
        reads_merged: 11,
        sectors_read: 12,
        read_millis: 13,
        writes: 20,
        writes_merged: 21,
        sectors_written: 22,
        write_millis: 23,
        in_progress: 1,
        io_millis: 30,
        weighted_io_millis: 31,
    }
}

fn interface(name: &str) -> Interface {
    let received = Traffic { bytes: 1500, packets: 10, errors: 1, dropped: 2 };
    Interface { name: name.to_owned(), received, sent: Traffic { bytes: 900, packets: 8, errors: 3, dropped: 4 } }
}

fn container(name: &str, id: &str, limit_bytes: Option<u64>) -> ContainerSample {
    ContainerSample {
        target: ContainerTarget {
            name: name.to_owned(),
            id: id.to_owned(),
            image: if name.is_empty() { String::new() } else { "busybox".to_owned() },
            created: at("2026-11-15T18:00:01.5Z"),
        },
        measured: measured(&format!("/kubepods/podu1/{id}"), limit_bytes),
        processes: Processes { count: 2, open: OpenFiles { files: 7, sockets: 1 }, open_files_limit: Some(1024) },
    }
}

pub(crate) fn sample() -> Sample {
    let target = PodTarget {
        uid: PodUid::new("u1"),
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        created: at("2026-11-15T18:00:00Z"),
        sandbox_id: "s1".to_owned(),
        sandbox_image: String::new(),
        cgroups: vec!["/kubepods/podu1".to_owned()],
        containers: Vec::new(),
    };
    Sample {
        at: at("2026-11-15T19:00:00.25Z"),
        extent: Extent::Everything,
        node_name: "n1".to_owned(),
        agent_started: at("2026-11-15T17:00:00Z"),
        identity: Arc::new(node_status::Machine {
            kernel_version: "6.1".to_owned(),
            ..node_status::Machine::default()
        }),
        machine: Machine {
            memory_bytes: 1000 * MIB,
            swap_total_bytes: 100,
            swap_free_bytes: 60,
            boot_secs: 1_794_000_000,
            max_pid: Some(32_768),
            tasks: Some(80),
        },
        topology: Topology { cores: 4, physical_cores: 2, sockets: 1 },
        partitions: vec![Partition { device: "/dev/vda1".to_owned(), file_system: DISK, disk: disk_stats() }],
        root: Some(measured("/", None)),
        interfaces: vec![interface("ens3")],
        system: vec![
            ("kubelet", measured("/system.slice/kubelet.service", None)),
            ("pods", measured("/kubepods", None)),
        ],
        tiers: vec![measured("/kubepods", None)],
        pods: vec![PodSample {
            target,
            own: Some(measured("/kubepods/podu1", None)),
            sandbox: Some(container("", "s1", None)),
            containers: vec![container("work", "c1", Some(64 * MIB))],
            interfaces: vec![interface("eth0")],
        }],
        has_rates: true,
        taken: Uptime::default(),
    }
}

pub(crate) fn disks() -> Disks {
    let layer =
        Layer { at: at("2026-11-15T18:59:55Z"), used_bytes: Some(28_672), inodes_used: Some(10), on: Some(DISK) };
    let volume = |name: &str, is_ephemeral| Volume {
        name: name.to_owned(),
        is_ephemeral,
        used: Usage { bytes: 8192, inodes: 2 },
        on: DISK,
    };
    let pod = PodDisk {
        at: at("2026-11-15T18:59:50Z"),
        files: PodFiles {
            volumes: vec![volume("shared", true), volume("token", false)],
            logs: [("work".to_owned(), Usage { bytes: 4096, inodes: 1 })].into(),
            others: Usage { bytes: 100, inodes: 1 },
        },
        counted: Uptime::default(),
    };
    Disks {
        node: Some(DISK),
        images: Some(layer.clone()),
        layers: [("c1".to_owned(), layer)].into(),
        pods: [(PodUid::new("u1"), pod)].into(),
        persistent: [(PodUid::new("u1"), vec![persistent()])].into(),
    }
}

pub(crate) fn persistent() -> PersistentStats {
    PersistentStats {
        volume: "data".to_owned(),
        claim: Some(ClaimName { namespace: "default".to_owned(), name: "data-web-0".to_owned() }),
        at: at("2026-11-15T18:59:40Z"),
        figures: PersistentFigures {
            capacity_bytes: 500 * MIB,
            available_bytes: 100 * MIB,
            used_bytes: 400 * MIB,
            inodes: 5000,
            inodes_free: 1000,
            inodes_used: 4000,
        },
        is_abnormal: Some(true),
    }
}
