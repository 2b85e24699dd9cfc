//! Defaults of pod-level resources.
//!
//! Owns: the pod's requests and limits derived from its containers'. Never: changes a container's.
//! Upstream: `defaultHugePagePodLimits`, `defaultPodRequests` in `apis/core/v1/defaults.go`, AggregateContainerRequests.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Container, PodSpec, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};

use super::go_quantity::GoQuantity;
use crate::pod::restart_policy::is_sidecar;

type TextList = BTreeMap<String, Quantity>;
type List = BTreeMap<String, GoQuantity>;

/// Sums over the containers that became the pod's own. Upstream's dump of them differs from that of their text.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    pub(super) limits: List,
    pub(super) requests: List,
}

pub(super) fn apply(spec: &mut PodSpec) -> Sums {
    let mut sums = Sums::default();
    let Some(mut resources) = spec.resources.take() else { return sums };
    if has_any(resources.limits.as_ref()) || has_any(resources.requests.as_ref()) {
        for (name, sum) in totals(spec, |resources| resources.limits.as_ref()) {
            if is_huge_page(&name)
                && !names(resources.requests.as_ref(), &name)
                && !names(resources.limits.as_ref(), &name)
            {
                resources.limits.get_or_insert_default().insert(name.clone(), sum.to_text());
                sums.limits.insert(name, sum);
            }
        }
    }
    if has_any(resources.limits.as_ref()) {
        for (name, sum) in totals(spec, |resources| resources.requests.as_ref()) {
            if ["cpu", "memory"].contains(&name.as_str()) && !names(resources.requests.as_ref(), &name) {
                resources.requests.get_or_insert_default().insert(name.clone(), sum.to_text());
                sums.requests.insert(name, sum);
            }
        }
        request_limits(&mut resources, &mut sums);
    }
    spec.resources = Some(resources);
    sums
}

/// A resource without a request is requested up to its limit.
fn request_limits(resources: &mut ResourceRequirements, sums: &mut Sums) {
    for (name, limit) in resources.limits.iter().flatten() {
        let is_supported = ["cpu", "memory"].contains(&name.as_str()) || is_huge_page(name);
        if !is_supported || names(resources.requests.as_ref(), name) {
            continue;
        }
        resources.requests.get_or_insert_default().insert(name.clone(), limit.clone());
        if let Some(sum) = sums.limits.get(name) {
            sums.requests.insert(name.clone(), sum.clone());
        }
    }
}

/// The largest amount needed at one time: the main containers and sidecars together, or an init container with the sidecars
/// before it.
fn totals(spec: &PodSpec, pick: fn(&ResourceRequirements) -> Option<&TextList>) -> List {
    let own = |container: &Container| -> List {
        let texts = container.resources.as_ref().and_then(pick).into_iter().flatten();
        texts.map(|(name, text)| (name.clone(), GoQuantity::parse(&text.0).unwrap_or_default())).collect()
    };
    let mut total = List::new();
    for container in &spec.containers {
        add(&mut total, &own(container));
    }
    let (mut sidecars, mut init) = (List::new(), List::new());
    for container in spec.init_containers.iter().flatten() {
        let mut needed = own(container);
        if is_sidecar(container) {
            add(&mut total, &needed);
            add(&mut sidecars, &needed);
            needed = sidecars.clone();
        } else {
            add(&mut needed, &sidecars);
        }
        raise(&mut init, needed);
    }
    raise(&mut total, init);
    total
}

fn add(list: &mut List, more: &List) {
    for (name, quantity) in more {
        match list.get_mut(name) {
            Some(sum) => sum.add(quantity).unwrap_or_default(),
            None => drop(list.insert(name.clone(), quantity.clone())),
        }
    }
}

fn raise(list: &mut List, least: List) {
    for (name, mut quantity) in least {
        let is_more = list.get(&name).is_none_or(|known| quantity.is_greater(known).unwrap_or(false));
        if is_more {
            list.insert(name, quantity);
        }
    }
}

fn has_any(list: Option<&TextList>) -> bool {
    list.is_some_and(|list| !list.is_empty())
}

fn names(list: Option<&TextList>, name: &str) -> bool {
    list.is_some_and(|list| list.contains_key(name))
}

fn is_huge_page(name: &str) -> bool {
    name.starts_with("hugepages-")
}
