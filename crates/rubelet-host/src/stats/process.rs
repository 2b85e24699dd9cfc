//! Statistics of /proc: machine, networks, processes.
//!
//! Owns: parsing them, and counting open files of processes.
//! Upstream: cAdvisor's `networkStatsFromProc`, `processStatsFromProcs`; `pkg/kubelet/stats/pidlimit`, `GetBootTime`.

use std::path::Path;

use rustix::fs::{CWD, Dir, Mode, OFlags};

use super::{
    Reader,
    text::{named_numbers, number},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    pub memory_bytes: u64,
    pub swap_total_bytes: u64,
    pub swap_free_bytes: u64,
    /// Since 1970.
    pub boot_secs: u64,
    /// The maximum of processes and threads.
    pub max_pid: Option<u64>,
    /// How many there are.
    pub tasks: Option<u64>,
}

impl Machine {
    pub fn swap_used_bytes(&self) -> u64 {
        self.swap_total_bytes.saturating_sub(self.swap_free_bytes)
    }
}

pub fn machine(reader: &mut Reader) -> Machine {
    let mut machine = Machine::default();
    for (name, kib) in named_numbers(reader.text_at("/proc/meminfo").unwrap_or_default()) {
        let bytes = kib.saturating_mul(1024);
        match name {
            "MemTotal:" => machine.memory_bytes = bytes,
            "SwapTotal:" => machine.swap_total_bytes = bytes,
            "SwapFree:" => machine.swap_free_bytes = bytes,
            _ => {}
        }
    }
    let stat = reader.text_at("/proc/stat").unwrap_or_default();
    machine.boot_secs = named_numbers(stat).find_map(|(name, secs)| (name == "btime").then_some(secs)).unwrap_or(0);
    let limits = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"];
    machine.max_pid = limits.into_iter().filter_map(|path| reader.text_at(path).and_then(number)).min();
    machine.tasks = reader.text_at("/proc/loadavg").and_then(tasks);
    machine
}

/// `0.20 0.18 0.12 1/80 11206`: of 80, one runs.
fn tasks(loadavg: &str) -> Option<u64> {
    let (_, all) = loadavg.split_ascii_whitespace().nth(3)?.split_once('/')?;
    number(all)
}

/// A network interface and its counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub received: Traffic,
    pub sent: Traffic,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub bytes: u64,
    pub packets: u64,
    pub errors: u64,
    pub dropped: u64,
}

/// The interfaces that the process sees, without loopback and pod interfaces.
pub fn interfaces(pid: u32, reader: &mut Reader) -> Option<Vec<Interface>> {
    reader.text_at(&format!("/proc/{pid}/net/dev")).map(parse_interfaces)
}

fn parse_interfaces(text: &str) -> Vec<Interface> {
    const IGNORED: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];
    let interface = |line: &str| {
        let (name, counters) = line.split_once(':')?;
        let name = name.trim_ascii();
        let mut numbers = counters.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
        let mut traffic = || {
            let traffic = Traffic {
                bytes: numbers.next()??,
                packets: numbers.next()??,
                errors: numbers.next()??,
                dropped: numbers.next()??,
            };
            // FIFO errors, frames or collisions, compressed and multicast or carrier errors are not used.
            let rest = numbers.by_ref().take(4).count();
            (rest == 4).then_some(traffic)
        };
        let is_ignored = IGNORED.iter().any(|prefix| name.to_ascii_lowercase().starts_with(prefix));
        (!is_ignored).then_some(Interface { name: name.to_owned(), received: traffic()?, sent: traffic()? })
    };
    text.lines().filter_map(interface).collect()
}

/// The open files of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFiles {
    pub files: u64,
    pub sockets: u64,
}

/// The maximum counted per container; the result is then a lower bound.
const MOST_FILES: u64 = 65_536;

pub fn open_files(pids: &[u32]) -> OpenFiles {
    let mut open = OpenFiles::default();
    for pid in pids {
        // A process that ended has none.
        let _ = count_files(*pid, &mut open);
    }
    open
}

fn count_files(pid: u32, open: &mut OpenFiles) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, format!("/proc/{pid}/fd"), flags, Mode::empty())?;
    let mut target = Vec::with_capacity(64);
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        if entry.file_name().to_bytes().starts_with(b".") {
            continue;
        }
        if open.files >= MOST_FILES {
            return Ok(());
        }
        open.files += 1;
        target.clear();
        // It may have been closed meanwhile.
        let link = rustix::fs::readlinkat(&dir, entry.file_name(), std::mem::take(&mut target));
        if let Ok(link) = link {
            open.sockets += u64::from(link.as_bytes().starts_with(b"socket"));
            target = link.into_bytes();
        }
    }
    Ok(())
}

/// The limit of open files of the process; `-1` is unlimited.
pub fn open_files_limit(pid: u32, reader: &mut Reader) -> Option<i64> {
    soft_limit(reader.text_at(&format!("/proc/{pid}/limits"))?, "Max open files")
}

fn soft_limit(limits: &str, name: &str) -> Option<i64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let soft = line.split_ascii_whitespace().next()?;
    if soft.eq_ignore_ascii_case("unlimited") { Some(-1) } else { soft.parse().ok() }
}

/// This process's table of cgroups; see [`super::cgroup::Trees::of_process`].
pub fn cgroups_of_self(reader: &mut Reader) -> Option<String> {
    reader.text_at("/proc/self/cgroup").map(str::to_owned)
}

/// The CPU topology.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    pub cores: usize,
    pub physical_cores: usize,
    pub sockets: usize,
}

/// `cpus` is `/sys/devices/system/cpu`.
pub fn topology(cpus: &Path, reader: &mut Reader) -> Topology {
    let entries = std::fs::read_dir(cpus).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let numbers = names.filter_map(|name| name.strip_prefix("cpu")?.parse::<u32>().ok());
    let places: Vec<(u64, u64)> = numbers
        .filter_map(|cpu| {
            let mut id = |name: &str| {
                let path = cpus.join(format!("cpu{cpu}/topology/{name}"));
                reader.text_at(path.to_str()?).and_then(number)
            };
            Some((id("physical_package_id")?, id("core_id")?))
        })
        .collect();
    let cores: std::collections::BTreeSet<_> = places.iter().collect();
    let sockets: std::collections::BTreeSet<_> = places.iter().map(|(socket, _)| socket).collect();
    Topology { cores: places.len(), physical_cores: cores.len(), sockets: sockets.len() }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn interface_stats_skip_loopback_and_pod_interfaces() {
        let text = "Inter-|   Receive                                                |  Transmit\n\
             \x20face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n\
             \x20   lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n\
             \x20 eth0:1500 10 1 2 0 0 0 0 900 8 3 4 0 0 0 0\n\
             vethabc: 5 5 5 5 5 5 5 5 5 5 5 5 5 5 5 5\n\
             \x20 cut0: 1 2 3\n";
        let expected = Interface {
            name: "eth0".to_owned(),
            received: Traffic { bytes: 1500, packets: 10, errors: 1, dropped: 2 },
            sent: Traffic { bytes: 900, packets: 8, errors: 3, dropped: 4 },
        };
        assert_eq!(parse_interfaces(text), [expected]);
    }

    #[test]
    fn files_of_the_kernel_are_read_as_it_writes_them() {
        assert_eq!(tasks("0.20 0.18 0.12 1/80 11206\n"), Some(80));
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max open files            1024                 524288               files     \n\
             Max locked memory         unlimited            unlimited            bytes     \n";
        assert_eq!(soft_limit(limits, "Max open files"), Some(1024));
        assert_eq!(soft_limit(limits, "Max locked memory"), Some(-1));
        assert_eq!(soft_limit(limits, "Max stack size"), None);
    }

    #[test]
    fn this_machine_has_memory_tasks_and_a_past() {
        let machine = machine(&mut Reader::default());
        assert!(machine.memory_bytes > 16 << 20 && machine.boot_secs > 1_000_000_000, "{machine:?}");
        assert!(machine.tasks > Some(1) && machine.max_pid > machine.tasks, "{machine:?}");
    }

    #[test]
    fn open_files_and_sockets_are_counted_unless_process_is_gone() {
        let own = std::process::id();
        let before = open_files(&[own, u32::MAX]);
        let _pair = UnixStream::pair().unwrap();
        let after = open_files(&[own]);
        // Other tests of this process open files meanwhile.
        assert!(before.files > 2 && after.sockets >= 2, "{before:?} {after:?}");
        assert_eq!(open_files(&[u32::MAX]), OpenFiles::default());
    }

    #[test]
    fn cpu_topology_has_threads_cores_and_sockets() {
        let dir = tempfile::tempdir().unwrap();
        for (cpu, socket, core) in [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 0)] {
            let topology = dir.path().join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(topology.join("physical_package_id"), format!("{socket}\n")).unwrap();
            fs::write(topology.join("core_id"), format!("{core}\n")).unwrap();
        }
        fs::create_dir(dir.path().join("cpufreq")).unwrap();
        let found = topology(dir.path(), &mut Reader::default());
        assert_eq!(found, Topology { cores: 4, physical_cores: 3, sockets: 2 });
    }
}
