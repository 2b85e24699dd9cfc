//! How much do a pod's containers want together?
//!
//! Owns: who runs beside whom in a pod's life: sidecars stay, other init containers go before the next one starts.
//! Upstream: `component-helpers/resource` (AggregateContainerRequests, AggregateContainerLimits).

use k8s_openapi::api::core::v1::{Container, PodSpec};

use crate::{pod::restart_policy::is_sidecar, quantity::Quantity};

/// The most that is wanted at any moment of the pod's life.
pub fn peak(spec: &PodSpec, mut wanted_by: impl FnMut(&Container) -> Quantity) -> Quantity {
    let mut sidecars = Quantity::ZERO;
    let mut most = Quantity::ZERO;
    for container in spec.init_containers.iter().flatten() {
        let with_this = sidecars.saturating_add(wanted_by(container));
        most = most.max(with_this);
        if is_sidecar(container) {
            sidecars = with_this;
        }
    }
    let running = spec.containers.iter().fold(sidecars, |sum, container| sum.saturating_add(wanted_by(container)));
    most.max(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sidecars_stay_and_other_init_containers_go() {
        // Each container wants as much as its name says; `s` marks a sidecar.
        for (init, main, expected) in [
            ("", "1 2", 3),
            ("5", "1 2", 5),
            ("5 4", "1", 5),
            ("s2", "1", 3),
            ("s2 5", "1", 7),
            ("5 s2", "1", 5),
            ("s1 s2 3 s4", "1", 8),
            ("", "", 0),
        ] {
            let container = |word: &str| Container {
                name: word.trim_start_matches('s').to_owned(),
                restart_policy: word.starts_with('s').then(|| "Always".to_owned()),
                ..Container::default()
            };
            let spec = PodSpec {
                init_containers: Some(init.split_whitespace().map(container).collect()),
                containers: main.split_whitespace().map(container).collect(),
                ..PodSpec::default()
            };
            let peak = peak(&spec, |container| Quantity::from_units(container.name.parse().unwrap()));
            assert_eq!(peak.value(), expected, "{init} | {main}");
        }
    }
}
