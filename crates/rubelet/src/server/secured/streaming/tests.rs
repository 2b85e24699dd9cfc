//! Tests of callers and runtimes over real sockets.

use std::{io, net::SocketAddr};

use axum::{Router, routing::any};
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{Duration, timeout},
};
use tokio_util::{codec::FramedRead, sync::CancellationToken};

use super::{
    spdy::{self, Frame, tests as frames},
    websocket::tests::masked,
    *,
};
use crate::server::{
    connections::{self, Limits},
    tests::alone::{descriptors, is_alone, many, settle},
};

const SOON: Duration = Duration::from_secs(10);
const ALL: Streams = Streams { stdin: true, stdout: true, stderr: true, tty: false };
/// The ids of a command's streams when all are opened.
const ERROR: u32 = 1;
const STDIN: u32 = 3;
const STDOUT: u32 = 5;
const STDERR: u32 = 7;

const AGREED: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                      X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";
const SPDY: &str = "Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n";
const V5: &str = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
                  Sec-WebSocket-Protocol: v4.channel.k8s.io, v5.channel.k8s.io\r\n";

/// The kubelet's port, with a runtime server that the test implements.
struct StreamingFixture {
    address: SocketAddr,
    runtime: TcpListener,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl StreamingFixture {
    async fn set() -> StreamingFixture {
        let runtime = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/exec/token", runtime.local_addr().unwrap());
        let into_container = |url: String| {
            any(move |request: Request| async move {
                pass_on(&url, ProxyMode::into_container(ALL, &request)?, request).await
            })
        };
        let to_ports = |url: String| {
            any(move |request: Request| async move { pass_on(&url, ProxyMode::to_ports(&request)?, request).await })
        };
        let router = Router::new().route("/exec", into_container(url.clone())).route("/portForward", to_ports(url));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let stopped = stop.clone();
        let limits = Limits { unauthenticated: None, ..Limits::SECURED_PORT };
        let task = tokio::spawn(async move { connections::serve(&listener, router, limits, &stopped).await });
        StreamingFixture { address, runtime, stop, task }
    }

    /// A caller with this request and these headers.
    async fn call(&self, path: &str, headers: &str) -> TcpStream {
        let mut caller = TcpStream::connect(self.address).await.unwrap();
        let method = if headers.contains("websocket") { "GET" } else { "POST" };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: n\r\nConnection: Upgrade\r\nAuthorization: Bearer x\r\n{headers}\r\n"
        );
        caller.write_all(request.as_bytes()).await.unwrap();
        caller
    }

    /// The request to the runtime, and its response.
    async fn runtime(&self, answer: &str) -> (String, TcpStream) {
        let (mut stream, _) = timeout(SOON, self.runtime.accept()).await.expect("the runtime is asked").unwrap();
        let head = read_head(&mut stream).await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        (head, stream)
    }

    /// An upgraded exec connection.
    async fn command(&self, headers: &str) -> (TcpStream, TcpStream) {
        let mut caller = self.call("/exec", headers).await;
        let (_, runtime) = self.runtime(AGREED).await;
        let head = read_head(&mut caller).await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        (caller, runtime)
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(SOON, self.task).await.expect("the server ends").unwrap();
    }
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = timeout(SOON, stream.read_u8()).await.expect("a head in time");
        match byte {
            Ok(byte) => head.push(byte),
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&head)),
        }
    }
    String::from_utf8(head).unwrap()
}

async fn read_rest(mut stream: TcpStream) -> String {
    let mut rest = String::new();
    timeout(SOON, stream.read_to_string(&mut rest)).await.expect("the connection is closed").unwrap();
    rest
}

/// The next frame of a server's WebSocket: its opcode and payload.
async fn read_message(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    let read = async {
        let (first, second) = (stream.read_u8().await?, stream.read_u8().await?);
        let length = match second {
            126 => u64::from(stream.read_u16().await?),
            127 => stream.read_u64().await?,
            length => u64::from(length),
        };
        let mut message = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut message).await?;
        io::Result::Ok((first & 0x0f, message))
    };
    timeout(SOON, read).await.expect("a message in time").unwrap()
}

/// The data of one channel up to the next message on another.
async fn hear(caller: &mut TcpStream, channel: u8, length: usize) -> Vec<u8> {
    let mut heard = Vec::new();
    while heard.len() < length {
        let (kind, message) = read_message(caller).await;
        assert_eq!((kind, message[0]), (2, channel), "{message:?}");
        heard.extend_from_slice(&message[1..]);
    }
    heard
}

#[tokio::test]
async fn websocket_exec_reaches_spdy_runtime() {
    let fixture = StreamingFixture::set().await;
    let mut caller = fixture.call("/exec", V5).await;
    let (head, mut runtime) = fixture.runtime(AGREED).await;
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("post /exec/token http/1.1\r\n") && head.contains("upgrade: spdy/3.1\r\n"), "{head}");
    assert!(head.contains("x-stream-protocol-version: v4.channel.k8s.io\r\n"), "{head}");
    assert!(!head.contains("websocket") && !head.contains("bearer"), "{head}");
    let agreed = read_head(&mut caller).await.to_ascii_lowercase();
    assert!(agreed.contains("sec-websocket-protocol: v5.channel.k8s.io\r\n"), "{agreed}");
    assert!(agreed.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n"), "{agreed}");
    let opening = spdy::open(&["error", "stdin", "stdout", "stderr"].map(|kind| ("streamType", kind)));
    let mut opened = vec![0; opening.len()];
    runtime.read_exact(&mut opened).await.unwrap();
    assert_eq!(opened, opening);
    assert_eq!(read_message(&mut caller).await, (2, vec![1]), "the sign that the connection stands");

    // Input, an unknown channel, a ping, and the end of input.
    let input = vec![7; 100_000];
    let said = [
        masked(0x82, &[&[0][..], &input].concat()),
        masked(0x82, b"\x04{\"Width\":1,\"Height\":2}"),
        masked(0x82, b"\x09nobody"),
        masked(0x82, b""),
        masked(0x89, b"there?"),
        masked(0x82, &[255, 0]),
        masked(0x82, b"\0too late"),
    ];
    caller.write_all(&said.concat()).await.unwrap();
    let (reading, mut writing) = runtime.into_split();
    let mut reading = FramedRead::new(reading, spdy::Decoder::default());
    let mut heard = Vec::new();
    loop {
        match timeout(SOON, reading.next()).await.expect("the input in time").unwrap().unwrap() {
            Frame::Data { stream, bytes } => {
                assert_eq!(stream, STDIN);
                heard.extend_from_slice(&bytes);
            }
            frame => {
                assert_eq!(frame, Frame::End { stream: STDIN });
                break;
            }
        }
    }
    assert_eq!(heard, input);
    assert_eq!(read_message(&mut caller).await, (10, b"there?".to_vec()));

    // Output, a ping, and the status.
    let status = json!({ "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode" });
    let said = [
        frames::control(2, 0, &[0, 0, 0, 5]),
        frames::data(STDOUT, &input),
        frames::data(STDERR, b"err"),
        frames::control(6, 0, &[0, 0, 0, 2]),
        spdy::end(STDOUT).to_vec(),
        spdy::end(STDERR).to_vec(),
        frames::data(ERROR, status.to_string().as_bytes()),
        frames::control(3, 0, &[0, 0, 0, 1, 0, 0, 0, 5]),
    ];
    writing.write_all(&said.concat()).await.unwrap();
    assert_eq!(hear(&mut caller, 1, input.len()).await, input);
    assert_eq!(hear(&mut caller, 2, 3).await, b"err");
    let said = hear(&mut caller, 3, 10).await;
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&said).unwrap(), status);
    assert_eq!(read_message(&mut caller).await, (8, vec![3, 232]));
    assert_eq!(read_rest(caller).await, "");
    fixture.end().await;
}

#[tokio::test]
async fn a_runtimes_question_is_answered_while_the_command_runs() {
    let fixture = StreamingFixture::set().await;
    let (_caller, mut runtime) = fixture.command(V5).await;
    runtime.write_all(&frames::control(6, 0, &[0, 0, 0, 2])).await.unwrap();
    let mut reading = FramedRead::new(runtime, spdy::Decoder::default());
    assert_eq!(timeout(SOON, reading.next()).await.expect("an answer").unwrap().unwrap(), Frame::Ping(2));
    fixture.end().await;
}

#[tokio::test]
async fn lost_runtime_connection_is_not_reported_as_success() {
    let fixture = StreamingFixture::set().await;
    for (said, expected) in [
        (Vec::new(), "the runtime ended the connection before it said how the command ended"),
        (frames::data(ERROR, b"no JSON"), "no JSON"),
        (vec![0x80, 2, 0, 6, 0, 0, 0, 4, 0, 0, 0, 2], "the runtime's streaming server sent version 2"),
    ] {
        let (mut caller, mut runtime) = fixture.command(V5).await;
        runtime.write_all(&said).await.unwrap();
        runtime.shutdown().await.unwrap();
        assert_eq!(read_message(&mut caller).await, (2, vec![1]));
        let status: serde_json::Value = serde_json::from_slice(&hear(&mut caller, 3, 10).await).unwrap();
        let message = format!("Internal error occurred: {expected}");
        assert_eq!((&status["status"], &status["message"]), (&json!("Failure"), &json!(message)));
    }
    fixture.end().await;
}

#[tokio::test]
async fn protocol_violation_closes_websocket_and_runtime_connection() {
    let fixture = StreamingFixture::set().await;
    for said in [masked(0x82, &[255, 0, 0]), masked(0x83, b"x")] {
        let (mut caller, runtime) = fixture.command(V5).await;
        assert_eq!(read_message(&mut caller).await, (2, vec![1]));
        caller.write_all(&said).await.unwrap();
        assert_eq!(read_message(&mut caller).await, (8, vec![3, 234]));
        drop(caller);
        let mut reading = FramedRead::new(runtime, spdy::Decoder::default());
        assert!(timeout(SOON, reading.next()).await.expect("the end of it").is_none());
    }
    fixture.end().await;
}

#[tokio::test]
async fn a_tunnel_is_unwrapped_both_ways() {
    let fixture = StreamingFixture::set().await;
    let headers = V5.replace("v4.channel.k8s.io, v5.channel.k8s.io", "SPDY/3.1+portforward.k8s.io");
    let mut caller = fixture.call("/portForward", &headers).await;
    let (head, mut runtime) = fixture.runtime(&AGREED.replace("v4.channel", "portforward")).await;
    assert!(head.to_ascii_lowercase().contains("x-stream-protocol-version: portforward.k8s.io\r\n"), "{head}");
    let agreed = read_head(&mut caller).await;
    assert!(agreed.contains("SPDY/3.1+portforward.k8s.io\r\n"), "{agreed}");
    caller.write_all(&[masked(0x02, b"to "), masked(0x89, b"?"), masked(0x80, b"you")].concat()).await.unwrap();
    let mut heard = [0; 6];
    runtime.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"to you");
    assert_eq!(read_message(&mut caller).await, (10, b"?".to_vec()));
    let answer = vec![9; 70_000];
    runtime.write_all(&answer).await.unwrap();
    let mut heard = Vec::new();
    while heard.len() < answer.len() {
        let (kind, message) = read_message(&mut caller).await;
        assert_eq!(kind, 2);
        heard.extend(message);
    }
    assert_eq!(heard, answer);
    drop(runtime);
    assert_eq!(read_message(&mut caller).await.0, 8);
    fixture.end().await;
}

#[tokio::test]
async fn runtime_redirects_are_blocked_and_errors_passed_on() {
    let fixture = StreamingFixture::set().await;
    let elsewhere = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let location = format!("http://{}/", elsewhere.local_addr().unwrap());
    for headers in [SPDY, V5] {
        for status in ["301 Moved", "302 Found", "307 Temporary Redirect"] {
            let answer = format!("HTTP/1.1 {status}\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n");
            let mut caller = fixture.call("/exec", headers).await;
            fixture.runtime(&answer).await;
            let head = read_head(&mut caller).await;
            assert!(head.starts_with("HTTP/1.1 500 ") && !head.contains(&location), "{head}");
        }
        let mut caller = fixture.call("/exec", headers).await;
        fixture.runtime("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await;
        let head = read_head(&mut caller).await;
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
        // An unrequested protocol must not reach the caller.
        let mut caller = fixture.call("/exec", headers).await;
        fixture.runtime(&AGREED.replace("v4.channel", "v9.channel")).await;
        let head = read_head(&mut caller).await;
        assert!(head.starts_with(if headers == V5 { "HTTP/1.1 500 " } else { "HTTP/1.1 101 " }), "{head}");
    }
    assert!(timeout(Duration::from_millis(50), elsewhere.accept()).await.is_err(), "somebody was led elsewhere");
    fixture.end().await;
}

#[tokio::test]
async fn nothing_after_a_failed_upgrade_reaches_the_runtime() {
    let fixture = StreamingFixture::set().await;
    for headers in [SPDY, V5] {
        let mut caller = fixture.call("/exec", headers).await;
        let (_, mut runtime) = fixture.runtime("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await;
        let head = read_head(&mut caller).await;
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
        // The connection may be closed already: then this is lost.
        let _ = caller.write_all(b"POST /exec/smuggled HTTP/1.1\r\nHost: n\r\nContent-Length: 0\r\n\r\n").await;
        let mut heard = Vec::new();
        let read = timeout(SOON, runtime.read_to_end(&mut heard)).await.expect("the end of the runtime's connection");
        assert!(heard.is_empty(), "the runtime got {:?} ({read:?})", String::from_utf8_lossy(&heard));
    }
    fixture.end().await;
}

#[tokio::test]
async fn slow_stream_reader_causes_backpressure() {
    let fixture = StreamingFixture::set().await;
    for headers in [SPDY, V5] {
        let (caller, mut runtime) = fixture.command(headers).await;
        let block = frames::data(STDOUT, &[1; 60_000]);
        let mut bytes = 0;
        while let Ok(written) = timeout(Duration::from_millis(300), runtime.write_all(&block)).await {
            written.unwrap();
            bytes += block.len();
            assert!(bytes < 64 << 20, "nothing holds up the runtime");
        }
        drop(caller);
    }
    fixture.end().await;
}

#[tokio::test]
async fn idle_websocket_is_closed_after_four_hours() {
    const HOUR: Duration = Duration::from_secs(3600);
    let fixture = StreamingFixture::set().await;
    let (mut caller, mut runtime) = fixture.command(V5).await;
    assert_eq!(read_message(&mut caller).await, (2, vec![1]));
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    // Traffic of either side resets the idle timer, except pings.
    for said in [frames::data(STDOUT, b"out"), frames::data(STDERR, b"err")] {
        tokio::time::sleep(3 * HOUR).await;
        runtime.write_all(&said).await.unwrap();
        caller.write_all(&masked(0x82, b"\0in")).await.unwrap();
        let (kind, message) = read_message(&mut caller).await;
        assert_eq!((kind, message.len()), (2, 4));
    }
    tokio::time::sleep(3 * HOUR).await;
    caller.write_all(&masked(0x89, b"there?")).await.unwrap();
    assert_eq!(read_message(&mut caller).await.0, 10);
    let mut rest = Vec::new();
    timeout(2 * HOUR, caller.read_to_end(&mut rest)).await.expect("it is closed").unwrap();
    assert_eq!(rest, [0x88, 2, 3, 232]);
    let took = began.elapsed();
    assert!(took >= 10 * HOUR && took < 10 * HOUR + SOON * 2, "{took:?}");
    fixture.end().await;
}

#[tokio::test]
async fn abandoned_streams_leave_no_descriptor_and_no_task() {
    if !is_alone(module_path!(), "abandoned_streams_leave_no_descriptor_and_no_task") {
        return;
    }
    let fixture = StreamingFixture::set().await;
    // The connections the runtime keeps open.
    drop(fixture.command(V5).await);
    settle(2).await;
    let before = descriptors();
    for round in 0..many() / 100 {
        let mut open = Vec::new();
        for number in 0..100 {
            let (mut caller, mut runtime) = fixture.command(if number % 2 == 0 { SPDY } else { V5 }).await;
            match number % 5 {
                // In the middle of a frame, of either side.
                0 => caller.write_all(&[0x82]).await.unwrap(),
                1 => runtime.write_all(&frames::data(STDOUT, &[0; 1000])[..500]).await.unwrap(),
                _ => {}
            }
            open.push((caller, runtime));
        }
        // Some are closed by their callers, some by the runtime, some by both.
        for (number, (caller, runtime)) in open.into_iter().enumerate() {
            match (number + round) % 3 {
                0 => drop(runtime),
                1 => drop(caller),
                _ => {}
            }
        }
        settle(2).await;
        assert!(descriptors() <= before, "{} descriptors instead of {before}", descriptors());
    }
    fixture.end().await;
}
