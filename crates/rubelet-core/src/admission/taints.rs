//! The pod's tolerations against the node's taints.
//!
//! Owns: NoExecute taints. NoSchedule taints are the scheduler's.
//! Upstream: `FindMatchingUntoleratedTaint`, `ToleratesTaint`.

use k8s_openapi::api::core::v1::{Taint, Toleration};

pub(super) fn are_tolerated(taints: &[Taint], tolerations: &[Toleration]) -> bool {
    let mut taints = taints.iter().filter(|taint| taint.effect == "NoExecute");
    taints.all(|taint| is_tolerated(taint, tolerations))
}

pub(super) fn is_tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

/// Comparisons (`Gt`, `Lt`) are alpha upstream, and hold nowhere.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let is_unset_or =
        |told: &Option<String>, is: &str| told.as_deref().is_none_or(|told| told.is_empty() || told == is);
    let is_meant = is_unset_or(&toleration.effect, &taint.effect) && is_unset_or(&toleration.key, &taint.key);
    let value = |value: &Option<String>| value.clone().unwrap_or_default();
    is_meant
        && match toleration.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => value(&toleration.value) == value(&taint.value),
            "Exists" => true,
            _ => false,
        }
}
