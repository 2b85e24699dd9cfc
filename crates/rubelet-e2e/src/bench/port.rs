//! The cost of the agent's port: metrics pages, exec, a followed log.
//!
//! Owns: these measurements. Pages are read from the read-only port, so that TLS does not hide the agent's work;
//! the idle cost of the same time is measured separately. A log is read through the API server and kubectl, which cost
//! the same with every agent: the agent's own CPU time is listed beside it.

use std::{
    io::{Read as _, Write as _},
    path::Path,
    process::Stdio,
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    Programs, Runtime, Testbed,
    agent::{self, AgentOptions, Program},
    clock::Stopwatch,
    progress::step,
    sweep_orphans,
};
use serde_json::json;

use super::{Row, Usage, cluster::fill, machine, median, render};
use crate::e2e::{
    cluster::{ClusterNode, Plane, Planes, WEBSOCKET, account, pod, spec},
    secured_port,
};

const PODS: usize = 100;
const SCRAPES: u32 = 20;
/// Longer than any response is cached.
const BETWEEN_SCRAPES: Duration = Duration::from_millis(2_100);
const TRIES: usize = 5;
const COMMANDS: usize = 50;
const LOG_MIB: u64 = 128;

pub fn run(runtime: Runtime, kubelet: Option<&Path>) -> anyhow::Result<()> {
    let binary = step("building Rubelet (release)", agent::build)?;
    let programs = Programs::ensure(runtime)?;
    sweep_orphans()?;
    let planes = Planes::ensure()?;
    let measure = |name: &str, program: &Program| {
        let mut cluster = ClusterNode::new(&planes, Plane::Shared, Testbed::start(&programs)?, program)?;
        // A log rotated during the read would differ between the two.
        let mut config = cluster.node.agent.own_cgroups()?;
        config.insert("containerLogMaxSize".to_owned(), json!("2Gi"));
        let membership = Some(cluster.membership()?);
        cluster.node.reconfigure(&AgentOptions {
            cluster: membership,
            config,
            verbosity: Some(2),
            ..AgentOptions::default()
        })?;
        cluster.start()?;
        let log = step(&format!("{name}: following {LOG_MIB} MiB of a log"), || follow(&cluster))?;
        step(&format!("{name}: starting {PODS} pods"), || fill(&cluster, PODS))?;
        let command = step(&format!("{name}: starting {COMMANDS} commands"), || commands(&cluster))?;
        let pages = step(&format!("{name}: asking for figures of {PODS} pods"), || pages(&cluster))?;
        anyhow::Ok(Measured { log, command, pages })
    };
    let ours = measure("Rubelet", &Program::Rubelet(binary))?;
    let peer = kubelet.map(|path| measure("upstream", &Program::Upstream(path.to_owned()))).transpose()?;
    println!("\n{}", render(&machine(runtime), &ROWS, &ours, peer.as_ref()));
    Ok(())
}

#[derive(Debug)]
struct Measured {
    log: Cost,
    command: Cost,
    pages: Pages,
}

/// As seen by the client and as CPU time of the agent.
#[derive(Debug)]
struct Cost {
    taken_ms: f64,
    cpu_ms: f64,
}

#[derive(Debug)]
struct Pages {
    /// The scrape period of most collectors, without requests.
    resting_cpu_ms: f64,
    cadvisor: Cost,
    summary: Cost,
    resource: Cost,
}

const ROWS: [Row<Measured>; 11] = [
    ("`kubectl logs -f` of 128 MiB", "ms", |m| m.log.taken_ms, ""),
    ("… the agent's processor", "ms", |m| m.log.cpu_ms, ""),
    ("a command on the agent's port, from connecting to its end, median of 50", "ms", |m| m.command.taken_ms, ""),
    ("… the agent's processor", "ms", |m| m.command.cpu_ms, ""),
    (
        "`/metrics/cadvisor` of 100 pods, asked for every 15 s, processor per scrape",
        "ms",
        |m| m.pages.whole(&m.pages.cadvisor),
        "",
    ),
    ("… of it while answering", "ms", |m| m.pages.cadvisor.cpu_ms, ""),
    ("… answered in, median", "ms", |m| m.pages.cadvisor.taken_ms, ""),
    ("`/stats/summary`, the same", "ms", |m| m.pages.whole(&m.pages.summary), ""),
    ("… of it while answering", "ms", |m| m.pages.summary.cpu_ms, ""),
    ("`/metrics/resource`, the same", "ms", |m| m.pages.whole(&m.pages.resource), ""),
    ("… of it while answering", "ms", |m| m.pages.resource.cpu_ms, ""),
];

impl Pages {
    /// The cost of a page between two scrapes: one agent reads values on request, the other all the time.
    fn whole(&self, page: &Cost) -> f64 {
        self.resting_cpu_ms + page.cpu_ms
    }
}

/// The log is complete when it is requested; following ends because the container has ended.
fn follow(cluster: &ClusterNode) -> anyhow::Result<Cost> {
    let line =
        "a line of a log as programs write it, with a time, a level, a place and a few words about what happened";
    let script = format!("yes '{line}' | head -c {}; echo", LOG_MIB << 20);
    let mut writer = spec(&cluster.name, &script);
    writer["restartPolicy"] = json!("Never");
    cluster.apply(pod("writer", &writer))?;
    cluster.wait("the log is written", 300, |cluster| {
        let status = cluster.pod("writer")?;
        ensure!(status.status()["phase"] == "Succeeded", "{}", status.status());
        Ok(())
    })?;
    let used = Usage::read(&cluster.node)?;
    let watch = Stopwatch::start();
    let mut logs = cluster.kubectl_command(&["logs", "-f", "writer"]);
    let mut logs = logs.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("kubectl logs")?;
    let read = std::io::copy(&mut logs.stdout.take().context("its output")?, &mut std::io::sink())?;
    ensure!(logs.wait()?.success() && read > LOG_MIB << 20, "{read} bytes of the log came");
    let taken_ms = watch.secs() * 1000.0;
    let cost = Cost { taken_ms, cpu_ms: cpu_ms_since(cluster, &used)? };
    cluster.kubectl(&["delete", "pod", "writer"])?;
    Ok(cost)
}

/// On the agent's own port, by WebSocket, until the exit status: kubectl and the API server would hide the agent's time.
fn commands(cluster: &ClusterNode) -> anyhow::Result<Cost> {
    let token = account(cluster, "caller", &["proxy"])?;
    let path = format!("/exec/{}/many0/main?output=1&command=true", cluster.name);
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: n\r\nConnection: Upgrade\r\nAuthorization: Bearer {token}\r\n{WEBSOCKET}\r\n"
    );
    let run = || {
        let watch = Stopwatch::start();
        let mut stream = secured_port::connect(&cluster.node.agent)?;
        stream.write_all(head.as_bytes())?;
        let mut heard = Vec::new();
        while !heard.windows(7).any(|words| words == b"Success") {
            let mut piece = [0; 1024];
            let count = stream.read(&mut piece)?;
            ensure!(count > 0, "the command did not succeed: {}", String::from_utf8_lossy(&heard));
            heard.extend(&piece[..count]);
        }
        anyhow::Ok(watch.secs() * 1000.0)
    };
    // The first request needs a review; both agents cache it for the others.
    run()?;
    let used = Usage::read(&cluster.node)?;
    let taken: Vec<f64> = (0..COMMANDS).map(|_| run()).collect::<Result<_, _>>()?;
    let cpu_ms = cpu_ms_since(cluster, &used)? / COMMANDS as f64;
    Ok(Cost { cpu_ms, taken_ms: median(taken)? })
}

fn pages(cluster: &ClusterNode) -> anyhow::Result<Pages> {
    let page = |path: &str| {
        // The first may warm caches for the others.
        scrape(cluster, path)?;
        thread::sleep(BETWEEN_SCRAPES);
        let mut taken = Vec::new();
        let used = Usage::read(&cluster.node)?;
        for _ in 0..SCRAPES {
            let (text, secs) = scrape(cluster, path)?;
            ensure!(text.contains("many0"), "{path} says nothing of the pods");
            taken.push(secs * 1000.0);
            thread::sleep(BETWEEN_SCRAPES.saturating_sub(Duration::try_from_secs_f64(secs)?));
        }
        anyhow::Ok(Cost { taken_ms: median(taken)?, cpu_ms: cpu_ms_since(cluster, &used)? })
    };
    let (cadvisor, summary, resource) =
        (page("/metrics/cadvisor")?, page("/stats/summary")?, page("/metrics/resource")?);
    // Last, long after the start of the pods.
    let resting_ms = resting_ms(cluster, BETWEEN_SCRAPES * SCRAPES)?;
    let answering = |page: Cost| Cost { cpu_ms: (page.cpu_ms - resting_ms).max(0.0) / f64::from(SCRAPES), ..page };
    Ok(Pages {
        resting_cpu_ms: resting_ms * 15.0 / (BETWEEN_SCRAPES * SCRAPES).as_secs_f64(),
        cadvisor: answering(cadvisor),
        summary: answering(summary),
        resource: answering(resource),
    })
}

/// Upstream returns no summary if one part of it is unavailable; it is requested again, as monitoring would.
fn scrape(cluster: &ClusterNode, path: &str) -> anyhow::Result<(String, f64)> {
    let mut refused = None;
    for _ in 0..TRIES {
        let watch = Stopwatch::start();
        match cluster.node.agent.read_only(path) {
            Ok(text) => return Ok((text, watch.secs())),
            Err(error) => {
                println!("refused: {error:#}");
                refused = Some(error);
                thread::sleep(BETWEEN_SCRAPES);
            }
        }
    }
    Err(refused.context("nobody asked")?)
}

fn resting_ms(cluster: &ClusterNode, during: Duration) -> anyhow::Result<f64> {
    let used = Usage::read(&cluster.node)?;
    thread::sleep(during);
    cpu_ms_since(cluster, &used)
}

fn cpu_ms_since(cluster: &ClusterNode, before: &Usage) -> anyhow::Result<f64> {
    Ok(Usage::read(&cluster.node)?.cpu_ns.saturating_sub(before.cpu_ns) as f64 / 1e6)
}
