//! Maps a failed call to an effect's error.
//!
//! Owns: which failures mean that the runtime is down, and which that the object does not exist. Never: inspects texts.

use std::{error::Error, fmt, path::Path};

use rubelet_core::{
    container::ConfigError,
    effect::{EffectError, ErrorKind, Reason},
};
use rubelet_cri::port::{RpcError, RpcErrorKind, RpcResult};
use rubelet_host::lanes::is_late;
use rubelet_kube::error_chain;

use super::Recalled;

/// The step failed for this reason, unless the runtime is down.
pub(super) fn step(error: &RpcError, reason: Reason) -> EffectError {
    of(error, ErrorKind::Reject(reason), error.description())
}

/// Retryable, unless the runtime is down.
pub(super) fn retry(error: &RpcError) -> EffectError {
    of(error, ErrorKind::Retry, error.grpc_text())
}

pub(super) fn config(error: ConfigError, reason: Reason) -> EffectError {
    EffectError { kind: ErrorKind::Reject(reason), message: error.0 }
}

/// A file system error: there may be space later, or the file system may answer.
pub(super) fn io(what: &str, path: &Path, error: &(dyn Error + 'static)) -> EffectError {
    caused(ErrorKind::Retry, format_args!("{what} {}", path.display()), error)
}

/// The text of the error with all its causes: the core and the user get nothing else.
pub(super) fn caused(kind: ErrorKind, what: impl fmt::Display, error: &(dyn Error + 'static)) -> EffectError {
    let kind = if kind == ErrorKind::Retry && is_late(error) { ErrorKind::FileSystemLate } else { kind };
    EffectError { kind, message: format!("{what}: {}", error_chain(error)) }
}

/// It may work later, without a change by a user.
pub(super) fn retryable(message: String) -> EffectError {
    EffectError { kind: ErrorKind::Retry, message }
}

pub(super) fn refused(message: String) -> EffectError {
    EffectError { kind: ErrorKind::Refused, message }
}

/// Ends a recalled effect before its next step.
pub(super) fn unless(recalled: &Recalled) -> Result<(), EffectError> {
    if recalled.is_cancelled() {
        return Err(retryable("pod is terminating".to_owned()));
    }
    Ok(())
}

/// A missing object needs no stop and no removal.
pub(super) fn gone_is_done(result: RpcResult<()>) -> Result<(), EffectError> {
    match result {
        Err(error) if error.kind != RpcErrorKind::NotFound => Err(retry(&error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn of(error: &RpcError, kind: ErrorKind, message: String) -> EffectError {
    match error.kind {
        RpcErrorKind::Unavailable => EffectError { kind: ErrorKind::Unavailable, message: error_chain(error) },
        RpcErrorKind::DeadlineExceeded => EffectError { kind: ErrorKind::TimedOut, message: error_chain(error) },
        RpcErrorKind::NotFound
        | RpcErrorKind::AlreadyExists
        | RpcErrorKind::Unimplemented
        | RpcErrorKind::InvalidArgument
        | RpcErrorKind::FailedPrecondition
        | RpcErrorKind::Other => EffectError { kind, message },
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use rubelet_host::{lanes::DeviceLate, port::ReadError};

    use super::*;

    #[test]
    fn late_file_system_is_a_kind_of_its_own_unless_the_step_has_another() {
        let late = || DeviceLate { point: "/mnt".into(), fs_type: "nfs4".to_owned(), source: "server:/a".to_owned() };
        let late_io = io::Error::from(late());
        let late_read = ReadError::Io(late().into());
        let other = io::Error::from(io::ErrorKind::TimedOut);
        let kind = |error: &(dyn Error + 'static)| io("read", Path::new("/mnt/a"), error).kind;
        assert_eq!(
            [kind(&late_io), kind(&late_read), kind(&other)],
            [ErrorKind::FileSystemLate, ErrorKind::FileSystemLate, ErrorKind::Retry]
        );
        assert_eq!(caused(ErrorKind::Refused, "it is", &late_io).kind, ErrorKind::Refused);
        assert_eq!(
            io("read", Path::new("/mnt/a"), &late_io).message,
            "read /mnt/a: the file system at /mnt (nfs4, server:/a) has not answered for over 10 s"
        );
    }
}
