//! Metrics of volumes: operations, calls to CSI drivers, what a start found on disk.
//!
//! Owns: upstream's names of operations. A cancelled operation is not counted.
//! Upstream: `pkg/volume/util/metrics.go`, `volumemanager/metrics`, `operation_generator.go`, `kubelet_volumes.go`.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use rubelet_core::{
    effect::{EffectError, Facts},
    op::{Op, VolumeOp},
    snapshot::{PodView, Snapshot},
    time::{Now, Uptime},
    volumes::{self, claims::PersistentSource},
};

use super::{
    family::{Counters, DEFAULT_BOUNDS, Histograms},
    selinux::SelinuxMetrics,
    text::Text,
};

const STORAGE_BOUNDS: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// An operation on a volume or a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageOperation {
    /// One attempt; attaching and staging come before it.
    Mount,
    Unmount,
    UnmountDevice,
    /// The same of block volumes.
    Map,
    Unmap,
    UnmapDevice,
    FsResize,
    VerifyControllerAttached,
    /// Giving a volume to the pod's `fsGroup`.
    ApplyAccessControl,
}

impl StorageOperation {
    fn name(self) -> &'static str {
        match self {
            StorageOperation::Mount => "volume_mount",
            StorageOperation::Unmount => "volume_unmount",
            StorageOperation::UnmountDevice => "unmount_device",
            StorageOperation::Map => "map_volume",
            StorageOperation::Unmap => "unmap_volume",
            StorageOperation::UnmapDevice => "unmap_device",
            StorageOperation::FsResize => "volume_fs_resize",
            StorageOperation::VerifyControllerAttached => "verify_controller_attached_volume",
            StorageOperation::ApplyAccessControl => "volume_apply_access_control",
        }
    }
}

#[derive(Debug)]
pub struct StorageMetrics {
    operations: Histograms<4>,
    total: Histograms<2>,
    /// Calls to CSI drivers.
    pub(super) calls: Histograms<4>,
    measurements: Histograms<1>,
    reconstructed: Counters<0>,
    is_reconstructed: AtomicBool,
    reconstruction_errors: Counters<0>,
    force_cleaned: Counters<0>,
    force_clean_errors: Counters<0>,
    selinux: SelinuxMetrics,
}

impl StorageMetrics {
    pub(super) fn new() -> Self {
        StorageMetrics {
            operations: Histograms::new(
                "storage_operation_duration_seconds",
                ["volume_plugin", "operation_name", "status", "migrated"],
                STORAGE_BOUNDS,
                "[ALPHA] Storage operation duration",
            ),
            total: Histograms::new(
                "volume_operation_total_seconds",
                ["plugin_name", "operation_name"],
                STORAGE_BOUNDS,
                "[ALPHA] Storage operation end to end duration in seconds",
            ),
            calls: Histograms::new(
                "csi_operations_seconds",
                ["driver_name", "method_name", "grpc_status_code", "migrated"],
                STORAGE_BOUNDS,
                "[ALPHA] Container Storage Interface operation duration with gRPC error code status total",
            ),
            measurements: Histograms::new(
                "kubelet_volume_metric_collection_duration_seconds",
                ["metric_source"],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds to calculate volume stats",
            ),
            reconstructed: Counters::new(
                "reconstruct_volume_operations_total",
                [],
                "[ALPHA] The number of volumes that were attempted to be reconstructed from the operating system during kubelet \
                 startup. This includes both successful and failed reconstruction.",
            ),
            is_reconstructed: AtomicBool::new(false),
            reconstruction_errors: Counters::new(
                "reconstruct_volume_operations_errors_total",
                [],
                "[ALPHA] The number of volumes that failed reconstruction from the operating system during kubelet startup.",
            ),
            force_cleaned: Counters::new(
                "force_cleaned_failed_volume_operations_total",
                [],
                "[ALPHA] The number of volumes that were force cleaned after their reconstruction failed during kubelet startup. \
                 This includes both successful and failed cleanups.",
            ),
            force_clean_errors: Counters::new(
                "force_cleaned_failed_volume_operation_errors_total",
                [],
                "[ALPHA] The number of volumes that failed force cleanup after their reconstruction failed during kubelet \
                 startup.",
            ),
            selinux: SelinuxMetrics::new(),
        }
    }

    /// An operation of a plugin succeeded or failed.
    pub fn ended(&self, plugin: &str, operation: StorageOperation, is_good: bool, took: Duration) {
        let status = if is_good { "success" } else { "fail-unknown" };
        self.operations.observe([plugin, operation.name(), status, "false"], took.as_secs_f64());
    }

    /// An effect has ended; it began at the given time.
    pub(super) fn effect_ended(&self, op: &Op, result: &Result<Facts, EffectError>, began: Uptime, now: Now) {
        let took = now.uptime.since(began);
        match op {
            // A volume whose device cannot be staged is not mounted; if it is staged, the mount follows.
            Op::Volume(VolumeOp::Stage { source, .. }) if result.is_err() => {
                self.ended(&source.plugin(), mount_of(source), false, took);
            }
            Op::Volume(VolumeOp::Expand { source, .. }) => {
                self.ended(&source.plugin(), StorageOperation::FsResize, result.is_ok(), took);
            }
            Op::Volume(VolumeOp::Unstage { device }) => {
                let operation =
                    if device.is_block() { StorageOperation::UnmapDevice } else { StorageOperation::UnmountDevice };
                self.ended(&device.plugin(), operation, result.is_ok(), took);
            }
            _ => {}
        }
    }

    /// Volumes that were set up or labelled in a turn.
    pub(super) fn turned(&self, before: &Snapshot, after: &Snapshot, now: Now) {
        self.selinux.turned(before, after);
        for uid in &after.changed {
            let Some(view) = after.pods.get(uid) else { continue };
            let earlier = before.pods.get(uid);
            for plugin in newly_set_up(earlier.map(|view| &**view), view) {
                let took = now.wall.duration_since(view.lifecycle_since);
                let took = Duration::try_from(took).unwrap_or_default();
                self.total.observe([&plugin, "overall_volume_mount"], took.as_secs_f64());
            }
        }
    }

    /// The figures of a volume were asked for.
    pub(crate) fn measured(&self, source: &str, took: Duration) {
        self.measurements.observe([source], took.as_secs_f64());
    }

    /// A look found these volumes of CSI drivers in pods' directories, and whether it is known what they are. Only the first look
    /// counts: what it finds is a previous process's.
    pub(crate) fn reconstructed(&self, are_known: &[bool]) {
        if self.is_reconstructed.swap(true, Ordering::Relaxed) {
            return;
        }
        for is_known in are_known {
            self.reconstructed.inc([]);
            if !is_known {
                self.reconstruction_errors.inc([]);
            }
        }
    }

    /// A volume that its driver does not know of was removed from a pod's directory.
    pub(crate) fn force_cleaned(&self, is_good: bool) {
        self.force_cleaned.inc([]);
        if !is_good {
            self.force_clean_errors.inc([]);
        }
    }

    pub(super) fn write(&self, text: &mut Text) {
        self.operations.write(text);
        self.total.write(text);
        self.calls.write(text);
        self.measurements.write(text);
        self.reconstructed.write(text);
        self.reconstruction_errors.write(text);
        self.force_cleaned.write(text);
        self.force_clean_errors.write(text);
        self.selinux.write(text);
    }
}

/// The operation that makes a persistent volume ready for a pod.
pub(crate) fn mount_of(source: &PersistentSource) -> StorageOperation {
    if source.is_block() { StorageOperation::Map } else { StorageOperation::Mount }
}

/// The plugins of the volumes that are set up now, and were not before.
fn newly_set_up(before: Option<&PodView>, after: &PodView) -> Vec<String> {
    let is_set_up = |view: &PodView, name: &str| view.volumes.get(name).is_some_and(|known| known.is_set_up);
    if !after.volumes.iter().any(|(name, known)| known.is_set_up && !before.is_some_and(|view| is_set_up(view, name))) {
        return Vec::new();
    }
    let volumes = volumes::volumes_to_mount(&after.pod).into_iter();
    let new = volumes.filter(|it| is_set_up(after, &it.name) && !before.is_some_and(|view| is_set_up(view, &it.name)));
    new.map(|volume| plugin_of(after, &volume)).collect()
}

/// The plugin of a volume of the pod; upstream's word if it is not known.
pub(super) fn plugin_of(view: &PodView, volume: &volumes::VolumeToMount) -> String {
    let claimed = view.volumes.get(&volume.name).and_then(|known| known.claimed.as_ref());
    match (claimed, volume.source.plugin()) {
        (Some(source), _) => source.plugin(),
        (None, Some(plugin)) => plugin.to_owned(),
        (None, None) => "N/A".to_owned(),
    }
}
