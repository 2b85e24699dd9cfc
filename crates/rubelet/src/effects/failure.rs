//! From a failed call to an effect's error.
//!
//! Owns: which failures mean that the runtime is away, and that nothing was there to fail on. Never: looks at texts.

use rubelet_core::{
    container::ConfigError,
    effect::{EffectError, ErrorKind, Reason},
};
use rubelet_cri::port::{RpcError, RpcErrorKind, RpcResult};

use super::Recalled;

/// The step failed for this reason, unless the runtime does not answer at all.
pub fn step(error: &RpcError, reason: Reason) -> EffectError {
    of(error, ErrorKind::Reject(reason), error.message.clone())
}

/// Try again, unless the runtime does not answer at all.
pub fn retry(error: &RpcError) -> EffectError {
    of(error, ErrorKind::Retry, error.grpc_text())
}

pub fn config(error: ConfigError, reason: Reason) -> EffectError {
    EffectError { kind: ErrorKind::Reject(reason), message: error.0 }
}

/// A file or directory could not be made: the disk may have room again later.
pub fn io(what: &str, error: &std::io::Error) -> EffectError {
    EffectError { kind: ErrorKind::Retry, message: format!("{what}: {error}") }
}

/// Ends an effect that was recalled before it begins another step.
pub fn unless(recalled: &Recalled) -> Result<(), EffectError> {
    if recalled.is_cancelled() {
        return Err(EffectError { kind: ErrorKind::Retry, message: "the pod is to end".to_owned() });
    }
    Ok(())
}

/// What is not there needs no stopping and no removing.
pub fn gone_is_done(result: RpcResult<()>) -> Result<(), EffectError> {
    match result {
        Err(error) if error.kind != RpcErrorKind::NotFound => Err(retry(&error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn of(error: &RpcError, kind: ErrorKind, message: String) -> EffectError {
    match error.kind {
        RpcErrorKind::Unavailable => EffectError { kind: ErrorKind::Unavailable, message: error.to_string() },
        RpcErrorKind::DeadlineExceeded => EffectError { kind: ErrorKind::TimedOut, message: error.to_string() },
        RpcErrorKind::NotFound
        | RpcErrorKind::AlreadyExists
        | RpcErrorKind::Unimplemented
        | RpcErrorKind::InvalidArgument
        | RpcErrorKind::Other => EffectError { kind, message },
    }
}
