//! Pods and nodes, one line each, with the result of admission.

#![expect(clippy::needless_pass_by_value, reason = "literals are easiest to read where they are handed over")]

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::settings::Allocatable;

/// It tolerates the node's taint unless `spec` has other tolerations.
fn pod(name: &str, spec: Value) -> Pod {
    let mut spec = spec;
    let tolerations = spec.as_object_mut().unwrap().entry("tolerations").or_insert(json!([{"operator": "Exists"}]));
    assert!(tolerations.is_array());
    serde_json::from_value(json!({"metadata": {"name": name, "uid": name}, "spec": spec})).unwrap()
}

fn asking(requests: Value) -> Pod {
    pod("asking", json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}))
}

fn site_settings() -> Settings {
    let mut settings = Settings::for_node("node");
    settings.node.allocatable =
        Allocatable { cpu_millis: 1000, memory_bytes: 1 << 30, ephemeral_storage_bytes: 1 << 30, pods: 3 };
    settings.allowed_unsafe_sysctls = vec!["net.core.*".to_owned(), "kernel.msgmax".to_owned()];
    settings
}

fn verdict_on(pod: &Pod, others: &[Pod]) -> String {
    let settings = site_settings();
    let others: Vec<&Pod> = others.iter().collect();
    let node = node();
    let pressures = BTreeSet::new();
    let site = AdmitContext {
        settings: &settings,
        others: &others,
        node: &node,
        has_strict_groups: false,
        pressures: &pressures,
        is_shutting_down: false,
    };
    match admit(pod, site) {
        AdmitResult::Admit => "admitted".to_owned(),
        AdmitResult::Reject(PodFailure { reason, message, .. }) => format!("{reason}: {message}"),
        AdmitResult::RecheckNode(PodFailure { reason, message, .. }) => format!("perhaps {reason}: {message}"),
        AdmitResult::Preempt(missing) => {
            let missing = missing.iter().map(|it| format!("{} {}", it.resource, it.quantity));
            format!("lacks {}", missing.collect::<Vec<_>>().join(", "))
        }
    }
}

/// As the API server shows it.
fn node() -> NodeObject {
    NodeObject::of(
        &serde_json::from_value(json!({
            "metadata": {"name": "node", "resourceVersion": "7", "labels": {"zone": "a", "cores": "4"}},
            "spec": {"taints": [
                {"key": "maintenance", "value": "today", "effect": "NoExecute"},
                {"key": "dedicated", "value": "db", "effect": "NoSchedule"},
            ]},
            "status": {"allocatable": {"hugepages-2Mi": "4Mi", "example.com/gpu": "2", "example.com/gone": "0"}},
        }))
        .unwrap(),
    )
}

#[test]
fn pod_fits_while_requests_stay_within_allocatable() {
    let half = || asking(json!({"cpu": "500m", "memory": "512Mi"}));
    let small = || pod("small", json!({"containers": [{"name": "c"}]}));
    assert_eq!(verdict_on(&half(), &[half()]), "admitted");
    let lines = [
        verdict_on(&half(), &[half(), half()]),
        verdict_on(&asking(json!({"memory": "2Gi"})), &[half()]),
        verdict_on(&asking(json!({"ephemeral-storage": "2Gi"})), &[]),
        verdict_on(&small(), &[small(), small(), small()]),
        verdict_on(&asking(json!({"cpu": "2"})), &[small(), small(), small()]),
    ];
    insta::assert_snapshot!(lines.join("\n"), @r"
    OutOfcpu: Node didn't have enough resource: cpu, requested: 500, used: 1000, capacity: 1000
    OutOfmemory: Node didn't have enough resource: memory, requested: 2147483648, used: 536870912, capacity: 1073741824
    OutOfephemeral-storage: Node didn't have enough resource: ephemeral-storage, requested: 2147483648, used: 0, capacity: 1073741824
    OutOfpods: Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3
    OutOfpods: Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3
    ");
}

#[test]
fn critical_pod_is_rejected_for_other_reasons_than_resources() {
    let half = || asking(json!({"cpu": "500m", "memory": "512Mi"}));
    let mut critical = asking(json!({"cpu": "4", "memory": "600Mi", "example.com/gpu": "3"}));
    assert!(verdict_on(&critical, &[]).starts_with("OutOfcpu"));
    let spec = critical.spec.as_mut().unwrap();
    spec.priority = Some(2_000_000_000);
    let lacks = "lacks cpu 3500, memory 92274688, example.com/gpu 1";
    assert_eq!(verdict_on(&critical, &[half()]), lacks);
    assert_eq!(verdict_on(&critical, &[half(), half(), half()]).split(',').next(), Some("lacks pods 1"));
    let elsewhere = Some(BTreeMap::from([("zone".to_owned(), "b".to_owned())]));
    critical.spec.as_mut().unwrap().node_selector = elsewhere.clone();
    assert!(verdict_on(&critical, &[half()]).starts_with("NodeAffinity"), "no recheck, as upstream");
    let mut small = asking(json!({"cpu": "100m"}));
    small.spec.as_mut().unwrap().node_selector = elsewhere;
    assert!(verdict_on(&small, &[]).starts_with("perhaps NodeAffinity"));
    critical.spec.as_mut().unwrap().node_selector = None;
    critical.spec.as_mut().unwrap().security_context =
        Some(serde_json::from_value(json!({"appArmorProfile": {"type": "RuntimeDefault"}})).unwrap());
    assert!(verdict_on(&critical, &[half()]).starts_with("AppArmor"), "nothing is preempted for it");
}

#[test]
fn scalar_resources_checked_unknown_extended_ones_ignored() {
    let gpu = || asking(json!({"example.com/gpu": "1"}));
    let lines = [
        verdict_on(&gpu(), &[gpu()]),
        verdict_on(&gpu(), &[gpu(), gpu()]),
        verdict_on(&asking(json!({"example.com/gone": "1"})), &[]),
        verdict_on(&asking(json!({"example.com/unknown": "1"})), &[]),
        verdict_on(&asking(json!({"hugepages-2Mi": "4Mi"})), &[]),
        verdict_on(&asking(json!({"hugepages-2Mi": "2Mi"})), &[asking(json!({"hugepages-2Mi": "4Mi"}))]),
        verdict_on(&asking(json!({"hugepages-1Gi": "1Gi"})), &[]),
    ];
    insta::assert_snapshot!(lines.join("\n"), @r"
    admitted
    OutOfexample.com/gpu: Node didn't have enough resource: example.com/gpu, requested: 1, used: 2, capacity: 2
    OutOfexample.com/gone: Node didn't have enough resource: example.com/gone, requested: 1, used: 0, capacity: 0
    admitted
    admitted
    OutOfhugepages-2Mi: Node didn't have enough resource: hugepages-2Mi, requested: 2097152, used: 4194304, capacity: 4194304
    OutOfhugepages-1Gi: Node didn't have enough resource: hugepages-1Gi, requested: 1073741824, used: 0, capacity: 0
    ");
}

#[test]
fn untolerated_taint_rejects_all_but_static_pods() {
    let with =
        |toleration: Value| pod("p", json!({"containers": [{"name": "c"}], "tolerations": toleration.as_array()}));
    for (toleration, is_admitted) in [
        (json!([]), false),
        (json!([{"key": "maintenance", "operator": "Exists"}]), true),
        (json!([{"key": "maintenance", "value": "today"}]), true),
        (json!([{"key": "maintenance", "value": "tomorrow", "operator": "Equal"}]), false),
        (json!([{"key": "maintenance", "operator": "Exists", "effect": "NoSchedule"}]), false),
        (json!([{"key": "dedicated", "operator": "Exists"}]), false),
        (json!([{"key": "maintenance", "operator": "Gt", "value": "1"}]), false),
        (json!([{"operator": "Exists", "effect": "NoExecute"}]), true),
    ] {
        let mut pod = with(toleration.clone());
        let refusal =
            "TaintToleration: Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
        let expected = if is_admitted { "admitted" } else { refusal };
        assert_eq!(verdict_on(&pod, &[]), expected, "{toleration}");
        let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
        pod.metadata.annotations = Some(BTreeMap::from([source]));
        assert_eq!(verdict_on(&pod, &[]), "admitted", "{toleration}");
    }
}

#[test]
fn node_is_rechecked_only_if_affinity_alone_fails() {
    let strange = json!({"containers": [{"name": "c"}], "nodeSelector": {"zone": "b"}});
    assert!(verdict_on(&pod("p", strange.clone()), &[]).starts_with("perhaps NodeAffinity"));
    let mut untolerating = strange;
    untolerating["tolerations"] = json!([]);
    assert!(verdict_on(&pod("p", untolerating), &[]).starts_with("NodeAffinity"));
}

#[test]
fn selectors_and_required_affinity_must_match_the_nodes_labels() {
    let required = |terms: Value| json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
    let expression = |key: &str, operator: &str, values: Value| {
        required(json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]))
    };
    let named =
        |name: &str| required(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]));
    for (spec, is_admitted) in [
        (json!({"nodeSelector": {"zone": "a"}}), true),
        (json!({"nodeSelector": {"zone": "a", "cores": "5"}}), false),
        (expression("zone", "In", json!(["b", "a"])), true),
        (expression("zone", "NotIn", json!(["a"])), false),
        (expression("other", "NotIn", json!(["a"])), true),
        (expression("zone", "Exists", json!([])), true),
        (expression("zone", "DoesNotExist", json!([])), false),
        (expression("cores", "Gt", json!(["3"])), true),
        (expression("cores", "Lt", json!(["4"])), false),
        (expression("zone", "Gt", json!(["3"])), false),
        (named("node"), true),
        (named("elsewhere"), false),
        (required(json!([{}])), false),
        (
            required(
                json!([{"matchExpressions": [{"key": "x", "operator": "Exists"}]}, {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]),
            ),
            true,
        ),
    ] {
        let mut spec = spec;
        spec["containers"] = json!([{"name": "c"}]);
        let verdict = verdict_on(&pod("p", spec.clone()), &[]);
        let expected = if is_admitted {
            "admitted"
        } else {
            "perhaps NodeAffinity: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
        };
        assert_eq!(verdict, expected, "{spec}");
    }
}

#[test]
fn host_port_is_used_by_one_pod_only() {
    let with = |ports: Value| pod("p", json!({"containers": [{"name": "c", "ports": ports}]}));
    let port = |number: i32| json!([{"containerPort": 80, "hostPort": number}]);
    let at =
        |ip: &str, protocol: &str| json!([{"containerPort": 80, "hostPort": 8080, "hostIP": ip, "protocol": protocol}]);
    for (mine, theirs, is_admitted) in [
        (port(8080), port(8080), false),
        (port(8080), port(8081), true),
        (port(0), port(0), true),
        (at("10.0.0.1", "TCP"), at("10.0.0.2", "TCP"), true),
        (at("10.0.0.1", "TCP"), at("10.0.0.1", "UDP"), true),
        (at("10.0.0.1", "TCP"), at("", ""), false),
    ] {
        let verdict = verdict_on(&with(mine.clone()), &[with(theirs.clone())]);
        assert_eq!(verdict == "admitted", is_admitted, "{mine} beside {theirs}: {verdict}");
    }
}

#[test]
fn only_listed_sysctls_of_namespaces_of_the_pods_own_are_allowed() {
    let with = |name: &str, more: Value| {
        let mut spec =
            json!({"containers": [{"name": "c"}], "securityContext": {"sysctls": [{"name": name, "value": "1"}]}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        verdict_on(&pod("p", spec), &[])
    };
    let lines = [
        with("net.ipv4.tcp_syncookies", json!({})),
        with("net/ipv4/tcp_syncookies", json!({})),
        with("net.core.somaxconn", json!({})),
        with("kernel.msgmax", json!({})),
        with("kernel.msgmnb", json!({})),
        with("vm.swappiness", json!({})),
        with("net.ipv4.tcp_syncookies", json!({"hostNetwork": true})),
        with("kernel.shm_rmid_forced", json!({"hostIPC": true})),
    ];
    insta::assert_snapshot!(lines.join("\n"), @r#"
    admitted
    admitted
    admitted
    admitted
    SysctlForbidden: forbidden sysctl: "kernel.msgmnb" not allowlisted
    SysctlForbidden: forbidden sysctl: "vm.swappiness" not allowlisted
    SysctlForbidden: forbidden sysctl: "net.ipv4.tcp_syncookies" not allowed with host Net enabled
    SysctlForbidden: forbidden sysctl: "kernel.shm_rmid_forced" not allowed with host IPC enabled
    "#);
}

#[test]
fn unsupported_by_the_node_is_rejected_with_upstreams_text() {
    let containers = json!([{"name": "c"}]);
    let mut labelled = pod("p", json!({"containers": containers}));
    labelled.metadata.labels = Some(BTreeMap::from([("kubernetes.io/os".to_owned(), "windows".to_owned())]));
    let lines = [
        verdict_on(&labelled, &[]),
        verdict_on(&pod("p", json!({"containers": containers, "os": {"name": "windows"}})), &[]),
        verdict_on(&pod("p", json!({"containers": containers, "nodeName": "elsewhere"})), &[]),
        verdict_on(
            &pod("p", json!({"containers": containers, "securityContext": {"supplementalGroupsPolicy": "Strict"}})),
            &[],
        ),
        verdict_on(
            &pod(
                "p",
                json!({"containers": [{"name": "c", "securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}}]}),
            ),
            &[],
        ),
        verdict_on(
            &pod(
                "p",
                json!({"containers": [{"name": "c", "securityContext": {"appArmorProfile": {"type": "Unconfined"}}}]}),
            ),
            &[],
        ),
    ];
    insta::assert_snapshot!(lines.join("\n"), @r"
    PodOSSelectorNodeLabelDoesNotMatch: Failed to admit pod as the `kubernetes.io/os` label doesn't match node label
    PodOSNotSupported: Failed to admit pod as the OS field doesn't match node OS
    NodeName: Predicate NodeName failed: node(s) didn't match the requested node name
    SupplementalGroupsPolicyNotSupported: SupplementalGroupsPolicy=Strict is not supported in this node
    AppArmor: Cannot enforce AppArmor: AppArmor is not enabled on the host
    admitted
    ");
}

#[test]
fn only_some_pods_are_admitted_under_pressure() {
    use Pressure::{Disk, Memory, Pid};
    let best_effort = json!({ "containers": [{ "name": "a" }] });
    let burstable = json!({ "containers": [{ "name": "a", "resources": { "requests": { "memory": "1Mi" } } }] });
    let tolerant = json!({
        "containers": [{ "name": "a" }],
        "tolerations": [{ "key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule" }],
    });
    let critical = json!({ "containers": [{ "name": "a" }], "priority": 2_000_000_000 });
    for (spec, pressures, message) in [
        (&best_effort, &[][..], ""),
        (&best_effort, &[Memory], "The node had condition: [MemoryPressure]. "),
        (&burstable, &[Memory], ""),
        (&tolerant, &[Memory], ""),
        (&burstable, &[Memory, Disk], "The node had condition: [MemoryPressure DiskPressure]. "),
        (&tolerant, &[Pid], "The node had condition: [PIDPressure]. "),
        (&critical, &[Disk], ""),
    ] {
        let pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
        let refusal = pressure_refusal(&pod, pod.spec.as_ref().unwrap(), &pressures.iter().copied().collect());
        assert_eq!(refusal.map_or(String::new(), |failure| failure.message), message, "{spec} {pressures:?}");
    }
}
