//! QoS classes and OOM scores.
//!
//! Owns: the QoS class, the OOM score adjustment. Never: writes them anywhere.
//! Upstream: `pkg/apis/core/v1/helper/qos`, `pkg/kubelet/qos/policy.go`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Container, Pod, PodSpec, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity as Text,
};
use serde::{Deserialize, Serialize};

use crate::{
    pod::restart_policy::is_sidecar,
    pod_manager::{is_mirror_pod, is_static_pod},
    pod_resources,
    quantity::{Quantity, amount},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QosClass {
    Guaranteed,
    Burstable,
    BestEffort,
}

impl QosClass {
    /// The value of `status.qosClass`.
    pub fn as_str(self) -> &'static str {
        match self {
            QosClass::Guaranteed => "Guaranteed",
            QosClass::Burstable => "Burstable",
            QosClass::BestEffort => "BestEffort",
        }
    }
}

const GUARANTEED_OOM_SCORE_ADJ: i64 = -997;
const BEST_EFFORT_OOM_SCORE_ADJ: i64 = 1000;
/// Above any guaranteed pod that uses all memory, below any best-effort pod.
const BURSTABLE_OOM_SCORE_ADJ: std::ops::RangeInclusive<i64> = 3..=999;
/// A pod of this priority or above is critical.
const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;

pub fn qos_class(pod: &PodSpec) -> QosClass {
    let mut sums = Sums::default();
    match &pod.resources {
        Some(resources) => {
            sums.add(resources);
            // Upstream requires complete limits at pod level only if there are any limits at all.
            sums.limits_are_complete =
                resources.limits.as_ref().is_none_or(BTreeMap::is_empty) || is_complete(resources);
        }
        None => {
            for container in pod.containers.iter().chain(pod.init_containers.iter().flatten()) {
                sums.limits_are_complete &= container.resources.as_ref().is_some_and(is_complete);
                if let Some(resources) = &container.resources {
                    sums.add(resources);
                }
            }
        }
    }
    sums.class()
}

/// The `oom_score_adj` of the container's processes, on a node with this much memory.
pub fn oom_score_adj(pod: &Pod, container: &Container, memory_capacity_bytes: i64) -> i64 {
    let Some(spec) = &pod.spec else { return BEST_EFFORT_OOM_SCORE_ADJ };
    if is_node_critical(pod, spec) {
        return GUARANTEED_OOM_SCORE_ADJ;
    }
    match qos_class(spec) {
        QosClass::Guaranteed => return GUARANTEED_OOM_SCORE_ADJ,
        QosClass::BestEffort => return BEST_EFFORT_OOM_SCORE_ADJ,
        QosClass::Burstable => {}
    }
    let share = unassigned_pod_memory(spec);
    let own_request = memory_request(container).value() + share;
    let is_init = spec.init_containers.iter().flatten().any(|init| init.name == container.name);
    let request = if is_init && is_sidecar(container) {
        // A sidecar must not be killed before the containers it serves.
        let smallest = spec.containers.iter().map(memory_request).min().unwrap_or_default().value() + share;
        own_request.max(smallest)
    } else {
        own_request
    };
    let capacity = i128::from(memory_capacity_bytes.max(1));
    let score = 1000 - i128::from(request) * 1000 / capacity;
    let (lowest, highest) = BURSTABLE_OOM_SCORE_ADJ.into_inner();
    i64::try_from(score).unwrap_or(lowest).clamp(lowest, highest)
}

struct Sums {
    requests: BTreeMap<&'static str, Quantity>,
    limits: BTreeMap<&'static str, Quantity>,
    limits_are_complete: bool,
}

impl Default for Sums {
    fn default() -> Self {
        Sums { requests: BTreeMap::new(), limits: BTreeMap::new(), limits_are_complete: true }
    }
}

impl Sums {
    fn add(&mut self, resources: &ResourceRequirements) {
        add_positive(&mut self.requests, resources.requests.as_ref());
        add_positive(&mut self.limits, resources.limits.as_ref());
    }

    fn class(&self) -> QosClass {
        if self.requests.is_empty() && self.limits.is_empty() {
            QosClass::BestEffort
        } else if self.limits_are_complete && self.requests == self.limits {
            QosClass::Guaranteed
        } else {
            QosClass::Burstable
        }
    }
}

fn add_positive(sums: &mut BTreeMap<&'static str, Quantity>, list: Option<&BTreeMap<String, Text>>) {
    for name in ["cpu", "memory"] {
        let quantity = amount(list, name);
        if quantity.is_positive() {
            let sum = sums.entry(name).or_default();
            *sum = sum.saturating_add(quantity);
        }
    }
}

fn is_complete(resources: &ResourceRequirements) -> bool {
    ["cpu", "memory"].iter().all(|name| amount(resources.limits.as_ref(), name).is_positive())
}

/// Upstream's IsCriticalPod.
pub fn is_critical(pod: &Pod, spec: &PodSpec) -> bool {
    let has_critical_priority = spec.priority.is_some_and(|priority| priority >= SYSTEM_CRITICAL_PRIORITY);
    is_static_pod(pod) || is_mirror_pod(pod) || has_critical_priority
}

fn is_node_critical(pod: &Pod, spec: &PodSpec) -> bool {
    is_critical(pod, spec) && spec.priority_class_name.as_deref() == Some("system-node-critical")
}

fn memory_request(container: &Container) -> Quantity {
    amount(container.resources.as_ref().and_then(|resources| resources.requests.as_ref()), "memory")
}

/// Memory the pod as a whole requests beyond its containers' requests, shared equally between them.
fn unassigned_pod_memory(spec: &PodSpec) -> i64 {
    let requests = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let pod_request = amount(requests, "memory");
    if pod_request.is_zero() {
        return 0;
    }
    let count = spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len);
    let count = i64::try_from(count).unwrap_or(1).max(1);
    pod_request.value().saturating_sub(pod_resources::aggregate_containers(spec, memory_request).value()) / count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: &str) -> Pod {
        serde_json::from_str(&format!(r#"{{"metadata":{{"name":"p"}},"spec":{spec}}}"#)).unwrap()
    }

    #[test]
    fn class_follows_requests_and_limits_of_cpu_and_memory() {
        for (spec, class) in [
            (r#"{"containers":[{"name":"a"}]}"#, QosClass::BestEffort),
            (r#"{"containers":[{"name":"a","resources":{"limits":{"ephemeral-storage":"1"}}}]}"#, QosClass::BestEffort),
            (r#"{"containers":[{"name":"a","resources":{"requests":{"cpu":"0"}}}]}"#, QosClass::BestEffort),
            (r#"{"containers":[{"name":"a","resources":{"requests":{"cpu":"1"}}}]}"#, QosClass::Burstable),
            (
                r#"{"containers":[{"name":"a","resources":{"requests":{"cpu":"1","memory":"1Gi"},"limits":{"cpu":"1000m","memory":"1024Mi"}}}]}"#,
                QosClass::Guaranteed,
            ),
            (
                r#"{"initContainers":[{"name":"i"}],"containers":[{"name":"a","resources":{"requests":{"cpu":"1","memory":"1Gi"},"limits":{"cpu":"1","memory":"1Gi"}}}]}"#,
                QosClass::Burstable,
            ),
            (
                r#"{"resources":{"requests":{"cpu":"1","memory":"1"},"limits":{"cpu":"1","memory":"1"}},"containers":[{"name":"a"}]}"#,
                QosClass::Guaranteed,
            ),
        ] {
            assert_eq!(qos_class(&pod(spec).spec.unwrap()), class, "{spec}");
        }
    }

    #[test]
    fn oom_score_falls_with_the_share_of_memory_requested() {
        let score = |request: &str| {
            let pod = pod(&format!(
                r#"{{"containers":[{{"name":"a","resources":{{"requests":{{"memory":"{request}"}}}}}}]}}"#
            ));
            oom_score_adj(&pod, &pod.spec.as_ref().unwrap().containers[0], 1000)
        };
        assert_eq!([score("1"), score("100"), score("500"), score("999"), score("5000")], [999, 900, 500, 3, 3]);
    }

    #[test]
    fn sidecar_scores_no_higher_than_the_smallest_container_it_serves() {
        let pod = pod(
            r#"{"initContainers":[{"name":"s","restartPolicy":"Always","resources":{"requests":{"memory":"10"}}}],
                "containers":[{"name":"a","resources":{"requests":{"memory":"300"}}},{"name":"b","resources":{"requests":{"memory":"200"}}}]}"#,
        );
        let sidecar = &pod.spec.as_ref().unwrap().init_containers.as_ref().unwrap()[0];
        assert_eq!(oom_score_adj(&pod, sidecar, 1000), 800);
    }
}
