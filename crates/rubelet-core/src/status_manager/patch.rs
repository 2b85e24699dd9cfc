//! The smallest patch that makes the API server's status ours.
//!
//! Owns: the difference of two statuses as a strategic merge patch. Never: decides which status is right.
//! Upstream: `PatchPodStatus`, `strategicpatch.CreateTwoWayMergePatch`.

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde_json::{Map, Value, json};

use crate::pod::status::conditions::is_owned;

/// Lists that the API merges by a key; it replaces all others as a whole.
const MERGED_BY_KEY: [(&str, &str); 4] =
    [("conditions", "type"), ("podIPs", "ip"), ("hostIPs", "ip"), ("resourceClaimStatuses", "name")];

/// `None` when nothing differs. The UID keeps the patch from another pod of this name.
pub fn status_patch(stored: &Pod, wanted: &PodStatus) -> Option<Value> {
    let old = object(stored.status.as_ref().unwrap_or(&PodStatus::default()));
    let changes = difference(&old, &object(wanted));
    (!changes.is_empty()).then(|| json!({ "metadata": { "uid": stored.metadata.uid }, "status": changes }))
}

/// The same when the effect of our last patch is unknown: sends all fields we own, whatever our copy of the API object holds.
pub(super) fn whole_status_patch(stored: &Pod, wanted: &PodStatus) -> Value {
    let (mut doubtful, wanted) = (object(stored.status.as_ref().unwrap_or(&PodStatus::default())), object(wanted));
    doubtful.extend(OURS.map(|field| (field.to_owned(), unknown())));
    for field in LISTS_OF_OURS {
        doubtful.remove(field);
    }
    for field in ["podIPs", "hostIPs"] {
        let kept = wanted.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
        if let Some(Value::Array(known)) = doubtful.get_mut(field) {
            known.retain(|element| !kept.contains(element));
        }
    }
    let is_ours = |condition: &Value| condition["type"].as_str().is_some_and(is_owned);
    let listed = |status: &Map<String, Value>| -> Vec<Value> {
        status.get("conditions").and_then(Value::as_array).cloned().unwrap_or_default()
    };
    // DisruptionTarget is shared: what the API server is not known to have is sent.
    let mut conditions = listed(&doubtful);
    conditions.extend(listed(&wanted).into_iter().filter(is_ours));
    for condition in conditions.iter_mut().filter(|condition| is_ours(condition)) {
        *condition = json!({
            "type": condition["type"], "reason": unknown(), "message": unknown(), "observedGeneration": unknown(),
        });
    }
    doubtful.insert("conditions".to_owned(), Value::Array(conditions));
    json!({ "metadata": { "uid": stored.metadata.uid }, "status": difference(&doubtful, &wanted) })
}

/// Fields only the agent writes.
const OURS: [&str; 7] = ["phase", "message", "reason", "hostIP", "podIP", "startTime", "observedGeneration"];
/// The API replaces these as a whole.
const LISTS_OF_OURS: [&str; 3] = ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"];

/// Differs from every possible value.
fn unknown() -> Value {
    json!("?")
}

fn object(status: &PodStatus) -> Map<String, Value> {
    match serde_json::to_value(status) {
        Ok(Value::Object(mut fields)) => {
            fields.values_mut().for_each(prune);
            fields.retain(|_, value| !is_nothing(value));
            fields
        }
        Ok(_) | Err(_) => unreachable!("a status is an object"),
    }
}

/// The API server writes empty fields (`lastState: {}`), we omit them: that is no difference. But a container waiting without a
/// reason (`state: {waiting: {}}`) is waiting.
fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(prune);
            fields.retain(|name, value| !is_nothing(value) || is_state(name));
        }
        Value::Array(elements) => elements.iter_mut().for_each(prune),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn is_state(name: &str) -> bool {
    ["waiting", "running", "terminated"].contains(&name)
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(elements) => elements.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn difference(old: &Map<String, Value>, new: &Map<String, Value>) -> Map<String, Value> {
    let mut changes = Map::new();
    for (field, after) in new {
        match (old.get(field), after) {
            (Some(before), _) if before == after => {}
            (Some(Value::Object(before)), Value::Object(after)) => {
                changes.insert(field.clone(), Value::Object(difference(before, after)));
            }
            (before, Value::Array(after)) => {
                let key = MERGED_BY_KEY.iter().find(|(list, _)| list == field).map(|(_, key)| *key);
                let before = before.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
                match key {
                    Some(key) => merge_list(field, key, before, after, &mut changes),
                    None => {
                        changes.insert(field.clone(), Value::Array(after.clone()));
                    }
                }
            }
            (_, after) => {
                changes.insert(field.clone(), after.clone());
            }
        }
    }
    for field in old.keys().filter(|field| !new.contains_key(*field)) {
        changes.insert(field.clone(), Value::Null);
    }
    changes
}

/// Elements that are new or differ, those to be deleted, and the order of all.
fn merge_list(field: &str, key: &str, before: &[Value], after: &[Value], changes: &mut Map<String, Value>) {
    let named = |list: &[Value], name: &Value| list.iter().find(|element| element.get(key) == Some(name)).cloned();
    let mut elements = Vec::new();
    let mut order = Vec::new();
    for element in after {
        let name = &element[key];
        order.push(json!({ key: name }));
        match (named(before, name), element) {
            (Some(known), _) if known == *element => {}
            (Some(Value::Object(known)), Value::Object(element)) => {
                let mut change = difference(&known, element);
                change.insert(key.to_owned(), name.clone());
                elements.push(Value::Object(change));
            }
            (_, element) => elements.push(element.clone()),
        }
    }
    let dropped = before.iter().map(|element| &element[key]).filter(|name| named(after, name).is_none());
    elements.extend(dropped.map(|name| json!({ "$patch": "delete", key: name })));
    let same_order = before.iter().map(|element| &element[key]).eq(after.iter().map(|element| &element[key]));
    if elements.is_empty() && same_order {
        return;
    }
    changes.insert(format!("$setElementOrder/{field}"), Value::Array(order));
    if !elements.is_empty() {
        changes.insert(field.to_owned(), Value::Array(elements));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch(old: &Value, new: &Value) -> String {
        let stored: Pod = serde_json::from_value(json!({ "metadata": { "uid": "u1" }, "status": old })).unwrap();
        let wanted: PodStatus = serde_json::from_value(new.clone()).unwrap();
        status_patch(&stored, &wanted).map_or("nothing".to_owned(), |patch| patch["status"].to_string())
    }

    #[test]
    fn only_what_differs_is_sent() {
        assert_eq!(patch(&json!({ "phase": "Running" }), &json!({ "phase": "Running" })), "nothing");
        assert_eq!(
            patch(
                &json!({ "phase": "Pending", "podIP": "10.0.0.1" }),
                &json!({ "phase": "Running", "podIP": "10.0.0.1" })
            ),
            r#"{"phase":"Running"}"#
        );
        assert_eq!(
            patch(&json!({ "reason": "Evicted", "phase": "Failed" }), &json!({ "phase": "Failed" })),
            r#"{"reason":null}"#
        );
        assert_eq!(
            patch(
                &json!({ "resources": { "requests": { "cpu": "1", "memory": "1Mi" }, "limits": { "cpu": "1" } } }),
                &json!({ "resources": { "requests": { "cpu": "2", "memory": "1Mi" }, "limits": { "cpu": "1" } } })
            ),
            r#"{"resources":{"requests":{"cpu":"2"}}}"#
        );
    }

    #[test]
    fn unconfirmed_patch_sends_a_disruption_the_api_server_may_lack() {
        let condition = |of_type: &str| json!({ "type": of_type, "status": "True", "reason": "TerminationByKubelet" });
        let pod = |conditions: &[&str]| -> Pod {
            let conditions: Vec<Value> = conditions.iter().map(|of_type| condition(of_type)).collect();
            serde_json::from_value(json!({ "status": { "conditions": conditions } })).unwrap()
        };
        let wanted = pod(&["Theirs", "DisruptionTarget"]).status.unwrap();
        for (stored, is_sent) in [(pod(&["Theirs"]), true), (pod(&["Theirs", "DisruptionTarget"]), false)] {
            let patch = whole_status_patch(&stored, &wanted);
            let sent = patch["status"]["conditions"].as_array().cloned().unwrap_or_default();
            assert_eq!(sent.contains(&condition("DisruptionTarget")), is_sent, "{patch}");
        }
    }

    #[test]
    fn unconfirmed_patch_sends_all_our_fields_and_no_others() {
        let stored = json!({ "metadata": { "uid": "u1" }, "status": {
            "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }, { "ip": "10.0.0.2" }], "conditions": [
                { "type": "Ready", "status": "False", "reason": "ContainersNotReady" },
                { "type": "Theirs", "status": "True" },
            ], "containerStatuses": [{ "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0 }],
        }});
        let stored: Pod = serde_json::from_value(stored).unwrap();
        let mut wanted = stored.status.clone().unwrap();
        wanted.pod_ips.as_mut().unwrap().pop();
        let expected = json!({
            "$setElementOrder/conditions": [{ "type": "Ready" }, { "type": "Theirs" }],
            "conditions": [{
                "type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": null,
                "observedGeneration": null,
            }],
            "$setElementOrder/podIPs": [{ "ip": "10.0.0.1" }],
            "podIPs": [{ "ip": "10.0.0.1" }, { "$patch": "delete", "ip": "10.0.0.2" }],
            "containerStatuses": [{ "name": "a", "image": "i", "ready": false, "restartCount": 0 }],
            "phase": "Running", "hostIP": null, "podIP": null, "message": null, "reason": null, "startTime": null,
            "observedGeneration": null,
        });
        assert_eq!(whole_status_patch(&stored, &wanted)["status"], expected);
    }

    #[test]
    fn empty_fields_of_the_api_server_are_no_difference() {
        let stored = json!({ "phase": "Running", "reason": "", "containerStatuses": [
            { "name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "lastState": {}, "state": {},
              "resources": { "limits": {}, "requests": {} } },
        ] });
        let ours = json!({ "phase": "Running", "containerStatuses": [
            { "name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 0 },
        ] });
        assert_eq!(patch(&stored, &ours), "nothing");
    }

    #[test]
    fn a_container_that_waits_without_a_reason_is_sent_as_waiting() {
        let container = |state: Value| {
            json!({ "containerStatuses": [
                { "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state },
            ] })
        };
        let waiting = || container(json!({ "waiting": {} }));
        let sent = patch(&container(json!({ "waiting": { "reason": "ContainerCreating" } })), &waiting());
        assert!(sent.contains(r#""state":{"waiting":{}}"#), "{sent}");
        assert_eq!(patch(&waiting(), &waiting()), "nothing");
    }

    #[test]
    fn conditions_are_merged_by_type_and_container_statuses_replaced() {
        let condition = |kind: &str, status: &str| json!({ "type": kind, "status": status });
        assert_eq!(
            patch(
                &json!({ "conditions": [condition("Ready", "False"), condition("Theirs", "True"), condition("Old", "True")] }),
                &json!({ "conditions": [condition("Ready", "True"), condition("Theirs", "True")] }),
            ),
            r#"{"$setElementOrder/conditions":[{"type":"Ready"},{"type":"Theirs"}],"conditions":[{"status":"True","type":"Ready"},{"$patch":"delete","type":"Old"}]}"#
        );
        let container = |name: &str, count: i64| json!({ "name": name, "image": "i", "imageID": "", "ready": true, "restartCount": count });
        let sent = patch(
            &json!({ "containerStatuses": [container("a", 0), container("b", 0)] }),
            &json!({ "containerStatuses": [container("a", 0), container("b", 1)] }),
        );
        assert!(sent.contains(r#""name":"a""#) && sent.contains(r#""restartCount":1"#), "{sent}");
    }

    #[test]
    fn the_primary_address_comes_first_even_if_only_the_order_changed() {
        let ips = |ips: [&str; 2]| json!({ "podIPs": ips.map(|ip| json!({ "ip": ip })) });
        assert_eq!(
            patch(&ips(["fd00::1", "10.0.0.1"]), &ips(["10.0.0.1", "fd00::1"])),
            r#"{"$setElementOrder/podIPs":[{"ip":"10.0.0.1"},{"ip":"fd00::1"}]}"#
        );
    }
}
