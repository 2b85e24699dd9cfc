//! What the API should say about a pod, computed from facts alone.
//!
//! Upstream: `kubelet_pods.go` (generateAPIPodStatus, getPhase), `status/generate.go`, `reason_cache.go`.
