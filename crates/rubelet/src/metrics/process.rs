//! The agent's process and build information.
//!
//! Owns: process figures of the kernel, read at a scrape. They are all in /proc, so no read waits for a disk.
//! Upstream: `prometheus/client_golang` (process collector), `component-base/metrics` (build info, start time).

use std::fs;

use super::text::{Labels, Text};
use crate::cli::KUBERNETES_VERSION;

/// Of `/proc/self/stat`: fixed on every architecture Rubelet is built for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Unreadable figures are omitted.
pub(crate) fn write(text: &mut Text) {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (stat, limits, status) = (read("/proc/self/stat"), read("/proc/self/limits"), read("/proc/self/status"));
    let mut tell = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            text.single(name, kind, help, value);
        }
    };
    tell(
        "process_cpu_seconds_total",
        "counter",
        "Total user and system CPU time spent in seconds.",
        cpu_seconds(&stat),
    );
    tell("process_max_fds", "gauge", "Maximum number of open file descriptors.", limit(&limits, "Max open files"));
    tell("process_open_fds", "gauge", "Number of open file descriptors.", open_files());
    tell("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", size(&status, "VmRSS:"));
    tell("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", size(&status, "VmSize:"));
    tell(
        "process_virtual_memory_max_bytes",
        "gauge",
        "Maximum amount of virtual memory available in bytes.",
        limit(&limits, "Max address space"),
    );
    write_start_time(text, START_TIME);
}

const START_TIME: &str = "Start time of the process since unix epoch in seconds.";
/// The same metric for another page, where upstream adds a stability level.
pub(crate) const START_TIME_OF_KUBERNETES: &str = "[ALPHA] Start time of the process since unix epoch in seconds.";

/// Lets readers of counters detect a restart.
pub(crate) fn write_start_time(text: &mut Text, help: &str) {
    if let Some(began) = start_time_secs() {
        text.single("process_start_time_seconds", "gauge", help, began);
    }
}

/// Since the epoch.
pub(crate) fn start_time_secs() -> Option<f64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    start_time(&read("/proc/self/stat"), &read("/proc/stat"))
}

/// The Kubernetes version that is implemented. Fields about Go's build are empty.
pub(crate) fn write_build_info(text: &mut Text) {
    const NAME: &str = "kubernetes_build_info";
    let help = "[BETA] A metric with a constant '1' value labeled by major, minor, git version, git commit, git tree state, \
                build date, Go version, and compiler from which Kubernetes was built, and platform on which it is running.";
    let mut numbers = KUBERNETES_VERSION.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let platform = format!("linux/{architecture}");
    text.head(NAME, "gauge", help);
    let labels = [
        ("build_date", ""),
        ("compiler", "rustc"),
        ("git_commit", ""),
        ("git_tree_state", ""),
        ("git_version", KUBERNETES_VERSION),
        ("go_version", ""),
        ("major", major),
        ("minor", minor),
        ("platform", &platform),
    ];
    text.sample((NAME, ""), Labels::of(&labels), 1.0);
}

/// The fields of `/proc/self/stat` after the name, which may hold anything; the first of them is number 3 in proc(5).
fn field(stat: &str, number: usize) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    Some((field(stat, 14)? + field(stat, 15)?) / TICKS_PER_SECOND)
}

fn start_time(stat: &str, system: &str) -> Option<f64> {
    let booted: f64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(booted + field(stat, 22)? / TICKS_PER_SECOND)
}

/// The soft limit. Unlimited is the largest value, as upstream shows it.
fn limit(limits: &str, name: &str) -> Option<f64> {
    let soft = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if soft == "unlimited" { Some(2f64.powi(64)) } else { soft.parse().ok() }
}

fn size(status: &str, name: &str) -> Option<f64> {
    let kibibytes: f64 =
        status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes * 1024.0)
}

/// The descriptor of the directory itself is not counted.
#[expect(clippy::cast_precision_loss, reason = "the kernel allows fewer files than a float can count")]
fn open_files() -> Option<f64> {
    let open = fs::read_dir("/proc/self/fd").ok()?.count();
    Some(open.saturating_sub(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_program_does_not_disturb_its_figures() {
        let stat = "7 (a) 1 (b c) S 1 7 7 0 -1 4194560 1 0 0 0 250 150 0 0 20 0 9 0 12345 4096 10";
        assert_eq!(cpu_seconds(stat), Some(4.0));
        assert_eq!(start_time(stat, "cpu 1 2\nbtime 1000\n"), Some(1123.45));
        assert_eq!((cpu_seconds(""), start_time(stat, "")), (None, None));
    }

    #[test]
    fn limits_and_sizes_are_those_of_proc() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max open files            1024                 4096                 files\n\
                      Max address space         unlimited            unlimited            bytes\n";
        assert_eq!(limit(limits, "Max open files"), Some(1024.0));
        assert_eq!(limit(limits, "Max address space"), Some(18_446_744_073_709_551_616.0));
        assert_eq!(size("VmPeak:\t 9 kB\nVmRSS:\t    12 kB\n", "VmRSS:"), Some(12288.0));
    }

    #[test]
    fn this_very_process_has_all_figures() {
        let mut text = Text::default();
        write(&mut text);
        let page = text.into_string();
        assert_eq!(page.matches("# TYPE process_").count(), 7, "{page}");
    }
}
