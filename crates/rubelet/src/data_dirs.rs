//! The directories created before any pod starts.
//!
//! Owns: their names and modes. Never: their contents.
//! Upstream: `setupDataDirs` in `kubelet.go`; the device manager makes `device-plugins`.

use std::{
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use rubelet_host::mount;

/// Below the root directory. DaemonSets mount them with type Directory, which requires them to exist.
const BELOW_ROOT: [(&str, u32); 6] = [
    ("pods", 0o750),
    ("plugins", 0o750),
    ("plugins_registry", 0o750),
    ("pod-resources", 0o750),
    ("checkpoints", 0o700),
    ("device-plugins", 0o750),
];

/// Creates the root directory and those in it, with shared propagation: Bidirectional mounts of pods are visible outside.
pub(crate) fn make_root(dir: &Path) -> anyhow::Result<PathBuf> {
    let root = made_and_resolved(dir, 0o750)?;
    mount::make_rshared(&root).with_context(|| format!("share mounts below {}", root.display()))?;
    make_below(&root)?;
    Ok(root)
}

fn make_below(root: &Path) -> anyhow::Result<()> {
    for (name, mode) in BELOW_ROOT {
        made_and_resolved(&root.join(name), mode)?;
    }
    Ok(())
}

/// The resolved path: the kernel lists mounts by it, so links in the configured path must not hide them.
pub(crate) fn made_and_resolved(dir: &Path, mode: u32) -> anyhow::Result<PathBuf> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(dir)
        .with_context(|| format!("create directory {}", dir.display()))?;
    dir.canonicalize().with_context(|| format!("resolve {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn root_directory_has_upstreams_directories() {
        let dir = tempfile::tempdir().unwrap();
        make_below(dir.path()).unwrap();
        let mut found: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let mode = entry.metadata().unwrap().permissions().mode() & 0o7777;
                format!("{} {mode:o}", entry.file_name().display())
            })
            .collect();
        found.sort();
        insta::assert_snapshot!(found.join("\n"), @"
        checkpoints 700
        device-plugins 750
        plugins 750
        plugins_registry 750
        pod-resources 750
        pods 750
        ");
    }
}
