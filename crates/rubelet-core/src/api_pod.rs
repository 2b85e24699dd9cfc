//! Decoding of API pods into a small form.
//!
//! Owns: what is dropped when a pod is decoded, since many pods are kept for long. Never: changes a pod's meaning.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodStatus, Volume};

/// Without the fields that are never read, and without spare capacity in lists.
pub fn decode(object: &[u8]) -> Result<Pod, serde_json::Error> {
    let mut pod: Pod = serde_json::from_slice(object)?;
    pod.metadata.managed_fields = None;
    if let Some(spec) = &mut pod.spec {
        shrink_spec(spec);
    }
    if let Some(status) = &mut pod.status {
        shrink_status(status);
    }
    Ok(pod)
}

fn shrink_spec(spec: &mut PodSpec) {
    spec.containers.shrink_to_fit();
    shrink(&mut spec.init_containers);
    shrink(&mut spec.tolerations);
    shrink(&mut spec.volumes);
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        shrink_container(container);
    }
    for Volume { projected, .. } in spec.volumes.iter_mut().flatten() {
        if let Some(projected) = projected {
            shrink(&mut projected.sources);
        }
    }
}

fn shrink_container(container: &mut Container) {
    shrink(&mut container.env);
    shrink(&mut container.ports);
    shrink(&mut container.volume_mounts);
}

pub fn shrink_status(status: &mut PodStatus) {
    shrink(&mut status.conditions);
    for list in [&mut status.container_statuses, &mut status.init_container_statuses] {
        shrink(list);
        for container in list.iter_mut().flatten() {
            shrink(&mut container.volume_mounts);
        }
    }
}

fn shrink<T>(list: &mut Option<Vec<T>>) {
    if let Some(list) = list {
        list.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_fields_and_spare_list_capacity_are_dropped() {
        let pod = decode(include_bytes!("../testdata/rich_pod.json")).unwrap();
        assert_eq!(pod.metadata.managed_fields, None);
        let spec = pod.spec.unwrap();
        let (volumes, env) = (spec.volumes.unwrap(), spec.containers[0].env.as_ref().unwrap());
        assert_eq!((volumes.len(), volumes.capacity()), (6, 6));
        assert_eq!((env.len(), env.capacity()), (7, 7));
    }

    #[test]
    fn decoding_keeps_the_meaning_of_a_pod() {
        let bytes = include_bytes!("../testdata/rich_pod.json");
        let mut plain: Pod = serde_json::from_slice(bytes).unwrap();
        plain.metadata.managed_fields = None;
        assert_eq!(decode(bytes).unwrap(), plain);
    }
}
