//! Hostile clients: they are disconnected or slowed down, memory stays bounded, and other clients are served.

use tokio::io::{AsyncRead, AsyncWrite};

use super::*;
use crate::server::tests::alone::{descriptors, is_alone, settle};

pub(super) const MIB: u64 = 1 << 20;
/// Slack of the allocator; a successful flood would cost a multiple of it.
const GROWTH_MAX_BYTES: u64 = 16 * MIB;

/// The tasks of an idle port.
const OF_A_PORT: usize = 3;

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `GET https://n/`, all but the authority from the static table.
const GET_ROOT: &[u8] = &[0x82, 0x87, 0x84, 0x41, 1, b'n'];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

fn preface() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(SETTINGS, 0, 0, &[])].concat()
}

pub(super) fn memory_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// The next bytes of a flood.
type Next = Box<dyn FnMut() -> Vec<u8>>;

/// The outcome of a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The server sent an error, or closed the connection.
    CutOff,
    /// The server stops reading until its responses are read.
    HeldBack,
}

/// Sends the same bytes again and again without reading, at most this many.
async fn flood(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    mut next: impl FnMut() -> Vec<u8>,
    most_bytes: u64,
) -> End {
    let mut sent = 0;
    while sent < most_bytes {
        let bytes = next();
        sent += bytes.len() as u64;
        match timeout(Duration::from_secs(1), stream.write_all(&bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return End::CutOff,
            Err(_) => return End::HeldBack,
        }
    }
    // All bytes were accepted: then the connection must have ended.
    let mut heard = Vec::new();
    match timeout(Duration::from_secs(5), stream.read_to_end(&mut heard)).await {
        Ok(_) => End::CutOff,
        Err(_) => panic!("the server took {most_bytes} bytes and wants more"),
    }
}

fn floods(of_control_frames: End) -> [(&'static str, Vec<u8>, Next, End); 4] {
    let ping = || frame(PING, 0, 0, &[0; 8]).repeat(1000);
    let settings = || frame(SETTINGS, 0, 0, &[]).repeat(1000);
    let continuation = || frame(CONTINUATION, 0, 1, &[0x82; 1000]);
    let mut stream = 1;
    let rapid_reset = move || {
        let mut frames = Vec::new();
        for _ in 0..1000 {
            frames.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream, GET_ROOT));
            frames.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
            stream += 2;
        }
        frames
    };
    let open_head = frame(HEADERS, 0, 1, GET_ROOT);
    [
        ("rapid reset", vec![], Box::new(rapid_reset), End::CutOff),
        ("continuation", open_head, Box::new(continuation), End::CutOff),
        ("ping", vec![], Box::new(ping), of_control_frames),
        ("settings", vec![], Box::new(settings), of_control_frames),
    ]
}

#[tokio::test]
async fn http_2_floods_do_not_delay_other_clients() {
    if !is_alone(module_path!(), "http_2_floods_do_not_delay_other_clients") {
        return;
    }
    let port = Port::open(false).await;
    let root = port.authority.client("root");
    let before = memory_bytes();
    // Unauthenticated callers have sent too much before the server stops reading.
    let callers = [(None, End::CutOff), (Some(&root), End::HeldBack)];
    let all = callers.into_iter().flat_map(|(pair, end)| floods(end).map(|flood| (pair, flood)));
    for (pair, (name, first, next, expected)) in all {
        let mut stream = port.connect(pair, b"h2").await;
        stream.write_all(&[preface(), first].concat()).await.unwrap();
        assert_eq!(flood(&mut stream, next, 256 * MIB).await, expected, "{name}");
        // The flood is still open.
        assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "200 ok", "{name}");
        let grown = memory_bytes().saturating_sub(before);
        assert!(grown < GROWTH_MAX_BYTES, "{name}: {} MiB more", grown / MIB);
    }
    port.end().await;
}

#[tokio::test]
async fn http2_rapid_reset_gets_enhance_your_calm() {
    let port = Port::open(false).await;
    let mut stream = port.connect(None, b"h2").await;
    let mut frames = preface();
    for number in 0..200_u32 {
        frames.extend(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, GET_ROOT));
        frames.extend(frame(RST_STREAM, 0, 2 * number + 1, &8_u32.to_be_bytes()));
    }
    stream.write_all(&frames).await.unwrap();
    let mut heard = Vec::new();
    let _ = timeout(Duration::from_secs(5), stream.read_to_end(&mut heard)).await.expect("the server closes");
    let mut rest = heard.as_slice();
    let mut last = None;
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        last = (rest[3] == GOAWAY).then(|| rest[13..17].to_vec()).or(last);
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    assert_eq!(last, Some(vec![0, 0, 0, 0xb]), "ENHANCE_YOUR_CALM");
    port.end().await;
}

#[tokio::test]
async fn slow_requests_lose_their_connection_slot() {
    let patience = Duration::from_millis(400);
    let limits = Limits { connections: 4, head_timeout: patience, ..Limits::SECURED_PORT };
    let port = Port::open_as(Opening { limits, ..Opening::default() }).await;
    let root = port.authority.client("root");
    // All slots: no preface, a preface and no request, a head and a body byte by byte.
    let mut silent = port.connect(Some(&root), b"h2").await;
    let mut idle = port.connect(Some(&root), b"h2").await;
    idle.write_all(&preface()).await.unwrap();
    let mut head = port.connect(Some(&root), b"http/1.1").await;
    head.write_all(b"GET /pods HTTP/1.1\r\nHost: n\r\nX-A: ").await.unwrap();
    let mut body = port.connect(Some(&root), b"http/1.1").await;
    body.write_all(b"POST /pods HTTP/1.1\r\nHost: n\r\nContent-Length: 1000000\r\n\r\n").await.unwrap();
    let dripping = tokio::spawn(async move {
        while head.write_all(b"x").await.is_ok() {
            let _ = body.write_all(b"x").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "200 ok");
    for (name, stream) in [("silent", &mut silent), ("idle", &mut idle)] {
        let closed = timeout(Duration::from_secs(5), stream.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "{name} is still there");
    }
    timeout(Duration::from_secs(5), dripping).await.expect("the slow head is cut off").unwrap();
    port.end().await;
}

/// A file larger than all socket buffers.
fn big_log(port: &Port) {
    let file = fs::File::create(port.dir.path().join("var-log/big")).unwrap();
    file.set_len(256 * MIB).unwrap();
}

#[tokio::test]
async fn unread_response_loses_its_connection_slot() {
    let limits = Limits { connections: 1, answer: Duration::from_millis(300), ..Limits::SECURED_PORT };
    let port = Port::open_as(Opening { limits, ..Opening::default() }).await;
    let root = port.authority.client("root");
    big_log(&port);
    let mut stream = port.connect(Some(&root), b"http/1.1").await;
    stream.write_all(b"GET /logs/big HTTP/1.1\r\nHost: n\r\n\r\n").await.unwrap();
    assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "200 ok");
    drop(stream);

    // Over HTTP/2 only the stream ends.
    let stream = hyper_util::rt::TokioIo::new(port.connect(Some(&root), b"h2").await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut get = async |path: &str| {
        let request = http::Request::get(path).body(http_body_util::Empty::<Bytes>::new()).unwrap();
        sender.send_request(request).await.unwrap()
    };
    let unread = get("https://n1/logs/big").await;
    assert_eq!(unread.status(), 200);
    tokio::time::sleep(limits.answer * 2).await;
    assert_eq!(get("https://n1/healthz").await.status(), 200);
    let ended = timeout(Duration::from_secs(5), http_body_util::BodyExt::collect(unread.into_body())).await;
    assert!(ended.expect("it is over").is_err(), "all of it came");
    connection.abort();
    port.end().await;
}

#[tokio::test]
async fn tcp_keepalive_is_enabled() {
    const KEEPALIVE_TIMER: &str = "02:";
    let port = Port::open(false).await;
    let _silent = port.connect(None, b"http/1.1").await;
    let listening = format!(":{:04X}", port.address.port());
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
    let timers: Vec<&str> = sockets
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words[1].ends_with(&listening) && words[3] == "01")
        .map(|words| words[5])
        .collect();
    assert!(matches!(timers[..], [timer] if timer.starts_with(KEEPALIVE_TIMER)), "{timers:?}");
    port.end().await;
}

/// Serves one client, so that everything that stays open is open, and counts it.
async fn at_rest(port: &Port) -> usize {
    let root = port.authority.client("root");
    assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "200 ok");
    settle(OF_A_PORT).await;
    descriptors()
}

async fn assert_as_before(before: usize) {
    settle(OF_A_PORT).await;
    assert!(descriptors() <= before, "{} descriptors instead of {before}", descriptors());
}

#[tokio::test]
async fn handshakes_that_never_end_are_ended_and_leave_nothing() {
    if !is_alone(module_path!(), "handshakes_that_never_end_are_ended_and_leave_nothing") {
        return;
    }
    let port = Port::open(false).await;
    let before = at_rest(&port).await;
    tokio::time::pause();
    // Nothing at all, and the beginning of a long handshake.
    let mut open = Vec::new();
    for said in [&b""[..], &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]].repeat(20) {
        let mut stream = TcpStream::connect(port.address).await.unwrap();
        stream.write_all(said).await.unwrap();
        open.push(stream);
    }
    for mut stream in open {
        let closed = timeout(Duration::from_secs(30), stream.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "it is still there");
    }
    tokio::time::resume();
    assert_as_before(before).await;
    port.end().await;
}

#[tokio::test]
async fn bodies_that_trickle_are_not_waited_for_and_leave_nothing() {
    if !is_alone(module_path!(), "bodies_that_trickle_are_not_waited_for_and_leave_nothing") {
        return;
    }
    let port = Port::open(false).await;
    let root = port.authority.client("root");
    let before = at_rest(&port).await;
    for (request, expected) in [
        ("POST /exec/default/web-n1/a?output=1&command=ls", "500 container not found (\"a\")"),
        ("POST /attach/default/web-n1/a?output=1", "500 container not found (\"a\")"),
        ("POST /run/default/web-n1/a?cmd=ls", "500 container not found (\"a\")"),
        ("PUT /debug/flags/v", "400 error reading request body: i/o timeout|"),
    ] {
        let (mut reader, mut writer) = tokio::io::split(port.connect(Some(&root), b"http/1.1").await);
        writer
            .write_all(format!("{request} HTTP/1.1\r\nHost: n\r\nContent-Length: 60\r\n\r\n").as_bytes())
            .await
            .unwrap();
        tokio::time::pause();
        let trickling = tokio::spawn(async move {
            while writer.write_all(b"1").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let answer = read_answer(&mut reader).await;
        tokio::time::resume();
        assert_eq!(answer, expected, "{request}");
        drop(reader);
        trickling.abort();
    }
    assert_as_before(before).await;
    port.end().await;
}

#[tokio::test]
async fn beyond_the_last_place_callers_wait_and_are_served() {
    let limits = Limits { connections: 3, ..Limits::SECURED_PORT };
    let port = Port::open_as(Opening { limits, ..Opening::default() }).await;
    let root = port.authority.client("root");
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(port.connect(Some(&root), b"http/1.1").await);
    }
    let caller = Caller::Certificate(&root);
    let waiting = timeout(Duration::from_millis(300), port.ask(&caller, "GET /healthz"));
    assert!(waiting.await.is_err(), "there was no place for it");
    held.pop();
    assert_eq!(port.ask(&caller, "GET /healthz").await, "200 ok");
    port.end().await;
}

#[tokio::test]
async fn oversized_and_absurd_requests_are_refused() {
    let port = Port::open(false).await;
    let root = port.authority.client("root");
    let caller = Caller::Certificate(&root);
    let long = "x".repeat(2 << 20);
    assert_eq!(port.status(&caller, &format!("GET /pods?a={long}")).await, "431");
    let largest = "x".repeat(1 << 20);
    assert_eq!(port.status(&caller, &format!("GET /pods HTTP/1.1\r\nX-Long: {largest}\r\nX-End:")).await, "200");
    // Hyper rejects it; Go accepts it.
    assert_eq!(port.status(&caller, &format!("GET /pods?a={}", "x".repeat(100_000))).await, "414");
    assert_eq!(port.status(&caller, &format!("GET /pods HTTP/1.1\r\nX-Long: {long}\r\nX-End:")).await, "431");
    let query = "command=ls&".repeat(5_000);
    assert_eq!(port.status(&caller, &format!("POST /exec/default/web-n1/a?output=1&{query}")).await, "500");
    for query in
        ["tailLines=99999999999999999999", "tailLines=-1", "sinceSeconds=x", "limitBytes=0", "follow=%ff", "=&=&&&;"]
    {
        let status = port.status(&caller, &format!("GET /containerLogs/default/web-n1/a?{query}")).await;
        assert!(["400", "422"].contains(&&*status), "{query}: {status}");
    }
    for request in ["GET //", "GET /pods/../../..", "GET /%", "GET /%zz", "GET /exec/%2e%2e/%2e%2e/%00", "BREW /pods"] {
        let status = port.status(&caller, request).await;
        assert!(["404", "400", "405"].contains(&&*status), "{request}: {status}");
    }
    port.end().await;
}

/// Anonymous, and with all permissions: 20,000 paths, or as many as `RUBELET_RANDOM_PATHS` sets.
#[tokio::test]
async fn random_paths_leave_nothing_in_memory() {
    if !is_alone(module_path!(), "random_paths_leave_nothing_in_memory") {
        return;
    }
    const BATCH: u32 = 500;
    let count: u32 = std::env::var("RUBELET_RANDOM_PATHS").ok().and_then(|told| told.parse().ok()).unwrap_or(20_000);
    let port = Port::open(true).await;
    let root = port.authority.client("root");
    let mut before = 0;
    for number in 0..count / BATCH {
        let pair = (number % 2 == 0).then_some(&root);
        let stream = port.connect(pair, b"http/1.1").await;
        let mut requests = String::new();
        for each in 0..BATCH {
            let random = (u64::from(number * BATCH + each) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let close = if each + 1 == BATCH { "Connection: close\r\n" } else { "" };
            let root = ["", "/logs", "/metrics", "/exec/default", "/stats"][random as usize % 5];
            requests.push_str(&format!("GET {root}/{random:x}/{each} HTTP/1.1\r\nHost: n\r\n{close}\r\n"));
        }
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut heard = Vec::new();
        let (sent, _) = tokio::join!(writer.write_all(requests.as_bytes()), reader.read_to_end(&mut heard));
        sent.unwrap();
        let answers = String::from_utf8_lossy(&heard).matches("HTTP/1.1 4").count();
        assert_eq!(answers, BATCH as usize, "{}", String::from_utf8_lossy(&heard));
        if number == 10 {
            before = memory_bytes();
        }
    }
    let grown = memory_bytes().saturating_sub(before);
    println!("{count} paths: {} KiB more", grown >> 10);
    assert!(grown < GROWTH_MAX_BYTES, "{} MiB more", grown / MIB);
    port.end().await;
}
