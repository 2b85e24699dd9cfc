//! Programs built from the Go module proxy: containerd 2.4, runc, the CNI plugins, Kubernetes, etcd, metrics-server,
//! a CSI driver with its sidecars, upstream's suite.
//!
//! Owns: what is built and how; the versions are pinned by `testbed/go/*/go.mod`. A finished build is kept under
//! `target/testbed/` and made again when its module files or its own sources change.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use sha2::{Digest as _, Sha256};

use crate::{
    command::{SHORT, command, output},
    packages::{self, Tool},
    progress::step,
    project,
};

#[derive(Clone, Copy, Debug)]
pub struct GoTool {
    /// The name shown during the build.
    name: &'static str,
    /// The directory under `testbed/go`.
    module: &'static str,
    packages: &'static [&'static str],
    tags: &'static str,
    cgo: &'static str,
    /// The name of the program, where it is not the package's.
    program: Option<&'static str>,
    kind: Kind,
    fix: Option<Fix>,
}

/// What a file of a module says wrongly, and what it is built with instead.
#[derive(Clone, Copy, Debug)]
struct Fix {
    module: &'static str,
    file: &'static str,
    /// Each must be there once.
    replace: &'static [(&'static str, &'static str)],
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Programs,
    /// The tests of one package, as a program.
    Tests,
}

/// A program of a pure Go module.
const PLAIN: GoTool =
    GoTool { name: "", module: "", packages: &[], tags: "", cgo: "0", program: None, kind: Kind::Programs, fix: None };

/// containerd 2.4 and its programs.
pub const RUNTIME: &[GoTool] = &[
    GoTool {
        name: "containerd",
        module: "containerd",
        packages: &[
            "github.com/containerd/containerd/v2/cmd/containerd",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        tags: "no_btrfs no_zfs no_devmapper",
        ..PLAIN
    },
    GoTool {
        name: "runc",
        module: "runc",
        packages: &["github.com/opencontainers/runc"],
        tags: "seccomp",
        cgo: "1",
        ..PLAIN
    },
    GoTool {
        name: "cni",
        module: "cni",
        packages: &[
            "github.com/containernetworking/plugins/plugins/ipam/host-local",
            "github.com/containernetworking/plugins/plugins/main/bridge",
            "github.com/containernetworking/plugins/plugins/main/loopback",
        ],
        ..PLAIN
    },
];

pub const ETCD: GoTool =
    GoTool { name: "etcd", module: "etcd", packages: &["go.etcd.io/etcd/server/v3"], program: Some("etcd"), ..PLAIN };
pub const KUBE_APISERVER: GoTool = kubernetes("kube-apiserver", &["k8s.io/kubernetes/cmd/kube-apiserver"]);
pub const KUBE_CONTROLLER_MANAGER: GoTool =
    kubernetes("kube-controller-manager", &["k8s.io/kubernetes/cmd/kube-controller-manager"]);
pub const KUBE_SCHEDULER: GoTool = kubernetes("kube-scheduler", &["k8s.io/kubernetes/cmd/kube-scheduler"]);
pub const KUBECTL: GoTool = kubernetes("kubectl", &["k8s.io/kubernetes/cmd/kubectl"]);
pub const KUBELET: GoTool = kubernetes("kubelet", &["k8s.io/kubernetes/cmd/kubelet"]);

/// The backend of `kubectl top`.
pub const METRICS_SERVER: GoTool = GoTool {
    name: "metrics-server",
    module: "metrics-server",
    packages: &["sigs.k8s.io/metrics-server/cmd/metrics-server"],
    ..PLAIN
};

/// kubernetes-csi's driver for directories and loop devices of one node.
pub const CSI_HOSTPATH: GoTool = GoTool {
    name: "csi-hostpath",
    module: "csi-hostpath",
    packages: &["github.com/kubernetes-csi/csi-driver-host-path/cmd/hostpathplugin"],
    fix: Some(SAVED_STATE),
    ..PLAIN
};
/// The version that the proxy has saves only new volumes, so a driver that starts again knows of nothing that is attached, staged or
/// published; later ones save changes, too. And whoever kills it may do so while it writes.
const SAVED_STATE: Fix = Fix {
    module: "github.com/kubernetes-csi/csi-driver-host-path",
    file: "pkg/state/state.go",
    replace: &[
        ("s.Volumes[i] = update\n\t\t\treturn nil", "s.Volumes[i] = update\n\t\t\treturn s.dump()"),
        (
            "err := ioutil.WriteFile(s.statefilePath, data, 0600); err != nil",
            "err := errors.Join(ioutil.WriteFile(s.statefilePath+\".new\", data, 0600), \
             os.Rename(s.statefilePath+\".new\", s.statefilePath)); err != nil",
        ),
    ],
};
/// What runs beside a CSI driver. The stand-ins are this project's: their originals are not on the proxy.
pub const CSI_SIDECARS: GoTool = GoTool {
    name: "csi-sidecars",
    module: "csi-sidecars",
    packages: &[
        "github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher",
        "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner",
        "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer",
        "./liveness-stand-in",
        "./registrar-stand-in",
    ],
    ..PLAIN
};

/// Upstream's end-to-end suite.
pub const E2E_SUITE: GoTool = GoTool {
    name: "e2e-suite",
    module: "e2e",
    packages: &["k8s.io/kubernetes/test/e2e"],
    program: Some("e2e.test"),
    kind: Kind::Tests,
    ..PLAIN
};
/// The suite's runner, and the programs of its pods.
pub const E2E_TOOLS: GoTool = GoTool {
    name: "e2e-tools",
    module: "e2e",
    packages: &[
        "github.com/onsi/ginkgo/v2/ginkgo",
        "k8s.io/kubernetes/test/images/agnhost",
        "k8s.io/kubernetes/test/images/nonewprivs",
    ],
    ..PLAIN
};

/// Servers of many kinds, for pods that are probed.
pub const AGNHOST: GoTool =
    GoTool { name: "agnhost", module: "e2e", packages: &["k8s.io/kubernetes/test/images/agnhost"], ..PLAIN };

/// Each program is a separate tool, because few tests need all of them.
const fn kubernetes(name: &'static str, packages: &'static [&'static str]) -> GoTool {
    GoTool { name, module: "kubernetes", packages, ..PLAIN }
}

/// Builds what is missing; returns the directory of the programs.
pub fn ensure(tools: &[GoTool]) -> anyhow::Result<PathBuf> {
    let bin = project::target().join("testbed/bin");
    fs::create_dir_all(&bin)?;
    for tool in tools {
        let stamp = bin.join(format!(".{}", tool.name));
        let version = tool.fingerprint()?;
        if fs::read_to_string(&stamp).is_ok_and(|built| built == version) {
            continue;
        }
        if !Tool::Program("go").is_there() {
            bail!("Go is missing: {} is built from its module (Debian's golang is too old; see go.dev/dl)", tool.name);
        }
        if tool.cgo == "1" {
            packages::ensure(packages::RUNC_BUILD)?;
        }
        step(&format!("building {} from its Go module", tool.name), || tool.build(&bin))?;
        fs::write(&stamp, version)?;
    }
    Ok(bin)
}

/// Their files in that directory, including the marks by which [`ensure`] knows them.
pub fn files(tools: &[GoTool]) -> Vec<String> {
    let of = |tool: &GoTool| {
        let named = |package: &'static str| tool.program.unwrap_or(package.rsplit('/').next().unwrap_or(package));
        let programs = tool.packages.iter().map(|package| named(package).to_owned());
        programs.chain([format!(".{}", tool.name)]).collect::<Vec<_>>()
    };
    tools.iter().flat_map(of).collect()
}

impl GoTool {
    fn dir(&self) -> PathBuf {
        project::root().join("testbed/go").join(self.module)
    }

    /// Go's directory of the package's source.
    pub fn source_dir(&self, package: &str) -> anyhow::Result<PathBuf> {
        let mut go = command("go", ["list", "-f", "{{.Dir}}", package]);
        Ok(PathBuf::from(output(go.current_dir(self.dir()), SHORT)?.trim()))
    }

    fn fingerprint(&self) -> anyhow::Result<String> {
        let mut hash = Sha256::new();
        for name in ["go.mod", "go.sum"] {
            let path = self.dir().join(name);
            hash.update(fs::read(&path).with_context(|| format!("read {}", path.display()))?);
        }
        for own in self.packages.iter().filter_map(|package| package.strip_prefix("./")) {
            let path = self.dir().join(own).join("main.go");
            hash.update(fs::read(&path).with_context(|| format!("read {}", path.display()))?);
        }
        if let Some(fix) = self.fix {
            hash.update(format!("{fix:?}"));
        }
        hash.update(format!("{:?} {} {}", self.packages, self.tags, self.cgo));
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn build(&self, bin: &Path) -> anyhow::Result<()> {
        // Without -trimpath, so that packages in Go's cache from other builds on this machine are reused.
        let mut go = match self.kind {
            Kind::Programs => command("go", ["build"]),
            Kind::Tests => command("go", ["test", "-c"]),
        };
        go.arg("-buildvcs=false");
        if let Some(fix) = self.fix {
            go.arg(format!("-modfile={}", self.with(&fix)?.display()));
        }
        go.arg(format!("-ldflags={}", self.ldflags()?)).arg(format!("-tags={}", self.tags));
        go.arg("-o").arg(bin.join(self.program.unwrap_or_default())).args(self.packages);
        go.current_dir(self.dir()).env("CGO_ENABLED", self.cgo);
        output(&mut go, Duration::from_secs(3600)).map(drop)
    }

    /// A copy of the fixed module, and a go.mod that names it.
    fn with(&self, fix: &Fix) -> anyhow::Result<PathBuf> {
        let work = project::target().join("testbed/fixed").join(self.name);
        if work.exists() {
            fs::remove_dir_all(&work)?;
        }
        fs::create_dir_all(&work)?;
        // Listing a module that is not in Go's cache yet does not fetch it.
        let mut go = command("go", ["mod", "download", fix.module]);
        output(go.current_dir(self.dir()), Duration::from_secs(600))?;
        let mut go = command("go", ["list", "-m", "-f", "{{.Dir}}", fix.module]);
        let original = output(go.current_dir(self.dir()), SHORT)?;
        let copy = work.join("module");
        let mut copying = command("cp", ["--recursive", "--no-preserve=mode", original.trim()]);
        output(copying.arg(&copy), SHORT)?;
        let file = copy.join(fix.file);
        let mut text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        for (wrong, right) in fix.replace {
            ensure!(text.matches(wrong).count() == 1, "{} of {} has not once `{wrong}`", fix.file, fix.module);
            text = text.replace(wrong, right);
        }
        fs::write(&file, text)?;
        let go_mod = fs::read_to_string(self.dir().join("go.mod"))?;
        let path = work.join("go.mod");
        fs::write(&path, format!("{go_mod}\nreplace {} => {}\n", fix.module, copy.display()))?;
        fs::copy(self.dir().join("go.sum"), work.join("go.sum"))?;
        Ok(path)
    }

    /// Kubernetes and the CSI driver do not take their versions from the module. The former does not run as `v0.0.0`, the latter answers
    /// nothing without one.
    fn ldflags(&self) -> anyhow::Result<String> {
        let mut flags = "-s -w".to_owned();
        if self.module == CSI_HOSTPATH.module {
            let go_mod = fs::read_to_string(self.dir().join("go.mod"))?;
            let version = required_version(&go_mod, "github.com/kubernetes-csi/csi-driver-host-path")?;
            flags.push_str(&format!(" -X main.version={version}"));
        }
        if ["kubernetes", "e2e"].contains(&self.module) {
            let version = required_version(&fs::read_to_string(self.dir().join("go.mod"))?, "k8s.io/kubernetes")?;
            let mut parts = version.trim_start_matches('v').split('.');
            let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
                for (name, value) in [("gitVersion", version.as_str()), ("gitMajor", major), ("gitMinor", minor)] {
                    flags.push_str(&format!(" -X {package}.{name}={value}"));
                }
            }
        }
        Ok(flags)
    }
}

fn required_version(go_mod: &str, module: &str) -> anyhow::Result<String> {
    let lines = go_mod.lines().map(|line| line.trim_start().trim_start_matches("require "));
    let version =
        lines.filter_map(|line| line.split_once(' ')).find_map(|(name, rest)| (name == module).then_some(rest));
    Ok(version.with_context(|| format!("go.mod does not require {module}"))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_tool_are_its_programs_and_its_mark() {
        assert_eq!(files(&[RUNTIME[2], ETCD]), ["host-local", "bridge", "loopback", ".cni", "etcd", ".etcd"]);
    }

    #[test]
    fn own_sources_of_a_tool_exist() {
        assert_eq!(files(&[CSI_SIDECARS])[2..4], ["csi-resizer", "liveness-stand-in"]);
        CSI_SIDECARS.fingerprint().unwrap();
    }

    #[test]
    fn kubernetes_is_built_as_the_version_its_module_requires() {
        assert!(CSI_HOSTPATH.ldflags().unwrap().contains(" -X main.version=v"));
        let flags = KUBECTL.ldflags().unwrap();
        let version = required_version("go 1.26\n\nrequire k8s.io/kubernetes v1.2.3\n", "k8s.io/kubernetes").unwrap();
        assert_eq!(version, "v1.2.3");
        let block =
            required_version("require (\n\ta v1\n\tk8s.io/kubernetes v1.2.3\n)\n", "k8s.io/kubernetes").unwrap();
        assert_eq!(block, "v1.2.3");
        assert!(flags.contains("k8s.io/component-base/version.gitMajor=1"), "{flags}");
    }
}
