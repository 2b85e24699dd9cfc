//! The agent under test: the `rubelet` program on a testbed, or upstream's kubelet in its place.
//!
//! Owns: its configuration, its start and its end (orderly or SIGKILL), and requests about pods over its socket.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use serde_json::{Value, json};

use crate::{
    CgroupDriver, Testbed, clock,
    command::{command, output},
    free_port,
    process::{self, Daemon},
    project, tail,
};

/// The node name; static pods have it as a suffix.
pub const NODE: &str = "node";

/// Long enough for a response over a local socket on a busy machine.
const ANSWER: Duration = Duration::from_secs(20);

/// Which agent is tested.
#[derive(Clone, Debug)]
pub enum Program {
    Rubelet(PathBuf),
    /// Upstream's kubelet: it validates the tests, and is the peer in measurements. It has no commands, so its log
    /// replaces `events`.
    Upstream(PathBuf),
}

#[derive(Clone, Debug, Default)]
pub struct AgentOptions {
    /// The manifest source; a directory of the testbed by default.
    pub manifests: Option<PathBuf>,
    /// `--root-dir`; a directory of the testbed by default.
    pub root_dir: Option<PathBuf>,
    /// A URL with pods; the agent reads it every second, with a header that its server requires.
    pub url: Option<String>,
    /// The cluster of the node; standalone without one.
    pub cluster: Option<Membership>,
    /// `--node-ip`; the node's own address by default.
    pub node_ip: Option<String>,
    /// Fields of the configuration that a test sets.
    pub config: serde_json::Map<String, Value>,
    /// `-v`; 4 by default.
    pub verbosity: Option<u32>,
    /// Replaces `/etc/resolv.conf` for the agent alone, in a mount namespace of its own. Mounts below the testbed's
    /// directory then reach the runtime only if that directory is a shared mount.
    pub resolv_conf: Option<PathBuf>,
}

/// The agent's credentials in a cluster.
#[derive(Clone, Debug)]
pub struct Membership {
    pub node: String,
    pub kubeconfig: PathBuf,
    /// With it, the agent requests a certificate and writes `kubeconfig` itself.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// The CA of clients of the agent's own server.
    pub client_authority: PathBuf,
}

#[derive(Debug)]
pub struct Agent {
    dir: PathBuf,
    program: Program,
    options: AgentOptions,
    runtime_socket: PathBuf,
    /// The parent of all pods' cgroups.
    cgroup_root: String,
    driver: CgroupDriver,
    /// An address of this node only.
    address: Ipv4Addr,
    port: u16,
    /// Plain HTTP, without authentication.
    read_only_port: u16,
    root_dir: PathBuf,
    manifests: PathBuf,
    daemon: Option<Daemon>,
}

impl Agent {
    pub fn new(testbed: &Testbed, program: &Program, options: &AgentOptions) -> anyhow::Result<Self> {
        let dir = testbed.layout.dir.clone();
        let agent = Agent {
            root_dir: options.root_dir.clone().unwrap_or_else(|| dir.join("kubelet")),
            manifests: options.manifests.clone().unwrap_or_else(|| dir.join("manifests")),
            program: program.clone(),
            options: options.clone(),
            runtime_socket: testbed.layout.socket(),
            cgroup_root: testbed.layout.cgroup_root(),
            driver: testbed.driver,
            address: testbed.address()?,
            port: free_port()?,
            read_only_port: free_port()?,
            daemon: None,
            dir,
        };
        fs::create_dir_all(&agent.manifests)?;
        Ok(agent)
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Another program from the next start on, with the same files.
    pub fn become_program(&mut self, program: &Program) {
        self.program = program.clone();
    }

    fn configuration(&self) -> Value {
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "staticPodPath": self.manifests,
            "podLogsDir": self.pod_logs_dir(),
            "containerRuntimeEndpoint": format!("unix://{}", self.runtime_socket.display()),
            // Whoever tests on a machine with swap.
            "failSwapOn": false,
            // Several agents run on one machine, so none may use the default cgroup or port.
            "cgroupRoot": self.cgroup_root,
            "cgroupDriver": self.driver.as_str(),
            "address": self.address,
            "port": self.port,
            "readOnlyPort": self.read_only_port,
            "healthzPort": 0,
            "failCgroupV1": false,
            // A machine on which tests run may have little disk space left.
            "evictionHard": {},
            "imageGCHighThresholdPercent": 100,
        });
        if let Some(url) = &self.options.url {
            config["staticPodURL"] = json!(url);
            config["staticPodURLHeader"] = json!({ "Authorization": ["Bearer secret-of-the-test"] });
            config["httpCheckFrequency"] = json!("1s");
        }
        let mut extras = Vec::new();
        if let Program::Upstream(_) = self.program {
            extras.push(self.upstream_configuration());
        }
        extras.push(json!({ "volumePluginDir": self.volume_plugins() }));
        if let Some(cluster) = &self.options.cluster {
            extras.push(self.cluster_configuration(cluster));
        }
        extras.push(Value::Object(self.options.config.clone()));
        let object = config.as_object_mut().expect("the configuration is an object");
        object.extend(extras.into_iter().flat_map(|extra| extra.as_object().cloned().unwrap_or_default()));
        config
    }

    fn upstream_configuration(&self) -> Value {
        json!({
            "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            // Without its own cgroups on a shared machine.
            "cgroupRoot": "",
            "cgroupsPerQOS": false,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": false,
        })
    }

    /// The settings with which upstream's kubelet has its own cgroups and complete statistics here, as Rubelet has.
    pub fn own_cgroups(&self) -> anyhow::Result<serde_json::Map<String, Value>> {
        let Program::Upstream(_) = self.program else { return Ok(serde_json::Map::new()) };
        // Its cgroup must exist.
        for tree in fs::read_dir("/sys/fs/cgroup")?.flatten().filter(|tree| tree.path().join("cgroup.procs").exists()) {
            fs::create_dir_all(tree.path().join(self.cgroup_root.trim_start_matches('/')))?;
        }
        let config = json!({
            "cgroupRoot": self.cgroup_root,
            "cgroupsPerQOS": true,
            "enforceNodeAllocatable": ["pods"],
            "localStorageCapacityIsolation": true,
        });
        Ok(config.as_object().cloned().unwrap_or_default())
    }

    fn cluster_configuration(&self, cluster: &Membership) -> Value {
        json!({
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": cluster.client_authority },
            },
            "authorization": { "mode": "Webhook" },
            "rotateCertificates": cluster.bootstrap_kubeconfig.is_some(),
        })
    }

    /// Upstream has no commands to inspect a standalone node.
    pub fn is_upstream(&self) -> bool {
        matches!(self.program, Program::Upstream(_))
    }

    /// The name of its node.
    pub fn node(&self) -> &str {
        self.options.cluster.as_ref().map_or(NODE, |cluster| &cluster.node)
    }

    pub fn root_dir(&self) -> PathBuf {
        self.root_dir.clone()
    }

    /// Of FlexVolume drivers.
    pub fn volume_plugins(&self) -> PathBuf {
        self.dir.join("volume-plugins")
    }

    pub fn pod_logs_dir(&self) -> PathBuf {
        self.dir.join("log/pods")
    }

    /// The directory of its certificates.
    pub fn pki_dir(&self) -> PathBuf {
        self.dir.join("pki")
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

    /// Starts it and waits until it responds.
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
        // JSON is YAML.
        fs::write(self.config(), serde_json::to_string_pretty(&self.configuration())?)?;
        let (Program::Rubelet(binary) | Program::Upstream(binary)) = &self.program;
        let mut rubelet = match &self.options.resolv_conf {
            Some(file) => with_resolv_conf(file, binary),
            None => command(binary, [""; 0]),
        };
        rubelet.arg(format!("-v={}", self.options.verbosity.unwrap_or(4)));
        rubelet.arg(format!("--config={}", self.config().display()));
        rubelet.arg(format!("--root-dir={}", self.root_dir.display()));
        rubelet.arg(format!("--hostname-override={}", self.node()));
        rubelet.arg(format!("--cert-dir={}", self.pki_dir().display()));
        if self.is_upstream() {
            // Its cAdvisor takes container names from the containerd at the default path, unless configured.
            rubelet.arg(format!("--containerd={}", self.runtime_socket.display()));
        }
        if let Some(cluster) = &self.options.cluster {
            let node_ip = self.options.node_ip.clone().unwrap_or_else(|| self.address.to_string());
            rubelet.arg(format!("--node-ip={node_ip}"));
            rubelet.arg(format!("--kubeconfig={}", cluster.kubeconfig.display()));
            let bootstrap = cluster.bootstrap_kubeconfig.as_ref();
            rubelet.args(bootstrap.map(|path| format!("--bootstrap-kubeconfig={}", path.display())));
        }
        self.daemon = Some(process::start_daemon(&mut rubelet, &self.log(), &self.pid_file())?);
        Ok(())
    }

    /// SIGTERM; returns whether it ended in time.
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

    /// Pods as the agent sees them: a v1 PodList.
    pub fn pods(&self) -> anyhow::Result<Value> {
        let list = match &self.program {
            Program::Rubelet(_) => self.ask(&["pods", "-o", "json"])?,
            Program::Upstream(_) => self.pod_list()?,
        };
        serde_json::from_str(&list).context("the agent's list of pods")
    }

    /// The same without starting a program, which would distort a measurement.
    pub fn pod_list(&self) -> anyhow::Result<String> {
        match &self.program {
            Program::Rubelet(_) => {
                let socket = UnixStream::connect(self.root_dir.join("rubelet.sock"))?;
                socket.set_read_timeout(Some(clock::patient(ANSWER)))?;
                http_get(socket, "/podlist")
            }
            Program::Upstream(_) => self.read_only("/pods"),
        }
    }

    /// A response of its read-only port.
    pub fn read_only(&self, path: &str) -> anyhow::Result<String> {
        http_get(self.connect_read_only()?, path)
    }

    pub fn connect_read_only(&self) -> anyhow::Result<TcpStream> {
        connect(SocketAddr::new(self.address.into(), self.read_only_port), None)
    }

    /// A request to its own port over TLS.
    pub fn connect_secured(&self) -> anyhow::Result<TcpStream> {
        connect(self.secured_address(), None)
    }

    pub fn secured_address(&self) -> SocketAddr {
        SocketAddr::new(self.address.into(), self.port)
    }

    /// Runs one of the program's own commands against the running agent.
    pub fn ask(&self, args: &[&str]) -> anyhow::Result<String> {
        let Program::Rubelet(binary) = &self.program else { return Ok(tail(&self.log(), usize::MAX)) };
        let mut rubelet = command(binary, args);
        rubelet.arg(format!("--root-dir={}", self.root_dir.display()));
        output(&mut rubelet, ANSWER)
    }

    /// The agent's state and logs, for the report of a failed test.
    pub fn diagnosis(&self, pod: Option<&str>) -> String {
        let mut questions = vec![vec!["pods", "-o", "wide"], vec!["events"]];
        questions.extend(pod.map(|pod| vec!["explain", pod]));
        let mut parts = Vec::new();
        if let Program::Rubelet(_) = self.program {
            parts.extend(questions.iter().map(|args| {
                let answer = self.ask(args).unwrap_or_else(|err| format!("{err:#}"));
                format!("--- rubelet {}\n{answer}", args.join(" "))
            }));
        }
        parts.push(format!("--- the end of the agent's log\n{}", tail(&self.log(), 60)));
        parts.join("\n")
    }
}

/// Each program replaces the one before, so the agent has the process id of the first.
fn with_resolv_conf(file: &Path, program: &Path) -> Command {
    let script = "mount --make-private / && mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
    let mut unshare = command("unshare", ["--mount", "--propagation", "unchanged", "sh", "-c", script]);
    unshare.args([file, program]);
    unshare
}

/// A connection to one of an agent's ports, from this address of the machine or any.
pub fn connect(address: SocketAddr, source: Option<Ipv4Addr>) -> anyhow::Result<TcpStream> {
    let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if let Some(source) = source {
        net::bind(&socket, &SocketAddr::new(source.into(), 0))?;
    }
    net::connect(&socket, &address)?;
    let socket = TcpStream::from(socket);
    socket.set_read_timeout(Some(clock::patient(ANSWER)))?;
    Ok(socket)
}

/// Builds the release.
pub fn build() -> anyhow::Result<PathBuf> {
    let mut cargo = project::cargo(["build", "--release", "--package", "rubelet"]);
    output(cargo.current_dir(project::root()), Duration::from_secs(1800))?;
    Ok(project::target().join("release/rubelet"))
}

fn http_get(socket: impl Read + Write, path: &str) -> anyhow::Result<String> {
    let (status, body) = ask(socket, "GET", path, "")?;
    ensure!(status == 200, "GET {path}: {status} {body}");
    Ok(body)
}

/// A request; returns the status and body of the response. In HTTP/1.0, so that the response ends with the connection.
pub fn ask(mut socket: impl Read + Write, method: &str, path: &str, headers: &str) -> anyhow::Result<(u16, String)> {
    write!(socket, "{method} {path} HTTP/1.0\r\nHost: localhost\r\n{headers}\r\n")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no end of headers")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("{method} {path}: {head}"))?, body.to_owned()))
}
