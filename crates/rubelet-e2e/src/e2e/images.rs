//! Collection of images that nothing uses.

use std::{collections::BTreeSet, time::Duration};

use anyhow::ensure;
use rubelet_testbed::{
    agent::AgentOptions,
    command::output,
    image::{self, BUSYBOX, Image, LayerBuilder, Start},
};
use serde_json::{Map, json};

use crate::e2e::{
    Case,
    manifest::{OBEDIENT, Pod},
    node::Node,
};

mod registry;
mod small_disk;
mod volumes;

pub const CASES: &[Case] = &[
    Case { name: "unused images are deleted when the disk is full, and those in use stay", run: collection },
    Case {
        name: "images are deleted down to the low mark and no further, the longest unused first",
        run: small_disk::low_mark,
    },
    Case { name: "images are volumes of pods, read-only, whole or in part", run: volumes::mounted },
    Case { name: "an image volume that cannot be had keeps only its containers from starting", run: volumes::missing },
    Case { name: "image volumes are pulled from a registry as their policy says", run: volumes::pulled },
    Case { name: "the image of a volume in use is not deleted", run: volumes::in_use },
];

const UNUSED: usize = 100;

fn collection(node: &mut Node) -> anyhow::Result<()> {
    let disk = rustix::fs::statvfs(&node.bed.layout.dir)?;
    let used = 100 - disk.f_bavail * 100 / disk.f_blocks;
    ensure!(used > 1, "the disk is too empty for this test: {used} % are used");
    let mut config = Map::new();
    config.insert("imageGCHighThresholdPercent".to_owned(), json!(used - 1));
    config.insert("imageGCLowThresholdPercent".to_owned(), json!(0));
    config.insert("imageMinimumGCAge".to_owned(), json!("1s"));
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    import_unused(node)?;
    let before = images(node)?;
    ensure!(before.iter().filter(|name| name.starts_with("example.com/")).count() == UNUSED, "{before:?}");
    node.agent.start()?;
    node.apply(&Pod::new("web", OBEDIENT))?;
    node.wait_running("web", 60)?;
    // Upstream collects every five minutes.
    let limit_secs = if node.agent.is_upstream() { 400 } else { 90 };
    node.wait("the unused images are gone", limit_secs, |node| {
        let left = images(node)?.into_iter().filter(|name| name.starts_with("example.com/")).count();
        ensure!(left == 0, "{left} are left");
        Ok(())
    })?;
    let left = images(node)?;
    ensure!(left.contains(BUSYBOX), "the image of a running container is gone: {left:?}");
    if !node.agent.is_upstream() {
        let pause = before.iter().find(|name| name.contains("/pause:"));
        ensure!(pause.is_some_and(|pause| left.contains(pause)), "the image of sandboxes is gone: {left:?}");
        let events = node.agent.ask(&["events"])?;
        ensure!(events.contains("DeletedImages") && events.contains("unused images, "), "{events}");
    }
    node.apply(&Pod::new("next", OBEDIENT))?;
    node.wait_running("next", 60).map(drop)
}

/// As many as `UNUSED`, each with a layer of its own.
fn import_unused(node: &Node) -> anyhow::Result<()> {
    let names: Vec<String> = (0..UNUSED).map(|number| format!("example.com/unused:{number}")).collect();
    let layers = names.iter().map(|name| LayerBuilder::default().file("name", name.as_bytes(), 0o644)?.finish());
    let layers = layers.collect::<anyhow::Result<Vec<_>>>()?;
    let parts: Vec<_> = names.iter().zip(&layers).map(|(name, layer)| ([name.as_str()], [layer])).collect();
    let images: Vec<_> = parts.iter().map(|(names, layers)| Image { names, start: Start::default(), layers }).collect();
    let archive = node.bed.layout.dir.join("unused.tar");
    image::write(&archive, &images)?;
    node.bed.import(&archive)
}

/// By name.
fn images(node: &Node) -> anyhow::Result<BTreeSet<String>> {
    let listed = output(&mut node.bed.ctr_command(["images", "ls", "-q"]), Duration::from_secs(30))?;
    Ok(listed.lines().filter(|name| !name.starts_with("sha256:")).map(str::to_owned).collect())
}
