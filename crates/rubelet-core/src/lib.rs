//! The pure core of Rubelet: what should a node agent do next?
//!
//! Owns: every decision. Never: awaits, reads a clock, a file, a socket or a global, takes a lock.
//! `Agent::handle(now, Event) -> Vec<Effect>` is the whole interface to the outside; start reading at `agent.rs`.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod admission;
pub mod agent;
pub mod api_pod;
pub mod api_requests;
pub mod cgroups;
pub mod config;
pub mod container;
pub mod csi_node;
pub mod downward_api;
pub mod effect;
pub mod event;
pub mod event_reasons;
pub mod eviction;
pub mod explain;
pub mod flights;
pub mod fnv;
pub mod gc;
pub mod id;
pub mod image_gc;
pub mod images;
pub mod log_rotation;
pub mod manifest;
pub mod needs;
pub mod node;
pub mod node_allocatable;
pub mod node_object;
pub mod node_status;
pub mod objects;
pub mod observation;
pub mod op;
pub mod pod;
pub mod pod_config;
pub mod pod_manager;
pub mod pod_resources;
pub mod preemption;
pub mod probes;
pub mod qos;
pub mod quantity;
pub mod settings;
pub mod shutdown;
pub mod snapshot;
pub mod status_manager;
#[cfg(test)]
pub mod test_support;
pub mod time;
pub mod volumes;
