//! Eviction signals and thresholds.
//!
//! Owns: which signal means which resource and node condition, the values of thresholds, and when one is met.
//! Never: measures, remembers.
//! Upstream: `eviction/api/types.go`, `ParseThresholdConfig`, `thresholdsMet` of `eviction/helpers.go`.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{config::GoDuration, quantity::Quantity};

/// What is measured. Upstream's `containerfs.*` follow, whatever is configured, the thresholds and the file system of `nodefs.*`
/// or `imagefs.*`, so they are not evaluated twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Signal {
    #[serde(rename = "memory.available")]
    MemoryAvailable,
    /// Within the limit of all pods together.
    #[serde(rename = "allocatableMemory.available")]
    AllocatableMemoryAvailable,
    #[serde(rename = "nodefs.available")]
    NodeFsAvailable,
    #[serde(rename = "nodefs.inodesFree")]
    NodeFsInodesFree,
    #[serde(rename = "imagefs.available")]
    ImageFsAvailable,
    #[serde(rename = "imagefs.inodesFree")]
    ImageFsInodesFree,
    #[serde(rename = "pid.available")]
    PidAvailable,
}

/// What the node is low on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Resource {
    Memory,
    EphemeralStorage,
    Inodes,
    Pids,
}

/// A condition of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Pressure {
    Memory,
    Disk,
    Pid,
}

impl Signal {
    const ALL: [Signal; 7] = [
        Signal::MemoryAvailable,
        Signal::AllocatableMemoryAvailable,
        Signal::NodeFsAvailable,
        Signal::NodeFsInodesFree,
        Signal::ImageFsAvailable,
        Signal::ImageFsInodesFree,
        Signal::PidAvailable,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Signal::MemoryAvailable => "memory.available",
            Signal::AllocatableMemoryAvailable => "allocatableMemory.available",
            Signal::NodeFsAvailable => "nodefs.available",
            Signal::NodeFsInodesFree => "nodefs.inodesFree",
            Signal::ImageFsAvailable => "imagefs.available",
            Signal::ImageFsInodesFree => "imagefs.inodesFree",
            Signal::PidAvailable => "pid.available",
        }
    }

    fn parse(name: &str) -> Option<Signal> {
        Signal::ALL.into_iter().find(|signal| signal.name() == name)
    }

    pub fn resource(self) -> Resource {
        match self {
            Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable => Resource::Memory,
            Signal::NodeFsAvailable | Signal::ImageFsAvailable => Resource::EphemeralStorage,
            Signal::NodeFsInodesFree | Signal::ImageFsInodesFree => Resource::Inodes,
            Signal::PidAvailable => Resource::Pids,
        }
    }

    pub fn pressure(self) -> Pressure {
        match self.resource() {
            Resource::Memory => Pressure::Memory,
            Resource::EphemeralStorage | Resource::Inodes => Pressure::Disk,
            Resource::Pids => Pressure::Pid,
        }
    }

    /// How much of it pods may use up in a second, however quiet they were: the next look comes before the threshold can be
    /// crossed by more than this.
    pub(super) fn fastest_per_sec(self) -> u64 {
        match self.resource() {
            Resource::Memory => 1 << 30,
            Resource::EphemeralStorage => 512 << 20,
            Resource::Inodes => 50_000,
            Resource::Pids => 5_000,
        }
    }
}

impl Resource {
    /// As messages name it.
    pub fn name(self) -> &'static str {
        match self {
            Resource::Memory => "memory",
            Resource::EphemeralStorage => "ephemeral-storage",
            Resource::Inodes => "inodes",
            Resource::Pids => "pids",
        }
    }

    /// An amount of it: bytes in binary units, others in decimal ones.
    pub fn text(self, amount: u64) -> String {
        let quantity = Quantity::from_units(i64::try_from(amount).unwrap_or(i64::MAX));
        match self {
            Resource::Memory | Resource::EphemeralStorage => quantity.binary_text().0,
            Resource::Inodes | Resource::Pids => quantity.decimal_text().0,
        }
    }
}

impl Pressure {
    pub const ALL: [Pressure; 3] = [Pressure::Memory, Pressure::Disk, Pressure::Pid];

    /// The type of the node condition.
    pub fn condition(self) -> &'static str {
        match self {
            Pressure::Memory => "MemoryPressure",
            Pressure::Disk => "DiskPressure",
            Pressure::Pid => "PIDPressure",
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An amount, or a share of the capacity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ThresholdValue {
    /// With its text in canonical form.
    Quantity(u64, String),
    /// Between 0 and 1. Upstream keeps it in 32 bits, which shows in the result.
    Percentage(f32),
}

impl ThresholdValue {
    /// Of a validated configuration. `0%` and `100%` are none.
    fn parse(text: &str) -> Option<ThresholdValue> {
        if let Some(percentage) = text.strip_suffix('%') {
            let percentage: f32 = percentage.parse().ok()?;
            let is_ignored = ["0%", "100%"].contains(&text);
            return (!is_ignored).then_some(ThresholdValue::Percentage(percentage / 100.0));
        }
        let quantity = Quantity::parse(text).ok()?;
        let canonical = if text.ends_with('i') { quantity.binary_text() } else { quantity.decimal_text() };
        Some(ThresholdValue::Quantity(u64::try_from(quantity.value()).ok()?, canonical.0))
    }

    pub fn amount(&self, capacity: u64) -> u64 {
        match self {
            ThresholdValue::Quantity(amount, _) => *amount,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_precision_loss,
                clippy::cast_sign_loss,
                reason = "as upstream computes it"
            )]
            ThresholdValue::Percentage(share) => (capacity as f64 * f64::from(*share)) as u64,
        }
    }

    /// Of a capacity that may not be known.
    pub(super) fn known_amount(&self, capacity: Option<u64>) -> Option<u64> {
        match self {
            ThresholdValue::Quantity(amount, _) => Some(*amount),
            ThresholdValue::Percentage(_) => capacity.map(|capacity| self.amount(capacity)),
        }
    }

    /// `100Mi`, `10%`, `2.5%`.
    pub(super) fn configured_text(&self) -> String {
        match self {
            ThresholdValue::Quantity(_, text) => text.clone(),
            ThresholdValue::Percentage(share) => {
                let percent = format!("{:.2}", share * 100.0);
                format!("{}%", percent.trim_end_matches('0').trim_end_matches('.'))
            }
        }
    }

    pub fn text(&self, capacity: u64) -> String {
        match self {
            ThresholdValue::Quantity(_, text) => text.clone(),
            // Upstream has binary units for all of them.
            ThresholdValue::Percentage(_) => {
                Quantity::from_units(i64::try_from(self.amount(capacity)).unwrap_or(i64::MAX)).binary_text().0
            }
        }
    }
}

/// Met while less than the value is available.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Threshold {
    pub signal: Signal,
    pub value: ThresholdValue,
    /// How much more must be available before it is no longer met.
    pub min_reclaim: Option<ThresholdValue>,
    /// How long it must be met before pods are evicted; zero is a hard threshold.
    pub grace: Duration,
}

impl Threshold {
    pub fn is_hard(&self) -> bool {
        self.grace.is_zero()
    }
}

/// A measured signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    pub available: u64,
    pub capacity: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reclaim {
    Ignored,
    Enforced,
}

impl Threshold {
    pub(super) fn is_met(&self, observed: Observation, reclaim: Reclaim) -> bool {
        let more = match reclaim {
            Reclaim::Ignored => 0,
            Reclaim::Enforced => self.min_reclaim.as_ref().map_or(0, |value| value.amount(observed.capacity)),
        };
        observed.available < self.value.amount(observed.capacity).saturating_add(more)
    }
}

/// The fields of KubeletConfiguration, validated.
#[derive(Clone, Copy, Debug)]
pub struct ThresholdConfig<'a> {
    pub hard: &'a BTreeMap<String, String>,
    pub soft: &'a BTreeMap<String, String>,
    pub soft_grace_periods: &'a BTreeMap<String, String>,
    pub minimum_reclaim: &'a BTreeMap<String, String>,
    /// The limit of all pods together is enforced: each hard threshold of memory holds within it, too.
    pub enforces_pods: bool,
}

impl ThresholdConfig<'_> {
    pub fn thresholds(self) -> Vec<Threshold> {
        let min_reclaim = |name: &str| self.minimum_reclaim.get(name).and_then(|text| ThresholdValue::parse(text));
        let of = |name: &String, text: &String, grace: Duration| {
            let (signal, value) = (Signal::parse(name)?, ThresholdValue::parse(text)?);
            Some(Threshold { signal, value, min_reclaim: min_reclaim(name), grace })
        };
        let grace_of = |name: &str| {
            let text = self.soft_grace_periods.get(name)?;
            Some(text.parse::<GoDuration>().ok()?.as_std())
        };
        let hard = self.hard.iter().filter_map(|(name, text)| of(name, text, Duration::ZERO));
        let soft = self.soft.iter().filter_map(|(name, text)| of(name, text, grace_of(name)?));
        let mut thresholds: Vec<Threshold> = hard.chain(soft).collect();
        if self.enforces_pods {
            let of_memory = thresholds.iter().filter(|it| it.signal == Signal::MemoryAvailable && it.is_hard());
            let signal = Signal::AllocatableMemoryAvailable;
            let copies: Vec<_> = of_memory.map(|it| Threshold { signal, ..it.clone() }).collect();
            thresholds.extend(copies);
        }
        thresholds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn configuration_becomes_thresholds() {
        let config = ThresholdConfig {
            hard: &map(&[("memory.available", "100Mi"), ("nodefs.available", "10%"), ("imagefs.available", "0%")]),
            soft: &map(&[("memory.available", "1G"), ("containerfs.available", "5%")]),
            soft_grace_periods: &map(&[("memory.available", "1m30s"), ("containerfs.available", "1m")]),
            minimum_reclaim: &map(&[("memory.available", "50Mi")]),
            enforces_pods: true,
        };
        let shown = config.thresholds().into_iter().map(|it| {
            let reclaim = it.min_reclaim.map_or(0, |value| value.amount(0));
            format!("{} < {} +{reclaim} after {}s", it.signal, it.value.text(1 << 30), it.grace.as_secs())
        });
        insta::assert_snapshot!(shown.collect::<Vec<_>>().join("\n"), @"
        memory.available < 100Mi +52428800 after 0s
        nodefs.available < 107374184 +0 after 0s
        memory.available < 1G +52428800 after 90s
        allocatableMemory.available < 100Mi +52428800 after 0s
        ");
    }

    #[test]
    fn signals_and_values_are_shown_as_they_are_configured() {
        for signal in Signal::ALL {
            assert_eq!(serde_json::to_value(signal).expect("a string"), signal.name());
        }
        for (text, amount) in [("100Mi", Some(100 << 20)), ("10%", None), ("2.5%", None), ("0.05%", None)] {
            let value = ThresholdValue::parse(text).expect("a value");
            assert_eq!((value.configured_text().as_str(), value.known_amount(None)), (text, amount));
        }
        assert_eq!(ThresholdValue::Percentage(0.5).known_amount(Some(10)), Some(5));
    }

    #[test]
    fn threshold_is_met_until_the_minimum_is_reclaimed() {
        let threshold = Threshold {
            signal: Signal::PidAvailable,
            value: ThresholdValue::Percentage(0.1),
            min_reclaim: Some(ThresholdValue::Quantity(50, "50".to_owned())),
            grace: Duration::ZERO,
        };
        for (available, met, not_resolved) in
            [(99, true, true), (100, false, true), (149, false, true), (150, false, false)]
        {
            let observed = Observation { available, capacity: 1000 };
            assert_eq!(threshold.is_met(observed, Reclaim::Ignored), met, "{available}");
            assert_eq!(threshold.is_met(observed, Reclaim::Enforced), not_resolved, "{available}");
        }
    }
}
