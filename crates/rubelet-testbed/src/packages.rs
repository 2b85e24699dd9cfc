//! Required Debian packages.
//!
//! Owns: the list of tools and the package of each. Installs what is missing; if it cannot, it reports
//! exactly what is missing.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};

use crate::{
    command::{capture, command, output},
    progress::step,
};

/// A file that must exist, and the package that brings it.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    pub tool: Tool,
    pub package: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub enum Tool {
    /// A program somewhere in the path.
    Program(&'static str),
    File(&'static str),
}

pub const fn program(name: &'static str, package: &'static str) -> Need {
    Need { tool: Tool::Program(name), package }
}

const fn file(path: &'static str, package: &'static str) -> Need {
    Need { tool: Tool::File(path), package }
}

/// For either runtime.
pub const COMMON: &[Need] = &[program("ip", "iproute2"), file("/bin/busybox", "busybox-static")];

/// A bus for the tests of what is said to logind.
pub const UNIT_TESTS: &[Need] = &[program("dbus-daemon", "dbus")];

/// Debian's own containerd.
pub const DEBIAN_CONTAINERD: &[Need] = &[
    program("containerd", "containerd"),
    program("runc", "runc"),
    file("/usr/lib/cni/bridge", "containernetworking-plugins"),
];

/// To build runc, which is the one that needs C.
pub const RUNC_BUILD: &[Need] =
    &[program("pkg-config", "pkg-config"), file("/usr/include/seccomp.h", "libseccomp-dev"), program("gcc", "gcc")];

/// What a CSI driver for directories and loop devices runs.
pub const CSI_DRIVER: &[Need] = &[
    program("mount", "mount"),
    program("umount", "mount"),
    program("losetup", "mount"),
    program("findmnt", "util-linux"),
    program("fallocate", "util-linux"),
    program("blockdev", "util-linux"),
];

/// Installs what is missing of `needs`.
pub fn ensure(needs: &[Need]) -> anyhow::Result<()> {
    let mut missing: Vec<_> = needs.iter().filter(|need| !need.tool.is_there()).map(|need| need.package).collect();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    require_root().with_context(|| format!("these Debian packages are missing: {}", missing.join(" ")))?;
    if !Tool::Program("apt-get").is_there() {
        bail!("these Debian packages are missing, and there is no apt-get to install them: {}", missing.join(" "));
    }
    step(&format!("installing {}", missing.join(" ")), || install(&missing))
}

pub fn require_root() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("this needs root: containers, mounts and network namespaces are made");
    }
    Ok(())
}

fn install(packages: &[&str]) -> anyhow::Result<()> {
    let limit = Duration::from_secs(600);
    let install = |packages: &[&str]| {
        let mut apt = command("apt-get", ["install", "--yes", "--no-install-recommends"]);
        apt.args(packages).env("DEBIAN_FRONTEND", "noninteractive");
        // The package starts the machine's containerd, which is not needed.
        apt.env("RUNLEVEL", "1");
        capture(&mut apt, limit)
    };
    if install(packages)?.success {
        return Ok(());
    }
    // The package lists may be missing or old, as on a fresh machine.
    output(command("apt-get", ["update"]).env("DEBIAN_FRONTEND", "noninteractive"), limit)?;
    let second = install(packages)?;
    if !second.success {
        bail!("cannot install {}:\n{}{}", packages.join(" "), second.stdout, second.stderr);
    }
    Ok(())
}

impl Tool {
    pub fn is_there(self) -> bool {
        self.path().is_some()
    }

    /// Where it is.
    pub fn path(self) -> Option<PathBuf> {
        match self {
            Tool::File(path) => Some(PathBuf::from(path)).filter(|path| path.exists()),
            Tool::Program(name) => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| is_program(path))
            }
        }
    }
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_found_only_in_the_path() {
        assert!(Tool::Program("sh").is_there());
        assert!(!Tool::Program("no-such-tool").is_there());
        assert!(!Tool::File("/no/such/file").is_there());
    }
}
