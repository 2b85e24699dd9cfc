//! A private control plane: etcd, API server, controller manager and scheduler, in one directory, on loopback ports.
//!
//! Owns: starting and stopping them, their certificates and the kubeconfigs of clients. Its processes have
//! their pid files where `sweep` looks, so nothing of it survives a crash.

pub mod api;
pub mod bootstrap;
pub mod certificates;
mod fault_proxy;
mod kubeconfig;
mod metrics_server;
mod programs;
mod service_address;

use std::{
    fs,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    AtEnd, Layout, clock,
    command::{SHORT, command, output},
    free_port,
    process::{self, Daemon},
    sweep, tail,
};
use serde_json::{Value, json};

use self::{
    api::Api,
    certificates::{Authority, Identity, SigningKey},
    kubeconfig::Credential,
};
pub use self::{
    fault_proxy::FaultProxy,
    programs::{ClusterPrograms, upstream_kubelet},
    service_address::ServiceAddress,
};

/// Long enough for a cold start on a machine that builds at the same time.
const READY: Duration = Duration::from_secs(180);

#[derive(Clone, Debug)]
pub struct ControlPlaneOptions {
    /// The authorizers.
    pub authorization_mode: &'static str,
    /// The validity of node certificates; the controller manager's default is a year.
    pub signing_duration: Option<&'static str>,
    /// How long a node may be silent before it counts as lost.
    pub node_monitor_grace: &'static str,
    /// Whether the control plane evicts pods that do not tolerate a node's NoExecute taint.
    pub taint_eviction: TaintEviction,
    /// Of the API server, where they differ from its own.
    pub feature_gates: Option<&'static str>,
    /// Of the API server: versions and resources that are not served by default.
    pub runtime_config: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaintEviction {
    On,
    /// No eviction: only the node acts on them.
    Off,
}

impl Default for ControlPlaneOptions {
    fn default() -> Self {
        ControlPlaneOptions {
            authorization_mode: "Node,RBAC",
            signing_duration: None,
            node_monitor_grace: "50s",
            taint_eviction: TaintEviction::On,
            feature_gates: None,
            runtime_config: None,
        }
    }
}

#[derive(Debug)]
pub struct ControlPlane {
    layout: Layout,
    programs: ClusterPrograms,
    options: ControlPlaneOptions,
    ports: Ports,
    authority: Authority,
    daemons: Vec<(&'static str, Daemon)>,
    at_end: AtEnd,
}

/// Kept over restarts, because clients have them in their kubeconfigs.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
struct Ports {
    etcd: u16,
    etcd_peer: u16,
    apiserver: u16,
}

impl ControlPlane {
    /// One for tests, in a temporary directory; removed on drop.
    pub fn start(programs: &ClusterPrograms, options: &ControlPlaneOptions) -> anyhow::Result<Self> {
        let layout = Layout::temporary()?;
        let mut plane = ControlPlane::new(layout, programs, options, AtEnd::Sweep)?;
        plane.prepare()?;
        Ok(plane)
    }

    /// One that outlives the process, in `dir`; running parts are kept.
    pub fn open(dir: &Path, programs: &ClusterPrograms) -> anyhow::Result<Self> {
        let options = ControlPlaneOptions::default();
        let mut plane = ControlPlane::new(Layout::create(dir)?, programs, &options, AtEnd::Leave)?;
        plane.prepare()?;
        Ok(plane)
    }

    fn new(
        layout: Layout,
        programs: &ClusterPrograms,
        options: &ControlPlaneOptions,
        at_end: AtEnd,
    ) -> anyhow::Result<Self> {
        let dir = layout.dir.join("cluster");
        fs::create_dir_all(&dir)?;
        let file = dir.join("ports.json");
        let ports = match fs::read_to_string(&file) {
            Ok(text) => serde_json::from_str(&text)?,
            Err(_) => Ports { etcd: free_port()?, etcd_peer: free_port()?, apiserver: free_port()? },
        };
        fs::write(file, serde_json::to_string(&ports)?)?;
        Ok(ControlPlane {
            authority: Authority::open(&dir.join("pki"))?,
            layout,
            programs: programs.clone(),
            options: options.clone(),
            ports,
            daemons: Vec::new(),
            at_end,
        })
    }

    fn prepare(&mut self) -> anyhow::Result<()> {
        let admin = self.authority.client("admin", "kubernetes-admin", Some("system:masters"))?;
        self.write_kubeconfig(&self.admin_kubeconfig(), &Credential::Certificate(&admin))?;
        self.write_kubeconfig(&self.bootstrap_kubeconfig(), &Credential::Token(bootstrap::TOKEN))?;
        self.run("kubectl-proxy", &mut self.proxy_command())?;
        self.run("etcd", &mut self.etcd_command())?;
        self.start_apiserver()?;
        self.run("kube-controller-manager", &mut self.controller_manager_command()?)?;
        self.run("kube-scheduler", &mut self.scheduler_command())?;
        self.apply(&bootstrap::objects())?;
        self.wait("the controllers work", |plane| {
            for path in ["serviceaccounts/default", "configmaps/kube-root-ca.crt"] {
                plane.api().get(&format!("/api/v1/namespaces/default/{path}"))?;
            }
            Ok(())
        })
    }

    /// Starts the API server on etcd's state, and waits until it is ready.
    pub fn start_apiserver(&mut self) -> anyhow::Result<()> {
        let mut apiserver = self.apiserver_command()?;
        self.run("kube-apiserver", &mut apiserver)?;
        self.wait("the API server is ready", |plane| {
            let answer = plane.api().get_text("/readyz")?;
            ensure!(answer == "ok", "/readyz says {answer}");
            Ok(())
        })
    }

    /// SIGKILL, as when its machine loses power. etcd keeps running.
    pub fn kill_apiserver(&mut self) {
        if let Some(at) = self.daemons.iter().position(|(name, _)| *name == "kube-apiserver") {
            self.daemons.remove(at).1.kill();
        }
    }

    pub fn server_url(&self) -> String {
        format!("https://{}", self.server_address())
    }

    pub fn server_address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.apiserver).into()
    }

    pub fn api(&self) -> Api {
        Api::new(self.proxy_socket())
    }

    pub fn kubectl_program(&self) -> &Path {
        &self.programs.kubectl
    }

    /// The administrator's.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.dir().join("admin.kubeconfig")
    }

    /// For a node that has only a token.
    pub fn bootstrap_kubeconfig(&self) -> PathBuf {
        self.dir().join("bootstrap.kubeconfig")
    }

    /// For a node, with a certificate in its name.
    pub fn node_kubeconfig(&self, node: &str) -> anyhow::Result<PathBuf> {
        let path = self.dir().join(format!("node-{node}.kubeconfig"));
        self.write_kubeconfig(&path, &Credential::Certificate(&self.node_identity(node)?))?;
        Ok(path)
    }

    /// The same, but an exec plugin prints the certificate and logs each run. Returns the path of that log, too.
    pub fn node_kubeconfig_by_program(&self, node: &str) -> anyhow::Result<(PathBuf, PathBuf)> {
        let Identity { certificate, key } = self.node_identity(node)?;
        let answer = json!({
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {
                "clientCertificateData": fs::read_to_string(certificate)?,
                "clientKeyData": fs::read_to_string(key)?,
            },
        });
        let [answer_file, program, note, path] =
            ["json", "sh", "asked", "kubeconfig"].map(|end| self.dir().join(format!("node-{node}-by-program.{end}")));
        fs::write(&answer_file, answer.to_string())?;
        let script = format!("#!/bin/sh\necho asked >> '{}'\nexec cat '{}'\n", note.display(), answer_file.display());
        fs::write(&program, script)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        self.write_kubeconfig(&path, &Credential::Program(&program))?;
        Ok((path, note))
    }

    /// The same, through a proxy.
    pub fn node_kubeconfig_by_way_of(&self, node: &str, url: &str) -> anyhow::Result<PathBuf> {
        let path = self.dir().join(format!("node-{node}-by-proxy.kubeconfig"));
        let identity = self.node_identity(node)?;
        kubeconfig::write(&path, url, &self.authority.certificate(), &Credential::Certificate(&identity))
    }

    /// Injects faults into a node's requests; see there.
    pub fn fault_proxy(&self, node: &str, seed: u64) -> anyhow::Result<FaultProxy> {
        let (serving, node) = (self.serving_identity()?, self.node_identity(node)?);
        FaultProxy::start(&self.server_url(), &self.authority.certificate(), &serving, &node, seed)
    }

    fn node_identity(&self, node: &str) -> anyhow::Result<Identity> {
        self.authority.client(&format!("node-{node}"), &format!("system:node:{node}"), Some("system:nodes"))
    }

    fn serving_identity(&self) -> anyhow::Result<Identity> {
        let addresses = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V4(service_address::SERVICE)];
        let names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"];
        self.authority.server("apiserver", &addresses, &names)
    }

    /// The CA of clients of an agent's own server.
    pub fn client_authority(&self) -> PathBuf {
        self.authority.certificate()
    }

    /// One line of JSON per request of a node.
    pub fn audit_log(&self) -> PathBuf {
        self.dir().join("audit.log")
    }

    /// Runs kubectl as the administrator; returns its output.
    pub fn kubectl<S: AsRef<std::ffi::OsStr>>(&self, args: &[S]) -> anyhow::Result<String> {
        output(&mut self.kubectl_command(args), SHORT)
    }

    pub fn kubectl_command<S: AsRef<std::ffi::OsStr>>(&self, args: &[S]) -> Command {
        let mut kubectl = command(&self.programs.kubectl, args);
        kubectl.env("KUBECONFIG", self.admin_kubeconfig());
        // The discovery cache would be written to the home directory.
        kubectl.env("KUBECACHEDIR", self.dir().join("kubectl-cache"));
        kubectl
    }

    /// `kubectl apply` of an object or a list.
    pub fn apply(&self, object: &Value) -> anyhow::Result<()> {
        self.send("apply", object)
    }

    /// `kubectl create`, which also works for objects too large for the last-applied annotation.
    pub fn create(&self, object: &Value) -> anyhow::Result<()> {
        self.send("create", object)
    }

    fn send(&self, verb: &str, object: &Value) -> anyhow::Result<()> {
        let mut file = tempfile_in(&self.dir())?;
        file.1.write_all(serde_json::to_string(object)?.as_bytes())?;
        let result = self.kubectl(&[verb, "-f", &file.0.display().to_string()]).map(drop);
        fs::remove_file(&file.0)?;
        result
    }

    /// Null if the node does not exist.
    pub fn node_condition(&self, node: &str, kind: &str) -> anyhow::Result<Value> {
        let node = self.api().get(&format!("/api/v1/nodes/{node}"))?;
        let conditions = node["status"]["conditions"].as_array();
        let found = conditions.into_iter().flatten().find(|condition| condition["type"] == kind);
        Ok(found.cloned().unwrap_or_default())
    }

    fn dir(&self) -> PathBuf {
        self.layout.dir.join("cluster")
    }

    fn pki_dir(&self) -> PathBuf {
        self.dir().join("pki")
    }

    fn proxy_socket(&self) -> PathBuf {
        self.layout.dir.join("kubectl-proxy.sock")
    }

    fn write_kubeconfig(&self, path: &Path, credential: &Credential<'_>) -> anyhow::Result<()> {
        kubeconfig::write(path, &self.server_url(), &self.authority.certificate(), credential).map(drop)
    }

    /// Starts one of the programs, unless an earlier `up` left it running.
    fn run(&mut self, name: &'static str, command: &mut Command) -> anyhow::Result<()> {
        let pid_file = self.layout.dir.join(format!("{name}.pid"));
        if process::from_pid_file(&pid_file).is_none() {
            self.daemons.push((name, process::start_daemon(command, &self.log(name), &pid_file)?));
        }
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir().join(format!("{name}.log"))
    }

    /// Waits for a response; stops waiting if a program ends.
    fn wait(&mut self, what: &str, ask: impl Fn(&ControlPlane) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut last = anyhow::anyhow!("never asked");
        let mut ended = None;
        let answer = clock::poll(READY, Duration::from_millis(100), || {
            ended = self.daemons.iter_mut().find_map(|(name, daemon)| (!daemon.is_alive()).then_some(*name));
            match ask(self) {
                Ok(()) => Some(()),
                Err(_) if ended.is_some() => Some(()),
                Err(err) => {
                    last = err;
                    None
                }
            }
        });
        if let Some(name) = ended {
            anyhow::bail!("{name} ended; the end of its log:\n{}", tail(&self.log(name), 20));
        }
        answer
            .ok_or(last)
            .with_context(|| format!("waited in vain until {what}; see the logs in {}", self.dir().display()))
    }

    fn proxy_command(&self) -> Command {
        let socket = self.proxy_socket();
        self.kubectl_command(&["proxy", &format!("--unix-socket={}", socket.display())])
    }

    fn etcd_command(&self) -> Command {
        let client = format!("http://127.0.0.1:{}", self.ports.etcd);
        let peer = format!("http://127.0.0.1:{}", self.ports.etcd_peer);
        command(
            &self.programs.etcd,
            [
                format!("--data-dir={}", self.dir().join("etcd").display()),
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster=default={peer}"),
                // Durability is not needed.
                "--unsafe-no-fsync".to_owned(),
                "--log-level=warn".to_owned(),
            ],
        )
    }

    fn apiserver_command(&self) -> anyhow::Result<Command> {
        let authority = self.authority.certificate();
        let serving = self.serving_identity()?;
        let kubelet_client = self.authority.client(
            "apiserver-kubelet-client",
            "kube-apiserver-kubelet-client",
            Some("system:masters"),
        )?;
        let accounts = SigningKey::open(&self.pki_dir())?;
        // Identifies the API server to API services whose requests it proxies.
        let front_proxy = Authority::open(&self.pki_dir().join("front-proxy"))?;
        let proxy_client = front_proxy.client("client", "front-proxy-client", None)?;
        let policy = self.dir().join("audit-policy.yaml");
        fs::write(&policy, serde_json::to_string(&audit_policy())?)?;
        let flag = |name: &str, value: &Path| format!("--{name}={}", value.display());
        let gates = self.options.feature_gates.map(|gates| format!("--feature-gates={gates}"));
        let mut command = command(
            &self.programs.apiserver,
            [
                format!("--etcd-servers=http://127.0.0.1:{}", self.ports.etcd),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--secure-port={}", self.ports.apiserver),
                flag("tls-cert-file", &serving.certificate),
                flag("tls-private-key-file", &serving.key),
                flag("client-ca-file", &authority),
                flag("kubelet-client-certificate", &kubelet_client.certificate),
                flag("kubelet-client-key", &kubelet_client.key),
                "--kubelet-preferred-address-types=InternalIP,Hostname".to_owned(),
                flag("requestheader-client-ca-file", &front_proxy.certificate()),
                "--requestheader-allowed-names=front-proxy-client".to_owned(),
                "--requestheader-username-headers=X-Remote-User".to_owned(),
                "--requestheader-group-headers=X-Remote-Group".to_owned(),
                "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
                flag("proxy-client-cert-file", &proxy_client.certificate),
                flag("proxy-client-key-file", &proxy_client.key),
                // To endpoints, since service addresses are not routed here.
                "--enable-aggregator-routing=true".to_owned(),
                format!("--authorization-mode={}", self.options.authorization_mode),
                "--enable-admission-plugins=NodeRestriction".to_owned(),
                "--enable-bootstrap-token-auth=true".to_owned(),
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
                flag("service-account-signing-key-file", &accounts.private),
                flag("service-account-key-file", &accounts.public),
                "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
                "--allow-privileged=true".to_owned(),
                flag("audit-policy-file", &policy),
                flag("audit-log-path", &self.audit_log()),
                // No graceful shutdown is needed.
                "--shutdown-delay-duration=0s".to_owned(),
                "--profiling=false".to_owned(),
            ],
        );
        command.args(gates);
        command.args(self.options.runtime_config.map(|config| format!("--runtime-config={config}")));
        Ok(command)
    }

    fn controller_manager_command(&self) -> anyhow::Result<Command> {
        let accounts = SigningKey::open(&self.pki_dir())?;
        let kubeconfig = self.admin_kubeconfig();
        let flag = |name: &str, value: &Path| format!("--{name}={}", value.display());
        let controllers = match self.options.taint_eviction {
            TaintEviction::On => "*,bootstrap-signer-controller,token-cleaner-controller",
            TaintEviction::Off => "*,bootstrap-signer-controller,token-cleaner-controller,-taint-eviction-controller",
        };
        let mut command = command(
            &self.programs.controller_manager,
            [
                flag("kubeconfig", &kubeconfig),
                "--leader-elect=false".to_owned(),
                "--secure-port=0".to_owned(),
                format!("--controllers={controllers}"),
                flag("cluster-signing-cert-file", &self.authority.certificate()),
                flag("cluster-signing-key-file", &self.authority.key()),
                flag("root-ca-file", &self.authority.certificate()),
                flag("service-account-private-key-file", &accounts.private),
                format!("--node-monitor-grace-period={}", self.options.node_monitor_grace),
                // The default of twenty requests per second would delay tests of many pods.
                "--kube-api-qps=300".to_owned(),
                "--kube-api-burst=600".to_owned(),
            ],
        );
        command.args(self.options.signing_duration.map(|duration| format!("--cluster-signing-duration={duration}")));
        Ok(command)
    }

    fn scheduler_command(&self) -> Command {
        command(
            &self.programs.scheduler,
            [
                format!("--kubeconfig={}", self.admin_kubeconfig().display()),
                "--leader-elect=false".to_owned(),
                "--secure-port=0".to_owned(),
            ],
        )
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        if self.at_end == AtEnd::Leave {
            return;
        }
        // Its state is thrown away, so it may be killed.
        for (_, daemon) in &mut self.daemons {
            daemon.kill();
        }
        if let Err(err) = sweep::sweep(&self.layout.dir) {
            eprintln!("{}: not everything could be cleaned up: {err:#}", self.layout.dir.display());
        }
    }
}

/// Requests of nodes; for pod status also the bodies.
fn audit_policy() -> Value {
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {
                "level": "Request",
                "userGroups": ["system:nodes"],
                "resources": [{ "group": "", "resources": ["pods/status"] }],
            },
            { "level": "Metadata", "userGroups": ["system:nodes"] },
            { "level": "None" },
        ],
    })
}

/// A new private file.
fn tempfile_in(dir: &Path) -> anyhow::Result<(PathBuf, fs::File)> {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = dir.join(format!("apply-{}-{number}.json", std::process::id()));
    let file = fs::File::create_new(&path)?;
    Ok((path, file))
}
