//! Disk I/O by cgroup and by file system, and usage of file systems.
//!
//! Owns: the names that begin with `container_fs_` and `container_blkio_`. A cgroup has values of the disks it used; those of whole
//! file systems belong to the root, since cAdvisor has none for containers of containerd.
//! Upstream: `ioValues` and `fsValues` of cAdvisor's `metrics/prometheus.go`.

use rubelet_host::stats::{
    cgroup::{Device, IoCost, Operations},
    partition::Partition,
};

use super::{CgroupView, Number};
use crate::stats::exposition::{Exposition, Family, Kind};

/// A metric with a value for every disk of a cgroup and for every file system of the root.
struct DiskMetric {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    of_device: Option<fn(&Device) -> Option<Number>>,
    of_partition: Option<fn(&Partition) -> Number>,
}

pub(super) fn write(exposition: &mut Exposition, views: &[CgroupView<'_>], partitions: &[Partition]) {
    operations(exposition, views);
    for metric in METRICS {
        let mut family = exposition.family(metric.name, metric.kind, metric.help);
        for (index, view) in views.iter().enumerate() {
            let devices = &view.measured.stats.devices;
            let mut seen: Vec<&str> = Vec::new();
            for device in devices {
                if let Some(value) = metric.of_device.and_then(|value| value(device)) {
                    add(&mut family, view, &device.name, value);
                    seen.push(&device.name);
                }
            }
            // The root comes first. A file system on a whole disk has the disk's name, which would duplicate the series.
            let own = if index == 0 { partitions } else { &[] };
            for partition in own.iter().filter(|partition| !seen.contains(&partition.device.as_str())) {
                if let Some(value) = metric.of_partition {
                    add(&mut family, view, &partition.device, value(partition));
                }
            }
        }
    }
}

fn add(family: &mut Family<'_>, view: &CgroupView<'_>, device: &str, value: Number) {
    family.add(&view.labels.and([("device", device)]), value, Some(view.at));
}

fn operations(exposition: &mut Exposition, views: &[CgroupView<'_>]) {
    let mut family = exposition.counter("container_blkio_device_usage_total", "Blkio Device bytes usage");
    for view in views {
        for device in &view.measured.stats.devices {
            let (major, minor) = (device.major.to_string(), device.minor.to_string());
            for (operation, bytes) in &device.bytes {
                let own =
                    [("device", device.name.as_str()), ("major", &major), ("minor", &minor), ("operation", operation)];
                family.add(&view.labels.and(own), bytes, Some(view.at));
            }
        }
    }
}

/// `None` if operations of this kind are not counted, zero if there were none.
fn count(operations: &Operations, wanted: &str) -> Option<u64> {
    let found = operations.iter().find(|(operation, _)| operation == wanted);
    (!operations.is_empty()).then(|| found.map_or(0, |(_, value)| *value))
}

fn whole(operations: &Operations, wanted: &str) -> Option<Number> {
    count(operations, wanted).map(Number::Whole)
}

fn nanos(operations: &Operations, wanted: &str) -> Option<Number> {
    count(operations, wanted).map(|nanos| Number::Real(nanos as f64 / 1e9))
}

fn cost(device: &Device, micros: fn(IoCost) -> u64) -> Option<Number> {
    device.cost.map(|cost| Number::Real(micros(cost) as f64 / 1e6))
}

/// Upstream divides the kernel's milliseconds by a billion, as if they were nanoseconds; both agents must
/// report the same values.
fn millis(millis: u64) -> Number {
    Number::Real(millis as f64 / 1e9)
}

const fn counter(
    name: &'static str,
    help: &'static str,
    of_device: Option<fn(&Device) -> Option<Number>>,
    of_partition: Option<fn(&Partition) -> Number>,
) -> DiskMetric {
    DiskMetric { name, kind: Kind::Counter, help, of_device, of_partition }
}

const fn of_file_system(name: &'static str, help: &'static str, value: fn(&Partition) -> Number) -> DiskMetric {
    DiskMetric { name, kind: Kind::Gauge, help, of_device: None, of_partition: Some(value) }
}

const METRICS: &[DiskMetric] = &[
    of_file_system("container_fs_inodes_free", "Number of available Inodes", |on| {
        Number::Whole(on.file_system.inodes_free)
    }),
    of_file_system("container_fs_inodes_total", "Number of Inodes", |on| Number::Whole(on.file_system.inodes)),
    counter(
        "container_fs_io_cost_indebt_seconds_total",
        "Cumulative IOCost debt in seconds",
        Some(|it| cost(it, |cost| cost.indebt)),
        None,
    ),
    counter(
        "container_fs_io_cost_indelay_seconds_total",
        "Cumulative IOCost delay in seconds",
        Some(|it| cost(it, |cost| cost.indelay)),
        None,
    ),
    counter(
        "container_fs_io_cost_usage_seconds_total",
        "Cumulative IOCost usage in seconds",
        Some(|it| cost(it, |cost| cost.usage)),
        None,
    ),
    counter(
        "container_fs_io_cost_wait_seconds_total",
        "Cumulative IOCost wait in seconds",
        Some(|it| cost(it, |cost| cost.wait)),
        None,
    ),
    DiskMetric {
        name: "container_fs_io_current",
        kind: Kind::Gauge,
        help: "Number of I/Os currently in progress",
        of_device: Some(|it| whole(&it.queued, "Total")),
        of_partition: Some(|on| Number::Whole(on.disk.in_progress)),
    },
    counter(
        "container_fs_io_time_seconds_total",
        "Cumulative count of seconds spent doing I/Os",
        Some(|it| nanos(&it.service_nanos, "Total")),
        Some(|on| millis(on.disk.io_millis)),
    ),
    counter(
        "container_fs_io_time_weighted_seconds_total",
        "Cumulative weighted I/O time in seconds",
        None,
        Some(|on| millis(on.disk.weighted_io_millis)),
    ),
    of_file_system(
        "container_fs_limit_bytes",
        "Number of bytes that can be consumed by the container on this filesystem.",
        |on| Number::Whole(on.file_system.capacity_bytes),
    ),
    counter(
        "container_fs_read_seconds_total",
        "Cumulative count of seconds spent reading",
        Some(|it| nanos(&it.service_nanos, "Read")),
        Some(|on| millis(on.disk.read_millis)),
    ),
    counter(
        "container_fs_reads_bytes_total",
        "Cumulative count of bytes read",
        Some(|it| whole(&it.bytes, "Read")),
        None,
    ),
    counter(
        "container_fs_reads_merged_total",
        "Cumulative count of reads merged",
        Some(|it| whole(&it.merged, "Read")),
        Some(|on| Number::Whole(on.disk.reads_merged)),
    ),
    counter(
        "container_fs_reads_total",
        "Cumulative count of reads completed",
        Some(|it| whole(&it.requests, "Read")),
        Some(|on| Number::Whole(on.disk.reads)),
    ),
    counter(
        "container_fs_sector_reads_total",
        "Cumulative count of sector reads completed",
        Some(|it| whole(&it.sectors, "Read")),
        Some(|on| Number::Whole(on.disk.sectors_read)),
    ),
    counter(
        "container_fs_sector_writes_total",
        "Cumulative count of sector writes completed",
        Some(|it| whole(&it.sectors, "Write")),
        Some(|on| Number::Whole(on.disk.sectors_written)),
    ),
    of_file_system(
        "container_fs_usage_bytes",
        "Number of bytes that are consumed by the container on this filesystem.",
        |on| Number::Whole(on.file_system.used_bytes),
    ),
    counter(
        "container_fs_write_seconds_total",
        "Cumulative count of seconds spent writing",
        Some(|it| nanos(&it.service_nanos, "Write")),
        Some(|on| millis(on.disk.write_millis)),
    ),
    counter(
        "container_fs_writes_bytes_total",
        "Cumulative count of bytes written",
        Some(|it| whole(&it.bytes, "Write")),
        None,
    ),
    counter(
        "container_fs_writes_merged_total",
        "Cumulative count of writes merged",
        Some(|it| whole(&it.merged, "Write")),
        Some(|on| Number::Whole(on.disk.writes_merged)),
    ),
    counter(
        "container_fs_writes_total",
        "Cumulative count of writes completed",
        Some(|it| whole(&it.requests, "Write")),
        Some(|on| Number::Whole(on.disk.writes)),
    ),
];

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use crate::stats::{cadvisor, example};

    fn lines(text: &str) -> String {
        let of_root = text.lines().filter(|line| line.starts_with("container_fs_") && line.contains("id=\"/\""));
        let bare = of_root.map(|line| line.replace(r#"container="",id="/",image="",name="",namespace="",pod="","#, ""));
        bare.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_root_has_its_disks_and_its_file_systems() {
        let text = cadvisor::exposition(Ok(&example::sample())).into_text();
        assert_snapshot!(lines(&text));
    }

    #[test]
    fn file_system_on_a_whole_disk_has_one_series() {
        let mut sample = example::sample();
        sample.partitions[0].device = "/dev/vda".to_owned();
        let text = lines(&cadvisor::exposition(Ok(&sample)).into_text());
        let reads: Vec<_> = text.lines().filter(|line| line.starts_with("container_fs_reads_total")).collect();
        assert_eq!(reads, ["container_fs_reads_total{device=\"/dev/vda\"} 10 1794769200250"]);
    }
}
