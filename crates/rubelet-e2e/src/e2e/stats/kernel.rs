//! The agent's values compared with the kernel's files.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};

use super::{Scrape, container, summary};
use crate::e2e::{cgroups, node::Node};

/// The kernel's source of a value: a file of a controller, a key in it, and the factor to the metric's unit.
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

/// The values of `work`, its pod, its QoS class and all pods equal the kernel's, and `work` is throttled.
pub fn compare(node: &Node) -> anyhow::Result<()> {
    let id = node.pod("busy")?.container("work")["containerID"].as_str().unwrap_or_default().to_owned();
    let work = cgroups::of_container(node, id.trim_start_matches("containerd://"))?;
    let of_pods = work.ancestors().take(4);
    for cgroup in of_pods {
        node.wait(&format!("the figures of {} are the kernel's", cgroup.display()), 20, |node| agree(node, cgroup))?;
    }
    if !cgroups::is_v2() {
        return Ok(());
    }
    let waited = |node: &Node| {
        let summary = summary(node, "?only_cpu_and_memory=true")?;
        let work = &container(&summary, "work")?["cpu"]["psi"]["some"]["total"];
        work.as_u64().with_context(|| format!("work has no pressure: {work}"))
    };
    // It needs a whole CPU and has a third of one.
    let early = waited(node)?;
    node.wait("the pressure on work grows by a second", 60, |node| {
        let late = waited(node)?;
        ensure!(late > early + 1_000_000, "{early} us became {late}");
        Ok(())
    })
}

/// Every value is between the kernel's before and after the request.
fn agree(node: &Node, cgroup: &Path) -> anyhow::Result<()> {
    let metrics = if cgroups::is_v2() { VERSION_2 } else { VERSION_1 };
    let read = || metrics.iter().map(|(_, source)| source.read(cgroup)).collect::<anyhow::Result<Vec<_>>>();
    let (before, page, after) = (read()?, Scrape::take(node, "/metrics/cadvisor")?, read()?);
    let mut wrong = Vec::new();
    for (((name, _), before), after) in metrics.iter().zip(before).zip(after) {
        let (Some(before), Some(after)) = (before, after) else { continue };
        let said = page.value(name, &[("id", cgroup.to_str().unwrap_or_default())])?;
        let (least, most) = (before.min(after) - 1e-6, before.max(after) + 1e-6);
        if !(least..=most).contains(&said) {
            wrong.push(format!("{name} is {said}, the kernel has {before} and then {after}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

impl Source {
    /// `None` if the kernel has no value, as of an unused disk.
    fn read(&self, cgroup: &Path) -> anyhow::Result<Option<f64>> {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{}{}/{}", self.controller, cgroup.display(), self.file))?;
        if text.is_empty() {
            return Ok(None);
        }
        let rest = text.lines().find_map(|line| Some(line.split_once(self.word)?.1));
        let rest = rest.with_context(|| format!("{} has no {}: {text}", self.file, self.word))?;
        let number = rest.split_once("total=").map_or(rest, |(_, total)| total).split_whitespace().next();
        let number: f64 = number.with_context(|| format!("{} says nothing", self.file))?.parse()?;
        Ok(Some(number * self.unit))
    }
}
