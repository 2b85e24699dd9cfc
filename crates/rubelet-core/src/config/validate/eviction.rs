//! Rules about eviction thresholds and reservations, whose values have their own syntax.
//!
//! Upstream checks them only while it starts, one error at a time: `eviction.ParseThresholdConfig`, `parseResourceList`, `cm.ParseQOSReserved`.

use std::collections::BTreeMap;

use super::Rules;
use crate::{config::duration::GoDuration, quantity::Quantity};

const SIGNALS: &[&str] = &[
    "allocatableMemory.available",
    "containerfs.available",
    "containerfs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "pid.available",
];

type Check = fn(&str, &str) -> Result<(), String>;

impl Rules<'_> {
    pub(super) fn eviction(&mut self) {
        let config = self.config;
        let by_signal: [(&str, &BTreeMap<String, String>, Check); 4] = [
            ("evictionHard", &config.eviction_hard, threshold),
            ("evictionSoft", &config.eviction_soft, threshold),
            ("evictionSoftGracePeriod", &config.eviction_soft_grace_period, grace_period),
            ("evictionMinimumReclaim", &config.eviction_minimum_reclaim, minimum_reclaim),
        ];
        for (field, values, check) in by_signal {
            for (signal, value) in values {
                if !SIGNALS.contains(&signal.as_str()) {
                    let allowed = SIGNALS.join(", ");
                    self.refuse(field, format!("unsupported eviction signal {signal}, allowed are {allowed}"));
                } else if let Err(error) = check(signal, value) {
                    self.refuse(field, format!("{signal}: {error}"));
                }
            }
        }
        let is_ignored = |threshold: &str| ["0%", "100%"].contains(&threshold);
        for (signal, threshold) in &config.eviction_soft {
            if !is_ignored(threshold) && !config.eviction_soft_grace_period.contains_key(signal) {
                let message = format!("grace period must be specified for the soft eviction threshold {signal}");
                self.refuse("evictionSoft", message);
            }
        }
    }

    pub(super) fn reserved(&mut self) {
        let config = self.config;
        let by_resource: [(&str, &BTreeMap<String, String>, Check); 3] = [
            ("systemReserved", &config.system_reserved, reserved),
            ("kubeReserved", &config.kube_reserved, reserved),
            ("qosReserved", &config.qos_reserved, share),
        ];
        for (field, values, check) in by_resource {
            for (resource, value) in values {
                if let Err(error) = check(resource, value) {
                    self.refuse(field, error);
                }
            }
        }
        let size = config.container_log_max_size.as_str();
        if let Err(error) = Quantity::parse(size) {
            self.invalid("containerLogMaxSize", format!("containerLogMaxSize {size:?}: {error}"));
        }
    }
}

fn threshold(signal: &str, value: &str) -> Result<(), String> {
    if let Some(percent) = value.strip_suffix('%') {
        let percent = percent_of(percent)?;
        let wrong = if percent < 0.0 {
            ">= 0%"
        } else if percent > 100.0 {
            "<= 100%"
        } else {
            return Ok(());
        };
        return Err(format!("eviction percentage threshold {signal} must be {wrong}: {value}"));
    }
    let amount = Quantity::parse(value).map_err(|error| error.to_string())?;
    if amount.is_positive() { Ok(()) } else { Err(format!("eviction threshold {signal} must be positive: {value}")) }
}

fn grace_period(_signal: &str, value: &str) -> Result<(), String> {
    if value.parse::<GoDuration>()? < GoDuration::default() {
        return Err(format!("invalid eviction grace period specified: {value}, must be a positive value"));
    }
    Ok(())
}

fn minimum_reclaim(signal: &str, value: &str) -> Result<(), String> {
    if let Some(percent) = value.strip_suffix('%') {
        let is_positive = percent_of(percent)? > 0.0;
        let wrong = || format!("eviction percentage minimum reclaim {signal} must be positive: {value}");
        return if is_positive { Ok(()) } else { Err(wrong()) };
    }
    let amount = Quantity::parse(value).map_err(|error| error.to_string())?;
    let is_negative = !amount.is_zero() && !amount.is_positive();
    if is_negative { Err(format!("negative eviction minimum reclaim specified for {signal}")) } else { Ok(()) }
}

fn reserved(resource: &str, value: &str) -> Result<(), String> {
    if !["cpu", "memory", "ephemeral-storage", "pid"].contains(&resource) {
        return Err(format!("cannot reserve {resource:?} resource, only cpu, memory, ephemeral-storage and pid"));
    }
    let amount = Quantity::parse(value)
        .map_err(|error| format!("failed to parse quantity {value:?} for {resource:?} resource: {error}"))?;
    let is_negative = !amount.is_zero() && !amount.is_positive();
    if is_negative {
        return Err(format!("resource quantity for {resource:?} cannot be negative: {value}"));
    }
    Ok(())
}

fn share(resource: &str, value: &str) -> Result<(), String> {
    if resource != "memory" {
        return Err(format!("cannot reserve {resource:?} resource, only memory"));
    }
    let wrong = |why: String| format!("failed to parse percentage {value:?} for {resource:?} resource: {why}");
    let number = value.strip_suffix('%').ok_or_else(|| wrong(format!("percentage expected, got '{value}'")))?;
    let percent: i64 = number.parse().map_err(|_| wrong(format!("invalid number in percentage '{value}'")))?;
    if (0..=100).contains(&percent) { Ok(()) } else { Err(wrong("percentage must be between 0 and 100".to_owned())) }
}

fn percent_of(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| format!("strconv.ParseFloat: parsing {text:?}: invalid syntax"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Host, validate};
    use crate::config::{API_VERSION, Draft, KIND};

    fn refused(mut given: Value) -> String {
        given["apiVersion"] = json!(API_VERSION);
        given["kind"] = json!(KIND);
        let config = Draft::from_file("/c".as_ref(), &given, &[].into()).unwrap().config;
        let found = validate(&config, Host::CgroupV2).into_iter();
        found.map(|mismatch| format!("{}: {}", mismatch.path, mismatch.message)).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn thresholds_that_make_sense_are_taken() {
        assert_eq!(
            refused(json!({
                "evictionHard": {"memory.available": "100Mi", "nodefs.available": "10%", "pid.available": "0%", "imagefs.inodesFree": "2.5%"},
                "evictionSoft": {"memory.available": "1Gi", "nodefs.available": "0%"},
                "evictionSoftGracePeriod": {"memory.available": "1m30s"},
                "evictionMinimumReclaim": {"memory.available": "0", "nodefs.available": "5%"},
                "systemReserved": {"cpu": "200m", "memory": "0", "pid": "1000"}, "qosReserved": {"memory": "50%"},
            })),
            ""
        );
    }

    #[test]
    fn thresholds_that_make_none_are_all_named() {
        let refused = refused(json!({
            "evictionHard": {"memory.available": "-1", "nodefs.available": "101%", "pid.available": "x", "disk": "1"},
            "evictionSoft": {"imagefs.available": "x%", "memory.available": "1Gi"},
            "evictionSoftGracePeriod": {"imagefs.available": "-1s", "nodefs.available": "5"},
            "evictionMinimumReclaim": {"memory.available": "-1", "nodefs.available": "0%"},
            "systemReserved": {"disk": "1", "cpu": "-1"}, "kubeReserved": {"memory": "1mb"},
            "qosReserved": {"memory": "50", "cpu": "1%"}, "containerLogMaxSize": "10MB",
        }));
        insta::assert_snapshot!(refused, @r#"
        evictionHard: unsupported eviction signal disk, allowed are allocatableMemory.available, containerfs.available, containerfs.inodesFree, imagefs.available, imagefs.inodesFree, memory.available, nodefs.available, nodefs.inodesFree, pid.available
        evictionHard: memory.available: eviction threshold memory.available must be positive: -1
        evictionHard: nodefs.available: eviction percentage threshold nodefs.available must be <= 100%: 101%
        evictionHard: pid.available: quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'
        evictionSoft: imagefs.available: strconv.ParseFloat: parsing "x": invalid syntax
        evictionSoftGracePeriod: imagefs.available: invalid eviction grace period specified: -1s, must be a positive value
        evictionSoftGracePeriod: nodefs.available: time: missing unit in duration "5"
        evictionMinimumReclaim: memory.available: negative eviction minimum reclaim specified for memory.available
        evictionMinimumReclaim: nodefs.available: eviction percentage minimum reclaim nodefs.available must be positive: 0%
        evictionSoft: grace period must be specified for the soft eviction threshold memory.available
        systemReserved: resource quantity for "cpu" cannot be negative: -1
        systemReserved: cannot reserve "disk" resource, only cpu, memory, ephemeral-storage and pid
        kubeReserved: failed to parse quantity "1mb" for "memory" resource: quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'
        qosReserved: cannot reserve "cpu" resource, only memory
        qosReserved: failed to parse percentage "50" for "memory" resource: percentage expected, got '50'
        containerLogMaxSize: invalid configuration: containerLogMaxSize "10MB": quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'
        "#);
    }
}
