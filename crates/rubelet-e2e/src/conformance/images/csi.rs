//! The images of the suite's CSI drivers: the mock driver, which runs in the suite itself behind a proxy, and the hostpath driver.
//!
//! Owns: which of our programs answers to which name. The suite names a newer driver than the Go module proxy serves and slightly older
//! sidecars; registrar and liveness probe are stand-ins; snapshots are not supported.

use std::path::{Path, PathBuf};

use rubelet_testbed::{
    image::{Image, LayerBuilder, Start, newer, write},
    progress::step,
};

use crate::e2e::cluster::csi::image;

/// The suite gives the driver flags for VolumeAttributesClasses, which the older one does not know. All drivers of the node have one
/// directory for their state: each gets its own below it, or one that starts again would have the volumes of another.
const DRIVER: &str = r#"#!/bin/sh
for flag; do
  shift
  case $flag in
    --drivername=*) name=${flag#*=} ; set -- "$@" "$flag" ;;
    --enable-controller-modify-volume=* | --accepted-mutable-parameter-names=*) ;;
    *) set -- "$@" "$flag" ;;
  esac
done
PATH=/driver-bin:$PATH exec /hostpathplugin --statedir="/csi-data-dir/$name" "$@"
"#;

/// The driver looks for the loop device of a file by the name that the kernel shows, which is another one once the driver's container,
/// and with it its mount of the directory, was replaced.
const LOSETUP: &str = r#"#!/bin/sh
case $1 in
  -j) /usr/local/bin/losetup "$@" | sed "s|(.*)|($2)|" ;;
  *) exec /usr/local/bin/losetup "$@" ;;
esac
"#;

/// By name and version, as in the suite's manifests.
const PROGRAMS: [(&str, &[&str]); 7] = [
    ("hostpathplugin:v1.17.1", &["/driver"]),
    ("csi-provisioner:v6.1.1", &["/csi-provisioner"]),
    ("csi-resizer:v2.1.0", &["/csi-resizer"]),
    ("csi-attacher:v4.11.0", &["/csi-attacher"]),
    ("csi-node-driver-registrar:v2.16.0", &["/registrar-stand-in"]),
    ("livenessprobe:v2.18.0", &["/liveness-stand-in"]),
    // It takes no snapshots, but its container has to run.
    ("csi-snapshotter:v8.5.0", &["/bin/sh", "-c", "exec sleep 1000000000"]),
];

/// Builds what is missing; returns the archive.
pub fn ensure(dir: &Path) -> anyhow::Result<PathBuf> {
    let programs = image::programs()?;
    let archive = dir.join("e2e-csi.tar");
    if !newer(&archive, &programs.each_ref().map(PathBuf::as_path)) {
        step("making the images of the suite's CSI drivers", || make(&archive, &programs))?;
    }
    Ok(archive)
}

fn make(archive: &Path, programs: &[PathBuf]) -> anyhow::Result<()> {
    let [shell, tools, own] = image::layers(programs)?;
    let driver = LayerBuilder::default()
        .file("driver", DRIVER.as_bytes(), 0o755)?
        .dir("driver-bin", 0o755)?
        .file("driver-bin/losetup", LOSETUP.as_bytes(), 0o755)?
        .finish()?;
    let layers = [&shell, &tools, &own, &driver];
    let names = PROGRAMS.map(|(name, _)| format!("registry.k8s.io/sig-storage/{name}"));
    let names = names.each_ref().map(|name| [name.as_str()]);
    let images: Vec<_> = names
        .iter()
        .zip(PROGRAMS)
        .map(|(name, (_, entrypoint))| Image {
            names: name,
            start: Start { entrypoint, ..Start::default() },
            layers: &layers,
        })
        .collect();
    write(archive, &images)
}
