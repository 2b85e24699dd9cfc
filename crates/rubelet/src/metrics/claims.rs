//! What the volumes of claims hold.
//!
//! Owns: upstream's names of their figures. Never: stores one between scrapes.
//! Upstream: `pkg/kubelet/metrics/collectors/volume_stats.go`.

use super::text::{Labels, Text};
use crate::stats::persistent_meter::{PersistentMeter, PersistentStats};

/// A figure of a volume; `None`: it is not shown.
type Figure = fn(&PersistentStats) -> Option<u64>;

const FAMILIES: [(&str, &str, Figure); 7] = [
    ("kubelet_volume_stats_capacity_bytes", "[ALPHA] Capacity in bytes of the volume", |it| {
        Some(it.figures.capacity_bytes)
    }),
    ("kubelet_volume_stats_available_bytes", "[ALPHA] Number of available bytes in the volume", |it| {
        Some(it.figures.available_bytes)
    }),
    ("kubelet_volume_stats_used_bytes", "[ALPHA] Number of used bytes in the volume", |it| Some(it.figures.used_bytes)),
    ("kubelet_volume_stats_inodes", "[ALPHA] Maximum number of inodes in the volume", |it| Some(it.figures.inodes)),
    ("kubelet_volume_stats_inodes_free", "[ALPHA] Number of free inodes in the volume", |it| {
        Some(it.figures.inodes_free)
    }),
    ("kubelet_volume_stats_inodes_used", "[ALPHA] Number of used inodes in the volume", |it| {
        Some(it.figures.inodes_used)
    }),
    (
        "kubelet_volume_stats_health_status_abnormal",
        "[ALPHA] Abnormal volume health status. The count is either 1 or 0. 1 indicates the volume is unhealthy, 0 indicates \
         volume is healthy",
        |it| it.is_abnormal.map(u64::from),
    ),
];

/// A family without claims is not written, as upstream's.
pub(crate) fn write(meter: &PersistentMeter, text: &mut Text) {
    let claims = meter.of_claims();
    for (name, help, figure) in FAMILIES {
        let shown: Vec<_> = claims.iter().filter_map(|(claim, stats)| Some((claim, figure(stats)?))).collect();
        if !shown.is_empty() {
            text.head(name, "gauge", help);
        }
        for (claim, value) in shown {
            let labels = [("namespace", claim.namespace.as_str()), ("persistentvolumeclaim", claim.name.as_str())];
            #[expect(clippy::cast_precision_loss, reason = "a metric is a float")]
            text.sample((name, ""), Labels::of(&labels), value as f64);
        }
    }
}
