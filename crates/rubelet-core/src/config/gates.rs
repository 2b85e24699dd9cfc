//! Feature gates.
//!
//! Owns: upstream's gates of v1.36 with default, maturity and lock; resolving what was set. Never: a global; gates are a value that is passed.
//! Upstream: `component-base/featuregate`, `pkg/features/kube_features.go`.

use std::collections::BTreeMap;

use self::table::{DEPENDENCIES, GATES};

mod table;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maturity {
    Alpha,
    Beta,
    Stable,
    Deprecated,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub name: &'static str,
    pub maturity: Maturity,
    pub default: bool,
    /// The default cannot be changed.
    pub locked: bool,
}

/// The gates that the code uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    ClusterTrustBundleProjection,
    ComponentFlagz,
    ComponentStatusz,
    ContainerCheckpoint,
    CpuCfsQuotaPeriod,
    CsiVolumeHealth,
    EnvFiles,
    ExtendWebSocketsToKubelet,
    GracefulNodeShutdown,
    GracefulNodeShutdownBasedOnPodPriority,
    ImageMaximumGcAge,
    KubeletCrashLoopBackOffMax,
    KubeletEnsureSecretPulledImages,
    LoggingAlphaOptions,
    LoggingBetaOptions,
    MemoryQos,
    NodeDeclaredFeatures,
    NodeLogQuery,
    NodeSwap,
    PodCertificateRequest,
    QosReserved,
    RotateKubeletServerCertificate,
    SeLinuxMount,
}

impl Gate {
    pub fn name(self) -> &'static str {
        match self {
            Gate::ClusterTrustBundleProjection => "ClusterTrustBundleProjection",
            Gate::ComponentFlagz => "ComponentFlagz",
            Gate::ComponentStatusz => "ComponentStatusz",
            Gate::ContainerCheckpoint => "ContainerCheckpoint",
            Gate::CpuCfsQuotaPeriod => "CustomCPUCFSQuotaPeriod",
            Gate::CsiVolumeHealth => "CSIVolumeHealth",
            Gate::EnvFiles => "EnvFiles",
            Gate::ExtendWebSocketsToKubelet => "ExtendWebSocketsToKubelet",
            Gate::GracefulNodeShutdown => "GracefulNodeShutdown",
            Gate::GracefulNodeShutdownBasedOnPodPriority => "GracefulNodeShutdownBasedOnPodPriority",
            Gate::ImageMaximumGcAge => "ImageMaximumGCAge",
            Gate::KubeletCrashLoopBackOffMax => "KubeletCrashLoopBackOffMax",
            Gate::KubeletEnsureSecretPulledImages => "KubeletEnsureSecretPulledImages",
            Gate::LoggingAlphaOptions => "LoggingAlphaOptions",
            Gate::LoggingBetaOptions => "LoggingBetaOptions",
            Gate::MemoryQos => "MemoryQoS",
            Gate::NodeDeclaredFeatures => "NodeDeclaredFeatures",
            Gate::NodeLogQuery => "NodeLogQuery",
            Gate::NodeSwap => "NodeSwap",
            Gate::PodCertificateRequest => "PodCertificateRequest",
            Gate::QosReserved => "QOSReserved",
            Gate::RotateKubeletServerCertificate => "RotateKubeletServerCertificate",
            Gate::SeLinuxMount => "SELinuxMount",
        }
    }
}

/// Which gates are on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gates {
    /// Only where it differs from the table, or was set.
    set: BTreeMap<&'static str, bool>,
}

/// An invalid setting and its gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateError {
    pub gate: String,
    pub message: String,
}

impl Gates {
    /// All errors at once.
    pub fn resolve(settings: &BTreeMap<String, bool>) -> Result<Gates, Vec<GateError>> {
        let mut errors = Vec::new();
        let mut set = BTreeMap::new();
        // `AllAlpha` and `AllBeta` first: a named gate takes precedence.
        for (all, maturity) in [("AllAlpha", Maturity::Alpha), ("AllBeta", Maturity::Beta)] {
            let Some(on) = settings.get(all) else { continue };
            set.extend(GATES.iter().filter(|spec| spec.maturity == maturity).map(|spec| (spec.name, *on)));
        }
        for (name, on) in settings {
            match spec_of(name) {
                None => {
                    errors.push(GateError { gate: name.clone(), message: format!("unrecognized feature gate: {name}") })
                }
                Some(spec) if spec.locked && spec.default != *on => errors.push(GateError {
                    gate: name.clone(),
                    message: format!("cannot set feature gate {name} to {on}, feature is locked to {}", spec.default),
                }),
                Some(spec) => {
                    set.insert(spec.name, *on);
                }
            }
        }
        let gates = Gates { set };
        if errors.is_empty() {
            errors = gates.broken_dependencies();
        }
        if errors.is_empty() { Ok(gates) } else { Err(errors) }
    }

    pub fn enabled(&self, gate: Gate) -> bool {
        self.on(gate.name())
    }

    /// Every gate of upstream, and whether it is on.
    pub fn all(&self) -> impl Iterator<Item = (&'static Spec, bool)> + '_ {
        GATES.iter().map(|spec| (spec, self.on(spec.name)))
    }

    fn on(&self, name: &str) -> bool {
        match self.set.get(name) {
            Some(on) => *on,
            None => spec_of(name).is_some_and(|spec| spec.default),
        }
    }

    fn broken_dependencies(&self) -> Vec<GateError> {
        let broken = DEPENDENCIES.iter().filter(|(gate, _)| self.on(gate)).filter_map(|(gate, needs)| {
            let off: Vec<&str> = needs.iter().copied().filter(|need| !self.on(need)).collect();
            let message =
                || format!("{gate} is enabled, but depends on features that are disabled: [{}]", off.join(" "));
            (!off.is_empty()).then(|| GateError { gate: (*gate).to_owned(), message: message() })
        });
        broken.collect()
    }
}

/// Warnings about gates that will be removed.
pub fn warnings(settings: &BTreeMap<String, bool>) -> Vec<String> {
    let named = settings.iter().filter_map(|(name, on)| spec_of(name).map(|spec| (spec, on)));
    let warning = |word: &str, name: &str, on: &bool| {
        format!("Warning: setting {word} feature gate {name}={on}. It will be removed in a future release.")
    };
    named
        .filter_map(|(spec, on)| match spec.maturity {
            Maturity::Stable => Some(warning("GA", spec.name, on)),
            Maturity::Deprecated => Some(warning("deprecated", spec.name, on)),
            Maturity::Alpha | Maturity::Beta => None,
        })
        .collect()
}

/// All gates, by name.
pub fn known() -> &'static [Spec] {
    GATES
}

fn spec_of(name: &str) -> Option<&'static Spec> {
    GATES.binary_search_by(|spec| spec.name.cmp(name)).ok().map(|index| &GATES[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str) -> Result<Gates, Vec<String>> {
        let settings = text.split_whitespace().map(|pair| {
            let (name, on) = pair.split_once('=').unwrap();
            (name.to_owned(), on == "true")
        });
        Gates::resolve(&settings.collect()).map_err(|errors| errors.into_iter().map(|r| r.message).collect())
    }

    #[test]
    fn gate_table_is_sorted_and_has_every_used_gate() {
        assert!(GATES.is_sorted_by(|a, b| a.name < b.name));
        for gate in [
            Gate::CpuCfsQuotaPeriod,
            Gate::GracefulNodeShutdown,
            Gate::GracefulNodeShutdownBasedOnPodPriority,
            Gate::ImageMaximumGcAge,
            Gate::KubeletCrashLoopBackOffMax,
            Gate::KubeletEnsureSecretPulledImages,
            Gate::LoggingAlphaOptions,
            Gate::LoggingBetaOptions,
            Gate::MemoryQos,
            Gate::NodeLogQuery,
            Gate::NodeSwap,
            Gate::RotateKubeletServerCertificate,
        ] {
            assert!(spec_of(gate.name()).is_some(), "{gate:?}");
        }
        for (gate, needs) in DEPENDENCIES {
            assert!(spec_of(gate).is_some() && needs.iter().all(|need| spec_of(need).is_some()), "{gate}");
        }
    }

    #[test]
    fn unknown_and_locked_gates_are_refused_in_upstreams_words() {
        assert_eq!(resolve("Nope=true").unwrap_err(), ["unrecognized feature gate: Nope"]);
        assert_eq!(
            resolve("NodeSwap=false KubeletPSI=false").unwrap_err(),
            [
                "cannot set feature gate KubeletPSI to false, feature is locked to true",
                "cannot set feature gate NodeSwap to false, feature is locked to true",
            ]
        );
        assert!(resolve("NodeSwap=true").is_ok());
    }

    #[test]
    fn a_named_gate_wins_over_all_of_its_kind() {
        let gates = resolve("AllAlpha=true MemoryQoS=false").unwrap();
        assert!(!gates.enabled(Gate::MemoryQos) && gates.enabled(Gate::LoggingAlphaOptions));
        assert!(gates.enabled(Gate::GracefulNodeShutdown));
        let defaults = Gates::default();
        assert!(!defaults.enabled(Gate::MemoryQos) && defaults.enabled(Gate::KubeletCrashLoopBackOffMax));
    }

    #[test]
    fn gate_requires_its_dependencies() {
        insta::assert_snapshot!(resolve("GracefulNodeShutdown=false").unwrap_err().join("\n"), @"
        GracefulNodeShutdownBasedOnPodPriority is enabled, but depends on features that are disabled: [GracefulNodeShutdown]
        WindowsGracefulNodeShutdown is enabled, but depends on features that are disabled: [GracefulNodeShutdown]
        ");
    }

    #[test]
    fn gates_that_will_go_away_are_warned_of() {
        let settings = [("NodeSwap", true), ("MemoryQoS", true), ("AllowDNSOnlyNodeCSR", true)];
        insta::assert_snapshot!(warnings(&settings.map(|(name, on)| (name.to_owned(), on)).into()).join("\n"), @"
        Warning: setting deprecated feature gate AllowDNSOnlyNodeCSR=true. It will be removed in a future release.
        Warning: setting GA feature gate NodeSwap=true. It will be removed in a future release.
        ");
    }
}
