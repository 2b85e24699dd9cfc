//! CSI: the port to plugins (registration, Node service), its client over gRPC, and the list of registered drivers.
//!
//! Owns: the wire format. Never: decides, retries, mounts.
//! `proto/*.proto` are ours, with the numbers of CSI v1 and of pluginregistration v1; `cargo xtask gen` turns them into
//! `src/generated/`.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod client;
mod drivers;
mod error;
pub mod port;
mod redacted;
mod request;
mod socket;
#[cfg(test)]
mod tests;

/// CSI v1 messages (protobuf package `csi.v1`).
#[allow(clippy::all, clippy::unwrap_used, clippy::wildcard_imports, missing_debug_implementations)]
#[rustfmt::skip]
pub mod v1 {
    include!("generated/csi.v1.rs");
}
/// Messages of plugin registration (protobuf package `pluginregistration`).
#[allow(clippy::all, clippy::unwrap_used, clippy::wildcard_imports, missing_debug_implementations)]
#[rustfmt::skip]
pub mod pluginregistration {
    include!("generated/pluginregistration.rs");
}

pub use client::{CALL_TIMEOUT, CsiClient};
pub use drivers::{Client, Drivers};
pub use error::{Code, CsiError, CsiResult};
pub use port::{CsiPlugins, DriverAddress, NodeCapabilities, NodeInfo, VolumeCondition, VolumeStats, VolumeUsage};
pub use redacted::Secrets;
pub use request::{AccessMode, AccessType, ExpandVolume, PublishVolume, StageVolume, VolumeAccess};
