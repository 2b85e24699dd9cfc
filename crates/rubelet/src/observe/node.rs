//! What kind of node is this?
//!
//! Owns: the facts of kernel and hardware that end up in CRI configurations. Read once, at the start.
//! Upstream: cAdvisor's machine info, `checkSwapControllerAvailability`, `possibleCPUs`, `HugePageSizes`.

use std::path::{Path, PathBuf};

use rubelet_core::{
    container::resources::page_size_name,
    settings::{Allocatable, NodeProfile, SwapController},
};
use rubelet_host::port::Host;

const CPUS: &str = "/sys/devices/system/cpu";
const CGROUP: &str = "/sys/fs/cgroup";
/// Files of the kernel: a page or two.
const LIMIT_BYTES: u64 = 1 << 20;

/// Completes what the configuration says by what the node is. In `configured`, `oom_kills_whole_container` means "where the
/// kernel can". What cannot be read is taken as not there.
pub async fn profile(host: &dyn Host, configured: NodeProfile) -> NodeProfile {
    let is_cgroup_v2 = exists(host, &Path::new(CGROUP).join("cgroup.controllers")).await;
    let cpus = cpus(host).await;
    let memory_bytes = memory_bytes(host).await;
    NodeProfile {
        memory_capacity_bytes: memory_bytes,
        // Nothing is reserved yet: all of the node may be used.
        allocatable: Allocatable {
            cpu_millis: i64::try_from(cpus.len()).unwrap_or(0) * 1000,
            memory_bytes,
            ephemeral_storage_bytes: configured.allocatable.ephemeral_storage_bytes,
        },
        thermal_throttle_paths: thermal_throttle_paths(host, &cpus).await,
        huge_page_sizes: huge_page_sizes(host).await,
        oom_kills_whole_container: configured.oom_kills_whole_container && is_cgroup_v2,
        swap_controller: if is_cgroup_v2 { swap_on_v2(host).await } else { swap_on_v1(host).await },
        selinux_enabled: exists(host, Path::new("/sys/fs/selinux/enforce")).await,
        ..configured
    }
}

async fn exists(host: &dyn Host, path: &Path) -> bool {
    matches!(host.file_kind(path).await, Ok(Some(_)))
}

async fn text(host: &dyn Host, path: &Path) -> String {
    let content = host.read_file(path, LIMIT_BYTES).await.unwrap_or_default();
    String::from_utf8_lossy(&content).into_owned()
}

async fn memory_bytes(host: &dyn Host) -> i64 {
    meminfo_total_bytes(&text(host, Path::new("/proc/meminfo")).await)
}

fn meminfo_total_bytes(meminfo: &str) -> i64 {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: Option<i64> = total.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Directories `cpu0`, `cpu1`, … of the processors the node has, in the order of their numbers.
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

async fn huge_page_sizes(host: &dyn Host) -> Vec<String> {
    let entries = host.list_dir(Path::new("/sys/kernel/mm/hugepages")).await.unwrap_or_default();
    entries.iter().filter_map(|entry| huge_page_size(&entry.name)).collect()
}

/// `hugepages-2048kB` is `2MB`.
fn huge_page_size(name: &str) -> Option<String> {
    let kib: i64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    Some(page_size_name(kib.checked_mul(1024)?))
}

async fn swap_on_v1(host: &dyn Host) -> SwapController {
    let limit = Path::new(CGROUP).join("memory/memory.memsw.limit_in_bytes");
    if exists(host, &limit).await { SwapController::CgroupV1 } else { SwapController::Absent }
}

async fn swap_on_v2(host: &dyn Host) -> SwapController {
    // The root cgroup has no limits; our own has them if any has.
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
        assert_eq!(meminfo_total_bytes("MemFree: 1 kB\nMemTotal:        4025048 kB\n"), 4_121_649_152);
        assert_eq!(meminfo_total_bytes(""), 0);
        assert_eq!(huge_page_size("hugepages-2048kB").as_deref(), Some("2MB"));
        assert_eq!(huge_page_size("hugepages-1048576kB").as_deref(), Some("1GB"));
        assert_eq!(huge_page_size("other"), None);
    }

    #[tokio::test]
    async fn this_node_has_memory_and_processors() {
        let profile = profile(&LinuxHost::default(), NodeProfile::default()).await;
        assert!(profile.memory_capacity_bytes > 16 << 20, "{profile:?}");
        assert!(profile.allocatable.cpu_millis >= 1000, "{profile:?}");
        assert!(!profile.oom_kills_whole_container);
    }
}
