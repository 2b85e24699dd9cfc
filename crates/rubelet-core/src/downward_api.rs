//! The downward API: fields of a pod as text.
//!
//! Owns: metadata fields and resource fields as text, for environments and for volumes.
//! Upstream: `pkg/fieldpath`, `pkg/api/v1/resource`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};

use crate::{
    container::ConfigError,
    id::{PodUid, name_of, namespace_of},
    quantity::{Quantity, amount},
    settings::Allocatable,
};

/// A field of the pod's metadata.
pub fn metadata_value(pod: &Pod, uid: &PodUid, path: &str) -> Result<String, ConfigError> {
    let (annotations, labels) = (&pod.metadata.annotations, &pod.metadata.labels);
    if let Some((map, key)) = subscripted(path) {
        let map = match map {
            "metadata.annotations" => annotations,
            "metadata.labels" => labels,
            _ => return Err(ConfigError(format!("fieldPath {path:?} does not support subscript"))),
        };
        return Ok(map.as_ref().and_then(|map| map.get(key)).cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => name_of(pod).to_owned(),
        "metadata.namespace" => namespace_of(pod).to_owned(),
        "metadata.uid" => uid.as_str().to_owned(),
        "metadata.annotations" => quoted_lines(annotations.as_ref()),
        "metadata.labels" => quoted_lines(labels.as_ref()),
        other => return Err(ConfigError(format!("unsupported fieldPath: {other}"))),
    })
}

/// Rounded up to whole divisors. A missing limit is the node's allocatable amount.
pub fn resource_value(
    field: &ResourceFieldSelector,
    container: &Container,
    allocatable: Allocatable,
) -> Result<String, ConfigError> {
    let unsupported = || ConfigError(format!("unsupported container resource : {}", field.resource));
    let (kind, resource) = field.resource.split_once('.').ok_or_else(unsupported)?;
    let is_huge_pages = resource.starts_with("hugepages-");
    if !matches!(resource, "cpu" | "memory" | "ephemeral-storage") && !is_huge_pages {
        return Err(unsupported());
    }
    let resources = container.resources.as_ref();
    let quantity = match kind {
        "requests" => amount(resources.and_then(|resources| resources.requests.as_ref()), resource),
        "limits" => match amount(resources.and_then(|resources| resources.limits.as_ref()), resource) {
            limit if limit.is_zero() && !is_huge_pages => allocatable_amount(allocatable, resource),
            limit => limit,
        },
        _ => return Err(unsupported()),
    };
    let divisor = match &field.divisor {
        None => Quantity::ZERO,
        Some(divisor) => Quantity::parse(&divisor.0).map_err(|error| ConfigError(error.to_string()))?,
    };
    let divisor = if divisor.is_zero() { Quantity::from_units(1) } else { divisor };
    let (amount, step) = match resource {
        "cpu" => (quantity.millis(), divisor.millis()),
        _ => (quantity.value(), divisor.value()),
    };
    Ok((amount.saturating_add(step - 1) / step.max(1)).to_string())
}

fn allocatable_amount(allocatable: Allocatable, resource: &str) -> Quantity {
    match resource {
        "cpu" => Quantity::from_millis(allocatable.cpu_millis),
        "memory" => Quantity::from_units(allocatable.memory_bytes),
        _ => Quantity::from_units(allocatable.ephemeral_storage_bytes),
    }
}

/// `metadata.labels['key']` as path and key.
fn subscripted(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['").filter(|(path, _)| !path.is_empty())
}

/// One `key="value"` per line, sorted, quoted as Go quotes.
fn quoted_lines(map: Option<&BTreeMap<String, String>>) -> String {
    let lines: Vec<String> =
        map.into_iter().flatten().map(|(key, value)| format!("{key}={}", go_quoted(value))).collect();
    lines.join("\n")
}

/// `strconv.Quote` for text that is valid UTF-8.
fn go_quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            control if control < ' ' || control == '\u{7f}' => {
                quoted.push_str(&format!("\\x{:02x}", u32::from(control)));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}
