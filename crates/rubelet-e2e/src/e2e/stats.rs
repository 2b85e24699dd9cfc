//! Resource usage of the node and its pods, as collectors read it.

mod kernel;

use std::{thread, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    CgroupDriver,
    agent::AgentOptions,
    image::{BUSYBOX, PAUSE_NAMES},
};
use serde_json::{Value, json};

use crate::e2e::{Case, cgroups, node::Node};

pub const CASES: &[Case] = &[
    Case {
        name: "figures: processor and memory of node, pods and containers are counted, and grow with the work done",
        run: usage,
    },
    Case { name: "figures: the summary of a node has every field that upstream's has", run: whole_summary },
    Case { name: "figures: the metrics of cAdvisor have upstream's names, and containers their labels", run: cadvisor },
];

const MIB: f64 = 1_048_576.0;

/// Starts the agent with complete statistics, and a pod `busy`: `work` uses a third of a CPU, `idle` nothing. Its
/// cgroups have the driver of this machine.
fn start(node: &mut Node) -> anyhow::Result<()> {
    node.bed.use_driver(CgroupDriver::of_machine())?;
    let config = node.agent.own_cgroups()?;
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    let work = "echo hello; echo outside > /file; echo inside > /shared/file; sync; while :; do :; done";
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "busy" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "work", "image": BUSYBOX, "command": ["sh", "-c", work],
                    "resources": { "limits": { "cpu": "300m", "memory": "64Mi" } },
                    "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }],
                },
                { "name": "idle", "image": BUSYBOX, "command": ["sh", "-c", "echo hello; exec sleep 3600"] },
            ],
            "volumes": [{ "name": "shared", "emptyDir": {} }],
        },
    });
    node.drop_file("busy.json", serde_json::to_string(&manifest)?.as_bytes())?;
    node.wait_running("busy", 60).map(drop)
}

/// Text of Prometheus' format.
struct Scrape(String);

impl Scrape {
    fn take(node: &Node, path: &str) -> anyhow::Result<Scrape> {
        node.agent.read_only(path).map(Scrape)
    }

    /// The value of the one sample with this name and these labels among its own.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> anyhow::Result<f64> {
        let labels: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let mut samples = self.0.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label)))
        });
        let sample = samples.next().with_context(|| format!("there is no {name} {labels:?}"))?;
        let value = sample.rsplit('}').next().unwrap_or(sample).trim_start_matches(name);
        let value = value.split_whitespace().next().with_context(|| format!("no value: {sample}"))?;
        value.parse().with_context(|| format!("no number: {sample}"))
    }
}

fn usage(node: &mut Node) -> anyhow::Result<()> {
    start(node)?;
    let cpu = "container_cpu_usage_seconds_total";
    let of = |container| [("container", container), ("pod", "busy-node"), ("namespace", "default")];
    let early = node.wait("both containers have figures", 60, |node| {
        let scrape = Scrape::take(node, "/metrics/resource")?;
        ensure!(scrape.value(cpu, &of("work"))? > 0.1, "work did nothing yet");
        scrape.value(cpu, &of("idle"))?;
        Ok(scrape)
    })?;
    thread::sleep(Duration::from_secs(5));
    let late = Scrape::take(node, "/metrics/resource")?;
    let used = |container| anyhow::Ok(late.value(cpu, &of(container))? - early.value(cpu, &of(container))?);
    let (work, idle) = (used("work")?, used("idle")?);
    // A third of a CPU for five seconds; other load on the machine may take some of it, and the requests add to it.
    ensure!((0.4..4.0).contains(&work) && idle < 0.2, "in five seconds work used {work} s, idle {idle} s");
    let set = late.value("container_memory_working_set_bytes", &of("work"))?;
    ensure!((10_000.0..64.0 * MIB).contains(&set), "the working set of work is {set}");
    let pod = [("pod", "busy-node"), ("namespace", "default")];
    node.wait("the pod and the node have used at least as much", 60, |node| {
        let now = Scrape::take(node, "/metrics/resource")?;
        let (pod_secs, node_secs) =
            (now.value("pod_cpu_usage_seconds_total", &pod)?, now.value("node_cpu_usage_seconds_total", &[])?);
        ensure!(pod_secs >= late.value(cpu, &of("work"))? && node_secs >= pod_secs, "{pod_secs} of {node_secs}");
        let (pod_bytes, node_bytes) =
            (now.value("pod_memory_working_set_bytes", &pod)?, now.value("node_memory_working_set_bytes", &[])?);
        ensure!(pod_bytes >= set / 2.0 && node_bytes > 10.0 * MIB, "{pod_bytes} of {node_bytes}");
        ensure!(now.value("resource_scrape_error", &[])? == 0.0, "the scrape had an error");
        Ok(())
    })?;
    node.wait("the summary has the same and a rate", 60, |node| {
        let summary = summary(node, "?only_cpu_and_memory=true")?;
        let work = container(&summary, "work")?;
        let rate = work["cpu"]["usageNanoCores"].as_f64().context("it has no rate")?;
        ensure!((0.1e9..0.6e9).contains(&rate), "work's rate is {rate}");
        let memory = &work["memory"];
        let available = memory["availableBytes"].as_f64().context("nothing is available")?;
        let set = memory["workingSetBytes"].as_f64().context("no working set")?;
        ensure!(available + set == 64.0 * MIB, "{memory}");
        ensure!(work["rootfs"].is_null() && summary["node"]["fs"].is_null(), "more than asked for: {work}");
        let node_rate = &summary["node"]["cpu"]["usageNanoCores"];
        ensure!(node_rate.as_f64() > Some(rate / 2.0), "the node's rate is {node_rate}");
        Ok(())
    })?;
    if node.agent.is_upstream() {
        // It measures about every ten seconds, at unknown times.
        return Ok(());
    }
    kernel::compare(node)
}

fn summary(node: &Node, query: &str) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&node.agent.read_only(&format!("/stats/summary{query}"))?)?)
}

fn pod_in(summary: &Value) -> anyhow::Result<&Value> {
    let mut pods = summary["pods"].as_array().into_iter().flatten();
    pods.find(|pod| pod["podRef"]["name"] == "busy-node").with_context(|| format!("no pod in {summary}"))
}

fn container<'a>(summary: &'a Value, name: &str) -> anyhow::Result<&'a Value> {
    let pod = pod_in(summary)?;
    let mut containers = pod["containers"].as_array().into_iter().flatten();
    containers.find(|container| container["name"] == name).with_context(|| format!("no {name} in {pod}"))
}

/// The fields of both agents for a node, a pod and its container; `[pods]` is the entry of that name.
const FIELDS: &[&str] = &[
    "node.nodeName",
    "node.startTime",
    "node.cpu.{time,usageNanoCores,usageCoreNanoSeconds}",
    "node.memory.{time,availableBytes,usageBytes,workingSetBytes,rssBytes,pageFaults,majorPageFaults}",
    "node.swap.{time,swapAvailableBytes,swapUsageBytes}",
    "node.network.{time,interfaces}",
    "node.fs.{time,availableBytes,capacityBytes,usedBytes,inodesFree,inodes,inodesUsed}",
    "node.runtime.imageFs.{time,availableBytes,capacityBytes,usedBytes,inodesFree,inodes,inodesUsed}",
    "node.runtime.containerFs.{time,availableBytes,capacityBytes,usedBytes,inodesFree,inodes,inodesUsed}",
    "node.rlimit.{time,maxpid,curproc}",
    "pods.{name,startTime}",
    "pods.cpu.{time,usageNanoCores,usageCoreNanoSeconds}",
    "pods.memory.{time,availableBytes,usageBytes,workingSetBytes,rssBytes,pageFaults,majorPageFaults}",
    "pods.swap.{time,swapUsageBytes}",
    "pod.podRef.{name,namespace,uid}",
    "pod.startTime",
    "pod.cpu.{time,usageNanoCores,usageCoreNanoSeconds}",
    "pod.memory.{time,usageBytes,workingSetBytes,rssBytes,pageFaults,majorPageFaults}",
    "pod.swap.{time,swapUsageBytes}",
    "pod.network.{time,name,rxBytes,rxErrors,txBytes,txErrors,interfaces}",
    "pod.process_stats.process_count",
    "pod.ephemeral-storage.{time,availableBytes,capacityBytes,usedBytes,inodesFree,inodes,inodesUsed}",
    "container.{name,startTime}",
    "container.cpu.{time,usageNanoCores,usageCoreNanoSeconds}",
    "container.memory.{time,availableBytes,usageBytes,workingSetBytes,rssBytes,pageFaults,majorPageFaults}",
    "container.swap.{time,swapUsageBytes}",
    "container.rootfs.{time,availableBytes,capacityBytes,usedBytes,inodesFree,inodes,inodesUsed}",
    "container.logs.{time,availableBytes,capacityBytes,usedBytes,inodesFree,inodes,inodesUsed}",
    "node.cpu.psi.{some,full}",
    "node.memory.psi.{some,full}",
    "node.io.psi.{some,full}",
    "pods.cpu.psi.{some,full}",
    "pod.cpu.psi.{some,full}",
    "pod.memory.psi.{some,full}",
    "pod.io.psi.{some,full}",
    "container.cpu.psi.some.{total,avg10,avg60,avg300}",
    "container.memory.psi.full.{total,avg10,avg60,avg300}",
    "container.io.psi.{some,full}",
];

fn whole_summary(node: &mut Node) -> anyhow::Result<()> {
    start(node)?;
    let seen = node.wait("every field is there", 90, |node| {
        let summary = summary(node, "")?;
        let mut systems = summary["node"]["systemContainers"].as_array().into_iter().flatten();
        let subjects = json!({
            "node": summary["node"],
            "pods": systems.find(|system| system["name"] == "pods"),
            "pod": pod_in(&summary)?,
            "container": container(&summary, "work")?,
        });
        let missing: Vec<String> = FIELDS.iter().flat_map(|fields| missing(&subjects, fields)).collect();
        ensure!(missing.is_empty(), "missing: {missing:?}");
        let written = subjects["container"]["rootfs"]["usedBytes"].as_u64();
        ensure!(written > Some(0), "the layer of work is said to be empty");
        // Upstream measures one container after the other.
        let processes = &subjects["pod"]["process_stats"]["process_count"];
        ensure!(*processes == 2, "the pod is said to have {processes} processes");
        Ok(subjects)
    })?;
    let pod = &seen["pod"];
    ensure!(seen["container"]["logs"]["usedBytes"].as_u64() > Some(0), "{pod}");
    ensure!(pod["network"]["name"] == "eth0" && pod["network"]["txBytes"].as_u64() > Some(0), "{pod}");
    if !node.agent.is_upstream() {
        // Upstream measures volumes a minute after it first saw the pod.
        let mut volumes = pod["volume"].as_array().into_iter().flatten();
        let shared = volumes.find(|volume| volume["name"] == "shared").with_context(|| format!("no volume: {pod}"))?;
        ensure!(shared["usedBytes"].as_u64() > Some(0) && shared["inodesUsed"].as_u64() == Some(2), "{shared}");
    }
    Ok(())
}

/// Those of `a.b.{c,d}` that are missing.
fn missing(subjects: &Value, fields: &str) -> Vec<String> {
    let (place, names) = fields.rsplit_once('.').unwrap_or(("", fields));
    let parent = place.split('.').fold(subjects, |value, part| &value[part]);
    let names = names.trim_start_matches('{').trim_end_matches('}').split(',');
    names.filter(|name| parent[name].is_null()).map(|name| format!("{place}.{name}")).collect()
}

/// Names that both agents have on a node of either cgroup version, without those that need disk I/O.
const CADVISOR: &[&str] = &[
    "cadvisor_version_info",
    "container_cpu_cfs_burst_periods_total",
    "container_cpu_cfs_burst_seconds_total",
    "container_cpu_cfs_periods_total",
    "container_cpu_cfs_throttled_periods_total",
    "container_cpu_cfs_throttled_seconds_total",
    "container_cpu_system_seconds_total",
    "container_cpu_usage_seconds_total",
    "container_cpu_user_seconds_total",
    "container_file_descriptors",
    "container_fs_inodes_free",
    "container_fs_inodes_total",
    "container_fs_io_current",
    "container_fs_io_time_seconds_total",
    "container_fs_io_time_weighted_seconds_total",
    "container_fs_limit_bytes",
    "container_fs_read_seconds_total",
    "container_fs_reads_merged_total",
    "container_fs_reads_total",
    "container_fs_sector_reads_total",
    "container_fs_sector_writes_total",
    "container_fs_usage_bytes",
    "container_fs_write_seconds_total",
    "container_fs_writes_merged_total",
    "container_fs_writes_total",
    "container_last_seen",
    "container_memory_cache",
    "container_memory_failcnt",
    "container_memory_failures_total",
    "container_memory_kernel_usage",
    "container_memory_mapped_file",
    "container_memory_max_usage_bytes",
    "container_memory_rss",
    "container_memory_swap",
    "container_memory_total_active_file_bytes",
    "container_memory_total_inactive_file_bytes",
    "container_memory_usage_bytes",
    "container_memory_working_set_bytes",
    "container_network_receive_bytes_total",
    "container_network_receive_errors_total",
    "container_network_receive_packets_dropped_total",
    "container_network_receive_packets_total",
    "container_network_transmit_bytes_total",
    "container_network_transmit_errors_total",
    "container_network_transmit_packets_dropped_total",
    "container_network_transmit_packets_total",
    "container_oom_events_total",
    "container_processes",
    "container_scrape_error",
    "container_sockets",
    "container_spec_cpu_period",
    "container_spec_cpu_quota",
    "container_spec_cpu_shares",
    "container_spec_memory_limit_bytes",
    "container_spec_memory_reservation_limit_bytes",
    "container_spec_memory_swap_limit_bytes",
    "container_start_time_seconds",
    "container_threads",
    "container_threads_max",
    "container_ulimits_soft",
    "machine_cpu_cores",
    "machine_cpu_physical_cores",
    "machine_cpu_sockets",
    "machine_memory_bytes",
    "machine_scrape_error",
    "machine_swap_bytes",
];

/// The same on cgroup version 2.
const CADVISOR_PRESSURE: &[&str] = &[
    "container_pressure_cpu_stalled_seconds_total",
    "container_pressure_cpu_waiting_seconds_total",
    "container_pressure_io_stalled_seconds_total",
    "container_pressure_io_waiting_seconds_total",
    "container_pressure_memory_stalled_seconds_total",
    "container_pressure_memory_waiting_seconds_total",
];

fn cadvisor(node: &mut Node) -> anyhow::Result<()> {
    start(node)?;
    let pressure = if cgroups::is_v2() { CADVISOR_PRESSURE } else { &[] };
    let id = node.pod("busy")?.container("work")["containerID"].as_str().unwrap_or_default().to_owned();
    let id = id.trim_start_matches("containerd://");
    node.wait("every name is there", 90, |node| {
        let scrape = Scrape::take(node, "/metrics/cadvisor")?;
        let names = CADVISOR.iter().chain(pressure);
        let missing: Vec<_> = names.filter(|name| scrape.value(name, &[]).is_err()).collect();
        ensure!(missing.is_empty(), "missing: {missing:?}");
        let labels = [("container", "work"), ("pod", "busy-node"), ("namespace", "default"), ("name", id)];
        let labels = [labels.as_slice(), &[("image", BUSYBOX)]].concat();
        let quota = scrape.value("container_spec_cpu_quota", &labels)?;
        let limit = scrape.value("container_spec_memory_limit_bytes", &labels)?;
        ensure!(quota == 30_000.0 && limit == 64.0 * MIB, "quota {quota}, limit {limit}");
        ensure!(scrape.value("container_cpu_cfs_throttled_periods_total", &labels)? > 0.0, "it was never held back");
        ensure!(scrape.value("container_processes", &labels)? == 1.0, "it is one process");
        ensure!(scrape.value("container_file_descriptors", &labels)? >= 3.0, "it has no files open");
        // Debian's 1.6 names the image by either of its names.
        let sent = PAUSE_NAMES.map(|image| {
            let sandbox = [("container", ""), ("pod", "busy-node"), ("interface", "eth0"), ("image", image)];
            scrape.value("container_network_transmit_bytes_total", &sandbox).unwrap_or(0.0)
        });
        ensure!(sent.iter().sum::<f64>() > 0.0, "no sandbox with its image has sent anything");
        Ok(())
    })
}
