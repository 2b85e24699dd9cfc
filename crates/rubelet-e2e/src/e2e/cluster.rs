//! Tests on a real control plane: the agent as a node of a cluster.
//!
//! Owns: the list of these tests and their environment: a control plane, which most of them share, and for each a node and a
//! namespace of its own.

mod admission;
mod authorization;
mod certificates;
mod churn;
pub mod csi;
mod disks;
mod events;
mod eviction;
mod faults;
mod hung_volume;
mod kubectl;
mod lists;
mod log_rotation;
mod membership;
mod metrics;
mod objects;
mod odd;
mod outage;
pub mod ownership;
mod pages;
mod parts;
mod pod_certificates;
mod probes;
mod reboot;
mod recorder;
mod restarts;
mod runtime_class;
mod server_volumes;
mod shutdown;
mod streams;
mod swap;
mod takeover;
mod top;
mod trust_bundles;
mod workloads;
mod writes;

use std::{
    fmt,
    ops::Deref,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{bail, ensure};
use rubelet_testbed::{
    CgroupDriver, Testbed,
    agent::{AgentOptions, Membership, Program},
    clock::{self, Stopwatch},
    command::{SHORT, output},
    go_tools,
    image::BUSYBOX,
    tail,
};
use serde_json::{Value, json};

use self::recorder::Recorder;
pub use self::{pages::account, streams::WEBSOCKET};
use crate::{
    control_plane::{ClusterPrograms, ControlPlane, ControlPlaneOptions},
    e2e::{
        cgroups, lock, network_volumes,
        node::{Node, PodSeen},
    },
};

/// A test on a cluster: its claim, and its function.
pub struct ClusterCase {
    pub name: &'static str,
    pub plane: Plane,
    pub run: fn(&mut ClusterNode) -> anyhow::Result<()>,
}

/// Long ones first, so that none runs alone at the end.
pub fn cases() -> impl Iterator<Item = &'static ClusterCase> {
    let groups = [
        certificates::CASES,
        outage::CASES,
        top::CASES,
        faults::CASES,
        churn::CASES,
        eviction::CASES,
        odd::CASES,
        takeover::CASES,
        ownership::CASES,
        hung_volume::CASES,
        if network_volumes::has_nfs() && network_volumes::has_iscsi() { server_volumes::WITH_SERVERS } else { &[] },
        authorization::CASES,
        restarts::CASES,
        log_rotation::CASES,
        reboot::CASES,
        objects::CASES,
        trust_bundles::CASES,
        pod_certificates::CASES,
        disks::CASES,
        probes::CASES,
        parts::CASES,
        admission::CASES,
        runtime_class::CASES,
        membership::CASES,
        events::CASES,
        streams::CASES,
        kubectl::CASES,
        lists::CASES,
        metrics::CASES,
        pages::CASES,
        workloads::CASES,
        writes::CASES,
        if cgroups::is_v2() { swap::WITH_CGROUP_V2 } else { &[] },
        if CgroupDriver::of_machine() == CgroupDriver::Systemd { shutdown::WITH_LOGIND } else { &[] },
    ];
    csi::cases().chain(groups.into_iter().flatten())
}

/// Builds the additional programs of tests in advance: building during the tests would delay them.
pub fn build() -> anyhow::Result<()> {
    go_tools::ensure(&[go_tools::METRICS_SERVER])?;
    csi::build()
}

/// The poll period of conditions.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The control plane of a test.
#[derive(Clone, Copy)]
pub enum Plane {
    /// Shared: the test does not disturb it.
    Shared,
    Own(fn() -> ControlPlaneOptions),
}

/// The control planes of a run.
#[derive(Debug)]
pub struct Planes {
    programs: ClusterPrograms,
    shared: Mutex<Option<Arc<ControlPlane>>>,
}

impl Planes {
    pub fn ensure() -> anyhow::Result<Self> {
        Ok(Planes { programs: ClusterPrograms::ensure()?, shared: Mutex::new(None) })
    }

    fn get(&self, wanted: Plane) -> anyhow::Result<PlaneInUse> {
        match wanted {
            Plane::Own(options) => Ok(PlaneInUse::Own(Box::new(ControlPlane::start(&self.programs, &options())?))),
            Plane::Shared => {
                let mut shared = lock(&self.shared);
                let plane = match &*shared {
                    Some(plane) => Arc::clone(plane),
                    None => Arc::new(ControlPlane::start(&self.programs, &ControlPlaneOptions::default())?),
                };
                *shared = Some(Arc::clone(&plane));
                Ok(PlaneInUse::Shared(plane))
            }
        }
    }
}

#[derive(Debug)]
enum PlaneInUse {
    Shared(Arc<ControlPlane>),
    Own(Box<ControlPlane>),
}

impl Deref for PlaneInUse {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        match self {
            PlaneInUse::Shared(plane) => plane,
            PlaneInUse::Own(plane) => plane,
        }
    }
}

/// A node of a cluster, and a namespace for the test's objects.
#[derive(Debug)]
pub struct ClusterNode {
    // Dropped in this order: the agent stops before the control plane.
    pub node: Node,
    plane: PlaneInUse,
    /// Also the namespace's.
    pub name: String,
}

impl ClusterNode {
    pub fn new(planes: &Planes, wanted: Plane, bed: Testbed, program: &Program) -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let plane = planes.get(wanted)?;
        let name = format!("node{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let options = AgentOptions { cluster: Some(membership(&plane, &name)?), ..AgentOptions::default() };
        let cluster = ClusterNode { node: Node::new(bed, program, &options)?, plane, name };
        cluster.plane.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": cluster.name },
        }))?;
        cluster.wait("the namespace has an account", 60, |cluster| {
            for path in ["serviceaccounts/default", "configmaps/kube-root-ca.crt"] {
                cluster.plane.api().get(&format!("/api/v1/namespaces/{}/{path}", cluster.name))?;
            }
            Ok(())
        })?;
        Ok(cluster)
    }

    /// The agent's default credentials in the cluster.
    pub fn membership(&self) -> anyhow::Result<Membership> {
        membership(&self.plane, &self.name)
    }

    /// The same for a node with only a token, which writes its kubeconfig itself.
    pub fn membership_by_token(&self) -> anyhow::Result<Membership> {
        Ok(Membership {
            kubeconfig: self.node.bed.layout.dir.join("kubelet.kubeconfig"),
            bootstrap_kubeconfig: Some(self.plane().bootstrap_kubeconfig()),
            ..self.membership()?
        })
    }

    /// Starts the agent and waits until its node is ready.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.node.agent.start()?;
        self.wait_ready(60)
    }

    pub fn wait_ready(&self, limit_secs: u64) -> anyhow::Result<()> {
        self.wait("the node is ready", limit_secs, |cluster| {
            let ready = cluster.node_condition("Ready")?;
            ensure!(ready["status"] == "True", "Ready is {ready}");
            Ok(())
        })
    }

    /// The control plane.
    pub fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// The control plane of a test that does not share one.
    pub fn own_plane(&mut self) -> anyhow::Result<&mut ControlPlane> {
        match &mut self.plane {
            PlaneInUse::Own(plane) => Ok(plane),
            PlaneInUse::Shared(_) => bail!("this test shares its control plane with others"),
        }
    }

    /// Runs kubectl in the test's namespace.
    pub fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        output(&mut self.kubectl_command(args), SHORT)
    }

    pub fn kubectl_command(&self, args: &[&str]) -> Command {
        let in_namespace: Vec<&str> = ["--namespace", &self.name].iter().chain(args).copied().collect();
        self.plane.kubectl_command(&in_namespace)
    }

    /// Applies an object in the test's namespace.
    pub fn apply(&self, mut object: Value) -> anyhow::Result<()> {
        object["metadata"]["namespace"] = json!(self.name);
        self.plane.apply(&object)
    }

    /// Creates an object in the test's namespace, without the last-applied annotation.
    pub fn create(&self, mut object: Value) -> anyhow::Result<()> {
        object["metadata"]["namespace"] = json!(self.name);
        self.plane.create(&object)
    }

    /// Several at once.
    pub fn apply_all(&self, mut objects: Vec<Value>) -> anyhow::Result<()> {
        for object in &mut objects {
            object["metadata"]["namespace"] = json!(self.name);
        }
        self.plane.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": objects }))
    }

    /// An object of the namespace: `pods/web`, or with its group, `apps/v1 deployments/web`.
    pub fn object(&self, group: &str, path: &str) -> anyhow::Result<Value> {
        let root = if group == "v1" { "/api/v1".to_owned() } else { format!("/apis/{group}") };
        self.plane.api().get(&format!("{root}/namespaces/{}/{path}", self.name))
    }

    pub fn pod(&self, name: &str) -> anyhow::Result<PodSeen> {
        Ok(PodSeen(self.object("v1", &format!("pods/{name}"))?))
    }

    pub fn pods(&self) -> anyhow::Result<Vec<PodSeen>> {
        let pods = self.plane.api().list(&format!("/api/v1/namespaces/{}/pods", self.name))?;
        Ok(pods.into_iter().map(PodSeen).collect())
    }

    /// Null if the node does not exist.
    pub fn node_condition(&self, kind: &str) -> anyhow::Result<Value> {
        self.plane.node_condition(&self.name, kind)
    }

    /// Waits for a value; an error names the condition and the actual state.
    pub fn wait<T>(
        &self,
        what: &str,
        limit_secs: u64,
        mut ask: impl FnMut(&ClusterNode) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        clock::wait(what, Duration::from_secs(limit_secs), LOOK_EVERY, || ask(self))
    }

    /// Waits until a number has not changed for a while.
    pub fn wait_still(
        &self,
        still: Duration,
        limit_secs: u64,
        read: impl Fn(&ClusterNode) -> anyhow::Result<usize>,
    ) -> anyhow::Result<()> {
        let mut last = read(self)?;
        let mut since = Stopwatch::start();
        self.wait("nothing changes any more", limit_secs, |cluster| {
            let now = read(cluster)?;
            if now != last {
                (last, since) = (now, Stopwatch::start());
            }
            ensure!(since.elapsed() >= still, "it changed {:.1} s ago", since.secs());
            Ok(())
        })
    }

    pub fn wait_running(&self, pod: &str, limit_secs: u64) -> anyhow::Result<PodSeen> {
        self.wait(&format!("{pod} runs and is ready"), limit_secs, |cluster| {
            let seen = cluster.pod(pod)?;
            seen.check_running()?;
            ensure!(seen.is_ready(), "it is not ready: {}", seen.status()["conditions"]);
            Ok(seen)
        })
    }

    /// Neither the API server nor the runtime has any of the namespace's pods.
    pub fn wait_none(&self, limit_secs: u64) -> anyhow::Result<()> {
        self.wait("no pod is left", limit_secs, |cluster| {
            let pods = cluster.pods()?;
            let names: Vec<&str> = pods.iter().map(PodSeen::name).collect();
            ensure!(names.is_empty(), "the API server still has {names:?}");
            let containers = cluster.node.containers()?;
            ensure!(containers.iter().all(|container| !container.is_running), "the runtime still has {containers:?}");
            Ok(())
        })
    }

    /// Records a watch of the namespace's pods from now on.
    pub fn record(&self) -> anyhow::Result<Recorder> {
        Recorder::start(self.plane.api(), &self.name)
    }

    pub fn diagnosis(&self) -> String {
        let mut parts = Vec::new();
        for args in [vec!["get", "nodes,pods", "-o", "wide"], vec!["get", "events", "--sort-by=.lastTimestamp"]] {
            let answer = self.kubectl(&args).unwrap_or_else(|err| format!("{err:#}"));
            let lines: Vec<&str> = answer.lines().collect();
            let last = lines[lines.len().saturating_sub(40)..].join("\n");
            parts.push(format!("--- kubectl {}\n{last}", args.join(" ")));
        }
        parts.push(self.node.agent.diagnosis(None));
        parts.push(format!("--- the end of containerd's log\n{}", tail(&self.node.bed.layout.containerd_log(), 10)));
        parts.join("\n")
    }
}

fn membership(plane: &ControlPlane, node: &str) -> anyhow::Result<Membership> {
    Ok(Membership {
        node: node.to_owned(),
        kubeconfig: plane.node_kubeconfig(node)?,
        bootstrap_kubeconfig: None,
        client_authority: plane.client_authority(),
    })
}

impl Drop for ClusterNode {
    fn drop(&mut self) {
        self.node.agent.stop();
        if let PlaneInUse::Shared(plane) = &self.plane {
            // Other tests continue; leftovers must not occupy the controllers.
            let namespace = format!("namespace/{}", self.name);
            let node = format!("node/{}", self.name);
            if let Err(err) = plane.kubectl(&["delete", &namespace, &node, "--wait=false", "--ignore-not-found"]) {
                eprintln!("{}: {err:#}", self.name);
            }
        }
    }
}

impl fmt::Debug for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Plane::Shared => "Shared",
            Plane::Own(_) => "Own",
        })
    }
}

/// Runs until SIGTERM, and exits at once.
pub const OBEDIENT: &str = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";

/// The spec of a pod of one busybox container `main`, bound to this node.
pub fn spec(node: &str, script: &str) -> Value {
    json!({
        "nodeSelector": { "kubernetes.io/hostname": node },
        "terminationGracePeriodSeconds": 5,
        "containers": [{ "name": "main", "image": BUSYBOX, "command": ["sh", "-c", script] }],
    })
}

pub fn pod(name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": spec })
}
