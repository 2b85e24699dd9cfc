//! Resource usage of the node and its pods: `/stats/summary`, `/metrics/resource`, `/metrics/cadvisor`.
//!
//! Owns: sampling, and the documents made of a sample. Files are read only on request: there is no housekeeping per container,
//! and concurrent requests share a sample.
//! Upstream: `pkg/kubelet/stats`, `pkg/kubelet/server/stats`, `metrics/collectors/resource_metrics.go`, cAdvisor.

pub(crate) mod cadvisor;
pub(crate) mod disk;
#[cfg(test)]
pub(crate) mod example;
mod exposition;
mod measure;
pub(crate) mod persistent_meter;
pub(crate) mod pod_disk;
mod rates;
pub(crate) mod resource_metrics;
pub(crate) mod sample;
pub(crate) mod sandbox_images;
pub(crate) mod summary;
pub(crate) mod targets;
pub(crate) mod volume_meter;
