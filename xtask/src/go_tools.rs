//! Programs built from the Go module proxy: containerd 2.4, runc, the CNI plugins.
//!
//! Owns: what is built and how; the versions are pinned by `testbed/go/*/go.mod`. A finished build is kept under
//! `target/testbed/` and made again when its module files change.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

use crate::{
    command::{command, output},
    packages::{self, Tool},
    progress::step,
    project,
};

struct GoTool {
    /// The directory under `testbed/go`.
    module: &'static str,
    packages: &'static [&'static str],
    tags: &'static str,
    cgo: &'static str,
}

const TOOLS: &[GoTool] = &[
    GoTool {
        module: "containerd",
        packages: &[
            "github.com/containerd/containerd/v2/cmd/containerd",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        tags: "no_btrfs no_zfs no_devmapper",
        cgo: "0",
    },
    GoTool { module: "runc", packages: &["github.com/opencontainers/runc"], tags: "seccomp", cgo: "1" },
    GoTool {
        module: "cni",
        packages: &[
            "github.com/containernetworking/plugins/plugins/ipam/host-local",
            "github.com/containernetworking/plugins/plugins/main/bridge",
            "github.com/containernetworking/plugins/plugins/main/loopback",
        ],
        tags: "",
        cgo: "0",
    },
];

/// Builds what is not built yet; returns the directory that holds the programs.
pub fn ensure() -> anyhow::Result<PathBuf> {
    let bin = project::target().join("testbed/bin");
    fs::create_dir_all(&bin)?;
    for tool in TOOLS {
        let stamp = bin.join(format!(".{}", tool.module));
        let version = tool.fingerprint()?;
        if fs::read_to_string(&stamp).is_ok_and(|built| built == version) {
            continue;
        }
        if !Tool::Program("go").is_there() {
            bail!("Go is missing: containerd 2.4 is built from its module (Debian's golang is too old; see go.dev/dl)");
        }
        if tool.cgo == "1" {
            packages::ensure(packages::RUNC_BUILD)?;
        }
        step(&format!("building {} from its Go module", tool.module), || tool.build(&bin))?;
        fs::write(&stamp, version)?;
    }
    Ok(bin)
}

impl GoTool {
    fn dir(&self) -> PathBuf {
        project::root().join("testbed/go").join(self.module)
    }

    fn fingerprint(&self) -> anyhow::Result<String> {
        let mut hash = Sha256::new();
        for name in ["go.mod", "go.sum"] {
            let path = self.dir().join(name);
            hash.update(fs::read(&path).with_context(|| format!("read {}", path.display()))?);
        }
        hash.update(format!("{:?} {} {}", self.packages, self.tags, self.cgo));
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn build(&self, bin: &std::path::Path) -> anyhow::Result<()> {
        let mut go = command("go", ["build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"]);
        go.arg(format!("-tags={}", self.tags)).arg("-o").arg(bin).args(self.packages);
        go.current_dir(self.dir()).env("CGO_ENABLED", self.cgo);
        output(&mut go, Duration::from_secs(1800)).map(drop)
    }
}
