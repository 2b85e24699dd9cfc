//! Patches as the API server applies them.
//!
//! Owns: merge patches, and strategic merge patches with the merge keys of the lists that agents and users write. Never: authorizes
//! writes. Upstream: `apimachinery/pkg/util/strategicpatch`, and the `patchMergeKey`s of `core/v1`.

use serde_json::{Map, Value};

/// Every other list is replaced as a whole; container statuses are among those.
const MERGED_BY_KEY: [(&str, &str); 8] = [
    ("containers", "name"),
    ("ephemeralContainers", "name"),
    ("initContainers", "name"),
    ("conditions", "type"),
    ("addresses", "type"),
    ("podIPs", "ip"),
    ("hostIPs", "ip"),
    ("resourceClaimStatuses", "name"),
];

const ORDER: &str = "$setElementOrder/";

pub(crate) fn strategic(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    let fields = object(target);
    for (name, change) in changes.iter().filter(|(name, _)| !name.starts_with('$')) {
        let key = MERGED_BY_KEY.iter().find(|(list, _)| list == name).map(|(_, key)| *key);
        match (change, key) {
            (Value::Null, _) => {
                fields.remove(name);
            }
            (Value::Array(elements), Some(key)) => merge_list(fields.entry(name).or_insert(Value::Null), key, elements),
            (Value::Object(_), _) => strategic(fields.entry(name).or_insert(Value::Null), change),
            (value, _) => {
                fields.insert(name.clone(), value.clone());
            }
        }
    }
    for (name, order) in changes {
        let list = name.strip_prefix(ORDER);
        let key = list.and_then(|list| MERGED_BY_KEY.iter().find(|(known, _)| *known == list)).map(|(_, key)| *key);
        if let (Some(list), Some(key), Value::Array(order)) = (list, key, order)
            && let Some(Value::Array(elements)) = fields.get_mut(list)
        {
            sort(elements, key, order);
        }
    }
}

/// Null removes, objects are merged, everything else is replaced.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    let fields = object(target);
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name).or_insert(Value::Null), change);
        }
    }
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("it was just made one")
}

fn merge_list(target: &mut Value, key: &str, elements: &[Value]) {
    let mut list = target.as_array().cloned().unwrap_or_default();
    if elements.iter().any(|element| element["$patch"] == "replace") {
        list.clear();
        list.extend(elements.iter().filter(|element| element.get("$patch").is_none()).cloned());
    } else {
        for element in elements {
            let known = list.iter().position(|known| known[key] == element[key]);
            match known {
                Some(at) if element["$patch"] == "delete" => drop(list.remove(at)),
                Some(at) => strategic(&mut list[at], element),
                None if element["$patch"] == "delete" => {}
                None => list.push(element.clone()),
            }
        }
    }
    *target = Value::Array(list);
}

/// Entries missing from the order come last, unchanged.
fn sort(elements: &mut [Value], key: &str, order: &[Value]) {
    let rank = |element: &Value| order.iter().position(|named| named[key] == element[key]).unwrap_or(usize::MAX);
    elements.sort_by_key(rank);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(before: Value, patch: &Value, after: &Value) {
        let mut target = before;
        strategic(&mut target, patch);
        assert_eq!(target, *after);
    }

    #[test]
    fn conditions_are_merged_by_their_type_and_put_in_order() {
        check(
            json!({ "conditions": [{ "type": "A", "status": "False", "reason": "x" }, { "type": "B" }] }),
            &json!({
                "$setElementOrder/conditions": [{ "type": "C" }, { "type": "A" }],
                "conditions": [
                    { "type": "A", "status": "True", "reason": null },
                    { "type": "C" },
                    { "$patch": "delete", "type": "B" },
                ],
            }),
            &json!({ "conditions": [{ "type": "C" }, { "type": "A", "status": "True" }] }),
        );
    }

    #[test]
    fn lists_without_merge_key_are_replaced() {
        check(
            json!({ "containerStatuses": [{ "name": "a", "ready": true }], "addresses": [{ "type": "IP" }] }),
            &json!({
                "containerStatuses": [{ "name": "b" }],
                "addresses": [{ "type": "Name" }, { "$patch": "replace" }],
            }),
            &json!({ "containerStatuses": [{ "name": "b" }], "addresses": [{ "type": "Name" }] }),
        );
    }

    #[test]
    fn null_removes_and_objects_are_merged() {
        check(
            json!({ "status": { "phase": "Pending", "reason": "x", "keep": 1 } }),
            &json!({ "status": { "phase": "Running", "reason": null } }),
            &json!({ "status": { "phase": "Running", "keep": 1 } }),
        );
    }
}
