//! Validation of pods as in the API server.
//!
//! Owns: the checks of every supported field, and of frequent mistakes. Runs after defaults and identity.
//! Never: changes the pod. Not checked because unsupported: affinity, topology spread, Windows options, and the inside of
//! volume sources other than emptyDir and hostPath.
//! Upstream: `apis/core/validation` (ValidatePodCreate).

mod containers;
mod names;
mod probes;
mod resources;
mod security;
mod volumes;

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::{
    api::core::v1::{HostAlias, Pod, PodDNSConfig, PodSpec, Toleration},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::field::{FieldError, Path, quoted};
use crate::container::{dns::MAX_NAMESERVERS, is_host_network};

const PULL_POLICIES: [&str; 3] = ["Always", "IfNotPresent", "Never"];
/// Upstream's limit for all annotations of an object together.
const MAX_ANNOTATION_BYTES: usize = 256 << 10;

/// All errors of the pod, in the API server's order.
pub(super) fn pod(pod: &Pod, path: &Path) -> Vec<FieldError> {
    let mut problems = Vec::new();
    metadata(&pod.metadata, &path.child("metadata"), &mut problems);
    let spec_path = path.child("spec");
    match &pod.spec {
        Some(spec) => pod_spec(spec, &spec_path, &mut problems),
        None => problems.push(FieldError::required(&spec_path, "")),
    }
    problems
}

fn metadata(metadata: &ObjectMeta, path: &Path, problems: &mut Vec<FieldError>) {
    let name = metadata.name.as_deref().unwrap_or_default();
    invalid(&path.child("name"), name, &names::dns_subdomain(name), problems);
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    invalid(&path.child("namespace"), namespace, &names::dns_label(namespace), problems);
    let uid = metadata.uid.as_deref().unwrap_or_default();
    // Upstream accepts any text, but a UID names directories: one with a slash would lead out of ours.
    invalid(&path.child("uid"), uid, &names::uid(uid), problems);
    labels(metadata.labels.as_ref(), &path.child("labels"), problems);
    let annotations = path.child("annotations");
    let mut total_bytes = 0;
    for (key, value) in metadata.annotations.iter().flatten() {
        invalid(&annotations, key, &names::qualified(&key.to_lowercase()), problems);
        total_bytes += key.len() + value.len();
    }
    if total_bytes > MAX_ANNOTATION_BYTES {
        problems.push(FieldError::too_long(&annotations, MAX_ANNOTATION_BYTES));
    }
}

fn labels(labels: Option<&BTreeMap<String, String>>, path: &Path, problems: &mut Vec<FieldError>) {
    for (key, value) in labels.into_iter().flatten() {
        invalid(path, key, &names::qualified(key), problems);
        invalid(&path.key(key), value, &names::label_value(value), problems);
    }
}

fn pod_spec(spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    let volumes = volumes::volumes(spec, &path.child("volumes"), problems);
    containers::containers(spec, &volumes, path, problems);
    containers::env_file_volumes(spec, path, problems);
    if spec.ephemeral_containers.as_ref().is_some_and(|containers| !containers.is_empty()) {
        problems.push(FieldError::forbidden(&path.child("ephemeralContainers"), "cannot be set on create"));
    }
    if let Some(resources) = &spec.resources {
        resources::pod(resources, &path.child("resources"), problems);
    }
    one_of(spec.restart_policy.as_deref(), &["Always", "OnFailure", "Never"], &path.child("restartPolicy"), problems);
    let dns_policies = ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];
    one_of(spec.dns_policy.as_deref(), &dns_policies, &path.child("dnsPolicy"), problems);
    labels(spec.node_selector.as_ref(), &path.child("nodeSelector"), problems);
    security::pod(spec, path, problems);
    dns_config(spec, &path.child("dnsConfig"), problems);
    host_names(spec, path, problems);
    if let Some(deadline) = spec.active_deadline_seconds
        && !(1..=i64::from(i32::MAX)).contains(&deadline)
    {
        let field = path.child("activeDeadlineSeconds");
        problems.push(FieldError::invalid(&field, deadline, "must be between 1 and 2147483647, inclusive"));
    }
    tolerations(spec.tolerations.as_deref().unwrap_or_default(), &path.child("tolerations"), problems);
    host_aliases(spec.host_aliases.as_deref().unwrap_or_default(), &path.child("hostAliases"), problems);
    if let Some(os) = &spec.os {
        one_of(Some(&os.name), &["linux"], &path.child("os").child("name"), problems);
    }
    if spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty()) {
        let why = "cannot be set until all schedulingGates have been cleared";
        problems.push(FieldError::forbidden(&path.child("nodeName"), why));
    }
}

fn host_names(spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    for (field, value) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
        let value = value.as_deref().unwrap_or_default();
        if !value.is_empty() {
            invalid(&path.child(field), value, &names::dns_label(value), problems);
        }
    }
    let Some(name) = &spec.hostname_override else { return };
    let field = path.child("hostnameOverride");
    if spec.set_hostname_as_fqdn == Some(true) {
        problems.push(FieldError::forbidden(&field, "may not be specified when setHostnameAsFQDN is true"));
    }
    if is_host_network(spec) {
        problems.push(FieldError::forbidden(&field, "may not be specified when hostNetwork is true"));
    }
    if name.len() > 64 {
        problems.push(FieldError::too_long(&field, 64));
    }
    invalid(&field, name, &names::dns_subdomain(name), problems);
}

fn host_aliases(aliases: &[HostAlias], path: &Path, problems: &mut Vec<FieldError>) {
    for (index, alias) in aliases.iter().enumerate() {
        let path = path.index(index);
        ip(&alias.ip, &path.child("ip"), problems);
        for (index, name) in alias.hostnames.iter().flatten().enumerate() {
            invalid(&path.child("hostnames").index(index), name, &names::dns_subdomain(name), problems);
        }
    }
}

fn dns_config(spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    const MAX_SEARCHES: usize = 32;
    let nothing = PodDNSConfig::default();
    let config = spec.dns_config.as_ref().unwrap_or(&nothing);
    let nameservers = config.nameservers.as_deref().unwrap_or_default();
    let searches = config.searches.as_deref().unwrap_or_default();
    if spec.dns_policy.as_deref() == Some("None") {
        if spec.dns_config.is_none() {
            problems.push(FieldError::required(path, "must provide `dnsConfig` when `dnsPolicy` is None"));
            return;
        }
        if nameservers.is_empty() {
            let why = "must provide at least one DNS nameserver when `dnsPolicy` is None";
            problems.push(FieldError::required(&path.child("nameservers"), why));
        }
    }
    if nameservers.len() > MAX_NAMESERVERS {
        let why = format!("must not have more than {MAX_NAMESERVERS} nameservers");
        problems.push(FieldError::invalid(&path.child("nameservers"), format!("{nameservers:?}"), &why));
    }
    for (index, nameserver) in nameservers.iter().enumerate() {
        ip(nameserver, &path.child("nameservers").index(index), problems);
    }
    if searches.len() > MAX_SEARCHES {
        let why = format!("must not have more than {MAX_SEARCHES} search paths");
        problems.push(FieldError::invalid(&path.child("searches"), searches.len(), &why));
    }
}

fn tolerations(tolerations: &[Toleration], path: &Path, problems: &mut Vec<FieldError>) {
    for (index, toleration) in tolerations.iter().enumerate() {
        let path = path.index(index);
        let [key, operator, value, effect] =
            [&toleration.key, &toleration.operator, &toleration.value, &toleration.effect]
                .map(|text| text.as_deref().unwrap_or_default());
        if !key.is_empty() {
            invalid(&path.child("key"), key, &names::qualified(key), problems);
        } else if operator != "Exists" {
            let why = "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
            problems.push(FieldError::invalid(&path.child("operator"), quoted(operator), why));
        }
        if toleration.toleration_seconds.is_some() && effect != "NoExecute" {
            let why = "effect must be 'NoExecute' when `tolerationSeconds` is set";
            problems.push(FieldError::invalid(&path.child("effect"), quoted(effect), why));
        }
        match operator {
            "" | "Equal" => invalid(&path.child("operator"), value, &names::label_value(value), problems),
            "Exists" if !value.is_empty() => {
                let why = "value must be empty when `operator` is 'Exists'";
                problems.push(FieldError::invalid(&path.child("operator"), quoted(value), why));
            }
            "Exists" => {}
            other => problems.push(FieldError::unsupported(&path.child("operator"), other, &["Equal", "Exists"])),
        }
        if !effect.is_empty() {
            let effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
            one_of(Some(effect), &effects, &path.child("effect"), problems);
        }
    }
}

/// One error for each message about `value`.
fn invalid(field: &Path, value: &str, messages: &[String], problems: &mut Vec<FieldError>) {
    problems.extend(messages.iter().map(|message| FieldError::invalid(field, quoted(value), message)));
}

fn one_of(value: Option<&str>, supported: &[&str], field: &Path, problems: &mut Vec<FieldError>) {
    match value.unwrap_or_default() {
        "" => problems.push(FieldError::required(field, "")),
        value if supported.contains(&value) => {}
        value => problems.push(FieldError::unsupported(field, value, supported)),
    }
}

fn ip(value: &str, field: &Path, problems: &mut Vec<FieldError>) {
    if value.parse::<IpAddr>().is_err() {
        let why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
        problems.push(FieldError::invalid(field, quoted(value), why));
    }
}

fn not_negative(value: Option<i32>, field: &Path, problems: &mut Vec<FieldError>) {
    if let Some(value) = value.filter(|value| *value < 0) {
        problems.push(FieldError::invalid(field, value, "must be greater than or equal to 0"));
    }
}

/// A path below a directory must not lead out of it.
fn descending_path(value: &str, field: &Path, problems: &mut Vec<FieldError>) {
    if value.starts_with('/') {
        problems.push(FieldError::invalid(field, quoted(value), "must be a relative path"));
    }
    no_backsteps(value, field, problems);
}

fn no_backsteps(value: &str, field: &Path, problems: &mut Vec<FieldError>) {
    if value.split('/').any(|part| part == "..") {
        problems.push(FieldError::invalid(field, quoted(value), "must not contain '..'"));
    }
}

#[cfg(test)]
mod tests;
