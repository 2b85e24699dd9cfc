//! The API server: the port the agent uses, and its client.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod calls;
pub mod client;
mod clock;
#[doc(hidden)]
pub mod fuzzing;
pub mod kubeconfig;
pub mod port;
pub mod reflector;

pub use client::error_chain;
