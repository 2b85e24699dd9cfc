//! Decoding of plain data into a typed pod, with an error for every field of a wrong type and a warning for every unknown one.
//!
//! Owns: which kinds are accepted. Never: validates values, applies defaults.

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Origin, Warning,
    field::{FieldError, Path, quoted},
};

/// Enough to fix a file; a file of another kind would fill the log.
const MAX_PROBLEMS: usize = 20;

/// The pods' values in a manifest, each with its path.
pub(super) fn split(value: Value, origin: &Origin) -> Result<Vec<(Path, Value)>, FieldError> {
    let root = Path::root();
    let Value::Object(mut object) = value else {
        return Err(FieldError::new(&root, format!("expected a v1 Pod, found {}", description(&value))));
    };
    let kind = required_text(&object, "kind")?;
    let api_version = required_text(&object, "apiVersion")?;
    let kinds: &[&str] = match origin {
        Origin::File(_) => &["Pod"],
        Origin::Url(_) => &["Pod", "PodList"],
    };
    if !kinds.contains(&kind.as_str()) {
        return Err(FieldError::unsupported(&root.child("kind"), &kind, kinds));
    }
    if api_version != "v1" {
        return Err(FieldError::unsupported(&root.child("apiVersion"), &api_version, &["v1"]));
    }
    if kind == "Pod" {
        return Ok(vec![(root, Value::Object(object))]);
    }
    let items = root.child("items");
    match object.remove("items") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(pods)) => {
            Ok(pods.into_iter().enumerate().map(|(index, pod)| (items.index(index), pod)).collect())
        }
        Some(other) => Err(FieldError::invalid(&items, shown(&other), "expected a list of pods")),
    }
}

/// The typed pod, and the unknown fields of `value`.
pub(super) fn pod(mut value: Value, path: &Path) -> Result<(Pod, Vec<Warning>), Vec<FieldError>> {
    let Value::Object(object) = &mut value else {
        return Err(vec![FieldError::new(path, format!("expected a v1 Pod, found {}", description(&value)))]);
    };
    // Checked by `split`; items of a list need not have them.
    object.remove("apiVersion");
    object.remove("kind");
    let pod = match Pod::deserialize(&value) {
        Ok(pod) => pod,
        Err(error) => {
            let mut problems = Vec::new();
            wrong_types(&value, &mut Vec::new(), path, &mut problems);
            if problems.is_empty() {
                problems.push(FieldError::new(path, error.to_string()));
            }
            return Err(problems);
        }
    };
    let mut warnings = Vec::new();
    unknown_fields(&value, &encoded(&pod), path, &mut warnings);
    Ok((pod, warnings))
}

/// The pod as data, without unset fields.
pub(super) fn encoded(pod: &Pod) -> Value {
    serde_json::to_value(pod).expect("a pod has only string keys and finite numbers")
}

fn required_text(object: &Map<String, Value>, name: &str) -> Result<String, FieldError> {
    let path = Path::root().child(name);
    match object.get(name) {
        None | Some(Value::Null) => Err(FieldError::required(&path, "")),
        Some(Value::String(text)) if text.is_empty() => Err(FieldError::required(&path, "")),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(FieldError::invalid(&path, shown(other), "expected a string")),
    }
}

enum Step {
    Key(String),
    Index,
}

/// Finds the smallest parts that cannot be decoded. No field of a pod is required for decoding, so a part is wrong
/// exactly when a pod made of that part alone is.
fn wrong_types(part: &Value, steps: &mut Vec<Step>, path: &Path, problems: &mut Vec<FieldError>) {
    if problems.len() >= MAX_PROBLEMS {
        return;
    }
    let Err(error) = Pod::deserialize(&wrapped(part.clone(), steps)) else { return };
    let found_before = problems.len();
    if Pod::deserialize(&wrapped(emptied(part), steps)).is_err() {
        problems.push(FieldError::invalid(path, shown(part), &expectation(&error.to_string())));
        return;
    }
    match part {
        Value::Object(fields) => {
            for (name, field) in fields {
                steps.push(Step::Key(name.clone()));
                wrong_types(field, steps, &path.child(name), problems);
                steps.pop();
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                steps.push(Step::Index);
                wrong_types(item, steps, &path.index(index), problems);
                steps.pop();
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    // Each part is valid alone, but not together.
    if problems.len() == found_before {
        problems.push(FieldError::invalid(path, shown(part), &expectation(&error.to_string())));
    }
}

/// Distinguishes a list in place of an object from an object with an invalid member.
fn emptied(part: &Value) -> Value {
    match part {
        Value::Object(_) => Value::Object(Map::new()),
        Value::Array(_) => Value::Array(Vec::new()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => part.clone(),
    }
}

fn wrapped(part: Value, steps: &[Step]) -> Value {
    steps.iter().rev().fold(part, |inner, step| match step {
        Step::Key(name) => Value::Object(Map::from_iter([(name.clone(), inner)])),
        Step::Index => Value::Array(vec![inner]),
    })
}

/// serde says `invalid type: string "x", expected i32`; the value is shown already.
fn expectation(error: &str) -> String {
    let expected = error.rsplit_once(", expected ").map_or(error, |(_, expected)| expected);
    match expected {
        "i32" | "i64" | "u32" | "u64" => "expected an integer".to_owned(),
        "a sequence" => "expected a list".to_owned(),
        "a map" => "expected an object".to_owned(),
        other if other == error => other.to_owned(),
        other => format!("expected {other}"),
    }
}

/// Fields of `given` that `kept` lacks: the pod's type does not have them.
fn unknown_fields(given: &Value, kept: &Value, path: &Path, warnings: &mut Vec<Warning>) {
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => {
            for (name, value) in given {
                match kept.get(name) {
                    Some(kept) => unknown_fields(value, kept, &path.child(name), warnings),
                    // In a template, null means "not set".
                    None if value.is_null() => {}
                    None => warnings.push(Warning { field: path.child(name).to_string() }),
                }
            }
        }
        (Value::Array(given), Value::Array(kept)) => {
            for (index, (given, kept)) in given.iter().zip(kept).enumerate() {
                unknown_fields(given, kept, &path.index(index), warnings);
            }
        }
        (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_), _)
        | (_, Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_))
        | (Value::Object(_), Value::Array(_))
        | (Value::Array(_), Value::Object(_)) => {}
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::Array(_) | Value::Object(_) => description(value).to_owned(),
    }
}

fn description(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::*;

    fn decoded(value: Value) -> String {
        match pod(value, &Path::root()) {
            Ok((_, warnings)) => warnings.iter().map(Warning::to_string).collect::<Vec<_>>().join("\n"),
            Err(problems) => problems.iter().map(FieldError::to_string).collect::<Vec<_>>().join("\n"),
        }
    }

    #[test]
    fn every_field_of_a_wrong_type_is_named() {
        let found = decoded(json!({
            "metadata": { "name": "web", "labels": { "tier": 1 } },
            "spec": {
                "hostNetwork": "yes please",
                "volumes": { "name": "v" },
                "containers": [
                    { "name": "a", "image": "nginx" },
                    { "name": "b", "env": [{ "name": "N", "value": 1 }], "ports": [{ "containerPort": "http" }] },
                    "c",
                ],
            },
        }));
        assert_snapshot!(found, @r#"
        metadata.labels.tier: Invalid value: 1: expected a string
        spec.containers[1].env[0].value: Invalid value: 1: expected a string
        spec.containers[1].ports[0].containerPort: Invalid value: "http": expected an integer
        spec.containers[2]: Invalid value: "c": expected Container
        spec.hostNetwork: Invalid value: "yes please": expected a boolean
        spec.volumes: Invalid value: an object: expected a list
        "#);
    }

    #[test]
    fn unknown_fields_are_named_and_nulls_are_not() {
        let found = decoded(json!({
            "metadata": { "name": "web", "anotations": {} },
            "spec": {
                "nodeSelector": null,
                "containers": [{ "name": "a", "comand": ["sh"], "resources": { "limits": { "cpu": 1 } } }],
                "volumes": [{ "name": "v", "emptydir": {} }],
            },
        }));
        assert_snapshot!(found, @r#"
        unknown field "metadata.anotations"
        unknown field "spec.containers[0].comand"
        unknown field "spec.volumes[0].emptydir"
        "#);
    }

    #[test]
    fn only_pods_are_taken_and_lists_only_from_a_url() {
        let file = Origin::File("/m/web.yaml".into());
        let url = Origin::Url("http://m/".into());
        let pods = |value: Value, origin: &Origin| match split(value, origin) {
            Ok(pods) => pods.iter().map(|(path, _)| format!("<{path}>")).collect::<Vec<_>>().join(" "),
            Err(problem) => problem.to_string(),
        };
        let list = json!({ "apiVersion": "v1", "kind": "PodList", "items": [{}, {}] });
        let found = [
            pods(json!({ "apiVersion": "v1", "kind": "Pod" }), &file),
            pods(list.clone(), &url),
            pods(list, &file),
            pods(json!({ "apiVersion": "apps/v1", "kind": "Deployment" }), &file),
            pods(json!({ "apiVersion": "v2", "kind": "Pod" }), &file),
            pods(json!({ "kind": "Pod" }), &file),
            pods(json!(null), &file),
            pods(json!(["a"]), &url),
        ]
        .join("\n");
        assert_snapshot!(found, @r#"
        <>
        <items[0]> <items[1]>
        kind: Unsupported value: "PodList": supported values: "Pod"
        kind: Unsupported value: "Deployment": supported values: "Pod"
        apiVersion: Unsupported value: "v2": supported values: "v1"
        apiVersion: Required value
        expected a v1 Pod, found nothing
        expected a v1 Pod, found a list
        "#);
    }
}
