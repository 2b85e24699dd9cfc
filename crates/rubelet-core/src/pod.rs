//! One pod's life, from first sight to its last trace.
//!
//! Upstream: `pod_workers.go`.

pub mod restart_policy;
pub mod status;
