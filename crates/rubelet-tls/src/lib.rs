//! What the TLS connections to the API server, to containers and of the kubelet's port have in common.
//!
//! Owns: certificates and keys out of PEM, when their files changed, and the verifier that takes any certificate.
//! Never: reads a file, opens a connection, shows what is in a key.

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::{os::unix::fs::MetadataExt as _, path::Path};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{self, PemObject as _},
    },
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

/// A larger file is not a certificate file.
pub const MAX_PEM_BYTES: u64 = 4 << 20;

/// Differs when a file was rewritten or replaced; `None` if it cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(Option<(u64, u64, i64, i64)>);

impl Stamp {
    /// Of the target of a link.
    pub fn of(path: &Path) -> Self {
        let found = std::fs::metadata(path).ok();
        Stamp(found.map(|found| (found.ino(), found.len(), found.mtime(), found.mtime_nsec())))
    }
}

/// To be said after the name of the file.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    #[error("holds no certificate in PEM")]
    NoCertificate,
    #[error("holds no private key in PEM")]
    NoPrivateKey,
    #[error("is not PEM: {0}")]
    Certificate(#[source] pem::Error),
    /// Without its cause, which may quote the key.
    #[error("is not PEM")]
    PrivateKey,
}

/// At least one.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let found: Vec<_> =
        CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().map_err(PemError::Certificate)?;
    if found.is_empty() { Err(PemError::NoCertificate) } else { Ok(found) }
}

/// The first one.
pub fn private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, PemError> {
    PrivateKeyDer::from_pem_slice(text).map_err(|error| match error {
        pem::Error::NoItemsFound => PemError::NoPrivateKey,
        _ => PemError::PrivateKey,
    })
}

/// Takes any certificate of a server or a client.
#[derive(Debug)]
pub struct AnyPeer {
    algorithms: WebPkiSupportedAlgorithms,
    key_proof: KeyProof,
    authorities: Vec<DistinguishedName>,
}

/// Whether a peer has to hold the key of the certificate it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyProof {
    Required,
    /// Certificates that cannot be read, such as those of X.509 version 1, are taken too.
    Ignored,
}

impl AnyPeer {
    pub fn new(provider: &CryptoProvider, key_proof: KeyProof) -> Self {
        AnyPeer { algorithms: provider.signature_verification_algorithms, key_proof, authorities: Vec::new() }
    }

    /// The authorities a client is told, so that it can choose one of its certificates.
    pub fn with_authorities(self, authorities: Vec<DistinguishedName>) -> Self {
        AnyPeer { authorities, ..self }
    }

    fn verify(&self, signature: impl FnOnce() -> Verified) -> Verified {
        match self.key_proof {
            KeyProof::Required => signature(),
            KeyProof::Ignored => Ok(HandshakeSignatureValid::assertion()),
        }
    }
}

type Verified = Result<HandshakeSignatureValid, Error>;

impl ServerCertVerifier for AnyPeer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Verified {
        self.verify(|| verify_tls12_signature(message, cert, dss, &self.algorithms))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Verified {
        self.verify(|| verify_tls13_signature(message, cert, dss, &self.algorithms))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// A client may come without a certificate.
impl ClientCertVerifier for AnyPeer {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.authorities
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Verified {
        ServerCertVerifier::verify_tls12_signature(self, message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Verified {
        ServerCertVerifier::verify_tls13_signature(self, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
