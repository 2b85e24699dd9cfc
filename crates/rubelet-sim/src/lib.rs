//! The second world: the real agent over fakes, in virtual time, with seeded faults.
//!
//! Owns: a container runtime, an API server and a host that behave as the real ones do (`runtime`, `api`, `host`), what can go wrong (`faults`),
//! what must never be (`invariants`), and how to tell a story with them (`play`, `swarm`).
//! One seed is one run: one generator, tokio's paused clock, ordered maps, one thread.

pub mod agent;
pub mod api;
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
