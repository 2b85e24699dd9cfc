//! The cluster of the exam: one node with steady pods, control pods, and what faults act on.
//!
//! Owns: its parts and their start, the steady pods, and waiting until everything is right.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    Programs, Testbed,
    agent::{AgentOptions, Membership, Program},
    clock::Stopwatch,
    project,
};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use serde_json::{Value, json};

use super::{
    controls::Controls,
    interrupt,
    monitor::Monitor,
    relay::Relay,
    resolver::Resolver,
    verify::{Expected, RuntimeView, problems},
};
use crate::{
    control_plane::ControlPlaneOptions,
    dice::Dice,
    e2e::{
        cluster::{ClusterNode, Plane, Planes, pod, spec},
        node::PodSeen,
    },
};

/// Serves HTTP, and ends at SIGTERM.
const SERVER: &str = "mkdir /www; echo ok > /www/index.html; httpd -p 8080 -h /www; \
     trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";
const STEADY: &str = "steady-";
/// A start that takes this long is wrong once the fault is over.
const OVERDUE_SECS: f64 = 10.0;
/// The agent's root directory: room for all pods, and quick to fill.
const ROOT_SIZE: &std::ffi::CStr = c"size=64m";

#[derive(Debug)]
pub struct Exam {
    // Dropped in this order: threads that send requests end before the cluster.
    pub controls: Controls,
    pub monitor: Monitor,
    pub cluster: ClusterNode,
    pub relay: Relay,
    pub resolver: Resolver,
    pub dice: Dice,
    /// Of all pods but the control pods.
    expected: BTreeMap<String, Expected>,
}

impl Exam {
    pub fn start(programs: &Programs, program: &Program, seed: u64) -> anyhow::Result<Self> {
        let bed = Testbed::start(programs)?;
        share(&bed)?;
        let resolver = Resolver::start(bed.address()?)?;
        let resolv_conf = bed.layout.dir.join("resolv.conf");
        fs::write(&resolv_conf, resolver.resolv_conf())?;
        let planes = Planes::ensure()?;
        let mut cluster = ClusterNode::new(&planes, Plane::Own(ControlPlaneOptions::default), bed, program)?;
        let relay = Relay::start(&cluster.plane().server_url(), seed)?;
        let mut config = cluster.node.agent.own_cgroups()?;
        // Pods of faults come on top of the steady ones. Nothing is evicted: a full disk is a fault of its own.
        config.insert("maxPods".to_owned(), json!(250));
        config.insert("evictionHard".to_owned(), json!({}));
        let options = AgentOptions {
            cluster: Some(Membership {
                kubeconfig: cluster.plane().node_kubeconfig_by_way_of(&cluster.name, &relay.url())?,
                ..cluster.membership()?
            }),
            config,
            resolv_conf: Some(resolv_conf),
            ..AgentOptions::default()
        };
        cluster.node.reconfigure(&options)?;
        cluster.start()?;
        let api = cluster.plane().api();
        let pid_file = cluster.node.bed.layout.dir.join("agent.pid");
        Ok(Exam {
            controls: Controls::start(api.clone(), &cluster.name),
            monitor: Monitor::start(api, &cluster.name, pid_file),
            cluster,
            relay,
            resolver,
            dice: Dice::seeded(seed),
            expected: BTreeMap::new(),
        })
    }

    /// Seconds since the exam began.
    pub fn now(&self) -> f64 {
        self.controls.now()
    }

    /// A directory of the node, below the testbed's.
    pub fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.cluster.node.bed.layout.dir.join(name);
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    /// Starts the steady pods, with a probe of each kind in turn.
    pub fn fill(&mut self, count: usize) -> anyhow::Result<()> {
        for number in 0..count {
            let probe = match number % 3 {
                0 => json!({ "exec": { "command": ["cat", "/www/index.html"] } }),
                1 => json!({ "httpGet": { "port": 8080, "path": "/" } }),
                _ => json!({ "tcpSocket": { "port": 8080 } }),
            };
            self.create(&format!("{STEADY}{number}"), &served(&self.cluster.name, &probe), Expected::Ready)?;
        }
        self.settle(Duration::from_secs(300))
    }

    /// A pod of this node; `spec` is completed with the node's name.
    pub fn create(&mut self, name: &str, spec: &Value, expected: Expected) -> anyhow::Result<()> {
        let mut spec = spec.clone();
        // Without a scheduler.
        spec["nodeName"] = json!(self.cluster.name);
        spec["nodeSelector"] = json!({});
        self.cluster.plane().api().create(&self.pods_path(), &pod(name, &spec))?;
        self.expect(name, expected);
        Ok(())
    }

    pub fn delete(&mut self, name: &str) -> anyhow::Result<()> {
        self.cluster.plane().api().delete(&format!("{}/{name}", self.pods_path()))?;
        self.expect(name, Expected::Gone);
        Ok(())
    }

    pub fn expect(&mut self, name: &str, expected: Expected) {
        self.expected.insert(name.to_owned(), expected);
    }

    /// Deletes pods of a fault and waits until they are gone.
    pub fn remove(&mut self, names: &[String]) -> anyhow::Result<()> {
        for name in names {
            if self.expected.get(name) != Some(&Expected::Gone) {
                self.delete(name)?;
            }
        }
        let gone = self.settle(Duration::from_secs(120)).context("pods of the fault are deleted");
        for name in names {
            self.expected.remove(name);
        }
        gone
    }

    /// Removes the pods of a fault that broke off.
    pub fn abandon(&mut self) -> anyhow::Result<()> {
        let of_fault = self.expected.keys().filter(|name| !name.starts_with(STEADY));
        self.remove(&of_fault.cloned().collect::<Vec<_>>())
    }

    pub fn pod(&self, name: &str) -> anyhow::Result<PodSeen> {
        self.cluster.pod(name)
    }

    /// Of the steady pods.
    pub fn restarts(&self) -> anyhow::Result<u64> {
        let pods = self.cluster.pods()?;
        let steady = pods.iter().filter(|pod| pod.name().starts_with(STEADY));
        Ok(steady.flat_map(PodSeen::container_statuses).filter_map(|status| status["restartCount"].as_u64()).sum())
    }

    /// Waits until everything is right after a fault that ended at `ended`; returns how many things are wrong at the limit.
    pub fn recover(&self, ended: f64, limit: Duration) -> anyhow::Result<usize> {
        let watch = Stopwatch::start();
        loop {
            // Every control pod of the fault's time runs; later ones have their usual time.
            let wrong = self.wrong(ended.max(self.now() - OVERDUE_SECS)).unwrap_or_else(|err| vec![format!("{err:#}")]);
            if wrong.is_empty() {
                return Ok(0);
            }
            if watch.elapsed() >= limit {
                println!("still wrong after {:.0} s:\n{}", watch.secs(), first(&wrong));
                return Ok(wrong.len());
            }
            interrupt::sleep(Duration::from_millis(500))?;
        }
    }

    pub fn settle(&self, limit: Duration) -> anyhow::Result<()> {
        interrupt::wait("everything is right", limit, || {
            let wrong = self.wrong(self.now() - OVERDUE_SECS)?;
            ensure!(wrong.is_empty(), "{}", first(&wrong));
            Ok(())
        })
    }

    /// `due` is when the youngest control pod that should run was created.
    fn wrong(&self, due: f64) -> anyhow::Result<Vec<String>> {
        let runtime = RuntimeView::read(&self.cluster.node.bed)?;
        let pods = self.cluster.pods()?;
        let mut wrong = problems(&pods, &self.expected, &runtime);
        let late = self.controls.waiting_since(due);
        wrong.extend(late.iter().map(|name| format!("{name} does not run yet")));
        let ready = self.cluster.node_condition("Ready")?;
        if ready["status"] != "True" {
            wrong.push(format!("the node is not ready: {ready}"));
        }
        Ok(wrong)
    }

    /// The agent's process; an error when it does not run.
    pub fn agent_pid(&self) -> anyhow::Result<i32> {
        self.cluster.node.agent.pid().context("the agent does not run")
    }

    /// The testbed goes with its directory; what explains a row stays.
    pub fn keep_log(&self, fault: &str) {
        let dir = project::target().join("chaos");
        let kept = fs::create_dir_all(&dir).and_then(|()| {
            fs::copy(self.cluster.node.agent.log(), dir.join("agent.log"))?;
            fs::copy(self.cluster.node.bed.layout.containerd_log(), dir.join("containerd.log"))
        });
        if let Err(err) = kept {
            eprintln!("{fault}: the logs are not kept: {err}");
        }
    }

    fn pods_path(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.cluster.name)
    }
}

fn first(wrong: &[String]) -> String {
    let shown: Vec<&str> = wrong.iter().take(5).map(String::as_str).collect();
    format!("{} wrong: {}", wrong.len(), shown.join("\n"))
}

/// The agent has a mount namespace of its own: mounts in the testbed's directory must reach it, and the agent's the runtime.
/// Its root directory is a file system of its own, so that it can be filled.
fn share(bed: &Testbed) -> anyhow::Result<()> {
    let dir = &bed.layout.dir;
    mount_bind(dir, dir).context("mount the testbed's directory on itself")?;
    mount_change(dir, MountPropagationFlags::SHARED).context("share the testbed's mounts")?;
    let root = dir.join("kubelet");
    fs::create_dir_all(&root)?;
    mount("tmpfs", &root, "tmpfs", MountFlags::empty(), Some(ROOT_SIZE)).context("mount the agent's root directory")?;
    Ok(())
}

/// A pod that serves HTTP on port 8080, with this probe for readiness and, more patient, for liveness.
pub fn served(node: &str, probe: &Value) -> Value {
    let mut spec = spec(node, SERVER);
    let mut probe = probe.clone();
    probe["periodSeconds"] = json!(5);
    probe["timeoutSeconds"] = json!(5);
    spec["containers"][0]["readinessProbe"] = probe.clone();
    // A runtime that is stopped for a minute is no reason to restart a container.
    probe["periodSeconds"] = json!(10);
    probe["failureThreshold"] = json!(10);
    spec["containers"][0]["livenessProbe"] = probe;
    spec
}
