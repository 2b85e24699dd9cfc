//! Which settings take effect, and which are only accepted.
//!
//! Owns: the two lists. A change that makes a setting take effect adds it here.

use rubelet_core::config::{self, KubeletConfiguration};

/// Fields of KubeletConfiguration, sorted.
pub const ACTED_ON: &[&str] = &[
    "address",
    "allowedUnsafeSysctls",
    "authentication",
    "authorization",
    "cgroupDriver",
    "cgroupRoot",
    "cgroupsPerQOS",
    "clusterDNS",
    "clusterDomain",
    "configMapAndSecretChangeDetectionStrategy",
    "containerLogMaxFiles",
    "containerLogMaxSize",
    "containerLogMaxWorkers",
    "containerLogMonitorInterval",
    "containerRuntimeEndpoint",
    "cpuCFSQuota",
    "cpuCFSQuotaPeriod",
    "crashLoopBackOff",
    "enableControllerAttachDetach",
    "enableDebugFlagsHandler",
    "enableDebuggingHandlers",
    "enableSystemLogHandler",
    "enableSystemLogQuery",
    "enforceNodeAllocatable",
    "eventBurst",
    "eventRecordQPS",
    "evictionHard",
    "evictionMaxPodGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "failCgroupV1",
    "failSwapOn",
    "featureGates",
    "fileCheckFrequency",
    "healthzBindAddress",
    "healthzPort",
    "httpCheckFrequency",
    "imageGCHighThresholdPercent",
    "imageGCLowThresholdPercent",
    "imageMaximumGCAge",
    "imageMinimumGCAge",
    "imageServiceEndpoint",
    "kubeAPIBurst",
    "kubeAPIQPS",
    "kubeReserved",
    "kubeReservedCgroup",
    "localStorageCapacityIsolation",
    "logging",
    "maxOpenFiles",
    "maxParallelImagePulls",
    "maxPods",
    "memoryReservationPolicy",
    "memorySwap",
    "memoryThrottlingFactor",
    "mergeDefaultEvictionSettings",
    "nodeLeaseDurationSeconds",
    "nodeStatusMaxImages",
    "nodeStatusReportFrequency",
    "nodeStatusUpdateFrequency",
    "oomScoreAdj",
    "podLogsDir",
    "podPidsLimit",
    "podsPerCore",
    "port",
    "protectKernelDefaults",
    "providerID",
    "qosReserved",
    "readOnlyPort",
    "registerNode",
    "registerWithTaints",
    "registryBurst",
    "registryPullQPS",
    "resolvConf",
    "rotateCertificates",
    "runtimeRequestTimeout",
    "seccompDefault",
    "serializeImagePulls",
    "serverTLSBootstrap",
    "shutdownGracePeriod",
    "shutdownGracePeriodByPodPriority",
    "shutdownGracePeriodCriticalPods",
    "singleProcessOOMKill",
    "staticPodPath",
    "staticPodURL",
    "staticPodURLHeader",
    "syncFrequency",
    "systemReserved",
    "systemReservedCgroup",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsCurvePreferences",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
    "volumePluginDir",
    "volumeStatsAggPeriod",
];

/// Flags that are no field of KubeletConfiguration, sorted.
pub const ACTED_ON_FLAGS: &[&str] = &[
    "bootstrap-kubeconfig",
    "cert-dir",
    "cloud-provider",
    "config",
    "config-dir",
    "experimental-allocatable-ignore-eviction",
    "hostname-override",
    "kubeconfig",
    "maximum-dead-containers",
    "maximum-dead-containers-per-container",
    "minimum-container-ttl-duration",
    "node-ip",
    "node-labels",
    "root-dir",
    "rubelet-exec-needs-create",
    "runtime-cgroups",
    "seccomp-default",
];

/// Fields that differ from `default` and have no effect yet.
pub fn not_acted_on(config: &KubeletConfiguration, default: &KubeletConfiguration) -> Vec<String> {
    let (config, default) = (config::shown(config), config::shown(default));
    let fields = config.as_object().into_iter().chain(default.as_object()).flat_map(|fields| fields.keys());
    let mut names: Vec<String> = fields
        .filter(|name| !ACTED_ON.contains(&name.as_str()) && config.get(name) != default.get(name))
        .cloned()
        .collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use rubelet_core::config::Draft;

    use super::*;

    #[test]
    fn only_fields_that_were_changed_are_named() {
        let default = Draft::without_file().config;
        let mut config = default.clone();
        assert_eq!(not_acted_on(&config, &default), <[String; 0]>::default());
        config.oom_score_adj = 5;
        config.hairpin_mode = "none".to_owned();
        config.sync_frequency = rubelet_core::config::GoDuration::from_secs(1);
        config.tls_curve_preferences = vec![29];
        assert_eq!(not_acted_on(&config, &default), ["hairpinMode"]);
    }

    #[test]
    fn every_listed_field_exists() {
        assert!(ACTED_ON.is_sorted() && ACTED_ON_FLAGS.is_sorted());
        let fields = serde_json::to_value(KubeletConfiguration::default()).unwrap();
        for name in ACTED_ON {
            assert!(fields.get(name).is_some(), "{name}");
        }
        for name in ACTED_ON_FLAGS {
            assert!(crate::cli::flags::by_name(name).is_some(), "{name}");
        }
    }
    #[test]
    fn the_parity_page_lists_the_same_fields_and_flags() {
        let page = include_str!("../../../../docs/parity.md");
        let listed = |heading: &str| -> Vec<&str> {
            let (_, rest) = page.split_once(heading).expect("the page has this list");
            rest.lines().next().unwrap_or_default().split('`').skip(1).step_by(2).collect()
        };
        assert_eq!(listed("**Acted on:**"), ACTED_ON);
        let flags: Vec<&str> =
            listed("Flags that are no field:").into_iter().filter_map(|flag| flag.strip_prefix("--")).collect();
        assert_eq!(flags, ACTED_ON_FLAGS);
        let fields = serde_json::to_value(KubeletConfiguration::default()).unwrap();
        let names = fields.as_object().unwrap().keys().map(String::as_str);
        let others: Vec<&str> = names.filter(|name| !ACTED_ON.contains(name)).collect();
        assert_eq!(listed("(a value other than the default is warned of at start):"), others);
    }
}
