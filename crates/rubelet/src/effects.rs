//! Effects: the only I/O on behalf of pods.

pub mod container;
pub mod directories;
mod failure;
pub mod image;
pub mod sandbox;
pub mod volume;
