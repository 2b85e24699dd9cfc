//! Many files of a claim get the pod's group.

use std::{fs, path::Path};

use anyhow::Context as _;
use rubelet_testbed::clock::Stopwatch;
use serde_json::{Value, json};

use crate::{
    bench,
    e2e::cluster::{
        ClusterCase, ClusterNode, OBEDIENT, Plane,
        csi::{claimed, local_claim, local_volume, spec_with},
        pod,
    },
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "thousands of files get the pod's group, once if the pod says so, while other pods start",
    plane: Plane::Shared,
    run: ownership,
}];

/// `cargo xtask volumes` has many more.
const FILES: usize = 20_000;
const PER_DIRECTORY: usize = 1000;
const GROUP: u32 = 4321;

fn ownership(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    group_of(cluster, FILES).map(drop)
}

#[derive(Debug)]
pub struct Cost {
    /// From the pod to its running container.
    pub start_secs: f64,
    /// The same for a pod that looks at the volume's root first.
    pub again_secs: f64,
    pub resident_mb: f64,
}

/// Starts a pod whose volume has that many files of another group.
pub fn group_of(cluster: &mut ClusterNode, count: usize) -> anyhow::Result<Cost> {
    cluster.start()?;
    let volume = local_volume(cluster, "many")?;
    let dir = Path::new(volume["spec"]["local"]["path"].as_str().context("it is local")?).to_owned();
    fill(&dir, count)?;
    cluster.plane().apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [volume] }))?;
    cluster.apply(local_claim(cluster, "many"))?;
    let watch = Stopwatch::start();
    cluster.apply(manifest(cluster, "first", "Always"))?;
    cluster.apply(pod("other", &spec_with(cluster, OBEDIENT, &[json!({ "name": "scratch", "emptyDir": {} })])))?;
    cluster.wait_running("other", 60)?;
    cluster.wait_running("first", 1800)?;
    let (start_secs, resident_mb) = (watch.secs(), bench::resident_mb(&cluster.node)?);
    cluster.kubectl(&["delete", "pod", "first"])?;
    let watch = Stopwatch::start();
    cluster.apply(manifest(cluster, "second", "OnRootMismatch"))?;
    cluster.wait_running("second", 600)?;
    let again_secs = watch.secs();
    cluster.kubectl(&["delete", "pod/second", "pod/other", "pvc/local-many"])?;
    let selector = format!("--selector=of={}", cluster.name);
    cluster.kubectl(&["delete", "pv", &selector])?;
    fs::remove_dir_all(&dir)?;
    Ok(Cost { start_secs, again_secs, resident_mb })
}

fn fill(dir: &Path, count: usize) -> anyhow::Result<()> {
    for number in 0..count.div_ceil(PER_DIRECTORY) {
        let dir = dir.join(number.to_string());
        fs::create_dir(&dir)?;
        for file in 0..PER_DIRECTORY {
            fs::File::create(dir.join(file.to_string()))?;
        }
    }
    Ok(())
}

/// Its container runs if a look finds no file of another group.
fn manifest(cluster: &ClusterNode, name: &str, policy: &str) -> Value {
    let script = format!("[ -z \"$(find /data ! -group {GROUP} | head -n 1)\" ] && {OBEDIENT}");
    let mut spec = spec_with(cluster, &script, &[claimed("data", "local-many")]);
    spec["restartPolicy"] = json!("Never");
    spec["securityContext"] = json!({ "fsGroup": GROUP, "fsGroupChangePolicy": policy });
    pod(name, &spec)
}
