//! Logs of containers that write as fast as the runtime takes it.

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{agent::AgentOptions, clock::Stopwatch};
use serde_json::{Map, json};

use crate::e2e::{
    Case,
    manifest::Pod,
    node::{Node, full_name},
};

pub const CASES: &[Case] = &[
    Case { name: "a quiet log that suddenly grows does not fill the disk", run: sudden_growth },
    Case { name: "logs of two containers are rotated by two workers to the maximum of files", run: two_workers },
];

const MAX_BYTES: u64 = 10 << 20;
const MAX_FILES: usize = 5;
/// A second between two looks, and half a second for a look and a rotation on a busy machine.
const REACTION_SECS: f64 = 1.5;
const WRITING_SECS: u64 = 15;
const SAMPLE: Duration = Duration::from_millis(20);

fn sudden_growth(node: &mut Node) -> anyhow::Result<()> {
    let mut config = Map::new();
    config.insert("containerLogMaxSize".to_owned(), json!("10Mi"));
    config.insert("containerLogMaxFiles".to_owned(), json!(MAX_FILES));
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    // Quiet for longer than the interval, then lines of 4,000 bytes.
    let line = "a line of a log ".repeat(250);
    let script = format!("sleep 13; timeout {WRITING_SECS} yes '{line}'; exec sleep 3600");
    node.apply(&Pod::new("writer", &script).grace_secs(1))?;
    node.wait_running("writer", 60)?;
    let dir = node.wait("its log", 10, |node| log_dir(node, "writer"))?;
    let seen = node.wait("it writes", 60, |_| {
        let sizes = sizes(&dir)?;
        ensure!(sizes.iter().any(|file| file.bytes > 0), "nothing is written");
        Ok(watch(&dir))
    })??;
    println!(
        "{:.0} MB/s for {:.0} s, at most {:.0} MB in a second: the live file had at most {:.0} MB, all {} files {:.0} MB",
        seen.written as f64 / seen.secs / 1e6,
        seen.secs,
        seen.rate / 1e6,
        seen.live as f64 / 1e6,
        seen.files,
        seen.all as f64 / 1e6
    );
    ensure!(seen.written > 4 * MAX_BYTES, "it wrote only {} bytes", seen.written);
    // While a rotation runs, the oldest file is removed last; while one is compressed, both forms are there.
    ensure!(seen.files <= MAX_FILES + 2, "{} files", seen.files);
    if !node.agent.is_upstream() {
        let allowed = 2.0 * MAX_BYTES as f64 + REACTION_SECS * seen.rate;
        ensure!(seen.live as f64 <= allowed, "the live file had {} bytes at {:.0} bytes/s", seen.live, seen.rate);
        ensure!(seen.all as f64 <= allowed * MAX_FILES as f64, "all files had {} bytes", seen.all);
    }
    Ok(())
}

/// As upstream's `ContainerLogRotationWithMultipleWorkers`.
fn two_workers(node: &mut Node) -> anyhow::Result<()> {
    const FILES: usize = 3;
    const PODS: [&str; 2] = ["one", "two"];
    let mut config = Map::new();
    config.insert("containerLogMaxSize".to_owned(), json!("40Ki"));
    config.insert("containerLogMaxFiles".to_owned(), json!(FILES));
    config.insert("containerLogMaxWorkers".to_owned(), json!(2));
    config.insert("containerLogMonitorInterval".to_owned(), json!("3s"));
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    for pod in PODS {
        node.apply(&Pod::new(pod, "while true; do echo hello world; sleep 0.001; done").grace_secs(1))?;
    }
    let files = |node: &Node| {
        let count = |pod: &str| Ok(sizes(&log_dir(node, pod)?)?.iter().filter(|file| !file.is_temporary).count());
        PODS.into_iter().map(count).collect::<anyhow::Result<Vec<usize>>>()
    };
    node.wait("both have as many files as they may", 120, |node| {
        let found = files(node)?;
        ensure!(found == [FILES; 2], "{found:?}");
        Ok(())
    })?;
    let watch = Stopwatch::start();
    while watch.secs() < 15.0 {
        let found = files(node)?;
        ensure!(found.iter().all(|count| *count <= FILES + 2), "{found:?}");
        std::thread::sleep(SAMPLE);
    }
    Ok(())
}

/// The highest values while the container writes.
#[derive(Debug, Default)]
struct Peaks {
    live: u64,
    all: u64,
    files: usize,
    written: u64,
    /// Bytes per second, over at least one second.
    rate: f64,
    secs: f64,
}

/// Until nothing is written for two seconds.
fn watch(dir: &Path) -> anyhow::Result<Peaks> {
    let mut peaks = Peaks::default();
    let mut by_inode: BTreeMap<u64, u64> = BTreeMap::new();
    let watch = Stopwatch::start();
    let mut written_at: VecDeque<(f64, u64)> = VecDeque::new();
    while watch.secs() < peaks.secs + 2.0 {
        let found = sizes(dir)?;
        for file in found.iter().filter(|file| !file.is_compressed) {
            let known = by_inode.entry(file.inode).or_default();
            if file.bytes > *known {
                peaks.secs = watch.secs();
                *known = file.bytes;
            }
        }
        peaks.written = by_inode.values().sum();
        written_at.push_back((watch.secs(), peaks.written));
        while let [(then, written), (next, _), ..] = *written_at.make_contiguous()
            && watch.secs() - then >= 1.0
        {
            peaks.rate = peaks.rate.max((peaks.written - written) as f64 / (watch.secs() - then));
            if watch.secs() - next < 1.0 {
                break;
            }
            written_at.pop_front();
        }
        let live = found.iter().find(|file| file.is_live).map_or(0, |file| file.bytes);
        peaks.live = peaks.live.max(live);
        peaks.all = peaks.all.max(found.iter().map(|file| file.bytes).sum());
        peaks.files = peaks.files.max(found.iter().filter(|file| !file.is_temporary).count());
        std::thread::sleep(SAMPLE);
    }
    Ok(peaks)
}

struct LogFile {
    inode: u64,
    bytes: u64,
    is_live: bool,
    is_compressed: bool,
    is_temporary: bool,
}

fn sizes(dir: &Path) -> anyhow::Result<Vec<LogFile>> {
    let mut files: Vec<LogFile> = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        // A rotation may remove it now.
        let Ok(meta) = entry.metadata() else { continue };
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_temporary = name.ends_with(".tmp");
        let file = LogFile {
            inode: meta.ino(),
            bytes: meta.len(),
            is_live: name == "0.log",
            is_compressed: name.ends_with(".gz") || is_temporary,
            is_temporary,
        };
        // It may have been renamed while the directory was read.
        if !files.iter().any(|known| known.inode == file.inode) {
            files.push(file);
        }
    }
    Ok(files)
}

fn log_dir(node: &Node, pod: &str) -> anyhow::Result<PathBuf> {
    let prefix = format!("default_{}_", full_name(pod));
    let mut dirs = fs::read_dir(node.agent.pod_logs_dir())?.flatten();
    let dir = dirs.find(|dir| dir.file_name().to_string_lossy().starts_with(&prefix)).context("no log directory")?;
    Ok(dir.path().join("main"))
}
