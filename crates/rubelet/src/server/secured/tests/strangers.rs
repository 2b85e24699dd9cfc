//! Callers without credentials: what they hold is bounded, and authenticated callers do not notice them.

use std::time::Instant;

use tokio::net::TcpSocket;

use super::{
    hostile::{MIB, memory_bytes},
    *,
};
use crate::server::unauthenticated::{UNAUTHENTICATED, UnauthenticatedLimits};

const KEEP_ALIVE: &str = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n";

async fn port_with(unauthenticated: UnauthenticatedLimits, anonymous: bool) -> Port {
    let limits = Limits { unauthenticated: Some(unauthenticated), ..Limits::SECURED_PORT };
    Port::open_as(Opening { limits, anonymous, ..Opening::default() }).await
}

/// A connection whose local address is 127.0.`third`.`last`.
async fn connect_from(port: &Port, third: u8, last: u8) -> std::io::Result<TlsStream<TcpStream>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from(([127, 0, third, last], 0)))?;
    let stream = socket.connect(port.address).await?;
    port.connector(None, b"http/1.1").connect("n1".try_into().unwrap(), stream).await
}

async fn send(stream: &mut (impl tokio::io::AsyncWrite + Unpin), request: &str) {
    stream.write_all(request.as_bytes()).await.unwrap();
}

/// The status of the next response with a body of at most this many bytes; `None` at the end of the connection.
async fn next_status(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Option<String> {
    let mut buffer = [0; 1024];
    let count = timeout(Duration::from_secs(20), stream.read(&mut buffer)).await.expect("in time").unwrap_or(0);
    let head = String::from_utf8_lossy(&buffer[..count]).into_owned();
    head.split(' ').nth(1).map(str::to_owned)
}

async fn is_closed(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> bool {
    timeout(Duration::from_millis(300), stream.read_to_end(&mut Vec::new())).await.is_ok()
}

fn with_token(token: &str) -> String {
    format!("GET /healthz HTTP/1.1\r\nHost: n\r\nAuthorization: Bearer {token}\r\n\r\n")
}

#[tokio::test]
async fn a_newcomer_is_served_and_the_oldest_stranger_goes() {
    let port = port_with(UnauthenticatedLimits { per_address: 3, ..UNAUTHENTICATED }, false).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(port.connect(None, b"http/1.1").await);
    }
    let mut other = connect_from(&port, 0, 2).await.unwrap();
    send(&mut other, &with_token("token-of-healthz")).await;
    assert_eq!(next_status(&mut other).await.as_deref(), Some("200"));
    let root = port.authority.client("root");
    assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "200 ok");
    assert!(is_closed(&mut held[0]).await);
    assert!(!is_closed(&mut held[1]).await && !is_closed(&mut held[2]).await);
    port.end().await;
}

#[tokio::test]
async fn authenticated_connections_are_not_closed_for_strangers() {
    let limits = UnauthenticatedLimits { connections: 2, head_timeout: Duration::from_millis(300), ..UNAUTHENTICATED };
    let port = port_with(UnauthenticatedLimits { lifetime: Duration::from_millis(600), ..limits }, false).await;
    let root = port.authority.client("root");
    let mut certificate = port.connect(Some(&root), b"http/1.1").await;
    let mut token = port.connect(None, b"http/1.1").await;
    send(&mut token, &with_token("token-of-healthz")).await;
    assert_eq!(next_status(&mut token).await.as_deref(), Some("200"));
    let mut strangers = Vec::new();
    for _ in 0..6 {
        strangers.push(port.connect(None, b"http/1.1").await);
    }
    tokio::time::sleep(limits.head_timeout * 4).await;
    for mut stranger in strangers {
        assert!(is_closed(&mut stranger).await);
    }
    send(&mut certificate, KEEP_ALIVE).await;
    send(&mut token, &with_token("token-of-healthz")).await;
    assert_eq!(next_status(&mut certificate).await.as_deref(), Some("200"));
    assert_eq!(next_status(&mut token).await.as_deref(), Some("200"));
    port.end().await;
}

#[tokio::test]
async fn unauthenticated_connections_end_after_their_time() {
    let port = port_with(UNAUTHENTICATED, true).await;
    let mut silent = port.connect(None, b"http/1.1").await;
    let mut slow_head = port.connect(None, b"http/1.1").await;
    let mut anonymous = port.connect(None, b"http/1.1").await;
    tokio::time::pause();
    let start = tokio::time::Instant::now();
    send(&mut slow_head, "GET /healthz HTTP/1.1\r\nX-A: ").await;
    let mut asked = 0;
    loop {
        if anonymous.write_all(KEEP_ALIVE.as_bytes()).await.is_err() || next_status(&mut anonymous).await.is_none() {
            break;
        }
        asked += 1;
        let _ = slow_head.write_all(b"x").await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        if asked == 4 {
            assert!(is_closed(&mut silent).await && is_closed(&mut slow_head).await);
        }
    }
    let lasted = start.elapsed();
    tokio::time::resume();
    let expected = UNAUTHENTICATED.lifetime..UNAUTHENTICATED.lifetime + Duration::from_secs(10);
    assert!(expected.contains(&lasted), "{lasted:?}");
    port.end().await;
}

#[tokio::test]
async fn third_401_in_a_row_is_the_last_response() {
    let port = port_with(UNAUTHENTICATED, false).await;
    let mut stream = port.connect(None, b"http/1.1").await;
    send(&mut stream, &KEEP_ALIVE.repeat(10)).await;
    let mut heard = Vec::new();
    let _ = timeout(Duration::from_secs(5), stream.read_to_end(&mut heard)).await.expect("the server closes");
    let heard = String::from_utf8(heard).unwrap();
    assert_eq!((heard.matches("HTTP/1.1 401").count(), heard.matches("connection: close").count()), (3, 1), "{heard}");

    let stream = hyper_util::rt::TokioIo::new(port.connect(None, b"h2").await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for _ in 0..3 {
        let request = http::Request::get("https://n1/healthz").body(http_body_util::Empty::<Bytes>::new()).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), 401);
    }
    let _ = timeout(Duration::from_secs(5), connection).await.expect("the server closes");
    port.end().await;
}

#[tokio::test]
async fn heads_before_authentication_are_bounded_each_and_together() {
    let port = port_with(UNAUTHENTICATED, false).await;
    let long = format!("GET /healthz HTTP/1.1\r\nX-Long: {}", "x".repeat(2 * UNAUTHENTICATED.head_bytes));
    assert_eq!(port.status(&Caller::Nobody, &long).await, "431");
    port.end().await;
    let port = port_with(UnauthenticatedLimits { total_bytes: 100 << 10, ..UNAUTHENTICATED }, false).await;
    let mut held = Vec::new();
    for kib in [30, 40, 20] {
        let mut stream = port.connect(None, b"http/1.1").await;
        send(&mut stream, &format!("GET /healthz HTTP/1.1\r\nX-Long: {}", "x".repeat(kib << 10))).await;
        held.push(stream);
    }
    for stream in &mut held {
        assert!(!is_closed(stream).await);
    }
    let mut last = port.connect(None, b"http/1.1").await;
    send(&mut last, &format!("GET /healthz HTTP/1.1\r\nX-Long: {}", "x".repeat(20 << 10))).await;
    let mut closed = Vec::new();
    for stream in &mut held {
        closed.push(is_closed(stream).await);
    }
    assert_eq!(closed, [false, true, false], "the largest goes");
    port.end().await;
}

#[tokio::test]
async fn a_chain_is_verified_once_a_minute_for_all_requests_of_a_connection() {
    let port = Port::open(false).await;
    let root = port.authority.client("root");
    let mut stream = port.connect(Some(&root), b"http/1.1").await;
    send(&mut stream, KEEP_ALIVE).await;
    assert_eq!(next_status(&mut stream).await.as_deref(), Some("200"));
    fs::write(port.dir.path().join("ca.crt"), Authority::new().0.pem()).unwrap();
    assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "401 Unauthorized");
    send(&mut stream, KEEP_ALIVE).await;
    assert_eq!(next_status(&mut stream).await.as_deref(), Some("200"));
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(61)).await;
    tokio::time::resume();
    send(&mut stream, KEEP_ALIVE).await;
    assert_eq!(next_status(&mut stream).await.as_deref(), Some("401"));
    port.end().await;
}

#[tokio::test]
async fn token_guesses_do_not_delay_the_token_of_another_address() {
    let port = Port::open(false).await;
    let mut guesses = Vec::new();
    for number in 0..UNAUTHENTICATED.per_address {
        let mut stream = port.connect(None, b"http/1.1").await;
        send(&mut stream, &with_token(&format!("never-answered-{number}"))).await;
        guesses.push(stream);
    }
    let mut other = connect_from(&port, 0, 2).await.unwrap();
    send(&mut other, &with_token("token-of-healthz")).await;
    assert_eq!(next_status(&mut other).await.as_deref(), Some("200"));
    port.end().await;
}

/// A stranger that asks once a period with a guessed token, and connects again for it if it was closed.
async fn ask_for_ever(port: Arc<Port>, number: usize, period: Duration) {
    let (third, last) = (1 + (number / 32) as u8, 1 + (number % 32) as u8);
    let request = with_token(&format!("guess-{number}"));
    tokio::time::sleep(period * (number % 1000) as u32 / 1000).await;
    let mut stream = None;
    loop {
        let next = tokio::time::sleep(period);
        if stream.is_none() {
            stream = connect_from(&port, third, last).await.ok();
        }
        if let Some(mut open) = stream.take()
            && open.write_all(request.as_bytes()).await.is_ok()
        {
            let reading = async { while open.read(&mut [0; 512]).await.is_ok_and(|count| count > 0) {} };
            if timeout(period, reading).await.is_err() {
                stream = Some(open);
            }
        }
        next.await;
    }
}

/// The clients are in the same process, and count.
#[tokio::test]
#[ignore = "takes 100 s, and needs the processor for itself: cargo test -p rubelet strangers_do_not -- --ignored --nocapture"]
async fn strangers_do_not_delay_authenticated_callers() {
    let (count, period) = (2048, Duration::from_secs(80));
    let port = Arc::new(Port::open(false).await);
    let root = port.authority.client("root");
    let before = memory_bytes();
    let strangers: Vec<_> = (0..count).map(|number| tokio::spawn(ask_for_ever(port.clone(), number, period))).collect();
    let (end, mut longest, mut most) = (tokio::time::Instant::now() + period * 5 / 4, Duration::ZERO, 0);
    let mut asked = 0;
    while tokio::time::Instant::now() < end {
        #[expect(clippy::disallowed_methods, reason = "the test measures real time")]
        let start = Instant::now();
        assert_eq!(port.ask(&Caller::Certificate(&root), "GET /healthz").await, "200 ok");
        assert_eq!(port.ask(&Caller::Token("token-of-healthz"), "GET /healthz").await, "200 ok");
        longest = longest.max(start.elapsed());
        most = most.max(memory_bytes().saturating_sub(before));
        asked += 2;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("{count} strangers: {asked} requests, longest two {longest:?}, {} KiB more", most >> 10);
    assert!(longest < Duration::from_secs(1), "{longest:?}");
    assert!(most < 64 * MIB, "{} MiB more", most / MIB);
    for stranger in strangers {
        stranger.abort();
        let _ = stranger.await;
    }
    Arc::into_inner(port).expect("all strangers are gone").end().await;
}
