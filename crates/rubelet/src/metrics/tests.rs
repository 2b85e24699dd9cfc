//! Tests of pages as a scraper reads them.

mod mixin;
mod volume_alerts;

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use axum::{
    body::{Body, to_bytes},
    http::{Method, Request},
};
use jiff::Timestamp;
use rubelet_core::{
    eviction::{EvictionRecord, Ranking},
    id::PodUid,
    observation::ListedState,
    pod::VolumeRecord,
    snapshot::{EvictionView, LifecycleStage, PodCounts, ProtectedMemory, Snapshot},
    time::{Now, Uptime},
    volumes::{
        claims::{PersistentKind, PersistentSource},
        local::LocalVolume,
    },
};
use rubelet_csi::{CsiPlugins as _, DriverAddress};
use serde_json::json;
use tower::ServiceExt as _;

use super::{Metrics, claims, csi::InstrumentedPlugins, text::Text};
use crate::{
    server::{
        ServerContext, read_only,
        tests::context,
        views::tests::{snapshot, view},
    },
    stats::{
        example,
        persistent_meter::{PersistentMeter, tests::FakeDriver},
    },
    world::Clock,
};

fn two_pods() -> Snapshot {
    let mut web = view("default", "web", &["a", "b"], &[], json!({ "phase": "Running" }));
    web.counts = PodCounts {
        stage: LifecycleStage::Syncing,
        has_ready_sandbox: true,
        containers: BTreeMap::from([(ListedState::Running, 2), (ListedState::Exited, 1)]),
        ..PodCounts::default()
    };
    let volumes =
        json!([{"name": "data", "emptyDir": {}}, {"name": "disk", "persistentVolumeClaim": {"claimName": "c"}}]);
    let mounts = json!([{"name": "data", "mountPath": "/data"}, {"name": "disk", "mountPath": "/disk"}]);
    let spec = Arc::make_mut(&mut web.pod).spec.as_mut().unwrap();
    spec.volumes = serde_json::from_value(volumes).unwrap();
    spec.containers[0].volume_mounts = serde_json::from_value(mounts).unwrap();
    let local = PersistentSource {
        name: "pv".to_owned(),
        read_only: false,
        is_exclusive: false,
        size: None,
        group: None,
        kind: PersistentKind::Local(LocalVolume {
            path: "/disk".into(),
            fs_type: String::new(),
            mount_options: Vec::new(),
            is_block: false,
        }),
    };
    web.volumes.insert("data".to_owned(), VolumeRecord { claimed: None, is_set_up: true, ..VolumeRecord::default() });
    web.volumes.insert(
        "disk".to_owned(),
        VolumeRecord { claimed: Some(Arc::new(local)), is_set_up: false, ..VolumeRecord::default() },
    );
    let mut refused = view("default", "refused", &["a"], &[], json!({ "phase": "Failed" }));
    refused.counts =
        PodCounts { stage: LifecycleStage::Syncing, rejected: Some("OutOfcpu".to_owned()), ..PodCounts::default() };
    snapshot("n1", [("u1", web), ("u2", refused)])
}

async fn ask(context: &ServerContext, method: Method, path: &str) -> String {
    let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    let response = read_only::router(context.clone()).oneshot(request).await.unwrap();
    String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
}

fn lines_of<'a>(page: &'a str, families: &[&str]) -> String {
    let is_of = |line: &&'a str| families.iter().any(|name| line.starts_with(name));
    page.lines().filter(is_of).collect::<Vec<_>>().join("\n")
}

/// `two_pods`, after pods were ranked and one was evicted.
fn after_eviction() -> Snapshot {
    let record = EvictionRecord {
        counts: [("memory.available".to_owned(), 1)].into(),
        last_ranking: Some(Ranking {
            number: 0,
            stats_age: [("memory.available".to_owned(), Duration::from_millis(300))].into(),
        }),
        ..EvictionRecord::default()
    };
    Snapshot { eviction: EvictionView { record, ..EvictionView::default() }.into(), ..two_pods() }
}

#[test]
fn age_of_the_figures_is_observed_once_per_ranking() {
    let metrics = Metrics::default();
    let now = Now { uptime: Uptime::from_secs(2), wall: Timestamp::UNIX_EPOCH };
    assert_eq!(lines_of(&metrics.page(&two_pods(), now.wall), &["kubelet_eviction"]), "");
    metrics.turned(&two_pods(), &after_eviction(), now);
    metrics.turned(&after_eviction(), &after_eviction(), now);
    let page = metrics.page(&after_eviction(), now.wall);
    let families = [
        "kubelet_evictions",
        "kubelet_eviction_stats_age_seconds_sum",
        "kubelet_eviction_stats_age_seconds_count",
        "kubelet_eviction_stats_age_seconds_bucket{eviction_signal=\"memory.available\",le=\"0.",
    ];
    insta::assert_snapshot!(lines_of(&page, &families), @r#"
    kubelet_evictions{eviction_signal="memory.available"} 1
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.005"} 0
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.01"} 0
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.025"} 0
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.05"} 0
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.1"} 0
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.25"} 0
    kubelet_eviction_stats_age_seconds_bucket{eviction_signal="memory.available",le="0.5"} 1
    kubelet_eviction_stats_age_seconds_sum{eviction_signal="memory.available"} 0.3
    kubelet_eviction_stats_age_seconds_count{eviction_signal="memory.available"} 1
    "#);
}

#[tokio::test]
async fn protected_memory_is_shown_if_there_is_any_to_protect() {
    for (protected_memory, expected) in [
        (None, ""),
        (
            Some(ProtectedMemory { min_bytes: 300, low_bytes: 140 }),
            "kubelet_memory_qos_node_memory_min_bytes 300\nkubelet_memory_qos_node_memory_low_bytes 140",
        ),
    ] {
        let mut snapshot = two_pods();
        snapshot.node.protected_memory = protected_memory;
        let (_sender, context) = context(snapshot, Path::new("/nonexistent"));
        let page = ask(&context, Method::GET, "/metrics").await;
        assert_eq!(lines_of(&page, &["kubelet_memory_qos"]), expected);
    }
}

#[tokio::test]
async fn pods_and_containers_are_counted_from_the_last_snapshot() {
    let (_sender, context) = context(two_pods(), Path::new("/nonexistent"));
    let page = ask(&context, Method::GET, "/metrics").await;
    let families = [
        "kubelet_node",
        "kubelet_running",
        "kubelet_desired",
        "kubelet_active",
        "kubelet_working_pods{lifecycle=\"sync\"",
    ];
    insta::assert_snapshot!(lines_of(&page, &families), @r#"
    kubelet_node_name{node="n1"} 1
    kubelet_running_pods 1
    kubelet_running_containers{container_state="created"} 0
    kubelet_running_containers{container_state="exited"} 1
    kubelet_running_containers{container_state="running"} 2
    kubelet_running_containers{container_state="unknown"} 0
    kubelet_desired_pods{static=""} 2
    kubelet_desired_pods{static="true"} 0
    kubelet_active_pods{static=""} 1
    kubelet_active_pods{static="true"} 0
    kubelet_working_pods{lifecycle="sync",config="desired",static=""} 1
    kubelet_working_pods{lifecycle="sync",config="desired",static="true"} 0
    kubelet_working_pods{lifecycle="sync",config="orphan",static=""} 0
    kubelet_working_pods{lifecycle="sync",config="orphan",static="true"} 0
    kubelet_working_pods{lifecycle="sync",config="runtime_only",static="unknown"} 0
    "#);
}

#[test]
fn volumes_are_counted_by_plugin_and_their_setup_is_timed() {
    let metrics = Metrics::default();
    let wall = two_pods().pods.get(&PodUid::new("u1")).unwrap().lifecycle_since + Duration::from_secs(3);
    let now = Now { uptime: Uptime::from_secs(9), wall };
    for before in [Snapshot::default(), two_pods()] {
        metrics.turned(&before, &two_pods(), now);
    }
    let page = metrics.page(&two_pods(), wall);
    insta::assert_snapshot!(lines_of(&page, &["volume_manager", "volume_operation_total_seconds_sum"]), @r#"
    volume_manager_total_volumes{plugin_name="kubernetes.io/empty-dir",state="actual_state_of_world"} 1
    volume_manager_total_volumes{plugin_name="kubernetes.io/empty-dir",state="desired_state_of_world"} 1
    volume_manager_total_volumes{plugin_name="kubernetes.io/local-volume",state="desired_state_of_world"} 1
    volume_operation_total_seconds_sum{plugin_name="kubernetes.io/empty-dir",operation_name="overall_volume_mount"} 3
    "#);
}

#[test]
fn figures_of_claims_have_upstreams_names() {
    let mut text = Text::default();
    claims::write(&PersistentMeter::knowing("u1", example::persistent()), &mut text);
    insta::assert_snapshot!(text.into_string(), @r#"
    # HELP kubelet_volume_stats_capacity_bytes [ALPHA] Capacity in bytes of the volume
    # TYPE kubelet_volume_stats_capacity_bytes gauge
    kubelet_volume_stats_capacity_bytes{namespace="default",persistentvolumeclaim="data-web-0"} 5.24288e+08
    # HELP kubelet_volume_stats_available_bytes [ALPHA] Number of available bytes in the volume
    # TYPE kubelet_volume_stats_available_bytes gauge
    kubelet_volume_stats_available_bytes{namespace="default",persistentvolumeclaim="data-web-0"} 1.048576e+08
    # HELP kubelet_volume_stats_used_bytes [ALPHA] Number of used bytes in the volume
    # TYPE kubelet_volume_stats_used_bytes gauge
    kubelet_volume_stats_used_bytes{namespace="default",persistentvolumeclaim="data-web-0"} 4.194304e+08
    # HELP kubelet_volume_stats_inodes [ALPHA] Maximum number of inodes in the volume
    # TYPE kubelet_volume_stats_inodes gauge
    kubelet_volume_stats_inodes{namespace="default",persistentvolumeclaim="data-web-0"} 5000
    # HELP kubelet_volume_stats_inodes_free [ALPHA] Number of free inodes in the volume
    # TYPE kubelet_volume_stats_inodes_free gauge
    kubelet_volume_stats_inodes_free{namespace="default",persistentvolumeclaim="data-web-0"} 1000
    # HELP kubelet_volume_stats_inodes_used [ALPHA] Number of used inodes in the volume
    # TYPE kubelet_volume_stats_inodes_used gauge
    kubelet_volume_stats_inodes_used{namespace="default",persistentvolumeclaim="data-web-0"} 4000
    # HELP kubelet_volume_stats_health_status_abnormal [ALPHA] Abnormal volume health status. The count is either 1 or 0. 1 indicates the volume is unhealthy, 0 indicates volume is healthy
    # TYPE kubelet_volume_stats_health_status_abnormal gauge
    kubelet_volume_stats_health_status_abnormal{namespace="default",persistentvolumeclaim="data-web-0"} 1
    "#);
}

#[tokio::test(start_paused = true)]
async fn calls_to_drivers_are_timed_by_method_and_code() {
    let (metrics, clock) = (Arc::new(Metrics::default()), Clock::system());
    let plugins = InstrumentedPlugins::new(Arc::new(FakeDriver), metrics.clone(), clock);
    let driver = DriverAddress { name: "good".to_owned(), socket: "/good.sock".into() };
    let path = |handle: &str| format!("/u1/volumes/kubernetes.io~csi/pv-{handle}/mount");
    plugins.capabilities(&driver).await.unwrap();
    plugins.stats(&driver, "well", Path::new(&path("well")), None).await.unwrap();
    plugins.stats(&driver, "fail", Path::new(&path("fail")), None).await.unwrap_err();
    let path = path("hang");
    let call = plugins.stats(&driver, "hang", Path::new(&path), None);
    tokio::time::timeout(Duration::from_secs(7), call).await.unwrap_err();
    let page = metrics.page(&Snapshot::default(), Timestamp::UNIX_EPOCH);
    insta::assert_snapshot!(lines_of(&page, &["csi_operations_seconds_sum"]), @r#"
    csi_operations_seconds_sum{driver_name="good",method_name="/csi.v1.Node/NodeGetCapabilities",grpc_status_code="OK",migrated="false"} 0
    csi_operations_seconds_sum{driver_name="good",method_name="/csi.v1.Node/NodeGetVolumeStats",grpc_status_code="Canceled",migrated="false"} 7
    csi_operations_seconds_sum{driver_name="good",method_name="/csi.v1.Node/NodeGetVolumeStats",grpc_status_code="Internal",migrated="false"} 0
    csi_operations_seconds_sum{driver_name="good",method_name="/csi.v1.Node/NodeGetVolumeStats",grpc_status_code="OK",migrated="false"} 0
    "#);
}

#[tokio::test]
async fn health_check_metrics_count_full_checks_until_reset() {
    let (_sender, context) = context(Snapshot::default(), Path::new("/nonexistent"));
    for path in ["/healthz", "/healthz", "/healthz/ping"] {
        assert_eq!(ask(&context, Method::GET, path).await, "ok");
    }
    insta::assert_snapshot!(lines_of(&ask(&context, Method::GET, "/metrics/slis").await, &["kubernetes"]), @r#"
    kubernetes_healthcheck{name="log",type="healthz"} 1
    kubernetes_healthcheck{name="ping",type="healthz"} 1
    kubernetes_healthcheck{name="syncloop",type="healthz"} 1
    kubernetes_healthchecks_total{name="log",type="healthz",status="success"} 2
    kubernetes_healthchecks_total{name="ping",type="healthz",status="success"} 2
    kubernetes_healthchecks_total{name="syncloop",type="healthz",status="success"} 2
    "#);
    assert_eq!(ask(&context, Method::DELETE, "/metrics/slis").await, "metrics reset\n");
    assert_eq!(lines_of(&ask(&context, Method::GET, "/metrics/slis").await, &["kubernetes"]), "");
}

#[tokio::test]
async fn a_request_is_in_flight_until_its_answer_is_read() {
    let (_sender, context) = context(Snapshot::default(), Path::new("/nonexistent"));
    let request = Request::builder().uri("/pods").body(Body::empty()).unwrap();
    let answer = read_only::router(context.clone()).oneshot(request).await.unwrap();
    let shown = || {
        lines_of(
            &context.metrics.page(&Snapshot::default(), Timestamp::UNIX_EPOCH),
            &["kubelet_http_inflight", "kubelet_http_requests_duration_seconds_count"],
        )
    };
    assert_eq!(
        shown(),
        r#"kubelet_http_inflight_requests{method="GET",path="pods",server_type="readonly",long_running="false"} 1"#
    );
    drop(answer);
    insta::assert_snapshot!(shown(), @r#"
    kubelet_http_requests_duration_seconds_count{method="GET",path="pods",server_type="readonly",long_running="false"} 1
    kubelet_http_inflight_requests{method="GET",path="pods",server_type="readonly",long_running="false"} 0
    "#);
}

/// CVE-2020-8551: requests to a port must not grow the agent's memory without bound.
#[tokio::test]
async fn no_caller_can_make_series() {
    let (_sender, context) = context(Snapshot::default(), Path::new("/nonexistent"));
    let router = read_only::router(context.clone());
    let mut series = Vec::new();
    for round in 0..3 {
        for number in 0..7_000 {
            let path = match number % 4 {
                0 => format!("/{round}/{number}"),
                1 => format!("/metrics/{round}{number}"),
                2 => format!("/pods/{round}/{number}?x={number}"),
                _ => format!("/exec/{round}/{number}/c"),
            };
            let method = if number % 5 == 0 { format!("M{round}X{number}") } else { "GET".to_owned() };
            let request = Request::builder().method(method.as_str()).uri(path).body(Body::empty()).unwrap();
            drop(router.clone().oneshot(request).await.unwrap());
        }
        series.push(context.metrics.page(&Snapshot::default(), Timestamp::UNIX_EPOCH).lines().count());
    }
    assert_eq!(series[0], series[1]);
    assert_eq!(series[1], series[2]);
}
