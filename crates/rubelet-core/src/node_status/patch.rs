//! The smallest patch from one Node object to the next.
//!
//! Owns: the strategic merge patch for `/status`: members that differ, conditions by their type, addresses as a whole.
//! Never: touches the spec.
//! Upstream: `PatchNodeStatus`, `strategicpatch.CreateTwoWayMergePatch`.

use k8s_openapi::api::core::v1::Node;
use serde_json::{Map, Value, json};

/// `None` when there is nothing to change.
pub fn patch(known: &Node, updated: &Node) -> Option<Value> {
    let metadata = ["labels", "annotations"].into_iter().filter_map(|member| {
        let (known, updated) = (value(&known.metadata), value(&updated.metadata));
        let change = difference(&known[member], &updated[member])?;
        Some((member.to_owned(), change))
    });
    let metadata: Map<_, _> = metadata.collect();
    let (known, updated) = (value(&known.status), value(&updated.status));
    let mut status = match difference(&without_merged(&known), &without_merged(&updated)) {
        Some(Value::Object(changes)) => changes,
        _ => Map::new(),
    };
    if let Some(conditions) = changed_conditions(&known["conditions"], &updated["conditions"]) {
        let order: Vec<_> = list(&updated["conditions"]).map(|condition| json!({"type": condition["type"]})).collect();
        status.insert("$setElementOrder/conditions".to_owned(), Value::Array(order));
        status.insert("conditions".to_owned(), conditions);
    }
    if known["addresses"] != updated["addresses"] {
        // The API's schema merges by type, which would make one of two addresses of the same type.
        let replaced = list(&updated["addresses"]).cloned().chain([json!({"$patch": "replace"})]);
        status.insert("addresses".to_owned(), replaced.collect());
    }
    let parts = [("metadata", metadata), ("status", status)];
    let parts: Map<_, _> = parts
        .into_iter()
        .filter(|(_, changes)| !changes.is_empty())
        .map(|(name, changes)| (name.to_owned(), Value::Object(changes)))
        .collect();
    (!parts.is_empty()).then_some(Value::Object(parts))
}

/// Absent members become `null`; non-objects are replaced as a whole.
fn difference(known: &Value, updated: &Value) -> Option<Value> {
    let (Value::Object(before), Value::Object(after)) = (known, updated) else {
        return (known != updated).then(|| updated.clone());
    };
    let gone = before.keys().filter(|name| !after.contains_key(*name)).map(|name| (name.clone(), Value::Null));
    let changed = after.iter().filter_map(|(name, value)| {
        let change = difference(before.get(name).unwrap_or(&Value::Null), value)?;
        Some((name.clone(), change))
    });
    let changes: Map<_, _> = gone.chain(changed).collect();
    (!changes.is_empty()).then_some(Value::Object(changes))
}

/// Each changed condition with its type and its differences.
fn changed_conditions(known: &Value, updated: &Value) -> Option<Value> {
    let changes: Vec<_> = list(updated)
        .filter_map(|condition| {
            let before = list(known).find(|before| before["type"] == condition["type"]).unwrap_or(&Value::Null);
            let mut change = difference(before, condition)?;
            change["type"] = condition["type"].clone();
            Some(change)
        })
        .collect();
    (!changes.is_empty()).then_some(Value::Array(changes))
}

fn without_merged(status: &Value) -> Value {
    let mut status = status.as_object().cloned().unwrap_or_default();
    status.remove("conditions");
    status.remove("addresses");
    Value::Object(status)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn value<T: serde::Serialize>(part: &T) -> Value {
    serde_json::to_value(part).expect("parts of a node are JSON")
}
