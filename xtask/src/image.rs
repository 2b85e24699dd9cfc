//! The testbed's images, made without a registry: a docker archive is a tar of three files.
//!
//! Owns: the archive format, the content of the pause and busybox images. `ctr images import` takes what is written here.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::{
    command::{SHORT, command, output},
    progress::step,
    project,
};

/// What containerd runs in a sandbox: Debian's 1.6 wants the first, 2.4 the second.
pub const PAUSE_NAMES: [&str; 2] = ["registry.k8s.io/pause:3.6", "registry.k8s.io/pause:3.10.2"];
/// Debian's busybox, under the name of the same version in the public registry.
pub const BUSYBOX: &str = "docker.io/library/busybox:1.35";

/// An image of one layer.
pub struct Image<'a> {
    pub names: &'a [&'a str],
    pub program: Program<'a>,
    pub layer: Vec<u8>,
}

/// What the image runs when the pod names no command.
pub enum Program<'a> {
    Entrypoint(&'a str),
    /// Replaced as a whole by a pod's `args`.
    Cmd(&'a str),
}

/// Makes the images that are not made yet; returns their archives.
pub fn ensure() -> anyhow::Result<Vec<PathBuf>> {
    let dir = project::target().join("testbed/images");
    fs::create_dir_all(&dir)?;
    let pause = dir.join("pause.tar");
    let busybox = dir.join("busybox.tar");
    if !newer(&pause, &[&pause_source()]) {
        step("making the pause image", || {
            let layer = Layer::default().file("pause", &pause_program(&dir)?)?.finish()?;
            write(&pause, &Image { names: &PAUSE_NAMES, program: Program::Entrypoint("/pause"), layer })
        })?;
    }
    if !newer(&busybox, &[Path::new("/bin/busybox")]) {
        step("making the busybox image", || {
            write(&busybox, &Image { names: &[BUSYBOX], program: Program::Cmd("sh"), layer: busybox_layer()? })
        })?;
    }
    Ok(vec![pause, busybox])
}

/// Busybox under another name: for tests in which an image appears late.
pub fn busybox_named(name: &str, path: &Path) -> anyhow::Result<()> {
    write(path, &Image { names: &[name], program: Program::Cmd("sh"), layer: busybox_layer()? })
}

/// Writes beside and renames, so that a reader never sees half an archive.
fn write(path: &Path, image: &Image<'_>) -> anyhow::Result<()> {
    let partial = path.with_extension(format!("partial.{}", std::process::id()));
    fs::write(&partial, archive(image)?)?;
    fs::rename(&partial, path)?;
    Ok(())
}

fn archive(image: &Image<'_>) -> anyhow::Result<Vec<u8>> {
    let digest = hex(&image.layer);
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let (key, program) = match image.program {
        Program::Entrypoint(program) => ("Entrypoint", program),
        Program::Cmd(program) => ("Cmd", program),
    };
    let config = serde_json::to_vec(&json!({
        "architecture": architecture,
        "os": "linux",
        "config": { "Env": ["PATH=/bin:/sbin:/usr/bin:/usr/sbin"], key: [program] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    }))?;
    let config_name = format!("{}.json", hex(&config));
    let layer_name = format!("{digest}/layer.tar");
    let manifest = serde_json::to_vec(&json!([
        { "Config": config_name, "RepoTags": image.names, "Layers": [layer_name] }
    ]))?;
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in [("manifest.json", &manifest), (&config_name, &config), (&layer_name, &image.layer)] {
        append(&mut tar, name, content, 0o644)?;
    }
    Ok(tar.into_inner()?)
}

/// A layer under construction.
pub struct Layer(tar::Builder<Vec<u8>>);

impl Default for Layer {
    fn default() -> Self {
        Layer(tar::Builder::new(Vec::new()))
    }
}

impl Layer {
    /// An executable file.
    fn file(mut self, name: &str, content: &[u8]) -> anyhow::Result<Self> {
        append(&mut self.0, name, content, 0o755)?;
        Ok(self)
    }

    fn text(mut self, name: &str, content: &str) -> anyhow::Result<Self> {
        append(&mut self.0, name, content.as_bytes(), 0o644)?;
        Ok(self)
    }

    fn dir(mut self, name: &str, mode: u32) -> anyhow::Result<Self> {
        let mut header = header(tar::EntryType::Directory, 0, mode);
        self.0.append_data(&mut header, format!("{name}/"), std::io::empty())?;
        Ok(self)
    }

    fn link(mut self, name: &str, target: &str) -> anyhow::Result<Self> {
        let mut header = header(tar::EntryType::Symlink, 0, 0o777);
        self.0.append_link(&mut header, name, target)?;
        Ok(self)
    }

    fn finish(self) -> anyhow::Result<Vec<u8>> {
        Ok(self.0.into_inner()?)
    }
}

fn busybox_layer() -> anyhow::Result<Vec<u8>> {
    let program = fs::read("/bin/busybox").context("read /bin/busybox (Debian's busybox-static)")?;
    let applets = output(&mut command("/bin/busybox", ["--list"]), SHORT)?;
    let mut layer = Layer::default()
        .dir("bin", 0o755)?
        .dir("etc", 0o755)?
        .dir("home", 0o755)?
        .dir("root", 0o700)?
        .dir("tmp", 0o1777)?
        .dir("var", 0o755)?
        .text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n")?
        .text("etc/group", "root:x:0:\nnogroup:x:65534:\n")?
        .file("bin/busybox", &program)?;
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        layer = layer.link(&format!("bin/{applet}"), "busybox")?;
    }
    layer.finish()
}

fn pause_source() -> PathBuf {
    project::root().join("testbed/pause.rs")
}

/// Static, so that it runs in an image that holds nothing else.
fn pause_program(dir: &Path) -> anyhow::Result<Vec<u8>> {
    let program = dir.join(format!("pause.{}", std::process::id()));
    let mut rustc = command("rustc", ["--edition=2024", "-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols"]);
    rustc.args(["-Ctarget-feature=+crt-static", "-o"]).arg(&program).arg(pause_source());
    output(rustc.current_dir(project::root()), Duration::from_secs(120))?;
    let bytes = fs::read(&program)?;
    fs::remove_file(&program)?;
    if bytes.is_empty() {
        bail!("rustc wrote an empty pause program");
    }
    Ok(bytes)
}

fn newer(made: &Path, sources: &[&Path]) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
    let Some(made) = modified(made) else { return false };
    sources.iter().all(|source| modified(source).is_some_and(|source| source <= made))
}

fn append(tar: &mut tar::Builder<Vec<u8>>, name: &str, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let mut header = header(tar::EntryType::Regular, content.len() as u64, mode);
    tar.append_data(&mut header, name, content)?;
    tar.get_mut().flush()?;
    Ok(())
}

/// No names, no times: the same content gives the same digest on every machine.
fn header(kind: tar::EntryType, size: u64, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn an_archive_names_its_config_and_its_layer_by_digest() {
        let layer = Layer::default().file("pause", b"program").unwrap().finish().unwrap();
        let bytes = archive(&Image { names: &["a/b:1"], program: Program::Entrypoint("/pause"), layer: layer.clone() })
            .unwrap();
        let mut manifest = String::new();
        let mut names = Vec::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            names.push(entry.path().unwrap().display().to_string());
            if names.len() == 1 {
                entry.read_to_string(&mut manifest).unwrap();
            }
        }
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
        assert_eq!(
            names,
            ["manifest.json", manifest[0]["Config"].as_str().unwrap(), &format!("{}/layer.tar", hex(&layer))]
        );
        assert_eq!(manifest[0]["RepoTags"], json!(["a/b:1"]));
    }
}
