//! nodeSelector and required node affinity.
//!
//! Owns: the match of a pod with the node's labels. Preferred terms are the scheduler's.
//! Upstream: `component-helpers/scheduling/corev1/nodeaffinity`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};

pub(super) fn matches(spec: &PodSpec, labels: &BTreeMap<String, String>, node_name: &str) -> bool {
    let mut selector = spec.node_selector.iter().flatten();
    let is_selected = selector.all(|(key, value)| labels.get(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    is_selected && required.is_none_or(|required| any_term_holds(&required.node_selector_terms, labels, node_name))
}

pub(crate) fn any_term_holds(terms: &[NodeSelectorTerm], labels: &BTreeMap<String, String>, node_name: &str) -> bool {
    terms.iter().any(|term| term_holds(term, labels, node_name))
}

/// An empty term matches no node.
fn term_holds(term: &NodeSelectorTerm, labels: &BTreeMap<String, String>, node_name: &str) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let is_empty = expressions.is_empty() && fields.is_empty();
    let field = |requirement: &NodeSelectorRequirement| (requirement.key == "metadata.name").then_some(node_name);
    !is_empty
        && expressions.iter().all(|it| requirement_holds(it, labels.get(&it.key).map(String::as_str)))
        && fields.iter().all(|it| requirement_holds(it, field(it)))
}

/// An invalid requirement matches nothing.
fn requirement_holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_in = || value.is_some_and(|value| values.iter().any(|known| known == value));
    let numbers = || -> Option<(i64, i64)> { Some((value?.parse().ok()?, values.first()?.parse().ok()?)) };
    match requirement.operator.as_str() {
        "In" => is_in(),
        "NotIn" => !is_in(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(own, bound)| own > bound),
        "Lt" => numbers().is_some_and(|(own, bound)| own < bound),
        _ => false,
    }
}
