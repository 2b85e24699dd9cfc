//! The shell around the pure core: sources, observation, effects, servers, and the loop that ties them together.
//!
//! A library, so that the simulator runs the same loop over its simulated world.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod certs;
pub mod cli;
mod data_dirs;
pub mod effects;
mod event_log;
#[cfg(test)]
mod fake_api;
#[doc(hidden)]
pub mod fuzzing;
pub mod logging;
mod metrics;
pub mod node;
mod notify;
pub mod objects;
pub mod observe;
mod plugins;
mod process;
mod recorder;
pub mod run;
mod server;
mod shutdown;
pub mod sources;
pub mod start;
mod stats;
pub mod sync_loop;
pub mod world;
mod yaml;
