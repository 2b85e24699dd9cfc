//! Metrics of finished effects.
//!
//! Owns: the mapping from effects to upstream's operations. A cancelled effect is not counted.
//! Upstream: `pleg/generic.go`, `kuberuntime_manager.go` (SyncPod), `images/image_manager.go`, `cm/cgroup_manager_linux.go`,
//! `lifecycle/handlers.go`, `status/status_manager.go`.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    container,
    effect::{EffectError, ErrorKind, Facts, Reason},
    image_gc::DeletionReason,
    op::{ApiOp, ContainerOp, ImageOp, NodeOp, Op, PodOp, StartContainer},
    pod::hooks::{HookAction, HookRequest},
    time::{Now, Uptime},
};

use super::{
    family::{Counters, DEFAULT_BOUNDS, Gauges, Histograms},
    text::Text,
};

const PULL_BOUNDS: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0,
    3600.0,
];
const STATUS_SYNC_BOUNDS: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
/// What the runtime's error begins with, as CRI has no code for it.
const IMAGE_VOLUME_MOUNT_FAILED: &str = "ImageVolumeMountFailed";
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The label of images larger than each bound; the largest bound first.
const IMAGE_SIZES: &[(u64, &str)] = &[
    (100 * GIB, "GT100GB"),
    (60 * GIB, "60GB-100GB"),
    (40 * GIB, "40GB-60GB"),
    (30 * GIB, "30GB-40GB"),
    (20 * GIB, "20GB-30GB"),
    (10 * GIB, "10GB-20GB"),
    (5 * GIB, "5GB-10GB"),
    (GIB, "1GB-5GB"),
    (500 * MIB, "500MB-1GB"),
    (100 * MIB, "100MB-500MB"),
    (10 * MIB, "10MB-100MB"),
    (0, "0-10MB"),
];

#[derive(Debug)]
pub struct EffectMetrics {
    pleg: Pleg,
    started_pods: Counters<0>,
    started_pods_errors: Counters<0>,
    user_namespaced_pods: Counters<0>,
    user_namespaced_pods_errors: Counters<0>,
    started_containers: Counters<1>,
    started_containers_errors: Counters<2>,
    image_volumes: ImageVolumes,
    image_pulls: Histograms<1>,
    images_deleted: Counters<1>,
    cgroups: Histograms<1>,
    http_fallbacks: Counters<0>,
    short_sleeps: Counters<0>,
    status_sync: Histograms<0>,
}

#[derive(Debug)]
struct ImageVolumes {
    requested: Counters<0>,
    mounted: Counters<0>,
    failed: Counters<0>,
}

/// Looks and relists.
#[derive(Debug)]
struct Pleg {
    relist_duration: Histograms<0>,
    relist_interval: Histograms<0>,
    pod_relist_duration: Histograms<0>,
    last_seen: Gauges<0>,
    last_relist: Mutex<Option<Uptime>>,
    event_streams: Counters<0>,
    event_stream_errors: Counters<0>,
}

impl EffectMetrics {
    pub(super) fn new() -> Self {
        EffectMetrics {
            pleg: Pleg::new(),
            started_pods: Counters::new("kubelet_started_pods_total", [], "[ALPHA] Cumulative number of pods started"),
            started_pods_errors: Counters::new(
                "kubelet_started_pods_errors_total",
                [],
                "[ALPHA] Cumulative number of errors when starting pods",
            ),
            user_namespaced_pods: Counters::new(
                "kubelet_started_user_namespaced_pods_total",
                [],
                "[ALPHA] Cumulative number of pods with user namespaces started. This metric will only be collected on Linux.",
            ),
            user_namespaced_pods_errors: Counters::new(
                "kubelet_started_user_namespaced_pods_errors_total",
                [],
                "[ALPHA] Cumulative number of errors when starting pods with user namespaces. This metric will only be \
                 collected on Linux.",
            ),
            started_containers: Counters::new(
                "kubelet_started_containers_total",
                ["container_type"],
                "[ALPHA] Cumulative number of containers started",
            ),
            started_containers_errors: Counters::new(
                "kubelet_started_containers_errors_total",
                ["container_type", "code"],
                "[ALPHA] Cumulative number of errors when starting containers",
            ),
            image_volumes: ImageVolumes::new(),
            image_pulls: Histograms::new(
                "kubelet_image_pull_duration_seconds",
                ["image_size_in_bytes"],
                PULL_BOUNDS,
                "[ALPHA] Duration in seconds to pull an image.",
            ),
            images_deleted: images_deleted(),
            cgroups: Histograms::new(
                "kubelet_cgroup_manager_duration_seconds",
                ["operation_type"],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds for cgroup manager operations. Broken down by method.",
            ),
            http_fallbacks: Counters::new(
                "kubelet_lifecycle_handler_http_fallbacks_total",
                [],
                "[ALPHA] The number of times lifecycle handlers successfully fell back to http from https.",
            ),
            short_sleeps: Counters::new(
                "kubelet_sleep_action_terminated_early_total",
                [],
                "[ALPHA] The number of times lifecycle sleep handler got terminated before it finishes",
            ),
            status_sync: Histograms::new(
                "kubelet_pod_status_sync_duration_seconds",
                [],
                STATUS_SYNC_BOUNDS,
                "[ALPHA] Duration in seconds to sync a pod status update. Measures time from detection of a change to pod \
                 status until the API is successfully updated for that pod, even if multiple intevening changes to pod status \
                 occur.",
            ),
        }
    }

    /// An effect has ended; it began at the given time.
    pub fn ended(&self, op: &Op, result: &Result<Facts, EffectError>, began: Uptime, now: Now) {
        let took = now.uptime.since(began).as_secs_f64();
        match (op, result) {
            (Op::Node(NodeOp::Relist), _) => self.pleg.relisted(began, now),
            (Op::Pod(PodOp::Inspect { .. }), _) => self.pleg.pod_relist_duration.observe([], took),
            (Op::Pod(PodOp::RunSandbox(order)), result) => self.pod_started(&order.pod, result.is_ok()),
            (Op::Container(ContainerOp::Start(order)), result) => {
                self.container_started(container_type(&order.pod, &order.container), result);
                self.image_volumes.container_created(order, result);
            }
            (Op::Image(ImageOp::Pull { .. }), Ok(Facts::Image(Some(image)))) => {
                self.image_pulls.observe([image_size(image.size_bytes)], took);
            }
            (Op::Image(ImageOp::Delete { reason, .. }), Ok(_)) => self.images_deleted.inc([match reason {
                DeletionReason::Age => "age",
                DeletionReason::Space => "space",
            }]),
            (Op::Pod(PodOp::SetUpCgroup { .. }), _) => self.cgroups.observe(["create"], took),
            (Op::Node(NodeOp::SyncQosCgroups { .. }), _) => self.cgroups.observe(["update"], took),
            (Op::Pod(PodOp::RemoveCgroup(_)), _) => self.cgroups.observe(["destroy"], took),
            (Op::Container(ContainerOp::RunHook(_)), Ok(Facts::HookFellBack { .. })) => self.http_fallbacks.inc([]),
            (Op::Container(ContainerOp::RunHook(HookRequest { action: HookAction::Sleep { secs }, .. })), _)
                if now.uptime.since(began) < Duration::from_secs(*secs) =>
            {
                self.short_sleeps.inc([]);
            }
            (Op::Api(ApiOp::PatchStatus { since, .. }), Ok(_)) => {
                self.status_sync.observe([], now.uptime.since(*since).as_secs_f64());
            }
            _ => {}
        }
    }

    fn pod_started(&self, pod: &Pod, is_good: bool) {
        let is_in_namespace = pod.spec.as_ref().is_some_and(|spec| spec.host_users == Some(false));
        self.started_pods.inc([]);
        if is_in_namespace {
            self.user_namespaced_pods.inc([]);
        }
        if !is_good {
            self.started_pods_errors.inc([]);
            if is_in_namespace {
                self.user_namespaced_pods_errors.inc([]);
            }
        }
    }

    fn container_started(&self, kind: &'static str, result: &Result<Facts, EffectError>) {
        self.started_containers.inc([kind]);
        if let Err(error) = result {
            let code = match error.kind {
                ErrorKind::Reject(reason) => reason.as_str(),
                ErrorKind::Retry => "Retry",
                ErrorKind::Uncertain => "Uncertain",
                ErrorKind::FailedByDriver => "FailedByDriver",
                ErrorKind::FileSystemLate => "FileSystemLate",
                ErrorKind::Unavailable => "Unavailable",
                ErrorKind::TimedOut => "TimedOut",
                ErrorKind::MissingObject => "MissingObject",
                ErrorKind::Refused => "Refused",
                ErrorKind::Gone => "Gone",
            };
            self.started_containers_errors.inc([kind, code]);
        }
    }

    /// The event stream of the runtime was opened.
    pub fn events_followed(&self, is_open: bool) {
        let counter = if is_open { &self.pleg.event_streams } else { &self.pleg.event_stream_errors };
        counter.inc([]);
    }

    pub fn write(&self, text: &mut Text) {
        self.pleg.write(text);
        self.started_pods.write(text);
        self.started_pods_errors.write(text);
        self.user_namespaced_pods.write(text);
        self.user_namespaced_pods_errors.write(text);
        self.started_containers.write(text);
        self.started_containers_errors.write(text);
        self.image_volumes.write(text);
        self.image_pulls.write(text);
        self.images_deleted.write(text);
        self.cgroups.write(text);
        self.http_fallbacks.write(text);
        self.short_sleeps.write(text);
        self.status_sync.write(text);
    }
}

impl ImageVolumes {
    fn new() -> Self {
        ImageVolumes {
            requested: Counters::new(
                "kubelet_image_volume_requested_total",
                [],
                "[BETA] Number of requested image volumes.",
            ),
            mounted: Counters::new(
                "kubelet_image_volume_mounted_succeed_total",
                [],
                "[BETA] Number of successful image volume mounts.",
            ),
            failed: Counters::new(
                "kubelet_image_volume_mounted_errors_total",
                [],
                "[BETA] Number of failed image volume mounts.",
            ),
        }
    }

    /// As upstream, a mount counts as failed only if the runtime names it as the cause.
    fn container_created(&self, order: &StartContainer, result: &Result<Facts, EffectError>) {
        let Ok(container) = container::find(&order.pod, &order.container) else { return };
        let mounts = container.volume_mounts.iter().flatten();
        let mounts = mounts.filter(|mount| order.image_volumes.contains_key(&mount.name)).count();
        (0..order.image_volumes.len()).for_each(|_| self.requested.inc([]));
        let has_failed = result.as_ref().is_err_and(|error| {
            error.kind == ErrorKind::Reject(Reason::CreateContainerError)
                && error.message.starts_with(IMAGE_VOLUME_MOUNT_FAILED)
        });
        let counter = if has_failed { &self.failed } else { &self.mounted };
        (0..mounts).for_each(|_| counter.inc([]));
    }

    fn write(&self, text: &mut Text) {
        self.requested.write(text);
        self.mounted.write(text);
        self.failed.write(text);
    }
}

impl Pleg {
    fn new() -> Self {
        Pleg {
            relist_duration: Histograms::new(
                "kubelet_pleg_relist_duration_seconds",
                [],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds for relisting pods in PLEG.",
            ),
            relist_interval: Histograms::new(
                "kubelet_pleg_relist_interval_seconds",
                [],
                DEFAULT_BOUNDS,
                "[ALPHA] Interval in seconds between relisting in PLEG.",
            ),
            pod_relist_duration: Histograms::new(
                "kubelet_pleg_pod_relist_duration_seconds",
                [],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds for relisting a single pod in PLEG.",
            ),
            last_seen: Gauges::new(
                "kubelet_pleg_last_seen_seconds",
                [],
                "[ALPHA] Timestamp in seconds when PLEG was last seen active.",
            ),
            last_relist: Mutex::default(),
            event_streams: Counters::new(
                "kubelet_evented_pleg_connection_success_count",
                [],
                "[ALPHA] The number of times a streaming client was obtained to receive CRI Events.",
            ),
            event_stream_errors: Counters::new(
                "kubelet_evented_pleg_connection_error_count",
                [],
                "[ALPHA] The number of errors encountered during the establishment of streaming connection with the CRI \
                 runtime.",
            ),
        }
    }

    fn relisted(&self, began: Uptime, now: Now) {
        let took = now.uptime.since(began);
        self.relist_duration.observe([], took.as_secs_f64());
        let earlier = self.last_relist.lock().unwrap_or_else(PoisonError::into_inner).replace(began);
        if let Some(earlier) = earlier {
            self.relist_interval.observe([], began.since(earlier).as_secs_f64());
        }
        self.last_seen.set(
            [],
            Duration::try_from(now.wall.as_duration()).unwrap_or_default().saturating_sub(took).as_secs_f64().floor(),
        );
    }

    fn write(&self, text: &mut Text) {
        self.relist_duration.write(text);
        self.relist_interval.write(text);
        self.pod_relist_duration.write(text);
        self.last_seen.write(text);
        self.event_streams.write(text);
        self.event_stream_errors.write(text);
    }
}

pub(crate) fn container_type(pod: &Pod, name: &str) -> &'static str {
    let Some(spec) = &pod.spec else { return "container" };
    if spec.init_containers.iter().flatten().any(|container| container.name == name) {
        "init_container"
    } else if spec.ephemeral_containers.iter().flatten().any(|container| container.name == name) {
        "ephemeral_container"
    } else {
        "container"
    }
}

fn images_deleted() -> Counters<1> {
    Counters::new(
        "kubelet_image_garbage_collected_total",
        ["reason"],
        "[ALPHA] Total number of images garbage collected by the kubelet, whether through disk usage or image age.",
    )
}

fn image_size(bytes: u64) -> &'static str {
    IMAGE_SIZES.iter().find(|(bound, _)| bytes > *bound).map_or("N/A", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_sorted_by_size_as_upstream_sorts_them() {
        let sizes = [0, 1, 10 * MIB, 10 * MIB + 1, 500 * MIB + 1, 2 * GIB, 200 * GIB].map(image_size);
        assert_eq!(sizes.join(" "), "N/A 0-10MB 0-10MB 10MB-100MB 500MB-1GB 1GB-5GB GT100GB");
    }

    #[test]
    fn relists_are_timed_from_begin_to_begin() {
        let (pleg, wall) = (Pleg::new(), "2026-11-15T19:00:00.5Z".parse().unwrap());
        for secs in [10, 14] {
            let now = Now { uptime: Uptime::from_secs(secs + 1), wall };
            pleg.relisted(Uptime::from_secs(secs), now);
        }
        let mut text = Text::default();
        pleg.write(&mut text);
        let page = text.into_string();
        for line in [
            "duration_seconds_sum 2",
            "interval_seconds_sum 4",
            "interval_seconds_count 1",
            "last_seen_seconds 1.794769199e+09",
        ] {
            assert!(page.contains(line), "{line}: {page}");
        }
    }
}
