//! What the agent requires of the kernel, and what it sets in it, at start.
//!
//! Owns: the settings pods rely on, and the rules about swap.
//! Upstream: `setupKernelTunables`, the checks of `NewContainerManager`.

use std::{fs, path::Path};

use anyhow::{bail, ensure};
use rubelet_core::{
    config::KubeletConfiguration,
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
};

/// Below `/proc/sys`, with upstream's values.
const TUNABLES: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// An error if the node must not be used as it is.
pub fn prepare(config: &KubeletConfiguration, proc: &Path, has_cgroup_v2: bool) -> anyhow::Result<()> {
    check_swap(config, proc, has_cgroup_v2)?;
    set_tunables(config.protect_kernel_defaults, &proc.join("sys"))
}

/// A warning if what pods keep in memory may reach the disk.
pub fn swapped_volumes(proc: &Path, supports_noswap: impl FnOnce() -> bool) -> Option<EventRecord> {
    const WORDS: &str = "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) might be \
                         swapped to disk and should no longer be considered secure.";
    let reason = event_reasons::POSSIBLE_MEMORY_BACKED_VOLUMES_ON_DISK;
    (has_swap(proc) && !supports_noswap())
        .then(|| EventRecord::new(InvolvedObject::Node, Severity::Warning, reason, WORDS))
}

/// The first line is the head of the table.
fn has_swap(proc: &Path) -> bool {
    fs::read_to_string(proc.join("swaps")).is_ok_and(|swaps| swaps.trim().lines().count() > 1)
}

fn check_swap(config: &KubeletConfiguration, proc: &Path, has_cgroup_v2: bool) -> anyhow::Result<()> {
    if has_swap(proc) && config.fail_swap_on {
        bail!("running with swap on is not supported, please disable swap or set --fail-swap-on flag to false");
    }
    let is_limited = config.memory_swap.swap_behavior == "LimitedSwap";
    ensure!(
        !is_limited || has_cgroup_v2,
        "swap feature is enabled and LimitedSwap but it is only supported with cgroupv2"
    );
    Ok(())
}

/// With `protectKernelDefaults` other values are an error; otherwise they are changed. Where that is not permitted the node
/// works all the same, so it is a warning; upstream does not start.
fn set_tunables(is_protected: bool, sys: &Path) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    for (name, expected) in TUNABLES {
        let path = sys.join(name);
        let flag = name;
        let actual = match fs::read_to_string(&path) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if is_protected => {
                wrong.push(format!("open {}: {error}", path.display()));
                continue;
            }
            Err(error) => {
                tracing::warn!(flag, %error, "kernel setting cannot be read");
                continue;
            }
        };
        if actual == expected {
            continue;
        }
        if is_protected {
            wrong.push(format!("invalid kernel flag: {flag}, expected value: {expected}, actual value: {actual}"));
        } else if let Err(error) = fs::write(&path, expected) {
            tracing::warn!(flag, expected, actual, %error, "kernel setting cannot be changed");
        } else {
            tracing::info!(flag, expected, actual, "kernel setting changed");
        }
    }
    match wrong.as_slice() {
        [] => Ok(()),
        [one] => bail!("{one}"),
        several => bail!("[{}]", several.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proc(swaps: &str) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        for (name, expected) in TUNABLES {
            let path = proc.path().join("sys").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{expected}\n")).unwrap();
        }
        fs::write(proc.path().join("swaps"), format!("Filename Type Size Used Priority\n{swaps}")).unwrap();
        proc
    }

    #[test]
    fn kernel_settings_are_changed_unless_they_are_protected() {
        let proc = proc("");
        let flag = proc.path().join("sys/kernel/panic");
        fs::write(&flag, "0\n").unwrap();
        let mut config = KubeletConfiguration { protect_kernel_defaults: true, ..KubeletConfiguration::default() };
        let error = prepare(&config, proc.path(), true).unwrap_err().to_string();
        assert_eq!(error, "invalid kernel flag: kernel/panic, expected value: 10, actual value: 0");
        config.protect_kernel_defaults = false;
        prepare(&config, proc.path(), true).unwrap();
        assert_eq!(fs::read_to_string(&flag).unwrap(), "10");
        config.protect_kernel_defaults = true;
        prepare(&config, proc.path(), true).unwrap();
    }

    #[test]
    fn swap_is_warned_of_only_if_memory_volumes_may_reach_it() {
        let (with, without) = (proc("/dev/sda2 partition 1000 0 -2\n"), proc(""));
        for (proc, supports_noswap, is_warned_of) in
            [(&with, false, true), (&with, true, false), (&without, false, false)]
        {
            assert_eq!(swapped_volumes(proc.path(), || supports_noswap).is_some(), is_warned_of);
        }
    }

    #[test]
    fn swap_is_refused_unless_it_is_allowed() {
        let (with, without) = (proc("/dev/sda2 partition 1000 0 -2\n"), proc(""));
        let mut config = KubeletConfiguration::default();
        assert!(prepare(&config, without.path(), true).is_ok());
        let error = prepare(&config, with.path(), true).unwrap_err().to_string();
        assert!(error.starts_with("running with swap on is not supported"), "{error}");
        config.fail_swap_on = false;
        assert!(prepare(&config, with.path(), true).is_ok());
        config.memory_swap.swap_behavior = "LimitedSwap".to_owned();
        assert!(prepare(&config, with.path(), true).is_ok());
        let error = prepare(&config, with.path(), false).unwrap_err().to_string();
        assert!(error.contains("only supported with cgroupv2"), "{error}");
    }
}
