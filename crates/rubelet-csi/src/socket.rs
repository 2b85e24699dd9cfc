//! One call on a connection of its own.
//!
//! Owns: dialling a unix socket, the deadline of dialling and call together. Never: keeps a connection; a driver that was
//! replaced behind its path is reached by the next call.
//! Upstream: `csi.newGrpcConn`, `pluginmanager/operationexecutor.dial`.

use std::{io, path::Path, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint},
};

use crate::{Code, CsiError, CsiResult};

/// Of one response. It is gRPC's default, and a driver's answers are a few hundred bytes.
pub(crate) const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Added to the deadline in the request's header. The deadline itself is enforced here; with the same one the driver would
/// end the call at the same moment, with a code of its own.
const DRIVER_DEADLINE_MARGIN: Duration = Duration::from_secs(1);

/// Dials, sends, waits for the response, all within `timeout`.
pub(crate) async fn call<Ask, Answer, Call>(
    socket: &Path,
    timeout: Duration,
    message: Ask,
    send: impl FnOnce(Channel, Request<Ask>) -> Call,
) -> CsiResult<Answer>
where
    Call: Future<Output = Result<Response<Answer>, Status>>,
{
    let answer = async {
        let channel = dial(socket).await?;
        let mut request = Request::new(message);
        request.set_timeout(timeout.saturating_add(DRIVER_DEADLINE_MARGIN));
        Ok(send(channel, request).await?.into_inner())
    };
    let elapsed = |_| CsiError::new(Code::DeadlineExceeded, "context deadline exceeded");
    tokio::time::timeout(timeout, answer).await.map_err(elapsed)?
}

async fn dial(socket: &Path) -> CsiResult<Channel> {
    let stream = UnixStream::connect(socket).await.map_err(|error| dial_error(socket, &error))?;
    let mut stream = Some(TokioIo::new(stream));
    // Taken once: a connection that broke is not made again within a call.
    let connector = tower::service_fn(move |_uri| {
        let stream = stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
        async move { stream }
    });
    // The authority, which some servers check; upstream's is the same.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint
        .connect_with_connector(connector)
        .await
        .map_err(|error| CsiError::new(Code::Unavailable, format!("connection error: desc = \"transport: {error}\"")))
}

/// In the words of Go's gRPC.
fn dial_error(socket: &Path, error: &io::Error) -> CsiError {
    let cause = match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    };
    let dialing = format!("dial unix {}: connect: {cause}", socket.display());
    CsiError::new(Code::Unavailable, format!("connection error: desc = \"transport: Error while dialing: {dialing}\""))
}
