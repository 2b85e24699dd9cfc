//! A configuration as a JSON document: merging, paths into it, decoding, unknown fields, the shown form.
//!
//! Owns: everything that works on a configuration without the meaning of its fields.
//! Upstream: `jsonpatch.MergePatch`, `kubeletconfig/util/codec`.

use serde_json::{Map, Value};

use super::{
    gates::GateError,
    types::{Field, KubeletConfiguration, Rule, Section},
};

/// A value of a wrong type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Names joined by dots, as in `authentication.webhook.cacheTTL`.
    pub path: String,
    pub message: String,
}

pub(super) struct Decoded {
    /// Absent fields have their unconditional default; zeroes are kept.
    pub config: KubeletConfiguration,
    /// Paths of fields that KubeletConfiguration does not have.
    pub unknown: Vec<String>,
}

impl From<GateError> for Mismatch {
    fn from(error: GateError) -> Self {
        Mismatch { path: format!("featureGates.{}", error.gate), message: error.message }
    }
}

/// Decodes leniently; all mismatches at once.
pub(super) fn decode(document: &Value) -> Result<Decoded, Vec<Mismatch>> {
    let document = without_nulls(document);
    match serde_json::from_value::<KubeletConfiguration>(document.clone()) {
        Ok(config) => {
            let known = serde_json::to_value(&config).expect("a configuration has only string keys");
            Ok(Decoded { unknown: lost(&document, &known), config })
        }
        // One leaf at a time, because the decoder stops at its first error without its path.
        Err(whole) => {
            let mismatches: Vec<Mismatch> = leaves(&document)
                .into_iter()
                .filter_map(|(path, leaf)| {
                    let error = serde_json::from_value::<KubeletConfiguration>(nest(&path, leaf)).err()?;
                    Some(Mismatch { path: path.join("."), message: error.to_string() })
                })
                .collect();
            let fallback = || vec![Mismatch { path: String::new(), message: whole.to_string() }];
            Err(if mismatches.is_empty() { fallback() } else { mismatches })
        }
    }
}

/// The v1beta1 form that users see and drop-ins are merged into, without the fields that Go's `omitempty` omits.
pub fn shown(config: &KubeletConfiguration) -> Value {
    let mut document = serde_json::to_value(config).expect("a configuration has only string keys");
    prune(&mut document, KubeletConfiguration::FIELDS);
    document
}

/// JSON merge patch (RFC 7386): objects merge, null removes, everything else replaces.
pub(super) fn merge(base: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *base = patch.clone();
        return;
    };
    if !base.is_object() {
        *base = Value::Object(Map::new());
    }
    let base = base.as_object_mut().expect("it was just made an object");
    for (key, value) in patch {
        if value.is_null() {
            base.remove(key);
        } else {
            merge(base.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// The value at a dotted path.
pub fn at<'a>(document: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(document, |value, key| value.get(key))
}

/// Sets the value at a dotted path, making the sections on the way.
pub(super) fn put(document: &mut Value, path: &str, value: Value) {
    let mut here = document;
    for key in path.split('.') {
        if !here.is_object() {
            *here = Value::Object(Map::new());
        }
        here = here.as_object_mut().expect("it was just made an object").entry(key).or_insert(Value::Null);
    }
    *here = value;
}

/// A document with nothing but a value at a dotted path.
pub(super) fn nested(path: &str, value: &Value) -> Value {
    path.split('.').rev().fold(value.clone(), |inner, key| Value::Object(Map::from_iter([(key.to_owned(), inner)])))
}

/// The dotted paths of all values that are not objects, and of empty objects.
pub(super) fn leaf_paths(document: &Value) -> Vec<String> {
    leaves(document).into_iter().map(|(path, _)| path.join(".")).collect()
}

fn leaves(document: &Value) -> Vec<(Vec<String>, Value)> {
    let mut found = Vec::new();
    let mut open = vec![(Vec::new(), document)];
    while let Some((path, value)) = open.pop() {
        match value {
            Value::Object(fields) if !fields.is_empty() => {
                // Backwards, so that they come off the stack in order.
                for (key, value) in fields.iter().rev() {
                    open.push((path.iter().chain([key]).cloned().collect(), value));
                }
            }
            leaf => found.push((path, leaf.clone())),
        }
    }
    found
}

fn nest(path: &[String], leaf: Value) -> Value {
    path.iter().rev().fold(leaf, |inner, key| Value::Object(Map::from_iter([(key.clone(), inner)])))
}

/// Go ignores null.
fn without_nulls(document: &Value) -> Value {
    match document {
        Value::Object(fields) => {
            let given = fields.iter().filter(|(_, value)| !value.is_null());
            Value::Object(given.map(|(key, value)| (key.clone(), without_nulls(value))).collect())
        }
        other => other.clone(),
    }
}

/// Paths that are in `given` but not in `kept`.
fn lost(given: &Value, kept: &Value) -> Vec<String> {
    let inner = |prefix: String, given: &Value, kept: &Value| {
        lost(given, kept)
            .into_iter()
            .map(move |path| if path.is_empty() { prefix.clone() } else { join(&prefix, &path) })
    };
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => given
            .iter()
            .flat_map(|(key, value)| match kept.get(key) {
                Some(kept) => inner(key.clone(), value, kept).collect(),
                None => vec![key.clone()],
            })
            .collect(),
        (Value::Array(given), Value::Array(kept)) => given
            .iter()
            .zip(kept)
            .enumerate()
            .flat_map(|(index, (given, kept))| inner(format!("[{index}]"), given, kept))
            .collect(),
        (_, _) => Vec::new(),
    }
}

fn join(prefix: &str, path: &str) -> String {
    if path.starts_with('[') { format!("{prefix}{path}") } else { format!("{prefix}.{path}") }
}

fn prune(document: &mut Value, fields: &[Field]) {
    let Some(values) = document.as_object_mut() else { return };
    for field in fields {
        let Some(value) = values.get_mut(field.name) else { continue };
        let hidden = match field.rule {
            Rule::Pointer => value.is_null(),
            Rule::Value | Rule::List => is_empty(value),
            Rule::Nested(inner) => {
                prune(value, inner);
                false
            }
        };
        if hidden {
            values.remove(field.name);
        }
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn merging_replaces_lists_merges_sections_and_lets_null_remove() {
        let table = [
            (json!({"a": 1}), json!({"a": 2}), json!({"a": 2})),
            (json!({"a": [1, 2]}), json!({"a": [3]}), json!({"a": [3]})),
            (json!({"a": {"b": 1, "c": 2}}), json!({"a": {"b": 3}}), json!({"a": {"b": 3, "c": 2}})),
            (json!({"a": 1, "b": 2}), json!({"a": null}), json!({"b": 2})),
            (json!({"a": {"b": 1}}), json!({"a": {"b": null}}), json!({"a": {}})),
            (json!({"a": 1}), json!({"a": {"b": null, "c": 1}}), json!({"a": {"c": 1}})),
            (json!({}), json!({}), json!({})),
        ];
        for (mut base, patch, merged) in table {
            merge(&mut base, &patch);
            assert_eq!(base, merged, "{patch}");
        }
    }

    #[test]
    fn every_mismatch_is_named_at_once() {
        let document = json!({
            "port": "ten", "address": 5, "syncFrequency": 60,
            "authentication": {"webhook": {"cacheTTL": "5x"}}, "maxPods": 3,
        });
        let Err(mismatches) = decode(&document) else { panic!("it cannot decode") };
        let text: Vec<String> = mismatches.iter().map(|m| format!("{}: {}", m.path, m.message)).collect();
        insta::assert_snapshot!(text.join("\n"), @r#"
        address: invalid type: integer `5`, expected a string
        authentication.webhook.cacheTTL: time: unknown unit "x" in duration "5x", allowed are forms such as 300ms, 10s or 2h45m
        port: invalid type: string "ten", expected i32
        syncFrequency: invalid type: integer `60`, expected a string
        "#);
    }

    #[test]
    fn unknown_fields_are_named_wherever_they_are() {
        let document = json!({
            "prot": 1, "port": 1, "tracing": {"endpoint": "x", "foo": 1}, "evictionHard": {"anything": "5%"},
            "shutdownGracePeriodByPodPriority": [{"priority": 1, "bar": 2}], "nothing": null,
        });
        let decoded = decode(&document).ok().unwrap();
        assert_eq!(decoded.unknown, ["prot", "shutdownGracePeriodByPodPriority[0].bar", "tracing.foo"]);
    }

    #[test]
    fn a_path_can_be_put_and_read() {
        let mut document = json!({"a": {"b": 1}, "c": 2});
        put(&mut document, "a.d", json!([1]));
        put(&mut document, "e.f.g", json!("x"));
        put(&mut document, "c", json!({}));
        assert_eq!(document, json!({"a": {"b": 1, "d": [1]}, "c": {}, "e": {"f": {"g": "x"}}}));
        assert_eq!(at(&document, "e.f.g"), Some(&json!("x")));
        assert_eq!(at(&document, "a.x"), None);
    }

    proptest! {
        #[test]
        fn merging_twice_is_merging_once(keys in proptest::collection::vec(("[a-c]", 0..4_u8), 0..6)) {
            let patch = Value::Object(keys.into_iter().map(|(key, n)| (key, if n == 0 { Value::Null } else { json!({"n": n}) })).collect());
            let mut once = json!({"a": 1, "b": {"n": 9, "m": 1}});
            merge(&mut once, &patch);
            let mut twice = once.clone();
            merge(&mut twice, &patch);
            prop_assert_eq!(once, twice);
        }
    }
}
