//! Which pods did a source add, change or take away?
//!
//! Upstream: `config/config.go` (PodConfig mux, sourcesReady).
