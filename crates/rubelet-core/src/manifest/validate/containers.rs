//! Containers and init containers.
//!
//! Upstream: validateContainers, validateInitContainers, validateContainerCommon.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EnvFromSource, EnvVar, EnvVarSource, FileKeySelector, PodSpec,
};

use super::{
    FieldError, PULL_POLICIES, Path, invalid, names, no_backsteps, one_of, probes, quoted, resources, security, volumes,
};
use crate::{container::is_host_network, pod::restart_policy::is_sidecar};

/// Pod fields that an environment variable may refer to.
const ENV_FIELDS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
const ENV_RESOURCES: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

pub(super) fn containers(spec: &PodSpec, volumes: &BTreeSet<&str>, path: &Path, problems: &mut Vec<FieldError>) {
    let regular_path = path.child("containers");
    if spec.containers.is_empty() {
        problems.push(FieldError::required(&regular_path, ""));
    }
    let grace_secs = spec.termination_grace_period_seconds.unwrap_or_default();
    let mut known = BTreeSet::new();
    for (index, container) in spec.containers.iter().enumerate() {
        let path = regular_path.index(index);
        common(container, spec, volumes, &path, problems);
        unique_name(container, &mut known, &path, problems);
        probes::container(container, grace_secs, &path, problems);
    }
    host_ports(&spec.containers, spec, &regular_path, problems);
    for (index, container) in spec.init_containers.iter().flatten().enumerate() {
        let path = path.child("initContainers").index(index);
        common(container, spec, volumes, &path, problems);
        unique_name(container, &mut known, &path, problems);
        if is_sidecar(container) {
            probes::container(container, grace_secs, &path, problems);
        } else {
            probes::forbidden(container, &path, problems);
        }
    }
}

fn common(
    container: &Container,
    spec: &PodSpec,
    volumes: &BTreeSet<&str>,
    path: &Path,
    problems: &mut Vec<FieldError>,
) {
    if container.name.is_empty() {
        problems.push(FieldError::required(&path.child("name"), ""));
    } else {
        invalid(&path.child("name"), &container.name, &names::dns_label(&container.name), problems);
    }
    let image = container.image.as_deref().unwrap_or_default();
    if image.is_empty() {
        problems.push(FieldError::required(&path.child("image"), ""));
    } else if image.trim() != image {
        let why = "must not have leading or trailing whitespace";
        problems.push(FieldError::invalid(&path.child("image"), quoted(image), why));
    }
    let policy = container.termination_message_policy.as_deref();
    one_of(policy, &["File", "FallbackToLogsOnError"], &path.child("terminationMessagePolicy"), problems);
    ports(container.ports.as_deref().unwrap_or_default(), &path.child("ports"), problems);
    env(container.env.as_deref().unwrap_or_default(), &path.child("env"), problems);
    env_from(container.env_from.as_deref().unwrap_or_default(), &path.child("envFrom"), problems);
    volumes::mounts(container, volumes, &path.child("volumeMounts"), problems);
    for index in 0..container.volume_devices.as_ref().map_or(0, Vec::len) {
        // Only claims have devices, and a static pod has no claims.
        let why = "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
        problems.push(FieldError::forbidden(&path.child("volumeDevices").index(index), why));
    }
    one_of(container.image_pull_policy.as_deref(), &PULL_POLICIES, &path.child("imagePullPolicy"), problems);
    if let Some(requirements) = &container.resources {
        resources::container(requirements, &path.child("resources"), problems);
    }
    if let Some(context) = &container.security_context {
        security::container(context, spec, &path.child("securityContext"), problems);
    }
    restart_policy(container, path, problems);
}

fn unique_name<'a>(
    container: &'a Container,
    known: &mut BTreeSet<&'a str>,
    path: &Path,
    problems: &mut Vec<FieldError>,
) {
    if !container.name.is_empty() && !known.insert(&container.name) {
        problems.push(FieldError::duplicate(&path.child("name"), quoted(&container.name)));
    }
}

fn restart_policy(container: &Container, path: &Path, problems: &mut Vec<FieldError>) {
    let field = path.child("restartPolicy");
    let has_rules = container.restart_policy_rules.as_ref().is_some_and(|rules| !rules.is_empty());
    match &container.restart_policy {
        Some(policy) => one_of(Some(policy), &["Always", "Never", "OnFailure"], &field, problems),
        None if has_rules => {
            problems.push(FieldError::required(&field, "must specify restartPolicy when restart rules are used"));
        }
        None => {}
    }
}

fn ports(ports: &[ContainerPort], path: &Path, problems: &mut Vec<FieldError>) {
    let mut known = BTreeSet::new();
    for (index, port) in ports.iter().enumerate() {
        let path = path.index(index);
        let name = port.name.as_deref().unwrap_or_default();
        if !name.is_empty() {
            let messages = names::port(name);
            if messages.is_empty() && !known.insert(name) {
                problems.push(FieldError::duplicate(&path.child("name"), quoted(name)));
            }
            invalid(&path.child("name"), name, &messages, problems);
        }
        if port.container_port == 0 {
            problems.push(FieldError::required(&path.child("containerPort"), ""));
        } else {
            port_number(port.container_port, &path.child("containerPort"), problems);
        }
        if let Some(number) = port.host_port.filter(|number| *number != 0) {
            port_number(number, &path.child("hostPort"), problems);
        }
        one_of(port.protocol.as_deref(), &["SCTP", "TCP", "UDP"], &path.child("protocol"), problems);
    }
}

fn port_number(number: i32, field: &Path, problems: &mut Vec<FieldError>) {
    problems.extend(names::port_number(number).iter().map(|message| FieldError::invalid(field, number, message)));
}

/// No two containers of a pod may use the same host port.
fn host_ports(containers: &[Container], spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    let mut known = BTreeSet::new();
    for (index, container) in containers.iter().enumerate() {
        let path = path.index(index).child("ports");
        for (index, port) in container.ports.iter().flatten().enumerate() {
            let field = path.index(index).child("hostPort");
            let Some(number) = port.host_port.filter(|number| *number != 0) else { continue };
            let [protocol, host_ip] = [&port.protocol, &port.host_ip].map(|text| text.as_deref().unwrap_or_default());
            let taken = format!("{protocol}/{host_ip}/{number}");
            if known.contains(&taken) {
                problems.push(FieldError::duplicate(&field, quoted(&taken)));
            }
            known.insert(taken);
            if is_host_network(spec) && number != port.container_port {
                let why = "must match `containerPort` when `hostNetwork` is true";
                problems.push(FieldError::invalid(&field, number, why));
            }
        }
    }
}

fn env(env: &[EnvVar], path: &Path, problems: &mut Vec<FieldError>) {
    for (index, variable) in env.iter().enumerate() {
        let path = path.index(index);
        if variable.name.is_empty() {
            problems.push(FieldError::required(&path.child("name"), ""));
        } else {
            invalid(&path.child("name"), &variable.name, &names::env(&variable.name), problems);
        }
        if let Some(source) = &variable.value_from {
            let has_value = variable.value.as_deref().is_some_and(|value| !value.is_empty());
            env_source(source, &path.child("valueFrom"), problems);
            if has_value {
                let why = "may not be specified when `value` is not empty";
                problems.push(FieldError::invalid(&path.child("valueFrom"), "\"\"", why));
            }
        }
    }
}

fn env_source(source: &EnvVarSource, path: &Path, problems: &mut Vec<FieldError>) {
    let sources = [
        source.field_ref.is_some(),
        source.resource_field_ref.is_some(),
        source.config_map_key_ref.is_some(),
        source.secret_key_ref.is_some(),
        source.file_key_ref.is_some(),
    ];
    match sources.iter().filter(|is_set| **is_set).count() {
        1 => {}
        0 => {
            let why = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or \
                       `fileKeyRef`";
            problems.push(FieldError::invalid(path, "\"\"", why));
        }
        _ => {
            let why = "may not have more than one field specified at a time";
            problems.push(FieldError::invalid(path, "\"\"", why));
        }
    }
    if let Some(field_ref) = &source.field_ref {
        let path = path.child("fieldRef");
        match field_ref.field_path.as_str() {
            "" => problems.push(FieldError::required(&path.child("fieldPath"), "")),
            known if ENV_FIELDS.contains(&known) => {}
            other if is_metadata_entry(other) => {}
            other => problems.push(FieldError::unsupported(&path.child("fieldPath"), other, &ENV_FIELDS)),
        }
    }
    if let Some(resource) = &source.resource_field_ref {
        let field = path.child("resourceFieldRef").child("resource");
        let name = resource.resource.as_str();
        let is_huge_pages = ["limits.hugepages-", "requests.hugepages-"].iter().any(|known| name.starts_with(known));
        if !is_huge_pages {
            one_of(Some(name), &ENV_RESOURCES, &field, problems);
        }
    }
    if let Some(selector) = &source.file_key_ref {
        file_key(selector, &path.child("fileKeyRef"), problems);
    }
}

fn file_key(selector: &FileKeySelector, path: &Path, problems: &mut Vec<FieldError>) {
    let FileKeySelector { key, volume_name, path: file, optional: _ } = selector;
    for (field, value) in [("key", key), ("volumeName", volume_name), ("path", file)] {
        if value.is_empty() {
            problems.push(FieldError::required(&path.child(field), ""));
        }
    }
    if !key.is_empty() {
        invalid(&path.child("key"), key, &names::env(key), problems);
    }
    if !volume_name.is_empty() {
        invalid(&path.child("volumeName"), volume_name, &names::dns_label(volume_name), problems);
    }
    no_backsteps(file, &path.child("path"), problems);
}

/// Only an emptyDir can hold the files of `fileKeyRef`.
pub(super) fn env_file_volumes(spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    let volumes: BTreeMap<&str, bool> =
        spec.volumes.iter().flatten().map(|volume| (volume.name.as_str(), volume.empty_dir.is_some())).collect();
    let init = spec.init_containers.as_deref().unwrap_or_default();
    for (list, containers) in [("initContainers", init), ("containers", &spec.containers)] {
        for (index, container) in containers.iter().enumerate() {
            for (variable, source) in container.env.iter().flatten().enumerate() {
                let selector = source.value_from.as_ref().and_then(|source| source.file_key_ref.as_ref());
                let Some(FileKeySelector { volume_name, .. }) = selector else { continue };
                let path = path.child(list).index(index).child("env").index(variable);
                let field = path.child("valueFrom").child("fileKeyRef").child("volumeName");
                match volumes.get(volume_name.as_str()) {
                    Some(true) => {}
                    Some(false) => {
                        let why = "referenced volume must be of type emptyDir";
                        problems.push(FieldError::invalid(&field, quoted(volume_name), why));
                    }
                    None => problems.push(FieldError::not_found(&field, volume_name)),
                }
            }
        }
    }
}

/// `metadata.labels['app']`.
fn is_metadata_entry(field: &str) -> bool {
    let entry = ["metadata.labels['", "metadata.annotations['"].iter().find_map(|map| field.strip_prefix(map));
    entry.and_then(|entry| entry.strip_suffix("']")).is_some_and(|key| names::qualified(key).is_empty())
}

fn env_from(sources: &[EnvFromSource], path: &Path, problems: &mut Vec<FieldError>) {
    for (index, source) in sources.iter().enumerate() {
        let path = path.index(index);
        let prefix = source.prefix.as_deref().unwrap_or_default();
        invalid(&path.child("prefix"), prefix, &names::env(prefix), problems);
        let why = match (&source.config_map_ref, &source.secret_ref) {
            (None, None) => "must specify one of: `configMapRef` or `secretRef`",
            (Some(_), Some(_)) => "may not have more than one field specified at a time",
            (Some(_), None) | (None, Some(_)) => continue,
        };
        problems.push(FieldError::invalid(&path, "\"\"", why));
    }
}
