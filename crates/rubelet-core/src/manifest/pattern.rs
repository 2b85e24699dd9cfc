//! Which fields of a pod are set, by path pattern.
//!
//! Owns: the pattern language. `spec.volumes[*].nfs` is every entry's field; `<containers>` stands for the three lists
//! of containers, `<resource>` for any resource but those of the node itself.

use serde_json::Value;

use super::field::Path;

/// The paths of the fields of `value` that match and are set.
pub(super) fn used(value: &Value, pattern: &str) -> Vec<Path> {
    let segments: Vec<&str> = pattern.split('.').collect();
    let mut found = Vec::new();
    descend(value, &segments, &Path::root(), &mut found);
    found
}

fn descend(value: &Value, segments: &[&str], path: &Path, found: &mut Vec<Path>) {
    let Some((segment, rest)) = segments.split_first() else {
        if is_set(value) {
            found.push(path.clone());
        }
        return;
    };
    let (name, is_list) = match segment.strip_suffix("[*]") {
        Some(name) => (name, true),
        None => (*segment, false),
    };
    let Value::Object(fields) = value else { return };
    for (field, value) in fields.iter().filter(|(field, _)| matches(name, field)) {
        let path = if name == "<resource>" { path.key(field) } else { path.child(field) };
        match value {
            Value::Array(items) if is_list => {
                for (index, item) in items.iter().enumerate() {
                    descend(item, rest, &path.index(index), found);
                }
            }
            value => descend(value, rest, &path, found),
        }
    }
}

fn matches(name: &str, field: &str) -> bool {
    match name {
        "<containers>" => matches!(field, "containers" | "initContainers" | "ephemeralContainers"),
        "<resource>" => !matches!(field, "cpu" | "memory" | "ephemeral-storage") && !field.starts_with("hugepages-"),
        name => name == field,
    }
}

/// In the API, empty is unset. An empty volume source or handler has a meaning, so objects count.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => true,
    }
}
