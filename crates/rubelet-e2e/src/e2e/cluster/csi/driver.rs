//! A CSI driver with its sidecars, as pods of the node under test.
//!
//! Owns: its objects in the cluster, its deployment and its removal, its process, and what it must not leave behind. Tests share
//! a control plane, so every node has a driver of its own name.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rubelet_testbed::{
    clock,
    process::{self, ProcessId},
    sweep::mounts_below,
    tail,
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::e2e::cluster::{
    ClusterNode,
    csi::{gate::Gate, image},
};

/// The StatefulSet, and its pod.
const NAME: &str = "csi";
const POD: &str = "csi-0";

/// In the driver's own directory below the agent's plugins: where it listens, and where a gate does.
const SOCKET: &str = "csi.sock";
const GATE: &str = "gate.sock";

/// Starts the driver again when it was killed, without the back-off of a container, unless a test holds it back. Its log is a file, so that
/// a test finds a call there as soon as the driver has it.
const SUPERVISOR: &str = "trap 'kill $driver; exit 0' TERM
while :; do
  while [ -e /csi-data-dir/hold ]; do sleep 0.05; done
  /hostpathplugin \"$@\" 2>> /csi-data-dir/log & driver=$!
  wait $driver
done";

/// What its sidecars may do: the sum of their own manifests.
const RULES: &[(&str, &[&str], &[&str])] = &[
    ("", &["persistentvolumes"], &["get", "list", "watch", "create", "patch", "update", "delete"]),
    ("", &["persistentvolumeclaims"], &["get", "list", "watch", "patch", "update"]),
    ("", &["persistentvolumeclaims/status"], &["patch", "update"]),
    ("", &["nodes", "pods", "secrets"], &["get", "list", "watch"]),
    ("", &["events"], &["create", "patch", "update", "list", "watch", "get"]),
    ("storage.k8s.io", &["storageclasses", "csinodes", "volumeattributesclasses"], &["get", "list", "watch"]),
    ("storage.k8s.io", &["volumeattachments"], &["get", "list", "watch", "patch"]),
    ("storage.k8s.io", &["volumeattachments/status"], &["patch"]),
];

#[derive(Debug)]
pub struct Driver {
    /// The driver's, its StorageClass's, its role's.
    pub name: String,
    /// The socket that the agent is told of.
    socket: &'static str,
}

impl Driver {
    /// Deploys one and waits until the node has it.
    pub fn deploy(cluster: &ClusterNode) -> anyhow::Result<Self> {
        Self::behind(cluster, SOCKET).deployed(cluster)
    }

    /// The same, with a gate between it and the agent. Its sidecars are not concerned.
    pub fn deploy_behind_gate(cluster: &ClusterNode) -> anyhow::Result<(Self, Gate)> {
        let driver = Self::behind(cluster, GATE);
        let dir = driver.socket_dir(cluster);
        fs::create_dir_all(&dir)?;
        let gate = Gate::start(&dir.join(GATE), dir.join(SOCKET), driver.log(cluster))?;
        Ok((driver.deployed(cluster)?, gate))
    }

    fn behind(cluster: &ClusterNode, socket: &'static str) -> Self {
        Driver { name: format!("{}.csi.rubelet.test", cluster.name), socket }
    }

    fn deployed(self, cluster: &ClusterNode) -> anyhow::Result<Self> {
        cluster.node.bed.import(&image::ensure()?)?;
        fs::create_dir_all(self.state_dir(cluster))?;
        cluster.apply(json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": NAME } }))?;
        cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": self.objects(&cluster.name) }))?;
        cluster.apply(self.kubeconfig(cluster)?)?;
        self.start(cluster)?;
        self.wait_registered(cluster).with_context(|| self.logs(cluster))?;
        Ok(self)
    }

    /// Applies its StatefulSet.
    pub fn start(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        cluster.apply(self.stateful_set(cluster))
    }

    pub fn wait_registered(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        cluster.wait_running(POD, 120)?;
        cluster.wait("the node has the driver", 60, |cluster| {
            let node = cluster.plane().api().get(&format!("/apis/storage.k8s.io/v1/csinodes/{}", cluster.name))?;
            let drivers = node["spec"]["drivers"].as_array().context("no drivers")?;
            let driver = drivers.iter().find(|driver| driver["name"] == self.name.as_str());
            let driver = driver.with_context(|| format!("drivers are {drivers:?}"))?;
            ensure!(driver["nodeID"] == cluster.name.as_str(), "{driver}");
            Ok(())
        })
    }

    /// The ends of its own log and its containers'.
    fn logs(&self, cluster: &ClusterNode) -> String {
        let logs = cluster.kubectl(&["logs", POD, "--all-containers", "--prefix", "--tail=5"]);
        let of_sidecars = logs.unwrap_or_else(|err| format!("{err:#}"));
        format!("{}\n{of_sidecars}", tail(&self.log(cluster), 10))
    }

    /// Removes its pod, and the driver with it; volumes and objects stay.
    pub fn stop(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        cluster.kubectl(&["delete", "statefulset", NAME, "--ignore-not-found"])?;
        cluster.wait("the driver's pod is gone", 60, |cluster| {
            ensure!(cluster.pods()?.iter().all(|pod| pod.name() != POD), "{POD} is still there");
            Ok(())
        })
    }

    /// The driver with everything of it; checks that the node has forgotten it.
    pub fn remove(self, cluster: &ClusterNode) -> anyhow::Result<()> {
        self.stop(cluster)?;
        let kinds = "csidriver,storageclass,clusterrole,clusterrolebinding";
        cluster.kubectl(&["delete", kinds, &self.name])?;
        cluster.wait("the node has forgotten the driver", 30, |cluster| {
            let node = cluster.plane().api().get(&format!("/apis/storage.k8s.io/v1/csinodes/{}", cluster.name))?;
            let drivers = &node["spec"]["drivers"];
            ensure!(drivers.as_array().is_none_or(Vec::is_empty), "drivers are {drivers}");
            Ok(())
        })
    }

    /// Removes its pod from the API at once; the agent has yet to end it.
    pub fn force_delete(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        cluster.kubectl(&["delete", "statefulset", NAME, "--cascade=orphan"])?;
        cluster.kubectl(&["delete", "pod", POD, "--force", "--grace-period=0"]).map(drop)
    }

    /// Another pod takes the place of the removed one, once nothing of that runs: the registrar that ends would remove the socket of the
    /// one that starts.
    pub fn replace(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        cluster.wait("the driver's containers have ended", 30, |cluster| {
            let mut left = cluster.node.containers()?;
            left.retain(|container| container.pod == POD && container.is_running);
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })?;
        self.start(cluster)
    }

    fn socket_dir(&self, cluster: &ClusterNode) -> PathBuf {
        cluster.node.agent.root_dir().join("plugins").join(&self.name)
    }

    fn log(&self, cluster: &ClusterNode) -> PathBuf {
        self.state_dir(cluster).join("log")
    }

    /// The directory of its volumes, of `state.json` and of its log.
    pub fn state_dir(&self, cluster: &ClusterNode) -> PathBuf {
        cluster.node.bed.layout.dir.join("csi-data")
    }

    /// The volumes it keeps.
    pub fn volumes(&self, cluster: &ClusterNode) -> anyhow::Result<Vec<Value>> {
        let text = match fs::read_to_string(self.state_dir(cluster).join("state.json")) {
            Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let state: Value = serde_json::from_str(&text).context("the driver's state.json")?;
        Ok(state["Volumes"].as_array().cloned().unwrap_or_default())
    }

    /// The driver's process.
    pub fn process(&self) -> Option<ProcessId> {
        let flag = format!("--drivername={}", self.name);
        process::all().into_iter().find(|id| {
            let words = process::command_line(*id);
            words.first().is_some_and(|program| program == "/hostpathplugin") && words.contains(&flag)
        })
    }

    /// SIGKILL, and another process takes its place.
    pub fn kill(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        let Some(id) = self.process() else { return Ok(()) };
        self.crash(cluster, id)?;
        self.revive(cluster)
    }

    /// SIGKILL, and nothing takes its place yet. The driver notes a mount only after it was made, and afterwards trusts its notes: what
    /// is mounted is noted here before it starts again, as a driver would do itself that can be killed.
    pub fn crash(&self, cluster: &ClusterNode, id: ProcessId) -> anyhow::Result<()> {
        fs::write(self.hold(cluster), "")?;
        id.signal(Signal::KILL);
        ensure!(id.wait_gone(Duration::from_secs(10)), "the driver survives SIGKILL");
        // A `mount` that it had started still works.
        clock::poll(Duration::from_secs(5), Duration::from_millis(20), || {
            let all = process::all();
            let of_driver = all.iter().any(|id| is_mounting(&process::command_line(*id), cluster));
            (!of_driver).then_some(())
        });
        self.note_mounts(cluster)
    }

    /// Another process takes the place of the one that crashed.
    pub fn revive(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        fs::remove_file(self.hold(cluster))?;
        Ok(())
    }

    fn hold(&self, cluster: &ClusterNode) -> PathBuf {
        self.state_dir(cluster).join("hold")
    }

    fn note_mounts(&self, cluster: &ClusterNode) -> anyhow::Result<()> {
        let file = self.state_dir(cluster).join("state.json");
        let mut state: Value = serde_json::from_str(&fs::read_to_string(&file)?).context("the driver's state.json")?;
        let mounted = published(cluster)?;
        for volume in state["Volumes"].as_array_mut().into_iter().flatten() {
            let Some(paths) = volume["VolID"].as_str().and_then(|id| mounted.get(id)) else { continue };
            let noted: Vec<String> = serde_json::from_value(volume["Published"].clone()).unwrap_or_default();
            let missing = paths.iter().filter(|path| !noted.contains(path)).cloned().collect::<Vec<_>>();
            if !missing.is_empty() {
                volume["Published"] = json!([noted, missing].concat());
            }
        }
        fs::write(file, state.to_string())?;
        Ok(())
    }

    /// No mount, no staging directory, no attachment, no volume of the driver is left.
    pub fn wait_nothing_left(&self, cluster: &ClusterNode, limit_secs: u64) -> anyhow::Result<()> {
        cluster.wait("nothing of the volumes is left", limit_secs, |cluster| {
            let left = self.leftovers(cluster)?;
            ensure!(left.is_empty(), "left: {left:#?}");
            Ok(())
        })
    }

    fn leftovers(&self, cluster: &ClusterNode) -> anyhow::Result<Vec<String>> {
        let root = cluster.node.agent.root_dir();
        let mounts = mounts_below(&root)?;
        let mut left: Vec<String> = mounts
            .iter()
            .map(|mount| mount.display().to_string())
            .filter(|mount| ["/kubernetes.io/csi/", "kubernetes.io~csi"].iter().any(|part| mount.contains(part)))
            .map(|mount| format!("mount {mount}"))
            .collect();
        let plugin = root.join("plugins/kubernetes.io/csi");
        let blocks = plugin.join("volumeDevices");
        for dir in [plugin.join(&self.name), blocks.clone(), blocks.join("staging"), blocks.join("publish")] {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
            let of_volumes = entries.filter(|path| !path.ends_with("staging") && !path.ends_with("publish"));
            left.extend(of_volumes.map(|path| path.display().to_string()));
        }
        for attachment in cluster.plane().api().list("/apis/storage.k8s.io/v1/volumeattachments")? {
            if attachment["spec"]["nodeName"] == cluster.name.as_str() {
                left.push(format!("attachment {}", attachment["metadata"]["name"]));
            }
        }
        for volume in cluster.plane().api().list("/api/v1/persistentvolumes")? {
            if volume["spec"]["csi"]["driver"] == self.name.as_str() {
                left.push(format!("volume {} {}", volume["metadata"]["name"], volume["status"]["phase"]));
            }
        }
        left.extend(self.volumes(cluster)?.iter().map(|volume| format!("the driver's {volume}")));
        let node = cluster.plane().api().get(&format!("/api/v1/nodes/{}", cluster.name))?;
        for list in ["volumesAttached", "volumesInUse"] {
            let volumes = &node["status"][list];
            if volumes.as_array().is_some_and(|volumes| !volumes.is_empty()) {
                left.push(format!("the node's {list} {volumes}"));
            }
        }
        Ok(left)
    }

    fn objects(&self, namespace: &str) -> Vec<Value> {
        let rules: Vec<Value> = RULES
            .iter()
            .map(|(group, resources, verbs)| json!({ "apiGroups": [group], "resources": resources, "verbs": verbs }))
            .collect();
        vec![
            json!({
                "apiVersion": "storage.k8s.io/v1",
                "kind": "CSIDriver",
                "metadata": { "name": self.name },
                "spec": {
                    "attachRequired": true,
                    "podInfoOnMount": true,
                    "fsGroupPolicy": "File",
                    "volumeLifecycleModes": ["Persistent", "Ephemeral"],
                },
            }),
            json!({
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": { "name": self.name },
                "provisioner": self.name,
                "allowVolumeExpansion": true,
                "volumeBindingMode": "Immediate",
            }),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": { "name": self.name },
                "rules": rules,
            }),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": { "name": self.name },
                "subjects": [{ "kind": "ServiceAccount", "name": NAME, "namespace": namespace }],
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": self.name },
            }),
        ]
    }

    /// A Secret. Pods cannot reach the API server by its service, because nothing routes services here; with the host's network they
    /// reach it where it listens.
    fn kubeconfig(&self, cluster: &ClusterNode) -> anyhow::Result<Value> {
        let authority = fs::read_to_string(cluster.plane().client_authority())?;
        let token = cluster.kubectl(&["create", "token", NAME, "--duration=2h"])?;
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "testbed", "cluster": {
                "server": cluster.plane().server_url(), "certificate-authority": "/etc/csi/ca.crt",
            } }],
            "users": [{ "name": NAME, "user": { "token": token.trim() } }],
            "contexts": [{ "name": "testbed", "context": { "cluster": "testbed", "user": NAME } }],
            "current-context": "testbed",
        });
        Ok(json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": { "name": "csi-kubeconfig" },
            "stringData": { "kubeconfig": config.to_string(), "ca.crt": authority },
        }))
    }

    fn stateful_set(&self, cluster: &ClusterNode) -> Value {
        let labels = json!({ "app": NAME });
        json!({
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": { "name": NAME },
            "spec": {
                "serviceName": NAME,
                "replicas": 1,
                "selector": { "matchLabels": labels },
                "template": { "metadata": { "labels": labels }, "spec": {
                    "nodeSelector": { "kubernetes.io/hostname": cluster.name },
                    "hostNetwork": true,
                    "terminationGracePeriodSeconds": 2,
                    "containers": self.containers(cluster),
                    "volumes": self.pod_volumes(cluster),
                } },
            },
        })
    }

    fn containers(&self, cluster: &ClusterNode) -> Vec<Value> {
        let root = cluster.node.agent.root_dir();
        let registered =
            format!("--kubelet-registration-path={}", self.socket_dir(cluster).join(self.socket).display());
        let mut driver = container(
            "driver",
            &["sh", "-c", SUPERVISOR, "driver"],
            &[
                "--v=5".to_owned(),
                format!("--drivername={}", self.name),
                "--endpoint=unix:///csi/csi.sock".to_owned(),
                format!("--nodeid={}", cluster.name),
                "--statedir=/csi-data-dir".to_owned(),
                "--enable-attach".to_owned(),
                "--check-volume-lifecycle".to_owned(),
            ],
        );
        driver["securityContext"] = json!({ "privileged": true });
        let shared =
            |name: &str, path: PathBuf| json!({ "name": name, "mountPath": path, "mountPropagation": "Bidirectional" });
        driver["volumeMounts"] = json!([
            { "name": "socket", "mountPath": "/csi" },
            { "name": "data", "mountPath": "/csi-data-dir" },
            { "name": "dev", "mountPath": "/dev" },
            shared("pods", root.join("pods")),
            shared("plugins", root.join("plugins")),
        ]);
        let mut registrar = container("registrar", &["/registrar-stand-in"], &[registered]);
        registrar["volumeMounts"] = json!([
            { "name": "socket", "mountPath": "/csi" },
            { "name": "registration", "mountPath": "/registration" },
        ]);
        let sidecar = |name: &str, program: &str, args: &[&str]| {
            let own = [
                "--kubeconfig=/etc/csi/kubeconfig",
                "--csi-address=/csi/csi.sock",
                "--retry-interval-max=5s",
                "--kube-api-qps=50",
                "--kube-api-burst=100",
            ];
            let args: Vec<String> = own.iter().chain(args).map(|arg| (*arg).to_owned()).collect();
            let mut sidecar = container(name, &[program], &args);
            sidecar["volumeMounts"] = json!([
                { "name": "socket", "mountPath": "/csi" },
                { "name": "kubeconfig", "mountPath": "/etc/csi", "readOnly": true },
            ]);
            sidecar
        };
        vec![
            driver,
            registrar,
            sidecar("attacher", "/csi-attacher", &[]),
            sidecar("provisioner", "/csi-provisioner", &["--extra-create-metadata"]),
            sidecar("resizer", "/csi-resizer", &[]),
        ]
    }

    fn pod_volumes(&self, cluster: &ClusterNode) -> Value {
        let root = cluster.node.agent.root_dir();
        let dir = |name: &str, path: PathBuf| json!({ "name": name, "hostPath": { "path": path, "type": "DirectoryOrCreate" } });
        json!([
            dir("socket", self.socket_dir(cluster)),
            dir("registration", root.join("plugins_registry")),
            dir("pods", root.join("pods")),
            dir("plugins", root.join("plugins")),
            dir("data", self.state_dir(cluster)),
            dir("dev", PathBuf::from("/dev")),
            { "name": "kubeconfig", "secret": { "secretName": "csi-kubeconfig" } },
        ])
    }
}

/// Whether a pod of the namespace is the driver's.
pub fn is_own(pod: &str) -> bool {
    pod == POD
}

fn container(name: &str, command: &[&str], args: &[String]) -> Value {
    json!({ "name": name, "image": image::NAME, "command": command, "args": args })
}

/// Whether it is a `mount` or `umount` below the agent's directory.
fn is_mounting(words: &[String], cluster: &ClusterNode) -> bool {
    let root = cluster.node.agent.root_dir();
    let root = root.to_string_lossy();
    words.first().is_some_and(|program| program.ends_with("mount"))
        && words.last().is_some_and(|target| target.starts_with(&*root))
}

/// Where the volumes of the driver are mounted for pods, by the id of each.
fn published(cluster: &ClusterNode) -> anyhow::Result<BTreeMap<String, Vec<String>>> {
    let pods = cluster.node.agent.root_dir().join("pods");
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, _, _, source, target, ..] = words.as_slice() else { bail!("a line of mountinfo: {line}") };
        if let (Some(id), true) = (source.rsplit('/').next(), PathBuf::from(target).starts_with(&pods)) {
            found.entry(id.to_owned()).or_default().push((*target).to_owned());
        }
    }
    Ok(found)
}
