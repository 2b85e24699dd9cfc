//! A containerd whose images are on a small disk of their own, so that every deletion shows in the disk's usage.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::AgentOptions,
    command::{SHORT, command, output},
    image::{self, BUSYBOX, Image, LayerBuilder, Start},
};
use serde_json::{Map, Value, json};

use crate::{
    dice::Dice,
    e2e::{
        manifest::{OBEDIENT, Pod},
        node::Node,
    },
};

const DISK_BYTES: u64 = 1 << 30;
const UNUSED: usize = 20;
/// Of the one layer of an image. On the disk it is twice: as it was pulled, and unpacked.
const LAYER_BYTES: usize = 16 << 20;
/// What a deletion frees at the most.
const FREED_BYTES: u64 = 34 << 20;
/// What is to be freed, in percent of the disk.
const SPAN_PERCENT: u64 = 25;

/// The disk is over the high mark when the agent starts. The files of images are freed while `RemoveImage` runs.
pub fn low_mark(node: &mut Node) -> anyhow::Result<()> {
    let root = move_to_small_disk(node)?;
    for number in 0..UNUSED {
        import(node, &format!("example.com/unused:{number:02}"), number)?;
    }
    let used = Disk::of(&root)?.used_percent();
    let low = used.checked_sub(SPAN_PERCENT).context("too little of the disk is used")?;
    let mut config = Map::new();
    config.insert("imageGCHighThresholdPercent".to_owned(), json!(used - 1));
    config.insert("imageGCLowThresholdPercent".to_owned(), json!(low));
    config.insert("imageMinimumGCAge".to_owned(), json!("1s"));
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    remember_use(node)?;
    node.agent.start()?;
    node.apply(&Pod::new("web", OBEDIENT))?;
    node.wait_running("web", 60)?;

    let limit_secs = if node.agent.is_upstream() { 400 } else { 60 };
    node.wait("the disk is at the low mark", limit_secs, |_| {
        let disk = Disk::of(&root)?;
        ensure!(disk.available >= disk.wanted_available(low), "{} %", disk.used_percent());
        Ok(())
    })?;
    // A collection that went on would go on now.
    std::thread::sleep(Duration::from_secs(15));
    let (disk, left) = (Disk::of(&root)?, unused(node)?);
    println!("{used} % used, {} % after {} deletions", disk.used_percent(), UNUSED - left.len());
    ensure!(disk.available < disk.wanted_available(low) + FREED_BYTES, "{} % used: {left:?}", disk.used_percent());
    if !node.agent.is_upstream() {
        let newest: Vec<String> = (UNUSED - left.len()..UNUSED).map(|number| format!("{number:02}")).collect();
        ensure!(left == newest, "not the longest unused are gone: {left:?} are left");
    }
    let all = super::images(node)?;
    ensure!(all.contains(BUSYBOX), "the image of a running container is gone: {all:?}");
    Ok(())
}

/// Stops containerd, moves what it has to a file system in a file, and starts it there.
fn move_to_small_disk(node: &mut Node) -> anyhow::Result<PathBuf> {
    let dir = node.bed.layout.dir.clone();
    let (root, before, file) = (dir.join("root"), dir.join("root-before"), dir.join("disk"));
    node.bed.kill_containerd();
    fs::rename(&root, &before)?;
    fs::create_dir(&root)?;
    fs::File::create(&file)?.set_len(DISK_BYTES)?;
    output(&mut command("mkfs.ext4", [Path::new("-q"), Path::new("-m0"), &file]), SHORT)?;
    output(command("mount", ["-o", "loop"]).args([&file, &root]), SHORT)?;
    output(command("cp", ["-a"]).args([before.join("."), root.clone()]), SHORT)?;
    node.bed.start_containerd()?;
    Ok(root)
}

/// As an earlier process of the agent would have saved it: the lower the number, the longer ago. The image in use was not used
/// for the longest time.
fn remember_use(node: &Node) -> anyhow::Result<()> {
    let listed = output(&mut node.bed.ctr_command(["images", "ls"]), SHORT)?;
    let rows: Vec<(&str, &str)> = listed
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((words.next()?, words.nth(1)?))
        })
        .collect();
    // The runtime has each image under its ID, too.
    let ids: BTreeMap<&str, &str> =
        rows.iter().filter(|(name, _)| name.starts_with("sha256:")).map(|(name, digest)| (*digest, *name)).collect();
    let mut uses = Map::new();
    for (name, digest) in rows {
        let age = name.strip_prefix("example.com/unused:").and_then(|number| number.parse::<usize>().ok());
        let minute = match age {
            Some(age) => age + 1,
            None if name == BUSYBOX => 0,
            None => continue,
        };
        let id = ids.get(digest).with_context(|| format!("{name} has no ID in\n{listed}"))?;
        let moment = format!("2026-01-01T00:{minute:02}:00Z");
        uses.insert((*id).to_owned(), json!({ "firstSeen": moment, "lastUsed": moment }));
    }
    ensure!(uses.len() == UNUSED + 1, "{uses:?} of\n{listed}");
    fs::create_dir_all(node.agent.root_dir())?;
    Ok(fs::write(node.agent.root_dir().join("rubelet_image_use.json"), Value::Object(uses).to_string())?)
}

/// An image of random bytes, which nothing compresses.
fn import(node: &Node, name: &str, number: usize) -> anyhow::Result<()> {
    let archive = node.bed.layout.dir.join("image.tar");
    let mut dice = Dice::seeded(number as u64 + 1);
    let content: Vec<u8> = (0..LAYER_BYTES / 4).flat_map(|_| (dice.below(1 << 32) as u32).to_le_bytes()).collect();
    let layer = LayerBuilder::default().file("data", &content, 0o644)?.finish()?;
    image::write(&archive, &[Image { names: &[name], start: Start::default(), layers: &[&layer] }])?;
    node.bed.import(&archive)
}

/// The numbers that are left.
fn unused(node: &Node) -> anyhow::Result<Vec<String>> {
    let names = super::images(node)?;
    Ok(names.iter().filter_map(|name| name.strip_prefix("example.com/unused:")).map(str::to_owned).collect())
}

struct Disk {
    capacity: u64,
    available: u64,
}

impl Disk {
    fn of(path: &Path) -> anyhow::Result<Self> {
        let found = rustix::fs::statvfs(path)?;
        Ok(Disk { capacity: found.f_blocks * found.f_frsize, available: found.f_bavail * found.f_frsize })
    }

    fn used_percent(&self) -> u64 {
        100 - self.available * 100 / self.capacity
    }

    fn wanted_available(&self, low_percent: u64) -> u64 {
        self.capacity * (100 - low_percent) / 100
    }
}
