//! The image of a CSI driver and its sidecars.
//!
//! Owns: its content. One image for all of them, so that a node imports one archive.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use rubelet_testbed::{
    go_tools,
    image::{Image, Layer, LayerBuilder, Start, busybox_layer, newer, programs_layer, write},
    packages,
    progress::step,
    project,
};

pub const NAME: &str = "rubelet.test/csi:1";

/// In the image's root directory.
const PROGRAMS: [&str; 6] =
    ["hostpathplugin", "csi-attacher", "csi-provisioner", "csi-resizer", "liveness-stand-in", "registrar-stand-in"];

/// Builds what is missing; returns the archive.
pub fn ensure() -> anyhow::Result<PathBuf> {
    let programs = programs()?;
    let archive = project::target().join("testbed/images/csi.tar");
    if !newer(&archive, &programs.each_ref().map(PathBuf::as_path)) {
        step("making the image of the CSI driver", || {
            let layers = layers(&programs)?;
            let start = Start { cmd: &["sh"], ..Start::default() };
            write(&archive, &[Image { names: &[NAME], start, layers: &layers.each_ref() }])
        })?;
    }
    Ok(archive)
}

/// Builds what is missing.
pub fn programs() -> anyhow::Result<[PathBuf; PROGRAMS.len()]> {
    packages::ensure(packages::CSI_DRIVER)?;
    let bin = go_tools::ensure(&[go_tools::CSI_HOSTPATH, go_tools::CSI_SIDECARS])?;
    Ok(PROGRAMS.map(|name| bin.join(name)))
}

/// A shell, the tools of the driver, and the programs themselves.
pub fn layers(programs: &[PathBuf]) -> anyhow::Result<[Layer; 3]> {
    let tools = packages::CSI_DRIVER
        .iter()
        .map(|need| need.tool.path().with_context(|| format!("{} has no {need:?}", need.package)))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let tools: Vec<&Path> = tools.iter().map(PathBuf::as_path).collect();
    let mut own = LayerBuilder::default();
    for program in programs {
        let name = program.file_name().and_then(|name| name.to_str()).context("a program has a name")?;
        own = own.file(name, &fs::read(program)?, 0o755)?;
    }
    Ok([busybox_layer(Path::new("/bin/busybox"))?, programs_layer(&tools)?, own.finish()?])
}
