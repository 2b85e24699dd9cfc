//! A shutdown of the machine: logind's own, and one announced on the system bus as upstream's own end-to-end tests do.
//!
//! The real logind takes part: its delay, its inhibitor, its signals. The machine stays up: the signal is not logind's, or the
//! target of logind's shutdown is masked when it gets there.

use std::{
    fs,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::AgentOptions,
    command::{SHORT, command, output},
    image::BUSYBOX,
};
use serde_json::{Map, Value, json};

use crate::e2e::{
    Case,
    node::{Node, PodSeen},
};

/// On machines with systemd.
pub const WITH_LOGIND: &[Case] = &[
    Case {
        name: "a shutdown of the machine ends pods in order of priority, each group in its time, and is cancelled again",
        run: by_priority,
    },
    Case {
        name: "a shutdown of the machine by logind waits for pods, which run again if it fails, and after the next boot",
        run: by_logind,
    },
];

const LOGIND: &str = "org.freedesktop.login1";
const OBJECT: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";

/// The priority of each group and the seconds it gets, enough for an emulated machine but in the last.
pub const GROUPS: [(i32, u64); 4] = [(0, 90), (1000, 90), (10_000, 90), (100_000, 20)];
const PODS_PER_GROUP: usize = 5;
/// In the last group: it ignores SIGTERM, and its own grace period is longer than the group's.
const STUBBORN: &str = "g3-stubborn";

/// Every agent of the machine sees the signal.
pub static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Its own grace period is longer than that of any group.
fn pod(name: &str, priority: i32, script: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "priority": priority,
            "terminationGracePeriodSeconds": 300,
            "containers": [{ "name": "main", "image": BUSYBOX, "command": ["sh", "-c", script] }],
        },
    })
}

pub fn names(group: usize) -> Vec<String> {
    let last = GROUPS.len() - 1;
    let plain = (0..PODS_PER_GROUP - usize::from(group == last)).map(|number| format!("g{group}-{number}"));
    plain.chain((group == last).then(|| STUBBORN.to_owned())).collect()
}

pub fn all_names() -> impl Iterator<Item = String> {
    (0..GROUPS.len()).flat_map(names)
}

pub fn script(name: &str) -> &'static str {
    if name == STUBBORN {
        "trap '' TERM; while :; do sleep 1; done"
    } else {
        "trap 'sleep 1; exit 0' TERM; while :; do sleep 1; done"
    }
}

pub fn config_of_groups() -> Map<String, Value> {
    let groups = GROUPS.map(|(priority, secs)| json!({ "priority": priority, "shutdownGracePeriodSeconds": secs }));
    Map::from_iter([("shutdownGracePeriodByPodPriority".to_owned(), json!(groups))])
}

fn busctl(args: &[&str]) -> anyhow::Result<String> {
    output(&mut command("busctl", args), SHORT)
}

pub fn announce(begins: bool) -> anyhow::Result<()> {
    busctl(&["emit", OBJECT, MANAGER, "PrepareForShutdown", "b", if begins { "true" } else { "false" }]).map(drop)
}

pub fn is_inhibited() -> anyhow::Result<bool> {
    let list = busctl(&["call", LOGIND, OBJECT, MANAGER, "ListInhibitors"])?;
    Ok(list.contains(r#""shutdown" "kubelet" "Kubelet needs time to handle node shutdown" "delay""#))
}

fn wait_inhibited(node: &Node, expected: bool) -> anyhow::Result<()> {
    node.wait(&format!("the shutdown is inhibited: {expected}"), 120, |_| {
        ensure!(is_inhibited()? == expected, "it is not so");
        Ok(())
    })
}

fn by_priority(node: &mut Node) -> anyhow::Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    node.reconfigure(&AgentOptions { config: config_of_groups(), ..AgentOptions::default() })?;
    for (group, (priority, _)) in GROUPS.into_iter().enumerate() {
        for name in names(group) {
            let manifest = pod(&name, priority, script(&name));
            node.drop_file(&format!("{name}.json"), manifest.to_string().as_bytes())?;
        }
    }
    node.agent.start()?;
    wait_inhibited(node, true)?;
    check_delay()?;
    for name in all_names() {
        node.wait_running(&name, 600)?;
    }
    announce(true)?;
    let ended: Vec<PodSeen> =
        node.wait("every pod has failed", 400, |node| all_names().map(|name| failed(node, &name)).collect())?;
    check_order(&ended)?;
    wait_inhibited(node, false)?;
    check_state_file(node)?;
    // Nothing starts, not even a new pod.
    node.drop_file("late.json", pod("late", 0, "sleep 3600").to_string().as_bytes())?;
    node.wait("the new pod is rejected", 60, |node| {
        let seen = node.pod("late")?;
        ensure!(seen.status()["reason"] == "NodeShutdown", "{}", seen.status());
        Ok(())
    })?;
    check_nothing_runs(node)?;
    announce(false)?;
    wait_inhibited(node, true)?;
    for name in all_names().chain(["late".to_owned()]) {
        node.wait_running(&name, 600)?;
    }
    Ok(())
}

/// Logind's shutdown begins when the pods have ended, and fails as its target is masked by then. The next one is followed by a boot.
fn by_logind(node: &mut Node) -> anyhow::Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let config = json!({ "shutdownGracePeriod": "120s", "shutdownGracePeriodCriticalPods": "30s" });
    node.reconfigure(&AgentOptions {
        config: config.as_object().cloned().unwrap_or_default(),
        ..AgentOptions::default()
    })?;
    let names = ["web", "critical"];
    // Long enough to mask the target.
    let slow_to_stop = "trap 'sleep 15; exit 0' TERM; while :; do sleep 1; done";
    for (name, priority) in names.into_iter().zip([0, 2_000_000_000]) {
        node.drop_file(&format!("{name}.json"), pod(name, priority, slow_to_stop).to_string().as_bytes())?;
    }
    node.agent.start()?;
    wait_inhibited(node, true)?;
    for name in names {
        node.wait_running(name, 60)?;
    }
    busctl(&["call", LOGIND, OBJECT, MANAGER, "Reboot", "b", "false"])?;
    let mask = Mask::of("reboot.target")?;
    ensure!(is_preparing()?, "logind does not wait for the pods");
    node.wait("logind gives up", 120, |_| {
        ensure!(!is_preparing()?, "it is still preparing");
        Ok(())
    })?;
    drop(mask);
    wait_inhibited(node, true)?;
    for name in names {
        let seen = node.wait_running(name, 120)?;
        let last = &seen.container("main")["lastState"]["terminated"];
        ensure!(last["exitCode"] == 0, "{name} did not end by itself: {}", seen.status());
    }
    announce(true)?;
    node.wait("every pod has failed", 120, |node| names.iter().try_for_each(|name| failed(node, name).map(drop)))?;
    wait_inhibited(node, false)?;
    ensure!(readiness(node)?["NotReady"] == json!(["node is shutting down"]), "{}", readiness(node)?);
    check_nothing_runs(node)?;
    node.agent.kill();
    node.bed.reboot()?;
    node.agent.start()?;
    check_boot(node, &names)
}

/// Pods run again, and the node is never seen as not ready.
fn check_boot(node: &Node, names: &[&str]) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    node.wait("the pods run again", 120, |node| {
        seen.push(readiness(node)?);
        names.iter().try_for_each(|name| node.pod(name)?.check_running())
    })?;
    seen.push(readiness(node)?);
    let was_unready = seen.iter().any(|readiness| readiness.get("NotReady").is_some());
    ensure!(!was_unready && seen.last().is_some_and(|last| *last == "Ready"), "{seen:?}");
    wait_inhibited(node, true)
}

fn readiness(node: &Node) -> anyhow::Result<Value> {
    let report: Value = serde_json::from_str(&node.agent.ask(&["node", "-o", "json"])?)?;
    Ok(report["readiness"].clone())
}

fn is_preparing() -> anyhow::Result<bool> {
    Ok(busctl(&["get-property", LOGIND, OBJECT, MANAGER, "PreparingForShutdown"])?.trim() == "b true")
}

/// One list of the runtime for all pods: each takes seconds on an emulated machine.
fn check_nothing_runs(node: &Node) -> anyhow::Result<()> {
    let running: Vec<_> = node.containers()?.into_iter().filter(|container| container.is_running).collect();
    ensure!(running.is_empty(), "the runtime still runs {running:?}");
    Ok(())
}

/// A unit that cannot be started until this is dropped.
struct Mask(&'static str);

impl Mask {
    fn of(unit: &'static str) -> anyhow::Result<Self> {
        output(&mut command("systemctl", ["mask", "--runtime", unit]), SHORT)?;
        Ok(Mask(unit))
    }
}

impl Drop for Mask {
    fn drop(&mut self) {
        if let Err(error) = output(&mut command("systemctl", ["unmask", "--runtime", self.0]), SHORT) {
            eprintln!("unmask {}: {error:#}", self.0);
        }
    }
}

/// Logind waits as long as all groups together may take.
fn check_delay() -> anyhow::Result<()> {
    let secs: u64 = GROUPS.iter().map(|(_, secs)| secs).sum();
    let text = fs::read_to_string("/etc/systemd/logind.conf.d/99-kubelet.conf").context("the override")?;
    ensure!(text == format!("# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={secs}\n"), "{text}");
    let delay = busctl(&["get-property", LOGIND, OBJECT, MANAGER, "InhibitDelayMaxUSec"])?;
    ensure!(delay.trim() == format!("t {}", secs * 1_000_000), "{delay}");
    Ok(())
}

fn failed(node: &Node, name: &str) -> anyhow::Result<PodSeen> {
    let seen = node.pod(name)?;
    check_failed(&seen)?;
    Ok(seen)
}

pub fn check_failed(seen: &PodSeen) -> anyhow::Result<()> {
    let status = seen.status();
    let message = "Pod was terminated in response to imminent node shutdown.";
    ensure!(
        status["phase"] == "Failed" && status["reason"] == "Terminated" && status["message"] == message,
        "{status}"
    );
    let conditions = status["conditions"].as_array().context("conditions")?;
    let has = |kind: &str, value: &str| conditions.iter().any(|it| it["type"] == kind && it["status"] == value);
    ensure!(has("DisruptionTarget", "True") && has("ContainersReady", "False") && has("Ready", "False"), "{status}");
    ensure!(has("PodReadyToStartContainers", "False"), "{status}");
    Ok(())
}

/// No pod ends before the last one of the group below; the stubborn one is killed, and not before its time.
pub fn check_order(ended: &[PodSeen]) -> anyhow::Result<()> {
    let end_of =
        |seen: &PodSeen| seen.container("main")["state"]["terminated"]["finishedAt"].as_str().map(str::to_owned);
    let mut last = String::new();
    let mut rest = ended;
    for group in 0..GROUPS.len() {
        let (these, others) = rest.split_at(PODS_PER_GROUP);
        rest = others;
        let ends: Option<Vec<String>> = these.iter().map(end_of).collect();
        let ends = ends.with_context(|| format!("an end of each pod of group {group}"))?;
        // Times of one form and length compare as texts.
        ensure!(ends.iter().all(|end| *end >= last), "group {group} ends at {ends:?}, the one before it at {last}");
        last = ends.into_iter().max().unwrap_or_default();
        println!("group {group} has ended at {last}");
        for seen in these {
            let code = &seen.container("main")["state"]["terminated"]["exitCode"];
            let expected = if seen.name().starts_with(STUBBORN) { 137 } else { 0 };
            ensure!(*code == expected, "{} ended with {code}", seen.name());
        }
    }
    Ok(())
}

fn check_state_file(node: &Node) -> anyhow::Result<()> {
    let text = fs::read_to_string(node.agent.root_dir().join("graceful_node_shutdown_state"))?;
    let state: Value = serde_json::from_str(&text)?;
    let (start, end) = (state["startTime"].as_str(), state["endTime"].as_str());
    ensure!(start.zip(end).is_some_and(|(start, end)| start < end), "{text}");
    Ok(())
}
