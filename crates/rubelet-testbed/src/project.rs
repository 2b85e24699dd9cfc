//! Paths of the project, and its cargo.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::Command,
};

use crate::command::command;

/// The root of the work tree.
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).expect("this crate lies in `crates/` of the project").to_owned()
}

/// Where cargo puts what it builds.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The cargo that runs this program, so that its toolchain is used throughout. Variables of our own package are removed:
/// ring's build script reads them, so that builds from here and from a shell would invalidate each other.
pub fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut cargo = command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), args);
    for (name, _) in std::env::vars_os() {
        let name_bytes = name.as_encoded_bytes();
        if name_bytes.starts_with(b"CARGO_PKG_") || name_bytes.starts_with(b"CARGO_MANIFEST_") {
            cargo.env_remove(name);
        }
    }
    cargo
}
