//! The allocated resources of a pod's containers.
//!
//! Owns: containers keep the resources they were given until a resize, which is not supported yet.
//! Upstream: `allocation_manager.go` (UpdatePodFromAllocation); the status in the API server stands in for its checkpoint.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::core::v1::{Container, Pod, PodSpec, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity as Text,
};

use crate::quantity::Quantity;

/// The pod with its allocated resources: those of the known version, or else those in its status.
pub fn update_pod_from_allocation(pod: Arc<Pod>, known: Option<&Pod>) -> Arc<Pod> {
    let allocated = |name: &str, desired: Option<&ResourceRequirements>| {
        let known = known.and_then(|known| resources_of(known, name));
        let given = known.or_else(|| reported_in_status(&pod, name, desired))?;
        (!is_same(&given, desired)).then_some(given)
    };
    let Some(spec) = &pod.spec else { return pod };
    let changes: Vec<_> = containers(spec)
        .filter_map(|container| {
            Some((container.name.clone(), allocated(&container.name, container.resources.as_ref())?))
        })
        .collect();
    if changes.is_empty() {
        return pod;
    }
    let mut pod = Pod::clone(&pod);
    let spec = pod.spec.as_mut().expect("it was just read");
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        if let Some((_, given)) = changes.iter().find(|(name, _)| *name == container.name) {
            container.resources = Some(given.clone());
        }
    }
    Arc::new(pod)
}

/// The spec has other resources than the containers.
pub fn is_resize_pending(desired: &Pod, allocated: &Pod) -> bool {
    let desired = desired.spec.iter().flat_map(containers);
    desired.into_iter().any(|container| {
        let given = resources_of(allocated, &container.name);
        given.is_some_and(|given| !is_same(&given, container.resources.as_ref()))
    })
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten().chain(&spec.containers)
}

fn resources_of(pod: &Pod, container: &str) -> Option<ResourceRequirements> {
    let found = pod.spec.iter().flat_map(containers).find(|known| known.name == container)?;
    Some(found.resources.clone().unwrap_or_default())
}

/// What a previous process gave the container: its allocated requests, and the limits that were reported.
fn reported_in_status(pod: &Pod, name: &str, desired: Option<&ResourceRequirements>) -> Option<ResourceRequirements> {
    let status = pod.status.as_ref()?;
    let mut statuses = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let status = statuses.find(|status| status.name == name)?;
    let resources = status.resources.as_ref()?;
    let mut limits = resources.limits.clone();
    // The pod-level limit is reported for containers without their own.
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.limits.as_ref());
    let own = desired.and_then(|desired| desired.limits.as_ref());
    let has = |list: Option<&BTreeMap<String, Text>>, name: &String| list.is_some_and(|list| list.contains_key(name));
    limits.iter_mut().for_each(|limits| limits.retain(|name, _| has(own, name) || !has(of_pod, name)));
    Some(ResourceRequirements {
        limits,
        requests: status.allocated_resources.clone(),
        claims: desired.and_then(|desired| desired.claims.clone()),
    })
}

/// The same amounts, in whatever notation.
fn is_same(one: &ResourceRequirements, other: Option<&ResourceRequirements>) -> bool {
    let amounts = |list: Option<&BTreeMap<String, Text>>| -> BTreeMap<String, Option<Quantity>> {
        let list = list.into_iter().flatten();
        list.map(|(name, text)| (name.clone(), Quantity::parse(&text.0).ok())).collect()
    };
    amounts(one.limits.as_ref()) == amounts(other.and_then(|other| other.limits.as_ref()))
        && amounts(one.requests.as_ref()) == amounts(other.and_then(|other| other.requests.as_ref()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(resources: &Value, status: &Value) -> Arc<Pod> {
        let spec = json!({ "containers": [{ "name": "a", "resources": resources }] });
        let pod = json!({ "metadata": { "name": "p", "uid": "u1" }, "spec": spec, "status": status });
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn given(pod: &Pod) -> Value {
        serde_json::to_value(&pod.spec.as_ref().unwrap().containers[0].resources).unwrap()
    }

    #[test]
    fn containers_keep_their_resources_when_the_spec_is_resized() {
        let small = json!({ "requests": { "cpu": "100m" }, "limits": { "memory": "64Mi" } });
        let large = json!({ "requests": { "cpu": "1" }, "limits": { "memory": "1Gi" } });
        let before = pod(&small, &json!({}));
        let resized = pod(&large, &json!({}));
        let held = update_pod_from_allocation(resized.clone(), Some(&before));
        assert_eq!(given(&held), small);
        assert!(is_resize_pending(&resized, &held));
        assert!(!is_resize_pending(&before, &held));
    }

    #[test]
    fn resources_after_a_restart_are_those_the_status_shows() {
        let status = |requests: Value, limits: Value| {
            json!({ "containerStatuses": [{
                "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "allocatedResources": requests, "resources": { "requests": requests, "limits": limits },
            }] })
        };
        let desired = json!({ "requests": { "cpu": "1", "memory": "100M" }, "limits": { "memory": "100M" } });
        let same =
            pod(&desired, &status(json!({ "cpu": "1000m", "memory": "100M" }), json!({ "memory": "100000000" })));
        assert_eq!(given(&update_pod_from_allocation(same, None)), desired);
        let resized = pod(&desired, &status(json!({ "cpu": "500m", "memory": "100M" }), json!({ "memory": "100M" })));
        assert_eq!(given(&update_pod_from_allocation(resized, None))["requests"]["cpu"], "500m");
        assert_eq!(given(&update_pod_from_allocation(pod(&desired, &json!({})), None)), desired);
    }

    #[test]
    fn pod_level_limit_is_not_a_container_limit() {
        let status = json!({ "containerStatuses": [{
            "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "allocatedResources": {}, "resources": { "limits": { "cpu": "2", "memory": "64Mi" } },
        }] });
        // The container has no CPU limit of its own; both have a memory limit.
        let mut pod = Pod::clone(&pod(&json!({ "limits": { "memory": "64Mi" } }), &status));
        let limits = json!({ "limits": { "cpu": "2", "memory": "1Gi" } });
        pod.spec.as_mut().unwrap().resources = serde_json::from_value(limits).unwrap();
        let held = update_pod_from_allocation(Arc::new(pod), None);
        assert_eq!(given(&held), json!({ "limits": { "memory": "64Mi" } }));
    }
}
