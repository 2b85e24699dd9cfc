//! The resources a pod needs at once: the aggregate over its containers.
//!
//! Owns: which containers run at the same time. Sidecars keep running; other init containers end before the next one starts.
//! Upstream: `component-helpers/resource` (AggregateContainerRequests, AggregateContainerLimits).

use k8s_openapi::api::core::v1::{Container, PodSpec};

use crate::{pod::restart_policy::is_sidecar, quantity::Quantity};

/// The largest sum over containers that run at the same time.
pub fn aggregate_containers(spec: &PodSpec, mut amount_of: impl FnMut(&Container) -> Quantity) -> Quantity {
    let mut sidecars = Quantity::ZERO;
    let mut most = Quantity::ZERO;
    for container in spec.init_containers.iter().flatten() {
        let with_this = sidecars.saturating_add(amount_of(container));
        most = most.max(with_this);
        if is_sidecar(container) {
            sidecars = with_this;
        }
    }
    let running = spec.containers.iter().fold(sidecars, |sum, container| sum.saturating_add(amount_of(container)));
    most.max(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sidecars_stay_and_other_init_containers_go() {
        // Each container requests the amount that is its name; `s` marks a sidecar.
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
            let total = aggregate_containers(&spec, |container| Quantity::from_units(container.name.parse().unwrap()));
            assert_eq!(total.value(), expected, "{init} | {main}");
        }
    }
}
