//! The names that kubernetes-mixin's rules, alerts and dashboards of kubelets and nodes read.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use axum::http::{Method, StatusCode};
use jiff::Timestamp;
use rubelet_core::{
    effect::Facts,
    op::{NodeOp, Op},
    snapshot::Snapshot,
    time::{Now, Uptime},
};
use rubelet_cri::{client::CriClient, port::ContainerRuntime as _};
use rubelet_kube::client::{Observed, Occurrence};

use super::{after_eviction, two_pods};
use crate::{
    metrics::{Metrics, claims, runtime::InstrumentedRuntime, storage::StorageOperation, text::Text},
    stats::{cadvisor, example, persistent_meter::PersistentMeter},
    world::Clock,
};

const READ: &[&str] = &[
    "container_cpu_cfs_periods_total",
    "container_cpu_cfs_throttled_periods_total",
    "container_cpu_usage_seconds_total",
    "container_fs_reads_bytes_total",
    "container_fs_reads_total",
    "container_fs_writes_bytes_total",
    "container_fs_writes_total",
    "container_memory_cache",
    "container_memory_rss",
    "container_memory_swap",
    "container_memory_usage_bytes",
    "container_memory_working_set_bytes",
    "container_network_receive_bytes_total",
    "container_network_receive_packets_dropped_total",
    "container_network_receive_packets_total",
    "container_network_transmit_bytes_total",
    "container_network_transmit_packets_dropped_total",
    "container_network_transmit_packets_total",
    "go_goroutines",
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "kubelet_certificate_manager_client_ttl_seconds",
    "kubelet_certificate_manager_server_ttl_seconds",
    "kubelet_cgroup_manager_duration_seconds_bucket",
    "kubelet_cgroup_manager_duration_seconds_count",
    "kubelet_evictions",
    "kubelet_node_config_error",
    "kubelet_node_name",
    "kubelet_pleg_relist_duration_seconds_bucket",
    "kubelet_pleg_relist_duration_seconds_count",
    "kubelet_pleg_relist_interval_seconds_bucket",
    "kubelet_pod_start_duration_seconds_bucket",
    "kubelet_pod_start_duration_seconds_count",
    "kubelet_pod_worker_duration_seconds_bucket",
    "kubelet_pod_worker_duration_seconds_count",
    "kubelet_running_containers",
    "kubelet_running_pods",
    "kubelet_runtime_operations_duration_seconds_bucket",
    "kubelet_runtime_operations_errors_total",
    "kubelet_runtime_operations_total",
    "kubelet_server_expiration_renew_errors",
    "kubelet_volume_stats_available_bytes",
    "kubelet_volume_stats_capacity_bytes",
    "kubelet_volume_stats_inodes",
    "kubelet_volume_stats_inodes_free",
    "kubelet_volume_stats_inodes_used",
    "kubelet_volume_stats_used_bytes",
    "kubernetes_build_info",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "rest_client_request_duration_seconds_bucket",
    "rest_client_requests_total",
    "storage_operation_duration_seconds_bucket",
    "storage_operation_duration_seconds_count",
    "storage_operation_errors_total",
    "volume_manager_total_volumes",
];
/// With the reason.
const ABSENT: &[(&str, &str)] = &[
    ("go_goroutines", "there is no Go in here"),
    ("kubelet_node_config_error", "upstream v1.36 has none: configuration is not fetched from the API server any more"),
    ("storage_operation_errors_total", "upstream v1.36 has none: the durations have a status"),
];

/// Metrics that appear only after their first event.
async fn busy() -> Metrics {
    let metrics = Arc::new(Metrics::default());
    let now = Now { uptime: Uptime::from_secs(2), wall: Timestamp::UNIX_EPOCH };
    metrics.turned(&Snapshot::default(), &two_pods(), now);
    metrics.effect_ended(
        &Op::Node(NodeOp::SyncQosCgroups { cgroups: Vec::new() }),
        &Ok(Facts::Nothing),
        Uptime::from_secs(1),
        now,
    );
    metrics.storage.ended("kubernetes.io/empty-dir", StorageOperation::Mount, true, Duration::ZERO);
    metrics.certificates.client.in_use(None);
    metrics.certificates.serving.in_use(None);
    let called = Occurrence::Called { took: Duration::ZERO, sent_bytes: 0, received_bytes: None };
    for what in [Occurrence::Tried(Some(StatusCode::OK)), called] {
        metrics.api.observe(&Observed { method: &Method::GET, host: "api:6443", what });
    }
    let absent = CriClient::new("unix:///nonexistent/cri.sock", "", Duration::from_secs(1)).unwrap();
    let runtime = InstrumentedRuntime::new(Arc::new(absent), metrics.clone(), Clock::system());
    runtime.version().await.unwrap_err();
    drop(runtime);
    Arc::into_inner(metrics).unwrap()
}

#[tokio::test]
async fn mixin_metrics_exist_or_have_a_reason() {
    let own = busy().await.page(&after_eviction(), Timestamp::UNIX_EPOCH);
    let of_containers = cadvisor::exposition(Ok(&example::sample())).into_text();
    let mut of_claims = Text::default();
    claims::write(&PersistentMeter::knowing("u1", example::persistent()), &mut of_claims);
    let of_claims = of_claims.into_string();
    let samples =
        own.lines().chain(of_containers.lines()).chain(of_claims.lines()).filter(|line| !line.starts_with('#'));
    let shown: BTreeSet<&str> = samples.filter_map(|line| line.split(['{', ' ']).next()).collect();
    let missing: Vec<&str> = READ.iter().copied().filter(|name| !shown.contains(name)).collect();
    let excused: Vec<&str> = ABSENT.iter().map(|(name, _)| *name).collect();
    assert_eq!(missing, excused);
}
