//! Tests of the testbed's own cleanup, `cargo xtask down`.

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    image::BUSYBOX,
    process,
    sweep::{self, Bridge},
};
use rustix::process::Signal;

use crate::e2e::{Case, node::Node};

pub const CASES: &[Case] =
    &[Case { name: "a testbed leaves nothing, even when containerd and its shims were killed", run: killed_testbed }];

fn killed_testbed(node: &mut Node) -> anyhow::Result<()> {
    // As long as the runtime's own ids, and different for each concurrent test.
    let id = format!("{:064x}", u64::from(std::process::id()) << 32 | u64::from(bridge_number(&node.bed.bridge()?)));
    let runc_root = node.bed.layout.dir.join("state/runc").display().to_string();
    let cgroup = format!("/k8s.io/{id}");
    node.bed.ctr([
        "run",
        "--detach",
        "--null-io",
        "--runc-root",
        &runc_root,
        "--cgroup",
        &cgroup,
        BUSYBOX,
        &id,
        "sleep",
        "3600",
    ])?;
    let tasks = node.bed.ctr(["tasks", "list"])?;
    ensure!(tasks.contains(&id), "no task in\n{tasks}");
    let dir = node.bed.layout.dir.clone();
    let bridge = Bridge::named(&node.bed.bridge()?).context("there is no bridge")?;
    node.bed.kill_containerd();
    let socket = node.bed.layout.socket().display().to_string();
    let shim = process::all().into_iter().find(|id| process::command_line(*id).contains(&socket));
    shim.context("there is no shim")?.signal(Signal::KILL);
    let before = sweep::leftovers(&dir, &bridge)?;
    ensure!(before.len() >= 3, "there must be something to sweep, found {before:?}");
    sweep::sweep(&dir)?;
    let left = sweep::leftovers(&dir, &bridge)?;
    ensure!(left.is_empty(), "left: {left:?}");
    let orphans = process::all().into_iter().filter(|process| {
        let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap_or_default();
        cgroups.contains(&id)
    });
    ensure!(orphans.count() == 0, "a process of the container is left");
    // Twice in a row is no error.
    sweep::sweep(&dir)
}

fn bridge_number(bridge: &str) -> u8 {
    bridge.trim_start_matches("rubelet").parse().unwrap_or(0)
}
