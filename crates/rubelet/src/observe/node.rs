//! Facts about the node's kernel and hardware.
//!
//! Owns: the facts that CRI configurations and the Node object contain. Read once, at start.
//! Upstream: cAdvisor's machine info, `checkSwapControllerAvailability`, `possibleCPUs`, `HugePageSizes`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rubelet_core::{
    container::resources::page_size_name,
    node_status::Machine,
    settings::{NodeProfile, SwapController},
    volumes::selinux::{self, ContainerLabels},
};
use rubelet_host::port::Host;

const CPUS: &str = "/sys/devices/system/cpu";
const CGROUP: &str = "/sys/fs/cgroup";
/// Files of the kernel: a page or two.
const LIMIT_BYTES: u64 = 1 << 20;

/// The machine. Unreadable facts count as absent.
pub async fn machine(host: &dyn Host, root_dir: &Path) -> Machine {
    let meminfo = text(host, Path::new("/proc/meminfo")).await;
    let storage = host.file_system(root_dir).await;
    Machine {
        machine_id: first_line(host, &["/etc/machine-id", "/var/lib/dbus/machine-id"]).await,
        system_uuid: first_line(
            host,
            &[
                "/sys/class/dmi/id/product_uuid",
                "/proc/device-tree/system-id",
                "/proc/device-tree/vm,uuid",
                "/etc/machine-id",
            ],
        )
        .await,
        boot_id: first_line(host, &["/proc/sys/kernel/random/boot_id"]).await,
        kernel_version: first_line(host, &["/proc/sys/kernel/osrelease"]).await,
        os_image: os_image(host).await,
        cpus: cpu_list_len(&text(host, &Path::new(CPUS).join("online")).await),
        memory_bytes: meminfo_bytes(&meminfo, "MemTotal:"),
        swap_bytes: meminfo_bytes(&meminfo, "SwapTotal:"),
        huge_pages: huge_pages(host).await,
        max_pids: max_pids(host).await,
        storage_bytes: storage.ok().and_then(|found| i64::try_from(found.capacity_bytes).ok()),
    }
}

/// The smaller of the kernel's two bounds.
async fn max_pids(host: &dyn Host) -> Option<i64> {
    let mut bounds = Vec::new();
    for name in ["pid_max", "threads-max"] {
        bounds.extend(text(host, &Path::new("/proc/sys/kernel").join(name)).await.trim().parse::<i64>());
    }
    bounds.into_iter().min()
}

/// The number of processors in a list such as `0-3,8`.
pub fn cpu_list_len(list: &str) -> i64 {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (i64, i64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        Some((last - first + 1).max(0))
    });
    ranges.sum()
}

/// Completes the configuration with the node's facts. In `configured`, `oom_kills_whole_container` means "where the
/// kernel supports it". Unreadable facts count as absent.
pub async fn profile(host: &dyn Host, configured: NodeProfile, machine: &Machine) -> NodeProfile {
    let is_cgroup_v2 = exists(host, &Path::new(CGROUP).join("cgroup.controllers")).await;
    let selinux_enabled = exists(host, Path::new("/sys/fs/selinux/enforce")).await;
    NodeProfile {
        memory_capacity_bytes: machine.memory_bytes,
        thermal_throttle_paths: thermal_throttle_paths(host, &cpus(host).await).await,
        huge_page_sizes: machine.huge_pages.keys().map(|bytes| page_size_name(*bytes)).collect(),
        oom_kills_whole_container: configured.oom_kills_whole_container && is_cgroup_v2,
        swap_controller: if is_cgroup_v2 { swap_on_v2(host).await } else { swap_on_v1(host).await },
        limited_swap_bytes: configured.limited_swap_bytes.map(|_| machine.swap_bytes),
        memory_qos: configured.memory_qos.filter(|_| is_cgroup_v2),
        selinux_enabled,
        selinux_labels: if selinux_enabled { Some(selinux_labels(host).await) } else { None },
        apparmor_enabled: text(host, Path::new("/sys/module/apparmor/parameters/enabled")).await.starts_with('Y'),
        ..configured
    }
}

/// Empty if the policy has none for containers.
async fn selinux_labels(host: &dyn Host) -> ContainerLabels {
    let own = text(host, Path::new("/usr/share/containers/selinux/contexts")).await;
    if !own.is_empty() {
        return ContainerLabels::parse(&own);
    }
    let config = text(host, Path::new("/etc/selinux/config")).await;
    let Some(policy) = selinux::policy(&config).filter(|name| !name.contains('/')) else {
        return ContainerLabels::default();
    };
    let contexts = Path::new("/etc/selinux").join(policy).join("contexts/lxc_contexts");
    ContainerLabels::parse(&text(host, &contexts).await)
}

async fn exists(host: &dyn Host, path: &Path) -> bool {
    matches!(host.file_kind(path).await, Ok(Some(_)))
}

async fn text(host: &dyn Host, path: &Path) -> String {
    let content = host.read_file(path, LIMIT_BYTES).await.unwrap_or_default();
    String::from_utf8_lossy(&content).into_owned()
}

/// The content of the first of these files that exists.
async fn first_line(host: &dyn Host, paths: &[&str]) -> String {
    for path in paths {
        let content = text(host, Path::new(path)).await;
        let content = content.trim_end_matches('\0').trim();
        if !content.is_empty() {
            return content.to_owned();
        }
    }
    String::new()
}

async fn os_image(host: &dyn Host) -> String {
    for path in ["/etc/os-release", "/usr/lib/os-release"] {
        let release = text(host, Path::new(path)).await;
        if !release.is_empty() {
            return pretty_name(&release);
        }
    }
    "Unknown".to_owned()
}

fn pretty_name(os_release: &str) -> String {
    let name = os_release.lines().find_map(|line| line.trim().strip_prefix("PRETTY_NAME="));
    name.map_or("Linux", |name| name.trim_matches('"')).to_owned()
}

fn meminfo_bytes(meminfo: &str, name: &str) -> i64 {
    let total = meminfo.lines().find_map(|line| line.strip_prefix(name));
    let kib: Option<i64> = total.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Directories `cpu0`, `cpu1`, … of the present processors, sorted by number.
async fn cpus(host: &dyn Host) -> Vec<PathBuf> {
    let entries = host.list_dir(Path::new(CPUS)).await.unwrap_or_default();
    let mut numbers: Vec<u32> =
        entries.iter().filter_map(|entry| entry.name.strip_prefix("cpu")?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers.into_iter().map(|number| Path::new(CPUS).join(format!("cpu{number}"))).collect()
}

async fn thermal_throttle_paths(host: &dyn Host, cpus: &[PathBuf]) -> Vec<String> {
    let mut paths = Vec::new();
    for cpu in cpus {
        let path = cpu.join("thermal_throttle");
        if exists(host, &path).await {
            paths.push(path.display().to_string());
        }
    }
    paths
}

/// Reserved pages, by page size in bytes.
async fn huge_pages(host: &dyn Host) -> BTreeMap<i64, i64> {
    let dir = Path::new("/sys/kernel/mm/hugepages");
    let mut sizes = BTreeMap::new();
    for entry in host.list_dir(dir).await.unwrap_or_default() {
        if let Some(bytes) = huge_page_bytes(&entry.name) {
            let pages = text(host, &dir.join(&entry.name).join("nr_hugepages")).await;
            sizes.insert(bytes, pages.trim().parse().unwrap_or(0));
        }
    }
    sizes
}

/// `hugepages-2048kB` means 2 MiB.
fn huge_page_bytes(name: &str) -> Option<i64> {
    let kib: i64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

async fn swap_on_v1(host: &dyn Host) -> SwapController {
    let limit = Path::new(CGROUP).join("memory/memory.memsw.limit_in_bytes");
    if exists(host, &limit).await { SwapController::CgroupV1 } else { SwapController::Absent }
}

async fn swap_on_v2(host: &dyn Host) -> SwapController {
    // The root cgroup has no limit files; the agent's own cgroup has them if the kernel supports them.
    let own = text(host, Path::new("/proc/self/cgroup")).await;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let limit = Path::new(CGROUP).join(path).join("memory.swap.max");
    if exists(host, &limit).await { SwapController::CgroupV2 } else { SwapController::Absent }
}

#[cfg(test)]
mod tests {
    use rubelet_host::linux::LinuxHost;

    use super::*;

    #[test]
    fn kernel_files_are_read_as_the_kernel_writes_them() {
        assert_eq!(meminfo_bytes("MemFree: 1 kB\nMemTotal:        4025048 kB\n", "MemTotal:"), 4_121_649_152);
        assert_eq!(meminfo_bytes("", "SwapTotal:"), 0);
        assert_eq!(huge_page_bytes("hugepages-2048kB"), Some(2 << 20));
        assert_eq!(huge_page_bytes("other"), None);
        assert_eq!(["0-3,8\n", "0", "", "2-3,5-6,9"].map(cpu_list_len), [5, 1, 0, 5]);
        assert_eq!(
            pretty_name("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n"),
            "Debian GNU/Linux 12 (bookworm)"
        );
        assert_eq!(pretty_name("NAME=x\n"), "Linux");
    }

    #[tokio::test]
    async fn this_node_has_memory_processors_and_a_disk() {
        let host = LinuxHost::default();
        let machine = machine(&host, Path::new("/")).await;
        assert!(machine.memory_bytes > 16 << 20 && machine.cpus >= 1, "{machine:?}");
        assert!(machine.storage_bytes > Some(1 << 20) && !machine.kernel_version.is_empty(), "{machine:?}");
        let profile = profile(&host, NodeProfile::default(), &machine).await;
        assert_eq!(profile.memory_capacity_bytes, machine.memory_bytes);
        assert!(!profile.oom_kills_whole_container);
    }
}
