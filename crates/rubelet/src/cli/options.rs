//! The agent's options: flags and configuration, complete and validated.
//!
//! Owns: the flags that are not in KubeletConfiguration, the node's name, and the core's settings made from them.
//! Upstream: `KubeletFlags`, `nodeutil.GetHostname`.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use rubelet_core::{
    cgroups::{CgroupDriver, CgroupSettings, Limits},
    config::{
        self, Checked, Draft, FlagValue, GoDuration, Host, KubeletConfiguration,
        gates::{Gate, Gates},
    },
    event::Source,
    eviction::{EvictionSettings, threshold::ThresholdConfig},
    node_object::NodeObject,
    quantity::Quantity,
    settings::{DefaultSeccomp, ImageGcSettings, LogSettings, MemoryQos, NodeProfile, Settings},
    shutdown,
};
use serde::{Deserialize, Serialize};

use super::{
    acted_on::{self, ACTED_ON_FLAGS},
    arguments::Arguments,
    flagz,
    load::{self, Sources},
};

#[derive(Clone, Debug)]
pub struct Options {
    pub flags: Flags,
    pub config: KubeletConfiguration,
    pub gates: Gates,
    /// Every flag as `/flagz` shows it.
    pub shown_flags: BTreeMap<&'static str, String>,
    /// Logged once at start.
    pub warnings: Vec<String>,
}

/// The flags that have no field in KubeletConfiguration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Flags {
    pub config: String,
    pub config_dir: String,
    pub kubeconfig: String,
    pub bootstrap_kubeconfig: String,
    pub hostname_override: String,
    pub node_ip: String,
    pub cert_dir: PathBuf,
    pub cloud_provider: String,
    pub root_dir: PathBuf,
    pub node_labels: BTreeMap<String, String>,
    pub lock_file: String,
    pub exit_on_lock_contention: bool,
    pub runtime_cgroups: String,
    pub image_credential_provider_config: String,
    pub image_credential_provider_bin_dir: String,
    pub seccomp_default: bool,
    pub minimum_container_ttl_duration: GoDuration,
    pub maximum_dead_containers_per_container: i32,
    pub maximum_dead_containers: i32,
    pub experimental_mounter_path: String,
    pub experimental_allocatable_ignore_eviction: bool,
    /// Ours: see docs/parity.md, section 3.
    pub rubelet_exec_needs_create: bool,
}

impl Default for Flags {
    fn default() -> Self {
        Flags {
            config: String::new(),
            config_dir: String::new(),
            kubeconfig: String::new(),
            bootstrap_kubeconfig: String::new(),
            hostname_override: String::new(),
            node_ip: String::new(),
            cert_dir: PathBuf::from("/var/lib/kubelet/pki"),
            cloud_provider: String::new(),
            root_dir: PathBuf::from("/var/lib/kubelet"),
            node_labels: BTreeMap::new(),
            lock_file: String::new(),
            exit_on_lock_contention: false,
            runtime_cgroups: String::new(),
            image_credential_provider_config: String::new(),
            image_credential_provider_bin_dir: String::new(),
            seccomp_default: false,
            minimum_container_ttl_duration: GoDuration::default(),
            maximum_dead_containers_per_container: 1,
            maximum_dead_containers: -1,
            experimental_mounter_path: String::new(),
            experimental_allocatable_ignore_eviction: false,
            rubelet_exec_needs_create: false,
        }
    }
}

impl Options {
    /// Reads the files the arguments name and changes nothing. Returns all problems at once.
    pub fn load(arguments: Arguments, host: Host) -> Result<Options, Vec<String>> {
        let Arguments { own, fields, idle, notices: mut warnings, .. } = arguments;
        let flags: Flags =
            serde_json::from_value(own.clone().into()).expect("flags are parsed to their members' types");
        let sources = Sources {
            file: given(&flags.config),
            drop_in_dir: given(&flags.config_dir),
            is_standalone: flags.kubeconfig.is_empty() && flags.bootstrap_kubeconfig.is_empty(),
        };
        let mut problems = config::node_labels(&flags.node_labels);
        let checked = match check(&sources, &fields, host) {
            Ok(checked) if problems.is_empty() => checked,
            Ok(_) => return Err(problems),
            Err(more) => {
                problems.extend(more);
                return Err(problems);
            }
        };
        let idle_flags =
            own.keys().filter(|name| !ACTED_ON_FLAGS.contains(&name.as_str())).map(|name| format!("--{name}"));
        let idle_fields = acted_on::not_acted_on(&checked.config, &defaults(&sources));
        warnings.extend(checked.warnings);
        warnings.extend(open_port(&checked.config));
        warnings.extend(idle_flags.chain(idle_fields).map(|name| format!("{name} is accepted but without effect")));
        let shown_flags = flagz::shown(&flags, &as_flags(&flags, &fields, &checked.config), &idle);
        Ok(Options { flags, config: checked.config, gates: checked.gates, shown_flags, warnings })
    }

    /// The node's name: `--hostname-override` or the host's; trimmed and in lower case.
    pub fn node_name(&self, host_name: &str) -> Result<String, String> {
        let told = &self.flags.hostname_override;
        let name = if told.is_empty() { host_name } else { told }.trim().to_lowercase();
        if name.is_empty() { Err("empty hostname is invalid".to_owned()) } else { Ok(name) }
    }

    /// The sources of pods.
    pub fn sources(&self) -> Vec<Source> {
        let told = |text: &str| !text.is_empty();
        let sources = [
            told(&self.config.static_pod_path).then_some(Source::File),
            told(&self.config.static_pod_url).then_some(Source::Http),
            told(&self.flags.kubeconfig).then_some(Source::Api),
        ];
        sources.into_iter().flatten().collect()
    }

    fn eviction(&self) -> EvictionSettings {
        let config = &self.config;
        let enforces_pods = config.enforce_node_allocatable.iter().any(|what| what == "pods");
        let thresholds = ThresholdConfig {
            hard: &config.eviction_hard,
            soft: &config.eviction_soft,
            soft_grace_periods: &config.eviction_soft_grace_period,
            minimum_reclaim: &config.eviction_minimum_reclaim,
            enforces_pods: enforces_pods && !self.flags.experimental_allocatable_ignore_eviction,
        };
        EvictionSettings {
            thresholds: thresholds.thresholds(),
            pressure_transition: config.eviction_pressure_transition_period.as_std(),
            max_pod_grace_secs: i64::from(config.eviction_max_pod_grace_period),
            limits_local_storage: config.local_storage_capacity_isolation,
        }
    }

    /// The core's settings. The root directory is as given: `run.rs` creates it and resolves its links.
    pub fn settings(&self, node_name: &str, host_ips: Vec<String>) -> Settings {
        let Options { flags, config, .. } = self;
        let max_parallel = config.max_parallel_image_pulls.and_then(|most| u32::try_from(most).ok());
        Settings {
            node_name: node_name.to_owned(),
            host_ips,
            sources: self.sources(),
            sync_frequency: config.sync_frequency.as_std(),
            max_container_restart_period: config
                .crash_loop_back_off
                .max_container_restart_period
                .unwrap_or(GoDuration::from_secs(300))
                .as_std(),
            max_parallel_pulls: if config.serialize_image_pulls { Some(1) } else { max_parallel },
            registry_pull_qps: u32::try_from(config.registry_pull_qps).unwrap_or(0),
            registry_burst: u32::try_from(config.registry_burst).unwrap_or(0),
            runtime_request_timeout: config.runtime_request_timeout.as_std(),
            max_dead_containers_per_container: flags.maximum_dead_containers_per_container,
            max_dead_containers: flags.maximum_dead_containers,
            min_container_ttl: flags.minimum_container_ttl_duration.as_std(),
            root_dir: flags.root_dir.clone(),
            pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
            volume_plugin_dir: PathBuf::from(&config.volume_plugin_dir),
            logs: LogSettings {
                max_bytes: max_log_bytes(&config.container_log_max_size),
                max_files: u32::try_from(config.container_log_max_files).unwrap_or(u32::MAX),
                workers: u32::try_from(config.container_log_max_workers).unwrap_or(1),
                interval: config.container_log_monitor_interval.as_std(),
            },
            image_gc: image_gc(config),
            eviction: self.eviction(),
            shutdown_groups: shutdown::groups(config, &self.gates),
            attaches_by_controller: config.enable_controller_attach_detach,
            allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
            own_node: NodeObject::default(),
            cgroups: config.cgroups_per_qos.then(|| CgroupSettings {
                root: CgroupSettings::parse_root(&config.cgroup_root),
                driver: if config.cgroup_driver == "systemd" { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs },
                pod_pids_limit: Some(config.pod_pids_limit).filter(|limit| *limit > 0),
                kubepods_limits: Limits::default(),
                qos_reserved_memory_percent: qos_reserved_memory_percent(config)
                    .filter(|_| self.gates.enabled(Gate::QosReserved)),
            }),
            node: self.node_profile(),
        }
    }

    /// What is known of the node's part without looking at the machine.
    fn node_profile(&self) -> NodeProfile {
        let Options { flags, config, .. } = self;
        NodeProfile {
            cluster_dns: config.cluster_dns.clone(),
            cluster_domain: config.cluster_domain.clone(),
            resolv_conf: given(&config.resolv_conf),
            cpu_cfs_quota_period: config.cpu_cfs_quota.then(|| config.cpu_cfs_quota_period.as_std()),
            default_seccomp: if config.seccomp_default || flags.seccomp_default {
                DefaultSeccomp::RuntimeDefault
            } else {
                DefaultSeccomp::Unconfined
            },
            oom_kills_whole_container: config.single_process_oom_kill != Some(true),
            // The amount is the machine's.
            limited_swap_bytes: (config.memory_swap.swap_behavior == "LimitedSwap").then_some(0),
            memory_qos: self.gates.enabled(Gate::MemoryQos).then(|| MemoryQos {
                throttling_factor: config.memory_throttling_factor,
                protects_requests: config.memory_reservation_policy == "TieredReservation",
            }),
            env_files_enabled: self.gates.enabled(Gate::EnvFiles),
            selinux_mount_enabled: self.gates.enabled(Gate::SeLinuxMount),
            trust_bundles_enabled: self.gates.enabled(Gate::ClusterTrustBundleProjection),
            pod_certificates_enabled: self.gates.enabled(Gate::PodCertificateRequest),
            ..NodeProfile::default()
        }
    }
}

fn qos_reserved_memory_percent(config: &KubeletConfiguration) -> Option<i64> {
    config.qos_reserved.get("memory")?.strip_suffix('%')?.parse().ok()
}

fn image_gc(config: &KubeletConfiguration) -> ImageGcSettings {
    ImageGcSettings {
        high_percent: u64::try_from(config.image_gc_high_threshold_percent).unwrap_or(100),
        low_percent: u64::try_from(config.image_gc_low_threshold_percent).unwrap_or(100),
        min_age: config.image_minimum_gc_age.as_std(),
        max_age: Some(config.image_maximum_gc_age.as_std()).filter(|age| !age.is_zero()),
    }
}

/// A negative size turns rotation off, as upstream.
fn max_log_bytes(size: &str) -> Option<u64> {
    u64::try_from(Quantity::parse(size).ok()?.value()).ok()
}

/// A warning if everybody who reaches the kubelet's port may use it.
fn open_port(config: &KubeletConfiguration) -> Option<String> {
    let (address, port) = (&config.address, config.port);
    let is_loopback = address.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback());
    let is_open = config.authentication.anonymous.enabled && config.authorization.mode == "AlwaysAllow";
    (is_open && !is_loopback).then(|| {
        format!(
            "everybody who reaches port {port} on {address} may run commands in pods without authentication: \
             set authentication.anonymous.enabled to false, authorization.mode to Webhook, or address to 127.0.0.1"
        )
    })
}

/// The configuration that upstream's flags show at run time: a configuration file does not change it.
fn as_flags(flags: &Flags, fields: &[FlagValue], used: &KubeletConfiguration) -> KubeletConfiguration {
    if flags.config.is_empty() {
        return used.clone();
    }
    Draft::without_file().flags(fields).expect("these values were put in once already").config
}

/// The output of `rubelet config check` for valid files.
pub fn report(sources: &Sources, host: Host) -> Result<String, Vec<String>> {
    let checked = check(sources, &[], host)?;
    let mut lines = checked.warnings;
    let idle = acted_on::not_acted_on(&checked.config, &defaults(sources));
    let name = sources.file.as_deref().unwrap_or(Path::new("(defaults)")).display();
    lines.push(format!("{name}: all values are valid"));
    if !idle.is_empty() {
        lines.push("accepted but without effect:".to_owned());
        lines.extend(idle.into_iter().map(|field| format!("  {field}")));
    }
    Ok(lines.join("\n") + "\n")
}

/// The cgroup version of the host.
pub fn this_host() -> Host {
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    if unified { Host::CgroupV2 } else { Host::CgroupV1 }
}

/// The host's name, from the kernel.
pub fn host_name() -> Result<String, String> {
    const FILE: &str = "/proc/sys/kernel/hostname";
    std::fs::read_to_string(FILE).map_err(|error| format!("couldn't determine hostname: {FILE}: {error}"))
}

fn check(sources: &Sources, fields: &[FlagValue], host: Host) -> Result<Checked, Vec<String>> {
    let gates = fields.iter().find(|given| given.field == "featureGates").map(|given| given.value.clone());
    let gates =
        gates.map(|gates| serde_json::from_value(gates).expect("gates are parsed to booleans")).unwrap_or_default();
    let draft = sources.load(&gates)?;
    let flagged = draft.flags(fields).map_err(|problems| load::lines(&problems))?;
    flagged.check(host).map_err(|problems| load::lines(&problems))
}

/// The default configuration, without files and flags.
fn defaults(sources: &Sources) -> KubeletConfiguration {
    match sources.file {
        None => sources.without_file().config,
        Some(_) => Draft::empty_file().config,
    }
}

fn given(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}
