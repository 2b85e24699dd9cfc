//! Which image may be pulled now?
//!
//! Owns: pull policies, the queue of pulls, registry QPS, back-off per pod and image.
//! Upstream: `images/image_manager.go`, `images/puller.go`.
