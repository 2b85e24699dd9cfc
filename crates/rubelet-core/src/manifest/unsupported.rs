//! Fields of a pod that are not supported yet, in one table.
//!
//! Owns: the list, so that no field is ignored silently. Never: rejects the pod.
//! Not listed: fields of other components, such as topology spread or the scheduler's name.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::{decode, pattern};

const UNSUPPORTED: &[&str] = &[
    "spec.<containers>[*].resources.claims",
    // There are no device plugins.
    "spec.<containers>[*].resources.limits.<resource>",
    "spec.<containers>[*].resizePolicy",
    // No agent of this version has these: gitRepo's gate is locked off, the rest have no plugin.
    "spec.volumes[*].gitRepo",
    "spec.volumes[*].glusterfs",
    "spec.volumes[*].rbd",
    "spec.volumes[*].cephfs",
    "spec.volumes[*].flocker",
    "spec.volumes[*].photonPersistentDisk",
    "spec.volumes[*].quobyte",
    "spec.volumes[*].scaleIO",
    "spec.volumes[*].storageos",
    "spec.resourceClaims",
];

/// The paths of the unsupported fields that this pod sets.
pub fn unsupported(pod: &Pod) -> Vec<String> {
    let encoded = decode::encoded(pod);
    let mut fields: Vec<String> =
        UNSUPPORTED.iter().flat_map(|field| pattern::used(&encoded, field)).map(|path| path.to_string()).collect();
    let spec = pod.spec.as_ref();
    // The default shares the host's user namespace, as we do.
    if spec.is_some_and(|spec| spec.host_users == Some(false)) {
        fields.push("spec.hostUsers".to_owned());
    }
    fields.extend(restarts_of_all(spec));
    fields
}

/// `Restart`, the other action of a restart rule, is supported.
fn restarts_of_all(spec: Option<&PodSpec>) -> Vec<String> {
    let mut fields = Vec::new();
    let init = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let main = spec.map_or(&[][..], |spec| &spec.containers);
    for (list, containers) in [("initContainers", init), ("containers", main)] {
        for (index, container) in containers.iter().enumerate() {
            let rules = container.restart_policy_rules.iter().flatten().enumerate();
            let of_all = rules.filter(|(_, rule)| rule.action == "RestartAllContainers");
            fields.extend(of_all.map(|(rule, _)| format!("spec.{list}[{index}].restartPolicyRules[{rule}].action")));
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::*;

    fn of(spec: &serde_json::Value) -> String {
        unsupported(&serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap()).join("\n")
    }

    #[test]
    fn every_field_nothing_acts_on_is_named() {
        let fields = of(&json!({
            "containers": [{
                "name": "a",
                "volumeMounts": [{ "name": "v", "mountPath": "/v" }, { "name": "v", "mountPath": "/w", "subPath": "w" }],
                "resources": { "limits": { "cpu": "1", "ephemeral-storage": "1Gi", "hugepages-2Mi": "4Mi", "nvidia.com/gpu": 1 } },
                "env": [{ "name": "A", "value": "a" }],
                "restartPolicy": "Never",
                "restartPolicyRules": [
                    { "action": "Restart", "exitCodes": { "operator": "In", "values": [1] } },
                    { "action": "RestartAllContainers", "exitCodes": { "operator": "In", "values": [2] } },
                ],
            }],
            "initContainers": [{ "name": "i", "restartPolicy": "Always" }],
            "volumes": [
                { "name": "v", "emptyDir": {} },
                { "name": "h", "hostPath": { "path": "/h" } },
                { "name": "n", "glusterfs": { "endpoints": "e", "path": "/p" } },
                { "name": "d", "emptyDir": { "sizeLimit": "1Gi" } },
                { "name": "m", "emptyDir": { "sizeLimit": "1Gi", "medium": "Memory" } },
                { "name": "p", "persistentVolumeClaim": { "claimName": "c" } },
                { "name": "c", "csi": { "driver": "d" } },
                { "name": "e", "ephemeral": {} },
            ],
            "securityContext": { "fsGroup": 1, "fsGroupChangePolicy": "OnRootMismatch" },
            "hostUsers": false,
        }));
        assert_snapshot!(fields, @"
        spec.containers[0].resources.limits[nvidia.com/gpu]
        spec.volumes[2].glusterfs
        spec.hostUsers
        spec.containers[0].restartPolicyRules[1].action
        ");
    }

    #[test]
    fn an_ordinary_pod_uses_nothing_unsupported() {
        let manifest = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": "web" },
            "spec": {
                "hostNetwork": true,
                "containers": [{
                    "name": "a", "image": "nginx", "command": ["sh"], "args": ["-c", "true"], "tty": true,
                    "env": [{ "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } }],
                    "resources": { "limits": { "cpu": "1", "memory": "1Gi" } },
                    "securityContext": { "runAsUser": 1000, "capabilities": { "drop": ["ALL"] } },
                    "ports": [{ "containerPort": 80 }],
                }],
                "hostAliases": [{ "ip": "1.2.3.4", "hostnames": ["a"] }],
            },
        });
        let origin = super::super::Origin::File("/m/web.yaml".to_owned());
        let manifest = super::super::decode(manifest, &origin, "n1").unwrap();
        assert_eq!(unsupported(&manifest.pods[0]), Vec::<String>::new());
    }
}
