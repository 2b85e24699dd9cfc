//! The simulator: the real agent over fakes, in virtual time, with seeded faults.
//!
//! Owns: a fake container runtime, API server and host (`runtime`, `api`, `host`), the faults (`faults`),
//! the rules (`invariants`), and the plays that use them (`play`, `swarm`).
//! One seed is one run: one generator, tokio's paused clock, ordered maps, one thread.

pub mod agent;
pub mod api;
pub mod devices;
pub mod disk;
pub mod faults;
pub mod host;
pub mod invariants;
pub mod play;
pub mod runtime;
pub mod script;
pub mod simulation;
pub mod swarm;
pub mod trace;

#[cfg(test)]
mod scenarios;
