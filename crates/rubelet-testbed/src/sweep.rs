//! Removes a testbed with everything it created, from its directory alone.
//!
//! Owns: the order (agent, containerd, containers and their shims, mounts, bridge, cgroups, traces elsewhere, directory).
//! Never: kills a process that is not provably this testbed's. Safe to repeat, and after a SIGKILL of anything.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use rustix::{
    mount::{UnmountFlags, unmount},
    process::Signal,
};
use sha2::{Digest as _, Sha256};

use crate::{
    Layout, clock,
    command::{SHORT, capture, command},
    process::{self, ProcessId},
};

/// A missing testbed is no error.
pub fn sweep(dir: &Path) -> anyhow::Result<()> {
    let Ok(dir) = dir.canonicalize() else { return Ok(()) };
    let layout = Layout { dir };
    for id in pid_files(&layout.dir) {
        id.end(Duration::from_secs(10));
    }
    let ids = container_ids(&layout);
    end_what_runs(&layout)?;
    remove_bridge(&layout)?;
    for id in &ids {
        remove_cgroups(Path::new("/sys/fs/cgroup"), id, 0);
    }
    remove_pod_cgroups(&layout);
    remove_empty_parents();
    remove_traces(&layout, &ids);
    fs::remove_dir_all(&layout.dir).with_context(|| format!("remove {}", layout.dir.display()))
}

/// Kills all containers and unmounts all mounts; files stay.
pub fn end_what_runs(layout: &Layout) -> anyhow::Result<()> {
    end_containers(layout, &container_ids(layout))?;
    unmount_below(&layout.dir)
}

/// Running processes that we started. The agent's sorts before containerd's, so it ends first;
/// etcd ends last, because the API server needs it for its shutdown.
fn pid_files(dir: &Path) -> Vec<ProcessId> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "pid"));
    files.sort_by_key(|path| (path.file_stem().is_some_and(|name| name == "etcd"), path.clone()));
    files.iter().filter_map(|path| process::from_pid_file(path)).collect()
}

/// Ids of all containers and sandboxes containerd has a trace of.
fn container_ids(layout: &Layout) -> BTreeSet<String> {
    let bundles = ["state", "root"].map(|part| layout.dir.join(part).join("io.containerd.runtime.v2.task/k8s.io"));
    let entries = bundles.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    // An id is 64 hexadecimal digits; a shorter text could match a foreign cgroup.
    names.filter(|name| name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())).collect()
}

/// Containers before shims: a shim that sees its containers end cleans up after them.
fn end_containers(layout: &Layout, ids: &BTreeSet<String>) -> anyhow::Result<()> {
    let left = clock::poll(Duration::from_secs(20), Duration::from_millis(50), || {
        let all = process::all();
        let mut ours: Vec<_> = all.iter().copied().filter(|id| runs_in(*id, ids)).collect();
        if ours.is_empty() {
            ours = all.into_iter().filter(|id| is_shim_of(*id, layout)).collect();
        }
        for id in &ours {
            id.signal(Signal::KILL);
        }
        ours.is_empty().then_some(())
    });
    left.context("processes of containers do not end")
}

fn runs_in(id: ProcessId, containers: &BTreeSet<String>) -> bool {
    let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", id.pid)).unwrap_or_default();
    cgroups.lines().any(|line| line.rsplit('/').any(|part| containers.contains(id_in(part))))
}

/// Systemd units have longer names: `cri-containerd-<id>.scope`.
fn id_in(cgroup: &str) -> &str {
    cgroup.strip_suffix(".scope").and_then(|scope| scope.rsplit('-').next()).unwrap_or(cgroup)
}

/// A shim's command line names its containerd.
fn is_shim_of(id: ProcessId, layout: &Layout) -> bool {
    let words = process::command_line(id);
    let socket = layout.socket();
    words.first().is_some_and(|program| program.contains("containerd-shim"))
        && words.iter().any(|word| Path::new(word) == socket)
}

fn unmount_below(dir: &Path) -> anyhow::Result<()> {
    // A mount can hide another at the same place, so repeat until none is left.
    for _ in 0..20 {
        let mounts = mounts_below(dir)?;
        if mounts.is_empty() {
            return Ok(());
        }
        for mount in mounts.iter().rev() {
            // Busy ones disappear with their last user, which was killed.
            let _ = unmount(mount, UnmountFlags::DETACH);
        }
    }
    bail!("these mounts do not go away: {:?}", mounts_below(dir)?)
}

/// In the order they were mounted.
pub fn mounts_below(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    Ok(mount_points(&table).filter(|point| point.starts_with(dir)).collect())
}

fn mount_points(table: &str) -> impl Iterator<Item = PathBuf> {
    table.lines().filter_map(|line| line.split(' ').nth(4)).map(|point| PathBuf::from(unescape(point)))
}

/// The kernel writes spaces and the like as three octal digits.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &after[3..];
            }
            Some(_) | None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn remove_bridge(layout: &Layout) -> anyhow::Result<()> {
    let Ok(bridge) = fs::read_to_string(layout.bridge_file()) else { return Ok(()) };
    let out = capture(&mut command("ip", ["link", "delete", bridge.trim()]), SHORT)?;
    if !out.success && !out.stderr.contains("Cannot find device") {
        bail!("cannot remove bridge {bridge}: {}", out.stderr.trim());
    }
    Ok(())
}

/// Removes every cgroup with the container's id, in any hierarchy.
fn remove_cgroups(dir: &Path, id: &str, depth: u32) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if entry.file_name() == id {
            remove_cgroup_tree(&entry.path());
        } else if depth < 4 {
            remove_cgroups(&entry.path(), id, depth + 1);
        }
    }
}

/// A cgroup's files cannot be removed; its directory can once it has no children and no processes.
fn remove_cgroup_tree(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_cgroup_tree(&entry.path());
    }
    let _ = fs::remove_dir(dir);
}

/// In every hierarchy; their processes were killed.
fn remove_pod_cgroups(layout: &Layout) {
    let slice = format!("{}.slice", layout.slice_root());
    if Path::new("/sys/fs/cgroup").join(&slice).exists() {
        // With its systemd units; if it stays, tests of the sweep notice.
        let _ = capture(&mut command("systemctl", ["stop", &slice]), SHORT);
    }
    for root in pod_cgroup_roots(layout) {
        remove_cgroup_tree(&root);
    }
}

fn pod_cgroup_roots(layout: &Layout) -> Vec<PathBuf> {
    let name = layout.cgroup_root();
    let name = name.trim_start_matches('/');
    let mounts = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let places = std::iter::once(PathBuf::from("/sys/fs/cgroup")).chain(mounts);
    let names = [name.to_owned(), format!("{}.slice", layout.slice_root())];
    places.flat_map(|place| names.clone().map(|name| place.join(name))).filter(|root| root.is_dir()).collect()
}

/// The cgroup above the containers' is shared by all containerds of the machine; removing it fails while another uses it.
fn remove_empty_parents() {
    let Ok(entries) = fs::read_dir("/sys/fs/cgroup") else { return };
    for entry in entries.flatten() {
        let _ = fs::remove_dir(entry.path().join("k8s.io"));
    }
}

/// Files of containerd and CNI outside of the configured directories.
fn remove_traces(layout: &Layout, ids: &BTreeSet<String>) {
    for id in ids {
        let _ = fs::remove_file(shim_socket(layout, id));
    }
    // The agent links its containers' logs from a global directory.
    for link in fs::read_dir("/var/log/containers").into_iter().flatten().flatten() {
        if fs::read_link(link.path()).is_ok_and(|target| target.starts_with(&layout.dir)) {
            let _ = fs::remove_file(link.path());
        }
    }
    let Ok(network) = fs::read_to_string(layout.bridge_file()) else { return };
    let prefix = format!("{}-", network.trim());
    let Ok(entries) = fs::read_dir("/var/lib/cni/results") else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)) {
        let _ = fs::remove_file(entry.path());
    }
}

/// All containerds of a machine keep their shims' sockets in one directory, named by a digest of the owner.
fn shim_socket(layout: &Layout, id: &str) -> PathBuf {
    let name = layout.socket().join("k8s.io").join(id);
    let digest = Sha256::digest(name.as_os_str().as_encoded_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Path::new("/run/containerd/s").join(digest)
}

/// A bridge identified so that a later one of the same name, perhaps of another testbed, is not mistaken for it.
#[derive(Debug, PartialEq, Eq)]
pub struct Bridge {
    name: String,
    /// Assigned by the kernel, and never reused.
    index: String,
}

impl Bridge {
    pub fn named(name: &str) -> Option<Self> {
        let index = fs::read_to_string(Path::new("/sys/class/net").join(name).join("ifindex")).ok()?;
        Some(Bridge { name: name.to_owned(), index })
    }
}

/// Whether anything of a testbed in `dir` is left: used by tests of the sweep itself.
pub fn leftovers(dir: &Path, bridge: &Bridge) -> anyhow::Result<Vec<String>> {
    let mut left: Vec<String> = mounts_below(dir)?.iter().map(|mount| format!("mount {}", mount.display())).collect();
    let text = dir.display().to_string();
    for id in process::all() {
        let words = process::command_line(id);
        if words.iter().any(|word| word.contains(&text)) {
            left.push(format!("process {} {}", id.pid, words.join(" ")));
        }
    }
    if Bridge::named(&bridge.name).as_ref() == Some(bridge) {
        left.push(format!("bridge {}", bridge.name));
    }
    let layout = Layout { dir: dir.to_owned() };
    left.extend(pod_cgroup_roots(&layout).iter().map(|root| format!("cgroup {}", root.display())));
    match fs::symlink_metadata(dir) {
        Ok(_) => left.push(format!("directory {text}")),
        Err(err) if err.kind() == io::ErrorKind::NotFound => {}
        Err(err) => return Err(err.into()),
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containers_id_is_found_in_the_names_of_both_drivers() {
        assert_eq!(["0a1b", "cri-containerd-0a1b.scope", "a-b.slice"].map(id_in), ["0a1b", "0a1b", "a-b.slice"]);
    }

    #[test]
    fn mount_points_with_spaces_are_read_as_they_are() {
        let table = "22 27 0:21 / /proc rw - proc proc rw\n23 27 0:5 / /a\\040b\\134c rw - tmpfs t rw\n";
        let points: Vec<_> = mount_points(table).collect();
        assert_eq!(points, [Path::new("/proc"), Path::new("/a b\\c")]);
    }
}
