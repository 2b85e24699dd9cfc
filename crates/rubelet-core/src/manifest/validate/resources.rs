//! Requests and limits.
//!
//! Upstream: ValidateContainerResourceRequirements, validatePodResourceRequirements.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::ResourceRequirements, apimachinery::pkg::api::resource::Quantity as Text};

use super::{FieldError, Path, invalid, names, quoted};
use crate::quantity::Quantity;

pub(super) fn container(resources: &ResourceRequirements, path: &Path, problems: &mut Vec<FieldError>) {
    requirements(resources, path, problems);
    for (list, field) in [(&resources.limits, "limits"), (&resources.requests, "requests")] {
        for name in list.iter().flat_map(BTreeMap::keys) {
            container_resource(name, &path.child(field).key(name), problems);
        }
    }
}

pub(super) fn pod(resources: &ResourceRequirements, path: &Path, problems: &mut Vec<FieldError>) {
    requirements(resources, path, problems);
    for (list, field) in [(&resources.limits, "limits"), (&resources.requests, "requests")] {
        for name in list.iter().flat_map(BTreeMap::keys) {
            if !matches!(name.as_str(), "cpu" | "memory") && !name.starts_with("hugepages-") {
                let field = path.child(field).key(name);
                problems.push(FieldError::unsupported(&field, name, &["cpu", "hugepages-", "memory"]));
            }
        }
    }
}

/// A quantity that can be read and is not below zero.
pub(super) fn amount(text: &Text, field: &Path, problems: &mut Vec<FieldError>) -> Option<Quantity> {
    match Quantity::parse(&text.0) {
        Ok(amount) if amount < Quantity::ZERO => {
            problems.push(FieldError::invalid(field, quoted(&text.0), "must be greater than or equal to 0"));
            None
        }
        Ok(amount) => Some(amount),
        Err(error) => {
            problems.push(FieldError::invalid(field, quoted(&text.0), &error.to_string()));
            None
        }
    }
}

fn requirements(resources: &ResourceRequirements, path: &Path, problems: &mut Vec<FieldError>) {
    let (limits_path, requests_path) = (path.child("limits"), path.child("requests"));
    let limits = amounts(resources.limits.as_ref(), &limits_path, problems);
    let requests = amounts(resources.requests.as_ref(), &requests_path, problems);
    for (name, (request, request_text)) in &requests {
        let may_overcommit = is_native(name) && !name.starts_with("hugepages-");
        let Some((limit, limit_text)) = limits.get(name) else {
            let has_unreadable_limit = resources.limits.as_ref().is_some_and(|limits| limits.contains_key(*name));
            if !may_overcommit && !has_unreadable_limit {
                let why = "Limit must be set for non overcommitable resources";
                problems.push(FieldError::required(&limits_path, why));
            }
            continue;
        };
        let why = if !may_overcommit && request != limit {
            format!("must be equal to {name} limit of {limit_text}")
        } else if request > limit {
            format!("must be less than or equal to {name} limit of {limit_text}")
        } else {
            continue;
        };
        problems.push(FieldError::invalid(&requests_path, quoted(request_text), &why));
    }
    let has = |test: fn(&str) -> bool| limits.keys().chain(requests.keys()).any(|name| test(name));
    if has(|name| name.starts_with("hugepages-")) && !has(|name| matches!(name, "cpu" | "memory")) {
        problems.push(FieldError::forbidden(path, "HugePages require cpu or memory"));
    }
}

type Amounts<'a> = BTreeMap<&'a str, (Quantity, &'a str)>;

fn amounts<'a>(list: Option<&'a BTreeMap<String, Text>>, path: &Path, problems: &mut Vec<FieldError>) -> Amounts<'a> {
    let mut amounts = BTreeMap::new();
    for (name, text) in list.into_iter().flatten() {
        if let Some(amount) = amount(text, &path.key(name), problems) {
            if !is_native(name) && amount.millis() % 1000 != 0 {
                problems.push(FieldError::invalid(&path.key(name), quoted(&text.0), "must be an integer"));
            }
            amounts.insert(name.as_str(), (amount, text.0.as_str()));
        }
    }
    amounts
}

fn container_resource(name: &str, field: &Path, problems: &mut Vec<FieldError>) {
    let messages = names::qualified(name);
    if !messages.is_empty() {
        invalid(field, name, &messages, problems);
        return;
    }
    let is_standard = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    if !name.contains('/') && !is_standard {
        problems.push(FieldError::invalid(field, quoted(name), "must be a standard resource for containers"));
    }
    if !is_native(name) && name.starts_with("requests.") {
        problems.push(FieldError::invalid(field, quoted(name), "doesn't follow extended resource name standard"));
    }
}

fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}
