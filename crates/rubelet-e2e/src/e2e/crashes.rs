//! Crashes: the agent or the runtime is killed, and pods are not affected.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::process::ProcessId;

use crate::e2e::{
    Case,
    manifest::{OBEDIENT, Pod, SLOW_TO_STOP},
    node::{Node, full_name},
};

pub const CASES: &[Case] = &[
    Case { name: "kill -9 of the agent while pods start: no container is restarted or doubled", run: killed_starting },
    Case { name: "kill -9 of the agent while a pod runs: nothing about the pod changes", run: killed_running },
    Case { name: "kill -9 of the agent while a pod stops: the stop goes on to its end", run: killed_stopping },
    Case { name: "a dead container whose task containerd's CRI lost sight of is removed", run: leftover_task },
    Case { name: "containerd is killed: running pods stay, new pods start once it is back", run: runtime_killed },
];

fn killed_starting(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    // At whatever point of a start the kill happens, the result must be the same.
    let moments_ms = [0, 30, 60, 100, 150, 200, 300, 400, 600, 900];
    for (number, moment_ms) in moments_ms.into_iter().enumerate() {
        let name = format!("web{number}");
        node.apply(&Pod::new(&name, OBEDIENT).notes(&node.notes(&name)).grace_secs(1))?;
        thread::sleep(Duration::from_millis(moment_ms));
        node.agent.kill();
        node.agent.start()?;
    }
    for number in 0..moments_ms.len() {
        let name = format!("web{number}");
        let pod = node.wait_running(&name, 60)?;
        ensure!(pod.container("main")["restartCount"] == 0, "{name}: {}", pod.container("main"));
    }
    // Time for a wrong second start.
    thread::sleep(Duration::from_secs(3));
    let containers = node.containers()?;
    let log = fs::read_to_string(node.agent.log())?;
    for number in 0..moments_ms.len() {
        let name = format!("web{number}");
        // A runtime may abort the start of a container whose client died when its process had just begun. That start is
        // repeated as the same attempt; no other start happens twice.
        let removal = format!("op=\"RemoveContainer\" about=\"default/{}/main\"", full_name(&name));
        let is_cut_off = |line: &&str| line.contains(&removal) && line.contains("its start was cut off");
        let cut_off = log.lines().filter(is_cut_off).count();
        let noted = node.noted(&name);
        let is_right = (1..=1 + cut_off).contains(&noted.len()) && noted.iter().all(|note| note == "start");
        ensure!(is_right, "{name} went {noted:?}, and {cut_off} of its starts were cut off");
        let running = |kind: &str| {
            let of_pod = containers.iter().filter(|container| container.pod == full_name(&name));
            of_pod.filter(|container| container.kind == kind && container.is_running).count()
        };
        ensure!(running("sandbox") == 1 && running("container") == 1, "{name}: {containers:#?}");
    }
    Ok(())
}

fn killed_running(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    node.apply(&Pod::new("web", OBEDIENT).notes(&node.notes("web")))?;
    // One that has been restarted: its count must not restart from zero.
    node.apply(
        &Pod::new("once", "[ -e /notes/again ] && exec sleep 3600; touch /notes/again; exit 1")
            .notes(&node.notes("once")),
    )?;
    let before = node.wait_running("web", 60)?.identity("main")?;
    let once_before = node.wait("once was restarted and runs", 60, |node| {
        let pod = node.pod("once")?;
        pod.check_running()?;
        let identity = pod.identity("main")?;
        ensure!(identity.restarts == 1, "{identity:?}");
        Ok(identity)
    })?;
    for _ in 0..3 {
        node.agent.kill();
        node.agent.start()?;
        let after = node.wait_running("web", 20)?.identity("main")?;
        ensure!(after == before, "before {before:?}, after {after:?}");
        let once_after = node.wait_running("once", 20)?.identity("main")?;
        ensure!(once_after == once_before, "before {once_before:?}, after {once_after:?}");
    }
    thread::sleep(Duration::from_secs(3));
    ensure!(node.pod("web")?.identity("main")? == before, "it changed some seconds later");
    ensure!(node.noted("web") == ["start"], "it went {:?}", node.noted("web"));
    Ok(())
}

fn killed_stopping(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    node.apply(&Pod::new("web", SLOW_TO_STOP).notes(&node.notes("web")).grace_secs(15))?;
    node.wait_running("web", 60)?;
    node.wait("it runs", 10, |node| {
        ensure!(node.noted("web") == ["start"]);
        Ok(())
    })?;
    node.remove("web")?;
    node.wait("it was asked to stop", 10, |node| {
        ensure!(node.noted("web").contains(&"term".to_owned()), "{:?}", node.noted("web"));
        Ok(())
    })?;
    node.agent.kill();
    node.agent.start()?;
    node.wait("it is stopped", 20, |node| node.check_stopped("web"))?;
    let noted = node.noted("web");
    // No source has the pod any more: the second agent gives it as little time as upstream does, and never restarts it.
    ensure!(noted.iter().filter(|note| *note == "start").count() == 1, "it was started again: it went {noted:?}");
    node.wait_gone("web", 90)
}

fn runtime_killed(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    node.apply(&Pod::new("old", OBEDIENT).notes(&node.notes("old")))?;
    let before = node.wait_running("old", 60)?.identity("main")?;
    let tasks = node.bed.ctr(["tasks", "list"])?;
    let id = before.id.trim_start_matches("containerd://");
    let line = tasks.lines().find(|line| line.starts_with(id)).with_context(|| format!("no task {id} in\n{tasks}"))?;
    let pid = line.split_whitespace().nth(1).and_then(|pid| pid.parse().ok()).context("a pid")?;
    let process = ProcessId::of(pid).context("the container's process is not there")?;

    node.bed.kill_containerd();
    node.apply(&Pod::new("new", OBEDIENT).notes(&node.notes("new")))?;
    node.wait("the agent says that the runtime is gone", 60, |node| {
        let events = node.agent.ask(&["events"])?;
        ensure!(events.contains("container runtime is down"), "{events}");
        Ok(())
    })?;
    ensure!(process.is_alive(), "the container died with containerd");
    ensure!(node.noted("new").is_empty(), "a pod started without a runtime");
    let during = node.pod("old")?.identity("main")?;
    ensure!(during == before, "before {before:?}, without a runtime {during:?}");

    node.bed.start_containerd()?;
    node.wait_running("new", 60)?;
    let after = node.wait_running("old", 30)?.identity("main")?;
    ensure!(after == before, "before {before:?}, after {after:?}");
    ensure!(process.is_alive() && node.noted("old") == ["start"], "it went {:?}", node.noted("old"));
    Ok(())
}

/// As after a start that was cut off: containerd lists the container as exited, and has a task for it. Here the task is made
/// afterwards, since a cut-off start leaves one only now and then.
fn leftover_task(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    // The first run ends, the second when it is told to; the others stay.
    let script = "echo start >> /notes/main; case $(wc -l < /notes/main) in 1) exit 1;; \
                  2) while [ ! -e /notes/end ]; do sleep 0.1; done; exit 1;; *) exec sleep 3600;; esac";
    node.apply(&Pod::new("web", script).notes(&node.notes("web")).grace_secs(1))?;
    let running_again = |restarts: u64| {
        node.wait("it was restarted and runs", 60, |node| {
            let pod = node.pod("web")?;
            pod.check_running()?;
            ensure!(pod.container("main")["restartCount"] == restarts, "{}", pod.container("main"));
            let ended = pod.container("main")["lastState"]["terminated"]["containerID"].as_str().context("an end")?;
            Ok(ended.trim_start_matches("containerd://").to_owned())
        })
    };
    let first = running_again(1)?;
    node.bed.ctr(["tasks", "start", "--detach", "--null-io", &first])?;
    let tasks = node.bed.ctr(["tasks", "list"])?;
    let is_running = tasks.lines().any(|line| line.starts_with(&first) && line.contains("RUNNING"));
    ensure!(is_running, "no task {first} in\n{tasks}");

    // With the next end there is one dead container too many.
    fs::write(node.notes("web").join("end"), "")?;
    running_again(2)?;
    node.wait("the first container is gone", 60, |node| {
        ensure!(node.containers()?.iter().all(|container| container.id != first));
        Ok(())
    })?;
    let tasks = node.bed.ctr(["tasks", "list"])?;
    ensure!(!tasks.contains(&first), "the task is still there:\n{tasks}");
    let events = node.agent.ask(&["events"])?;
    ensure!(events.contains("DeletedLeftoverTask"), "{events}");
    node.remove("web")?;
    node.wait_gone("web", 90)
}
