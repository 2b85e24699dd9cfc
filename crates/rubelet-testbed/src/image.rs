//! The testbed's images, built without a registry: a docker archive is a tar of three files.
//!
//! Owns: the archive format, the content of the pause and busybox images. `ctr images import` reads the result.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    io::{Read, Write},
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

/// The sandbox images: Debian's 1.6 uses the first, 2.4 the second.
pub const PAUSE_NAMES: [&str; 2] = ["registry.k8s.io/pause:3.6", "registry.k8s.io/pause:3.10.2"];
/// Debian's busybox, under the name of the same version in the public registry.
pub const BUSYBOX: &str = "docker.io/library/busybox:1.35";

/// An image: its command, and its layers from the lowest up. Images of one archive may share layers.
#[derive(Debug)]
pub struct Image<'a> {
    pub names: &'a [&'a str],
    pub start: Start<'a>,
    pub layers: &'a [&'a Layer],
}

/// The default command of a container.
#[derive(Debug, Default)]
pub struct Start<'a> {
    pub entrypoint: &'a [&'a str],
    /// Replaced by a pod's `args`.
    pub cmd: &'a [&'a str],
    pub user: &'a str,
}

/// Builds missing images; returns their archives.
pub fn ensure() -> anyhow::Result<Vec<PathBuf>> {
    let dir = project::target().join("testbed/images");
    fs::create_dir_all(&dir)?;
    let pause = dir.join("pause.tar");
    let busybox = dir.join("busybox.tar");
    if !newer(&pause, &[&pause_source()]) {
        step("making the pause image", || {
            let layer = LayerBuilder::default().file("pause", &pause_program(&dir)?, 0o755)?.finish()?;
            let start = Start { entrypoint: &["/pause"], ..Start::default() };
            write(&pause, &[Image { names: &PAUSE_NAMES, start, layers: &[&layer] }])
        })?;
    }
    if !newer(&busybox, &[Path::new("/bin/busybox")]) {
        step("making the busybox image", || busybox_named(BUSYBOX, &busybox))?;
    }
    Ok(vec![pause, busybox])
}

/// Busybox under another name: for tests in which an image arrives late.
pub fn busybox_named(name: &str, path: &Path) -> anyhow::Result<()> {
    let layer = busybox_layer(Path::new("/bin/busybox"))?;
    let start = Start { cmd: &["sh"], ..Start::default() };
    write(path, &[Image { names: &[name], start, layers: &[&layer] }])
}

/// Writes all of `images` into one archive atomically.
pub fn write(path: &Path, images: &[Image<'_>]) -> anyhow::Result<()> {
    let partial = path.with_extension(format!("partial.{}", std::process::id()));
    archive(fs::File::create(&partial)?, images)?.flush()?;
    fs::rename(&partial, path)?;
    Ok(())
}

fn archive<W: Write>(to: W, images: &[Image<'_>]) -> anyhow::Result<W> {
    let configs = images.iter().map(config).collect::<anyhow::Result<Vec<_>>>()?;
    let config_name = |config: &[u8]| format!("{}.json", hex(config));
    let manifest: Vec<_> = images
        .iter()
        .zip(&configs)
        .map(|(image, config)| {
            let layers: Vec<_> = image.layers.iter().map(|layer| layer.name()).collect();
            json!({ "Config": config_name(config), "RepoTags": image.names, "Layers": layers })
        })
        .collect();
    let mut tar = tar::Builder::new(to);
    append(&mut tar, "manifest.json", &serde_json::to_vec(&manifest)?, 0o644)?;
    for config in &configs {
        append(&mut tar, &config_name(config), config, 0o644)?;
    }
    let layers: BTreeMap<_, _> =
        images.iter().flat_map(|image| image.layers).map(|layer| (layer.name(), layer)).collect();
    for (name, layer) in layers {
        match &layer.content {
            Content::Memory(bytes) => append(&mut tar, &name, bytes, 0o644)?,
            Content::File(path) => {
                let mut header = header(tar::EntryType::Regular, path.metadata()?.len(), 0o644);
                tar.append_data(&mut header, &name, fs::File::open(path)?)?;
            }
        }
    }
    Ok(tar.into_inner()?)
}

/// The configuration of an image, which its ID is the digest of.
pub fn config(image: &Image<'_>) -> anyhow::Result<Vec<u8>> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let digests: Vec<_> = image.layers.iter().map(|layer| format!("sha256:{}", layer.digest)).collect();
    Ok(serde_json::to_vec(&json!({
        "architecture": architecture,
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": image.start.entrypoint,
            "Cmd": image.start.cmd,
            "User": image.start.user,
        },
        "rootfs": { "type": "layers", "diff_ids": digests },
    }))?)
}

/// A tar of files, identified by its digest.
pub struct Layer {
    digest: String,
    content: Content,
}

enum Content {
    Memory(Vec<u8>),
    /// For layers too large for memory.
    File(PathBuf),
}

impl fmt::Debug for Layer {
    /// Without the content, which may be large.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer").field("digest", &self.digest).finish_non_exhaustive()
    }
}

impl Layer {
    /// A layer that lies on disk already.
    pub fn of_file(path: &Path) -> anyhow::Result<Self> {
        let mut hash = Sha256::new();
        let mut file = fs::File::open(path).with_context(|| format!("read {}", path.display()))?;
        let mut block = vec![0; 1 << 20];
        loop {
            let length = file.read(&mut block)?;
            if length == 0 {
                break;
            }
            hash.update(&block[..length]);
        }
        Ok(Layer { digest: text(&hash.finalize()), content: Content::File(path.to_owned()) })
    }

    /// The tar itself.
    pub fn content(&self) -> anyhow::Result<Vec<u8>> {
        match &self.content {
            Content::Memory(bytes) => Ok(bytes.clone()),
            Content::File(path) => fs::read(path).with_context(|| format!("read {}", path.display())),
        }
    }

    fn name(&self) -> String {
        format!("{}/layer.tar", self.digest)
    }
}

/// A layer under construction.
pub struct LayerBuilder(tar::Builder<Vec<u8>>);

impl fmt::Debug for LayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerBuilder").finish_non_exhaustive()
    }
}

impl Default for LayerBuilder {
    fn default() -> Self {
        LayerBuilder(tar::Builder::new(Vec::new()))
    }
}

impl LayerBuilder {
    pub fn file(mut self, name: &str, content: &[u8], mode: u32) -> anyhow::Result<Self> {
        append(&mut self.0, name, content, mode)?;
        Ok(self)
    }

    pub fn dir(mut self, name: &str, mode: u32) -> anyhow::Result<Self> {
        let mut header = header(tar::EntryType::Directory, 0, mode);
        self.0.append_data(&mut header, format!("{name}/"), std::io::empty())?;
        Ok(self)
    }

    pub fn link(mut self, name: &str, target: &str) -> anyhow::Result<Self> {
        let mut header = header(tar::EntryType::Symlink, 0, 0o777);
        self.0.append_link(&mut header, name, target)?;
        Ok(self)
    }

    pub fn finish(self) -> anyhow::Result<Layer> {
        let bytes = self.0.into_inner()?;
        Ok(Layer { digest: hex(&bytes), content: Content::Memory(bytes) })
    }
}

/// A static busybox with a link for each of its tools.
pub fn busybox_layer(busybox: &Path) -> anyhow::Result<Layer> {
    let program = fs::read(busybox).with_context(|| format!("read {}", busybox.display()))?;
    let applets = output(&mut command(busybox, ["--list"]), SHORT)?;
    let passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n";
    let mut layer = LayerBuilder::default()
        .dir("bin", 0o755)?
        .dir("etc", 0o755)?
        .dir("home", 0o755)?
        .dir("root", 0o700)?
        .dir("tmp", 0o1777)?
        .dir("var", 0o755)?
        .file("etc/passwd", passwd.as_bytes(), 0o644)?
        .file("etc/group", b"root:x:0:\nnogroup:x:65534:\n", 0o644)?
        .file("bin/busybox", &program, 0o755)?;
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        layer = layer.link(&format!("bin/{applet}"), "busybox")?;
    }
    layer.finish()
}

/// Programs of this machine, in `/usr/local/bin`, with the libraries they need at the paths the loader looks for.
pub fn programs_layer(programs: &[&Path]) -> anyhow::Result<Layer> {
    let mut layer = LayerBuilder::default();
    let mut libraries = BTreeSet::new();
    for program in programs {
        let name = program.file_name().and_then(|name| name.to_str()).context("a program has a name")?;
        let content = fs::read(program).with_context(|| format!("read {}", program.display()))?;
        layer = layer.file(&format!("usr/local/bin/{name}"), &content, 0o755)?;
        let needed = output(&mut command("ldd", [program]), SHORT)?;
        libraries.extend(library_paths(&needed).map(str::to_owned));
    }
    for library in libraries {
        let content = fs::read(&library).with_context(|| format!("read {library}"))?;
        layer = layer.file(library.trim_start_matches('/'), &content, 0o755)?;
    }
    layer.finish()
}

/// The paths in what `ldd` prints: `name => /path (address)`, and for the loader `/path (address)`.
fn library_paths(ldd: &str) -> impl Iterator<Item = &str> {
    ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
}

fn pause_source() -> PathBuf {
    project::root().join("testbed/pause.rs")
}

/// Static, so that it runs in an otherwise empty image.
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

/// Whether it is newer than all its inputs.
pub fn newer(made: &Path, sources: &[&Path]) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
    let Some(made) = modified(made) else { return false };
    sources.iter().all(|source| modified(source).is_some_and(|source| source <= made))
}

fn append<W: Write>(tar: &mut tar::Builder<W>, name: &str, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let mut header = header(tar::EntryType::Regular, content.len() as u64, mode);
    tar.append_data(&mut header, name, content)?;
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

/// As registries name content.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(bytes))
}

fn hex(bytes: &[u8]) -> String {
    text(&Sha256::digest(bytes))
}

fn text(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_archive_is_content_addressed_and_shares_layers() {
        let base = LayerBuilder::default().file("pause", b"program", 0o755).unwrap().finish().unwrap();
        let top = LayerBuilder::default().dir("tmp", 0o1777).unwrap().finish().unwrap();
        let low = Image { names: &["a/b:1"], start: Start::default(), layers: &[&base] };
        let high = Image { names: &["a/c:1"], start: Start::default(), layers: &[&base, &top] };
        let bytes = archive(Vec::new(), &[low, high]).unwrap();
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
        assert_eq!(manifest[0]["RepoTags"], json!(["a/b:1"]));
        assert_eq!(manifest[1]["Layers"], json!([base.name(), top.name()]));
        let config = |index: usize| manifest[index]["Config"].as_str().unwrap().to_owned();
        let mut expected = vec!["manifest.json".to_owned(), config(0), config(1), base.name(), top.name()];
        expected[3..].sort();
        assert_eq!(names, expected);
    }

    #[test]
    fn library_paths_leave_out_what_the_kernel_brings() {
        let ldd = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        let paths: Vec<_> = library_paths(ldd).collect();
        assert_eq!(paths, ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
    }

    #[test]
    fn a_layer_has_one_digest_in_memory_and_on_disk() {
        let layer = LayerBuilder::default().dir("tmp", 0o1777).unwrap().finish().unwrap();
        let Content::Memory(bytes) = &layer.content else { panic!("built in memory") };
        let path = std::env::temp_dir().join(format!("layer-{}.tar", std::process::id()));
        fs::write(&path, bytes).unwrap();
        let on_disk = Layer::of_file(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(on_disk.digest, layer.digest);
    }
}
