//! Whom we trust and as whom we come: a kubeconfig's PEM files as a TLS configuration.
//!
//! Owns: reading certificates and keys, and the words for what is wrong with them. Never: shows what is in a key.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem, pem::PemObject as _},
};

use crate::kubeconfig::{ClientCertificate, Cluster, Source, Verification};

/// A certificate file of more than this is another file.
const MAX_PEM_BYTES: u64 = 4 << 20;

/// Reads files. What is wrong names the field and the file.
pub(super) fn config(cluster: &Cluster, certificate: Option<&ClientCertificate>) -> Result<ClientConfig, String> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("ring has what the default versions of TLS need");
    let builder = match cluster.verification {
        Verification::Required => builder.with_root_certificates(roots(cluster.certificate_authority.as_ref())?),
        Verification::Skipped => builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer { provider })),
    };
    let mut config = match certificate {
        None => builder.with_no_client_auth(),
        Some(ClientCertificate { certificate, key }) => {
            let chain = certificates("client-certificate", certificate)?;
            builder.with_client_auth_cert(chain, private_key(key)?).map_err(|error| match error {
                Error::InconsistentKeys(_) => {
                    format!("client-key {} does not belong to client-certificate {}", place(key), place(certificate))
                }
                error => format!("client-certificate {}: {error}", place(certificate)),
            })?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn roots(authority: Option<&Source>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let Some(source) = authority else {
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            let message =
                "`certificate-authority` is not given, and the node has no certificate authorities of its own";
            return Err(message.to_owned());
        }
        return Ok(roots);
    };
    for certificate in certificates("certificate-authority", source)? {
        roots.add(certificate).map_err(|error| format!("certificate-authority {}: {error}", place(source)))?;
    }
    Ok(roots)
}

fn certificates(field: &str, source: &Source) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = text(field, source)?;
    let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{field} {} holds no certificate in PEM", place(source))),
        Err(error) => Err(format!("{field} {} is not PEM: {error}", place(source))),
    }
}

fn private_key(source: &Source) -> Result<PrivateKeyDer<'static>, String> {
    let text = text("client-key", source)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => format!("client-key {} holds no private key in PEM", place(source)),
        _ => format!("client-key {} is not PEM", place(source)),
    })
}

fn text(field: &str, source: &Source) -> Result<Vec<u8>, String> {
    match source {
        Source::Data(bytes) => Ok(bytes.clone()),
        Source::File(path) => read(path).map_err(|error| format!("{field} {}: {error}", path.display())),
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

/// For `insecure-skip-tls-verify`: whoever answers is taken for the server, if only it has the key it shows a certificate for.
#[derive(Debug)]
struct AnyServer {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyServer {
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
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
