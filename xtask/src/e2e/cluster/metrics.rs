//! What monitoring reads of the agent itself: `/metrics` and the pages below it.

mod exposition;

use anyhow::{Context as _, ensure};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, metrics::exposition::Page, pod, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "metrics count what runs on the node and what was done for it",
    plane: Plane::Shared,
    run: counts,
}];

/// Families both agents have, with their kinds and labels.
const SHARED: &[(&str, &str, &[&str])] = &[
    ("kubelet_active_pods", "gauge", &["static"]),
    ("kubelet_desired_pods", "gauge", &["static"]),
    ("kubelet_http_inflight_requests", "gauge", REQUEST),
    ("kubelet_http_requests_duration_seconds", "histogram", REQUEST),
    ("kubelet_http_requests_total", "counter", REQUEST),
    ("kubelet_managed_ephemeral_containers", "gauge", &[]),
    ("kubelet_node_name", "gauge", &["node"]),
    ("kubelet_run_podsandbox_duration_seconds", "histogram", &["runtime_handler"]),
    ("kubelet_running_containers", "gauge", &["container_state"]),
    ("kubelet_running_pods", "gauge", &[]),
    ("kubelet_runtime_operations_duration_seconds", "histogram", &["operation_type"]),
    ("kubelet_runtime_operations_total", "counter", &["operation_type"]),
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
];
const REQUEST: &[&str] = &["long_running", "method", "path", "server_type"];

fn check_shapes(page: &Page, shapes: &[(&str, &str, &[&str])]) -> anyhow::Result<()> {
    for (name, kind, labels) in shapes {
        let family = page.0.get(*name).with_context(|| format!("there is no {name}"))?;
        ensure!(family.kind == *kind, "{name} is a {} instead of a {kind}", family.kind);
        ensure!(family.labels().iter().eq(*labels), "{name} has labels {:?} instead of {labels:?}", family.labels());
    }
    Ok(())
}

fn scrape(cluster: &ClusterNode, path: &str) -> anyhow::Result<Page> {
    let text = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{}/proxy/{path}", cluster.name)])?;
    Page::parse(&text).with_context(|| path.to_owned())
}

fn counts(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60)?;
    // Upstream counts when it lists.
    let page = cluster.wait("the pod is counted", 30, |cluster| {
        let page = scrape(cluster, "metrics")?;
        for (name, labels, expected) in [
            ("kubelet_running_pods", &[][..], 1.0),
            ("kubelet_running_containers", &[("container_state", "running")], 1.0),
            ("kubelet_desired_pods", &[("static", "")], 1.0),
            ("kubelet_active_pods", &[("static", "")], 1.0),
            ("kubelet_working_pods", &[("lifecycle", "sync"), ("config", "desired")], 1.0),
            ("kubelet_node_name", &[("node", &cluster.name)], 1.0),
        ] {
            let found = page.value(name, labels)?;
            ensure!(found == expected, "{name} {labels:?} is {found} instead of {expected}");
        }
        Ok(page)
    })?;
    check_shapes(&page, SHARED)?;
    for operation in ["run_podsandbox", "create_container", "start_container", "list_podsandbox", "image_status"] {
        let count = page.value("kubelet_runtime_operations_total", &[("operation_type", operation)])?;
        ensure!(count >= 1.0, "{operation} was counted {count} times");
    }
    let by_us = [("path", "metrics"), ("server_type", "readwrite"), ("method", "GET")];
    ensure!(page.value("kubelet_http_requests_total", &by_us)? >= 1.0, "nobody asked for it");
    ensure!(page.value("process_resident_memory_bytes", &[])? > 1e6, "it takes no room");
    ensure!(page.value("kubernetes_build_info", &[("major", "1"), ("minor", "36")])? == 1.0, "it was not built");
    Ok(())
}
