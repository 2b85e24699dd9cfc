//! The agent: all state, and the routing of each event to the code that decides about it.
//!
//! Owns: the one `match` over `Event`. Never: I/O, clocks, decisions of its own.
//! Upstream: `Kubelet` as `SyncHandler` (HandlePodAdditions / Updates / Removes / Reconcile / Syncs / Cleanups).
