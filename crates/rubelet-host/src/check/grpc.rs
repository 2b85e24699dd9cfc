//! gRPC health checks: one call of `grpc.health.v1.Health/Check` over plain HTTP/2.
//!
//! Owns: the connection, which is part of the caller's future, and the two messages. Never: encrypts, keeps connections.
//! Upstream: `probe/grpc`.

use std::{io, net::SocketAddr, time::Duration};

use h2::{
    Ping,
    client::{Connection, ResponseFuture, SendRequest},
};
use http::{HeaderMap, Request, StatusCode, header};
use hyper::body::Bytes;
use prost::{Enumeration, Message};
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tonic::{Code, Status};

use super::{address, dial};
use crate::port::{GrpcCheck, GrpcFailure};

/// A server that refuses connections is retried until the deadline: it may be about to listen.
const DIAL_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The response is one enum; a longer one is not from a health service.
const ANSWER_LIMIT_BYTES: usize = 1 << 10;
/// The prefix of each message: not compressed, and its length.
const PREFIX_BYTES: usize = 5;

#[derive(Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Message)]
struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    status: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
    ServiceUnknown = 3,
}

pub(crate) async fn check_grpc(check: &GrpcCheck) -> Result<(), GrpcFailure> {
    let (mut is_connected, mut exhaustion) = (false, None);
    let answered = timeout(check.timeout, async {
        let (sender, connection) = connect(check, &mut exhaustion).await;
        is_connected = true;
        call(check, sender, connection).await
    });
    match answered.await {
        Ok(Ok(status)) => judge(status),
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err(GrpcFailure::Unimplemented(status.message().to_owned()))
        }
        Ok(Err(status)) if status.code() != Code::DeadlineExceeded => Err(GrpcFailure::Rpc(go_text(&status))),
        Ok(Err(_)) => Err(GrpcFailure::Late),
        Err(_) if is_connected => Err(GrpcFailure::Late),
        Err(_) => Err(exhaustion.map_or(GrpcFailure::Unreachable, GrpcFailure::Exhausted)),
    }
}

fn judge(status: i32) -> Result<(), GrpcFailure> {
    let name = match ServingStatus::try_from(status) {
        Ok(ServingStatus::Serving) => return Ok(()),
        Ok(ServingStatus::Unknown) => "UNKNOWN".to_owned(),
        Ok(ServingStatus::NotServing) => "NOT_SERVING".to_owned(),
        Ok(ServingStatus::ServiceUnknown) => "SERVICE_UNKNOWN".to_owned(),
        Err(_) => status.to_string(),
    };
    Err(GrpcFailure::Unhealthy(name))
}

/// Retries until a peer speaks HTTP/2: such a server has sent its settings before it echoes a ping. `exhaustion` is what the
/// node lacked for the last try.
async fn connect(
    check: &GrpcCheck,
    exhaustion: &mut Option<String>,
) -> (SendRequest<Bytes>, Connection<TcpStream, Bytes>) {
    loop {
        let dialled = match check.host.parse() {
            Ok(ip) => dial(&[SocketAddr::new(ip, check.port)], &address(&check.host, check.port)).await,
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidInput, error)),
        };
        let error = dialled.as_ref().err().filter(|error| error.kind() == io::ErrorKind::OutOfMemory);
        *exhaustion = error.map(io::Error::to_string);
        if let Ok(stream) = dialled
            && let Ok((sender, mut connection)) = h2::client::handshake(stream).await
        {
            let mut pinger = connection.ping_pong().expect("nobody else has taken it");
            let echo = drive(&mut connection, pinger.ping(Ping::opaque())).await;
            if matches!(echo, Some(Ok(_))) {
                return (sender, connection);
            }
        }
        sleep(DIAL_AGAIN_AFTER).await;
    }
}

/// Drives the connection while `wish` waits; `None` if it closes first.
async fn drive<T>(connection: &mut Connection<TcpStream, Bytes>, wish: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        // Both end together: a dropped wish belongs to this connection.
        outcome = wish => Some(outcome),
        _ = connection => None,
    }
}

async fn call(
    check: &GrpcCheck,
    sender: SendRequest<Bytes>,
    mut connection: Connection<TcpStream, Bytes>,
) -> Result<i32, Status> {
    let response = send(check, sender).await?;
    let answer = drive(&mut connection, receive(response)).await;
    answer.unwrap_or_else(|| Err(Status::unavailable("the connection was closed")))
}

async fn send(check: &GrpcCheck, sender: SendRequest<Bytes>) -> Result<ResponseFuture, Status> {
    let uri = format!("http://{}/grpc.health.v1.Health/Check", address(&check.host, check.port));
    let request = Request::post(uri)
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::USER_AGENT, &check.user_agent)
        .header(header::TE, "trailers")
        .body(())
        .map_err(|error| Status::internal(error.to_string()))?;
    let message = HealthCheckRequest { service: check.service.clone() }.encode_to_vec();
    let length = u32::try_from(message.len()).map_err(|_| Status::internal("the service's name is too long"))?;
    let mut body = vec![0];
    body.extend(length.to_be_bytes());
    body.extend(message);
    let mut sender = sender.ready().await.map_err(|error| broken(&error))?;
    let (response, mut stream) = sender.send_request(request, false).map_err(|error| broken(&error))?;
    stream.send_data(body.into(), true).map_err(|error| broken(&error))?;
    Ok(response)
}

async fn receive(response: ResponseFuture) -> Result<i32, Status> {
    let (head, mut body) = response.await.map_err(|error| broken(&error))?.into_parts();
    // A failure may have no body, and then its status in the head.
    told(&head.headers)?;
    if head.status != StatusCode::OK {
        let message = format!("unexpected HTTP status code received from server: {}", head.status);
        return Err(Status::new(code_of(head.status), message));
    }
    let mut answer = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(|error| broken(&error))?;
        // Without released capacity no more data is sent, so the buffer is bounded.
        let _ = body.flow_control().release_capacity(data.len());
        answer.extend_from_slice(&data);
        if answer.len() > ANSWER_LIMIT_BYTES {
            return Err(Status::resource_exhausted("the answer is too long"));
        }
    }
    match body.trailers().await.map_err(|error| broken(&error))? {
        Some(trailers) => told(&trailers)?,
        None => return Err(Status::internal("server closed the stream without sending trailers")),
    }
    let message = answer.get(PREFIX_BYTES..).filter(|_| answer[0] == 0);
    let message = message.ok_or_else(|| Status::internal("the answer holds no message"))?;
    let decoded = HealthCheckResponse::decode(message);
    decoded.map(|answer| answer.status).map_err(|error| Status::internal(error.to_string()))
}

fn told(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        Some(_) | None => Ok(()),
    }
}

/// gRPC's table for HTTP status codes.
fn code_of(status: StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502..=504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

fn broken(error: &h2::Error) -> Status {
    Status::unavailable(error.to_string())
}

fn go_text(status: &Status) -> String {
    let code = match status.code() {
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    };
    format!("rpc error: code = {code} desc = {}", status.message())
}

#[cfg(test)]
mod tests {
    use tokio::{net::TcpListener, task::JoinHandle};

    use super::*;

    /// A health service whose service names are its responses.
    struct Server {
        port: u16,
        task: JoinHandle<()>,
    }

    impl Server {
        async fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let task = tokio::spawn(async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    let mut connection = h2::server::handshake(stream).await.unwrap();
                    while let Some(Ok((request, mut respond))) = connection.accept().await {
                        let agent = request.headers()[header::USER_AGENT].to_str().unwrap().to_owned();
                        assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
                        tokio::spawn(async move {
                            let body = request.into_body().data().await.unwrap().unwrap();
                            let asked = HealthCheckRequest::decode(&body[PREFIX_BYTES..]).unwrap();
                            answer(&asked.service, &agent, &mut respond).await;
                        });
                    }
                }
            });
            Server { port, task }
        }

        async fn ask(&self, service: &str) -> Result<(), GrpcFailure> {
            check_grpc(&check(self.port, service)).await
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    fn check(port: u16, service: &str) -> GrpcCheck {
        let (host, user_agent) = ("127.0.0.1".to_owned(), "kube-probe/1.36".to_owned());
        GrpcCheck { host, port, service: service.to_owned(), user_agent, timeout: Duration::from_secs(2) }
    }

    async fn answer(service: &str, agent: &str, respond: &mut h2::server::SendResponse<Bytes>) {
        let head = |status: u16| http::Response::builder().status(status);
        let failed = |code: &str, message: &str| {
            let head = head(200).header("grpc-status", code).header("grpc-message", message);
            head.body(()).unwrap()
        };
        match service {
            "slow" => std::future::pending().await,
            "who asks" => drop(respond.send_response(failed("16", agent), true)),
            "no health" => drop(respond.send_response(failed("12", "unknown%20service"), true)),
            "not known" => drop(respond.send_response(failed("5", "unknown service"), true)),
            "no gRPC" => drop(respond.send_response(head(502).body(()).unwrap(), true)),
            "no end" => {
                let mut stream = respond.send_response(head(200).body(()).unwrap(), false).unwrap();
                stream.send_data(vec![0; ANSWER_LIMIT_BYTES + 1].into(), false).unwrap();
                std::future::pending().await
            }
            number => {
                let message = HealthCheckResponse { status: number.parse().unwrap_or(1) }.encode_to_vec();
                let body = [vec![0, 0, 0, 0, u8::try_from(message.len()).unwrap()], message].concat();
                let mut stream = respond.send_response(head(200).body(()).unwrap(), false).unwrap();
                stream.send_data(body.into(), false).unwrap();
                let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())]);
                stream.send_trailers(trailers).unwrap();
            }
        }
    }

    #[tokio::test]
    async fn only_serving_grpc_server_is_healthy() {
        let server = Server::new().await;
        let unhealthy = |name: &str| Err(GrpcFailure::Unhealthy(name.to_owned()));
        let rpc = |text: &str| Err(GrpcFailure::Rpc(format!("rpc error: code = {text}")));
        let cases = [
            ("", Ok(())),
            ("1", Ok(())),
            ("0", unhealthy("UNKNOWN")),
            ("2", unhealthy("NOT_SERVING")),
            ("3", unhealthy("SERVICE_UNKNOWN")),
            ("7", unhealthy("7")),
            ("no health", Err(GrpcFailure::Unimplemented("unknown service".to_owned()))),
            ("not known", rpc("NotFound desc = unknown service")),
            ("who asks", rpc("Unauthenticated desc = kube-probe/1.36")),
            ("no gRPC", rpc("Unavailable desc = unexpected HTTP status code received from server: 502 Bad Gateway")),
            ("no end", rpc("ResourceExhausted desc = the answer is too long")),
            ("slow", Err(GrpcFailure::Late)),
        ];
        for (service, expected) in cases {
            assert_eq!(server.ask(service).await, expected, "{service}");
        }
    }

    #[tokio::test]
    async fn late_grpc_server_is_healthy_and_non_http2_server_is_not() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = silent.local_addr().unwrap().port();
        assert_eq!(check_grpc(&check(port, "")).await, Err(GrpcFailure::Unreachable));
        drop(silent);
        assert_eq!(check_grpc(&check(port, "")).await, Err(GrpcFailure::Unreachable));
        let server = Server::new().await;
        let mut patient = check(server.port, "");
        let port = server.port;
        drop(server);
        patient.timeout = Duration::from_secs(5);
        let late = async {
            sleep(Duration::from_millis(500)).await;
            let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                answer("1", "", &mut respond).await;
            }
        };
        tokio::select! {
            biased;
            found = check_grpc(&patient) => assert_eq!(found, Ok(())),
            () = late => panic!("the probe went away"),
        }
    }
}
