//! Tests of the kubelet's port over real TLS.

use std::{fs, net::SocketAddr, path::Path, sync::Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use rubelet_cri::client::CriClient;
use rubelet_host::linux::LinuxHost;
use rubelet_kube::port::{ApiError, ApiErrorKind, ApiServer, Call, Watch, WatchStream};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::{Duration, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    authentication::TokenReviewer,
    authorization::WebhookAuthorizer,
    certificates::CertificateAuthenticator,
    system_logs::SystemLogs,
    tls::{Tls, TlsSettings},
    *,
};
use crate::{
    objects::Strategy,
    server::{tests::context, views},
    world::{Clock, Cluster},
};

mod hostile;
mod matrix;
mod strangers;

/// Maps tokens to users and users to permissions, and records the reviews.
#[derive(Default)]
pub(super) struct Reviewer {
    asked: Mutex<Vec<String>>,
    is_away: Mutex<bool>,
}

#[async_trait]
impl ApiServer for Reviewer {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        if *self.is_away.lock().unwrap() {
            return Err(ApiError::new(ApiErrorKind::Unreachable, "connection refused"));
        }
        let body = call.body.unwrap();
        if String::from_utf8_lossy(&body).contains("never-answered") {
            return std::future::pending().await;
        }
        let mut review: Value = serde_json::from_slice(&body).unwrap();
        let spec = review["spec"].take();
        review["status"] = if call.path.resource == "tokenreviews" {
            let token = spec["token"].as_str().unwrap();
            self.asked.lock().unwrap().push(format!("who is {token}?"));
            let user = token.strip_prefix("token-of-");
            json!({ "authenticated": user.is_some(), "user": { "username": user.unwrap_or_default() } })
        } else {
            let right = &spec["resourceAttributes"];
            let (user, subresource) = (spec["user"].as_str().unwrap(), right["subresource"].as_str().unwrap());
            let question = format!("may {user} {} {subresource}?", right["verb"].as_str().unwrap_or("-"));
            self.asked.lock().unwrap().push(question);
            assert_eq!((&right["resource"], &right["name"]), (&json!("nodes"), &json!("n1")));
            let missing: Option<Vec<&str>> =
                user.strip_prefix("all-but-").map(|authorizer| authorizer.split('+').collect());
            let has_others = missing.is_some_and(|missing| !missing.contains(&subresource));
            let may_get = user == "getter" && right["verb"] == "get";
            json!({ "allowed": may_get || user == "root" || user == subresource || has_others })
        };
        review["spec"] = spec;
        Ok(review.to_string().into())
    }

    async fn watch(&self, _watch: Watch) -> Result<WatchStream, ApiError> {
        Ok(Box::pin(futures_util::stream::pending()))
    }
}

/// Signs client certificates.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

pub(super) struct Pair {
    chain: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(super) fn client(&self, name: &str) -> Pair {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pair { chain: certificate.pem(), key: key.serialize_pem() }
    }
}

/// The port, closed on drop.
pub(super) struct Port {
    address: SocketAddr,
    pub(super) dir: tempfile::TempDir,
    pub(super) authority: Authority,
    reviewer: Arc<Reviewer>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    _sender: tokio::sync::watch::Sender<Arc<rubelet_core::snapshot::Snapshot>>,
}

/// How a port is configured.
struct Opening {
    anonymous: bool,
    debugging: bool,
    curves: Vec<i32>,
    limits: Limits,
    exec_verb: ExecVerb,
}

impl Default for Opening {
    fn default() -> Self {
        Opening {
            anonymous: false,
            debugging: true,
            curves: Vec::new(),
            limits: Limits::SECURED_PORT,
            exec_verb: ExecVerb::OfMethod,
        }
    }
}

impl Port {
    pub(super) async fn open(anonymous: bool) -> Port {
        Port::open_as(Opening { anonymous, ..Opening::default() }).await
    }

    async fn open_as(Opening { anonymous, debugging, curves, limits, exec_verb }: Opening) -> Port {
        let dir = tempfile::tempdir().unwrap();
        let clock = Clock::system();
        fs::create_dir(dir.path().join("var-log")).unwrap();
        make_certificate(dir.path()).await;
        let authority = Authority::new();
        fs::write(dir.path().join("ca.crt"), authority.0.pem()).unwrap();
        let web = views::tests::view("default", "web-n1", &["a"], &[], json!({ "phase": "Running" }));
        let (sender, context) = context(views::tests::snapshot("n1", [("u1", web)]), dir.path());
        let reviewer = Arc::new(Reviewer::default());
        let cluster = Cluster::new(reviewer.clone(), Strategy::Watch, "n1", &clock);
        let (tls, _) = Tls::new(TlsSettings {
            certificate: dir.path().join("kubelet.crt"),
            key: dir.path().join("kubelet.key"),
            client_authority: Some(dir.path().join("ca.crt")),
            min_version: String::new(),
            cipher_suites: Vec::new(),
            curves,
        });
        let certificates = Arc::new(CertificateAuthenticator { tls: Arc::new(tls), clock: clock.clone() });
        let minute = Duration::from_secs(60);
        let tokens = Some(TokenReviewer::new(cluster.clone(), minute, clock.clone()));
        let authorizer = WebhookAuthorizer::new(cluster, "n1", minute, minute, clock);
        let guard = Guard {
            authentication: Authentication { certificates: certificates.clone(), tokens, anonymous },
            authorization: Authorization::Webhook(authorizer),
            exec_verb,
        };
        let endpoint = format!("unix://{}/no.sock", dir.path().display());
        let secured = Secured {
            context,
            runtime: Arc::new(CriClient::new(&endpoint, &endpoint, Duration::from_secs(1)).unwrap()),
            guard: Arc::new(guard),
            configuration: Arc::new(json!({ "kind": "KubeletConfiguration" })),
            translates_websockets: true,
            debugging,
            pages: Arc::new(Pages {
                flags: Some([("v", "2".to_owned())].into()),
                has_statusz: true,
                has_checkpoint: true,
                has_debug_flags: true,
                system_logs: SystemLogs::FilesAndQueries { dir: dir.path().join("var-log") },
            }),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let listener = TlsListener { listener, certificates };
            connections::serve(&listener, router(secured), limits, &stopped).await;
        });
        Port { address, dir, authority, reviewer, stop, task, _sender: sender }
    }

    pub(super) async fn connect(&self, pair: Option<&Pair>, protocol: &[u8]) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        self.connector(pair, protocol).connect("n1".try_into().unwrap(), stream).await.unwrap()
    }

    fn connector(&self, pair: Option<&Pair>, protocol: &[u8]) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        let chain = fs::read(self.dir.path().join("kubelet.crt")).unwrap();
        roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&chain).map(Result::unwrap));
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match pair {
            None => config.with_no_client_auth(),
            Some(pair) => {
                let chain = CertificateDer::pem_slice_iter(pair.chain.as_bytes()).map(Result::unwrap).collect();
                config
                    .with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap())
                    .unwrap()
            }
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        TlsConnector::from(Arc::new(config))
    }

    /// Status and the beginning of the body.
    async fn ask(&self, caller: &Caller<'_>, request: &str) -> String {
        let (pair, token) = match caller {
            Caller::Nobody => (None, None),
            Caller::Token(token) => (None, Some(token)),
            Caller::Certificate(pair) => (Some(*pair), None),
        };
        let mut stream = self.connect(pair, b"http/1.1").await;
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        stream.write_all(head_of(request, &token).as_bytes()).await.unwrap();
        read_answer(&mut stream).await
    }

    async fn status(&self, caller: &Caller<'_>, request: &str) -> String {
        self.ask(caller, request).await.split(' ').next().unwrap().to_owned()
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.reviewer.asked.lock().unwrap())
    }

    pub(super) async fn end(self) {
        self.stop.cancel();
        timeout(Duration::from_secs(5), self.task).await.expect("the server ends at stop").unwrap();
    }
}

fn head_of(request: &str, more: &str) -> String {
    format!("{request} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n{more}\r\n")
}

/// Status and the beginning of the body.
async fn read_answer(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> String {
    let mut answer = Vec::new();
    let _ = timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let body: String = body.replace('\n', "|").chars().take(110).collect();
    format!("{} {body}", head.split(' ').nth(1).unwrap())
}

async fn make_certificate(dir: &Path) {
    let now = Clock::system().now().wall;
    crate::certs::self_signed(&LinuxHost::default(), dir, "n1", &[], now).await.unwrap();
}

enum Caller<'a> {
    Nobody,
    Token(&'a str),
    Certificate(&'a Pair),
}

#[tokio::test]
async fn invalid_credentials_are_not_anonymous() {
    let port = Port::open(true).await;
    let forbidden = "403 Forbidden (user=system:anonymous, verb=get, resource=nodes, subresource(s)=[pods proxy])|";
    assert_eq!(port.ask(&Caller::Nobody, "GET /pods").await, forbidden);
    assert_eq!(port.ask(&Caller::Token("guessed"), "GET /pods").await, "401 Unauthorized");
    let stranger = Authority::new().client("root");
    assert_eq!(port.ask(&Caller::Certificate(&stranger), "GET /pods").await, "401 Unauthorized");
    port.end().await;
}

#[tokio::test]
async fn websocket_exec_needs_create_only_where_configured() {
    const UPGRADE: &str = "HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-End:";
    let getter = Caller::Token("token-of-getter");
    for (exec_verb, expected) in [(ExecVerb::OfMethod, "500"), (ExecVerb::Create, "403")] {
        let port = Port::open_as(Opening { exec_verb, ..Opening::default() }).await;
        for path in [
            "/exec/default/web-n1/a?output=1&command=ls",
            "/exec/default/web-n1/u1/a?output=1&command=ls",
            "/attach/default/web-n1/a?output=1",
            "/portForward/default/web-n1?port=80",
        ] {
            let request = format!("GET {path} {UPGRADE}");
            assert_eq!(port.status(&getter, &request).await, expected, "{exec_verb:?} {path}");
        }
        assert_eq!(port.status(&getter, "GET /pods").await, "200");
        port.end().await;
    }
}

#[tokio::test]
async fn cached_authorizations_hold_during_api_outage() {
    let port = Port::open(false).await;
    let known = Caller::Token("token-of-healthz");
    for _ in 0..3 {
        assert_eq!(port.ask(&known, "GET /healthz").await, "200 ok");
    }
    assert_eq!(port.asked(), ["who is token-of-healthz?", "may healthz get healthz?"]);
    *port.reviewer.is_away.lock().unwrap() = true;
    assert_eq!(port.ask(&known, "GET /healthz").await, "200 ok");
    assert_eq!(port.ask(&Caller::Token("token-of-pods"), "GET /pods").await, "401 Unauthorized");
    let error = "500 Authorization error (user=healthz, verb=get, resource=nodes, subresource=pods)";
    assert_eq!(port.ask(&known, "GET /pods").await, error);
    *port.reviewer.is_away.lock().unwrap() = false;
    assert!(port.ask(&Caller::Token("token-of-pods"), "GET /pods").await.starts_with("200 "));
    port.end().await;
}

#[tokio::test]
async fn certificate_and_client_ca_reload_without_restart() {
    let mut port = Port::open(false).await;
    let old = port.authority.client("root");
    assert_eq!(port.ask(&Caller::Certificate(&old), "GET /healthz").await, "200 ok");
    for name in ["kubelet.crt", "kubelet.key"] {
        fs::remove_file(port.dir.path().join(name)).unwrap();
    }
    // While the files are missing the last certificate is used, then the new one.
    make_certificate(port.dir.path()).await;
    port.authority = Authority::new();
    fs::write(port.dir.path().join("ca.crt"), port.authority.0.pem()).unwrap();
    assert_eq!(port.ask(&Caller::Certificate(&old), "GET /healthz").await, "401 Unauthorized");
    let new = port.authority.client("root");
    assert_eq!(port.ask(&Caller::Certificate(&new), "GET /healthz").await, "200 ok");
    fs::write(port.dir.path().join("ca.crt"), "half wri").unwrap();
    assert_eq!(port.ask(&Caller::Certificate(&new), "GET /healthz").await, "200 ok");
    port.end().await;
}

#[tokio::test]
async fn http2_requests_are_served() {
    let port = Port::open(false).await;
    let pair = port.authority.client("root");
    let stream = hyper_util::rt::TokioIo::new(port.connect(Some(&pair), b"h2").await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for _ in 0..3 {
        let request = http::Request::get("https://n1/healthz").body(http_body_util::Empty::<Bytes>::new()).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
    }
    drop(sender);
    connection.await.unwrap().unwrap();
    port.end().await;
}

#[tokio::test]
async fn keys_are_exchanged_over_the_curves_that_are_preferred() {
    for (curves, expected) in
        [(vec![], "X25519"), (vec![25, 24], "secp384r1"), (vec![23], "secp256r1"), (vec![25], "X25519")]
    {
        let port = Port::open_as(Opening { curves: curves.clone(), ..Opening::default() }).await;
        let stream = port.connect(None, b"http/1.1").await;
        let group = stream.get_ref().1.negotiated_key_exchange_group().unwrap();
        assert_eq!(format!("{:?}", group.name()), expected, "{curves:?}");
        port.end().await;
    }
    let settings = TlsSettings {
        certificate: "/none".into(),
        key: "/none".into(),
        client_authority: None,
        min_version: String::new(),
        cipher_suites: Vec::new(),
        curves: vec![23, 25, 4588],
    };
    assert_eq!(Tls::new(settings).1.curves, [25, 4588]);
}
