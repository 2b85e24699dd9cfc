//! HTTP GET for manifests.
//!
//! Owns: one connection per request, its deadline, its size limit, redirects. Never: keeps connections or tasks, logs headers.
//! Upstream: `config/http.go` over Go's default client.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header, uri::Scheme};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    body::{Bytes, Incoming},
    rt,
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use tower::ServiceExt;

use crate::{
    linux::blocking,
    port::{FetchRequest, FetchResponse},
};

/// Go's client gives up at the same number of requests.
const MAX_REQUESTS: usize = 10;

#[derive(Clone, Debug, Default)]
pub(crate) struct Fetcher {
    /// Created at the first `https` URL, because loading the node's CAs takes time and memory.
    tls: Arc<OnceLock<HttpsConnector<HttpConnector>>>,
}

impl Fetcher {
    pub(crate) async fn fetch(&self, request: &FetchRequest) -> io::Result<FetchResponse> {
        tokio::time::timeout(request.timeout, self.follow(request))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {:?}", request.timeout)))?
    }

    async fn follow(&self, request: &FetchRequest) -> io::Result<FetchResponse> {
        let mut uri: Uri = request.url.parse().map_err(|error| invalid(format!("invalid URL: {error}")))?;
        let mut headers = headers(&request.headers)?;
        for _ in 0..MAX_REQUESTS {
            check(&uri)?;
            let answer = self.get(&uri, &headers, request.limit_bytes).await?;
            let Some(next) = answer.redirected_to else {
                return Ok(FetchResponse { status: answer.status, body: answer.body });
            };
            let next = resolve(&uri, &next)?;
            if next.host() != uri.host() || (is_https(&uri) && !is_https(&next)) {
                // Credentials are sent only to the server they were given for.
                for secret in [header::AUTHORIZATION, header::COOKIE, header::WWW_AUTHENTICATE] {
                    headers.remove(secret);
                }
            }
            uri = next;
        }
        Err(io::Error::other(format!("stopped after {MAX_REQUESTS} redirects")))
    }

    async fn get(&self, uri: &Uri, headers: &HeaderMap, limit_bytes: u64) -> io::Result<RawResponse> {
        if is_https(uri) {
            let connection = self.tls().await?.oneshot(uri.clone()).await.map_err(|error| unreachable(uri, &*error))?;
            exchange(connection, request(uri, headers)?, limit_bytes).await
        } else {
            let connection =
                HttpConnector::new().oneshot(uri.clone()).await.map_err(|error| unreachable(uri, &error))?;
            exchange(connection, request(uri, headers)?, limit_bytes).await
        }
    }

    async fn tls(&self) -> io::Result<HttpsConnector<HttpConnector>> {
        if let Some(connector) = self.tls.get() {
            return Ok(connector.clone());
        }
        let connector = blocking(|| {
            let mut tcp = HttpConnector::new();
            tcp.enforce_http(false);
            let provider = rustls::crypto::ring::default_provider();
            let builder = HttpsConnectorBuilder::new().with_provider_and_native_roots(provider)?;
            Ok::<_, io::Error>(builder.https_only().enable_http1().wrap_connector(tcp))
        })
        .await?;
        Ok(self.tls.get_or_init(|| connector).clone())
    }
}

struct RawResponse {
    status: u16,
    redirected_to: Option<String>,
    body: Vec<u8>,
}

async fn exchange<C>(connection: C, request: Request<Empty<Bytes>>, limit_bytes: u64) -> io::Result<RawResponse>
where
    C: rt::Read + rt::Write + Unpin,
{
    let read = async |response| read_response(response, limit_bytes).await;
    converse(connection, request, read).await
}

/// One request over a fresh connection. The connection is driven here, so it ends with this future.
pub(crate) async fn converse<C, T>(
    connection: C,
    request: Request<Empty<Bytes>>,
    read: impl AsyncFnOnce(Response<Incoming>) -> io::Result<T>,
) -> io::Result<T>
where
    C: rt::Read + rt::Write + Unpin,
{
    let (mut sender, driver) = hyper::client::conn::http1::handshake(connection).await.map_err(io::Error::other)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        read(response).await
    };
    tokio::pin!(driver, answer);
    tokio::select! {
        biased;
        // The driver runs until the connection closes; its error also comes out of `answer`. Losing it ends both.
        answer = &mut answer => answer,
        _ = &mut driver => answer.await,
    }
}

async fn read_response(response: Response<Incoming>, limit_bytes: u64) -> io::Result<RawResponse> {
    let status = response.status();
    let location = response.headers().get(header::LOCATION).and_then(|location| location.to_str().ok());
    if let (301 | 302 | 303 | 307 | 308, Some(location)) = (status.as_u16(), location) {
        return Ok(RawResponse { status: status.as_u16(), redirected_to: Some(location.to_owned()), body: Vec::new() });
    }
    let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
    let body = Limited::new(response.into_body(), limit).collect().await.map_err(io::Error::other)?;
    Ok(RawResponse { status: status.as_u16(), redirected_to: None, body: body.to_bytes().to_vec() })
}

fn request(uri: &Uri, headers: &HeaderMap) -> io::Result<Request<Empty<Bytes>>> {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let authority = uri.authority().expect("checked before connecting").as_str();
    let mut request = Request::get(path).body(Empty::new()).map_err(io::Error::other)?;
    *request.headers_mut() = headers.clone();
    request.headers_mut().insert(header::HOST, HeaderValue::from_str(authority).map_err(io::Error::other)?);
    Ok(request)
}

fn headers(given: &[(String, String)]) -> io::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(header::USER_AGENT, HeaderValue::from_static(concat!("rubelet/", env!("CARGO_PKG_VERSION"))));
    for (name, value) in given {
        // The value may be a secret, so the message names only the header.
        let value = HeaderValue::from_str(value).map_err(|_| invalid(format!("invalid value of header {name}")))?;
        let name =
            HeaderName::from_bytes(name.as_bytes()).map_err(|_| invalid(format!("invalid header name {name:?}")))?;
        if name == header::USER_AGENT {
            headers.insert(name, value);
        } else {
            headers.append(name, value);
        }
    }
    Ok(headers)
}

fn check(uri: &Uri) -> io::Result<()> {
    if !is_https(uri) && uri.scheme() != Some(&Scheme::HTTP) {
        return Err(invalid("only http and https URLs are fetched".to_owned()));
    }
    match uri.authority() {
        None => Err(invalid("the URL names no host".to_owned())),
        Some(authority) if authority.as_str().contains('@') => {
            Err(invalid("credentials inside a URL are not supported; send them in a header".to_owned()))
        }
        Some(_) => Ok(()),
    }
}

/// Resolves a `Location` relative to the page that sent it.
pub(crate) fn resolve(base: &Uri, location: &str) -> io::Result<Uri> {
    let location = location.split('#').next().unwrap_or_default();
    let scheme = base.scheme_str().unwrap_or("http");
    let authority = base.authority().map_or("", |authority| authority.as_str());
    let absolute = if location.contains("://") {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let directory = base.path().rsplit_once('/').map_or("", |(directory, _)| directory);
        format!("{scheme}://{authority}{directory}/{location}")
    };
    absolute.parse().map_err(|error| invalid(format!("redirected to an invalid URL: {error}")))
}

pub(crate) fn is_https(uri: &Uri) -> bool {
    uri.scheme() == Some(&Scheme::HTTPS)
}

fn unreachable(uri: &Uri, error: &(dyn std::error::Error + 'static)) -> io::Error {
    // Without the authority, which may have user and password.
    let port = uri.port().map_or(String::new(), |port| format!(":{port}"));
    let mut message = format!("connect to {}{port}: {error}", uri.host().unwrap_or_default());
    let mut source = error.source();
    while let Some(cause) = source {
        message.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    io::Error::new(io::ErrorKind::NotConnected, message)
}

pub(crate) fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::*;
    use crate::testing::WebServer;

    impl WebServer {
        async fn get(&self, path: &str) -> Result<FetchResponse, String> {
            get(&format!("http://{}{path}", self.address), &[]).await
        }
    }

    async fn get(url: &str, headers: &[(&str, &str)]) -> Result<FetchResponse, String> {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let timeout = Duration::from_secs(2);
        let request = FetchRequest { url: url.to_owned(), headers, limit_bytes: 1000, timeout };
        Fetcher::default().fetch(&request).await.map_err(|error| error.to_string())
    }

    fn ok(body: &str) -> String {
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }

    fn moved(to: &str) -> String {
        format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n")
    }

    #[tokio::test]
    async fn headers_are_sent_and_response_returned() {
        let server = WebServer::new(ok).await;
        let headers = [("X-Token", "a"), ("X-Token", "b"), ("User-Agent", "me"), ("Host", "elsewhere")];
        let answer = get(&format!("http://{}/p?q=1", server.address), &headers).await.unwrap();
        let heard = String::from_utf8(answer.body).unwrap().replace(&server.address, "ADDRESS");
        insta::assert_snapshot!(heard.replace('\r', ""), @"
        GET /p?q=1 HTTP/1.1
        user-agent: me
        x-token: a
        x-token: b
        host: ADDRESS
        ");
        let server = WebServer::new(|_| "HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy".to_owned()).await;
        assert_eq!(server.get("/").await, Ok(FetchResponse { status: 503, body: b"busy".to_vec() }));
    }

    #[tokio::test]
    async fn an_answer_over_the_limit_is_an_error_however_it_is_sent() {
        assert_eq!(WebServer::new(|_| ok(&"x".repeat(1000))).await.get("/").await.unwrap().body.len(), 1000);
        for answer in [
            ok(&"x".repeat(1001)),
            format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n800\r\n{}\r\n0\r\n\r\n", "x".repeat(0x800)),
            format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", "x".repeat(1_000_000)),
        ] {
            let server = WebServer::new(move |_| answer.clone()).await;
            assert_eq!(server.get("/").await, Err("length limit exceeded".to_owned()));
        }
    }

    #[tokio::test]
    async fn silent_or_partial_response_times_out() {
        let server = WebServer::new(|_| "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf".to_owned()).await;
        server.get("/").await.unwrap_err();
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", silent.local_addr().unwrap());
        assert_eq!(get(&url, &[]).await, Err("no answer within 2s".to_owned()));
        drop(silent);
        assert!(get(&url, &[]).await.unwrap_err().contains("Connection refused"));
    }

    #[tokio::test]
    async fn redirects_are_followed_ten_requests_far() {
        let server = WebServer::new(|request| {
            let path = request.split(' ').nth(1).unwrap();
            match path {
                "/a/start" => moved("next?x=1#part"),
                "/a/next?x=1" => moved("/end"),
                "/end" => ok("arrived"),
                "/file" => moved("file:///etc/passwd"),
                other => moved(other),
            }
        })
        .await;
        assert_eq!(server.get("/a/start").await.unwrap().body, b"arrived");
        assert_eq!(server.get("/loop").await, Err("stopped after 10 redirects".to_owned()));
        server.get("/file").await.unwrap_err();
    }

    #[tokio::test]
    async fn credentials_stay_with_the_host_they_are_for() {
        let other = WebServer::new(ok).await;
        let port = other.address.rsplit_once(':').unwrap().1.to_owned();
        // The same server under another name is another host.
        let target = format!("http://localhost:{port}/");
        let server = WebServer::new(move |_| moved(&target)).await;
        let headers = [("Authorization", "secret"), ("Cookie", "secret"), ("X-Plain", "kept")];
        match get(&format!("http://{}/", server.address), &headers).await {
            Ok(answer) => {
                let heard = String::from_utf8(answer.body).unwrap();
                assert!(heard.contains("kept") && !heard.contains("secret"), "{heard}");
            }
            Err(error) => panic!("localhost must lead to 127.0.0.1 here: {error}"),
        }
    }

    #[tokio::test]
    async fn invalid_urls_are_rejected_without_leaking_secrets() {
        let cases = [
            ("ftp://host/", "x", "only http and https URLs are fetched"),
            ("/path", "x", "only http and https URLs are fetched"),
            ("http://user:password@host/", "x", "credentials inside a URL are not supported; send them in a header"),
            ("http://host/", "secret\n", "invalid value of header X"),
        ];
        for (url, value, expected) in cases {
            assert_eq!(get(url, &[("X", value)]).await, Err(expected.to_owned()));
        }
    }

    #[test]
    fn no_error_shows_a_password() {
        let error = io::Error::other("refused");
        let shown = |url: &str| unreachable(&url.parse().unwrap(), &error).to_string();
        assert_eq!(shown("http://user:password@host:8080/p"), "connect to host:8080: refused");
        assert_eq!(shown("https://user:password@host/p?q"), "connect to host: refused");
        let base = "http://host/".parse().unwrap();
        let location = resolve(&base, "http://user:password@ho st/").unwrap_err().to_string();
        assert!(!location.contains("password"), "{location}");
    }

    #[tokio::test]
    async fn https_does_not_fall_back_to_plain_text() {
        let server = WebServer::new(|_| ok("plain")).await;
        let error = get(&format!("https://{}/", server.address), &[]).await.unwrap_err();
        assert!(error.starts_with("connect to 127.0.0.1") || error.contains("certificate"), "{error}");
    }
}
