//! The agent under test: the `rubelet` program on a testbed.
//!
//! Owns: its configuration, its start and its end (orderly or SIGKILL), and asking it about pods over its socket.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::json;

use crate::{
    clock,
    command::{capture, command, output},
    process::{self, Daemon},
    testbed::{Testbed, tail},
};

/// The name of the node; static pods carry it behind theirs.
pub const NODE: &str = "node";

/// Long enough for an answer over a local socket on a busy machine.
const ANSWER: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// Where manifests come from; a directory of the testbed unless given.
    pub manifests: Option<PathBuf>,
    /// What is given as `--root-dir`; a directory of the testbed unless given.
    pub root_dir: Option<PathBuf>,
}

#[derive(Debug)]
pub struct Agent {
    dir: PathBuf,
    binary: PathBuf,
    root_dir: PathBuf,
    manifests: PathBuf,
    daemon: Option<Daemon>,
}

impl Agent {
    pub fn new(testbed: &Testbed, binary: &Path, options: &AgentOptions) -> anyhow::Result<Self> {
        let dir = testbed.layout.dir.clone();
        let agent = Agent {
            root_dir: options.root_dir.clone().unwrap_or_else(|| dir.join("kubelet")),
            manifests: options.manifests.clone().unwrap_or_else(|| dir.join("manifests")),
            binary: binary.to_owned(),
            daemon: None,
            dir,
        };
        fs::create_dir_all(&agent.manifests)?;
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "staticPodPath": agent.manifests,
            "podLogsDir": agent.pod_logs_dir(),
            "containerRuntimeEndpoint": format!("unix://{}", testbed.layout.socket().display()),
            // Several agents live on one machine here, so none may have the usual port.
            "healthzPort": 0,
            "failCgroupV1": false,
        });
        // JSON is YAML.
        fs::write(agent.config(), serde_json::to_string_pretty(&config)?)?;
        Ok(agent)
    }

    pub fn root_dir(&self) -> PathBuf {
        self.root_dir.clone()
    }

    pub fn pod_logs_dir(&self) -> PathBuf {
        self.dir.join("log/pods")
    }

    pub fn manifests(&self) -> &Path {
        &self.manifests
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    pub fn pid(&self) -> Option<i32> {
        self.daemon.as_ref().map(|daemon| daemon.id.pid)
    }

    fn config(&self) -> PathBuf {
        self.dir.join("kubelet.yaml")
    }

    fn pid_file(&self) -> PathBuf {
        self.dir.join("agent.pid")
    }

    /// Ends the agent that an earlier `up` left running.
    pub fn replace_running(&mut self) -> anyhow::Result<()> {
        if let Some(running) = process::from_pid_file(&self.pid_file()) {
            running.end(Duration::from_secs(10));
        }
        Ok(())
    }

    /// Starts it and waits until it answers.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.spawn()?;
        let answers = clock::poll(Duration::from_secs(30), Duration::from_millis(50), || {
            let ended = self.daemon.as_mut().is_none_or(|daemon| !daemon.is_alive());
            (ended || self.pods().is_ok()).then_some(ended)
        });
        match answers {
            Some(false) => Ok(()),
            Some(true) => bail!("rubelet ended at once; the end of its log:\n{}", tail(&self.log(), 20)),
            None => {
                let err = self.pods().err();
                bail!("rubelet does not answer ({err:?}); the end of its log:\n{}", tail(&self.log(), 20))
            }
        }
    }

    /// Starts it and does not wait: for tests that kill it again at once.
    pub fn spawn(&mut self) -> anyhow::Result<()> {
        let mut rubelet = command(&self.binary, ["-v=4"]);
        rubelet.arg(format!("--config={}", self.config().display()));
        rubelet.arg(format!("--root-dir={}", self.root_dir.display()));
        rubelet.arg(format!("--hostname-override={NODE}"));
        self.daemon = Some(process::start_daemon(&mut rubelet, &self.log(), &self.pid_file())?);
        Ok(())
    }

    /// SIGTERM, and whether it ended in time.
    pub fn stop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.end(Duration::from_secs(10));
        }
    }

    /// SIGKILL, as when it crashes.
    pub fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill();
        }
    }

    /// Pods as the agent sees them.
    pub fn pods(&self) -> anyhow::Result<serde_json::Value> {
        serde_json::from_str(&self.ask(&["pods", "-o", "json"])?).context("the answer of `rubelet pods -o json`")
    }

    /// The same, straight from the socket: for measurements, where starting a program would count.
    pub fn pod_list(&self) -> anyhow::Result<String> {
        let mut socket = UnixStream::connect(self.root_dir.join("rubelet.sock"))?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.write_all(b"GET /podlist HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Runs one of the program's own commands against the running agent.
    pub fn ask(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut rubelet = command(&self.binary, args);
        rubelet.arg(format!("--root-dir={}", self.root_dir.display()));
        output(&mut rubelet, ANSWER)
    }

    /// All there is to say about what the agent did, for somebody who reads a failed test.
    pub fn diagnosis(&self, pod: Option<&str>) -> String {
        let rubelet = |args: &[&str]| {
            let mut rubelet = command(&self.binary, args);
            rubelet.arg(format!("--root-dir={}", self.root_dir.display()));
            match capture(&mut rubelet, ANSWER) {
                Ok(out) => format!("--- rubelet {}\n{}{}", args.join(" "), out.stdout, out.stderr),
                Err(err) => format!("--- rubelet {}: {err:#}\n", args.join(" ")),
            }
        };
        let mut parts = vec![rubelet(&["pods", "-o", "wide"]), rubelet(&["events"])];
        parts.extend(pod.map(|pod| rubelet(&["explain", pod])));
        parts.push(format!("--- the end of the agent's log\n{}", tail(&self.log(), 60)));
        parts.join("\n")
    }
}
