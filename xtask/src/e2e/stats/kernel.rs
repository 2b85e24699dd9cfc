//! The agent's figures beside the kernel's own files.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};

use super::{Scrape, container, summary};
use crate::e2e::node::Node;

/// All controllers in one tree: version 2.
pub fn is_unified() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// Where the kernel says a figure: a file of a controller, in it a word, and what makes it the unit of the metric.
struct Source {
    controller: &'static str,
    file: &'static str,
    word: &'static str,
    unit: f64,
}

const fn source(controller: &'static str, file: &'static str, word: &'static str, unit: f64) -> Source {
    Source { controller, file, word, unit }
}

/// Metrics of cAdvisor's page by version.
const VERSION_1: &[(&str, Source)] = &[
    ("container_cpu_usage_seconds_total", source("cpuacct", "cpuacct.usage", "", 1e-9)),
    ("container_memory_usage_bytes", source("memory", "memory.usage_in_bytes", "", 1.0)),
    ("container_memory_rss", source("memory", "memory.stat", "total_rss ", 1.0)),
    ("container_memory_cache", source("memory", "memory.stat", "total_cache ", 1.0)),
    ("container_threads", source("pids", "pids.current", "", 1.0)),
];
const VERSION_2: &[(&str, Source)] = &[
    ("container_cpu_usage_seconds_total", source("", "cpu.stat", "usage_usec ", 1e-6)),
    ("container_cpu_user_seconds_total", source("", "cpu.stat", "user_usec ", 1e-6)),
    ("container_cpu_cfs_throttled_seconds_total", source("", "cpu.stat", "throttled_usec ", 1e-6)),
    ("container_memory_usage_bytes", source("", "memory.current", "", 1.0)),
    ("container_memory_rss", source("", "memory.stat", "anon ", 1.0)),
    ("container_memory_cache", source("", "memory.stat", "file ", 1.0)),
    ("container_memory_mapped_file", source("", "memory.stat", "file_mapped ", 1.0)),
    ("container_threads", source("", "pids.current", "", 1.0)),
    ("container_pressure_cpu_waiting_seconds_total", source("", "cpu.pressure", "some ", 1e-6)),
    ("container_pressure_cpu_stalled_seconds_total", source("", "cpu.pressure", "full ", 1e-6)),
    ("container_pressure_memory_waiting_seconds_total", source("", "memory.pressure", "some ", 1e-6)),
    ("container_pressure_io_waiting_seconds_total", source("", "io.pressure", "some ", 1e-6)),
    ("container_fs_reads_bytes_total", source("", "io.stat", "rbytes=", 1.0)),
    ("container_fs_writes_bytes_total", source("", "io.stat", "wbytes=", 1.0)),
];

/// Every figure of `work` is between what the kernel says before and after it was asked for.
pub fn compare(node: &Node) -> anyhow::Result<()> {
    let id = node.pod("busy")?.container("work")["containerID"].as_str().unwrap_or_default().to_owned();
    let cgroups = cgroups_of(node, id.trim_start_matches("containerd://"))?;
    let metrics = if is_unified() { VERSION_2 } else { VERSION_1 };
    let read = || metrics.iter().map(|(_, source)| source.read(&cgroups)).collect::<anyhow::Result<Vec<_>>>();
    node.wait("the figures of work are the kernel's", 60, |node| {
        let (before, page, after) = (read()?, Scrape::take(node, "/metrics/cadvisor")?, read()?);
        for (((name, _), before), after) in metrics.iter().zip(before).zip(after) {
            let (Some(before), Some(after)) = (before, after) else { continue };
            let said = page.value(name, &[("container", "work"), ("pod", "busy-node")])?;
            let (least, most) = (before.min(after) - 1e-6, before.max(after) + 1e-6);
            ensure!((least..=most).contains(&said), "{name} is {said}, the kernel has {before} and then {after}");
        }
        Ok(())
    })?;
    if !is_unified() {
        return Ok(());
    }
    let waited = |node: &Node| {
        let summary = summary(node, "?only_cpu_and_memory=true")?;
        let work = &container(&summary, "work")?["cpu"]["psi"]["some"]["total"];
        work.as_u64().with_context(|| format!("work has no pressure: {work}"))
    };
    // It wants a whole processor and has a third of one.
    let early = waited(node)?;
    node.wait("the pressure on work grows by a second", 60, |node| {
        let late = waited(node)?;
        ensure!(late > early + 1_000_000, "{early} us became {late}");
        Ok(())
    })
}

/// `/proc/…/cgroup` of a container's first process.
fn cgroups_of(node: &Node, id: &str) -> anyhow::Result<String> {
    let tasks = node.bed.ctr(["tasks", "list"])?;
    let task = tasks.lines().find(|line| line.starts_with(id)).context("work has no task")?;
    let pid = task.split_whitespace().nth(1).context("a task without a process")?;
    Ok(fs::read_to_string(format!("/proc/{pid}/cgroup"))?)
}

impl Source {
    /// `None` where the kernel has nothing to say, as of a disk that was not used.
    fn read(&self, cgroups: &str) -> anyhow::Result<Option<f64>> {
        let of_controller =
            |line: &&str| line.split(':').nth(1).is_some_and(|all| all.split(',').any(|name| name == self.controller));
        let line = cgroups.lines().find(of_controller).with_context(|| format!("no cgroup of {}", self.controller))?;
        let path = line.splitn(3, ':').nth(2).unwrap_or_default();
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{}{path}/{}", self.controller, self.file))?;
        let rest = text.lines().find_map(|line| Some(line.split_once(self.word)?.1));
        let Some(rest) = rest else { return Ok(None) };
        let number = rest.split_once("total=").map_or(rest, |(_, total)| total).split_whitespace().next();
        let number: f64 = number.with_context(|| format!("{} says nothing", self.file))?.parse()?;
        Ok(Some(number * self.unit))
    }
}
