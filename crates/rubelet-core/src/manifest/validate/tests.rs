//! The texts are the API server's, because users search for them.

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::super::{Origin, decode};

fn manifest(metadata: &Value, spec: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec })
}

fn refused(metadata: &Value, spec: &Value) -> String {
    match decode(manifest(metadata, spec), &Origin::File("/m/web.yaml".to_owned()), "n1") {
        Ok(_) => "accepted".to_owned(),
        Err(refusal) => refusal.problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
    }
}

/// A spec with these fields added, otherwise right.
fn spec_with(fields: &Value) -> String {
    let mut spec = json!({ "containers": [{ "name": "a", "image": "nginx" }] });
    for (name, value) in fields.as_object().unwrap() {
        spec[name] = value.clone();
    }
    refused(&json!({ "name": "web" }), &spec)
}

/// A pod with one container with these fields added, and volume `v`.
fn container_with(fields: &Value) -> String {
    let mut container = json!({ "name": "a", "image": "nginx" });
    for (name, value) in fields.as_object().unwrap() {
        container[name] = value.clone();
    }
    spec_with(&json!({ "containers": [container], "volumes": [{ "name": "v" }] }))
}

#[test]
fn a_right_pod_is_accepted() {
    assert_eq!(spec_with(&json!({})), "accepted");
    assert_eq!(
        container_with(&json!({
            "ports": [{ "name": "http", "containerPort": 80, "hostPort": 8080 }],
            "env": [
                { "name": "A.b-c", "value": "1" },
                { "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } },
                { "name": "L", "valueFrom": { "fieldRef": { "fieldPath": "metadata.labels['app']" } } },
                { "name": "CPU", "valueFrom": { "resourceFieldRef": { "resource": "limits.cpu" } } },
            ],
            "volumeMounts": [{ "name": "v", "mountPath": "/v", "readOnly": true }],
            "resources": { "requests": { "cpu": 0.5, "memory": "64Mi" }, "limits": { "cpu": 1, "memory": "1e9" } },
            "livenessProbe": { "httpGet": { "port": "http" } },
            "lifecycle": { "preStop": { "sleep": { "seconds": 5 } } },
            "securityContext": { "runAsUser": 0, "seccompProfile": { "type": "RuntimeDefault" } },
        })),
        "accepted"
    );
}

#[test]
fn names_of_all_kinds() {
    let found = refused(
        &json!({ "name": "Web_1", "namespace": "a.b", "uid": "../../etc", "labels": { "a b": "-x" } }),
        &json!({
            "containers": [{ "name": "A", "image": "i" }, { "name": "b", "image": "i" }, { "name": "b", "image": "i" }],
            "initContainers": [{ "name": "b", "image": "i" }],
        }),
    );
    assert_snapshot!(found, @r#"
    metadata.name: Invalid value: "Web_1-n1": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
    metadata.namespace: Invalid value: "a.b": must not contain dots
    metadata.uid: Invalid value: "../../etc": must be no more than 63 bytes and must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character
    metadata.labels: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
    metadata.labels[a b]: Invalid value: "-x": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')
    spec.containers[0].name: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
    spec.containers[2].name: Duplicate value: "b"
    spec.initContainers[0].name: Duplicate value: "b"
    "#);
}

#[test]
fn a_pod_without_name_or_containers() {
    assert_snapshot!(refused(&json!({}), &json!({})), @"metadata.name: Required value: name is needed for the pod");
    assert_snapshot!(refused(&json!({ "name": "web" }), &json!({})), @"spec.containers: Required value");
    assert_snapshot!(spec_with(&json!({ "containers": [{}] })), @"
    spec.containers[0].name: Required value
    spec.containers[0].image: Required value
    ");
}

#[test]
fn images_and_policies() {
    let found = [
        container_with(&json!({ "image": " nginx" })),
        container_with(&json!({ "imagePullPolicy": "Sometimes" })),
        container_with(&json!({ "terminationMessagePolicy": "Log" })),
        spec_with(&json!({ "restartPolicy": "always" })),
        spec_with(&json!({ "dnsPolicy": "None" })),
        spec_with(&json!({ "activeDeadlineSeconds": 0 })),
        spec_with(&json!({ "ephemeralContainers": [{ "name": "e", "image": "i" }] })),
        spec_with(&json!({ "hostname": "a.b" })),
        spec_with(&json!({ "hostAliases": [{ "ip": "1.2.3", "hostnames": ["a_b"] }] })),
    ]
    .join("\n");
    assert_snapshot!(found, @r#"
    spec.containers[0].image: Invalid value: " nginx": must not have leading or trailing whitespace
    spec.containers[0].imagePullPolicy: Unsupported value: "Sometimes": supported values: "Always", "IfNotPresent", "Never"
    spec.containers[0].terminationMessagePolicy: Unsupported value: "Log": supported values: "File", "FallbackToLogsOnError"
    spec.restartPolicy: Unsupported value: "always": supported values: "Always", "OnFailure", "Never"
    spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None
    spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive
    spec.ephemeralContainers: Forbidden: cannot be set on create
    spec.hostname: Invalid value: "a.b": must not contain dots
    spec.hostAliases[0].ip: Invalid value: "1.2.3": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
    spec.hostAliases[0].hostnames[0]: Invalid value: "a_b": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
    "#);
}

#[test]
fn ports() {
    let found = container_with(&json!({ "ports": [
        { "containerPort": 0 },
        { "containerPort": 65536, "name": "http" },
        { "containerPort": 80, "name": "http" },
        { "containerPort": 80, "name": "80-", "protocol": "tcp" },
        { "containerPort": 81, "hostPort": 8080 },
        { "containerPort": 82, "hostPort": 8080 },
    ] }));
    assert_snapshot!(found, @r#"
    spec.containers[0].ports[0].containerPort: Required value
    spec.containers[0].ports[1].containerPort: Invalid value: 65536: must be between 1 and 65535, inclusive
    spec.containers[0].ports[2].name: Duplicate value: "http"
    spec.containers[0].ports[3].name: Invalid value: "80-": must contain at least one letter (a-z)
    spec.containers[0].ports[3].name: Invalid value: "80-": must not begin or end with a hyphen
    spec.containers[0].ports[3].protocol: Unsupported value: "tcp": supported values: "SCTP", "TCP", "UDP"
    spec.containers[0].ports[5].hostPort: Duplicate value: "TCP//8080"
    "#);
    let ports = json!([{ "containerPort": 80, "hostPort": 8080 }]);
    let spec = json!({ "hostNetwork": true, "containers": [{ "name": "a", "image": "i", "ports": ports }] });
    assert_snapshot!(spec_with(&spec), @"spec.containers[0].ports[0].hostPort: Invalid value: 8080: must match `containerPort` when `hostNetwork` is true");
}

#[test]
fn environment() {
    let found = container_with(&json!({
        "env": [
            { "value": "x" },
            { "name": "A=B" },
            { "name": "C", "valueFrom": {} },
            { "name": "D", "valueFrom": { "fieldRef": { "fieldPath": "status.phase" } } },
            { "name": "E", "value": "x", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } },
            { "name": "F", "valueFrom": { "resourceFieldRef": { "resource": "limits.gpu" } } },
        ],
        "envFrom": [{ "prefix": "P" }],
    }));
    assert_snapshot!(found, @r#"
    spec.containers[0].env[0].name: Required value
    spec.containers[0].env[1].name: Invalid value: "A=B": a valid environment variable name must consist only of printable ASCII characters other than '='
    spec.containers[0].env[2].valueFrom: Invalid value: "": must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`
    spec.containers[0].env[3].valueFrom.fieldRef.fieldPath: Unsupported value: "status.phase": supported values: "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"
    spec.containers[0].env[4].valueFrom: Invalid value: "": may not be specified when `value` is not empty
    spec.containers[0].env[5].valueFrom.resourceFieldRef.resource: Unsupported value: "limits.gpu": supported values: "limits.cpu", "limits.ephemeral-storage", "limits.memory", "requests.cpu", "requests.ephemeral-storage", "requests.memory"
    spec.containers[0].envFrom[0]: Invalid value: "": must specify one of: `configMapRef` or `secretRef`
    "#);
}

#[test]
fn variables_from_files() {
    let from = |selector: serde_json::Value| json!({ "name": "A", "valueFrom": { "fileKeyRef": selector } });
    let env = json!([
        from(json!({ "volumeName": "data", "path": "/env", "key": "K" })),
        from(json!({ "volumeName": "", "path": "", "key": "" })),
        from(json!({ "volumeName": "No", "path": "../env", "key": "a=b" })),
        from(json!({ "volumeName": "host", "path": "env", "key": "K" })),
        from(json!({ "volumeName": "none", "path": "env", "key": "K" })),
    ]);
    let found = spec_with(&json!({
        "volumes": [{ "name": "data", "emptyDir": {} }, { "name": "host", "hostPath": { "path": "/x" } }],
        "containers": [{ "name": "a", "image": "i", "env": env }],
    }));
    assert_snapshot!(found, @r#"
    spec.containers[0].env[1].valueFrom.fileKeyRef.key: Required value
    spec.containers[0].env[1].valueFrom.fileKeyRef.volumeName: Required value
    spec.containers[0].env[1].valueFrom.fileKeyRef.path: Required value
    spec.containers[0].env[2].valueFrom.fileKeyRef.key: Invalid value: "a=b": a valid environment variable name must consist only of printable ASCII characters other than '='
    spec.containers[0].env[2].valueFrom.fileKeyRef.volumeName: Invalid value: "No": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
    spec.containers[0].env[2].valueFrom.fileKeyRef.path: Invalid value: "../env": must not contain '..'
    spec.containers[0].env[1].valueFrom.fileKeyRef.volumeName: Not found: ""
    spec.containers[0].env[2].valueFrom.fileKeyRef.volumeName: Not found: "No"
    spec.containers[0].env[3].valueFrom.fileKeyRef.volumeName: Invalid value: "host": referenced volume must be of type emptyDir
    spec.containers[0].env[4].valueFrom.fileKeyRef.volumeName: Not found: "none"
    "#);
}

#[test]
fn volumes_and_mounts() {
    let found = spec_with(&json!({
        "volumes": [
            { "name": "v" },
            { "name": "v" },
            { "emptyDir": {} },
            { "name": "two", "emptyDir": {}, "hostPath": { "path": "/x" } },
            { "name": "h", "hostPath": { "path": "/x/../y", "type": "Dir" } },
            { "name": "l", "emptyDir": { "sizeLimit": "lots" } },
            { "name": "n", "hostPath": {} },
            { "name": "i", "image": { "pullPolicy": "Sometimes" } },
        ],
        "containers": [{ "name": "a", "image": "i", "volumeMounts": [
            { "name": "v", "mountPath": "/v" },
            { "name": "w", "mountPath": "/v" },
            { "name": "v" },
            { "name": "v", "mountPath": "/x", "subPath": "../x" },
            { "name": "v", "mountPath": "/y", "mountPropagation": "Bidirectional" },
        ] }],
    }));
    assert_snapshot!(found, @r#"
    spec.volumes[1].name: Duplicate value: "v"
    spec.volumes[2].name: Required value
    spec.volumes[3].hostPath: Forbidden: may not specify more than 1 volume type
    spec.volumes[4].hostPath.path: Invalid value: "/x/../y": must not contain '..'
    spec.volumes[4].hostPath.type: Unsupported value: "Dir": supported values: "", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"
    spec.volumes[5].emptyDir.sizeLimit: Invalid value: "lots": quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'
    spec.volumes[6].hostPath.path: Required value
    spec.volumes[7].image.reference: Required value
    spec.volumes[7].image.pullPolicy: Unsupported value: "Sometimes": supported values: "Always", "IfNotPresent", "Never"
    spec.containers[0].volumeMounts[1].name: Not found: "w"
    spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/v": must be unique
    spec.containers[0].volumeMounts[2].mountPath: Required value
    spec.containers[0].volumeMounts[3].subPath: Invalid value: "../x": must not contain '..'
    spec.containers[0].volumeMounts[4].mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers
    "#);
}

#[test]
fn resources() {
    let found = container_with(&json!({ "resources": {
        "limits": { "cpu": "1", "memory": "1Gb", "gpu": "1", "example.com/dev": "1" },
        "requests": { "cpu": "2", "memory": "1Gi", "example.com/dev": "2", "ephemeral-storage": "-1" },
    } }));
    assert_snapshot!(found, @r#"
    spec.containers[0].resources.limits[memory]: Invalid value: "1Gb": quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'
    spec.containers[0].resources.requests[ephemeral-storage]: Invalid value: "-1": must be greater than or equal to 0
    spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1
    spec.containers[0].resources.requests: Invalid value: "2": must be equal to example.com/dev limit of 1
    spec.containers[0].resources.limits[gpu]: Invalid value: "gpu": must be a standard resource for containers
    spec.containers[0].resources.requests[gpu]: Invalid value: "gpu": must be a standard resource for containers
    "#);
}

#[test]
fn probes_and_hooks() {
    let found = container_with(&json!({
        "livenessProbe": { "successThreshold": 2, "periodSeconds": -1 },
        "readinessProbe": {
            "exec": {}, "tcpSocket": { "port": 70000 }, "terminationGracePeriodSeconds": 5,
        },
        "startupProbe": { "httpGet": { "port": "", "scheme": "FTP" } },
        "lifecycle": { "postStart": {}, "preStop": { "sleep": { "seconds": 31 } } },
    }));
    assert_snapshot!(found, @r#"
    spec.containers[0].lifecycle.postStart: Required value: must specify a handler type
    spec.containers[0].lifecycle.preStop.sleep: Invalid value: 31: must be non-negative and less than terminationGracePeriodSeconds (30)
    spec.containers[0].livenessProbe: Required value: must specify a handler type
    spec.containers[0].livenessProbe.periodSeconds: Invalid value: -1: must be greater than or equal to 0
    spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1
    spec.containers[0].startupProbe.httpGet.port: Invalid value: "": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)
    spec.containers[0].startupProbe.httpGet.port: Invalid value: "": must contain at least one letter (a-z)
    spec.containers[0].startupProbe.httpGet.scheme: Unsupported value: "FTP": supported values: "HTTP", "HTTPS"
    spec.containers[0].readinessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type
    spec.containers[0].readinessProbe.exec.command: Required value
    spec.containers[0].readinessProbe.tcpSocket.port: Invalid value: 70000: must be between 1 and 65535, inclusive
    spec.containers[0].readinessProbe.terminationGracePeriodSeconds: Invalid value: 5: must not be set for readinessProbes
    "#);
    let init = json!([{ "name": "i", "image": "i", "lifecycle": {}, "readinessProbe": {} }]);
    assert_snapshot!(spec_with(&json!({ "initContainers": init })), @"
    spec.initContainers[0].lifecycle: Forbidden: may not be set for init containers without restartPolicy=Always
    spec.initContainers[0].readinessProbe: Forbidden: may not be set for init containers without restartPolicy=Always
    ");
}

#[test]
fn security_contexts() {
    let found = spec_with(&json!({
        "hostNetwork": true,
        "hostPID": true,
        "shareProcessNamespace": true,
        "securityContext": {
            "runAsUser": -1,
            "fsGroup": 4_294_967_296_i64,
            "supplementalGroups": [1, -2],
            "sysctls": [
                { "name": "net.core.somaxconn", "value": "1" },
                { "name": "Kernel!", "value": "1" },
                { "name": "kernel.sem", "value": "1" },
                { "name": "kernel.sem", "value": "2" },
            ],
            "seccompProfile": { "type": "Localhost", "localhostProfile": "/etc/x" },
        },
        "containers": [{ "name": "a", "image": "i", "securityContext": {
            "privileged": true, "allowPrivilegeEscalation": false, "procMount": "Unmasked",
            "seccompProfile": { "type": "Docker" },
        } }],
    }));
    assert_snapshot!(found, @r#"
    spec.containers[0].securityContext.procMount: Invalid value: "Unmasked": `hostUsers` must be false to use `Unmasked`
    spec.containers[0].securityContext.seccompProfile.type: Unsupported value: "Docker": supported values: "Localhost", "RuntimeDefault", "Unconfined"
    spec.containers[0].securityContext: Forbidden: cannot set `allowPrivilegeEscalation` to false and `privileged` to true
    spec.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled
    spec.securityContext.fsGroup: Invalid value: 4294967296: must be between 0 and 2147483647, inclusive
    spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive
    spec.securityContext.supplementalGroups[1]: Invalid value: -2: must be between 0 and 2147483647, inclusive
    spec.securityContext.sysctls[0].name: Invalid value: "net.core.somaxconn": may not be specified when 'hostNetwork' is true
    spec.securityContext.sysctls[1].name: Invalid value: "Kernel!": must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$
    spec.securityContext.sysctls[3].name: Duplicate value: "kernel.sem"
    spec.securityContext.seccompProfile.localhostProfile: Invalid value: "/etc/x": must be a relative path
    "#);
}

#[test]
fn static_pods_refer_to_nothing_in_the_api() {
    let found = spec_with(&json!({
        "serviceAccountName": "default",
        "imagePullSecrets": [{ "name": "s" }],
        "resourceClaims": [{ "name": "r", "resourceClaimName": "gpu" }],
        "volumes": [
            { "name": "c", "configMap": { "name": "c" } },
            { "name": "p", "projected": { "sources": [{ "downwardAPI": {} }, { "secret": { "name": "s" } }] } },
        ],
        "containers": [{
            "name": "a", "image": "i",
            "env": [{ "name": "S", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } }],
            "envFrom": [{ "configMapRef": { "name": "c" } }],
        }],
    }));
    assert_snapshot!(found, @"
    spec.serviceAccountName: Forbidden: static pods may not reference serviceaccounts
    spec.imagePullSecrets[0]: Forbidden: static pods may not reference secrets
    spec.containers[0].env[0].valueFrom.secretKeyRef: Forbidden: static pods may not reference secrets
    spec.containers[0].envFrom[0].configMapRef: Forbidden: static pods may not reference configmaps
    spec.resourceClaims[0]: Forbidden: static pods may not reference resourceclaims
    spec.volumes[0].configMap: Forbidden: static pods may not reference configmaps (via configmap volumes)
    spec.volumes[1].projected.sources[1].secret: Forbidden: static pods may not reference secrets (via projected volumes)
    ");
}

#[test]
fn refusal_is_one_line_with_every_reason() {
    let value = manifest(&json!({ "name": "web" }), &json!({ "containers": [{ "name": "a" }], "dnsPolicy": "x" }));
    let refusal = decode(value, &Origin::File("/m/web.yaml".to_owned()), "n1").unwrap_err();
    assert_snapshot!(refusal, @r#"invalid pod: [spec.containers[0].image: Required value, spec.dnsPolicy: Unsupported value: "x": supported values: "ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]"#);
}
