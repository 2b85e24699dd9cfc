//! A command that writes more than a message holds.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use rubelet_cri::{client::CriClient, port::ContainerRuntime as _, v1::ExecSyncResponse};
use tokio::net::{UnixListener, UnixStream};

const LIMIT_BYTES: usize = 10 << 10;
/// Beyond gRPC's limit for a message of the runtime.
const OUTPUT_BYTES: usize = 20 << 20;

/// Sends the response in pieces, as fast as the client takes them.
async fn answer(connection: UnixStream) {
    let mut connection = h2::server::handshake(connection).await.expect("a working connection");
    while let Some(Ok((_request, mut respond))) = connection.accept().await {
        tokio::spawn(async move {
            let head = http::Response::builder()
                .header("content-type", "application/grpc")
                .body(())
                .expect("a working connection");
            let mut stream = respond.send_response(head, false).expect("a working connection");
            let message = ExecSyncResponse { stdout: vec![b'o'; OUTPUT_BYTES], stderr: b"why".to_vec(), exit_code: 3 };
            let message = message.encode_to_vec();
            let length = u32::try_from(message.len()).expect("a working connection").to_be_bytes();
            let mut data = Bytes::from([&[0][..], &length, &message].concat());
            while !data.is_empty() {
                stream.reserve_capacity(data.len());
                let room = std::future::poll_fn(|context| stream.poll_capacity(context))
                    .await
                    .expect("an open stream")
                    .expect("room");
                stream.send_data(data.split_to(room.min(data.len())), false).expect("a working connection");
            }
            let trailers = http::HeaderMap::from_iter([(
                http::HeaderName::from_static("grpc-status"),
                http::HeaderValue::from_static("0"),
            )]);
            stream.send_trailers(trailers).expect("a working connection");
        });
    }
}

#[tokio::test]
async fn exit_code_is_known_however_much_a_command_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cri.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(async move {
        let (connection, _) = listener.accept().await.unwrap();
        answer(connection).await;
    });
    let client = CriClient::new(path.to_str().unwrap(), "", Duration::from_secs(30)).unwrap();
    let command = ["yes".to_owned()];
    let done = client.exec_sync("c", &command, Duration::from_secs(30), Some(LIMIT_BYTES)).await.unwrap();
    assert_eq!((done.exit_code, done.stdout.len(), done.stderr.as_slice()), (3, LIMIT_BYTES, &b"why"[..]));
    let whole = client.exec_sync("c", &command, Duration::from_secs(30), None).await;
    assert!(whole.unwrap_err().to_string().contains("message length too large"));
    server.abort();
}
