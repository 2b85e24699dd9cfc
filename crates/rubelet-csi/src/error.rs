//! Why a call to a driver failed.
//!
//! Owns: the codes and their names in Go, and which of them leave the outcome open. Never: retries.
//! Upstream: `csi.isFinalError`, `google.golang.org/grpc/codes`.

use std::{error::Error, fmt};

use tonic::Status;

pub type CsiResult<T> = Result<T, CsiError>;

/// Shown as Go's gRPC prints it, which is what users see in upstream's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsiError {
    /// `None`: no call was made.
    pub code: Option<Code>,
    pub message: String,
}

/// A gRPC status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Canceled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl CsiError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        CsiError { code: Some(code), message: message.into() }
    }

    /// An error before any call.
    pub fn without_call(message: impl Into<String>) -> Self {
        CsiError { code: None, message: message.into() }
    }

    /// The driver may have done what it was asked for, or may still do it. Every other error is final.
    pub fn is_uncertain(&self) -> bool {
        match self.code {
            Some(
                Code::Canceled | Code::DeadlineExceeded | Code::Unavailable | Code::ResourceExhausted | Code::Aborted,
            ) => true,
            Some(
                Code::Unknown
                | Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::PermissionDenied
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::Unimplemented
                | Code::Internal
                | Code::DataLoss
                | Code::Unauthenticated,
            )
            | None => false,
        }
    }
}

impl fmt::Display for CsiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "rpc error: code = {} desc = {}", code.name(), self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl Error for CsiError {}

impl From<Status> for CsiError {
    fn from(status: Status) -> Self {
        // A status with a source was made here: the connection broke during the call. Go's gRPC calls that Unavailable.
        match status.source() {
            Some(cause) => CsiError::new(Code::Unavailable, format!("{}: {}", status.message(), innermost(cause))),
            None => CsiError::new(Code::from(status.code()), status.message()),
        }
    }
}

/// The layers between repeat the status's message.
fn innermost<'a>(mut error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    while let Some(cause) = error.source() {
        error = cause;
    }
    error
}

impl Code {
    /// As Go prints it.
    pub fn name(self) -> &'static str {
        match self {
            Code::Canceled => "Canceled",
            Code::Unknown => "Unknown",
            Code::InvalidArgument => "InvalidArgument",
            Code::DeadlineExceeded => "DeadlineExceeded",
            Code::NotFound => "NotFound",
            Code::AlreadyExists => "AlreadyExists",
            Code::PermissionDenied => "PermissionDenied",
            Code::ResourceExhausted => "ResourceExhausted",
            Code::FailedPrecondition => "FailedPrecondition",
            Code::Aborted => "Aborted",
            Code::OutOfRange => "OutOfRange",
            Code::Unimplemented => "Unimplemented",
            Code::Internal => "Internal",
            Code::Unavailable => "Unavailable",
            Code::DataLoss => "DataLoss",
            Code::Unauthenticated => "Unauthenticated",
        }
    }
}

impl From<tonic::Code> for Code {
    fn from(code: tonic::Code) -> Self {
        match code {
            tonic::Code::Cancelled => Code::Canceled,
            // A failed call whose status is OK broke the protocol.
            tonic::Code::Unknown | tonic::Code::Ok => Code::Unknown,
            tonic::Code::InvalidArgument => Code::InvalidArgument,
            tonic::Code::DeadlineExceeded => Code::DeadlineExceeded,
            tonic::Code::NotFound => Code::NotFound,
            tonic::Code::AlreadyExists => Code::AlreadyExists,
            tonic::Code::PermissionDenied => Code::PermissionDenied,
            tonic::Code::ResourceExhausted => Code::ResourceExhausted,
            tonic::Code::FailedPrecondition => Code::FailedPrecondition,
            tonic::Code::Aborted => Code::Aborted,
            tonic::Code::OutOfRange => Code::OutOfRange,
            tonic::Code::Unimplemented => Code::Unimplemented,
            tonic::Code::Internal => Code::Internal,
            tonic::Code::Unavailable => Code::Unavailable,
            tonic::Code::DataLoss => Code::DataLoss,
            tonic::Code::Unauthenticated => Code::Unauthenticated,
        }
    }
}
