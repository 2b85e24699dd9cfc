//! The API server: what the agent needs of it, and the client that gets it.

pub mod calls;
pub mod port;
pub mod reflector;
