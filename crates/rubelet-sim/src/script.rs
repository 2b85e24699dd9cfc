//! Pod scripts: a manifest, and what its containers do.
//!
//! Owns: the builder of manifests, and the syntax of container commands. Commands pass through the real
//! manifest and the real CRI request into the fake runtime.

use std::{str::FromStr, time::Duration};

use serde_json::{Value, json};

/// Labels by which the rules find the script of a sandbox.
pub(crate) const LABEL_POD: &str = "sim/pod";
pub(crate) const LABEL_VERSION: &str = "sim/version";

/// An image present on every simulated node.
pub(crate) const IMAGE: &str = "sim.test/app:v1";

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodScript {
    pub name: String,
    pub version: u32,
    pub policy: Policy,
    pub grace_secs: i64,
    pub priority: i32,
    pub init: Vec<ContainerScript>,
    pub containers: Vec<ContainerScript>,
    pub empty_dir: Option<EmptyDir>,
    /// Of the emptyDir volume.
    pub size_limit: Option<&'static str>,
    pub host_path: Option<HostPath>,
    /// Claims that every container mounts, by name.
    pub claims: Vec<String>,
    /// Those of the claims whose device is used, and no file system.
    pub block_claims: Vec<String>,
    /// The driver of an inline volume that every container mounts.
    pub inline: Option<String>,
    /// Of its SELinux label.
    pub level: Option<String>,
    pub host_network: bool,
    /// Readiness gates.
    pub gates: Vec<String>,
    /// `activeDeadlineSeconds`.
    pub deadline_secs: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Always,
    OnFailure,
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmptyDir {
    Disk,
    Memory,
}

/// A directory of the node that every container mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPath {
    pub path: String,
    pub sub_path: Option<&'static str>,
}

/// One container of a script.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ContainerScript {
    pub name: String,
    pub program: Program,
    pub image: String,
    pub pull: Option<&'static str>,
    /// Further fields of the container, as a user would write them.
    pub fields: Vec<(&'static str, Value)>,
}

/// The behaviour of a container's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// Runs until SIGTERM, and exits at once.
    Run,
    Exit {
        code: i32,
        after: Duration,
    },
    /// Fails its first `times` attempts, one second after each start, then runs.
    Flaky {
        times: u32,
    },
    /// Exits some time after SIGTERM.
    Slow {
        stop: Duration,
    },
    /// Ignores SIGTERM.
    Stubborn,
    Oom {
        after: Duration,
    },
    /// The executable is missing: the start itself fails.
    Missing,
}

impl PodScript {
    /// A pod with no containers yet; restart policy Always, with a short grace period.
    pub(crate) fn pod(name: &str) -> Self {
        PodScript {
            name: name.to_owned(),
            version: 1,
            policy: Policy::Always,
            grace_secs: 5,
            priority: 0,
            init: Vec::new(),
            containers: Vec::new(),
            empty_dir: None,
            size_limit: None,
            host_path: None,
            claims: Vec::new(),
            block_claims: Vec::new(),
            inline: None,
            level: None,
            host_network: false,
            gates: Vec::new(),
            deadline_secs: None,
        }
    }

    pub(crate) fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    pub(crate) fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    pub(crate) fn grace_secs(mut self, secs: i64) -> Self {
        self.grace_secs = secs;
        self
    }

    pub(crate) fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    pub(crate) fn empty_dir(mut self, kind: EmptyDir) -> Self {
        self.empty_dir = Some(kind);
        self
    }

    /// The limit of the emptyDir volume added before.
    pub(crate) fn size_limit(mut self, limit: &'static str) -> Self {
        self.size_limit = Some(limit);
        self
    }

    pub(crate) fn host_path(mut self, path: &str) -> Self {
        self.host_path = Some(HostPath { path: path.to_owned(), sub_path: None });
        self
    }

    /// Mounts only this directory of the host path.
    pub(crate) fn sub_path(mut self, sub_path: &'static str) -> Self {
        self.host_path.as_mut().expect("a host path was added before").sub_path = Some(sub_path);
        self
    }

    pub(crate) fn claim(mut self, name: &str) -> Self {
        self.claims.push(name.to_owned());
        self
    }

    /// A claim whose device every container uses.
    pub(crate) fn block_claim(mut self, name: &str) -> Self {
        self.block_claims.push(name.to_owned());
        self.claim(name)
    }

    /// Adds an inline volume of this driver.
    pub(crate) fn inline(mut self, driver: &str) -> Self {
        self.inline = Some(driver.to_owned());
        self
    }

    /// Its containers have the SELinux label with this level.
    pub(crate) fn level(mut self, level: &str) -> Self {
        self.level = Some(level.to_owned());
        self
    }

    pub(crate) fn host_network(mut self) -> Self {
        self.host_network = true;
        self
    }

    pub(crate) fn gate(mut self, condition: &str) -> Self {
        self.gates.push(condition.to_owned());
        self
    }

    /// `program` in the syntax of `Program::from_str`.
    pub(crate) fn init(mut self, name: &str, program: &str) -> Self {
        self.init.push(ContainerScript::new(name, program));
        self
    }

    /// A sidecar. Must be called before the first `container`.
    pub(crate) fn sidecar(self, name: &str, program: &str) -> Self {
        assert!(self.containers.is_empty(), "fields are those of the container added last");
        self.init(name, program).field("restartPolicy", "Always".into())
    }

    pub(crate) fn container(mut self, name: &str, program: &str) -> Self {
        self.containers.push(ContainerScript::new(name, program));
        self
    }

    /// The image of the container added last.
    pub(crate) fn image(mut self, image: &str) -> Self {
        if let Some(container) = self.containers.last_mut().or(self.init.last_mut()) {
            container.image = image.to_owned();
        }
        self
    }

    /// The pull policy of the container added last.
    pub(crate) fn pull(mut self, policy: &'static str) -> Self {
        if let Some(container) = self.containers.last_mut().or(self.init.last_mut()) {
            container.pull = Some(policy);
        }
        self
    }

    /// A field of the container added last: its probes, hooks and mounts. Commands have the syntax of `Command`.
    pub(crate) fn field(mut self, name: &'static str, value: Value) -> Self {
        if let Some(container) = self.containers.last_mut().or(self.init.last_mut()) {
            container.fields.push((name, value));
        }
        self
    }

    pub(crate) fn find_container(&self, name: &str) -> Option<&ContainerScript> {
        self.init.iter().chain(&self.containers).find(|container| container.name == name)
    }

    /// The image of an existing container of the script.
    pub(crate) fn set_image(&mut self, name: &str, image: &str) {
        let mut containers = self.init.iter_mut().chain(&mut self.containers);
        let container = containers.find(|container| container.name == name).expect("the script has the container");
        image.clone_into(&mut container.image);
    }

    /// The restart policy of this container.
    pub(crate) fn policy_of(&self, container: &ContainerScript) -> Policy {
        if container.is_sidecar() { Policy::Always } else { self.policy }
    }

    pub(crate) fn is_init(&self, name: &str) -> bool {
        self.init.iter().any(|container| container.name == name)
    }

    /// The manifest as a user would write it.
    pub(crate) fn manifest(&self) -> Value {
        let mut spec = json!({
            "restartPolicy": match self.policy {
                Policy::Always => "Always",
                Policy::OnFailure => "OnFailure",
                Policy::Never => "Never",
            },
            "terminationGracePeriodSeconds": self.grace_secs,
            "containers": self.containers.iter().map(|container| self.container_of(container)).collect::<Vec<_>>(),
        });
        if self.priority != 0 {
            spec["priority"] = self.priority.into();
        }
        if !self.init.is_empty() {
            spec["initContainers"] = self.init.iter().map(|container| self.container_of(container)).collect();
        }
        let scratch = self.empty_dir.map(|kind| {
            let mut empty_dir = match kind {
                EmptyDir::Disk => json!({}),
                EmptyDir::Memory => json!({ "medium": "Memory" }),
            };
            if let Some(limit) = self.size_limit {
                empty_dir["sizeLimit"] = limit.into();
            }
            json!({ "name": "scratch", "emptyDir": empty_dir })
        });
        let data = self
            .host_path
            .as_ref()
            .map(|host| json!({ "name": "data", "hostPath": { "path": host.path, "type": "DirectoryOrCreate" } }));
        let claims = self
            .claims
            .iter()
            .map(|name| json!({ "name": name, "persistentVolumeClaim": { "claimName": name } }))
            .collect::<Vec<_>>();
        let inline = self.inline.iter().map(|driver| json!({ "name": "inline", "csi": { "driver": driver } }));
        let volumes: Vec<Value> = scratch.into_iter().chain(data).chain(claims).chain(inline).collect();
        if !volumes.is_empty() {
            spec["volumes"] = volumes.into();
        }
        if let Some(level) = &self.level {
            spec["securityContext"] = json!({ "seLinuxOptions": { "level": level } });
        }
        if self.host_network {
            spec["hostNetwork"] = true.into();
        }
        if !self.gates.is_empty() {
            spec["readinessGates"] = self.gates.iter().map(|gate| json!({ "conditionType": gate })).collect();
        }
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": "default",
                "labels": { LABEL_POD: self.name, LABEL_VERSION: self.version.to_string() },
            },
            "spec": spec,
        })
    }

    fn container_of(&self, container: &ContainerScript) -> Value {
        let mut manifest = json!({
            "name": container.name,
            "image": container.image,
            "command": ["sim", container.program.to_string()],
        });
        let scratch = self.empty_dir.map(|_| json!({ "name": "scratch", "mountPath": "/scratch" }));
        let data = self.host_path.as_ref().map(|host| match host.sub_path {
            None => json!({ "name": "data", "mountPath": "/data" }),
            Some(sub_path) => json!({ "name": "data", "mountPath": "/data", "subPath": sub_path }),
        });
        let (block, mounted): (Vec<_>, Vec<_>) = self.claims.iter().partition(|name| self.block_claims.contains(*name));
        let claims = mounted.into_iter().map(|name| json!({ "name": name, "mountPath": format!("/{name}") }));
        if !block.is_empty() {
            let device = |name: &&String| json!({ "name": name, "devicePath": format!("/dev/{name}") });
            manifest["volumeDevices"] = block.iter().map(device).collect();
        }
        let inline = self.inline.iter().map(|_| json!({ "name": "inline", "mountPath": "/inline" }));
        let mounts: Vec<Value> = scratch.into_iter().chain(data).chain(claims).chain(inline).collect();
        if !mounts.is_empty() {
            manifest["volumeMounts"] = mounts.into();
        }
        for (field, value) in &container.fields {
            manifest[field] = value.clone();
        }
        if let Some(policy) = container.pull {
            manifest["imagePullPolicy"] = policy.into();
        }
        manifest
    }
}

impl From<&str> for PodScript {
    /// The default pod: one container that runs.
    fn from(name: &str) -> Self {
        PodScript::pod(name).container("app", "run")
    }
}

impl ContainerScript {
    /// It has a probe that may stop it.
    pub(crate) fn may_be_unhealthy(&self) -> bool {
        self.fields.iter().any(|(name, _)| matches!(*name, "livenessProbe" | "startupProbe"))
    }

    pub(crate) fn has_pre_stop(&self) -> bool {
        self.fields.iter().any(|(name, value)| *name == "lifecycle" && value.get("preStop").is_some())
    }

    /// A probe or a hook ends the instance with this number.
    pub(crate) fn is_ended_by_checks(&self, attempt: u32) -> bool {
        self.is_ended_by_probes(attempt) || self.is_ended_by_hook(attempt)
    }

    pub(crate) fn is_ended_by_probes(&self, attempt: u32) -> bool {
        let probes = [self.probe("livenessProbe"), self.probe("startupProbe")];
        probes.into_iter().flatten().any(|probe| probe.fails(attempt))
    }

    pub(crate) fn is_ended_by_hook(&self, attempt: u32) -> bool {
        self.hook("postStart").is_some_and(|hook| hook.fails(attempt))
    }

    pub(crate) fn is_sidecar(&self) -> bool {
        self.field("restartPolicy").is_some()
    }

    pub(crate) fn field(&self, name: &str) -> Option<&Value> {
        self.fields.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// The command of this probe, or the result of its server.
    pub(crate) fn probe(&self, name: &str) -> Option<Command> {
        let probe = self.field(name)?;
        let page = || Some(probe["httpGet"]["path"].as_str()?.parse::<Page>().ok()?.comes_to());
        Exec::in_handler(probe).map(|exec| exec.command).or_else(page)
    }

    pub(crate) fn hook(&self, name: &str) -> Option<Command> {
        Exec::in_handler(&self.field("lifecycle")?[name]).map(|exec| exec.command)
    }

    fn new(name: &str, program: &str) -> Self {
        let program = program.parse().expect("a script is written in the words of Program");
        ContainerScript { name: name.to_owned(), program, image: IMAGE.to_owned(), pull: None, fields: Vec::new() }
    }
}

/// A command with its kind: a hook, `pre-stop sleep 3s`, or a probe, `ok`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exec {
    pub hook: Option<Hook>,
    pub command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hook {
    PostStart,
    PreStop,
}

impl Exec {
    /// The command of a probe or a hook in JSON.
    fn in_handler(handler: &Value) -> Option<Self> {
        let words = handler["exec"]["command"].as_array()?.iter().filter_map(Value::as_str);
        words.collect::<Vec<_>>().join(" ").parse().ok()
    }
}

impl FromStr for Exec {
    type Err = UnknownProgram;

    fn from_str(text: &str) -> Result<Self, UnknownProgram> {
        let (hook, rest) = match text.split_once(' ') {
            Some(("post-start", rest)) => (Some(Hook::PostStart), rest),
            Some(("pre-stop", rest)) => (Some(Hook::PreStop), rest),
            _ => (None, text),
        };
        Ok(Exec { hook, command: rest.parse()? })
    }
}

/// The command of a probe or a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Ok,
    Fail,
    /// Fails in the first instance of its container, and succeeds in later ones.
    FailFirst,
    /// Succeeds after this time.
    Sleep {
        secs: u64,
    },
    /// Returns neither success nor failure.
    NoVerdict,
}

impl Command {
    /// In the instance with this number.
    pub(crate) fn fails(self, attempt: u32) -> bool {
        match self {
            Command::Ok | Command::Sleep { .. } | Command::NoVerdict => false,
            Command::Fail => true,
            Command::FailFirst => attempt == 0,
        }
    }
}

/// The behaviour of a probed server, by request path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    Ok,
    Fail,
    /// Never responds.
    Stall,
    Reset,
    /// Starts a response and breaks off in its body.
    Half,
}

impl Page {
    fn comes_to(self) -> Command {
        match self {
            Page::Ok => Command::Ok,
            Page::Fail | Page::Stall | Page::Reset => Command::Fail,
            Page::Half => Command::NoVerdict,
        }
    }
}

impl FromStr for Page {
    type Err = UnknownProgram;

    fn from_str(path: &str) -> Result<Self, UnknownProgram> {
        match path {
            "/ok" => Ok(Page::Ok),
            "/fail" => Ok(Page::Fail),
            "/stall" => Ok(Page::Stall),
            "/reset" => Ok(Page::Reset),
            "/half" => Ok(Page::Half),
            _ => Err(UnknownProgram),
        }
    }
}

impl FromStr for Command {
    type Err = UnknownProgram;

    /// `ok`, `fail`, `fail first`, `sleep 3s`.
    fn from_str(text: &str) -> Result<Self, UnknownProgram> {
        match text.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["ok"] => Ok(Command::Ok),
            ["fail"] => Ok(Command::Fail),
            ["fail", "first"] => Ok(Command::FailFirst),
            ["sleep", after] => Ok(Command::Sleep { secs: seconds(after)?.as_secs() }),
            _ => Err(UnknownProgram),
        }
    }
}

impl std::fmt::Display for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Command::Ok => f.write_str("ok"),
            Command::Fail => f.write_str("fail"),
            Command::FailFirst => f.write_str("fail first"),
            Command::Sleep { secs } => write!(f, "sleep {secs}s"),
            Command::NoVerdict => f.write_str("no verdict"),
        }
    }
}

/// A command of no fake program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnknownProgram;

impl FromStr for Program {
    type Err = UnknownProgram;

    /// `run`, `exit 1 after 2s`, `flaky 3`, `slow 20s`, `stubborn`, `oom after 5s`, `missing`.
    fn from_str(text: &str) -> Result<Self, UnknownProgram> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words.as_slice() {
            ["run"] => Ok(Program::Run),
            ["exit", code] => Ok(Program::Exit { code: number(code)?, after: Duration::ZERO }),
            ["exit", code, "after", after] => Ok(Program::Exit { code: number(code)?, after: seconds(after)? }),
            ["flaky", times] => Ok(Program::Flaky { times: number(times)? }),
            ["slow", stop] => Ok(Program::Slow { stop: seconds(stop)? }),
            ["stubborn"] => Ok(Program::Stubborn),
            ["oom", "after", after] => Ok(Program::Oom { after: seconds(after)? }),
            ["missing"] => Ok(Program::Missing),
            _ => Err(UnknownProgram),
        }
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Program::Run => f.write_str("run"),
            Program::Exit { code, after } => write!(f, "exit {code} after {}s", after.as_secs()),
            Program::Flaky { times } => write!(f, "flaky {times}"),
            Program::Slow { stop } => write!(f, "slow {}s", stop.as_secs()),
            Program::Stubborn => f.write_str("stubborn"),
            Program::Oom { after } => write!(f, "oom after {}s", after.as_secs()),
            Program::Missing => f.write_str("missing"),
        }
    }
}

fn number<T: FromStr>(word: &str) -> Result<T, UnknownProgram> {
    word.parse().map_err(|_| UnknownProgram)
}

fn seconds(word: &str) -> Result<Duration, UnknownProgram> {
    number(word.strip_suffix('s').ok_or(UnknownProgram)?).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_reads_back_as_it_was_written() {
        for text in ["run", "exit 3 after 2s", "flaky 2", "slow 20s", "stubborn", "oom after 5s", "missing"] {
            let program: Program = text.parse().unwrap();
            assert_eq!(program.to_string(), text);
        }
        assert_eq!("dance".parse::<Program>(), Err(UnknownProgram));
    }
}
