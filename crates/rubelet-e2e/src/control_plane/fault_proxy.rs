//! A proxy between an agent and the API server that injects faults, as networks and busy servers cause them.
//!
//! Owns: the faults. It terminates TLS of the agent with the API server's own certificate, and calls the API server as the node.
//! A seed determines which requests are affected.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::{Body, Bytes, Frame, Incoming},
    header,
    service::service_fn,
};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde_json::json;
use tokio::{net::TcpListener, time::Sleep};
use tokio_rustls::TlsAcceptor;

use crate::{background::BackgroundServer, control_plane::certificates::Identity, dice::Dice};

#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    faults: Arc<AtomicUsize>,
    _server: BackgroundServer,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    TooMany,
    Internal,
    Conflict,
    /// It is executed, but the response is an error.
    AnswerLost,
    /// A watch that ends in the middle after so many milliseconds.
    Cut(u64),
}

/// The inputs of a request.
struct Passage {
    server: String,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    dice: Mutex<Dice>,
    faults: Arc<AtomicUsize>,
}

impl FaultProxy {
    /// `serving` is the API server's certificate, `node` the one of the node.
    pub fn start(
        server: &str,
        authority: &Path,
        serving: &Identity,
        node: &Identity,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let acceptor = acceptor(serving)?;
        let faults = Arc::new(AtomicUsize::new(0));
        let passage = Passage {
            server: server.to_owned(),
            client: client(authority, node)?,
            dice: Mutex::new(Dice::seeded(seed)),
            faults: Arc::clone(&faults),
        };
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let passage = Arc::new(passage);
        let connect = move |socket| {
            let (acceptor, passage) = (acceptor.clone(), Arc::clone(&passage));
            async move {
                let Ok(stream) = acceptor.accept(socket).await else { return };
                let service = service_fn(move |request| answer(Arc::clone(&passage), request));
                let connection = hyper::server::conn::http1::Builder::new();
                // It returns an error whenever a watch was cut.
                let _ = connection.serve_connection(TokioIo::new(stream), service).await;
            }
        };
        let server = BackgroundServer::start(|| TcpListener::from_std(listener), connect)?;
        Ok(FaultProxy { address, faults, _server: server })
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The number of injected faults.
    pub fn faults(&self) -> usize {
        self.faults.load(Ordering::Relaxed)
    }
}

type Answer = Response<Either<Full<Bytes>, CutBody>>;

async fn answer(passage: Arc<Passage>, request: Request<Incoming>) -> anyhow::Result<Answer> {
    let fault = draw(&passage, &request);
    if fault != Fault::None {
        passage.faults.fetch_add(1, Ordering::Relaxed);
    }
    match fault {
        Fault::TooMany => Ok(refusal(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests")),
        Fault::Internal => Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")),
        Fault::Conflict => Ok(refusal(StatusCode::CONFLICT, "Conflict")),
        Fault::AnswerLost => {
            pass(&passage, request).await?.into_body().collect().await?;
            Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError"))
        }
        Fault::Cut(ms) => {
            let response = pass(&passage, request).await?;
            let end = Box::pin(tokio::time::sleep(Duration::from_millis(ms)));
            Ok(response.map(|body| Either::Right(CutBody { body, end: Some(end) })))
        }
        Fault::None => Ok(pass(&passage, request).await?.map(|body| Either::Right(CutBody { body, end: None }))),
    }
}

fn draw(passage: &Passage, request: &Request<Incoming>) -> Fault {
    let mut dice = passage.dice.lock().unwrap_or_else(PoisonError::into_inner);
    let is_watch = request.uri().query().is_some_and(|query| query.contains("watch="));
    let is_change = matches!(*request.method(), Method::PUT | Method::PATCH);
    match dice.below(100) {
        0..8 => Fault::TooMany,
        8..16 => Fault::Internal,
        16..24 if is_change => Fault::Conflict,
        24..30 if !is_watch => Fault::AnswerLost,
        30..80 if is_watch => Fault::Cut(500 + 100 * u64::try_from(dice.below(100)).unwrap_or_default()),
        _ => Fault::None,
    }
}

async fn pass(passage: &Passage, request: Request<Incoming>) -> anyhow::Result<Response<Incoming>> {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    parts.uri = format!("{}{path}", passage.server).parse::<Uri>()?;
    parts.headers.remove(header::HOST);
    let body = body.collect().await?.to_bytes();
    Ok(passage.client.request(Request::from_parts(parts, Full::new(body))).await?)
}

fn refusal(code: StatusCode, reason: &str) -> Answer {
    let status = json!({
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code.as_u16(),
        "reason": reason,
        "message": "spoilt by the test",
    });
    let mut response = Response::new(Either::Left(Full::new(Bytes::from(status.to_string()))));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    if code == StatusCode::TOO_MANY_REQUESTS {
        headers.insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    response
}

/// The server's response, which may break off.
struct CutBody {
    body: Incoming,
    end: Option<Pin<Box<Sleep>>>,
}

impl Body for CutBody {
    type Data = Bytes;
    type Error = anyhow::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<anyhow::Result<Frame<Bytes>>>> {
        if let Some(end) = &mut self.end
            && end.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Some(Err(anyhow::anyhow!("cut"))));
        }
        Pin::new(&mut self.body).poll_frame(cx).map(|frame| frame.map(|frame| frame.map_err(anyhow::Error::from)))
    }
}

/// HTTP/1.1 only, so that a cut ends one watch and not a connection of many.
fn acceptor(serving: &Identity) -> anyhow::Result<TlsAcceptor> {
    let (chain, key) = load(serving)?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn client(authority: &Path, node: &Identity) -> anyhow::Result<Client<HttpsConnector<HttpConnector>, Full<Bytes>>> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&fs::read(authority)?) {
        roots.add(certificate?)?;
    }
    let (chain, key) = load(node)?;
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    let connector =
        hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(config).https_only().enable_http1().build();
    Ok(Client::builder(TokioExecutor::new()).build(connector))
}

fn load(identity: &Identity) -> anyhow::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let chain: Vec<_> = CertificateDer::pem_file_iter(&identity.certificate)?.collect::<Result<_, _>>()?;
    ensure!(!chain.is_empty(), "{} holds no certificate", identity.certificate.display());
    let key =
        PrivateKeyDer::from_pem_file(&identity.key).with_context(|| format!("read {}", identity.key.display()))?;
    Ok((chain, key))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
