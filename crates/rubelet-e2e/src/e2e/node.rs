//! A node under test: a testbed with an agent, and the helpers of tests.
//!
//! Owns: writing manifests, waiting with a timeout, reading the agent's view (`rubelet pods`) and the runtime's (`ctr`).

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rubelet_testbed::{
    Testbed,
    agent::{Agent, AgentOptions, NODE, Program},
    clock, tail,
};
use serde_json::Value;

use crate::e2e::manifest::Pod;

/// The poll period of conditions.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Node {
    // Dropped in this order: the agent stops before its runtime.
    pub agent: Agent,
    pub bed: Testbed,
    program: Program,
}

impl Node {
    pub fn new(bed: Testbed, program: &Program, options: &AgentOptions) -> anyhow::Result<Self> {
        Ok(Node { agent: Agent::new(&bed, program, options)?, bed, program: program.clone() })
    }

    /// Another agent on the same testbed, before any was started.
    pub fn reconfigure(&mut self, options: &AgentOptions) -> anyhow::Result<()> {
        self.agent = Agent::new(&self.bed, &self.program, options)?;
        Ok(())
    }

    /// Writes a manifest atomically.
    pub fn apply(&self, pod: &Pod) -> anyhow::Result<()> {
        self.drop_file(&format!("{}.json", pod.name), serde_json::to_string_pretty(&pod.manifest())?.as_bytes())
    }

    pub fn drop_file(&self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let partial = self.agent.manifests().join(format!(".{name}"));
        fs::write(&partial, content)?;
        fs::rename(partial, self.agent.manifests().join(name))?;
        Ok(())
    }

    pub fn remove(&self, pod: &str) -> anyhow::Result<()> {
        fs::remove_file(self.agent.manifests().join(format!("{pod}.json"))).with_context(|| format!("remove {pod}"))
    }

    /// A directory of the node for a pod's notes.
    pub fn notes(&self, pod: &str) -> PathBuf {
        self.bed.layout.dir.join("notes").join(pod)
    }

    /// The notes of the pod's container so far.
    pub fn noted(&self, pod: &str) -> Vec<String> {
        let text = fs::read_to_string(self.notes(pod).join("main")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits for a value; an error names the condition and the actual state.
    pub fn wait<T>(
        &self,
        what: &str,
        limit_secs: u64,
        mut ask: impl FnMut(&Node) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        clock::wait(what, Duration::from_secs(limit_secs), LOOK_EVERY, || ask(self))
    }

    pub fn wait_running(&self, pod: &str, limit_secs: u64) -> anyhow::Result<PodSeen> {
        self.wait(&format!("{pod} runs"), limit_secs, |node| {
            let seen = node.pod(pod)?;
            seen.check_running()?;
            Ok(seen)
        })
    }

    /// The pod is in no source, and nothing of it runs. Cleanup follows after that.
    pub fn wait_gone(&self, pod: &str, limit_secs: u64) -> anyhow::Result<()> {
        let name = full_name(pod);
        self.wait(&format!("{pod} is gone"), limit_secs, |node| {
            ensure!(node.pods()?.iter().all(|seen| seen.name() != name), "the agent still shows it");
            node.check_stopped(pod)
        })
    }

    pub fn check_stopped(&self, pod: &str) -> anyhow::Result<()> {
        let containers = self.containers()?;
        let left = containers.iter().find(|container| container.pod == full_name(pod) && container.is_running);
        match left {
            Some(left) => bail!("the runtime still runs {left:?}"),
            None => Ok(()),
        }
    }

    /// The pod as the agent shows it.
    pub fn pod(&self, pod: &str) -> anyhow::Result<PodSeen> {
        let name = full_name(pod);
        let found = self.pods()?.into_iter().find(|seen| seen.name() == name);
        found.with_context(|| format!("the agent shows no pod {name}"))
    }

    pub fn pods(&self) -> anyhow::Result<Vec<PodSeen>> {
        let list = self.agent.pods()?;
        ensure!(list["kind"] == "PodList", "`rubelet pods -o json` is no PodList: {list}");
        // Go writes an empty list as null.
        Ok(list["items"].as_array().into_iter().flatten().cloned().map(PodSeen).collect())
    }

    /// Containers and sandboxes of the runtime, without the agent.
    pub fn containers(&self) -> anyhow::Result<Vec<RuntimeContainer>> {
        let tasks = self.bed.ctr(["tasks", "list"])?;
        let running: BTreeMap<&str, bool> = tasks
            .lines()
            .skip(1)
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                Some((words.next()?, words.nth(1)? == "RUNNING"))
            })
            .collect();
        let ids = self.bed.ctr(["containers", "list", "-q"])?;
        // One that was removed between two calls is skipped.
        let known = ids.lines().filter_map(|id| RuntimeContainer::ask(self, id, running.get(id).copied()).ok());
        Ok(known.collect())
    }

    pub fn diagnosis(&self) -> String {
        let manifests = fs::read_dir(self.agent.manifests()).into_iter().flatten().flatten();
        let first = manifests.filter_map(|entry| entry.file_name().into_string().ok()).min();
        let pod = first.as_deref().and_then(|name| name.strip_suffix(".json"));
        let runtime = match self.containers() {
            Ok(containers) => containers.iter().take(20).map(|container| format!("{container:?}\n")).collect(),
            Err(err) => format!("{err:#}"),
        };
        let log = tail(&self.bed.layout.containerd_log(), 30);
        format!("{}\n--- the runtime has\n{runtime}\n--- the end of containerd's log\n{log}", self.agent.diagnosis(pod))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.agent.stop();
    }
}

/// A static pod's name on the node.
pub fn full_name(pod: &str) -> String {
    format!("{pod}-{NODE}")
}

/// A container or sandbox as containerd has it.
#[derive(Clone, Debug)]
pub struct RuntimeContainer {
    pub id: String,
    /// With the node name suffix.
    pub pod: String,
    pub is_running: bool,
    /// `container` or `sandbox`.
    pub kind: String,
}

impl RuntimeContainer {
    fn ask(node: &Node, id: &str, running: Option<bool>) -> anyhow::Result<Self> {
        let info: Value = serde_json::from_str(&node.bed.ctr(["containers", "info", id])?)?;
        let label = |name: &str| info["Labels"][name].as_str().unwrap_or_default().to_owned();
        Ok(RuntimeContainer {
            id: id.to_owned(),
            pod: label("io.kubernetes.pod.name"),
            is_running: running.unwrap_or(false),
            kind: label("io.cri-containerd.kind"),
        })
    }
}

/// A pod with its status, as the agent or the API server shows it.
#[derive(Clone, Debug)]
pub struct PodSeen(pub Value);

impl PodSeen {
    pub fn name(&self) -> &str {
        self.0["metadata"]["name"].as_str().unwrap_or_default()
    }

    pub fn uid(&self) -> &str {
        self.0["metadata"]["uid"].as_str().unwrap_or_default()
    }

    pub fn status(&self) -> &Value {
        &self.0["status"]
    }

    pub fn phase(&self) -> &str {
        self.status()["phase"].as_str().unwrap_or_default()
    }

    pub fn label(&self, name: &str) -> &str {
        self.0["metadata"]["labels"][name].as_str().unwrap_or_default()
    }

    pub fn is_ready(&self) -> bool {
        let conditions = self.status()["conditions"].as_array().into_iter().flatten();
        conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    }

    /// What the API server shows of a static pod.
    pub fn is_mirror(&self) -> bool {
        self.0["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string()
    }

    pub fn has_startup_probe(&self) -> bool {
        let containers = self.0["spec"]["containers"].as_array();
        containers.into_iter().flatten().any(|container| container["startupProbe"].is_object())
    }

    pub fn is_being_deleted(&self) -> bool {
        self.0["metadata"]["deletionTimestamp"].is_string()
    }

    pub fn check_running(&self) -> anyhow::Result<()> {
        let statuses = self.container_statuses();
        let all_run = !statuses.is_empty() && statuses.iter().all(|status| status["state"]["running"].is_object());
        if self.phase() != "Running" || !all_run {
            bail!("phase {}, containers {}", self.phase(), self.status()["containerStatuses"]);
        }
        Ok(())
    }

    pub fn container_statuses(&self) -> &[Value] {
        self.status()["containerStatuses"].as_array().map_or(&[], Vec::as_slice)
    }

    /// Of init containers, too.
    pub fn all_container_statuses(&self) -> impl Iterator<Item = &Value> {
        let init = self.status()["initContainerStatuses"].as_array().into_iter().flatten();
        init.chain(self.container_statuses())
    }

    /// The status of a container or init container; null if there is none.
    pub fn container(&self, name: &str) -> &Value {
        const NONE: Value = Value::Null;
        self.all_container_statuses().find(|status| status["name"] == name).unwrap_or(&NONE)
    }

    pub fn waiting_reason(&self, container: &str) -> Option<&str> {
        self.container(container)["state"]["waiting"]["reason"].as_str()
    }

    /// All attributes that must not change while the container is undisturbed.
    pub fn identity(&self, container: &str) -> anyhow::Result<Identity> {
        let status = self.container(container);
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Ok(Identity {
            id: text(&status["containerID"]).context("no containerID")?,
            restarts: status["restartCount"].as_i64().context("no restartCount")?,
            started_at: text(&status["state"]["running"]["startedAt"]).context("it does not run")?,
            pod_start: text(&self.status()["startTime"]).context("the pod has no startTime")?,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub id: String,
    pub restarts: i64,
    pub started_at: String,
    pub pod_start: String,
}
