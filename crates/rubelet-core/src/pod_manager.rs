//! The pods somebody wants here, static and mirror pods told apart.
//!
//! Upstream: `pod/pod_manager.go`.
