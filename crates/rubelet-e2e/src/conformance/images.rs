//! The images of the specs, built here, because no registry is reachable.
//!
//! Owns: their content and their names. Their part: the images of CSI drivers. They have two bases: a small Debian, for the
//! programs Kubernetes' own images bring, and a busybox whose shell keeps variables such as `data-1`, as the original does
//! and Debian's does not.

mod csi;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use rubelet_testbed::{
    command::{command, output},
    go_tools,
    image::{Image, Layer, LayerBuilder, Start, busybox_layer, newer, write},
    packages::{self, Need, program},
    progress::step,
    project,
};

use crate::debian::{self, MIRROR, RELEASE};

const NEEDS: &[Need] = &[program("dpkg-source", "dpkg-dev"), program("gcc", "gcc"), program("make", "make")];

/// What the specs run inside of the images that stand on Debian.
const DEBIAN_PACKAGES: &str = "bash,bind9-dnsutils,curl,iperf,iproute2,netcat-openbsd,nginx-light,perl,procps,wget";

/// The suite runs commands on the node in the namespace of process 1, whose capabilities a machine's root need not have: then
/// containerd's namespace, which is the same, is entered.
const NSENTER: &str = r#"#!/bin/sh
if [ "$1" = --mount=/rootfs/proc/1/ns/mnt ] && ! readlink /rootfs/proc/1/ns/mnt >/dev/null; then
  for process in /rootfs/proc/[0-9]*; do
    read -r name < "$process/comm"
    if [ "$name" = containerd ]; then
      shift
      set -- "--mount=$process/ns/mnt" "$@"
      break
    fi
  done 2>/dev/null
fi
exec /usr/bin/nsenter "$@"
"#;

/// A user and a group that a spec expects to find in the image.
const PASSWD_OF_IMAGE: &str = "user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n";
const GROUP_OF_IMAGE: &str = "user-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n";

/// Builds missing images; returns their archives. `programs` holds the programs built of the suite's module.
pub fn ensure(programs: &Path) -> anyhow::Result<[PathBuf; 2]> {
    let dir = project::target().join("testbed/images");
    fs::create_dir_all(&dir)?;
    let archive = dir.join("e2e.tar");
    let debian = dir.join("debian.tar");
    let busybox = dir.join("busybox");
    if !debian.exists() {
        step("making a small Debian for the images (some minutes)", || make_debian(&dir, &debian))?;
    }
    if !busybox.exists() {
        packages::ensure(NEEDS)?;
        step("building busybox from Debian's source package", || make_busybox(&dir, &busybox))?;
    }
    let (agnhost, nonewprivs) = (programs.join("agnhost"), programs.join("nonewprivs"));
    if !newer(&archive, &[&debian, &busybox, &agnhost, &nonewprivs]) {
        step("making the images of the suite", || {
            write_archive(
                &archive,
                &Parts {
                    debian: Layer::of_file(&debian)?,
                    agnhost: agnhost_layer(&agnhost)?,
                    busybox: busybox_layer(&busybox)?,
                    nonewprivs: LayerBuilder::default().file("nnp", &fs::read(&nonewprivs)?, 0o6755)?.finish()?,
                },
            )
        })?;
    }
    Ok([archive, csi::ensure(&dir)?])
}

struct Parts {
    debian: Layer,
    agnhost: Layer,
    busybox: Layer,
    nonewprivs: Layer,
}

/// The names and versions are those of `test/utils/image/manifest.go`.
fn write_archive(path: &Path, parts: &Parts) -> anyhow::Result<()> {
    let Parts { debian, agnhost, busybox, nonewprivs } = parts;
    let shell = || Start { cmd: &["sh"], ..Start::default() };
    write(
        path,
        &[
            Image {
                names: &[
                    "registry.k8s.io/e2e-test-images/agnhost:2.63.0",
                    "registry.k8s.io/e2e-test-images/agnhost:2.55",
                ],
                start: Start { entrypoint: &["/agnhost"], cmd: &["pause"], ..Start::default() },
                layers: &[debian, agnhost],
            },
            Image {
                names: &[
                    "registry.k8s.io/e2e-test-images/nginx:1.15-4",
                    "registry.k8s.io/e2e-test-images/nginx:1.27-0",
                ],
                start: Start { cmd: &["nginx", "-g", "daemon off;"], ..Start::default() },
                layers: &[debian],
            },
            Image {
                names: &[
                    "registry.k8s.io/e2e-test-images/perl:5.26",
                    "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0",
                    "registry.k8s.io/e2e-test-images/ipc-utils:1.4",
                ],
                start: shell(),
                layers: &[debian],
            },
            Image {
                names: &[
                    "registry.k8s.io/e2e-test-images/busybox:1.37.0-1",
                    "registry.k8s.io/e2e-test-images/busybox:1.36.1-1",
                ],
                start: shell(),
                layers: &[busybox],
            },
            Image {
                names: &["registry.k8s.io/e2e-test-images/nonroot:1.5"],
                start: Start { user: "1234", ..shell() },
                layers: &[busybox],
            },
            Image {
                names: &["registry.k8s.io/e2e-test-images/nonewprivs:1.4"],
                start: Start { cmd: &["/nnp"], ..Start::default() },
                layers: &[busybox, nonewprivs],
            },
        ],
    )
}

/// `agnhost-2` is for specs that replace the entrypoint, `uploads` for those that send files to it, the certificate for
/// those that speak TLS with it.
fn agnhost_layer(agnhost: &Path) -> anyhow::Result<Layer> {
    let porter = go_tools::E2E_TOOLS.source_dir("k8s.io/kubernetes/test/images/agnhost/porter")?;
    LayerBuilder::default()
        .file("agnhost", &fs::read(agnhost)?, 0o755)?
        .file("localhost.crt", &fs::read(porter.join("localhost.crt"))?, 0o644)?
        .file("localhost.key", &fs::read(porter.join("localhost.key"))?, 0o644)?
        .file("usr/local/bin/nsenter", NSENTER.as_bytes(), 0o755)?
        .link("agnhost-2", "agnhost")?
        .dir("uploads", 0o755)?
        .finish()
}

fn make_debian(dir: &Path, layer: &Path) -> anyhow::Result<()> {
    let root = debian::bootstrap(&dir.join("debian"), DEBIAN_PACKAGES)?;
    fs::create_dir_all(root.join("var/log/nginx"))?;
    for (log, stream) in [("access.log", "/dev/stdout"), ("error.log", "/dev/stderr")] {
        symlink(stream, root.join("var/log/nginx").join(log))?;
    }
    for (file, lines) in [("etc/passwd", PASSWD_OF_IMAGE), ("etc/group", GROUP_OF_IMAGE)] {
        let text = fs::read_to_string(root.join(file))?;
        fs::write(root.join(file), text + lines)?;
    }
    let partial = layer.with_extension("partial");
    let mut tar = command("tar", ["--create", "--sort=name", "--numeric-owner", "--one-file-system"]);
    tar.arg("--file").arg(&partial).arg("--directory").arg(&root).arg(".");
    output(&mut tar, Duration::from_secs(300))?;
    fs::rename(partial, layer)?;
    fs::remove_dir_all(root)?;
    Ok(())
}

/// Debian's source without Debian's patches: one of them takes the odd variables away.
fn make_busybox(dir: &Path, program: &Path) -> anyhow::Result<()> {
    let work = debian::fresh(&dir.join("busybox.src"))?;
    fs::create_dir_all(work.join("lists/partial"))?;
    fs::write(work.join("sources.list"), format!("deb-src {MIRROR} {RELEASE} main\n"))?;
    // Lists of our own: the machine's may not name source packages, and are not ours to change.
    let apt = |args: &[&str]| {
        let mut apt = command("apt-get", ["-o", "Dir::Etc::sourceparts=-", "-o", "Dir::Cache::srcpkgcache="]);
        apt.args(["-o", "Dir::Cache::pkgcache=", "-o"]).arg(format!("Dir::State::lists={}/lists", work.display()));
        apt.arg("-o").arg(format!("Dir::Etc::sourcelist={}/sources.list", work.display())).args(args);
        output(apt.current_dir(&work), Duration::from_secs(300))
    };
    apt(&["update"])?;
    apt(&["source", "--download-only", "busybox"])?;
    let mut files = fs::read_dir(&work)?.flatten().map(|entry| entry.path());
    let description = files.find(|path| path.extension().is_some_and(|extension| extension == "dsc"));
    let description = description.context("the source package of busybox has no .dsc file")?;
    let mut unpack = command("dpkg-source", ["--skip-patches", "--extract"]);
    output(unpack.arg(description).arg(work.join("source")), Duration::from_secs(60))?;
    let source = work.join("source");
    fs::copy(source.join("debian/config/pkg/static"), source.join(".config"))?;
    output(command("make", ["--jobs=2"]).current_dir(&source), Duration::from_secs(1800))?;
    fs::rename(source.join("busybox"), program)?;
    fs::remove_dir_all(work)?;
    Ok(())
}
