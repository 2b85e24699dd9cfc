//! CRI: the messages, the `ContainerRuntime` port and its gRPC client.
//!
//! Owns: the wire format. Never: decides; parses nothing beyond gRPC.
//! `proto/*.proto` are ours, with the numbers of cri-api v1 and of containerd's API; `cargo xtask gen` turns them into
//! `src/generated/`.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

/// CRI v1 messages (protobuf package `runtime.v1`).
#[allow(clippy::all, clippy::unwrap_used, clippy::wildcard_imports, missing_debug_implementations)]
#[rustfmt::skip]
pub mod v1 {
    include!("generated/runtime.v1.rs");
}
/// Messages of containerd's own API (protobuf package `containerd.services.tasks.v1`).
#[cfg(feature = "client")]
#[allow(clippy::all, clippy::unwrap_used, clippy::wildcard_imports, missing_debug_implementations, unreachable_pub)]
#[rustfmt::skip]
mod tasks {
    include!("generated/containerd.services.tasks.v1.rs");
}
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "client")]
pub mod port;

impl std::fmt::Debug for v1::AuthConfig {
    /// Shows that there are credentials, never which.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthConfig").field("server_address", &self.server_address).finish_non_exhaustive()
    }
}
