//! The node: files, mounts, cgroups, watches, HTTP fetches, checks of containers.
//!
//! Owns: the `Host` port and its Linux implementation. The simulator has the second implementation.
//! Never: decides anything about pods.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod cgroup;
mod check;
mod fetch;
pub mod fs;
#[doc(hidden)]
pub mod fuzzing;
pub mod kernel_log;
pub mod lanes;
pub mod linux;
pub mod logind;
mod loop_device;
pub mod memory_events;
pub mod mount;
mod names;
pub mod port;
mod program;
pub mod stats;
mod systemd;
#[cfg(test)]
mod testing;
pub mod threads;
pub mod watch;
mod write_watch;

pub use cgroup::update_cgroup;
pub use check::address;
