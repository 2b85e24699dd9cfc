//! Metrics of the agent itself: `/metrics` and the pages below it.

mod exposition;

use std::io::{Read as _, Write as _};

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::AgentOptions;
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, metrics::exposition::Page, pod, spec};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "metrics count what runs on the node and what was done for it",
        plane: Plane::Shared,
        run: counts,
    },
    ClusterCase {
        name: "the summary counts the volumes of a pod, projected ones too",
        plane: Plane::Shared,
        run: volume_figures,
    },
    ClusterCase { name: "pages come by the methods and in the forms upstream has", plane: Plane::Shared, run: forms },
];

/// The readiness probe runs every second.
const PROBED: &str = "probed";
const ENDED: &str = "ended";
const REFUSED: &str = "refused";

/// Families both agents have, with their kinds and labels.
const SHARED: &[(&str, &str, &[&str])] = &[
    ("kubelet_active_pods", "gauge", &["static"]),
    ("kubelet_admission_rejections_total", "counter", &["reason"]),
    ("kubelet_cgroup_version", "gauge", &[]),
    ("kubelet_containers_per_pod_count", "histogram", &[]),
    ("kubelet_desired_pods", "gauge", &["static"]),
    ("kubelet_evented_pleg_connection_error_count", "counter", &[]),
    ("kubelet_evented_pleg_connection_success_count", "counter", &[]),
    ("kubelet_first_network_pod_start_sli_duration_seconds", "gauge", &[]),
    ("kubelet_http_inflight_requests", "gauge", REQUEST),
    ("kubelet_http_requests_duration_seconds", "histogram", REQUEST),
    ("kubelet_http_requests_total", "counter", REQUEST),
    ("kubelet_lifecycle_handler_http_fallbacks_total", "counter", &[]),
    ("kubelet_managed_ephemeral_containers", "gauge", &[]),
    ("kubelet_mirror_pods", "gauge", &[]),
    ("kubelet_node_name", "gauge", &["node"]),
    ("kubelet_orphaned_runtime_pods_total", "counter", &[]),
    ("kubelet_pleg_last_seen_seconds", "gauge", &[]),
    ("kubelet_pleg_pod_relist_duration_seconds", "histogram", &[]),
    ("kubelet_pleg_relist_duration_seconds", "histogram", &[]),
    ("kubelet_pleg_relist_interval_seconds", "histogram", &[]),
    ("kubelet_pod_start_duration_seconds", "histogram", &[]),
    ("kubelet_pod_start_sli_duration_seconds", "histogram", &[]),
    ("kubelet_pod_start_total_duration_seconds", "histogram", &[]),
    ("kubelet_pod_status_sync_duration_seconds", "histogram", &[]),
    ("kubelet_pod_worker_duration_seconds", "histogram", &["operation_type"]),
    ("kubelet_pod_worker_start_duration_seconds", "histogram", &[]),
    ("kubelet_run_podsandbox_duration_seconds", "histogram", &["runtime_handler"]),
    ("kubelet_running_containers", "gauge", &["container_state"]),
    ("kubelet_running_pods", "gauge", &[]),
    ("kubelet_runtime_operations_duration_seconds", "histogram", &["operation_type"]),
    ("kubelet_runtime_operations_total", "counter", &["operation_type"]),
    ("kubelet_sleep_action_terminated_early_total", "counter", &[]),
    ("kubelet_started_containers_total", "counter", &["container_type"]),
    ("kubelet_started_pods_errors_total", "counter", &[]),
    ("kubelet_started_pods_total", "counter", &[]),
    ("kubelet_started_user_namespaced_pods_errors_total", "counter", &[]),
    ("kubelet_started_user_namespaced_pods_total", "counter", &[]),
    ("kubelet_terminated_containers_total", "counter", &["container_type", "exit_code", "reason"]),
    ("kubelet_working_pods", "gauge", &["config", "lifecycle", "static"]),
    (
        "kubernetes_build_info",
        "gauge",
        &[
            "build_date",
            "compiler",
            "git_commit",
            "git_tree_state",
            "git_version",
            "go_version",
            "major",
            "minor",
            "platform",
        ],
    ),
    ("kubernetes_feature_enabled", "gauge", &["name", "stage"]),
    ("process_cpu_seconds_total", "counter", &[]),
    ("process_max_fds", "gauge", &[]),
    ("process_open_fds", "gauge", &[]),
    ("process_resident_memory_bytes", "gauge", &[]),
    ("process_start_time_seconds", "gauge", &[]),
    ("process_virtual_memory_bytes", "gauge", &[]),
    ("process_virtual_memory_max_bytes", "gauge", &[]),
    ("rest_client_rate_limiter_duration_seconds", "histogram", &["host", "verb"]),
    ("rest_client_request_duration_seconds", "histogram", &["host", "verb"]),
    ("rest_client_request_size_bytes", "histogram", &["host", "verb"]),
    ("rest_client_requests_total", "counter", &["code", "host", "method"]),
    ("rest_client_response_size_bytes", "histogram", &["host", "verb"]),
    ("storage_operation_duration_seconds", "histogram", &["migrated", "operation_name", "status", "volume_plugin"]),
];
const PROBES: &[(&str, &str, &[&str])] = &[
    ("process_start_time_seconds", "gauge", &[]),
    ("prober_probe_duration_seconds", "histogram", &["container", "namespace", "pod", "probe_type"]),
    ("prober_probe_total", "counter", &["container", "namespace", "pod", "pod_uid", "probe_type", "result"]),
];
const SLIS: &[(&str, &str, &[&str])] = &[
    ("kubernetes_healthcheck", "gauge", &["name", "type"]),
    ("kubernetes_healthchecks_total", "counter", &["name", "status", "type"]),
    ("process_start_time_seconds", "gauge", &[]),
];
const REQUEST: &[&str] = &["long_running", "method", "path", "server_type"];

fn check_shapes(page: &Page, shapes: &[(&str, &str, &[&str])]) -> anyhow::Result<()> {
    let mut faults = Vec::new();
    for (name, kind, labels) in shapes {
        match page.0.get(*name) {
            None => faults.push(format!("there is no {name}")),
            Some(family) if family.kind != *kind => faults.push(format!("{name} is a {}", family.kind)),
            Some(family) if !family.labels().iter().eq(*labels) => {
                faults.push(format!("{name} has labels {:?}", family.labels()));
            }
            Some(_) => {}
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("; "));
    Ok(())
}

fn scrape(cluster: &ClusterNode, path: &str) -> anyhow::Result<Page> {
    Page::parse(&proxied(cluster, path)?).with_context(|| path.to_owned())
}

pub fn proxied(cluster: &ClusterNode, path: &str) -> anyhow::Result<String> {
    cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{}/proxy/{path}", cluster.name)])
}

fn counts(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut probed = spec(&cluster.name, OBEDIENT);
    probed["containers"][0]["readinessProbe"] = json!({ "exec": { "command": ["true"] }, "periodSeconds": 1 });
    let mut ended = spec(&cluster.name, "exit 3");
    ended["restartPolicy"] = json!("Never");
    let mut refused = spec(&cluster.name, OBEDIENT);
    refused["nodeName"] = json!(cluster.name);
    refused["containers"][0]["resources"] = json!({ "requests": { "cpu": "1000" } });
    cluster.apply_all(vec![pod(PROBED, &probed), pod(ENDED, &ended), pod(REFUSED, &refused)])?;
    cluster.wait_running(PROBED, 60)?;
    for name in [ENDED, REFUSED] {
        cluster.wait(&format!("{name} has failed"), 60, |cluster| {
            let pod = cluster.pod(name)?;
            ensure!(pod.status()["phase"] == "Failed", "{}", pod.status());
            Ok(())
        })?;
    }
    // Upstream counts at relists, and pods at cleanups.
    cluster
        .wait("what there is is counted", 30, |cluster| check_counts(&scrape(cluster, "metrics")?, &cluster.name))?;
    // The duration of a request is visible in the next scrape.
    let page = scrape(cluster, "metrics")?;
    check_shapes(&page, SHARED)?;
    for operation in ["run_podsandbox", "create_container", "start_container", "list_podsandbox", "image_status"] {
        let count = page.value("kubelet_runtime_operations_total", &[("operation_type", operation)])?;
        ensure!(count >= 1.0, "{operation} was counted {count} times");
    }
    for (name, labels, least) in [
        (
            "kubelet_http_requests_total",
            &[("path", "metrics"), ("server_type", "readwrite"), ("method", "GET")][..],
            1.0,
        ),
        ("process_resident_memory_bytes", &[], 1e6),
        ("rest_client_requests_total", &[("code", "200"), ("method", "PATCH")], 1.0),
        ("kubelet_pod_start_duration_seconds_count", &[], 1.0),
        ("kubelet_pod_status_sync_duration_seconds_count", &[], 3.0),
        ("kubelet_pleg_relist_duration_seconds_count", &[], 1.0),
        ("kubelet_pod_start_sli_duration_seconds_count", &[], 1.0),
    ] {
        let found = page.value(name, labels)?;
        ensure!(found >= least, "{name} {labels:?} is {found} instead of {least} or more");
    }
    check_pages_beside(cluster)
}

fn check_counts(page: &Page, node: &str) -> anyhow::Result<()> {
    for (name, labels, expected) in [
        ("kubelet_running_pods", &[][..], 1.0),
        ("kubelet_running_containers", &[("container_state", "running")], 1.0),
        ("kubelet_running_containers", &[("container_state", "exited")], 1.0),
        ("kubelet_desired_pods", &[("static", "")], 3.0),
        ("kubelet_active_pods", &[("static", "")], 1.0),
        ("kubelet_working_pods", &[("lifecycle", "sync"), ("config", "desired")], 1.0),
        ("kubelet_node_name", &[("node", node)], 1.0),
        ("kubernetes_build_info", &[("major", "1"), ("minor", "36")], 1.0),
        ("kubelet_started_pods_total", &[], 2.0),
        ("kubelet_started_containers_total", &[("container_type", "container")], 2.0),
        ("kubelet_terminated_containers_total", &[("exit_code", "3"), ("reason", "Error")], 1.0),
        ("kubelet_admission_rejections_total", &[("reason", "OutOfcpu")], 1.0),
    ] {
        let found = page.value(name, labels)?;
        ensure!(found == expected, "{name} {labels:?} is {found} instead of {expected}");
    }
    Ok(())
}

/// Probes are counted while their pod exists, and health checks until they are reset.
fn check_pages_beside(cluster: &ClusterNode) -> anyhow::Result<()> {
    let readiness = [("probe_type", "Readiness"), ("result", "successful"), ("pod", PROBED), ("container", "main")];
    cluster.wait("several probes are counted", 20, |cluster| {
        let page = scrape(cluster, "metrics/probes")?;
        check_shapes(&page, PROBES)?;
        let count = page.value("prober_probe_total", &readiness)?;
        ensure!(count >= 3.0, "{count} probes");
        Ok(())
    })?;
    proxied(cluster, "healthz")?;
    let page = scrape(cluster, "metrics/slis")?;
    check_shapes(&page, SLIS)?;
    let syncloop = [("name", "syncloop"), ("type", "healthz"), ("status", "success")];
    ensure!(page.value("kubernetes_healthchecks_total", &syncloop)? >= 1.0, "the check was not counted");
    cluster.kubectl(&["delete", "pod", PROBED])?;
    cluster.wait("the probes are forgotten", 20, |cluster| {
        let page = scrape(cluster, "metrics/probes")?;
        ensure!(page.value("prober_probe_total", &readiness).is_err(), "they are still there");
        Ok(())
    })
}

fn volume_figures(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let config = cluster.node.agent.own_cgroups()?;
    let options = AgentOptions { config, cluster: Some(cluster.membership()?), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let mut spec = spec(&cluster.name, OBEDIENT);
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["volumes"] = json!([
        { "name": "settings", "configMap": { "name": "settings" } },
        { "name": "password", "secret": { "secretName": "password" } },
        { "name": "labels", "downwardAPI": { "items": [{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }] } },
        { "name": "joined", "projected": { "sources": [{ "configMap": { "name": "settings" } }, { "secret": { "name": "password" } }] } },
        { "name": "scratch", "emptyDir": {} },
        { "name": "memory", "emptyDir": { "medium": "Memory" } },
        { "name": "host", "hostPath": { "path": "/etc/ssl" } },
    ]);
    let volumes = spec["volumes"].as_array().into_iter().flatten();
    let mounts = volumes.map(|volume| json!({ "name": volume["name"], "mountPath": format!("/{}", volume["name"].as_str().unwrap_or_default()) }));
    spec["containers"][0]["volumeMounts"] = mounts.collect();
    cluster.apply_all(vec![
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": "1" } }),
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "password" }, "stringData": { "b": "2" } }),
        pod("stored", &spec),
    ])?;
    cluster.wait_running("stored", 60)?;
    // Upstream measures volumes a minute after it first saw the pod.
    cluster.wait("every volume is counted", 100, |cluster| {
        let summary: Value = serde_json::from_str(&proxied(cluster, "stats/summary")?)?;
        let mut pods = summary["pods"].as_array().into_iter().flatten();
        let pod = pods.find(|pod| pod["podRef"]["name"] == "stored").context("the pod is not there")?;
        let mut inodes: Vec<_> = pod["volume"].as_array().into_iter().flatten().map(inodes_used).collect();
        inodes.sort();
        ensure!(inodes == VOLUMES, "{inodes:?}");
        Ok(())
    })?;
    let page = proxied(cluster, "metrics")?;
    let of_claims = page.lines().find(|line| line.starts_with("kubelet_volume_stats"));
    ensure!(of_claims.is_none(), "no volume is a claim's: {of_claims:?}");
    cluster.kubectl(&["delete", "pod", "stored"])?;
    cluster.wait_none(30)
}

/// Which volumes are counted, and the files, links and directories of each. A path of the node is not.
const VOLUMES: [(&str, u64); 7] = [
    ("joined", 7),
    ("kube-api-access", 9),
    ("labels", 5),
    ("memory", 1),
    ("password", 5),
    ("scratch", 1),
    ("settings", 5),
];

fn inodes_used(volume: &Value) -> (&str, u64) {
    let name = volume["name"].as_str().unwrap_or_default();
    // The suffix of a token's volume is random.
    let name = if name.starts_with("kube-api-access-") { "kube-api-access" } else { name };
    (name, volume["inodesUsed"].as_u64().unwrap_or_default())
}

/// A request, and the status and some headers of its answer.
const ANSWERS: &[(&str, &str, &[&str])] = &[
    ("POST /healthz", "200", &[]),
    ("DELETE /healthz/syncloop", "200", &[]),
    ("HEAD /pods", "405", &["allow: GET"]),
    ("POST /pods/", "405", &["allow: GET"]),
    ("POST /metrics/cadvisor", "200", &[]),
    ("PUT /metrics/resource", "200", &[]),
    ("HEAD /stats/summary", "405", &["allow: GET, POST"]),
    ("PUT /exec/a/b/c", "405", &[]),
];
/// The scraper's headers, the escaping in the content type, and whether the page is compressed.
const FORMS: &[(&str, &str, Option<&str>)] = &[
    ("Accept: */*", "underscores", None),
    ("Accept-Encoding: gzip", "underscores", Some("gzip")),
    ("Accept-Encoding: gzip;q=0", "underscores", None),
    ("Accept-Encoding: zstd, gzip;q=0.5", "underscores", Some("gzip")),
    ("Accept-Encoding: *", "underscores", None),
    ("Accept-Encoding: identity, gzip", "underscores", None),
    (
        "Accept: application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.3",
        "allow-utf-8",
        None,
    ),
    ("Accept: text/plain;version=0.0.4;escaping=values,application/json;escaping=dots;q=0.1", "values", None),
];

fn forms(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let ask = |request: &str, header: &str| -> anyhow::Result<String> {
        let mut stream = cluster.node.agent.connect_read_only()?;
        write!(stream, "{request} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n{header}\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, _) = answer.split_once("\r\n\r\n").with_context(|| format!("{request}: {answer}"))?;
        // Names of headers are written in either case.
        let line =
            |line: &str| line.split_once(": ").map(|(name, value)| format!("{}: {value}\r\n", name.to_lowercase()));
        Ok(head.lines().map(|text| line(text).unwrap_or_else(|| format!("{text}\r\n"))).collect())
    };
    for (request, status, headers) in ANSWERS {
        let head = ask(request, "X-Nothing: 1")?;
        let is_right = head.starts_with(&format!("HTTP/1.1 {status} "));
        ensure!(is_right && headers.iter().all(|header| head.contains(&format!("{header}\r\n"))), "{request}: {head}");
    }
    for path in ["/metrics", "/metrics/cadvisor", "/metrics/resource", "/metrics/probes", "/metrics/slis"] {
        for (said, escaping, encoding) in FORMS {
            let head = ask(&format!("GET {path}"), said)?;
            let kind = format!("content-type: text/plain; version=0.0.4; charset=utf-8; escaping={escaping}\r\n");
            let found = head.lines().find_map(|line| line.strip_prefix("content-encoding: "));
            let has_start = head.contains("process-start-time-unix: ");
            ensure!(head.contains(&kind) && found == *encoding && has_start, "{path} for `{said}`: {head}");
        }
    }
    Ok(())
}
