//! KubeletConfiguration v1beta1: every field with its name on the wire, its type and its default.
//!
//! Owns: the fields and their unconditional defaults, one row each. Never: defaults that depend on other fields (`complete.rs`), rules (`validate.rs`).
//! Upstream: `k8s.io/kubelet/config/v1beta1/types.go`, `apis/config/v1beta1/defaults.go`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Taint;
use serde::{Deserialize, Serialize};

use super::{
    duration::{FlushForm, FlushFrequency, GoDuration},
    quantity::QuantityText,
};

/// The meaning of an absent or empty value, which in upstream follows from the Go type.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// Only absence is "not given": zero, false and empty are kept and shown.
    Pointer,
    /// Zero, false and empty are "not given": they become the default, and are not shown.
    Value,
    /// An empty list is kept, but not shown.
    List,
    /// A section with fields of its own.
    Nested(&'static [Field]),
}

#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub rule: Rule,
}

/// A group of fields.
pub(super) trait Section: Default {
    const FIELDS: &'static [Field];

    /// Replaces zeroes that mean "not given" by defaults.
    fn fill_zeroes(&mut self);
}

macro_rules! rule {
    (pointer $type:ty) => {
        Rule::Pointer
    };
    (value $type:ty) => {
        Rule::Value
    };
    (list $type:ty) => {
        Rule::List
    };
    (nested $type:ty) => {
        Rule::Nested(<$type as Section>::FIELDS)
    };
}

macro_rules! fill {
    (pointer $here:expr, $default:expr) => {};
    (list $here:expr, $default:expr) => {};
    (value $here:expr, $default:expr) => {
        fill_zero(&mut $here, $default);
    };
    (nested $here:expr, $default:expr) => {
        Section::fill_zeroes(&mut $here);
    };
}

fn fill_zero<T: Default + PartialEq>(here: &mut T, default: T) {
    if *here == T::default() {
        *here = default;
    }
}

/// `rule "nameOnTheWire" rust_name: Type = default;`
macro_rules! section {
    ($(#[$meta:meta])* $name:ident { $($rule:ident $wire:literal $field:ident: $type:ty = $default:expr;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $name {
            $(#[serde(rename = $wire)] pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default,)* }
            }
        }

        impl Section for $name {
            const FIELDS: &'static [Field] = &[$(Field { name: $wire, rule: rule!($rule $type) },)*];

            fn fill_zeroes(&mut self) {
                $(fill!($rule self.$field, $default);)*
            }
        }
    };
}

type StringMap = BTreeMap<String, String>;

section! {
    /// A complete configuration: each field has its value.
    KubeletConfiguration {
        pointer "enableServer" enable_server: bool = true;
        value "staticPodPath" static_pod_path: String = String::new();
        value "podLogsDir" pod_logs_dir: String = "/var/log/pods".into();
        value "syncFrequency" sync_frequency: GoDuration = GoDuration::from_secs(60);
        value "fileCheckFrequency" file_check_frequency: GoDuration = GoDuration::from_secs(20);
        value "httpCheckFrequency" http_check_frequency: GoDuration = GoDuration::from_secs(20);
        value "staticPodURL" static_pod_url: String = String::new();
        value "staticPodURLHeader" static_pod_url_header: BTreeMap<String, Vec<String>> = BTreeMap::new();
        value "address" address: String = "0.0.0.0".into();
        value "port" port: i32 = 10250;
        value "readOnlyPort" read_only_port: i32 = 0;
        value "tlsCertFile" tls_cert_file: String = String::new();
        value "tlsPrivateKeyFile" tls_private_key_file: String = String::new();
        value "tlsCipherSuites" tls_cipher_suites: Vec<String> = Vec::new();
        value "tlsCurvePreferences" tls_curve_preferences: Vec<i32> = Vec::new();
        value "tlsMinVersion" tls_min_version: String = String::new();
        value "rotateCertificates" rotate_certificates: bool = false;
        value "serverTLSBootstrap" server_tls_bootstrap: bool = false;
        nested "authentication" authentication: Authentication = Authentication::default();
        nested "authorization" authorization: Authorization = Authorization::default();
        pointer "registryPullQPS" registry_pull_qps: i32 = 5;
        value "registryBurst" registry_burst: i32 = 10;
        value "imagePullCredentialsVerificationPolicy" image_pull_credentials_verification_policy: String = String::new();
        value "preloadedImagesVerificationAllowlist" preloaded_images_verification_allowlist: Vec<String> = Vec::new();
        pointer "eventRecordQPS" event_record_qps: i32 = 50;
        value "eventBurst" event_burst: i32 = 100;
        pointer "enableDebuggingHandlers" enable_debugging_handlers: bool = true;
        value "enableContentionProfiling" enable_contention_profiling: bool = false;
        pointer "healthzPort" healthz_port: i32 = 10248;
        value "healthzBindAddress" healthz_bind_address: String = "127.0.0.1".into();
        pointer "oomScoreAdj" oom_score_adj: i32 = -999;
        value "clusterDomain" cluster_domain: String = String::new();
        value "clusterDNS" cluster_dns: Vec<String> = Vec::new();
        value "streamingConnectionIdleTimeout" streaming_connection_idle_timeout: GoDuration = GoDuration::from_secs(4 * 3600);
        value "nodeStatusUpdateFrequency" node_status_update_frequency: GoDuration = GoDuration::from_secs(10);
        value "nodeStatusReportFrequency" node_status_report_frequency: GoDuration = GoDuration::from_secs(300);
        value "nodeLeaseDurationSeconds" node_lease_duration_seconds: i32 = 40;
        value "imageMinimumGCAge" image_minimum_gc_age: GoDuration = GoDuration::from_secs(120);
        value "imageMaximumGCAge" image_maximum_gc_age: GoDuration = GoDuration::default();
        pointer "imageGCHighThresholdPercent" image_gc_high_threshold_percent: i32 = 85;
        pointer "imageGCLowThresholdPercent" image_gc_low_threshold_percent: i32 = 80;
        value "volumeStatsAggPeriod" volume_stats_agg_period: GoDuration = GoDuration::from_secs(60);
        value "kubeletCgroups" kubelet_cgroups: String = String::new();
        value "systemCgroups" system_cgroups: String = String::new();
        value "cgroupRoot" cgroup_root: String = String::new();
        pointer "cgroupsPerQOS" cgroups_per_qos: bool = true;
        value "cgroupDriver" cgroup_driver: String = "cgroupfs".into();
        value "cpuManagerPolicy" cpu_manager_policy: String = "none".into();
        pointer "singleProcessOOMKill" single_process_oom_kill: Option<bool> = None;
        value "cpuManagerPolicyOptions" cpu_manager_policy_options: StringMap = StringMap::new();
        value "cpuManagerReconcilePeriod" cpu_manager_reconcile_period: GoDuration = GoDuration::from_secs(10);
        value "memoryManagerPolicy" memory_manager_policy: String = "None".into();
        value "topologyManagerPolicy" topology_manager_policy: String = "none".into();
        value "topologyManagerScope" topology_manager_scope: String = "container".into();
        value "topologyManagerPolicyOptions" topology_manager_policy_options: StringMap = StringMap::new();
        value "qosReserved" qos_reserved: StringMap = StringMap::new();
        value "runtimeRequestTimeout" runtime_request_timeout: GoDuration = GoDuration::from_secs(120);
        value "hairpinMode" hairpin_mode: String = "promiscuous-bridge".into();
        value "maxPods" max_pods: i32 = 110;
        value "podCIDR" pod_cidr: String = String::new();
        pointer "podPidsLimit" pod_pids_limit: i64 = -1;
        pointer "resolvConf" resolv_conf: String = "/etc/resolv.conf".into();
        value "runOnce" run_once: bool = false;
        pointer "cpuCFSQuota" cpu_cfs_quota: bool = true;
        pointer "cpuCFSQuotaPeriod" cpu_cfs_quota_period: GoDuration = GoDuration::from_millis(100);
        pointer "nodeStatusMaxImages" node_status_max_images: i32 = 50;
        value "maxOpenFiles" max_open_files: i64 = 1_000_000;
        value "contentType" content_type: String = "application/vnd.kubernetes.protobuf".into();
        pointer "kubeAPIQPS" kube_api_qps: i32 = 50;
        value "kubeAPIBurst" kube_api_burst: i32 = 100;
        pointer "serializeImagePulls" serialize_image_pulls: bool = true;
        pointer "maxParallelImagePulls" max_parallel_image_pulls: Option<i32> = None;
        value "evictionHard" eviction_hard: StringMap = StringMap::new();
        value "evictionSoft" eviction_soft: StringMap = StringMap::new();
        value "evictionSoftGracePeriod" eviction_soft_grace_period: StringMap = StringMap::new();
        value "evictionPressureTransitionPeriod" eviction_pressure_transition_period: GoDuration = GoDuration::from_secs(300);
        value "evictionMaxPodGracePeriod" eviction_max_pod_grace_period: i32 = 0;
        value "evictionMinimumReclaim" eviction_minimum_reclaim: StringMap = StringMap::new();
        pointer "mergeDefaultEvictionSettings" merge_default_eviction_settings: bool = false;
        value "podsPerCore" pods_per_core: i32 = 0;
        pointer "enableControllerAttachDetach" enable_controller_attach_detach: bool = true;
        value "protectKernelDefaults" protect_kernel_defaults: bool = false;
        pointer "makeIPTablesUtilChains" make_iptables_util_chains: bool = true;
        pointer "iptablesMasqueradeBit" iptables_masquerade_bit: i32 = 14;
        pointer "iptablesDropBit" iptables_drop_bit: i32 = 15;
        value "featureGates" feature_gates: BTreeMap<String, bool> = BTreeMap::new();
        pointer "failSwapOn" fail_swap_on: bool = true;
        nested "memorySwap" memory_swap: MemorySwap = MemorySwap::default();
        value "containerLogMaxSize" container_log_max_size: String = "10Mi".into();
        pointer "containerLogMaxFiles" container_log_max_files: i32 = 5;
        pointer "containerLogMaxWorkers" container_log_max_workers: i32 = 1;
        pointer "containerLogMonitorInterval" container_log_monitor_interval: GoDuration = GoDuration::from_secs(10);
        value "configMapAndSecretChangeDetectionStrategy" config_map_and_secret_change_detection_strategy: String = "Watch".into();
        value "systemReserved" system_reserved: StringMap = StringMap::new();
        value "kubeReserved" kube_reserved: StringMap = StringMap::new();
        value "reservedSystemCPUs" reserved_system_cpus: String = String::new();
        value "showHiddenMetricsForVersion" show_hidden_metrics_for_version: String = String::new();
        value "systemReservedCgroup" system_reserved_cgroup: String = String::new();
        value "kubeReservedCgroup" kube_reserved_cgroup: String = String::new();
        list "enforceNodeAllocatable" enforce_node_allocatable: Vec<String> = vec!["pods".into()];
        value "allowedUnsafeSysctls" allowed_unsafe_sysctls: Vec<String> = Vec::new();
        value "volumePluginDir" volume_plugin_dir: String = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/".into();
        value "providerID" provider_id: String = String::new();
        value "kernelMemcgNotification" kernel_memcg_notification: bool = false;
        nested "logging" logging: Logging = Logging::default();
        pointer "enableSystemLogHandler" enable_system_log_handler: bool = true;
        pointer "enableSystemLogQuery" enable_system_log_query: bool = false;
        value "shutdownGracePeriod" shutdown_grace_period: GoDuration = GoDuration::default();
        value "shutdownGracePeriodCriticalPods" shutdown_grace_period_critical_pods: GoDuration = GoDuration::default();
        value "shutdownGracePeriodByPodPriority" shutdown_grace_period_by_pod_priority: Vec<ShutdownGracePeriodByPodPriority> = Vec::new();
        nested "crashLoopBackOff" crash_loop_back_off: CrashLoopBackOff = CrashLoopBackOff::default();
        value "reservedMemory" reserved_memory: Vec<MemoryReservation> = Vec::new();
        pointer "enableProfilingHandler" enable_profiling_handler: bool = true;
        pointer "enableDebugFlagsHandler" enable_debug_flags_handler: bool = true;
        pointer "seccompDefault" seccomp_default: bool = false;
        pointer "memoryThrottlingFactor" memory_throttling_factor: f64 = 0.9;
        value "memoryReservationPolicy" memory_reservation_policy: String = "None".into();
        value "registerWithTaints" register_with_taints: Vec<Taint> = Vec::new();
        pointer "registerNode" register_node: bool = true;
        pointer "tracing" tracing: Option<Tracing> = None;
        pointer "localStorageCapacityIsolation" local_storage_capacity_isolation: bool = true;
        value "containerRuntimeEndpoint" container_runtime_endpoint: String = "unix:///run/containerd/containerd.sock".into();
        value "imageServiceEndpoint" image_service_endpoint: String = String::new();
        pointer "failCgroupV1" fail_cgroup_v1: bool = true;
        pointer "userNamespaces" user_namespaces: Option<UserNamespaces> = None;
    }
}

section! {
    Authentication {
        nested "x509" x509: X509Authentication = X509Authentication::default();
        nested "webhook" webhook: WebhookAuthentication = WebhookAuthentication::default();
        nested "anonymous" anonymous: AnonymousAuthentication = AnonymousAuthentication::default();
    }
}

section! {
    X509Authentication {
        value "clientCAFile" client_ca_file: String = String::new();
    }
}

section! {
    WebhookAuthentication {
        pointer "enabled" enabled: bool = true;
        value "cacheTTL" cache_ttl: GoDuration = GoDuration::from_secs(120);
    }
}

section! {
    AnonymousAuthentication {
        pointer "enabled" enabled: bool = false;
    }
}

section! {
    Authorization {
        value "mode" mode: String = "Webhook".into();
        nested "webhook" webhook: WebhookAuthorization = WebhookAuthorization::default();
    }
}

section! {
    WebhookAuthorization {
        value "cacheAuthorizedTTL" cache_authorized_ttl: GoDuration = GoDuration::from_secs(300);
        value "cacheUnauthorizedTTL" cache_unauthorized_ttl: GoDuration = GoDuration::from_secs(30);
    }
}

section! {
    MemorySwap {
        value "swapBehavior" swap_behavior: String = String::new();
    }
}

section! {
    CrashLoopBackOff {
        pointer "maxContainerRestartPeriod" max_container_restart_period: Option<GoDuration> = None;
    }
}

section! {
    Logging {
        value "format" format: String = "text".into();
        value "flushFrequency" flush_frequency: FlushFrequency = FlushFrequency { duration: GoDuration::from_secs(5), form: FlushForm::Text };
        pointer "verbosity" verbosity: u32 = 0;
        value "vmodule" vmodule: Vec<VModule> = Vec::new();
        nested "options" options: LogOptions = LogOptions::default();
    }
}

section! {
    LogOptions {
        nested "text" text: LogRouting = LogRouting::default();
        nested "json" json: LogRouting = LogRouting::default();
    }
}

section! {
    LogRouting {
        value "splitStream" split_stream: bool = false;
        pointer "infoBufferSize" info_buffer_size: QuantityText = QuantityText::default();
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VModule {
    pub file_pattern: String,
    pub verbosity: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ShutdownGracePeriodByPodPriority {
    pub priority: i32,
    pub shutdown_grace_period_seconds: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryReservation {
    pub numa_node: i32,
    pub limits: BTreeMap<String, QuantityText>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Tracing {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling_rate_per_million: Option<i32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UserNamespaces {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids_per_pod: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_125_fields() {
        assert_eq!(KubeletConfiguration::FIELDS.len(), 125);
    }
}
