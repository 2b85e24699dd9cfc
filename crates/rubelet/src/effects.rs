//! Effects: the only I/O on behalf of pods.

pub mod directories;
pub mod volume;
