//! What an evicted pod's status and event say.
//!
//! Owns: upstream's message and annotations; each part of the message ends in a blank. Never: chooses the pod.
//! Upstream: `evictionMessage` of `eviction/helpers.go`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;

use super::{
    ranking::Candidate,
    threshold::{Observation, Resource, Threshold},
    usage::ContainerUsage,
};

/// Of the node, for a pod that is evicted because of these thresholds.
pub(super) fn low_on(resource: Resource, met: &[(&Threshold, Observation)]) -> String {
    let mut message = format!("The node was low on resource: {}. ", resource.name());
    if let Some((threshold, observed)) = met.iter().find(|(threshold, _)| threshold.signal.resource() == resource) {
        let quantity = threshold.value.text(observed.capacity);
        let available = resource.text(observed.available);
        message.push_str(&format!("Threshold quantity: {quantity}, available: {available}. "));
    }
    message
}

/// Adds what the pod and its containers used beyond their requests; returns the annotations of the event.
pub(super) fn blame(resource: Resource, candidate: &Candidate<'_>, message: &mut String) -> BTreeMap<String, String> {
    let mut annotations = BTreeMap::new();
    let Some(usage) = candidate.usage else { return annotations };
    let name = resource.name();
    let pod_request = candidate.spec.resources.as_ref().and_then(|it| it.requests.as_ref()?.get(name));
    if let Some(request) = pod_request.filter(|_| resource == Resource::Memory) {
        let (pod, used) = (crate::id::name_of(candidate.pod), resource.text(usage.memory_bytes));
        message.push_str(&larger_consumption("Pod", pod, &used, &request.0, name));
        annotations.insert("offending_pod".to_owned(), pod.to_owned());
        annotations.insert("offending_pod_usage".to_owned(), used);
    }
    let spec = candidate.spec;
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let (mut names, mut amounts) = (Vec::new(), Vec::new());
    for container in containers {
        let Some(used) = usage.containers.get(&container.name).and_then(|usage| used(resource, *usage)) else {
            continue;
        };
        let (request_text, request) = requested(container, name);
        if used > request {
            let used = resource.text(used);
            message.push_str(&larger_consumption("Container", &container.name, &used, &request_text, name));
            names.push(container.name.as_str());
            amounts.push(used);
        }
    }
    annotations.insert("offending_containers".to_owned(), names.join(","));
    annotations.insert("offending_containers_usage".to_owned(), amounts.join(","));
    annotations.insert("starved_resource".to_owned(), name.to_owned());
    annotations
}

fn larger_consumption(kind: &str, name: &str, used: &str, request: &str, resource: &str) -> String {
    format!("{kind} {name} was using {used}, request is {request}, has larger consumption of {resource}. ")
}

/// Inodes and processes cannot be requested by a container.
fn used(resource: Resource, usage: ContainerUsage) -> Option<u64> {
    match resource {
        Resource::Memory => Some(usage.memory_bytes),
        Resource::EphemeralStorage => Some(usage.rootfs.bytes.saturating_add(usage.logs.bytes)),
        Resource::Inodes | Resource::Pids => None,
    }
}

fn requested(container: &Container, resource: &str) -> (String, u64) {
    let requests = container.resources.as_ref().and_then(|it| it.requests.as_ref());
    let text = requests.and_then(|requests| requests.get(resource)).map_or("0".to_owned(), |text| text.0.clone());
    let amount = crate::quantity::amount(requests, resource).value();
    (text, u64::try_from(amount).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;
    use crate::eviction::{
        threshold::{Signal, ThresholdValue},
        usage::{DiskUsage, PodUsage},
    };

    fn hog() -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": "hog" },
            "spec": {
                "resources": { "requests": { "memory": "64Mi" } },
                "containers": [
                    { "name": "a", "resources": { "requests": { "memory": "10Mi", "ephemeral-storage": "1Gi" } } },
                    { "name": "b" },
                ],
            },
        }))
        .expect("a pod")
    }

    fn said(signal: Signal) -> String {
        let pod = hog();
        let disk = DiskUsage { bytes: 1 << 30, inodes: 5 };
        let container =
            ContainerUsage { memory_bytes: 300 << 20, rootfs: disk, logs: DiskUsage { bytes: 1024, inodes: 1 } };
        let usage = PodUsage {
            memory_bytes: 301 << 20,
            containers: BTreeMap::from([
                ("a".to_owned(), container),
                ("b".to_owned(), ContainerUsage { memory_bytes: 0, ..ContainerUsage::default() }),
            ]),
            ..PodUsage::default()
        };
        let candidate = Candidate { pod: &pod, spec: pod.spec.as_ref().unwrap(), usage: Some(&usage) };
        let value = ThresholdValue::Quantity(100 << 20, "100Mi".to_owned());
        let threshold = Threshold { signal, value, min_reclaim: None, grace: Duration::ZERO };
        let resource = signal.resource();
        let mut message = low_on(resource, &[(&threshold, Observation { available: 90 << 10, capacity: 1 << 30 })]);
        let annotations = blame(resource, &candidate, &mut message);
        format!("{message}|\n{annotations:?}")
    }

    #[test]
    fn messages_are_upstreams() {
        insta::assert_snapshot!(said(Signal::MemoryAvailable), @r#"
        The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Ki. Pod hog was using 301Mi, request is 64Mi, has larger consumption of memory. Container a was using 300Mi, request is 10Mi, has larger consumption of memory. |
        {"offending_containers": "a", "offending_containers_usage": "300Mi", "offending_pod": "hog", "offending_pod_usage": "301Mi", "starved_resource": "memory"}
        "#);
        insta::assert_snapshot!(said(Signal::NodeFsAvailable), @r#"
        The node was low on resource: ephemeral-storage. Threshold quantity: 100Mi, available: 90Ki. Container a was using 1048577Ki, request is 1Gi, has larger consumption of ephemeral-storage. |
        {"offending_containers": "a", "offending_containers_usage": "1048577Ki", "starved_resource": "ephemeral-storage"}
        "#);
        insta::assert_snapshot!(said(Signal::PidAvailable), @r#"
        The node was low on resource: pids. Threshold quantity: 100Mi, available: 92160. |
        {"offending_containers": "", "offending_containers_usage": "", "starved_resource": "pids"}
        "#);
    }
}
