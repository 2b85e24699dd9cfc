//! Rules that upstream checks only while it starts; here they are checked with the others.
//!
//! Upstream: `cmd/kubelet/app/server.go` (run), `eviction.ParseThresholdConfig`, the constructors of the managers.

use super::Rules;

impl Rules<'_> {
    pub(super) fn startup(&mut self) {
        let config = self.config;
        let choices: [(&str, &str, &[&str]); 6] = [
            ("authorization.mode", &config.authorization.mode, &["AlwaysAllow", "Webhook"]),
            ("cgroupDriver", &config.cgroup_driver, &["cgroupfs", "systemd"]),
            (
                "configMapAndSecretChangeDetectionStrategy",
                &config.config_map_and_secret_change_detection_strategy,
                &["Get", "Cache", "Watch"],
            ),
            ("cpuManagerPolicy", &config.cpu_manager_policy, &["none", "static"]),
            ("memoryManagerPolicy", &config.memory_manager_policy, &["None", "Static"]),
            (
                "tlsMinVersion",
                &config.tls_min_version,
                &["", "VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"],
            ),
        ];
        for (field, value, allowed) in choices {
            if !allowed.contains(&value) {
                self.invalid(field, format!("{field} {value:?} must be one of {allowed:?}"));
            }
        }
    }
}
