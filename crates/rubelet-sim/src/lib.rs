//! The simulator: the real agent over fakes, in virtual time, with seeded faults.
//!
//! Owns: a fake container runtime, API server, host and CSI drivers (`runtime`, `api`, `host`, `csi`), the faults (`faults`),
//! the rules (`invariants`), and the plays that use them (`play`, `swarm`).
//! One seed is one run: one generator, tokio's paused clock, ordered maps, one thread.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), expect(dead_code, reason = "scenarios, which are tests, use more of a play than seeds do"))]

mod agent;
mod api;
mod churn;
mod csi;
mod devices;
mod disk;
mod faults;
mod host;
mod invariants;
mod memory;
mod play;
mod runtime;
mod script;
mod simulation;
mod swarm;
mod trace;

pub use churn::{Churn, Figures};
pub use play::Failure;
pub use swarm::{PlayResult, play_out};

#[cfg(test)]
mod scenarios;
