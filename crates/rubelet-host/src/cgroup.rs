//! The kernel's cgroup hierarchies: one per controller in version 1, one for all in version 2, both on hybrid nodes.
//!
//! Owns: creating a cgroup in every hierarchy, setting its limits, emptying and removing it; slices are created and
//! stopped by systemd. Never: names one, decides a limit, moves a process.
//! Upstream: `github.com/opencontainers/cgroups` (fs, fs2, systemd) as `cm/cgroup_manager_linux.go` uses it.

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Component, Path, PathBuf},
};

use rubelet_core::cgroups::{Cgroup, CpuQuota, Limits, UnsetLimit, quoted_parts};
use rustix::process::{Pid, Signal};

use crate::{
    mount,
    systemd::{Property, Systemd, Value},
};

/// The usual mount point of cgroup file systems.
pub(crate) const BASE: &str = "/sys/fs/cgroup";
/// It exists while systemd is the node's init.
const SYSTEMD_RUNS: &str = "/run/systemd/system";

/// One mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Sets limits of an existing cgroup. An error if a hierarchy or controller does not have it, or a limit cannot be set.
pub fn update_cgroup(cgroup: &Cgroup) -> io::Result<()> {
    Hierarchies::mounted()?.update(cgroup)
}

/// All hierarchies of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hierarchies(Vec<Hierarchy>);

impl Hierarchies {
    /// The mounted ones. Containers may have views of them elsewhere; only the usual mount point counts.
    pub(crate) fn mounted() -> io::Result<Self> {
        let mounts = mount::mount_table()?.into_iter().filter(|mount| mount.point.starts_with(BASE));
        let found: Vec<Hierarchy> = mounts
            .filter_map(|mount| match mount.fs_type.as_str() {
                "cgroup" => Some(Hierarchy { mount: mount.point, version: Version::V1 }),
                "cgroup2" => Some(Hierarchy { mount: mount.point, version: Version::V2 }),
                _ => None,
            })
            .collect();
        if found.is_empty() {
            let message = format!("no cgroup file system is mounted at or below {BASE}");
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        Ok(Hierarchies(found))
    }

    /// Creates it in every hierarchy, parents included, and sets its limits. Returns the limits that failed.
    pub(crate) fn apply(&self, cgroup: &Cgroup) -> io::Result<Vec<UnsetLimit>> {
        let path = Path::new(&cgroup.path);
        let mut limits = self.above_use(path, cgroup.limits.clone())?;
        if let Some(slice) = slice(path) {
            limits.cpu_quota = limits.cpu_quota.map(whole_percents);
            Systemd::connect()?.start_slice(slice, &properties(&limits))?;
        }
        let mut dirs = Vec::new();
        for hierarchy in &self.0 {
            let dir = below(&hierarchy.mount, path)?;
            hierarchy.create(&dir)?;
            dirs.push((dir, hierarchy.version));
        }
        Ok(set(&dirs, &limits))
    }

    /// A limit that spares what is in use is at least that.
    fn above_use(&self, path: &Path, mut limits: Limits) -> io::Result<Limits> {
        if let Some(limit) = limits.memory_bytes.filter(|_| limits.spares_memory_in_use) {
            let mut in_use = 0;
            for hierarchy in &self.0 {
                let dir = below(&hierarchy.mount, path)?;
                let files = ["memory.current", "memory.usage_in_bytes"].map(|file| fs::read_to_string(dir.join(file)));
                in_use = files.into_iter().flatten().filter_map(|text| text.trim().parse().ok()).fold(in_use, u64::max);
            }
            limits.memory_bytes = Some(limit.max(in_use));
        }
        Ok(limits)
    }

    fn update(&self, cgroup: &Cgroup) -> io::Result<()> {
        let path = Path::new(&cgroup.path);
        self.check_complete(path)?;
        // A slice's file may belong to a node without systemd.
        if let Some(slice) = slice(path).filter(|_| Path::new(SYSTEMD_RUNS).exists()) {
            Systemd::connect()?.start_slice(slice, &properties(&cgroup.limits))?;
        }
        let dirs = self.0.iter().map(|hierarchy| Ok((below(&hierarchy.mount, path)?, hierarchy.version)));
        let unset = set(&dirs.collect::<io::Result<Vec<_>>>()?, &cgroup.limits);
        let unset: Vec<String> = unset.iter().map(ToString::to_string).collect();
        if unset.is_empty() { Ok(()) } else { Err(io::Error::other(unset.join(", "))) }
    }

    /// Whether every controller that limits pods has the cgroup.
    fn check_complete(&self, path: &Path) -> io::Result<()> {
        const V1: [&str; 7] = ["cpu", "cpuacct", "cpuset", "hugetlb", "memory", "pids", "systemd"];
        const V2: [&str; 5] = ["cpu", "cpuset", "hugetlb", "memory", "pids"];
        let name = quoted_parts(&path.to_string_lossy());
        let mut missing = Vec::new();
        for Hierarchy { mount, version } in &self.0 {
            let dir = below(mount, path)?;
            match version {
                Version::V1 => {
                    let controllers = mount.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                    let counts = controllers.split(',').any(|controller| V1.contains(&controller));
                    missing.extend((counts && !dir.is_dir()).then(|| dir.display().to_string()));
                }
                Version::V2 if is_hybrid_part(&dir) => {}
                Version::V2 => {
                    let controllers = |dir: &Path| fs::read_to_string(dir.join("cgroup.controllers"));
                    let has = controllers(&dir).map_err(|error| {
                        let message = format!("could not read controllers for cgroup {name}: {error}");
                        io::Error::new(error.kind(), message)
                    })?;
                    let needed = controllers(mount)?;
                    let needed = V2.into_iter().filter(|name| needed.split_whitespace().any(|it| it == *name));
                    let lacks: Vec<&str> =
                        needed.filter(|name| !has.split_whitespace().any(|it| it == *name)).collect();
                    if !lacks.is_empty() {
                        let message = format!("cgroup {name} has some missing controllers: {}", lacks.join(", "));
                        return Err(io::Error::new(io::ErrorKind::NotFound, message));
                    }
                }
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let message = format!("cgroup {name} has some missing paths: {}", missing.join(", "));
        Err(io::Error::new(io::ErrorKind::NotFound, message))
    }

    /// Kills its processes and removes it from every hierarchy. A missing cgroup is no error. Processes take a moment to die:
    /// until then it is busy, and stays.
    pub(crate) fn remove(&self, path: &Path) -> io::Result<()> {
        let mut dirs = Vec::new();
        for hierarchy in &self.0 {
            let dir = below(&hierarchy.mount, path)?;
            if dir.is_dir() {
                dirs.push(dir);
            }
        }
        for dir in &dirs {
            kill_all(dir)?;
        }
        if let Some(slice) = slice(path).filter(|_| !dirs.is_empty()) {
            Systemd::connect()?.stop(slice)?;
        }
        for dir in &dirs {
            remove_bottom_up(dir).map_err(|error| named("remove", dir, &error))?;
        }
        Ok(())
    }

    /// Whether any hierarchy has it.
    pub(crate) fn contains(&self, path: &Path) -> io::Result<bool> {
        for hierarchy in &self.0 {
            if below(&hierarchy.mount, path)?.try_exists()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The names of the direct children of this cgroup, in any hierarchy.
    pub(crate) fn children(&self, path: &Path) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for hierarchy in &self.0 {
            let dir = below(&hierarchy.mount, path)?;
            for child in child_dirs(&dir)? {
                names.extend(child.file_name().and_then(|name| name.to_str()).map(str::to_owned));
            }
        }
        Ok(names)
    }
}

/// The name of systemd's unit, if the cgroup is one.
fn slice(path: &Path) -> Option<&str> {
    path.file_name()?.to_str().filter(|name| name.ends_with(".slice"))
}

/// Limits as systemd properties, so that systemd does not reset them; it has none for huge pages.
fn properties(limits: &Limits) -> Vec<Property<'static>> {
    let mut properties = Vec::new();
    let mut add = |name, number| properties.push((name, Value::Number(number)));
    if let Some(bytes) = limits.memory_bytes {
        add("MemoryMax", bytes);
    }
    if let Some(bytes) = limits.memory_min_bytes {
        add("MemoryMin", bytes);
    }
    if let Some(bytes) = limits.memory_low_bytes {
        add("MemoryLow", bytes);
    }
    if let Some(shares) = limits.cpu_shares {
        add("CPUWeight", cpu_weight(shares));
    }
    if let Some(quota) = limits.cpu_quota {
        add("CPUQuotaPeriodUSec", quota.period_micros);
        add("CPUQuotaPerSecUSec", quota.quota_micros.map_or(u64::MAX, |micros| per_second(micros, quota)));
    }
    if let Some(pids) = limits.pids {
        add("TasksMax", pids);
    }
    properties
}

/// Systemd counts whole percents of a CPU; upstream rounds up, so that no container has more than its pod.
fn whole_percents(quota: CpuQuota) -> CpuQuota {
    const PERCENT: u64 = 10_000;
    let whole =
        |micros| per_second(micros, quota).next_multiple_of(PERCENT).saturating_mul(quota.period_micros) / 1_000_000;
    CpuQuota { quota_micros: quota.quota_micros.map(whole), ..quota }
}

fn per_second(micros: u64, quota: CpuQuota) -> u64 {
    micros.saturating_mul(1_000_000) / quota.period_micros.max(1)
}

impl Hierarchy {
    fn create(&self, dir: &Path) -> io::Result<()> {
        let inside = dir.strip_prefix(&self.mount).unwrap_or(Path::new(""));
        let mut current = self.mount.clone();
        for part in inside.components() {
            if self.version == Version::V2 {
                enable_controllers(&current);
            }
            let parent = current.clone();
            current.push(part);
            match fs::create_dir(&current) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(named("create", &current, &error)),
            }
            if self.version == Version::V1 {
                inherit_cpuset(&current, &parent)?;
            }
        }
        Ok(())
    }
}

/// In version 2 a cgroup's controllers are those its parent enables for its children.
fn enable_controllers(dir: &Path) {
    let Ok(controllers) = fs::read_to_string(dir.join("cgroup.controllers")) else { return };
    let file = dir.join("cgroup.subtree_control");
    let wanted: Vec<String> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
    if wanted.is_empty() || write(&file, &wanted.join(" ")).is_ok() {
        return;
    }
    for controller in &wanted {
        // A missing controller fails later, where a limit needs it.
        let _ = write(&file, controller);
    }
}

/// In version 1 a new cpuset has no CPU and no memory node until they are set.
fn inherit_cpuset(dir: &Path, parent: &Path) -> io::Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let Ok(own) = fs::read_to_string(dir.join(file)) else { continue };
        if own.trim().is_empty() {
            let inherited = fs::read_to_string(parent.join(file)).map_err(|error| named("read", parent, &error))?;
            write(&dir.join(file), inherited.trim()).map_err(|error| named("write", &dir.join(file), &error))?;
        }
    }
    Ok(())
}

/// Returns the limits that failed.
fn set(dirs: &[(PathBuf, Version)], limits: &Limits) -> Vec<UnsetLimit> {
    let mut again = Vec::new();
    let mut unset = Vec::new();
    let is_unified = dirs.iter().any(|(dir, version)| *version == Version::V2 && !is_hybrid_part(dir));
    let version = if is_unified { Version::V2 } else { Version::V1 };
    for Knob { file, value, needed } in knobs(limits, version) {
        let place = dirs.iter().map(|(dir, _)| dir.join(&file)).find(|path| path.exists());
        match place {
            // A value may be rejected until another one is set: it is retried after them.
            Some(path) if write(&path, &value).is_err() => again.push((path, value)),
            Some(_) => {}
            None if needed => unset.push(UnsetLimit::NoController(format!("{file} = {value}"))),
            None => {}
        }
    }
    for (path, value) in again {
        if let Err(error) = write(&path, &value) {
            unset.push(UnsetLimit::Refused(format!("{} = {value}: {error}", path.display())));
        }
    }
    unset
}

/// On a hybrid node the second hierarchy has no controllers.
fn is_hybrid_part(dir: &Path) -> bool {
    dir.starts_with(Path::new(BASE).join("unified"))
}

/// A file and its value.
struct Knob {
    file: String,
    value: String,
    /// Without the file the limit is not enforced.
    needed: bool,
}

fn knobs(limits: &Limits, version: Version) -> Vec<Knob> {
    let mut knobs = Vec::new();
    let mut add = |file: &str, value: String| knobs.push(Knob { file: file.to_owned(), value, needed: true });
    match version {
        Version::V1 => {
            if let Some(shares) = limits.cpu_shares {
                add("cpu.shares", shares.to_string());
            }
            if let Some(quota) = limits.cpu_quota {
                add("cpu.cfs_period_us", quota.period_micros.to_string());
                add("cpu.cfs_quota_us", quota.quota_micros.map_or("-1".to_owned(), |micros| micros.to_string()));
            }
            if let Some(bytes) = limits.memory_bytes {
                add("memory.limit_in_bytes", bytes.to_string());
            }
        }
        Version::V2 => {
            if let Some(shares) = limits.cpu_shares {
                add("cpu.weight", cpu_weight(shares).to_string());
            }
            if let Some(quota) = limits.cpu_quota {
                let most = quota.quota_micros.map_or("max".to_owned(), |micros| micros.to_string());
                add("cpu.max", format!("{most} {}", quota.period_micros));
            }
            if let Some(bytes) = limits.memory_bytes {
                add("memory.max", bytes.to_string());
            }
            if let Some(bytes) = limits.memory_min_bytes {
                add("memory.min", bytes.to_string());
            }
            if let Some(bytes) = limits.memory_low_bytes {
                add("memory.low", bytes.to_string());
            }
        }
    }
    if let Some(pids) = limits.pids {
        add("pids.max", pids.to_string());
    }
    for (size, bytes) in &limits.huge_pages {
        for kind in ["", "rsvd."] {
            let limit = if version == Version::V1 { "limit_in_bytes" } else { "max" };
            let file = format!("hugetlb.{size}.{kind}{limit}");
            knobs.push(Knob { file, value: bytes.to_string(), needed: false });
        }
    }
    knobs
}

/// Version 1 counts CPU shares from 2 to 262144, version 2 weights from 1 to 10000.
fn cpu_weight(shares: u64) -> u64 {
    const MOST_SHARES: u64 = 262_144;
    if shares >= MOST_SHARES { 10_000 } else { 1 + (shares.max(2) - 2) * 9999 / (MOST_SHARES - 2) }
}

fn kill_all(dir: &Path) -> io::Result<()> {
    // Version 2 has one file for all of it, since Linux 5.14.
    if write(&dir.join("cgroup.kill"), "1").is_ok() {
        return Ok(());
    }
    for child in child_dirs(dir)? {
        kill_all(&child)?;
    }
    let pids = match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(pids) => pids,
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(named("read", dir, &error)),
    };
    // A process of another PID namespace shows as 0 and cannot be killed from here.
    let pids = pids.lines().filter_map(|line| line.parse().ok()).filter_map(Pid::from_raw);
    for pid in pids.filter(|pid| *pid != rustix::process::getpid()) {
        // It may have ended already.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    Ok(())
}

/// A cgroup's files cannot be removed; its directory can, once it has no children and no processes.
fn remove_bottom_up(dir: &Path) -> io::Result<()> {
    for child in child_dirs(dir)? {
        remove_bottom_up(&child)?;
    }
    match fs::remove_dir(dir) {
        Err(error) if !is_gone(&error) => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A missing cgroup has no children.
fn child_dirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        Err(error) => return Err(named("list", dir, &error)),
    };
    let entries = entries.filter_map(Result::ok).filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(entries.map(|entry| entry.path()).collect())
}

/// The kernel returns ENODEV for files of a cgroup that is being removed.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

/// In one write, as the kernel requires; never creates the file.
fn write(file: &Path, value: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(file)?.write_all(value.as_bytes())
}

/// Names come from manifests and from the runtime's labels and must not leave the directory.
pub(crate) fn below(mount: &Path, path: &Path) -> io::Result<PathBuf> {
    let inside = path.strip_prefix("/").unwrap_or(path);
    if inside.as_os_str().is_empty() || !inside.components().all(|part| matches!(part, Component::Normal(_))) {
        let message = format!("{} cannot be the path of a cgroup", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    Ok(mount.join(inside))
}

fn named(what: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
