//! Validation of a complete configuration.
//!
//! Owns: upstream's rules with upstream's messages, each with its field. Never: changes a value.
//! Upstream: `apis/config/validation`. `testdata/validation.jsonl` has its results.

mod allocatable;
mod eviction;
mod images;
mod logging;
mod startup;

use super::{
    document::Mismatch,
    duration::GoDuration,
    gates::{Gate, Gates},
    names,
    types::KubeletConfiguration,
};

/// The facts about the machine that the rules need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    CgroupV1,
    CgroupV2,
}

pub(super) fn validate(config: &KubeletConfiguration, host: Host) -> Vec<Mismatch> {
    let gates = match Gates::resolve(&config.feature_gates) {
        Ok(gates) => gates,
        Err(refusals) => return refusals.into_iter().map(Mismatch::from).collect(),
    };
    let mut rules = Rules { config, gates: &gates, found: Vec::new() };
    rules.numbers();
    rules.ports();
    rules.image_collection();
    rules.pulls();
    rules.node();
    rules.choices();
    rules.shutdown();
    rules.crash_loop();
    rules.allocatable();
    rules.image_verification();
    rules.memory();
    rules.host(host);
    rules.logging();
    rules.tracing();
    rules.container_logs();
    rules.startup();
    rules.eviction();
    rules.reserved();
    rules.found
}

struct Rules<'a> {
    config: &'a KubeletConfiguration,
    gates: &'a Gates,
    found: Vec<Mismatch>,
}

impl Rules<'_> {
    fn refuse(&mut self, field: &str, message: impl Into<String>) {
        self.found.push(Mismatch { path: field.to_owned(), message: message.into() });
    }

    /// The prefix of most of upstream's messages.
    fn invalid(&mut self, field: &str, message: impl std::fmt::Display) {
        self.refuse(field, format!("invalid configuration: {message}"));
    }

    fn numbers(&mut self) {
        let config = self.config;
        let not_negative = [
            ("eventBurst", "event-burst", config.event_burst.into()),
            ("eventRecordQPS", "event-qps", config.event_record_qps.into()),
            ("kubeAPIBurst", "kube-api-burst", config.kube_api_burst.into()),
            ("kubeAPIQPS", "kube-api-qps", config.kube_api_qps.into()),
            ("maxOpenFiles", "max-open-files", config.max_open_files),
            ("maxPods", "max-pods", config.max_pods.into()),
            ("podsPerCore", "pods-per-core", config.pods_per_core.into()),
            ("registryBurst", "registry-burst", config.registry_burst.into()),
            ("registryPullQPS", "registry-qps", config.registry_pull_qps.into()),
        ];
        for (field, flag, value) in not_negative {
            if value < 0 {
                self.invalid(field, format!("{field} (--{flag}) {value} must not be a negative number"));
            }
        }
        let ranges = [
            ("imageGCHighThresholdPercent", "image-gc-high-threshold", config.image_gc_high_threshold_percent, 0, 100),
            ("imageGCLowThresholdPercent", "image-gc-low-threshold", config.image_gc_low_threshold_percent, 0, 100),
            ("iptablesDropBit", "iptables-drop-bit", config.iptables_drop_bit, 0, 31),
            ("iptablesMasqueradeBit", "iptables-masquerade-bit", config.iptables_masquerade_bit, 0, 31),
            ("oomScoreAdj", "oom-score-adj", config.oom_score_adj, -1000, 1000),
        ];
        for (field, flag, value, least, most) in ranges {
            if value < least || value > most {
                let allowed = format!("must be between {least} and {most}, inclusive");
                self.invalid(field, format!("{field} (--{flag}) {value} {allowed}"));
            }
        }
        if config.node_lease_duration_seconds <= 0 {
            self.invalid("nodeLeaseDurationSeconds", "nodeLeaseDurationSeconds must be greater than 0");
        }
        let images = config.node_status_max_images;
        if images < -1 {
            let flag = "--node-status-max-images";
            self.invalid("nodeStatusMaxImages", format!("nodeStatusMaxImages ({flag}) {images} must be -1 or greater"));
        }
        self.quota_period();
    }

    fn quota_period(&mut self) {
        let period = self.config.cpu_cfs_quota_period;
        let (default, least, most) =
            (GoDuration::from_millis(100), GoDuration::from_millis(1), GoDuration::from_secs(1));
        let wrong = match self.gates.enabled(Gate::CpuCfsQuotaPeriod) {
            false if period != default => "requires feature gate CustomCPUCFSQuotaPeriod",
            true if period < least || period > most => "must be between 1ms and 1sec, inclusive",
            true | false => return,
        };
        let name = "cpuCFSQuotaPeriod (--cpu-cfs-quota-period)";
        self.invalid("cpuCFSQuotaPeriod", format!("{name} {{{period}}} {wrong}"));
    }

    fn ports(&mut self) {
        let config = self.config;
        for (field, flag, port, least, may_be_off) in [
            ("healthzPort", "healthz-port", config.healthz_port, 1, true),
            ("port", "port", config.port, 1, false),
            ("readOnlyPort", "read-only-port", config.read_only_port, 0, true),
        ] {
            let is_off = may_be_off && port == 0;
            if !is_off && !(1..=65535).contains(&port) {
                self.invalid(field, format!("{field} (--{flag}) {port} must be between {least} and 65535, inclusive"));
            }
        }
    }

    fn image_collection(&mut self) {
        let config = self.config;
        let (low, high) = (config.image_gc_low_threshold_percent, config.image_gc_high_threshold_percent);
        if low >= high {
            let (low_name, high_name) = (
                "imageGCLowThresholdPercent (--image-gc-low-threshold)",
                "imageGCHighThresholdPercent (--image-gc-high-threshold)",
            );
            self.invalid(
                "imageGCLowThresholdPercent",
                format!("{low_name} {low} must be less than {high_name} {high}"),
            );
        }
        let (least, most, zero) = (config.image_minimum_gc_age, config.image_maximum_gc_age, GoDuration::default());
        if most != zero && !self.gates.enabled(Gate::ImageMaximumGcAge) {
            let gate = "ImageMaximumGCAge feature gate is required for Kubelet configuration option imageMaximumGCAge";
            self.invalid("imageMaximumGCAge", gate);
        }
        if least < zero {
            self.invalid("imageMinimumGCAge", format!("imageMinimumGCAge {least} must not be negative"));
        }
        if most < zero {
            self.invalid("imageMaximumGCAge", format!("imageMaximumGCAge {most} must not be negative"));
        }
        if most > zero && most <= least {
            let message = format!("imageMaximumGCAge {most} must be greater than imageMinimumGCAge {least}");
            self.invalid("imageMaximumGCAge", message);
        }
    }

    fn pulls(&mut self) {
        let Some(most) = self.config.max_parallel_image_pulls else { return };
        if most < 1 {
            self.invalid("maxParallelImagePulls", format!("maxParallelImagePulls {most} must be a positive number"));
        }
        if most > 1 && self.config.serialize_image_pulls {
            let unless = "unless SerializeImagePulls (--serialize-image-pulls) is set to false";
            self.invalid("maxParallelImagePulls", format!("maxParallelImagePulls cannot be larger than 1 {unless}"));
        }
    }

    fn node(&mut self) {
        let config = self.config;
        if !config.system_cgroups.is_empty() && config.cgroup_root.is_empty() {
            let missing = "was specified and cgroupRoot (--cgroup-root) was not specified";
            self.invalid("systemCgroups", format!("systemCgroups (--system-cgroups) {missing}"));
        }
        if config.server_tls_bootstrap && !self.gates.enabled(Gate::RotateKubeletServerCertificate) {
            let gate = "requires feature gate RotateKubeletServerCertificate";
            self.invalid("serverTLSBootstrap", format!("serverTLSBootstrap true {gate}"));
        }
        if config.run_once {
            let message = "runOnce (--runOnce) true, Runonce mode has been deprecated and should not be set";
            self.invalid("runOnce", message);
        }
        for taint in &config.register_with_taints {
            let value = taint.value.as_deref().unwrap_or_default();
            let effect_known = ["", "NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&taint.effect.as_str());
            if !names::qualified(&taint.key).is_empty() || !names::label_value(value).is_empty() || !effect_known {
                let added = taint.time_added.as_ref().map_or("<nil>".to_owned(), |time| time.0.to_string());
                let shown = format!("{{{} {value} {} {added}}}", taint.key, taint.effect);
                self.refuse("registerWithTaints", format!("invalid taint: {shown}"));
            }
            if taint.time_added.is_some() {
                self.invalid("registerWithTaints", "taint.TimeAdded is not nil");
            }
        }
        if config.enable_system_log_query && !self.gates.enabled(Gate::NodeLogQuery) {
            let message = "NodeLogQuery feature gate is required for enableSystemLogQuery";
            self.invalid("enableSystemLogQuery", message);
        }
        if config.enable_system_log_query && !config.enable_system_log_handler {
            self.invalid("enableSystemLogQuery", "enableSystemLogHandler is required for enableSystemLogQuery");
        }
        if config.container_runtime_endpoint.is_empty() {
            let message = "the containerRuntimeEndpoint was not specified or empty";
            self.invalid("containerRuntimeEndpoint", message);
        }
    }

    fn choices(&mut self) {
        let config = self.config;
        let policy = config.topology_manager_policy.as_str();
        if !["none", "best-effort", "restricted", "single-numa-node"].contains(&policy) {
            let allowed = r#"must be one of: ["none" "best-effort" "restricted" "single-numa-node"]"#;
            let name = "topologyManagerPolicy (--topology-manager-policy)";
            self.invalid("topologyManagerPolicy", format!("{name} {policy:?} {allowed}"));
        }
        let scope = config.topology_manager_scope.as_str();
        if !["container", "pod"].contains(&scope) {
            let allowed = r#"must be one of: "container", or "pod""#;
            let name = "topologyManagerScope (--topology-manager-scope)";
            self.invalid("topologyManagerScope", format!("{name} {scope:?} {allowed}"));
        }
        let mode = config.hairpin_mode.as_str();
        if !["none", "hairpin-veth", "promiscuous-bridge"].contains(&mode) {
            let allowed = r#"Valid options are "none", "hairpin-veth" or "promiscuous-bridge""#;
            let name = "hairpinMode (--hairpin-mode)";
            self.invalid("hairpinMode", format!("option {mode:?} specified for {name}. {allowed}"));
        }
        let behavior = config.memory_swap.swap_behavior.as_str();
        if !self.gates.enabled(Gate::NodeSwap) {
            if !behavior.is_empty() {
                let message = "memorySwap.swapBehavior cannot be set when NodeSwap feature flag is disabled";
                self.invalid("memorySwap.swapBehavior", message);
            }
        } else if !["", "LimitedSwap", "NoSwap"].contains(&behavior) {
            let allowed = r#"must be one of: "", "LimitedSwap" or "NoSwap""#;
            let message = format!("memorySwap.swapBehavior {behavior:?} {allowed}");
            self.invalid("memorySwap.swapBehavior", message);
        }
    }

    fn shutdown(&mut self) {
        let config = self.config;
        let (all, critical) = (config.shutdown_grace_period, config.shutdown_grace_period_critical_pods);
        let zero = GoDuration::default();
        if self.gates.enabled(Gate::GracefulNodeShutdown) {
            if critical > all {
                let name = "shutdownGracePeriodCriticalPods";
                self.invalid(name, format!("{name} {{{critical}}} must be <= shutdownGracePeriod {{{all}}}"));
            }
            for (name, period) in [("shutdownGracePeriod", all), ("shutdownGracePeriodCriticalPods", critical)] {
                if period != zero && period < GoDuration::from_secs(1) {
                    let message = format!("{name} {{{period}}} must be either zero or otherwise >= 1 sec");
                    self.invalid(name, message);
                }
            }
        } else if all > zero || critical > zero {
            let names = "shutdownGracePeriod or shutdownGracePeriodCriticalPods";
            let message = format!("specifying {names} requires feature gate GracefulNodeShutdown");
            self.invalid("shutdownGracePeriod", message);
        }
        let name = "shutdownGracePeriodByPodPriority";
        if config.shutdown_grace_period_by_pod_priority.is_empty() {
            return;
        }
        if !self.gates.enabled(Gate::GracefulNodeShutdownBasedOnPodPriority) {
            let gate = "requires feature gate GracefulNodeShutdownBasedOnPodPriority";
            self.invalid(name, format!("Specifying {name} {gate}"));
        } else if all > zero || critical > zero {
            self.invalid(name, format!("Cannot specify both {name} and shutdownGracePeriod at the same time"));
        }
    }

    fn crash_loop(&mut self) {
        const FIELD: &str = "crashLoopBackOff.maxContainerRestartPeriod";
        const NAME: &str = "CrashLoopBackOff.MaxContainerRestartPeriod";
        let period = self.config.crash_loop_back_off.max_container_restart_period;
        match (self.gates.enabled(Gate::KubeletCrashLoopBackOffMax), period) {
            (true, None) => {
                let message = format!("FeatureGate KubeletCrashLoopBackOffMax is enabled, {NAME} must be set");
                self.invalid(FIELD, message);
            }
            (true, Some(period)) if !(1000..=300_000).contains(&period.as_millis()) => {
                let got = period.as_secs_f64();
                self.invalid(FIELD, format!("{NAME} (got: {got} seconds) must be set between 1s and 300s"));
            }
            (false, Some(_)) => {
                let message = format!("FeatureGate KubeletCrashLoopBackOffMax not enabled, {NAME} must not be set");
                self.invalid(FIELD, message);
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    fn host(&mut self, host: Host) {
        let config = self.config;
        if host == Host::CgroupV1 && config.fail_cgroup_v1 {
            let unsupported = "cgroup v1 support is unsupported and will be removed in a future release";
            let message = format!("kubelet is configured to not run on a host using cgroup v1. {unsupported}");
            self.refuse("failCgroupV1", message);
            return;
        }
        if host == Host::CgroupV1 && config.single_process_oom_kill == Some(false) {
            let when = "must not be explicitly set to false when using cgroup v1";
            self.invalid("singleProcessOOMKill", format!("singleProcessOOMKill {when}"));
            return;
        }
        const UNIT: i64 = 65536;
        let Some(ids) = config.user_namespaces.as_ref().and_then(|namespaces| namespaces.ids_per_pod) else { return };
        let allowed = if ids < UNIT {
            format!("must not be less than {UNIT}")
        } else if ids % UNIT != 0 {
            format!("must be a multiple of {UNIT}")
        } else if ids > u32::MAX.into() {
            format!("must not be more than {}", u32::MAX)
        } else {
            return;
        };
        self.invalid("userNamespaces.idsPerPod", format!("userNamespaces.idsPerPod {allowed}"));
    }

    fn container_logs(&mut self) {
        let config = self.config;
        if config.container_log_max_workers < 1 {
            let message = "containerLogMaxWorkers must be greater than or equal to 1";
            self.invalid("containerLogMaxWorkers", message);
        }
        if config.container_log_monitor_interval < GoDuration::from_secs(3) {
            let allowed = "must be a positive time duration greater than or equal to 3s";
            self.invalid("containerLogMonitorInterval", format!("containerLogMonitorInterval {allowed}"));
        }
        if config.container_log_max_files <= 1 {
            self.invalid("containerLogMaxFiles", "containerLogMaxFiles must be greater than 1");
        }
        let dir = config.pod_logs_dir.as_str();
        if dir.is_empty() {
            self.invalid("podLogsDir", "podLogsDir was not specified");
        }
        if !dir.starts_with('/') {
            self.invalid("podLogsDir", format!("pod logs path {dir:?} must be absolute path"));
        }
        if !is_clean(dir) {
            self.invalid("podLogsDir", format!("pod logs path {dir:?} must be normalized"));
        }
        if !dir.is_ascii() {
            // The spelling is upstream's.
            self.invalid("podLogsDir", format!("pod logs path {dir:?} mut contains ASCII characters only"));
        }
    }
}

/// Go's `filepath.Clean` would leave it as it is.
fn is_clean(path: &str) -> bool {
    match path {
        "/" | "." => true,
        "" => false,
        _ => {
            let relative = path.strip_prefix('/').unwrap_or(path);
            let parts: Vec<&str> = relative.split('/').collect();
            let leading_parents =
                if path.starts_with('/') { 0 } else { parts.iter().take_while(|part| **part == "..").count() };
            parts[leading_parents..].iter().all(|part| !["", ".", ".."].contains(part))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{super::complete::Draft, *};

    /// Upstream's results: a configuration as given, and all errors of its validation, on a host with cgroup v1.
    const UPSTREAM: &str = include_str!("../../testdata/validation.jsonl");

    #[test]
    fn every_rule_answers_as_upstream_does() {
        for line in UPSTREAM.lines() {
            let case: Value = serde_json::from_str(line).unwrap();
            let mut document = case["given"].clone();
            document["apiVersion"] = json!("kubelet.config.k8s.io/v1beta1");
            document["kind"] = json!("KubeletConfiguration");
            let mut config = Draft::from_file("/k/config".as_ref(), &document, &[].into()).unwrap().config;
            // Upstream's results are for values as given; a relative path is made absolute only where files are read.
            if let Some(dir) = case["given"]["podLogsDir"].as_str() {
                dir.clone_into(&mut config.pod_logs_dir);
            }
            let mut found: Vec<String> = validate(&config, Host::CgroupV1).into_iter().map(|m| m.message).collect();
            found.sort();
            assert_eq!(json!(found), case["errors"], "{}", case["given"]);
        }
        assert!(UPSTREAM.lines().count() > 150, "upstream's answers are there");
    }

    #[test]
    fn every_mismatch_names_a_field_that_exists() {
        let fields = serde_json::to_value(KubeletConfiguration::default()).unwrap();
        for line in UPSTREAM.lines() {
            let case: Value = serde_json::from_str(line).unwrap();
            let config = serde_json::from_value(case["given"].clone()).unwrap();
            for mismatch in validate(&config, Host::CgroupV2) {
                let top = mismatch.path.split(['.', '[']).next().unwrap();
                assert!(fields.get(top).is_some(), "{mismatch:?}");
            }
        }
    }

    #[test]
    fn clean_path_is_unchanged_by_go() {
        for (path, clean) in [
            ("/", true),
            ("/a/b", true),
            ("a", true),
            ("../a", true),
            ("../../a", true),
            ("", false),
            ("/../a", false),
            ("/a/", false),
            ("/a/./b", false),
            ("a/..", false),
        ] {
            assert_eq!(is_clean(path), clean, "{path}");
        }
    }
}
