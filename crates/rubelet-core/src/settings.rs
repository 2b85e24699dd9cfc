//! The settings that the core's decisions depend on, taken from KubeletConfiguration and flags by the shell.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    cgroups::CgroupSettings, event::Source, eviction::EvictionSettings, node_object::NodeObject,
    shutdown::ShutdownGroup, volumes::selinux::ContainerLabels,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub node_name: String,
    /// Primary first. May be empty on a node without a network.
    pub host_ips: Vec<String>,
    /// The sources that must be ready before anything is cleaned up.
    pub sources: Vec<Source>,
    /// The longest time between syncs of a pod.
    pub sync_frequency: Duration,
    /// The maximum crash-loop back-off.
    pub max_container_restart_period: Duration,
    /// `None`: no limit. `Some(1)`: serial pulls.
    pub max_parallel_pulls: Option<u32>,
    /// Pulls per second; zero is no limit.
    pub registry_pull_qps: u32,
    pub registry_burst: u32,
    /// The deadline of an ordinary CRI call.
    pub runtime_request_timeout: Duration,
    /// Dead instances kept per container; negative is no limit.
    pub max_dead_containers_per_container: i32,
    /// Dead containers kept on the node; negative is no limit.
    pub max_dead_containers: i32,
    /// A dead container younger than this is not collected.
    pub min_container_ttl: Duration,
    /// `--root-dir`, links resolved.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// `volumePluginDir`: programs of FlexVolume drivers.
    pub volume_plugin_dir: PathBuf,
    pub logs: LogSettings,
    pub image_gc: ImageGcSettings,
    pub eviction: EvictionSettings,
    /// `shutdownGracePeriod…`, lowest priority first; none: a shutdown ends no pod.
    pub shutdown_groups: Vec<ShutdownGroup>,
    /// `enableControllerAttachDetach`.
    pub attaches_by_controller: bool,
    /// `allowedUnsafeSysctls`: names, or prefixes with a star.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// The node for admission until the Node object is known, or always on a standalone node.
    pub own_node: NodeObject,
    /// `None`: pods have no cgroups of their own (`cgroupsPerQOS` is off).
    pub cgroups: Option<CgroupSettings>,
    /// The node's part of every sandbox and container configuration.
    pub node: NodeProfile,
}

impl Settings {
    /// Pods come from an API server, and their status is reported to it.
    pub fn is_in_cluster(&self) -> bool {
        self.sources.contains(&Source::Api)
    }
}

/// The parts of the node and KubeletConfiguration that enter CRI configurations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeProfile {
    /// `clusterDNS`.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`.
    pub cluster_domain: String,
    /// `resolvConf`; `None` when it is set to the empty string, which gives pods a resolver on localhost.
    pub resolv_conf: Option<PathBuf>,
    /// `cpuCFSQuotaPeriod`; `None` when `cpuCFSQuota` is off.
    pub cpu_cfs_quota_period: Option<Duration>,
    /// The seccomp profile of a container without one (`seccompDefault`).
    pub default_seccomp: DefaultSeccomp,
    pub memory_capacity_bytes: i64,
    /// The downward API reports these for a container without a limit.
    pub allocatable: Allocatable,
    /// `/sys/devices/system/cpu/cpu*/thermal_throttle` where they exist: hidden from containers.
    pub thermal_throttle_paths: Vec<String>,
    /// Sizes the kernel has (`2MB`, `1GB`): a container may use none of them unless it requests them.
    pub huge_page_sizes: Vec<String>,
    /// Out of memory, the kernel kills all of a container (cgroup v2, and `singleProcessOOMKill` off).
    pub oom_kills_whole_container: bool,
    pub swap_controller: SwapController,
    /// The node's swap, if containers may use a part of it (`LimitedSwap`).
    pub limited_swap_bytes: Option<i64>,
    /// The node's memory without reservations; what eviction keeps free is a part of it.
    pub unreserved_memory_bytes: i64,
    /// The gate MemoryQoS, on a node with cgroup v2.
    pub memory_qos: Option<MemoryQos>,
    /// The gate EnvFiles: variables may come from files of volumes.
    pub env_files_enabled: bool,
    /// The gate ClusterTrustBundleProjection: projected volumes may have trust anchors.
    pub trust_bundles_enabled: bool,
    /// The gate PodCertificateRequest: projected volumes may have certificates for their pod.
    pub pod_certificates_enabled: bool,
    /// The size of a memory page, which bounds one argument or variable.
    pub page_bytes: usize,
    /// Files made for containers must be relabelled before the containers can read them.
    pub selinux_enabled: bool,
    /// What its policy says of containers; `None` without SELinux.
    pub selinux_labels: Option<ContainerLabels>,
    /// The gate SELinuxMount: volumes of several pods are mounted with labels too.
    pub selinux_mount_enabled: bool,
    pub apparmor_enabled: bool,
}

/// How the kernel protects and throttles the memory of containers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryQos {
    /// `memoryThrottlingFactor`: the part of the memory between request and limit above which a container is slowed down.
    pub throttling_factor: f64,
    /// `memoryReservationPolicy` is TieredReservation: requests are protected.
    pub protects_requests: bool,
}

/// When container logs are rotated (`containerLog…`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSettings {
    /// A log of this size is rotated; `None`: no log is.
    pub max_bytes: Option<u64>,
    /// Files kept of one instance of a container, with the live one.
    pub max_files: u32,
    /// Rotations at a time, and compressions at a time.
    pub workers: u32,
    /// The longest time between two looks at a log's size.
    pub interval: Duration,
}

impl Default for LogSettings {
    fn default() -> Self {
        LogSettings { max_bytes: Some(10 << 20), max_files: 5, workers: 1, interval: Duration::from_secs(10) }
    }
}

/// When unused images are deleted (`imageGC…`, `imageM…GCAge`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageGcSettings {
    /// Of the file system of images; 100 is never.
    pub high_percent: u64,
    pub low_percent: u64,
    /// Younger images are kept.
    pub min_age: Duration,
    /// Images that were not used for longer are deleted; `None`: whatever their age, they are not.
    pub max_age: Option<Duration>,
}

impl ImageGcSettings {
    pub fn is_on(&self) -> bool {
        self.high_percent < 100 || self.max_age.is_some()
    }
}

impl Default for ImageGcSettings {
    fn default() -> Self {
        ImageGcSettings { high_percent: 85, low_percent: 80, min_age: Duration::from_secs(120), max_age: None }
    }
}

/// Whether and how the kernel can limit a container's swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SwapController {
    #[default]
    Absent,
    CgroupV1,
    CgroupV2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DefaultSeccomp {
    Unconfined,
    RuntimeDefault,
}

/// The allocatable resources; zero where unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocatable {
    pub cpu_millis: i64,
    pub memory_bytes: i64,
    pub ephemeral_storage_bytes: i64,
    /// `maxPods`, or fewer by `podsPerCore`.
    pub pods: i64,
}

impl Default for NodeProfile {
    /// Upstream's defaults, for an unknown node.
    fn default() -> Self {
        NodeProfile {
            cluster_dns: Vec::new(),
            cluster_domain: String::new(),
            resolv_conf: Some(PathBuf::from("/etc/resolv.conf")),
            cpu_cfs_quota_period: Some(Duration::from_millis(100)),
            default_seccomp: DefaultSeccomp::Unconfined,
            memory_capacity_bytes: 0,
            allocatable: Allocatable::default(),
            thermal_throttle_paths: Vec::new(),
            huge_page_sizes: Vec::new(),
            oom_kills_whole_container: false,
            swap_controller: SwapController::Absent,
            limited_swap_bytes: None,
            unreserved_memory_bytes: 0,
            memory_qos: None,
            env_files_enabled: true,
            trust_bundles_enabled: false,
            pod_certificates_enabled: false,
            page_bytes: 4096,
            selinux_enabled: false,
            selinux_labels: None,
            selinux_mount_enabled: false,
            apparmor_enabled: false,
        }
    }
}

impl Settings {
    /// Upstream's defaults for a node of this name.
    pub fn for_node(node_name: &str) -> Self {
        Settings {
            node_name: node_name.to_owned(),
            host_ips: Vec::new(),
            sources: vec![Source::File],
            sync_frequency: Duration::from_secs(60),
            max_container_restart_period: Duration::from_secs(300),
            max_parallel_pulls: Some(1),
            registry_pull_qps: 5,
            registry_burst: 10,
            runtime_request_timeout: Duration::from_secs(120),
            max_dead_containers_per_container: 1,
            max_dead_containers: -1,
            min_container_ttl: Duration::ZERO,
            root_dir: PathBuf::from("/var/lib/kubelet"),
            pod_logs_dir: PathBuf::from("/var/log/pods"),
            volume_plugin_dir: PathBuf::from("/usr/libexec/kubernetes/kubelet-plugins/volume/exec"),
            logs: LogSettings::default(),
            image_gc: ImageGcSettings::default(),
            eviction: EvictionSettings::default(),
            shutdown_groups: Vec::new(),
            attaches_by_controller: true,
            allowed_unsafe_sysctls: Vec::new(),
            own_node: NodeObject::default(),
            cgroups: Some(CgroupSettings::default()),
            node: NodeProfile::default(),
        }
    }
}
