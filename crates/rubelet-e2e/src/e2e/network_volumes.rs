//! Volumes of servers: NFS and iSCSI, with real servers of this machine behind the loopback device.
//!
//! Owns: the servers, which it stops again. A dead NFS server is one whose packets are dropped: it answers nothing at all.

use std::{
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    command::{SHORT, capture, command, output},
    image::BUSYBOX,
};
use serde_json::{Value, json};

use crate::e2e::{Case, node::Node};

/// On machines that have the servers.
pub const WITH_NFS: &[Case] =
    &[Case { name: "a dead NFS server delays only its pod, which is cleaned up when the server is back", run: nfs }];
pub const WITH_ISCSI: &[Case] =
    &[Case { name: "an iSCSI disk is logged in, formatted, kept and logged out", run: iscsi }];

pub fn has_nfs() -> bool {
    Path::new("/usr/sbin/exportfs").exists() && Path::new("/usr/sbin/iptables").exists()
}

pub fn has_iscsi() -> bool {
    Path::new("/usr/sbin/tgtadm").exists() && Path::new("/usr/sbin/iscsiadm").exists()
}

/// The servers are the machine's.
pub static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

pub const SHARE: &str = "/srv/rubelet-nfs";
pub const IQN: &str = "iqn.2001-04.com.example:rubelet";

fn run(program: &str, args: &[&str]) -> anyhow::Result<String> {
    output(&mut command(program, args), SHORT)
}

fn pod(name: &str, volume: &Value, script: &str) -> Value {
    let mounts = json!([{ "name": "data", "mountPath": "/data" }]);
    let container =
        json!({ "name": "main", "image": BUSYBOX, "command": ["sh", "-c", script], "volumeMounts": mounts });
    let mut volume = volume.clone();
    volume["name"] = json!("data");
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": { "terminationGracePeriodSeconds": 5, "containers": [container], "volumes": [volume] },
    })
}

fn put(node: &Node, pod: &Value) -> anyhow::Result<()> {
    let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
    node.drop_file(&format!("{name}.json"), pod.to_string().as_bytes())
}

fn take_away(node: &Node, name: &str) -> anyhow::Result<()> {
    Ok(fs::remove_file(node.agent.manifests().join(format!("{name}.json")))?)
}

/// Packets to the NFS server are dropped until this is.
struct Silence;

impl Silence {
    const RULE: [&'static str; 8] = ["INPUT", "-p", "tcp", "--dport", "2049", "-j", "DROP", "-w"];

    fn begin() -> anyhow::Result<Self> {
        run("iptables", &[&["-I"], &Self::RULE[..]].concat())?;
        Ok(Silence)
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        let _ = run("iptables", &[&["-D"], &Self::RULE[..]].concat());
    }
}

pub struct NfsServer;

impl NfsServer {
    pub fn start() -> anyhow::Result<Self> {
        fs::create_dir_all(SHARE)?;
        fs::write(Path::new(SHARE).join("hello"), "hello")?;
        run("systemctl", &["start", "nfs-server"])?;
        let server = NfsServer;
        run("exportfs", &["-o", "rw,no_root_squash,insecure,no_subtree_check", &format!("127.0.0.1:{SHARE}")])?;
        Ok(server)
    }
}

impl Drop for NfsServer {
    fn drop(&mut self) {
        let _ = run("exportfs", &["-ua"]);
        let _ = run("systemctl", &["stop", "nfs-server"]);
        let _ = fs::remove_dir_all(SHARE);
    }
}

fn mounts_of(node: &Node, what: &str) -> anyhow::Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mounts")?;
    let root = node.agent.root_dir().display().to_string();
    Ok(table.lines().filter(|line| line.contains(&root) && line.contains(what)).map(str::to_owned).collect())
}

/// The IDs of the pod's running containers.
fn running(node: &Node, pod: &str) -> anyhow::Result<Vec<String>> {
    let containers =
        node.containers()?.into_iter().filter(|container| container.is_running && container.pod.starts_with(pod));
    let ids: Vec<String> = containers.map(|container| container.id).collect();
    ensure!(!ids.is_empty(), "nothing of {pod} runs");
    Ok(ids)
}

fn nfs(node: &mut Node) -> anyhow::Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let _server = NfsServer::start()?;
    node.agent.start()?;
    let volume = json!({ "nfs": { "server": "127.0.0.1", "path": SHARE } });
    let empty = json!({ "emptyDir": {} });
    put(node, &pod("bystander", &empty, "sleep 3600"))?;
    put(node, &pod("reader", &volume, "cp /data/hello /data/seen; while :; do date > /data/tick; sleep 1; done"))?;
    for name in ["bystander", "reader"] {
        node.wait_running(name, 180)?;
    }
    let untouched = running(node, "bystander")?;
    node.wait("the pod writes to the server", 60, |_| {
        ensure!(fs::read_to_string(Path::new(SHARE).join("seen"))? == "hello", "another content");
        Ok(())
    })?;
    let mounted = mounts_of(node, "kubernetes.io~nfs")?;
    ensure!(mounted.len() == 1 && mounted[0].contains("127.0.0.1:"), "{mounted:?}");
    let silence = Silence::begin()?;
    take_away(node, "reader")?;
    // Others come, and go, as if nothing were.
    for name in ["first", "second"] {
        put(node, &pod(name, &empty, "sleep 3600"))?;
        node.wait_running(name, 60)?;
    }
    take_away(node, "first")?;
    node.wait_gone("first", 60)?;
    // A pod of the dead server waits, and goes when it is taken away.
    put(node, &pod("waiting", &volume, "sleep 3600"))?;
    node.wait("the pod waits for its volume", 60, |node| {
        ensure!(node.pod("waiting")?.phase() == "Pending", "it does not");
        Ok(())
    })?;
    take_away(node, "waiting")?;
    node.wait_gone("waiting", 300)?;
    put(node, &pod("third", &empty, "sleep 3600"))?;
    node.wait_running("third", 60)?;
    ensure!(running(node, "bystander")? == untouched, "the pod beside it was restarted");
    println!("  while the server was dead, {} NFS mounts were left", mounts_of(node, "kubernetes.io~nfs")?.len());
    drop(silence);
    node.wait_gone("reader", 300)?;
    node.wait("nothing of the server is mounted", 300, |node| {
        let mounted = mounts_of(node, "nfs")?;
        ensure!(mounted.is_empty(), "{mounted:?}");
        Ok(())
    })
}

pub struct Target;

impl Target {
    const FILE: &'static str = "/srv/rubelet-iscsi";

    pub fn start() -> anyhow::Result<Self> {
        fs::create_dir_all("/srv")?;
        fs::File::create(Self::FILE)?.set_len(64 << 20)?;
        run("systemctl", &["start", "tgt", "iscsid"])?;
        let target = Target;
        let admin = |args: &[&str]| run("tgtadm", &[&["--lld", "iscsi"], args].concat());
        admin(&["--mode", "target", "--op", "new", "--tid", "1", "-T", IQN])?;
        admin(&["--mode", "logicalunit", "--op", "new", "--tid", "1", "--lun", "1", "-b", Self::FILE])?;
        admin(&["--mode", "target", "--op", "bind", "--tid", "1", "-I", "ALL"])?;
        Ok(target)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = run("tgtadm", &["--lld", "iscsi", "--mode", "target", "--op", "delete", "--force", "--tid", "1"]);
        let _ = run("systemctl", &["stop", "tgt", "iscsid"]);
        let _ = fs::remove_file(Self::FILE);
    }
}

pub fn sessions() -> anyhow::Result<String> {
    // Without sessions it is an error.
    Ok(capture(&mut command("iscsiadm", ["-m", "session"]), SHORT)?.stdout)
}

fn iscsi(node: &mut Node) -> anyhow::Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let _target = Target::start()?;
    node.agent.start()?;
    let source = json!({ "targetPortal": "127.0.0.1", "iqn": IQN, "lun": 1, "fsType": "ext4" });
    let volume = json!({ "iscsi": source });
    for (name, script) in [
        ("writer", "echo kept > /data/file; sync; touch /data/done; sleep 3600"),
        ("reader", "grep kept /data/file && sleep 3600"),
    ] {
        put(node, &pod(name, &volume, script))?;
        node.wait_running(name, 240)?;
        ensure!(sessions()?.contains(IQN), "no session: {}", sessions()?);
        let mounted = mounts_of(node, "iscsi")?;
        ensure!(mounted.len() == 2, "once for the node, once for the pod: {mounted:?}");
        ensure!(mounted.iter().all(|mount| mount.contains("ext4")), "{mounted:?}");
        // The writer has written, and the reader has read.
        std::thread::sleep(std::time::Duration::from_secs(20));
        node.wait_running(name, 60)?;
        take_away(node, name)?;
        node.wait_gone(name, 240)?;
        node.wait("the disk is logged out", 240, |node| {
            let (mounted, sessions) = (mounts_of(node, "iscsi")?, sessions()?);
            ensure!(mounted.is_empty() && !sessions.contains(IQN), "{mounted:?} {sessions}");
            Ok(())
        })?;
    }
    Ok(())
}
