//! kubernetes-mixin's alerts about volumes, evaluated over the page that a scraper reads.

use std::collections::{BTreeMap, BTreeSet};

use axum::{
    body::{Body, to_bytes},
    http::Request,
};
use rubelet_core::snapshot::Snapshot;
use tower::ServiceExt as _;

use crate::{
    server::{read_only, tests::context},
    stats::{
        example,
        persistent_meter::{ClaimName, PersistentFigures, PersistentStats},
    },
};

/// The samples of a page: by metric, namespace and claim.
struct Page(BTreeMap<(String, String), f64>);

const BYTES: [&str; 3] = ["available_bytes", "capacity_bytes", "used_bytes"];
const INODES: [&str; 3] = ["inodes_free", "inodes", "inodes_used"];
/// Both alerts of a kind are called the same.
const KINDS: [(&str, [&str; 3]); 2] =
    [("KubePersistentVolumeFillingUp", BYTES), ("KubePersistentVolumeInodesFillingUp", INODES)];
/// The range and the horizon of `predict_linear`.
const HOURS: [f64; 2] = [6.0, 96.0];

impl Page {
    async fn of(volumes: Vec<PersistentStats>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (_sender, context) = context(Snapshot::default(), dir.path());
        for volume in volumes {
            context.stats.persistent().put("u1", volume);
        }
        let request = Request::get("/metrics").body(Body::empty()).unwrap();
        let response = read_only::router(context).oneshot(request).await.unwrap();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        let samples = text.lines().filter_map(|line| {
            let (metric, rest) = line.strip_prefix("kubelet_volume_stats_")?.split_once('{')?;
            let (labels, value) = rest.split_once("} ")?;
            Some(((metric.to_owned(), labels.to_owned()), value.parse().unwrap()))
        });
        Page(samples.collect())
    }

    fn claims(&self) -> BTreeSet<&str> {
        self.0.keys().map(|(_, claim)| claim.as_str()).collect()
    }

    /// As PromQL, an operator on a missing sample has no result.
    fn get(&self, metric: &str, claim: &str) -> Option<f64> {
        self.0.get(&(metric.to_owned(), claim.to_owned())).copied()
    }
}

/// The alerts of the later page: `critical <alert>{labels}`. The earlier one is from the beginning of the range.
fn alerts(earlier: &Page, later: &Page) -> Vec<String> {
    let mut firing = Vec::new();
    for (alert, [free, all, used]) in KINDS {
        for claim in later.claims() {
            let figures = || {
                let ratio = later.get(free, claim)? / later.get(all, claim)?;
                let [range, horizon] = HOURS;
                let (now, then) = (later.get(free, claim)?, earlier.get(free, claim)?);
                Some((ratio, later.get(used, claim)? > 0.0, now + (now - then) / range * horizon))
            };
            let Some((ratio, is_used, predicted)) = figures() else { continue };
            if ratio < 0.03 && is_used {
                firing.push(format!("critical {alert}{{{claim}}}"));
            }
            if ratio < 0.15 && is_used && predicted < 0.0 {
                firing.push(format!("warning {alert}{{{claim}}}"));
            }
        }
    }
    firing
}

fn volume(namespace: &str, name: &str, [bytes, bytes_used, inodes, inodes_used]: [u64; 4]) -> PersistentStats {
    PersistentStats {
        volume: format!("{namespace}-{name}"),
        claim: Some(ClaimName { namespace: namespace.to_owned(), name: name.to_owned() }),
        figures: PersistentFigures {
            capacity_bytes: bytes,
            available_bytes: bytes - bytes_used,
            used_bytes: bytes_used,
            inodes,
            inodes_free: inodes - inodes_used,
            inodes_used,
        },
        ..example::persistent()
    }
}

#[tokio::test]
async fn volume_alerts_fire_for_the_claims_that_fill_up_alone() {
    const GIB: u64 = 1 << 30;
    let page = |filled: u64| {
        Page::of(vec![
            volume("prod", "full", [10 * GIB, 10 * GIB - 1, 1000, 10]),
            volume("prod", "at-limit", [1000, 970, 1000, 970]),
            volume("prod", "filling", [1000, 800 + filled, 1000, 10]),
            volume("prod", "files", [10 * GIB, GIB, 1000, 999]),
            volume("prod", "more-files", [10 * GIB, GIB, 1000, 800 + filled]),
            volume("prod", "healthy", [10 * GIB, 5 * GIB, 1000, 500]),
            volume("prod", "steady", [1000, 900, 1000, 900]),
            // Devices without a file system, and file systems without a number of inodes.
            volume("prod", "device", [10 * GIB, 0, 0, 0]),
            volume("prod", "btrfs", [10 * GIB, GIB, 0, 0]),
            // Of another namespace.
            volume("test", "full", [10 * GIB, GIB, 1000, 10]),
        ])
    };
    let (earlier, later) = (page(0).await, page(70).await);
    insta::assert_snapshot!(alerts(&earlier, &later).join("\n"), @r#"
    warning KubePersistentVolumeFillingUp{namespace="prod",persistentvolumeclaim="filling"}
    critical KubePersistentVolumeFillingUp{namespace="prod",persistentvolumeclaim="full"}
    critical KubePersistentVolumeInodesFillingUp{namespace="prod",persistentvolumeclaim="files"}
    warning KubePersistentVolumeInodesFillingUp{namespace="prod",persistentvolumeclaim="more-files"}
    "#);
    insta::assert_snapshot!(alerts(&earlier, &earlier).join("\n"), @r#"
    critical KubePersistentVolumeFillingUp{namespace="prod",persistentvolumeclaim="full"}
    critical KubePersistentVolumeInodesFillingUp{namespace="prod",persistentvolumeclaim="files"}
    "#);
    assert_eq!(later.claims().len(), 10);
}
