//! A small Debian in a directory, for images of containers and machines.
//!
//! Owns: the release, its mirror, and which of its files are removed.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use rubelet_testbed::{
    command::{command, output},
    packages::{self, Need, program},
};

pub const MIRROR: &str = "http://deb.debian.org/debian";
pub const RELEASE: &str = "bookworm";

const NEEDS: &[Need] = &[program("debootstrap", "debootstrap")];

/// 200 MB that would be unpacked or copied for every run.
const BALLAST: &[&str] =
    &["usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists", "var/log"];

/// Makes one in `dir`, with these packages (separated by commas) besides the least.
pub fn bootstrap(dir: &Path, packages: &str) -> anyhow::Result<PathBuf> {
    packages::ensure(NEEDS)?;
    let root = fresh(dir)?;
    let mut debootstrap = command("debootstrap", ["--variant=minbase"]);
    debootstrap.arg(format!("--include={packages}")).arg(RELEASE).arg(&root).arg(MIRROR);
    output(&mut debootstrap, Duration::from_secs(1800))?;
    for ballast in BALLAST {
        fs::remove_dir_all(root.join(ballast)).with_context(|| format!("remove {ballast}"))?;
    }
    Ok(root)
}

/// An empty directory, cleared of leftovers of an interrupted run.
pub fn fresh(dir: &Path) -> anyhow::Result<PathBuf> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("remove {}", dir.display()))?;
    }
    fs::create_dir_all(dir)?;
    Ok(dir.to_owned())
}
