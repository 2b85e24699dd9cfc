//! Figures the kernel keeps of cgroups, processes, networks and file systems.
//!
//! Owns: reading and parsing them. Never: keeps one, adds two up, or asks a runtime. What is not there reads as `None`: a node
//! may lack a controller, and a cgroup may go between being listed and being read.
//! Upstream: cAdvisor's `container/libcontainer`, `github.com/opencontainers/cgroups`, `pkg/volume` `MetricsDu`, `MetricsStatFS`.

pub mod cgroup;
pub mod disk;
pub mod partition;
pub mod process;
mod text;

pub use text::Reader;
