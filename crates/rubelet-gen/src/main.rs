//! `cargo xtask gen`: turns our `.proto` files into Rust, which is committed.
//!
//! Owns: the generator's options. The daemon's build needs neither protoc nor a build script.

use std::{path::Path, process::ExitCode};

use anyhow::Context as _;
use tonic_prost_build::Builder;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("error: {err:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let cri = tonic_prost_build::configure()
        .build_server(false)
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        // prost would print passwords; `lib.rs` has a Debug that does not.
        .skip_debug(["runtime.v1.AuthConfig"]);
    generate("rubelet-cri", &["cri.proto", "containerd.proto"], cri)?;
    let csi = tonic_prost_build::configure()
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        // prost would print secrets and tokens; `redacted.rs` has a Debug that does not.
        .skip_debug([
            "csi.v1.NodeStageVolumeRequest",
            "csi.v1.NodePublishVolumeRequest",
            "csi.v1.NodeExpandVolumeRequest",
        ]);
    generate("rubelet-csi", &["csi.proto", "pluginregistration.proto"], csi)
}

fn generate(crate_name: &str, protos: &[&str], options: Builder) -> anyhow::Result<()> {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(crate_name);
    let proto_dir = crate_dir.join("proto");
    let sources = protos.iter().map(|name| proto_dir.join(name));
    let files = protox::compile(sources, [&proto_dir]).context("compile our .proto files")?;
    options
        .build_transport(false)
        // Deterministic encoding, and the simulator's traces are compared byte for byte.
        .btree_map(".")
        .out_dir(crate_dir.join("src/generated"))
        .compile_fds(files)
        .with_context(|| format!("generate the messages of {crate_name}"))
}
