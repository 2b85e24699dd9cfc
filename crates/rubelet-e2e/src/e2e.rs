//! `cargo xtask e2e`: the built program on real containerds.
//!
//! Owns: the list of tests and the runner. Each test has its own containerd, network and agent, so several run at
//! once: they mostly wait.

mod cgroups;
mod checkpoint;
pub mod cluster;
mod crashes;
mod effects;
mod eviction;
mod images;
mod life;
mod logs;
pub mod manifest;
mod many;
mod memory;
mod network_volumes;
pub mod node;
mod odd;
pub mod secured_port;
mod shutdown;
mod stats;
mod sweeping;
mod url;

use std::{
    collections::VecDeque,
    fs, panic,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use rubelet_testbed::{
    CgroupDriver, Programs, Runtime, Testbed,
    agent::{AgentOptions, Program},
    clock::Stopwatch,
    command::output,
    progress::step,
    project, sweep_orphans,
    tally::Tally,
};

use crate::{
    control_plane::upstream_kubelet,
    e2e::{
        cluster::{ClusterCase, ClusterNode, Planes},
        node::Node,
    },
};

/// A test: its claim, and its function.
pub struct Case {
    pub name: &'static str,
    pub run: fn(&mut Node) -> anyhow::Result<()>,
}

/// Long ones first, so that none runs alone at the end. Tests that this machine does not support are omitted.
fn cases() -> Vec<Case> {
    let (with_systemd, with_logind) = match CgroupDriver::of_machine() {
        CgroupDriver::Systemd => (cgroups::WITH_SYSTEMD, shutdown::WITH_LOGIND),
        CgroupDriver::Cgroupfs => (&[][..], &[][..]),
    };
    let (low_on_memory, memory) = match cgroups::is_v2() {
        true => (eviction::WITH_CGROUP_V2, memory::WITH_CGROUP_V2),
        false => (&[][..], &[][..]),
    };
    let with_criu = if checkpoint::has_criu() { checkpoint::WITH_CRIU } else { &[] };
    let with_nfs = if network_volumes::has_nfs() { network_volumes::WITH_NFS } else { &[] };
    let with_iscsi = if network_volumes::has_iscsi() { network_volumes::WITH_ISCSI } else { &[] };
    [
        many::CASES,
        with_logind,
        with_nfs,
        with_iscsi,
        cgroups::CASES,
        with_systemd,
        eviction::CASES,
        low_on_memory,
        memory,
        life::CASES,
        images::CASES,
        logs::CASES,
        crashes::CASES,
        effects::CASES,
        odd::CASES,
        stats::CASES,
        with_criu,
        url::CASES,
        sweeping::CASES,
    ]
    .iter()
    .flat_map(|group| group.iter())
    .map(|case| Case { name: case.name, run: case.run })
    .collect()
}

/// A test mostly waits, but a burst of containers needs a core.
const AT_ONCE: usize = 4;

/// Up to this many failed tests are retried.
const ACCIDENTS: usize = 3;

/// The agent that is tested.
#[derive(Clone, Debug)]
pub enum Tested {
    /// Built from this tree.
    Rubelet,
    /// Built elsewhere, for a machine without a build environment; perhaps with the programs of a control plane.
    Built { rubelet: PathBuf, has_clusters: bool },
    /// Upstream's kubelet, to validate the tests themselves; built from its module.
    Upstream,
    /// An existing kubelet of upstream's.
    Kubelet(PathBuf),
}

pub fn run(runtimes: &[Runtime], filter: &str, tested: &Tested) -> anyhow::Result<Tally> {
    let copy = Binary(project::target().join(format!("testbed/rubelet-{}", std::process::id())));
    let program = match tested {
        Tested::Kubelet(kubelet) => Program::Upstream(kubelet.clone()),
        Tested::Built { rubelet, .. } => Program::Rubelet(rubelet.clone()),
        Tested::Upstream => Program::Upstream(upstream_kubelet()?),
        Tested::Rubelet => {
            step("building Rubelet (dev)", || build(&copy.0))?;
            Program::Rubelet(copy.0.clone())
        }
    };
    let programs = runtimes.iter().map(|runtime| Programs::ensure(*runtime)).collect::<anyhow::Result<Vec<_>>>()?;
    sweep_orphans()?;
    let mut queue = schedule(&programs, filter);
    let is_built = matches!(tested, Tested::Built { .. });
    if let Tested::Built { has_clusters, .. } = tested {
        queue.retain(|(_, test)| match test {
            Test::Cluster(_) => *has_clusters,
            Test::Node(case) => !effects::CASES.iter().any(|other| other.name == case.name),
        });
    }
    if queue.is_empty() {
        bail!("no test has `{filter}` in its name");
    }
    if !is_built && queue.iter().any(|(_, test)| matches!(test, Test::Node(_))) {
        step("building the tests of its effects", effects::build)?;
    }
    let planes = match queue.iter().any(|(_, test)| matches!(test, Test::Cluster(_))) {
        true => {
            cluster::build()?;
            Some(Planes::ensure()?)
        }
        false => None,
    };
    let run = |programs: &Programs, test: &Test| one(programs, &program, planes.as_ref(), test);
    let count = queue.len();
    let queue = Mutex::new(queue);
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                // Releases the lock on the queue before the test begins.
                let next = || lock(&queue).pop_front();
                while let Some((programs, test)) = next() {
                    if let Verdict::Failed = run(&programs, &test) {
                        lock(&failed).push((programs, test));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed = failed_alone(&failed, run);
    Ok(Tally { passed: count - failed, failed })
}

/// How many fail again when run alone. A test that passes then was reported with its details: it is flaky,
/// but other load on this machine must not block a change. Many failures at once are not retried.
fn failed_alone(failed: &[(Programs, Test)], run: impl Fn(&Programs, &Test) -> Verdict) -> usize {
    if failed.is_empty() || failed.len() > ACCIDENTS {
        return failed.len();
    }
    println!("again, each alone:");
    let again = failed.iter().map(|(programs, test)| (test.name(), run(programs, test)));
    let (unstable, failed): (Vec<_>, Vec<_>) = again.partition(|(_, verdict)| matches!(verdict, Verdict::Passed));
    for (name, _) in &unstable {
        println!("UNSTABLE: {name}");
    }
    failed.len()
}

/// A test on a standalone node, or on one of a cluster.
enum Test {
    Node(Case),
    Cluster(&'static ClusterCase),
}

impl Test {
    fn name(&self) -> &'static str {
        match self {
            Test::Node(case) => case.name,
            Test::Cluster(case) => case.name,
        }
    }
}

/// Every test on every runtime, except those on a cluster, which are about the API, on the newest only. The runtimes begin at
/// different tests, so that the heavy ones do not coincide.
fn schedule(programs: &[Programs], filter: &str) -> VecDeque<(Programs, Test)> {
    let mut orders: Vec<VecDeque<Test>> = Vec::new();
    let count = programs.len();
    for (number, programs) in programs.iter().enumerate() {
        let on_clusters = cluster::cases().filter(|_| programs.runtime() == Runtime::Containerd24).map(Test::Cluster);
        let all = on_clusters.chain(cases().into_iter().map(Test::Node));
        let mut order: VecDeque<Test> = all.filter(|test| test.name().contains(filter)).collect();
        order.rotate_left(number * order.len() / count);
        orders.push(order);
    }
    let mut queue = VecDeque::new();
    while orders.iter().any(|order| !order.is_empty()) {
        for (programs, order) in programs.iter().zip(&mut orders) {
            queue.extend(order.pop_front().map(|test| (programs.clone(), test)));
        }
    }
    queue
}

enum Verdict {
    Passed,
    Failed,
}

fn one(programs: &Programs, program: &Program, planes: Option<&Planes>, test: &Test) -> Verdict {
    let watch = Stopwatch::start();
    let mut diagnosis = String::new();
    let result = Testbed::start(programs).and_then(|bed| match test {
        Test::Node(case) => {
            let mut node = Node::new(bed, program, &AgentOptions::default())?;
            let result = guarded(|| (case.run)(&mut node));
            if result.is_err() {
                diagnosis = node.diagnosis();
            }
            result
        }
        Test::Cluster(case) => {
            let planes = planes.context("a control plane was not asked for")?;
            let mut cluster = ClusterNode::new(planes, case.plane, bed, program)?;
            let result = guarded(|| (case.run)(&mut cluster));
            if result.is_err() {
                diagnosis = cluster.diagnosis();
            }
            result
        }
    });
    let name = test.name();
    let runtime = programs.runtime().as_str();
    // In one write, because other tests print too.
    match result {
        Ok(()) => {
            println!("ok      {runtime:6}  {} ({:.1} s)", name, watch.secs());
            Verdict::Passed
        }
        Err(err) => {
            println!("FAILED  {runtime:6}  {} ({:.1} s)\n{err:#}\n{diagnosis}\n", name, watch.secs());
            Verdict::Failed
        }
    }
}

/// A panic is a failure.
fn guarded(test: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let result = panic::catch_unwind(panic::AssertUnwindSafe(test));
    result.unwrap_or_else(|_| Err(anyhow::anyhow!("the test panicked")))
}

pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Into a copy, so that a concurrent build cannot change what is tested.
pub fn build(copy: &Path) -> anyhow::Result<()> {
    let mut cargo = project::cargo(["build", "--package", "rubelet"]);
    output(cargo.current_dir(project::root()), Duration::from_secs(1800))?;
    fs::create_dir_all(project::target().join("testbed"))?;
    fs::copy(project::target().join("debug/rubelet"), copy)?;
    Ok(())
}

/// The program under test; the copy is removed on drop.
struct Binary(PathBuf);

impl Drop for Binary {
    fn drop(&mut self) {
        // It was never created, or it does not matter.
        let _ = fs::remove_file(&self.0);
    }
}
