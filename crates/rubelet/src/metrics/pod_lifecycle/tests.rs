//! Tests of pods from first seen to terminated.

use serde_json::{Value, json};

use super::*;
use crate::server::views::tests::{at, snapshot, view};

fn seen(stage: LifecycleStage, status: Value) -> PodView {
    let mut view = view("default", "web", &["a"], &[], status);
    view.source = Some(Source::Api);
    view.counts.stage = stage;
    view
}

fn now(secs: u64) -> Now {
    let wall = at("2026-11-15T19:00:00Z") + Duration::from_secs(secs);
    Now { uptime: Uptime::from_secs(secs), wall }
}

/// Turns over these views of one pod, one per second.
fn live(pod_lifecycle: &PodLifecycleMetrics, views: Vec<PodView>) {
    let mut before = Snapshot::default();
    for (secs, view) in (1..).zip(views) {
        let after = snapshot("n1", [("u1", view)]);
        pod_lifecycle.turned(&before, &after, now(secs));
        before = after;
    }
}

fn page(pod_lifecycle: &PodLifecycleMetrics) -> String {
    let mut text = Text::default();
    pod_lifecycle.write(&mut text);
    let is_told = |line: &&str| !line.starts_with('#') && !line.contains("_bucket") && !line.ends_with(" 0");
    text.into_string().lines().filter(is_told).collect::<Vec<_>>().join("\n")
}

fn container(state: &Value, last: &Value) -> Value {
    let status = json!({ "name": "a", "image": "a", "imageID": "", "ready": false, "restartCount": 0, "state": state, "lastState": last });
    json!({ "phase": "Running", "containerStatuses": [status] })
}

#[test]
fn a_start_is_timed_from_first_sight_to_running() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    let pending = json!({ "phase": "Pending" });
    live(
        &pod_lifecycle,
        vec![
            seen(LifecycleStage::Waiting, json!({})),
            seen(LifecycleStage::Syncing, pending.clone()),
            seen(LifecycleStage::Syncing, pending),
            seen(LifecycleStage::Syncing, json!({ "phase": "Running" })),
        ],
    );
    insta::assert_snapshot!(page(&pod_lifecycle), @r#"
    kubelet_pod_start_duration_seconds_sum 3
    kubelet_pod_start_duration_seconds_count 1
    kubelet_pod_worker_start_duration_seconds_sum 1
    kubelet_pod_worker_start_duration_seconds_count 1
    kubelet_pod_worker_duration_seconds_sum{operation_type="create"} 1
    kubelet_pod_worker_duration_seconds_count{operation_type="create"} 1
    kubelet_containers_per_pod_count_sum 1
    kubelet_containers_per_pod_count_count 1
    "#);
}

fn working(stage: LifecycleStage, mut view: PodView) -> PodView {
    view.counts.stage = stage;
    view.counts.is_working = true;
    view
}

fn rounds(pod_lifecycle: &PodLifecycleMetrics) -> String {
    let page = page(pod_lifecycle);
    page.lines().filter(|line| line.starts_with("kubelet_pod_worker_duration")).collect::<Vec<_>>().join("\n")
}

#[test]
fn pod_work_is_timed_by_operation_type() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    let plain = || seen(LifecycleStage::Syncing, json!({}));
    let edited = || {
        let mut view = plain();
        Arc::make_mut(&mut view.pod).metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())]));
        view
    };
    let deleted = || {
        let mut view = edited();
        Arc::make_mut(&mut view.pod).metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at("2026-11-15T19:00:09Z")));
        view
    };
    live(
        &pod_lifecycle,
        vec![
            seen(LifecycleStage::Waiting, json!({})),
            working(LifecycleStage::Syncing, plain()),
            working(LifecycleStage::Syncing, plain()),
            plain(),
            // A new status with nothing to do about it is no work.
            seen(LifecycleStage::Syncing, json!({ "phase": "Running" })),
            working(LifecycleStage::Syncing, plain()),
            plain(),
            // Cut short by the deletion.
            working(LifecycleStage::Syncing, edited()),
            working(LifecycleStage::Terminating, deleted()),
            working(LifecycleStage::Terminating, deleted()),
            working(LifecycleStage::Terminated, deleted()),
            seen(LifecycleStage::Terminated, json!({})),
        ],
    );
    insta::assert_snapshot!(rounds(&pod_lifecycle), @r#"
    kubelet_pod_worker_duration_seconds_sum{operation_type="create"} 3
    kubelet_pod_worker_duration_seconds_count{operation_type="create"} 1
    kubelet_pod_worker_duration_seconds_sum{operation_type="sync"} 1
    kubelet_pod_worker_duration_seconds_count{operation_type="sync"} 1
    kubelet_pod_worker_duration_seconds_sum{operation_type="terminated"} 1
    kubelet_pod_worker_duration_seconds_count{operation_type="terminated"} 1
    kubelet_pod_worker_duration_seconds_sum{operation_type="update"} 3
    kubelet_pod_worker_duration_seconds_count{operation_type="update"} 2
    "#);
}

#[test]
fn no_work_is_timed_for_a_pod_that_is_refused() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    let mut refused = seen(LifecycleStage::Syncing, json!({ "phase": "Failed" }));
    refused.counts.rejected = Some("OutOfcpu".to_owned());
    let waits = snapshot("n1", [("u1", seen(LifecycleStage::Waiting, json!({})))]);
    let is_refused = snapshot("n1", [("u1", refused)]);
    pod_lifecycle.turned(&Snapshot::default(), &waits, now(1));
    pod_lifecycle.turned(&waits, &is_refused, now(2));
    pod_lifecycle.turned(&is_refused, &Snapshot::default(), now(3));
    assert_eq!(rounds(&pod_lifecycle), "");
}

#[test]
fn a_pod_that_ran_before_us_has_no_start() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    let running = json!({ "phase": "Running" });
    live(
        &pod_lifecycle,
        vec![
            seen(LifecycleStage::Waiting, json!({})),
            seen(LifecycleStage::Syncing, running.clone()),
            seen(LifecycleStage::Syncing, running),
        ],
    );
    assert!(!page(&pod_lifecycle).contains("pod_start_duration"), "{}", page(&pod_lifecycle));
}

#[test]
fn each_end_of_a_container_is_counted_once() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    let ended =
        |id: &str, code: i32| json!({ "terminated": { "exitCode": code, "reason": "Error", "containerID": id } });
    let running = json!({ "running": {} });
    live(
        &pod_lifecycle,
        vec![
            // It ended before it was seen.
            seen(LifecycleStage::Syncing, container(&ended("c0", 9), &json!({}))),
            seen(LifecycleStage::Syncing, container(&running, &ended("c0", 9))),
            seen(LifecycleStage::Syncing, container(&ended("c1", 1), &ended("c0", 9))),
            seen(LifecycleStage::Syncing, container(&ended("c1", 1), &ended("c0", 9))),
            seen(LifecycleStage::Syncing, container(&json!({ "waiting": {} }), &ended("c1", 1))),
            seen(LifecycleStage::Syncing, container(&running, &ended("c1", 1))),
            // Started again before anybody looked.
            seen(LifecycleStage::Syncing, container(&running, &ended("c2", 1))),
        ],
    );
    let page = page(&pod_lifecycle);
    let ends: Vec<_> = page.lines().filter(|line| line.contains("terminated")).collect();
    assert_eq!(
        ends,
        [r#"kubelet_terminated_containers_total{container_type="container",exit_code="1",reason="Error"} 2"#]
    );
}

#[test]
fn admission_rejections_have_bounded_reason_labels() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    for reason in ["OutOfcpu", "OutOfexample.com/gpu", "NodeAffinity", "TaintToleration"] {
        let mut refused = seen(LifecycleStage::Syncing, json!({ "phase": "Failed" }));
        refused.counts.rejected = Some(reason.to_owned());
        live(&pod_lifecycle, vec![seen(LifecycleStage::Waiting, json!({})), refused.clone(), refused]);
    }
    insta::assert_snapshot!(page(&pod_lifecycle), @r#"
    kubelet_admission_rejections_total{reason="Other"} 2
    kubelet_admission_rejections_total{reason="OutOfExtendedResources"} 1
    kubelet_admission_rejections_total{reason="OutOfcpu"} 1
    "#);
}

#[test]
fn each_preempted_pod_is_counted_once_by_the_missing_resource() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    for resource in ["cpu", "memory", "cpu"] {
        let mut preempted = seen(LifecycleStage::Terminating, json!({}));
        preempted.counts.preempted_for = Some(resource.to_owned());
        live(&pod_lifecycle, vec![seen(LifecycleStage::Syncing, json!({})), preempted.clone(), preempted]);
    }
    let page = page(&pod_lifecycle);
    let counts: Vec<_> = page.lines().filter(|line| line.contains("preemption")).collect();
    assert_eq!(
        counts,
        [r#"kubelet_preemptions{preemption_signal="cpu"} 2"#, r#"kubelet_preemptions{preemption_signal="memory"} 1"#]
    );
}

#[test]
fn the_sli_leaves_out_pulls_and_init_containers() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    live(&pod_lifecycle, vec![seen(LifecycleStage::Waiting, json!({}))]);
    let secs = Uptime::from_secs;
    // Two pulls at once, and one later: six seconds in all.
    for (began, ended) in [(2, 5), (1, 4), (6, 8)] {
        pod_lifecycle.pulled(&PodUid::new("u1"), secs(began), secs(ended));
    }
    let pod = |state: Value| -> Pod {
        serde_json::from_value(json!({
            "metadata": { "uid": "u1", "creationTimestamp": "2026-11-15T19:00:00Z" },
            "spec": { "containers": [] },
            "status": {
                "containerStatuses": [{
                    "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": state,
                }],
                "initContainerStatuses": [{
                    "name": "i", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                    "state": { "terminated": {
                        "exitCode": 0, "startedAt": "2026-11-15T19:00:08Z", "finishedAt": "2026-11-15T19:00:09Z",
                    } },
                }],
            },
        }))
        .unwrap()
    };
    pod_lifecycle.told(&pod(json!({ "waiting": {} })), now(9));
    for _ in 0..2 {
        pod_lifecycle.told(&pod(json!({ "running": { "startedAt": "2026-11-15T19:00:10Z" } })), now(12));
    }
    insta::assert_snapshot!(page(&pod_lifecycle), @"
    kubelet_pod_start_sli_duration_seconds_sum 5
    kubelet_pod_start_sli_duration_seconds_count 1
    kubelet_pod_start_total_duration_seconds_sum 12
    kubelet_pod_start_total_duration_seconds_count 1
    kubelet_first_network_pod_start_sli_duration_seconds 5
    ");
}

#[test]
fn pod_metrics_are_removed_with_the_pod() {
    let pod_lifecycle = PodLifecycleMetrics::new();
    let there = snapshot("n1", [("u1", seen(LifecycleStage::Waiting, json!({})))]);
    pod_lifecycle.turned(&Snapshot::default(), &there, now(1));
    assert_eq!(pod_lifecycle.lock().len(), 1);
    let empty = Snapshot { changed: there.changed.clone(), ..Snapshot::default() };
    let gone = pod_lifecycle.turned(&there, &empty, now(2));
    assert_eq!((pod_lifecycle.lock().len(), gone.len()), (0, 1));
}
