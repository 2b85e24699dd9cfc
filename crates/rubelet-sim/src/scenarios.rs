//! Named plays over the real agent; the rules of `invariants.rs` hold in all of them.

mod agent_death;
mod api;
mod api_trouble;
mod churn;
mod csi;
mod devices;
mod edits;
mod eviction;
mod host_trouble;
mod images;
mod life;
mod logs;
mod manifests;
mod preemption;
mod probes;
mod restarts;
mod runtime_trouble;
mod shutdown;
mod sidecars;
mod stops;
mod swarm;
