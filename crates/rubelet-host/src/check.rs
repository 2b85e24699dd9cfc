//! Connections to containers, for probes and hooks.
//!
//! Owns: one connection per check, its deadline, redirects on the same host, Go's error texts.
//! Never: verifies the server (upstream does not either), keeps connections, evaluates the response.
//! Upstream: `probe/http`, `probe/tcp`.

mod grpc;

use std::{
    error::Error,
    io,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use rubelet_core::id::PodUid;
use rubelet_tls::{AnyPeer, KeyProof};
use rustix::io::Errno;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tokio_util::io::InspectReader;

pub(crate) use grpc::check_grpc;

use crate::{
    fetch::{converse, invalid, is_https, resolve},
    names::Names,
    port::{CheckError, FetchResponse, HttpCheck, TcpCheck},
};

/// The limit of a body; the rest is not read.
const BODY_LIMIT_BYTES: usize = 10 << 10;
const MAX_REQUESTS: usize = 10;
/// The start of a response without TLS.
const PLAIN_HTTP: &[u8] = b"HTTP/";

#[derive(Clone, Debug, Default)]
pub(crate) struct Checker {
    names: Names,
    /// Created at the first `https` URL: most nodes need none.
    tls: Arc<OnceLock<Arc<ClientConfig>>>,
}

impl Checker {
    /// Opens a TCP connection and closes it.
    pub(crate) async fn check_tcp(&self, check: &TcpCheck) -> io::Result<()> {
        let address = address(&check.host, check.port);
        match timeout(check.timeout, self.dial(&check.pod, &check.host, check.port)).await {
            Ok(connection) => connection.map(drop),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("dial tcp {address}: i/o timeout"))),
        }
    }

    pub(crate) async fn check_http(&self, check: &HttpCheck) -> Result<FetchResponse, CheckError> {
        let has_headers = AtomicBool::new(false);
        timeout(check.timeout, self.follow(check, &has_headers)).await.unwrap_or_else(|_| {
            let late = "context deadline exceeded";
            if has_headers.load(Ordering::Relaxed) {
                let message = format!("{late} (Client.Timeout or context cancellation while reading body)");
                return Err(CheckError::Body(message));
            }
            let message = format!("{late} (Client.Timeout exceeded while awaiting headers)");
            Err(io::Error::new(io::ErrorKind::TimedOut, message).into())
        })
    }

    /// `has_headers` tells whether the response head has arrived.
    async fn follow(&self, check: &HttpCheck, has_headers: &AtomicBool) -> Result<FetchResponse, CheckError> {
        let first: Uri = check.url.parse().map_err(|error| invalid(format!("invalid URL: {error}")))?;
        let mut headers = headers(&check.headers)?;
        let mut uri = first.clone();
        for _ in 0..MAX_REQUESTS {
            has_headers.store(false, Ordering::Relaxed);
            let answer = self.get(&check.pod, &uri, &headers, has_headers).await?;
            let Some(location) = &answer.location else { return answer.response() };
            let next = resolve(&uri, location)?;
            if next.host() != first.host() {
                return answer.response();
            }
            // A configured Host header is sent only to the same server.
            if location.contains("://") {
                headers.remove(header::HOST);
            }
            uri = next;
        }
        Err(io::Error::other(format!("stopped after {MAX_REQUESTS} redirects")).into())
    }

    async fn get(
        &self,
        pod: &PodUid,
        uri: &Uri,
        headers: &HeaderMap,
        has_headers: &AtomicBool,
    ) -> Result<RawResponse, CheckError> {
        let read = async |response| {
            has_headers.store(true, Ordering::Relaxed);
            Ok(read_response(response).await)
        };
        let host = uri.host().ok_or_else(|| invalid("the URL names no host".to_owned()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = uri.port_u16().unwrap_or(if is_https(uri) { 443 } else { 80 });
        let connection = self.dial(pod, host, port).await?;
        let request = request(uri, headers)?;
        if !is_https(uri) {
            return Ok(converse(TokioIo::new(connection), request, read).await?);
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|error| invalid(error.to_string()))?;
        let mut first = Vec::new();
        let overheard = InspectReader::new(connection, |bytes| {
            let missing = PLAIN_HTTP.len() - first.len();
            first.extend_from_slice(&bytes[..missing.min(bytes.len())]);
        });
        let error = match TlsConnector::from(self.tls()).connect(name, overheard).await {
            Ok(connection) => return Ok(converse(TokioIo::new(connection), request, read).await?),
            Err(error) => error,
        };
        if first == PLAIN_HTTP { Err(CheckError::PlainHttp) } else { Err(error.into()) }
    }

    async fn dial(&self, pod: &PodUid, host: &str, port: u16) -> io::Result<TcpStream> {
        match self.names.look_up(pod, host, port).await {
            Ok(addresses) => dial(&addresses, &address(host, port)).await,
            Err(error) => Err(dial_error(&error, &address(host, port))),
        }
    }

    fn tls(&self) -> Arc<ClientConfig> {
        let make = || {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            // A probe checks that the server responds, not its identity.
            let verifier = AnyPeer::new(&provider, KeyProof::Ignored);
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("ring has what the default versions of TLS need")
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_no_client_auth();
            Arc::new(config)
        };
        self.tls.get_or_init(make).clone()
    }
}

struct RawResponse {
    status: u16,
    location: Option<String>,
    /// Or why it broke off.
    body: Result<Vec<u8>, String>,
}

impl RawResponse {
    fn response(self) -> Result<FetchResponse, CheckError> {
        let body = self.body.map_err(CheckError::Body)?;
        Ok(FetchResponse { status: self.status, body })
    }
}

async fn read_response(response: Response<Incoming>) -> RawResponse {
    let status = response.status().as_u16();
    let location = response.headers().get(header::LOCATION).and_then(|location| location.to_str().ok());
    let location = location.filter(|_| matches!(status, 301 | 302 | 303 | 307 | 308)).map(str::to_owned);
    RawResponse { status, location, body: read_body(response.into_body()).await }
}

async fn read_body(mut frames: Incoming) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while body.len() < BODY_LIMIT_BYTES
        && let Some(frame) = frames.frame().await
    {
        if let Some(data) = frame.map_err(|error| broken_body(&error))?.data_ref() {
            body.extend_from_slice(data);
        }
    }
    body.truncate(BODY_LIMIT_BYTES);
    Ok(body)
}

/// Go's text.
fn broken_body(error: &hyper::Error) -> String {
    match error.source().and_then(|cause| cause.downcast_ref::<io::Error>()) {
        Some(cause) if cause.kind() != io::ErrorKind::UnexpectedEof => format!("read: {}", go_text(cause)),
        Some(_) | None => "unexpected EOF".to_owned(),
    }
}

fn request(uri: &Uri, headers: &HeaderMap) -> io::Result<Request<Empty<Bytes>>> {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let mut request = Request::get(path).body(Empty::new()).map_err(io::Error::other)?;
    *request.headers_mut() = headers.clone();
    let own_name = HeaderValue::from_str(authority).map_err(io::Error::other)?;
    request.headers_mut().entry(header::HOST).or_insert(own_name);
    request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Ok(request)
}

fn headers(given: &[(String, String)]) -> io::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        // The value may be a secret, so the message names only the header.
        let value = HeaderValue::from_str(value).map_err(|_| invalid(format!("invalid value of header {name}")))?;
        let name =
            HeaderName::from_bytes(name.as_bytes()).map_err(|_| invalid(format!("invalid header name {name:?}")))?;
        headers.append(name, value);
    }
    Ok(headers)
}

async fn dial(addresses: &[SocketAddr], name: &str) -> io::Result<TcpStream> {
    TcpStream::connect(addresses).await.map_err(|error| dial_error(&error, name))
}

fn dial_error(error: &io::Error, name: &str) -> io::Error {
    let kind = if is_exhaustion(error) { io::ErrorKind::OutOfMemory } else { error.kind() };
    io::Error::new(kind, format!("dial tcp {name}: connect: {}", go_text(error)))
}

/// The node, not the container, lacks something: descriptors, memory, threads, local ports.
fn is_exhaustion(error: &io::Error) -> bool {
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS, Errno::AGAIN, Errno::ADDRNOTAVAIL];
    Errno::from_io_error(error).is_some_and(|error| exhausted.contains(&error))
}

/// As in a URL or a message.
pub fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Go prints the C library's text, without its number and in lower case.
fn go_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncWriteExt, net::TcpListener};

    use std::time::Duration;

    use super::*;
    use crate::testing::WebServer;

    async fn tcp(port: u16) -> io::Result<()> {
        let (pod, host) = ("pod".into(), "127.0.0.1".to_owned());
        Checker::default().check_tcp(&TcpCheck { pod, host, port, timeout: Duration::from_secs(2) }).await
    }

    async fn get(url: String, headers: &[(&str, &str)]) -> Result<FetchResponse, String> {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let check = HttpCheck { pod: "pod".into(), url, headers, timeout: Duration::from_secs(2) };
        Checker::default().check_http(&check).await.map_err(|error| error.to_string())
    }

    fn answer(status: &str, headers: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
    }

    #[tokio::test]
    async fn probe_sends_configured_headers() {
        let server = WebServer::new(|request| answer("200 OK", "", request)).await;
        let url = format!("http://{}/health?x=1", server.address);
        let heard = get(url, &[("User-Agent", "kube-probe/1.36"), ("Host", "example.com")]).await.unwrap();
        insta::assert_snapshot!(String::from_utf8(heard.body).unwrap().replace('\r', ""), @"
        GET /health?x=1 HTTP/1.1
        user-agent: kube-probe/1.36
        host: example.com
        connection: close
        ");
    }

    #[tokio::test]
    async fn a_redirect_is_followed_on_the_same_host_only() {
        let server = WebServer::new(|request| match request.split(' ').nth(1).unwrap() {
            "/here" => answer("302 Found", "Location: /there\r\n", ""),
            "/there" => answer("200 OK", "", "arrived"),
            "/away" => answer("302 Found", "Location: http://localhost:1/\r\n", "gone away"),
            other => answer("302 Found", &format!("Location: {other}\r\n"), ""),
        })
        .await;
        let url = |path: &str| format!("http://{}{path}", server.address);
        assert_eq!(get(url("/here"), &[]).await.unwrap().body, b"arrived");
        let away = FetchResponse { status: 302, body: b"gone away".to_vec() };
        assert_eq!(get(url("/away"), &[]).await, Ok(away));
        assert_eq!(get(url("/loop"), &[]).await, Err("stopped after 10 redirects".to_owned()));
    }

    #[tokio::test]
    async fn a_long_answer_is_cut_and_any_status_is_an_answer() {
        let server = WebServer::new(|_| answer("500 No", "", &"x".repeat(1 << 20))).await;
        let found = get(format!("http://{}/", server.address), &[]).await.unwrap();
        assert_eq!((found.status, found.body.len()), (500, BODY_LIMIT_BYTES));
    }

    #[tokio::test]
    async fn connection_errors_have_gos_texts() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = silent.local_addr().unwrap().port();
        let url = format!("http://127.0.0.1:{port}/");
        let late = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
        assert_eq!(get(url.clone(), &[]).await, Err(late.to_owned()));
        tcp(port).await.unwrap();
        drop(silent);
        let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
        assert_eq!(get(url, &[]).await, Err(refused.clone()));
        let error = tcp(port).await.unwrap_err();
        assert_eq!(error.to_string(), refused);
    }

    #[test]
    fn exhausted_node_differs_from_a_container_that_refuses() {
        let is = |error: Errno| is_exhaustion(&error.into());
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN] {
            assert!(is(error), "{error}");
        }
        assert!(!is(Errno::CONNREFUSED) && !is(Errno::HOSTUNREACH) && !is_exhaustion(&io::Error::other("dial")));
    }

    #[tokio::test]
    async fn broken_body_differs_from_no_response() {
        let half = |status: &str, more: &str| format!("HTTP/1.1 {status}\r\n{more}Content-Length: 100\r\n\r\nhalf");
        let server = WebServer::new(move |request| match request.split(' ').nth(1).unwrap() {
            "/moved" => half("302 Found", "Location: /whole\r\n"),
            "/whole" => answer("200 OK", "", "whole"),
            "/chunks" => "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n".to_owned(),
            _ => half("200 OK", ""),
        })
        .await;
        let url = |path: &str| format!("http://{}{path}", server.address);
        for path in ["/half", "/chunks"] {
            let check =
                HttpCheck { pod: "pod".into(), url: url(path), headers: Vec::new(), timeout: Duration::from_secs(2) };
            let error = Checker::default().check_http(&check).await.unwrap_err();
            assert!(matches!(&error, CheckError::Body(text) if text == "unexpected EOF"), "{path}: {error:?}");
        }
        assert_eq!(get(url("/moved"), &[]).await.unwrap().body, b"whole");

        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let check = HttpCheck {
            pod: "pod".into(),
            url: format!("http://{}/", silent.local_addr().unwrap()),
            headers: Vec::new(),
            timeout: Duration::from_millis(300),
        };
        let stall = async {
            let (mut connection, _) = silent.accept().await.unwrap();
            connection.write_all(half("200 OK", "").as_bytes()).await.unwrap();
            std::future::pending::<()>().await
        };
        let checker = Checker::default();
        let error = tokio::select! {
            biased;
            () = stall => unreachable!(),
            answer = checker.check_http(&check) => answer.unwrap_err(),
        };
        let late = "context deadline exceeded (Client.Timeout or context cancellation while reading body)";
        assert!(matches!(&error, CheckError::Body(text) if text == late), "{error:?}");
    }

    #[tokio::test]
    async fn self_signed_server_is_accepted_and_its_redirects_followed() {
        let server = WebServer::tls(|request| match request.split(' ').nth(1).unwrap() {
            "/here" => answer("307 Temporary Redirect", "Location: /there\r\n", ""),
            path => answer("200 OK", "", path),
        })
        .await;
        let url = |path: &str| format!("https://{}{path}", server.address);
        assert_eq!(get(url("/health"), &[]).await.unwrap().body, b"/health");
        assert_eq!(get(url("/here"), &[]).await.unwrap().body, b"/there");
        let plain = url("/").replace("https", "http");
        get(plain, &[]).await.unwrap_err();
    }

    #[tokio::test]
    async fn plain_http_server_differs_from_non_http_server() {
        let plain = WebServer::new(|_| answer("400 Bad Request", "", "Client sent no HTTP")).await;
        let said = get(format!("https://{}/", plain.address), &[]).await;
        assert_eq!(said, Err("http: server gave HTTP response to HTTPS client".to_owned()));
        let other = WebServer::new(|_| "220 smtp ready\r\n".to_owned()).await;
        let said = get(format!("https://{}/", other.address), &[]).await.unwrap_err();
        assert!(!said.contains("HTTP"), "{said}");
    }

    #[tokio::test]
    async fn a_secret_in_a_header_is_in_no_error() {
        let error = get("http://127.0.0.1:1/".to_owned(), &[("X-Token", "se\ncret")]).await.unwrap_err();
        assert_eq!(error, "invalid value of header X-Token");
    }
}
