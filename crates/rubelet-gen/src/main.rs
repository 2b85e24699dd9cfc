//! `cargo xtask gen`: turns our `.proto` files into Rust, which is committed.
//!
//! Owns: the generator's options. The daemon's build needs neither protoc nor a build script.

use std::{path::Path, process::ExitCode};

use anyhow::Context as _;

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
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../rubelet-cri");
    let proto_dir = crate_dir.join("proto");
    let sources = ["cri.proto", "containerd.proto"].map(|name| proto_dir.join(name));
    let files = protox::compile(sources, [&proto_dir]).context("compile our .proto files")?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        // Deterministic encoding, and the simulator's traces are compared byte for byte.
        .btree_map(".")
        // prost would print passwords; `lib.rs` has a Debug that does not.
        .skip_debug(["runtime.v1.AuthConfig"])
        .out_dir(crate_dir.join("src/generated"))
        .compile_fds(files)
        .context("generate the messages")
}
