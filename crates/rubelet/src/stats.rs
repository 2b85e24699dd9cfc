//! What the node and its pods use, for whoever asks: `/stats/summary`, `/metrics/resource`, `/metrics/cadvisor`.
//!
//! Owns: the one place that samples, and the documents made of a sample. Nothing is read while nobody asks: there is no
//! housekeeping per container, and askers at the same moment share a sample.
//! Upstream: `pkg/kubelet/stats`, `pkg/kubelet/server/stats`, `metrics/collectors/resource_metrics.go`, cAdvisor.

pub mod cadvisor;
pub mod disk;
#[cfg(test)]
pub(crate) mod example;
mod exposition;
mod measure;
mod rates;
pub mod resource_metrics;
pub mod sample;
pub mod sandbox_images;
pub mod summary;
pub mod targets;
