//! Which status does the API server need to hear, and when may a pod be deleted there?
//!
//! Upstream: `status/status_manager.go`.
