//! A small API server: real sockets, real TLS, scripted responses.

use std::{
    convert::Infallible,
    fmt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

/// Signs certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "authority");
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn certificate_pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate and its key.
    pub fn sign(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// A directory with a CA certificate, a client certificate with its key, and kubeconfigs.
pub struct Certificates {
    directory: TempDir,
    authority: Authority,
}

impl Certificates {
    pub fn new() -> Self {
        let certificates = Certificates { directory: TempDir::new().unwrap(), authority: Authority::new() };
        std::fs::write(certificates.path("ca.crt"), certificates.authority.certificate_pem()).unwrap();
        certificates
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// As a rotation does: a new file replaces the old one.
    pub fn write_client(&self, name: &str) {
        let (certificate, key) = self.authority.sign(name);
        std::fs::write(self.path("client.tmp"), certificate + &key).unwrap();
        std::fs::rename(self.path("client.tmp"), self.path("client.pem")).unwrap();
    }

    pub fn kubeconfig(&self, server: &TestServer, name: &str) -> PathBuf {
        self.kubeconfig_for(&server.url, name)
    }

    pub fn kubeconfig_for(&self, url: &str, name: &str) -> PathBuf {
        self.write_client(name);
        let user = "{client-certificate: client.pem, client-key: client.pem}";
        self.write_kubeconfig(&format!("{{server: '{url}', certificate-authority: ca.crt}}"), user)
    }

    pub fn token_kubeconfig(&self, server: &TestServer, file: &str) -> PathBuf {
        self.write_kubeconfig(&format!("{{server: '{}'}}", server.url), &format!("{{tokenFile: {file}}}"))
    }

    pub fn write_kubeconfig(&self, cluster: &str, user: &str) -> PathBuf {
        let path = self.path("kubeconfig");
        let text = format!(
            "current-context: x\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {cluster}}}]\nusers: [{{name: u, user: {user}}}]\n"
        );
        std::fs::write(&path, text).unwrap();
        path
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http2,
    Http1,
    /// HTTP/1.1 without TLS.
    Plain,
}

/// A request as the script sees it.
#[derive(Debug)]
pub struct ReceivedRequest {
    /// The number of earlier requests.
    pub number: usize,
    pub method: http::Method,
    pub target: String,
    pub headers: HeaderMap,
    pub body: String,
    /// The common name in the client's certificate.
    pub peer: String,
}

impl ReceivedRequest {
    pub fn header(&self, name: &str) -> Option<String> {
        self.headers.get(name).map(|value| value.to_str().unwrap().to_owned())
    }
}

pub enum Answer {
    Whole {
        status: StatusCode,
        headers: HeaderMap,
        body: String,
    },
    /// Written by the test, see `TestServer::next_stream`.
    Stream,
    Never,
    /// The connection is closed instead.
    Cut,
}

impl Answer {
    pub fn ok(body: impl Into<String>) -> Self {
        Answer::Whole { status: StatusCode::OK, headers: HeaderMap::new(), body: body.into() }
    }

    pub fn status(status: StatusCode) -> Self {
        Answer::Whole { status, headers: HeaderMap::new(), body: String::new() }
    }

    pub fn with(mut self, name: &'static str, value: &'static str) -> Self {
        if let Answer::Whole { headers, .. } = &mut self {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        self
    }
}

/// The body of a response that the test writes. Dropping it ends the response.
pub struct ResponseBody(mpsc::UnboundedSender<String>);

impl ResponseBody {
    pub fn send(&self, text: String) {
        self.0.send(text).unwrap();
    }
}

pub struct TestServer {
    pub url: String,
    shared: Arc<Shared>,
    streams: tokio::sync::Mutex<mpsc::UnboundedReceiver<ResponseBody>>,
    _tasks: JoinSet<()>,
}

type Script = dyn Fn(&ReceivedRequest) -> Answer + Send + Sync;

struct Shared {
    script: Box<Script>,
    streams: mpsc::UnboundedSender<ResponseBody>,
    requests: AtomicUsize,
    connections: AtomicUsize,
    /// Changes when all connections are to be closed.
    cut: watch::Sender<u32>,
    open: watch::Sender<usize>,
}

impl TestServer {
    pub async fn start(
        certificates: &Certificates,
        protocol: Protocol,
        script: impl Fn(&ReceivedRequest) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let scheme = if protocol == Protocol::Plain { "http" } else { "https" };
        let (sender, streams) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            script: Box::new(script),
            streams: sender,
            requests: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            cut: watch::Sender::new(0),
            open: watch::Sender::new(0),
        });
        let acceptor = acceptor(certificates, protocol);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, acceptor, protocol, Arc::clone(&shared)));
        let streams = tokio::sync::Mutex::new(streams);
        TestServer { url: format!("{scheme}://{address}"), shared, streams, _tasks: tasks }
    }

    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// All connections ever made.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// The next response that is `Answer::Stream`.
    pub async fn next_stream(&self) -> ResponseBody {
        self.streams.lock().await.recv().await.unwrap()
    }

    pub async fn cut_connections(&self) {
        self.shared.cut.send_modify(|number| *number += 1);
        self.shared.open.subscribe().wait_for(|open| *open == 0).await.unwrap();
    }
}

fn acceptor(certificates: &Certificates, protocol: Protocol) -> TlsAcceptor {
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(certificates.authority.certificate_pem().as_bytes()).unwrap()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build().unwrap();
    let (certificate, key) = certificates.authority.sign("server");
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
        )
        .unwrap();
    if protocol == Protocol::Http2 {
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    }
    TlsAcceptor::from(Arc::new(config))
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, protocol: Protocol, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (acceptor, shared) = (acceptor.clone(), Arc::clone(&shared));
        connections.spawn(async move {
            if protocol == Protocol::Plain {
                return serve(stream, protocol, String::new(), shared).await;
            }
            // A client that rejects our certificate disconnects.
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let peer = common_name(&stream.get_ref().1.peer_certificates().unwrap()[0]);
            serve(stream, protocol, peer, shared).await;
        });
    }
}

/// The name is the only printable text of its kind that our authority puts into a certificate.
fn common_name(certificate: &CertificateDer<'_>) -> String {
    let text = String::from_utf8_lossy(certificate);
    let start = text.find("node-").expect("clients are called node-… in small letters");
    text[start..].chars().take_while(|letter| letter.is_ascii_lowercase() || *letter == '-').collect()
}

async fn serve<I>(stream: I, protocol: Protocol, peer: String, shared: Arc<Shared>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    shared.connections.fetch_add(1, Ordering::SeqCst);
    shared.open.send_modify(|open| *open += 1);
    let mut cut = shared.cut.subscribe();
    cut.mark_unchanged();
    let (cut_sender, mut cut_by_script) = mpsc::unbounded_channel();
    let service = service_fn(|request| answer(request, peer.clone(), Arc::clone(&shared), cut_sender.clone()));
    let io = TokioIo::new(stream);
    let serving = async {
        match protocol {
            Protocol::Http2 => {
                let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                builder.max_concurrent_streams(100).serve_connection(io, service).await
            }
            Protocol::Http1 | Protocol::Plain => {
                hyper::server::conn::http1::Builder::new().serve_connection(io, service).await
            }
        }
    };
    tokio::select! {
        biased;
        // All end the connection.
        _ = cut.changed() => {}
        _ = cut_by_script.recv() => {}
        _ = serving => {}
    }
    shared.open.send_modify(|open| *open -= 1);
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

async fn answer(
    request: Request<Incoming>,
    peer: String,
    shared: Arc<Shared>,
    cut: mpsc::UnboundedSender<()>,
) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let request = ReceivedRequest {
        number: shared.requests.fetch_add(1, Ordering::SeqCst),
        method: head.method,
        target: head.uri.path_and_query().unwrap().to_string(),
        headers: head.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
        peer,
    };
    match (shared.script)(&request) {
        Answer::Whole { status, headers, body } => {
            let mut response = Response::new(Full::new(Bytes::from(body)).boxed_unsync());
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            Ok(response)
        }
        Answer::Stream => {
            let (sender, receiver) = mpsc::unbounded_channel();
            shared.streams.send(ResponseBody(sender)).unwrap();
            let frames = stream::unfold(receiver, |mut receiver| async {
                let text: String = receiver.recv().await?;
                Some((Ok(Frame::data(Bytes::from(text))), receiver))
            });
            Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
        }
        Answer::Never => std::future::pending().await,
        Answer::Cut => {
            cut.send(()).unwrap();
            std::future::pending().await
        }
    }
}

impl fmt::Debug for TestServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestServer").field("url", &self.url).finish_non_exhaustive()
    }
}
