//! Builds the TLS configuration from a kubeconfig's PEM files.
//!
//! Owns: reading certificates and keys, and their error texts. Never: shows the content of a key.

use std::{path::Path, sync::Arc};

use rubelet_tls::{AnyPeer, KeyProof, MAX_PEM_BYTES, PemError};
use rustls::{
    ClientConfig, Error, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer},
};

use crate::kubeconfig::{ClientCertificate, Cluster, Source, Verification};

/// Names the field and the file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("`certificate-authority` is not given, and the node has no certificate authorities of its own")]
    NoAuthority,
    #[error("{field} {place}")]
    Read { field: &'static str, place: String, source: std::io::Error },
    // The cause continues the sentence.
    #[error("{field} {place} {source}")]
    Pem { field: &'static str, place: String, source: PemError },
    #[error("{field} {place}")]
    Certificate { field: &'static str, place: String, source: Error },
    #[error("client-key {key} does not belong to client-certificate {certificate}")]
    Mismatch { key: String, certificate: String },
}

/// Reads files. Errors name the field and the file.
pub(super) fn config(cluster: &Cluster, certificate: Option<&ClientCertificate>) -> Result<ClientConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("ring has what the default versions of TLS need");
    let builder = match cluster.verification {
        Verification::Required => builder.with_root_certificates(roots(cluster.certificate_authority.as_ref())?),
        // `insecure-skip-tls-verify`: accepts any server that has the key of its certificate.
        Verification::Skipped => {
            let verifier = AnyPeer::new(&provider, KeyProof::Required);
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    let mut config = match certificate {
        None => builder.with_no_client_auth(),
        Some(ClientCertificate { certificate, key }) => {
            let chain = certificates("client-certificate", certificate)?;
            builder.with_client_auth_cert(chain, private_key(key)?).map_err(|error| match error {
                Error::InconsistentKeys(_) => TlsError::Mismatch { key: place(key), certificate: place(certificate) },
                source => TlsError::Certificate { field: "client-certificate", place: place(certificate), source },
            })?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn roots(authority: Option<&Source>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let Some(source) = authority else {
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            return Err(TlsError::NoAuthority);
        }
        return Ok(roots);
    };
    let field = "certificate-authority";
    for certificate in certificates(field, source)? {
        let added = roots.add(certificate);
        added.map_err(|error| TlsError::Certificate { field, place: place(source), source: error })?;
    }
    Ok(roots)
}

fn certificates(field: &'static str, source: &Source) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = text(field, source)?;
    rubelet_tls::certificates(&text).map_err(|error| TlsError::Pem { field, place: place(source), source: error })
}

fn private_key(source: &Source) -> Result<PrivateKeyDer<'static>, TlsError> {
    let field = "client-key";
    let text = text(field, source)?;
    rubelet_tls::private_key(&text).map_err(|error| TlsError::Pem { field, place: place(source), source: error })
}

fn text(field: &'static str, source: &Source) -> Result<Vec<u8>, TlsError> {
    match source {
        Source::Data(bytes) => Ok(bytes.clone()),
        Source::File(path) => read(path).map_err(|error| TlsError::Read { field, place: place(source), source: error }),
    }
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.len() > MAX_PEM_BYTES {
        return Err(std::io::Error::other("too long to be a certificate or a key"));
    }
    std::fs::read(path)
}

fn place(source: &Source) -> String {
    match source {
        Source::File(path) => path.display().to_string(),
        Source::Data(_) => "(in the kubeconfig)".to_owned(),
    }
}
