//! Authentication by client certificate.
//!
//! Owns: the verification of a connection's chain, once for all its requests, and the user it names.
//! Upstream: `apiserver/pkg/authentication/request/x509`.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rubelet_core::time::Uptime;
use rubelet_kube::error_chain;
use rustls::pki_types::{CertificateDer, UnixTime};
use sha2::{Digest as _, Sha256};

use super::{authentication::Identity, tls::Tls};
use crate::{certs::leaf::Leaf, world::Clock};

/// A chain is verified again this long after it was: it may have expired, or the client CA may be another. Upstream
/// reads the CA's file at least as often.
const VERIFY_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// The certificates of one connection. In the extensions of its requests.
#[derive(Clone, Debug)]
pub(crate) struct ClientCertificates(Arc<Shown>);

#[derive(Debug)]
struct Shown {
    chain: Vec<CertificateDer<'static>>,
    verified: Mutex<Option<Verified>>,
}

#[derive(Clone, Debug)]
struct Verified {
    at: Uptime,
    result: Result<Option<Identity>, String>,
}

impl ClientCertificates {
    pub(crate) fn new(chain: &[CertificateDer<'_>]) -> Self {
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        ClientCertificates(Arc::new(Shown { chain, verified: Mutex::default() }))
    }
}

#[derive(Debug)]
pub(crate) struct CertificateAuthenticator {
    pub tls: Arc<Tls>,
    pub clock: Clock,
}

impl CertificateAuthenticator {
    /// The user name is the certificate's common name, the groups its organizations.
    pub(crate) async fn identify(&self, shown: &ClientCertificates) -> Result<Option<Identity>, String> {
        let now = self.clock.now();
        let known = shown.0.verified.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(known) = known.filter(|known| now.uptime.since(known.at) < VERIFY_AGAIN_AFTER) {
            return known.result;
        }
        let seconds = u64::try_from(now.wall.as_second()).unwrap_or(0);
        let result = self.verify(&shown.0.chain, UnixTime::since_unix_epoch(Duration::from_secs(seconds))).await;
        let verified = Verified { at: now.uptime, result: result.clone() };
        *shown.0.verified.lock().unwrap_or_else(PoisonError::into_inner) = Some(verified);
        result
    }

    async fn verify(&self, chain: &[CertificateDer<'static>], now: UnixTime) -> Result<Option<Identity>, String> {
        let [leaf, intermediates @ ..] = chain else { return Ok(None) };
        let verifier = self.tls.client_verifier().await.map_err(|error| error.to_string())?;
        let Some(verifier) = verifier else { return Ok(None) };
        let verified = verifier.verify_client_cert(leaf, intermediates, now);
        verified.map_err(|error| format!("the client certificate: {error}"))?;
        let read = Leaf::parse(leaf).map_err(|error| error_chain(&error))?;
        if read.common_name.is_empty() {
            return Ok(None);
        }
        let credential = ("authentication.kubernetes.io/credential-id".to_owned(), vec![fingerprint(leaf)]);
        let identity = Identity {
            user: read.common_name,
            uid: String::new(),
            groups: read.organizations,
            extra: [credential].into(),
        };
        Ok(Some(identity.authenticated()))
    }
}

fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let mut text = "X509SHA256=".to_owned();
    for byte in Sha256::digest(certificate.as_ref()) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
