//! Looking at the runtime: relist, inspection of one pod, container events.
//!
//! Upstream: PLEG.
