//! Rotation of logs while a container writes and `kubectl logs -f` reads.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use flate2::read::GzDecoder;
use rubelet_testbed::{agent::AgentOptions, clock::Stopwatch};
use serde_json::json;

use crate::{
    bench::Usage,
    e2e::cluster::{ClusterCase, ClusterNode, Plane, pod, spec},
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "logs are rotated and compressed under a writer and a reader, and no line is lost or doubled",
        plane: Plane::Shared,
        run: rotation,
    },
    ClusterCase {
        name: "a reader of a log that is written at full speed misses no line and sees none twice",
        plane: Plane::Shared,
        run: fast_writer,
    },
];

const MAX_FILES: usize = 10;
const ROTATIONS: usize = 20;
/// About 5 MB every second in the log, until it is told to stop.
const SCRIPT: &str = "trap 'exit 0' TERM; n=10; \
     while [ ! -e /tmp/stop ]; do seq ${n}00000 ${n}99999; n=$((n+1)); sleep 1; done; while :; do sleep 1; done";
const FIRST: u64 = 1_000_000;

fn rotation(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let mut config = cluster.node.agent.own_cgroups()?;
    config.insert("containerLogMaxSize".to_owned(), json!("1Mi"));
    config.insert("containerLogMaxFiles".to_owned(), json!(MAX_FILES));
    config.insert("containerLogMonitorInterval".to_owned(), json!("3s"));
    let membership = Some(cluster.membership()?);
    cluster.node.reconfigure(&AgentOptions { cluster: membership, config, ..AgentOptions::default() })?;
    cluster.start()?;
    cluster.apply(pod("writer", &spec(&cluster.name, SCRIPT)))?;
    let uid = cluster.wait_running("writer", 60)?.uid().to_owned();
    let mut follow = cluster.kubectl_command(&["logs", "-f", "writer"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().context("kubectl logs -f")?;
    let output = follow.stdout.take().context("its output")?;
    let reader = thread::spawn(move || lines(BufReader::new(output), FIRST, u64::MAX));

    let dir = cluster.node.agent.pod_logs_dir().join(format!("{}_writer_{uid}", cluster.name)).join("main");
    let mut seen = BTreeSet::new();
    cluster.wait("twenty rotations", 120, |_| {
        seen.extend(rotated(&dir)?.iter().map(|path| path.display().to_string().replace(".gz", "")));
        ensure!(seen.len() >= ROTATIONS, "{} so far", seen.len());
        Ok(())
    })?;
    cluster.kubectl(&["exec", "writer", "--", "touch", "/tmp/stop"])?;
    // Written, rotated, compressed.
    let sizes = |_: &ClusterNode| -> anyhow::Result<usize> {
        let files = rotated(&dir)?.into_iter().chain([dir.join("0.log")]);
        Ok(files.map(|file| fs::metadata(file).map_or(0, |meta| meta.len() as usize)).sum())
    };
    cluster.wait_still(Duration::from_secs(5), 120, sizes)?;
    let files = cluster.wait("the rotated files are compressed but the newest", 60, |_| {
        let live = fs::metadata(dir.join("0.log"))?.len();
        let files = rotated(&dir)?;
        let (newest, older) = files.split_last().context("none is rotated")?;
        let is_compressed = |path: &Path| path.extension().is_some_and(|extension| extension == "gz");
        ensure!(live < 1 << 20 && files.len() < MAX_FILES, "{live} bytes, {files:?}");
        ensure!(!is_compressed(newest) && older.iter().all(|path| is_compressed(path)), "{files:?}");
        Ok(files)
    })?;
    for file in files {
        let opened = fs::File::open(&file)?;
        let text: Box<dyn Read> = if file.extension().is_some_and(|it| it == "gz") {
            Box::new(GzDecoder::new(opened))
        } else {
            Box::new(opened)
        };
        check_file(BufReader::new(text)).with_context(|| file.display().to_string())?;
    }
    cluster.kubectl(&["delete", "pod", "writer", "--wait=false"])?;
    let status = follow.wait()?;
    let count = reader.join().expect("the reader does not panic")?;
    ensure!(status.success() && count > 1_000_000, "{count} lines, {status}");
    cluster.wait_none(30)
}

/// Lines of 1,000 bytes, as fast as the runtime takes them.
const FAST_SCRIPT: &str = "awk 'BEGIN { pad = sprintf(\"%992s\", \"\"); \
     for (n = 1000000; n < 1300000; n++) print n pad }'; exec sleep 3600";
const FAST_LINES: u64 = 300_000;
/// At one a second.
const FAST_ROTATIONS: usize = 3;
/// All lines fit, so that a slow reader loses none.
const MANY_FILES: usize = 90;

fn fast_writer(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let mut config = cluster.node.agent.own_cgroups()?;
    config.insert("containerLogMaxSize".to_owned(), json!("10Mi"));
    config.insert("containerLogMaxFiles".to_owned(), json!(MANY_FILES));
    let membership = Some(cluster.membership()?);
    cluster.node.reconfigure(&AgentOptions { cluster: membership, config, ..AgentOptions::default() })?;
    cluster.start()?;
    cluster.apply(pod("writer", &spec(&cluster.name, FAST_SCRIPT)))?;
    let uid = cluster.wait_running("writer", 60)?.uid().to_owned();
    let (watch, before) = (Stopwatch::start(), Usage::read(&cluster.node)?);
    let mut follow = cluster.kubectl_command(&["logs", "-f", "writer"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().context("kubectl logs -f")?;
    let output = BufReader::with_capacity(1 << 20, follow.stdout.take().context("its output")?);
    let reader = thread::spawn(move || lines(output, FIRST, FAST_LINES));
    let dir = cluster.node.agent.pod_logs_dir().join(format!("{}_writer_{uid}", cluster.name)).join("main");
    let (mut seen, mut written_secs) = (BTreeSet::new(), 0.0);
    cluster.wait("all is read", 300, |_| {
        let known = seen.len();
        seen.extend(rotated(&dir)?.iter().map(|path| path.display().to_string().replace(".gz", "")));
        if seen.len() > known {
            written_secs = watch.secs();
        }
        ensure!(reader.is_finished(), "{} rotations so far", seen.len());
        Ok(())
    })?;
    let count = reader.join().expect("the reader does not panic")?;
    let (read_secs, cpu_ns) = (watch.secs(), Usage::read(&cluster.node)?.cpu_ns.saturating_sub(before.cpu_ns));
    follow.kill()?;
    follow.wait()?;
    println!(
        "{count} lines of 1,000 bytes, written in {written_secs:.0} s, read in {read_secs:.0} s, {:.0} MB/s, with {:.1} s \
         of the agent's processor; {} rotations",
        count as f64 / 1e3 / read_secs,
        cpu_ns as f64 / 1e9,
        seen.len()
    );
    ensure!(count == FAST_LINES && seen.len() >= FAST_ROTATIONS, "{count} lines, {} rotations", seen.len());
    cluster.kubectl(&["delete", "pod", "writer", "--wait=false"])?;
    cluster.wait_none(60)
}

/// Rotated files, the oldest first.
fn rotated(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("0.log.") && !name.ends_with(".tmp") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The numbers follow each other from the first; returns how many there were, at most `limit`.
fn lines(text: impl BufRead, first: u64, limit: u64) -> anyhow::Result<u64> {
    let mut expected = first;
    for line in text.lines().take(usize::try_from(limit).unwrap_or(usize::MAX)) {
        let line = line?;
        if line.trim_end().parse() != Ok(expected) {
            bail!("line {:?} instead of {expected}", line.trim_end());
        }
        expected += 1;
    }
    Ok(expected - first)
}

/// `2026-11-17T21:58:01.000000000Z stdout F 1000000`, one after the other. When containerd opens a log anew in the
/// middle of a line, it ends the old file with a partial one (`P`) and begins the new file with the rest.
fn check_file(text: impl BufRead) -> anyhow::Result<()> {
    let mut last: Option<u64> = None;
    for line in text.lines().skip(1) {
        let line = line?;
        let [_, _, tag, number] = line.split(' ').collect::<Vec<_>>()[..] else { bail!("not four words: {line:?}") };
        if tag == "P" {
            continue;
        }
        let number: u64 = number.parse().with_context(|| line.clone())?;
        ensure!(last.is_none_or(|last| number == last + 1), "{number} after {last:?}");
        last = Some(number);
    }
    Ok(())
}
