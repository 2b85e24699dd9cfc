//! `/metrics/cadvisor`: usage of the cgroups of node, pods and containers, with cAdvisor's names.
//!
//! Owns: its names and labels. Metrics that cAdvisor never fills in a kubelet (load, task states, health, NVM) are omitted.
//! Upstream: `metrics/prometheus.go` and `prometheus_machine.go` of cAdvisor, `containerPrometheusLabelsFunc` of
//! `pkg/kubelet/server/server.go`, which also chooses the sets of metrics.

mod disks;

use std::fmt::{self, Display};

use jiff::Timestamp;
use rubelet_host::stats::{
    cgroup::{Cpu, Memory, Pressure},
    process::{Interface, Traffic},
};

use super::{
    exposition::{Exposition, Kind, Labels},
    resource_metrics::seconds,
    sample::{ContainerSample, Measured, Processes, Sample, SampleError},
};

/// A cgroup as cAdvisor shows it.
struct CgroupView<'a> {
    labels: Labels,
    at: Timestamp,
    measured: &'a Measured,
    interfaces: &'a [Interface],
    /// Only of containers and sandboxes.
    processes: Option<Processes>,
    /// Of the machine, for the root cgroup.
    memory_limit_bytes: Option<u64>,
}

enum Number {
    Whole(u64),
    Signed(i64),
    Real(f64),
}

impl Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(number) => number.fmt(f),
            Number::Signed(number) => number.fmt(f),
            Number::Real(number) => number.fmt(f),
        }
    }
}

pub(crate) fn exposition(sample: Result<&Sample, &SampleError>) -> Exposition {
    let mut exposition = Exposition::default();
    if let Ok(sample) = sample {
        let views = views(sample);
        for table in [CPU, MEMORY, PROCESSES, PRESSURE] {
            plain(&mut exposition, &views, table);
        }
        of_spec(&mut exposition, &views);
        faults(&mut exposition, &views);
        disks::write(&mut exposition, &views, &sample.partitions);
        networks(&mut exposition, &views);
        machine(&mut exposition, sample);
    }
    let help = "1 if there was an error while getting container metrics, 0 otherwise";
    let failed = u8::from(sample.is_err());
    exposition.gauge("container_scrape_error", help).add(&Labels::default(), failed, None);
    exposition
}

fn views(sample: &Sample) -> Vec<CgroupView<'_>> {
    let plain = |measured| CgroupView {
        labels: labels(measured, ["", "", "", "", ""]),
        at: sample.at,
        measured,
        interfaces: &[],
        processes: None,
        memory_limit_bytes: None,
    };
    let root = sample.root.iter().map(|root| CgroupView {
        interfaces: &sample.interfaces,
        memory_limit_bytes: Some(sample.machine.memory_bytes),
        ..plain(root)
    });
    let pods_root = sample.tiers.first().map(|tier| tier.cgroup.as_str());
    let system = sample.system.iter().map(|(_, measured)| measured);
    // An agent without its own cgroup is in the root, which is listed already.
    let system = system.filter(|measured| pods_root != Some(&measured.cgroup) && measured.cgroup != "/");
    let mut views: Vec<CgroupView<'_>> = root.chain(system.chain(&sample.tiers).map(plain)).collect();
    for pod in &sample.pods {
        let (name, namespace) = (pod.target.name.as_str(), pod.target.namespace.as_str());
        let of = |container: &ContainerSample| {
            let target = &container.target;
            labels(&container.measured, [&target.name, &target.image, &target.id, namespace, name])
        };
        views.extend(
            pod.own.iter().map(|own| CgroupView { labels: labels(own, ["", "", "", namespace, name]), ..plain(own) }),
        );
        // Network metrics are those of the sandbox, which all containers share.
        let sandbox = pod.sandbox.iter().map(|sandbox| (sandbox, pod.interfaces.as_slice()));
        let containers = pod.containers.iter().map(|container| (container, [].as_slice()));
        views.extend(sandbox.chain(containers).map(|(container, interfaces)| CgroupView {
            labels: of(container),
            interfaces,
            processes: Some(container.processes),
            ..plain(&container.measured)
        }));
    }
    views
}

fn labels(measured: &Measured, [container, image, name, namespace, pod]: [&str; 5]) -> Labels {
    Labels::new([
        ("container", container),
        ("id", &measured.cgroup),
        ("image", image),
        ("name", name),
        ("namespace", namespace),
        ("pod", pod),
    ])
}

/// A metric with at most one value per cgroup.
struct Plain {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: fn(&CgroupView<'_>) -> Option<Number>,
}

const fn counter(name: &'static str, help: &'static str, value: fn(&CgroupView<'_>) -> Option<Number>) -> Plain {
    Plain { name, kind: Kind::Counter, help, value }
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&CgroupView<'_>) -> Option<Number>) -> Plain {
    Plain { name, kind: Kind::Gauge, help, value }
}

fn plain(exposition: &mut Exposition, views: &[CgroupView<'_>], table: &[Plain]) {
    for metric in table {
        let mut family = exposition.family(metric.name, metric.kind, metric.help);
        for view in views {
            if let Some(value) = (metric.value)(view) {
                family.add(&view.labels, value, Some(view.at));
            }
        }
    }
}

fn cpu(view: &CgroupView<'_>, value: fn(&Cpu) -> Number) -> Option<Number> {
    view.measured.stats.cpu.as_ref().map(value)
}

/// Only for a cgroup with a limit.
fn limited(view: &CgroupView<'_>, value: fn(&Cpu) -> Number) -> Option<Number> {
    view.measured.stats.cpu.as_ref().filter(|cpu| cpu.limits.quota_micros.is_some()).map(value)
}

fn memory(view: &CgroupView<'_>, value: fn(&Memory) -> u64) -> Option<Number> {
    view.measured.stats.memory.as_ref().map(|memory| Number::Whole(value(memory)))
}

fn nanos(nanos: u64) -> Number {
    Number::Real(seconds(nanos))
}

const CPU: &[Plain] = &[
    counter("container_cpu_cfs_burst_periods_total", "Number of periods when burst occurs.", |it| {
        limited(it, |cpu| Number::Whole(cpu.throttling.burst_periods))
    }),
    counter("container_cpu_cfs_burst_seconds_total", "Total time duration the container has been bursted.", |it| {
        limited(it, |cpu| nanos(cpu.throttling.burst_nanos))
    }),
    counter("container_cpu_cfs_periods_total", "Number of elapsed enforcement period intervals.", |it| {
        limited(it, |cpu| Number::Whole(cpu.throttling.periods))
    }),
    counter("container_cpu_cfs_throttled_periods_total", "Number of throttled period intervals.", |it| {
        limited(it, |cpu| Number::Whole(cpu.throttling.throttled_periods))
    }),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Total time duration the container has been throttled.",
        |it| limited(it, |cpu| nanos(cpu.throttling.throttled_nanos)),
    ),
    counter("container_cpu_system_seconds_total", "Cumulative system cpu time consumed in seconds.", |it| {
        cpu(it, |cpu| nanos(cpu.system_nanos))
    }),
    counter("container_cpu_user_seconds_total", "Cumulative user cpu time consumed in seconds.", |it| {
        cpu(it, |cpu| nanos(cpu.user_nanos))
    }),
];

const MEMORY: &[Plain] = &[
    gauge("container_last_seen", "Last time a container was seen by the exporter", |it| {
        Some(Number::Signed(it.at.as_second()))
    }),
    gauge("container_memory_cache", "Number of bytes of page cache memory.", |it| memory(it, |m| m.cache_bytes)),
    counter("container_memory_failcnt", "Number of memory usage hits limits", |it| {
        memory(it, |m| m.details.limit_hits)
    }),
    gauge("container_memory_kernel_usage", "Size of kernel memory allocated in bytes.", |it| {
        memory(it, |m| m.details.kernel_bytes)
    }),
    gauge("container_memory_mapped_file", "Size of memory mapped files in bytes.", |it| {
        memory(it, |m| m.mapped_file_bytes)
    }),
    gauge("container_memory_max_usage_bytes", "Maximum memory usage recorded in bytes", |it| {
        memory(it, |m| m.details.max_usage_bytes)
    }),
    gauge("container_memory_rss", "Size of RSS in bytes.", |it| memory(it, |m| m.rss_bytes)),
    gauge("container_memory_swap", "Container swap usage in bytes.", |it| memory(it, |m| m.swap_bytes)),
    gauge("container_memory_total_active_file_bytes", "Current total active file in bytes.", |it| {
        memory(it, |m| m.active_file_bytes)
    }),
    gauge("container_memory_total_inactive_file_bytes", "Current total inactive file in bytes.", |it| {
        memory(it, |m| m.inactive_file_bytes)
    }),
    gauge(
        "container_memory_usage_bytes",
        "Current memory usage in bytes, including all memory regardless of when it was accessed",
        |it| memory(it, |m| m.usage_bytes),
    ),
    gauge("container_memory_working_set_bytes", "Current working set in bytes.", |it| {
        memory(it, |m| m.working_set_bytes)
    }),
    counter("container_oom_events_total", "Count of out of memory events observed for the container", |it| {
        memory(it, |m| m.details.oom_kills)
    }),
];

const PROCESSES: &[Plain] = &[
    gauge("container_file_descriptors", "Number of open file descriptors for the container.", |it| {
        it.processes.map(|processes| Number::Whole(processes.open.files))
    }),
    gauge("container_processes", "Number of processes running inside the container.", |it| {
        it.processes.map(|processes| Number::Whole(processes.count))
    }),
    gauge("container_sockets", "Number of open sockets for the container.", |it| {
        it.processes.map(|processes| Number::Whole(processes.open.sockets))
    }),
    gauge("container_threads", "Number of threads running inside the container", |it| {
        it.measured.stats.pids.map(|pids| Number::Whole(pids.current))
    }),
    gauge(
        "container_threads_max",
        "Maximum number of threads allowed inside the container, infinity if value is zero",
        |it| it.measured.stats.pids.map(|pids| Number::Whole(pids.limit.unwrap_or(0))),
    ),
];

fn pressure(pressure: Option<Pressure>, total_micros: fn(Pressure) -> u64) -> Option<Number> {
    pressure.map(|pressure| Number::Real(total_micros(pressure) as f64 / 1e6))
}

fn cpu_pressure(it: &CgroupView<'_>) -> Option<Pressure> {
    it.measured.stats.cpu.as_ref()?.pressure
}

fn memory_pressure(it: &CgroupView<'_>) -> Option<Pressure> {
    it.measured.stats.memory.as_ref()?.pressure
}

const PRESSURE: &[Plain] = &[
    counter(
        "container_pressure_cpu_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to CPU congestion.",
        |it| pressure(cpu_pressure(it), |pressure| pressure.full.total_micros),
    ),
    counter(
        "container_pressure_cpu_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to CPU congestion.",
        |it| pressure(cpu_pressure(it), |pressure| pressure.some.total_micros),
    ),
    counter(
        "container_pressure_io_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to IO congestion.",
        |it| pressure(it.measured.stats.io_pressure, |pressure| pressure.full.total_micros),
    ),
    counter(
        "container_pressure_io_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to IO congestion.",
        |it| pressure(it.measured.stats.io_pressure, |pressure| pressure.some.total_micros),
    ),
    counter(
        "container_pressure_memory_stalled_seconds_total",
        "Total time duration no tasks in the container could make progress due to memory congestion.",
        |it| pressure(memory_pressure(it), |pressure| pressure.full.total_micros),
    ),
    counter(
        "container_pressure_memory_waiting_seconds_total",
        "Total time duration tasks in the container have waited due to memory congestion.",
        |it| pressure(memory_pressure(it), |pressure| pressure.some.total_micros),
    ),
];

/// Limits; they are constant and have no timestamp.
const SPEC: &[Plain] = &[
    gauge("container_spec_cpu_period", "CPU period of the container.", |it| {
        it.measured.stats.cpu.as_ref()?.limits.period_micros.map(Number::Whole)
    }),
    gauge("container_spec_cpu_quota", "CPU quota of the container.", |it| {
        it.measured.stats.cpu.as_ref()?.limits.quota_micros.map(Number::Whole)
    }),
    gauge("container_spec_cpu_shares", "CPU share of the container.", |it| {
        it.measured.stats.cpu.as_ref()?.limits.shares.map(Number::Whole)
    }),
    gauge("container_spec_memory_limit_bytes", "Memory limit for the container.", |it| {
        let own = it.measured.stats.memory.as_ref()?.limit_bytes;
        Some(Number::Whole(it.memory_limit_bytes.or(own).unwrap_or(0)))
    }),
    gauge("container_spec_memory_reservation_limit_bytes", "Memory reservation limit for the container.", |it| {
        memory(it, |m| m.details.reservation_bytes.unwrap_or(0))
    }),
    gauge("container_spec_memory_swap_limit_bytes", "Memory swap limit for the container.", |it| {
        memory(it, |m| m.details.stated_swap_limit_bytes.unwrap_or(0))
    }),
    gauge("container_start_time_seconds", "Start time of the container since unix epoch in seconds.", |it| {
        let created = Timestamp::try_from(it.measured.stats.created?).ok()?;
        Some(Number::Signed(created.as_second()))
    }),
];

fn of_spec(exposition: &mut Exposition, views: &[CgroupView<'_>]) {
    for metric in SPEC {
        let mut family = exposition.family(metric.name, metric.kind, metric.help);
        for view in views {
            if let Some(value) = (metric.value)(view) {
                family.add(&view.labels, value, None);
            }
        }
    }
}

/// Metrics with additional labels.
fn faults(exposition: &mut Exposition, views: &[CgroupView<'_>]) {
    let mut family =
        exposition.counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed in seconds.");
    for view in views {
        if let Some(cpu) = view.measured.stats.cpu.as_ref().filter(|cpu| cpu.usage_nanos > 0) {
            let labels = view.labels.and([("cpu", "total")]);
            family.add(&labels, seconds(cpu.usage_nanos), Some(view.at));
        }
    }
    let help = "Cumulative count of memory allocation failures.";
    let mut family = exposition.counter("container_memory_failures_total", help);
    for view in views {
        let Some(memory) = &view.measured.stats.memory else { continue };
        // Both scopes are equal, as upstream.
        for scope in ["container", "hierarchy"] {
            for (kind, value) in [("pgfault", memory.page_faults), ("pgmajfault", memory.major_page_faults)] {
                let labels = view.labels.and([("failure_type", kind), ("scope", scope)]);
                family.add(&labels, value, Some(view.at));
            }
        }
    }
    let help = "Soft ulimit values for the container root process. Unlimited if -1, except priority and nice";
    let mut family = exposition.gauge("container_ulimits_soft", help);
    for view in views {
        if let Some(limit) = view.processes.and_then(|processes| processes.open_files_limit) {
            family.add(&view.labels.and([("ulimit", "max_open_files")]), limit, Some(view.at));
        }
    }
}

fn networks(exposition: &mut Exposition, views: &[CgroupView<'_>]) {
    type Read = fn(&Interface) -> u64;
    fn received(interface: &Interface) -> Traffic {
        interface.received
    }
    fn sent(interface: &Interface) -> Traffic {
        interface.sent
    }
    let metrics: [(&str, &str, Read); 8] = [
        ("container_network_receive_bytes_total", "Cumulative count of bytes received", |it| received(it).bytes),
        ("container_network_receive_errors_total", "Cumulative count of errors encountered while receiving", |it| {
            received(it).errors
        }),
        (
            "container_network_receive_packets_dropped_total",
            "Cumulative count of packets dropped while receiving",
            |it| received(it).dropped,
        ),
        ("container_network_receive_packets_total", "Cumulative count of packets received", |it| received(it).packets),
        ("container_network_transmit_bytes_total", "Cumulative count of bytes transmitted", |it| sent(it).bytes),
        (
            "container_network_transmit_errors_total",
            "Cumulative count of errors encountered while transmitting",
            |it| sent(it).errors,
        ),
        (
            "container_network_transmit_packets_dropped_total",
            "Cumulative count of packets dropped while transmitting",
            |it| sent(it).dropped,
        ),
        ("container_network_transmit_packets_total", "Cumulative count of packets transmitted", |it| sent(it).packets),
    ];
    for (name, help, value) in metrics {
        let mut family = exposition.counter(name, help);
        for view in views {
            for interface in view.interfaces {
                let labels = view.labels.and([("interface", interface.name.as_str())]);
                family.add(&labels, value(interface), Some(view.at));
            }
        }
    }
}

fn machine(exposition: &mut Exposition, sample: &Sample) {
    let identity = &sample.identity;
    let version = Labels::new([
        ("cadvisorRevision", ""),
        ("cadvisorVersion", ""),
        ("dockerVersion", ""),
        ("kernelVersion", identity.kernel_version.as_str()),
        ("osVersion", &identity.os_image),
    ]);
    let help = "A metric with a constant '1' value labeled by kernel version, OS version, docker version, cadvisor version & \
                cadvisor revision.";
    exposition.gauge("cadvisor_version_info", help).add(&version, 1, None);
    let labels = Labels::new([
        ("boot_id", identity.boot_id.as_str()),
        ("machine_id", &identity.machine_id),
        ("system_uuid", &identity.system_uuid),
    ]);
    let topology = &sample.topology;
    for (name, help, value) in [
        ("machine_cpu_cores", "Number of logical CPU cores.", topology.cores as u64),
        ("machine_cpu_physical_cores", "Number of physical CPU cores.", topology.physical_cores as u64),
        ("machine_cpu_sockets", "Number of CPU sockets.", topology.sockets as u64),
        ("machine_memory_bytes", "Amount of memory installed on the machine.", sample.machine.memory_bytes),
        ("machine_swap_bytes", "Amount of swap memory available on the machine.", sample.machine.swap_total_bytes),
    ] {
        exposition.gauge(name, help).add(&labels, value, Some(sample.at));
    }
    let help = "1 if there was an error while getting machine metrics, 0 otherwise.";
    exposition.gauge("machine_scrape_error", help).add(&Labels::default(), 0, None);
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::stats::example;

    #[test]
    fn a_container_has_upstreams_names_and_labels() {
        let text = exposition(Ok(&example::sample())).into_text();
        let own = text.lines().filter(|line| line.contains("container=\"work\""));
        assert_snapshot!(own.collect::<Vec<_>>().join("\n"));
    }

    #[test]
    fn node_pod_and_sandbox_have_what_is_theirs() {
        let text = exposition(Ok(&example::sample())).into_text();
        let shown =
            ["machine_", "cadvisor_", "container_network_receive_bytes", "container_fs_limit", "container_processes"];
        let shown = text.lines().filter(|line| shown.iter().any(|start| line.starts_with(start)));
        assert_snapshot!(shown.collect::<Vec<_>>().join("\n"));
    }

    #[test]
    fn the_pods_cgroup_is_there_once() {
        let text = exposition(Ok(&example::sample())).into_text();
        let seen = text.lines().filter(|line| line.starts_with("container_last_seen{"));
        let ids: Vec<&str> = seen.filter_map(|line| line.split("id=\"").nth(1)?.split('"').next()).collect();
        let expected = ["/", "/system.slice/kubelet.service", "/kubepods", "/kubepods/podu1"];
        assert_eq!(ids[..4], expected);
        assert_eq!(ids[4..], ["/kubepods/podu1/s1", "/kubepods/podu1/c1"]);
    }
}
