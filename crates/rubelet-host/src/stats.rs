//! Kernel statistics of cgroups, processes, networks and file systems.
//!
//! Owns: reading and parsing them. Never: stores or aggregates them, or calls a runtime. Missing values are `None`: a node
//! may lack a controller, and a cgroup may be removed between being listed and being read.
//! Upstream: cAdvisor's `container/libcontainer`, `github.com/opencontainers/cgroups`, `pkg/volume` `MetricsDu`, `MetricsStatFS`.

pub mod cgroup;
pub mod disk;
pub mod partition;
pub mod process;
mod text;
pub mod tree;

pub use text::Reader;
