//! Which dead containers and sandboxes may go?
//!
//! Owns: upstream's container garbage collection rules. Never: removes anything itself.
//! Upstream: `kuberuntime_gc.go`, `pod_container_deletor.go`.
