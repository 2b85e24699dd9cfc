//! The TLS listener: its certificate, and its client CA.
//!
//! Owns: reloading both when their files change, versions, cipher suites and curves. Never: decides whether a client certificate is
//! valid (`certificates.rs`); clients without one are served too.
//! Upstream: `ListenAndServeKubeletServer`, `InitializeTLS`, `dynamiccertificates`.

use std::{
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::Extensions;
use rubelet_host::{fs::read_file, linux::blocking};
use rubelet_tls::{AnyPeer, KeyProof, MAX_PEM_BYTES, PemError, Stamp};
use rustix::net::sockopt;
use rustls::{
    RootCertStore, ServerConfig, SupportedProtocolVersion,
    crypto::{CryptoProvider, SupportedKxGroup, ring},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
    version::{TLS12, TLS13},
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::certificates::{CertificateAuthenticator, ClientCertificates};
use crate::server::connections::{Accept, Opened, Protocol};

/// A handshake is two round trips.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// TCP keepalive of silent peers, with Go's periods.
const ASK_AFTER: Duration = Duration::from_secs(15);
const ASK_TIMES: u32 = 9;

/// The TLS settings of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsSettings {
    /// May be missing for now: a requested certificate that is not signed yet.
    pub certificate: PathBuf,
    /// May be the same file.
    pub key: PathBuf,
    /// `clientCAFile`.
    pub client_authority: Option<PathBuf>,
    /// `tlsMinVersion`: `VersionTLS12` or empty, or `VersionTLS13`.
    pub min_version: String,
    /// `tlsCipherSuites` by name; empty means all. Those of TLS 1.3 cannot be configured.
    pub cipher_suites: Vec<String>,
    /// `tlsCurvePreferences`, as numbers of TLS; empty means all.
    pub curves: Vec<i32>,
}

/// Unsupported settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unknown {
    pub suites: Vec<String>,
    pub curves: Vec<i32>,
}

/// The settings with the current contents of their files.
#[derive(Debug)]
pub(crate) struct Tls {
    settings: TlsSettings,
    loaded: Mutex<Option<Loaded>>,
}

#[derive(Clone, Debug)]
struct Loaded {
    stamps: [Option<Stamp>; 3],
    server: Arc<ServerConfig>,
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl Tls {
    pub(crate) fn new(settings: TlsSettings) -> (Self, Unknown) {
        let known: Vec<String> = ring::ALL_CIPHER_SUITES.iter().map(|suite| suite_name(*suite)).collect();
        let suites = settings.cipher_suites.iter().filter(|name| !known.contains(name)).cloned().collect();
        let curves = settings.curves.iter().copied().filter(|curve| curve_of(*curve).is_none()).collect();
        (Tls { settings, loaded: Mutex::default() }, Unknown { suites, curves })
    }

    async fn acceptor(&self) -> io::Result<TlsAcceptor> {
        Ok(TlsAcceptor::from(self.current().await?.server))
    }

    /// The verifier of client certificates; `None` without a client CA.
    pub(crate) async fn client_verifier(&self) -> io::Result<Option<Arc<dyn ClientCertVerifier>>> {
        Ok(self.current().await?.verifier)
    }

    /// Reloads files that changed. An invalid new file leaves the old one in use.
    async fn current(&self) -> io::Result<Loaded> {
        let known = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let settings = self.settings.clone();
        let known_stamps = known.as_ref().map(|known| known.stamps);
        let read = blocking(move || {
            let stamps = settings.stamps();
            if Some(stamps) == known_stamps {
                return Ok(None);
            }
            settings.load(stamps).map(Some).map_err(io::Error::other)
        });
        let new = match (read.await, known) {
            (Ok(None), Some(known)) => return Ok(known),
            (Ok(Some(new)), _) => new,
            (Err(error), Some(known)) => {
                tracing::warn!("failed to reload TLS files, keeping the current ones: {error}");
                return Ok(known);
            }
            (Err(error), None) => return Err(error),
            (Ok(None), None) => return Err(io::Error::other("nothing was read")),
        };
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = Some(new.clone());
        Ok(new)
    }
}

impl TlsSettings {
    fn stamps(&self) -> [Option<Stamp>; 3] {
        [Some(&self.certificate), Some(&self.key), self.client_authority.as_ref()]
            .map(|path| path.map(|path| Stamp::of(path)))
    }

    fn load(&self, stamps: [Option<Stamp>; 3]) -> Result<Loaded, String> {
        let provider = Arc::new(self.provider());
        let (verifier, hints) = match &self.client_authority {
            None => (None, Vec::new()),
            Some(path) => {
                let roots = Arc::new(roots(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
                let verifier = verifier.map_err(|error| format!("{}: {error}", path.display()))?;
                (Some(verifier as Arc<dyn ClientCertVerifier>), roots.subjects())
            }
        };
        let chain = read_pem(&self.certificate, rubelet_tls::certificates).map_err(|error| match stamps[0] {
            None => "no serving certificate available for the kubelet".to_owned(),
            Some(_) => error,
        })?;
        let key = read_pem(&self.key, rubelet_tls::private_key)?;
        // A client with an unknown certificate gets a response, not an alert, and the CA may change during a connection.
        let any_client = AnyPeer::new(&provider, KeyProof::Required).with_authorities(hints);
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(self.versions())
            .map_err(|error| format!("tlsCipherSuites: {error}"))?
            .with_client_cert_verifier(Arc::new(any_client))
            .with_single_cert(chain, key)
            .map_err(|error| format!("{}: {error}", self.certificate.display()))?;
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Loaded { stamps, server: Arc::new(server), verifier })
    }

    fn provider(&self) -> CryptoProvider {
        let mut provider = ring::default_provider();
        if !self.cipher_suites.is_empty() {
            let wanted = |suite: &rustls::SupportedCipherSuite| {
                suite.tls13().is_some() || self.cipher_suites.contains(&suite_name(*suite))
            };
            provider.cipher_suites.retain(wanted);
        }
        // With no supported suite there would be no handshake at all.
        let curves: Vec<_> = self.curves.iter().filter_map(|curve| curve_of(*curve)).collect();
        if !curves.is_empty() {
            provider.kx_groups = curves;
        }
        provider
    }

    fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        const NEWEST: &[&SupportedProtocolVersion] = &[&TLS13];
        const BOTH: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];
        if self.min_version == "VersionTLS13" { NEWEST } else { BOTH }
    }
}

/// As Go and the standard call it: `TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256`.
fn suite_name(suite: rustls::SupportedCipherSuite) -> String {
    format!("{:?}", suite.suite()).replacen("TLS13_", "TLS_", 1)
}

/// By its number of TLS: 23 is P-256, 24 P-384, 29 X25519.
fn curve_of(number: i32) -> Option<&'static dyn SupportedKxGroup> {
    ring::ALL_KX_GROUPS.iter().copied().find(|group| i32::from(u16::from(group.name())) == number)
}

fn roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in read_pem(path, rubelet_tls::certificates)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(roots)
}

fn read_pem<T>(path: &Path, parse: fn(&[u8]) -> Result<T, PemError>) -> Result<T, String> {
    let text = read_file(path, MAX_PEM_BYTES).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text).map_err(|error| format!("{}: {error}", path.display()))
}

/// A port that serves TLS.
#[derive(Debug)]
pub(crate) struct TlsListener {
    pub listener: TcpListener,
    pub certificates: Arc<CertificateAuthenticator>,
}

impl Accept for TlsListener {
    type Raw = TcpStream;
    type Stream = TlsStream<TcpStream>;

    async fn accept(&self) -> io::Result<TcpStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    fn address(&self, raw: &TcpStream) -> Option<IpAddr> {
        raw.peer_addr().ok().map(|address| address.ip())
    }

    fn open(&self, raw: TcpStream) -> impl Future<Output = io::Result<Opened<Self::Stream>>> + Send + 'static {
        let certificates = self.certificates.clone();
        async move {
            // Small packets of exec and attach must not be delayed.
            raw.set_nodelay(true)?;
            // A stream may be silent for hours after its peer has disappeared.
            sockopt::set_socket_keepalive(&raw, true)?;
            sockopt::set_tcp_keepidle(&raw, ASK_AFTER)?;
            sockopt::set_tcp_keepintvl(&raw, ASK_AFTER)?;
            sockopt::set_tcp_keepcnt(&raw, ASK_TIMES)?;
            let stream = timeout(HANDSHAKE, async { certificates.tls.acceptor().await?.accept(raw).await }).await??;
            let connection = stream.get_ref().1;
            let protocol = match connection.alpn_protocol() {
                Some(b"h2") => Protocol::Http2,
                _ => Protocol::Http1,
            };
            let shown = ClientCertificates::new(connection.peer_certificates().unwrap_or_default());
            let is_authenticated = matches!(certificates.identify(&shown).await, Ok(Some(_)));
            let mut extensions = Extensions::new();
            extensions.insert(shown);
            Ok(Opened { stream, protocol, is_authenticated, extensions })
        }
    }
}
