//! The API server: what the agent needs of it, and the client that gets it.

#![warn(unreachable_pub)]

pub mod calls;
pub mod client;
mod clock;
pub mod kubeconfig;
pub mod port;
pub mod reflector;

pub use client::error_chain;
