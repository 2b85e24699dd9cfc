//! Equality of two statuses, as far as the kubelet owns them.
//!
//! Owns: what counts as a difference. Never: order or precision; both statuses are normalized before.
//! Upstream: `isPodStatusByKubeletEqual`, which compares semantically: empty is absent, `1000m` is `1`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{ContainerStatus, PodCondition, PodStatus, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity as Text,
};

use crate::{
    pod::status::conditions::{DISRUPTION_TARGET, is_owned},
    quantity::Quantity,
};

pub fn is_pod_status_by_kubelet_equal(one: &PodStatus, other: &PodStatus) -> bool {
    our_conditions(one) == our_conditions(other) && comparable(one) == comparable(other)
}

/// Status, reason and message by type. Dates do not count: they follow from these.
fn our_conditions(status: &PodStatus) -> BTreeMap<&str, [&str; 3]> {
    let ours = |condition: &&PodCondition| is_owned(&condition.type_) || condition.type_ == DISRUPTION_TARGET;
    let conditions = status.conditions.iter().flatten().filter(ours);
    conditions
        .map(|condition| {
            let reason = condition.reason.as_deref().unwrap_or_default();
            let message = condition.message.as_deref().unwrap_or_default();
            (condition.type_.as_str(), [condition.status.as_str(), reason, message])
        })
        .collect()
}

/// The status without fields of other owners, in a normal form.
fn comparable(status: &PodStatus) -> PodStatus {
    let mut status = PodStatus {
        conditions: None,
        resource_claim_statuses: None,
        extended_resource_claim_status: None,
        node_allocatable_resource_claim_statuses: None,
        ..status.clone()
    };
    for text in [&mut status.phase, &mut status.reason, &mut status.message, &mut status.pod_ip, &mut status.host_ip] {
        text.take_if(|text| text.is_empty());
    }
    let lists =
        [&mut status.container_statuses, &mut status.init_container_statuses, &mut status.ephemeral_container_statuses];
    for list in lists {
        list.take_if(|list| list.is_empty());
        list.iter_mut().flatten().for_each(unify_container);
    }
    status.pod_ips.take_if(|ips| ips.is_empty());
    status.host_ips.take_if(|ips| ips.is_empty());
    unify_amounts(&mut status.allocated_resources);
    unify_resources(&mut status.resources);
    status
}

fn unify_container(container: &mut ContainerStatus) {
    for state in [&mut container.state, &mut container.last_state] {
        // An absent last state and an empty one are the same on the wire.
        state.take_if(|state| state.running.is_none() && state.waiting.is_none() && state.terminated.is_none());
        if let Some(waiting) = state.as_mut().and_then(|state| state.waiting.as_mut()) {
            waiting.reason.take_if(|reason| reason.is_empty());
            waiting.message.take_if(|message| message.is_empty());
        }
        if let Some(end) = state.as_mut().and_then(|state| state.terminated.as_mut()) {
            end.message.take_if(|message| message.is_empty());
        }
    }
    unify_amounts(&mut container.allocated_resources);
    unify_resources(&mut container.resources);
}

fn unify_resources(resources: &mut Option<ResourceRequirements>) {
    if let Some(resources) = resources {
        unify_amounts(&mut resources.limits);
        unify_amounts(&mut resources.requests);
        resources.claims.take_if(|claims| claims.is_empty());
    }
    resources.take_if(|resources| *resources == ResourceRequirements::default());
}

fn unify_amounts(amounts: &mut Option<BTreeMap<String, Text>>) {
    amounts.take_if(|amounts| amounts.is_empty());
    for text in amounts.iter_mut().flat_map(BTreeMap::values_mut) {
        if let Ok(quantity) = Quantity::parse(&text.0) {
            text.0 = format!("{}m", quantity.millis());
        }
    }
}
